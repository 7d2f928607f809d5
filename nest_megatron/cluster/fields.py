"""Typed reading of YAML mappings: exact keys, exact types, finite ranges; every defect names key and file."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import yaml

from nest_megatron.errors import BadInputError, Factor, nearest_names


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe loader that refuses a key written twice: YAML would silently keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} is written twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)


def shipped_folder(kind: str) -> Traversable:
    """Return the folder ``conf/<kind>`` of the installed package."""
    return files("nest_megatron").joinpath("conf", kind)


def shipped_names(kind: str) -> tuple[str, ...]:
    """Return the stems of the YAML files in ``conf/<kind>``, sorted."""
    names = (entry.name for entry in shipped_folder(kind).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def shipped_text(kind: str, name: str) -> str:
    """Return the text of ``conf/<kind>/<name>.yaml``.

    Raises:
        BadInputError: no such file; names the nearest ones.
    """
    known = shipped_names(kind)
    if name not in known:
        raise BadInputError(
            "NEST-C01",
            f"no {kind} of this name is shipped",
            factors=[Factor(kind, shown(name)), Factor("known", ", ".join(known))],
            nearest=nearest_names(name[:100], known)
            or [other for other in known if name and other.startswith(name)],
        )
    return shipped_folder(kind).joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def parse_yaml(text: str, *, where: str) -> dict[str, Any]:
    """Return the YAML mapping in ``text``.

    Raises:
        BadInputError: not YAML, a key written twice, or not a mapping with text keys.
    """
    return as_mapping(load_yaml(text, where=where), where=where)


def load_yaml(text: str, *, where: str) -> Any:
    """Return whatever YAML ``text`` holds.

    Raises:
        BadInputError: not YAML, or a key written twice.
    """
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInputError("NEST-C02", f"{where} is not readable YAML: {reason}") from None


def as_mapping(value: Any, *, where: str) -> dict[str, Any]:
    """Return ``value`` if it is a mapping with text keys.

    Raises:
        BadInputError: otherwise.
    """
    if not isinstance(value, dict):
        raise BadInputError(
            "NEST-C03", f"{where} must be a mapping", factors=[Factor("found", shown(value), where)]
        )
    for key in value:
        if not isinstance(key, str):
            raise BadInputError(
                "NEST-C03", f"{where} has a key that is no text", factors=[Factor("key", shown(key))]
            )
    return value


def shown(value: object) -> str:
    """Return a short repr for an error text; a hostile file may hold anything."""
    return reprlib.repr(value)


@dataclass(frozen=True, slots=True)
class Fields:
    """One mapping of a file, its keys checked, its values read with type and range.

    Args:
        where: file, and place inside it, for messages.
    """

    values: dict[str, Any]
    where: str

    @classmethod
    def checked(
        cls, value: Any, where: str, *, required: Iterable[str], optional: Iterable[str] = ()
    ) -> Fields:
        """Return the fields of ``value``.

        Raises:
            BadInputError: not a mapping, an unknown key (with the nearest known one), a missing key.
        """
        values = as_mapping(value, where=where)
        required = tuple(required)
        known = (*required, *optional)
        factors: list[Factor] = []
        nearest: list[str] = []
        for key in values:
            if key not in known:
                close = nearest_names(key[:100], known)  # the search is quadratic in the length
                factors.append(Factor(shown(key)[1:-1], "unknown key", where))
                nearest.extend(close[:1])
        factors += [Factor(key, "missing", where) for key in required if key not in values]
        if factors:
            raise BadInputError("NEST-C03", f"{where} has wrong keys", factors=factors, nearest=nearest)
        return cls(values, where)

    def has(self, key: str) -> bool:
        """Return whether the optional ``key`` is given."""
        return key in self.values

    def fail(self, key: str, expected: str) -> BadInputError:
        """Return the error for a value that is not what the key needs."""
        value = self.values.get(key)
        return BadInputError(
            "NEST-C04",
            f"{self.where}: {key} must be {expected}",
            factors=[Factor(key, shown(value), self.where)],
        )

    def number(
        self, key: str, *, above: float | None = None, at_least: float | None = None, at_most: float
    ) -> float:
        """Return a finite number inside the range; a bool or a text is no number."""
        low = f"above {above:g}" if above is not None else f"at least {at_least:g}"
        expected = f"a number {low} and at most {at_most:g}"
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, expected)
        if not math.isfinite(value) or value > at_most:
            raise self.fail(key, expected)
        if (above is not None and value <= above) or (at_least is not None and value < at_least):
            raise self.fail(key, expected)
        return float(value)

    def integer(self, key: str, *, at_most: int, at_least: int = 1) -> int:
        """Return a whole number inside the range."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise self.fail(key, f"a whole number from {at_least} to {at_most}")
        return value

    def text(self, key: str) -> str:
        """Return a non-empty text."""
        value = self.values.get(key)
        if not isinstance(value, str) or not value.strip():
            raise self.fail(key, "a text")
        return value

    def flag(self, key: str) -> bool:
        """Return true or false."""
        value = self.values.get(key)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def items(self, key: str) -> list[Any]:
        """Return a list."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.fail(key, "a list")
        return value


def sourced_values(plain: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return key -> value of a file whose every entry is ``{value: .., source: ".."}``.

    Raises:
        BadInputError: an entry lacks its value or its source.
    """
    result: dict[str, Any] = {}
    for key, entry in plain.items():
        fields = Fields.checked(entry, f"{where}: {key}", required=("value", "source"))
        fields.text("source")
        result[key] = fields.values["value"]
    return result
