"""Slurm bracket syntax for host lists, in file order and with zero padding kept."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

from nest_megatron.cluster.fields import shown
from nest_megatron.errors import BadInputError, Factor

#: Largest cluster that a file may describe; more is a typing error, and expanding it would exhaust memory.
MAX_NODES = 1 << 20

_NAME = re.compile(r"[A-Za-z0-9._-]+\Z")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def expand_hosts(value: Any, *, where: str) -> tuple[str, ...]:
    """Return the host names of a text or list in Slurm bracket syntax, ``gpu[001-004,009]``.

    Several brackets per name are allowed and the last one runs fastest; zero padding is part of the name
    (format: Slurm's hostlist, research/network.md section 3).

    Raises:
        BadInputError: unbalanced brackets, a bad range, a name that no host can have, a host named twice.
    """
    entries = value if isinstance(value, list) else [value]
    names: list[str] = []
    for entry in entries:
        if not isinstance(entry, str):
            raise _error(where, entry, "a host name must be text")
        for expression in _split(entry, where):
            names.extend(_expand(expression, where, room=MAX_NODES - len(names)))
    if not names:
        raise _error(where, value, "no host is named")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise _error(where, name, "a host is named twice")
        seen.add(name)
    return tuple(names)


def _error(where: str, value: object, reason: str) -> BadInputError:
    return BadInputError("NEST-C05", f"{where}: {reason}", factors=[Factor("nodes", shown(value), where)])


def _split(text: str, where: str) -> list[str]:
    """Split at the commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise _error(where, text, "brackets do not match")
        if char == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    if depth:
        raise _error(where, text, "brackets do not match")
    return [*parts, text[start:].strip()]


def _expand(expression: str, where: str, *, room: int) -> list[str]:
    pieces = [
        [literal] if literal else _members(inside, expression, where)
        for inside, literal in _PIECE.findall(expression)
    ]
    if math.prod(len(piece) for piece in pieces) > room:
        raise _error(where, expression, f"more than {MAX_NODES} hosts")
    names = ["".join(parts) for parts in itertools.product(*pieces)]
    for name in names:
        if not _NAME.match(name):
            raise _error(where, expression, f"{shown(name)} is no host name")
    return names


def _members(inside: str, expression: str, where: str) -> list[str]:
    """Expand the content of one bracket: ``001-004,009``."""
    members: list[str] = []
    for item in inside.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item.strip(), flags=re.ASCII)
        if match is None:
            raise _error(where, expression, f"{shown(item)} is no number or range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _error(where, expression, f"range {shown(item)} runs backwards")
        if int(last) - int(first) >= MAX_NODES:
            raise _error(where, expression, f"more than {MAX_NODES} hosts")
        members.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return members
