"""Seeded mutators: what editors, templates, copies and people do to a file, and what nobody should."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import yaml

NUMBERS = (0, -1, -(10**30), 10**9, 10**30, 2**63, 1e308, -1e-308, 0.5, math.nan, math.inf, -math.inf)
#: Values that a model or a layout may have: what survives reading reaches rules, costs and the search.
PLAUSIBLE = (1, 2, 3, 4, 5, 7, 8, 12, 16, 64, 100, 4096, True, False, None, "full", "selective", "block")
TEXTS = (
    "",
    " ",
    "null",
    "auto",
    "8 ",
    "1e3",
    "0x10",
    "1_000",
    "٤",  # an Arabic-Indic four, which int() accepts
    "é\u202e\u0000x",
    "\x1b[2J",
    "../../../../etc/passwd",
    "x" * 100_000,
    "???",
    "$",
    "${",
    "${}",
    "${nothing.here}",
    "${oc.env:NO_SUCH_VARIABLE}",
    "${unknown_resolver:1}",
    "${oc.create:{a: 1}}",
    "${..}",
    "${hydra:runtime.output_dir}",
)
TYPES: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [1],
    {"a": 1},
    [[]],
    [None],
    {"a": {"b": []}},
    "text",
    1,
    1.5,
)

Path = tuple[Any, ...]


def tree_mutators() -> dict[str, Callable[[random.Random, Any], Any]]:
    """Name -> change of one place in a parsed document."""
    return {
        "drop key": _drop,
        "wrong type": lambda rng, tree: _put(rng, tree, rng.choice(TYPES)),
        "number": lambda rng, tree: _put(rng, tree, rng.choice(NUMBERS)),
        "plausible": lambda rng, tree: _put(rng, tree, rng.choice(PLAUSIBLE)),
        "text": lambda rng, tree: _put(rng, tree, rng.choice(TEXTS)),
        "deep nesting": lambda rng, tree: _put(rng, tree, _nested(rng.choice([5, 80]))),
        "interpolation cycle": _cycle,
        "giant list": lambda rng, tree: _put(rng, tree, [rng.choice([1, "a", None])] * 2000),
        "renamed key": _rename,
        "moved value": _move,
    }


def text_mutators() -> dict[str, Callable[[random.Random, bytes], bytes]]:
    """Name -> change of the bytes of a file."""
    return {
        "truncated": lambda rng, data: data[: rng.randrange(len(data) + 1)],
        "duplicated line": _duplicate_line,
        "binary bytes": _binary,
        "byte order mark": lambda rng, data: rng.choice([b"\xef\xbb\xbf", b"\xff\xfe"]) + data,
        "tabs": lambda rng, data: data.replace(b"  ", b"\t", rng.randrange(1, 9)),
        "very deep nesting": lambda rng, data: data + b"\nx: " + b"[" * 1000 + b"]" * 1000 + b"\n",
        "alias bomb": lambda rng, data: _alias_bomb() + data,
        "python tag": lambda rng, data: data + b"\nx: !!python/object/apply:os.getcwd []\n",
        "second document": lambda rng, data: data + b"\n---\n" + data,
        "merge key": lambda rng, data: b"<<: &loop\n  <<: *loop\n" + data,
        "repeated": lambda rng, data: data * 2,
    }


def mutate(rng: random.Random, data: bytes, *, dump: Callable[[Any], str]) -> tuple[str, bytes]:
    """Return the mutations' names and the bytes after one to three of them.

    Args:
        data: a valid YAML (or JSON) document.
        dump: writes a tree back.
    """
    trees, texts = tree_mutators(), text_mutators()
    names: list[str] = []
    if rng.random() < 0.75:
        tree = yaml.safe_load(data)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            # Half of the changes are small enough to be read, and then meet rules, costs and the search.
            name = "plausible" if rng.random() < 0.5 else rng.choice(sorted(trees))
            names.append(name)
            tree = trees[name](rng, tree)
        data = dump(tree).encode()
    if not names or rng.random() < 0.15:
        name = rng.choice(sorted(texts))
        names.append(name)
        data = texts[name](rng, data)
    return " + ".join(names), data


def _paths(tree: Any, prefix: Path = ()) -> Iterator[Path]:
    items = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    for key, value in items:
        yield (*prefix, key)
        if len(prefix) < 6:
            yield from _paths(value, (*prefix, key))


def _changed(rng: random.Random, tree: Any, change: Callable[[Any, Any], None]) -> Any:
    """Return a copy in which ``change(parent, key)`` was applied at one place."""
    tree = copy.deepcopy(tree)
    places = list(_paths(tree))
    if not places:
        return tree
    *above, key = rng.choice(places)
    parent = tree
    for step in above:
        parent = parent[step]
    change(parent, key)
    return tree


def _drop(rng: random.Random, tree: Any) -> Any:
    return _changed(rng, tree, lambda parent, key: parent.pop(key))


def _put(rng: random.Random, tree: Any, value: Any) -> Any:
    return _changed(rng, tree, lambda parent, key: parent.__setitem__(key, value))


def _rename(rng: random.Random, tree: Any) -> Any:
    new = rng.choice(
        ["", "é", 1, None, True, "a.b", "a: b", "tensor_model_parallel_sise", "__class__", "_target_"]
    )

    def change(parent: Any, key: Any) -> None:
        if isinstance(parent, dict):
            parent[new] = parent.pop(key)

    return _changed(rng, tree, change)


def _move(rng: random.Random, tree: Any) -> Any:
    """Put the value of one place at another."""
    places = list(_paths(tree))
    value: Any = tree
    for step in rng.choice(places) if places else ():
        value = value[step]
    return _put(rng, tree, copy.deepcopy(value))


def _cycle(rng: random.Random, tree: Any) -> Any:
    """Let two places point at each other, or one at itself."""
    places = [".".join(map(str, path)) for path in _paths(tree)]
    if not places:
        return tree
    one, two = rng.choice(places), rng.choice(places)
    for here, there in ((one, two), (two, one)):
        tree = _at(tree, here, f"${{{there}}}")
    return tree


def _at(tree: Any, dotted: str, value: Any) -> Any:
    tree = copy.deepcopy(tree)
    *above, last = dotted.split(".")
    parent = tree
    for step in above:
        if not isinstance(parent, dict) or step not in parent:
            return tree
        parent = parent[step]
    if isinstance(parent, dict):
        parent[last] = value
    return tree


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def _duplicate_line(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True) or [b"\n"]
    index = rng.randrange(len(lines))
    return b"".join([*lines[: index + 1], *lines[index:]])


def _binary(rng: random.Random, data: bytes) -> bytes:
    cut = rng.randrange(len(data) + 1)
    return data[:cut] + rng.randbytes(rng.randint(1, 40)) + data[cut:]


def _alias_bomb() -> bytes:
    lines = ["b0: &b0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 10)}]" for n in range(1, 9)]
    return ("\n".join(lines) + "\n").encode()
