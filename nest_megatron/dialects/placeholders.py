"""``$VAR`` and ``${VAR:-default}`` in configuration values, resolved from given assignments only."""

from __future__ import annotations

import re
from collections.abc import Mapping

from nest_megatron.errors import BadInputError, Factor, nearest_names
from nest_megatron.specs.job import CONFIG_FILE

#: ``${VAR}``, ``${VAR:-default}``, ``${VAR-default}``, ``${oc.env:VAR,default}`` and ``$VAR``.
_PLACEHOLDER = re.compile(
    r"\$\{\s*(?:oc\.env:)?(?P<braced>\w+|[@*])\s*(?:(?::?[-=]|,)(?P<default>[^{}]*))?\}|\$(?P<bare>\w+|[@*])",
    re.ASCII,
)
#: References inside references; real files need two.
_MAX_DEPTH = 20


def names_in(text: str) -> tuple[str, ...]:
    """Return the variables that ``text`` refers to."""
    return tuple(match["braced"] or match["bare"] for match in _PLACEHOLDER.finditer(text))


def is_placeholder(text: str) -> bool:
    """Return whether ``text`` is one reference and nothing else."""
    return _PLACEHOLDER.fullmatch(text.strip()) is not None


def expand(text: str, environment: Mapping[str, object]) -> str:
    """Return ``text`` with every known variable, or its default, put in; unknown ones stay as they are."""
    for _ in range(_MAX_DEPTH):
        changed = _PLACEHOLDER.sub(lambda match: _value(match, environment), text)
        if changed == text:
            return text
        text = changed
    return text


def _value(match: re.Match[str], environment: Mapping[str, object]) -> str:
    found = environment.get(match["braced"] or match["bare"])
    if found is not None and (found != "" or match["default"] is None):
        return str(found)
    return match[0] if match["default"] is None else match["default"].strip("'\"")


def resolve(text: str, environment: Mapping[str, object], *, key: str) -> str:
    """Return ``text`` without placeholders.

    Raises:
        BadInputError: a variable is assigned nowhere; the message names it and the key that needs it.
    """
    found = expand(text, environment)
    missing = names_in(found)
    if not missing:
        return found
    known = tuple(name for name in environment if name.isupper())
    raise BadInputError(
        "NEST-M01",
        f"{key} needs the variable {missing[0]}, which is not assigned in the file or in the environment",
        factors=[Factor(key, text[:80], CONFIG_FILE)],
        nearest=(f"{missing[0]}=<value> in the environment", *nearest_names(missing[0], known, count=2)),
    )
