"""JSON-shaped data <-> frozen dataclasses, with exact key and type checks that name the nearest key."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import cattrs
from cattrs.gen import make_dict_structure_fn

from nest_megatron.errors import BadInputError, Factor, nearest_names

T = TypeVar("T")


def _strict(kind: type) -> Callable[[Any, Any], Any]:
    """Return a hook that accepts ``kind`` only: cattrs would silently turn ``"x"`` into ``True``."""

    def hook(value: Any, _: Any) -> Any:
        accepted: tuple[type, ...] = (int, float) if kind is float else (kind,)
        if isinstance(value, bool) is not (kind is bool) or not isinstance(value, accepted):
            raise TypeError(f"expected {kind.__name__}, got {value!r}")
        return kind(value)

    return hook


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in (int, float, str, bool):
        converter.register_structure_hook(kind, _strict(kind))
    # A mapping keyed by int comes back from JSON with string keys.
    converter.register_structure_hook_func(
        lambda kind: kind == dict[int, float],
        lambda value, _: {int(k): float(v) for k, v in value.items()},
    )
    converter.register_structure_hook_factory(
        dataclasses.is_dataclass,
        lambda cls: make_dict_structure_fn(cls, converter, _cattrs_forbid_extra_keys=True),
    )
    return converter


_CONVERTER = _converter()


def to_plain(value: Any) -> Any:
    """Return ``value`` as dicts, lists and scalars."""
    return json.loads(json.dumps(_CONVERTER.unstructure(value)))


def from_plain(cls: type[T], plain: Any, *, source: str) -> T:
    """Build ``cls`` from plain data.

    Raises:
        BadInputError: an unknown key (with the nearest known one), a missing key, a wrong type.
    """
    try:
        return _CONVERTER.structure(plain, cls)
    except cattrs.BaseValidationError as error:
        raise BadInputError(
            "NEST-I02", f"{source} does not match the format of {cls.__name__}", factors=_explain(error, cls)
        ) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise BadInputError("NEST-I02", f"{source}: {error}") from None


def _explain(error: BaseException, cls: type) -> list[Factor]:
    """Flatten cattrs' exception tree into one factor per defect, each with its path."""
    factors: list[Factor] = []

    def visit(err: BaseException, path: str, inside: type | None) -> None:
        if isinstance(err, cattrs.ForbiddenExtraKeysError):
            known = [f.name for f in dataclasses.fields(err.cl)] if dataclasses.is_dataclass(err.cl) else []
            for key in sorted(err.extra_fields):
                close = nearest_names(key, known)
                hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
                factors.append(Factor(f"{path}.{key}".lstrip("."), "unknown key", hint))
        elif isinstance(err, cattrs.BaseValidationError):
            for sub in err.exceptions:
                notes = [str(n) for n in getattr(sub, "__notes__", ())]
                step = notes[-1] if notes else ""
                visit(sub, _step(path, step, sub), inside)
        elif isinstance(err, KeyError):
            factors.append(Factor(f"{path}.{err.args[0]}".lstrip("."), "missing"))
        else:
            factors.append(Factor(path.lstrip(".") or cls.__name__, str(err)))

    visit(error, "", cls)
    return factors


def _step(path: str, note: str, error: BaseException) -> str:
    """Extend a dotted path by the attribute or index that a cattrs note names."""
    if isinstance(error, KeyError):
        return path
    if "attribute " in note:
        return f"{path}.{note.rsplit('attribute ', 1)[1].strip()}"
    if "index " in note:
        return f"{path}[{note.rsplit('index ', 1)[1].strip()}]"
    return path


def parse_json(text: str, *, source: str) -> dict[str, Any]:
    """Return the JSON object in ``text``.

    Raises:
        BadInputError: not JSON, or not an object.
    """
    try:
        plain = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInputError("NEST-I01", f"{source} is not JSON: {error}") from None
    if not isinstance(plain, dict):
        raise BadInputError("NEST-I01", f"{source} holds a {type(plain).__name__}, not an object")
    return plain


def check_schema(plain: dict[str, Any], expected: int, *, source: str) -> None:
    """Refuse another schema version before any key is compared.

    Raises:
        BadInputError: the ``schema`` entry is absent or differs.
    """
    found = plain.get("schema")
    if found != expected:
        raise BadInputError(
            "NEST-I03",
            f"{source} has another schema than this version reads",
            factors=[Factor("schema", found, source), Factor("readable", expected, "nest_megatron")],
        )


def read_text(path: Path) -> str:
    """Return a file's text.

    Raises:
        BadInputError: the file is absent, unreadable, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError("NEST-I04", f"cannot read {path}: {error}") from None
