"""The arguments of one Megatron-LM run by field name, typed, with placeholders, defaults and origins."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from nest_megatron.dialects.megatron_flags import BY_FIELD, FLAGS, Flag, Release, default_of
from nest_megatron.dialects.placeholders import names_in, resolve
from nest_megatron.errors import BadInputError, Factor, nearest_names
from nest_megatron.specs.job import COMMAND_LINE, CONFIG_FILE, DEFAULT

#: Larger numbers are typing errors; the bound keeps derived tuples and products small.
MAX_INTEGER = 2**40
_INTEGER = re.compile(r"^[+-]?[0-9]{1,18}$", re.ASCII)
#: What a YAML value or an environment variable may say for a switch.
_WORDS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Given:
    """One argument as written.

    Args:
        raw: text, number, boolean or list; may hold placeholders.
        key: what messages call it: the flag, or the full dotted key.
    """

    raw: Any
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What one run is told; fields are named as in Megatron-LM's ``args``.

    Args:
        given: field -> argument as written; absent and null arguments are not in it.
        environment: variable -> value, for placeholders.
        script: training script, empty when it is not known.
        release: megatron-core release whose defaults apply.
        overridden: dotted keys that the command line of this tool sets.
        spelling: field -> key for a field that is not given; how an absent argument is named.
    """

    given: Mapping[str, Given]
    environment: Mapping[str, object] = field(default_factory=dict)
    script: str = ""
    release: Release = (0, 16)
    overridden: frozenset[str] = frozenset()
    spelling: Mapping[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Return whether the field is given."""
        return name in self.given

    def key(self, name: str) -> str:
        """Return what messages call the field."""
        if name in self.given:
            return self.given[name].key
        return self.spelling.get(name, f"--{BY_FIELD[name].name}")

    def origin(self, name: str) -> str:
        """Return where the value came from: ``command line``, ``config file`` or ``default``."""
        if name not in self.given:
            return DEFAULT
        return COMMAND_LINE if self.is_overridden(name) else CONFIG_FILE

    def is_overridden(self, name: str) -> bool:
        """Return whether the command line sets this key, or a variable that its value refers to."""
        if name not in self.given:
            return False
        argument = self.given[name]
        variables = names_in(argument.raw) if isinstance(argument.raw, str) else ()
        keys = {argument.key, *(f"ENV_VARS.{variable}" for variable in variables)}
        return bool(self.overridden & keys)

    def flag(self, name: str) -> bool:
        """Return a switch; an ``off`` flag without a value sets its field to false.

        Raises:
            BadInputError: the flag has a value that is neither true nor false.
        """
        if name not in self.given:
            return bool(default_of(name, self.release))
        argument, entry = self.given[name], BY_FIELD[name]
        value = argument.raw
        if isinstance(value, str):
            value = _WORDS.get(self._text(argument).lower())
        if not isinstance(value, (bool, int)) or value not in (0, 1):
            raise self._wrong(argument, "a switch without a value (true in YAML)")
        # A dotted key names the field itself, a flag of kind "off" its opposite.
        inverted = entry.kind == "off" and argument.key.rpartition(".")[2].startswith("--")
        return bool(value) != inverted

    def integer(self, name: str, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int | None:
        """Return an integer, or the flag's default.

        Raises:
            BadInputError: another type, outside ``minimum`` .. ``maximum``, or an unassigned variable.
        """
        if name not in self.given:
            default = default_of(name, self.release)
            return default if isinstance(default, int) else None
        argument = self.given[name]
        return self._integer(argument, argument.raw, minimum, maximum)

    def required_integer(self, name: str, *, maximum: int = MAX_INTEGER) -> int:
        """Return a positive integer.

        Raises:
            BadInputError: not given, another type, or out of range.
        """
        found = self.integer(name, maximum=maximum)
        if found is None:
            key = self.key(name)
            raise BadInputError(
                "NEST-M02",
                f"{key} is not given, and Megatron-LM has no default for it",
                factors=[Factor(key, "absent", DEFAULT)],
                nearest=(f"{key} <positive integer>",),
            )
        return found

    def number(self, name: str) -> float | None:
        """Return a finite number, or the flag's default.

        Raises:
            BadInputError: another type, or not finite.
        """
        if name not in self.given:
            default = default_of(name, self.release)
            return float(default) if isinstance(default, (int, float)) else None
        argument = self.given[name]
        value = self._text(argument) if isinstance(argument.raw, str) else argument.raw
        try:
            found = float("nan") if isinstance(value, (bool, list)) else float(value)
        except (TypeError, ValueError):
            found = math.nan
        if not math.isfinite(found):
            raise self._wrong(argument, "a number")
        return found

    def text(self, name: str) -> str | None:
        """Return a value as text, or the flag's default.

        Raises:
            BadInputError: a list, or an unassigned variable.
        """
        if name not in self.given:
            default = default_of(name, self.release)
            return default if isinstance(default, str) else None
        argument = self.given[name]
        if isinstance(argument.raw, (list, dict, bool)):
            raise self._wrong(argument, "one value")
        return self._text(argument)

    def choice(self, name: str, allowed: tuple[str, ...]) -> str | None:
        """Return one of ``allowed``, or the flag's default.

        Raises:
            BadInputError: any other value, with the nearest allowed ones.
        """
        found = self.text(name)
        if found is not None and found not in allowed:
            raise self._wrong(
                self.given[name], f"one of {', '.join(allowed)}", nearest_names(found, allowed) or allowed
            )
        return found

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return several words: a YAML list, ``[a b]`` as Megatron-LM's test cases write it, or one string.

        Raises:
            BadInputError: an entry that is not a word, or an unassigned variable.
        """
        if name not in self.given:
            return None
        argument = self.given[name]
        entries = argument.raw if isinstance(argument.raw, list) else [argument.raw]
        if any(isinstance(entry, (list, dict, bool)) or entry is None for entry in entries):
            raise self._wrong(argument, "a list of words")
        joined = " ".join(
            resolve(str(entry), self.environment, key=argument.key) for entry in entries
        ).strip()
        if joined.startswith("[") and joined.endswith("]"):
            joined = joined[1:-1]
        return tuple(word.strip("'\"") for word in joined.replace(",", " ").split())

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Return several integers, None when not given.

        Raises:
            BadInputError: an entry that is not an integer.
        """
        words = self.texts(name)
        if words is None:
            return None
        return tuple(self._integer(self.given[name], word, 0, MAX_INTEGER) for word in words)

    def wrong(self, name: str, wanted: str, nearest: tuple[str, ...] = ()) -> BadInputError:
        """Return the error for a given field whose value has no meaning."""
        return self._wrong(self.given[name], wanted, nearest)

    def factor(self, name: str) -> Factor:
        """Return the field as a factor of an error: its key, its value as written, its origin."""
        value = self.given[name].raw if name in self.given else default_of(name, self.release)
        return Factor(self.key(name), str(value)[:60], self.origin(name))

    def _integer(self, argument: Given, value: Any, minimum: int, maximum: int) -> int:
        if isinstance(value, str):
            value = resolve(value, self.environment, key=argument.key).strip()
            if _INTEGER.match(value):
                value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(argument, "an integer")
        if not minimum <= value <= maximum:
            raise self._wrong(argument, f"between {minimum} and {maximum}")
        return value

    def _text(self, argument: Given) -> str:
        return resolve(str(argument.raw), self.environment, key=argument.key).strip()

    def _wrong(self, argument: Given, wanted: str, nearest: tuple[str, ...] = ()) -> BadInputError:
        return BadInputError(
            "NEST-M03",
            f"{argument.key} must be {wanted}",
            factors=[Factor(argument.key, str(argument.raw)[:60], CONFIG_FILE)],
            nearest=nearest,
        )


@lru_cache(maxsize=4096)
def flag_of(name: str) -> Flag | None:
    """Return the table's entry of a flag, with or without dashes; None when the table has none.

    Raises:
        BadInputError: the name is a flag that is read here, shortened by a word or misspelt; Megatron-LM
            would refuse it (it accepts no abbreviations).
    """
    bare = name.lstrip("-")
    entry = FLAGS.get(bare)
    if entry is None and bare not in _NEIGHBOURS:
        meant = [known for known in nearest_names(bare, _DECISIVE) if _misspells(bare, known)]
        if meant:
            raise BadInputError(
                "NEST-M04",
                f"--{bare} is not a flag of Megatron-LM",
                factors=[Factor(f"--{bare}", "unknown flag", CONFIG_FILE)],
                nearest=(f"--{meant[0]}",),
            )
    return entry


_DECISIVE = tuple(name for name, flag in FLAGS.items() if flag.decides not in ("note", "refusal"))
#: Real flags that are not read here and are spelt almost like one that is (0.8 to 0.19).
_NEIGHBOURS = frozenset({"fp4-param-gather", "fp4-recipe", "vocab-file"})
_MAX_LETTERS = 2


def _misspells(name: str, known: str) -> bool:
    """Return whether ``name`` is ``known`` without one word, or with one or two letters changed."""
    words, wanted = name.replace("_", "-").split("-"), known.split("-")
    if len(wanted) == len(words) + 1 >= 3:
        return any(wanted[:i] + wanted[i + 1 :] == words for i in range(len(wanted)))
    return len(words) == len(wanted) and _edits(name.replace("_", "-"), known) <= _MAX_LETTERS


def _edits(a: str, b: str) -> int:
    """Return the Levenshtein distance."""
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (left != right))
    return row[-1]
