"""Edits as strings of Hydra's override grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from nest_megatron.errors import Factor, PlannerFault


def override_strings(edits: Mapping[str, Any]) -> list[str]:
    """Return ``++key=value`` per edit; Hydra's parser gives exactly the same values back.

    Raises:
        PlannerFault: a value has a type that the grammar cannot carry.
    """
    return [f"++{key}={_render(key, value)}" for key, value in edits.items()]


def _render(key: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        # Always quoted: bare `null`, `1e3` or `a,b` would change type or start a sweep.
        return QuotedString(text=value, quote=Quote.single).with_quotes()
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_render(key, item) for item in value) + "]"
    raise PlannerFault(
        "NEST-L02", "an edit cannot be written as an override", factors=[Factor(key, type(value).__name__)]
    )
