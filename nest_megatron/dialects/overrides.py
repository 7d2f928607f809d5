"""Hydra's override grammar (``a=1``, ``+a=1``, ``++a=1``, ``~a``) on a configuration already loaded."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from nest_megatron.errors import BadInputError, Factor, nearest_names
from nest_megatron.specs.job import COMMAND_LINE

_ABSENT = object()
#: What ``+key`` may replace: no key, null, and a mandatory value that is still missing.
_FREE = (_ABSENT, None, "???")

#: What OmegaConf raises for values that do not fit a node; not all of it has a common base.
_MERGE_ERRORS = (OmegaConfBaseException, AssertionError, TypeError, ValueError, IndexError, RecursionError)


def apply_overrides(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return a copy of ``config`` with ``overrides`` applied in order, by the rules of Hydra 1.3.

    Two differences, because one file cannot answer what a search path can: a scalar never replaces a mapping
    (that is a config group choice), and ``~key`` also deletes a key whose value is null.

    Raises:
        BadInputError: not an override, an unknown key without ``+`` (with the nearest known keys), a sweep,
            a group choice, ``+`` on a key that exists, or ``~`` on one that does not.
    """
    result = copy.deepcopy(config)
    OmegaConf.set_struct(result, True)
    for text in overrides:
        override = parse_override(text)
        try:
            _apply(result, override)
        except (ConfigAttributeError, ConfigKeyError):
            raise _unknown_key(result, override) from None
        except _MERGE_ERRORS as error:
            reason = " ".join(str(error).split())
            raise _refusal(override, f"cannot be applied: {reason}") from None
    OmegaConf.set_struct(result, None)
    return result


def parse_override(text: str) -> Override:
    """Return the parsed override.

    Raises:
        BadInputError: ``text`` is not one ``key=value``, or asks for a sweep.
    """
    try:
        override = OverridesParser.create().parse_override(text)
        sweep = override.is_sweep_override()
        override.value()
    except (HydraException, OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInputError(
            "NEST-I12",
            f"override {text!r} is not of the form key=value: {reason}",
            factors=[Factor("override", text, COMMAND_LINE)],
        ) from None
    if not override.key_or_group:
        raise BadInputError("NEST-I12", f"override {text!r} is not of the form key=value: it has no key")
    if sweep:
        raise _refusal(override, "asks for several runs; one run is planned at a time")
    return override


def _apply(config: DictConfig, override: Override) -> None:
    key, value = override.key_or_group, override.value()
    if override.package is not None or "/" in key:
        raise _refusal(override, "chooses a config group; pass the composed file instead")
    present = _stored(config, key)
    if override.is_delete():
        _delete(config, override, present)
    elif override.is_add() or override.is_force_add():
        if override.is_add() and present not in _FREE and not isinstance(value, (dict, list)):
            raise _refusal(override, "adds a key that exists", nearest=(f"+{override.input_line}",))
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    else:
        if isinstance(present, dict) and not isinstance(value, dict) and value is not None:
            raise _refusal(override, "would replace a whole section; a group choice needs the composed file")
        OmegaConf.update(config, key, value, merge=True)


def _delete(config: DictConfig, override: Override, present: Any) -> None:
    key, value = override.key_or_group, override.value()
    if present is _ABSENT:
        raise _unknown_key(config, override)
    if value not in (None, "") and value != present:
        raise _refusal(override, f"deletes {key}={value}, but its value is {present}")
    head, _, last = key.rpartition(".")
    parent = OmegaConf.select(config, head) if head else config
    if not isinstance(parent, DictConfig):
        raise _refusal(override, "deletes an entry of a list; write the whole list instead")
    with open_dict(parent):
        del parent[last]


def _stored(config: DictConfig, key: str) -> Any:
    """Return the plain, unresolved value at ``key``, or ``_ABSENT``."""
    node: Any = OmegaConf.to_container(config, resolve=False)
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return _ABSENT
        node = node[part]
    return node


def _keys(plain: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(plain, dict):
        for name, value in plain.items():
            yield f"{prefix}{name}"
            yield from _keys(value, f"{prefix}{name}.")


def _unknown_key(config: DictConfig, override: Override) -> BadInputError:
    key = override.key_or_group
    known = tuple(_keys(OmegaConf.to_container(config, resolve=False)))
    last = key.rpartition(".")[2]
    namesakes = [name for name in known if name.rpartition(".")[2] == last]
    close = dict.fromkeys((*namesakes[:3], *nearest_names(key, known)))
    add = () if override.is_delete() else (f"+{override.input_line} adds it",)
    return BadInputError(
        "NEST-I13",
        f"override {override.input_line!r}: the configuration has no key {key!r}",
        factors=[Factor("key", key, COMMAND_LINE)],
        nearest=(*close, *add),
    )


def _refusal(override: Override, reason: str, *, nearest: Sequence[str] = ()) -> BadInputError:
    return BadInputError(
        "NEST-I14",
        f"override {override.input_line!r} {reason}",
        factors=[Factor("key", override.key_or_group, COMMAND_LINE)],
        nearest=nearest,
    )
