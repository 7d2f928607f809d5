"""Safe reading of a configuration: typed values of single keys, interpolations without global resolvers."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar_parser import parse
from omegaconf.grammar_visitor import GrammarVisitor

from nest_megatron.errors import BadInputError, Factor, nearest_names
from nest_megatron.specs.job import COMMAND_LINE, CONFIG_FILE, DEFAULT

#: Larger numbers are typing errors; the bound keeps derived tuples and products small.
MAX_INTEGER = 2**40
_MISSING = "???"
_REFERENCE = re.compile(r"^\$\{\s*(\.*[\w$\-.\[\]]+)\s*\}$", re.ASCII)

Path = tuple[str, ...]


class _Absent:
    """Marks a key that does not exist; None is a value."""


_ABSENT = _Absent()

#: Resolvers that NeMo, NeMo-Aligner and the NeMo launcher register when they start.  They are evaluated
#: here so that planning works before the application has registered its own.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "multiply": lambda *args: math.prod(args),
    "sum": lambda *args: sum(args),
    "add": lambda *args: sum(args),
    "divide_floor": lambda x, y: x // y,
    "divide_ceil": lambda x, y: -(-x // y),
    "int_div": lambda x, y: x // y,
}
#: Bounds of one evaluation: real files need fewer than ten steps.
_MAX_DEPTH = 40
_MAX_STEPS = 2_000


class ConfigView:
    """A read-only view of one configuration below ``prefix``.

    Keys are dotted and relative to the prefix; a missing key, null and ``???`` all read as None.
    """

    def __init__(
        self, config: DictConfig, *, prefix: str = "", mount: str = "", overridden: Iterable[str] = ()
    ) -> None:
        """Create the view.

        Args:
            config: is not changed.
            prefix: dotted path below which keys are looked up, with its trailing dot.
            mount: name under which the whole of ``config`` lies once its application composes it; its own
                interpolations use that name.
            overridden: full dotted keys that the command line sets.
        """
        self._config = config
        self._root: Any = _plain(config)
        self._overridden = frozenset(overridden)
        self._steps = 0
        self._mount = mount
        self.prefix = prefix

    def edited(self, edits: Mapping[str, Any]) -> ConfigView:
        """Return a view of the configuration after ``edits`` (full dotted key -> value)."""
        other = copy.copy(self)
        other._root = copy.deepcopy(self._root)
        for key, value in edits.items():
            node = other._root
            *parents, leaf = _split(key)
            for part in parents:
                node = _section(node, part)
            node[int(leaf) if isinstance(node, list) else leaf] = value
        return other

    def has(self, key: str) -> bool:
        """Return whether the key exists, whatever its value."""
        return not isinstance(self._locate(self._path(key), ())[1], _Absent)

    def value(self, key: str) -> Any:
        """Return the evaluated value; None when it is absent, null or ``???``.

        Raises:
            BadInputError: an interpolation cannot be evaluated.
        """
        self._steps = 0
        found = self._evaluate(self._path(key), ())
        return None if isinstance(found, _Absent) or found == _MISSING else found

    def integer(self, key: str, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int | None:
        """Return an integer, None when it is not given.

        Raises:
            BadInputError: another type, or outside ``minimum`` .. ``maximum``.
        """
        found = self.value(key)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int):
            raise self._wrong(key, found, "an integer")
        if not minimum <= found <= maximum:
            raise self._wrong(key, found, f"between {minimum} and {maximum}")
        return found

    def required_integer(self, key: str, *, maximum: int = MAX_INTEGER) -> int:
        """Return a positive integer.

        Raises:
            BadInputError: not given, another type, or out of range.
        """
        found = self.integer(key, maximum=maximum)
        if found is None:
            raise BadInputError(
                "NEST-D02",
                f"{self.full(key)} has no value",
                factors=[Factor(self.full(key), _MISSING if self.has(key) else "absent", self.origin(key))],
                nearest=(f"{self.full(key)}=<positive integer>",),
            )
        return found

    def number(self, key: str) -> float | None:
        """Return a finite number, None when it is not given.

        Raises:
            BadInputError: another type, or not finite.
        """
        found = self.value(key)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
            raise self._wrong(key, found, "a number")
        return float(found)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean; 0 and 1 are accepted, as the frameworks accept them.

        Raises:
            BadInputError: another type.
        """
        found = self.value(key)
        if found is None:
            return default
        if not isinstance(found, int) or found not in (0, 1):
            raise self._wrong(key, found, "true or false")
        return bool(found)

    def text(self, key: str) -> str | None:
        """Return a string, None when it is not given.

        Raises:
            BadInputError: another type.
        """
        found = self.value(key)
        if found is None or isinstance(found, str):
            return found
        raise self._wrong(key, found, "a string")

    def choice(self, key: str, allowed: tuple[str, ...]) -> str | None:
        """Return one of ``allowed``, None when it is not given.

        Raises:
            BadInputError: any other value, with the nearest allowed ones.
        """
        found = self.value(key)
        if found is None:
            return None
        if not isinstance(found, str) or found not in allowed:
            raise self._wrong(key, found, f"one of {', '.join(allowed)}", nearest_names(str(found), allowed))
        return found

    def mapping(self, key: str) -> dict[str, Any] | None:
        """Return a section with its values as stored, None when it is absent or null.

        Raises:
            BadInputError: the value is not a section.
        """
        found = self.value(key)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise self._wrong(key, found, "a section")
        return {str(name): value for name, value in found.items()}

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Return a list of integers, None when it is not given.

        Raises:
            BadInputError: not a list of integers.
        """
        found = self.value(key)
        if found is None:
            return None
        if not isinstance(found, list):
            raise self._wrong(key, found, "a list of integers")
        values = tuple(self._evaluate((*self._path(key), str(i)), ()) for i in range(len(found)))
        if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
            raise self._wrong(key, found, "a list of integers")
        return values

    def full(self, key: str) -> str:
        """Return the key from the configuration's root."""
        return f"{self.prefix}{key}"

    def source(self, key: str) -> str:
        """Return the full key that holds the value: plain references between keys of one name are followed.

        Editing this key makes every key that refers to it follow.
        """
        path = self._path(key)
        seen = [path]
        while True:
            location, raw = self._locate(path, ())
            target = _reference(raw, location)
            if target is None or target[-1] != location[-1] or target in seen:
                return ".".join(location)
            seen.append(target)
            path = target

    def is_interpolation(self, key: str) -> bool:
        """Return whether the stored value is an interpolation, so that it follows other keys by itself."""
        raw = self._locate(self._path(key), ())[1]
        return isinstance(raw, str) and "${" in raw

    def origin(self, key: str) -> str:
        """Return where the value came from: ``command line``, ``config file`` or ``default``."""
        if self.is_overridden(key):
            return COMMAND_LINE
        stored = self._locate(self._path(key), ())[1]
        unset = isinstance(stored, _Absent) or stored is None or stored == _MISSING
        return DEFAULT if unset else CONFIG_FILE

    def is_overridden(self, key: str) -> bool:
        """Return whether the command line gives this key, or the key that it refers to."""
        return bool(self._overridden & {self.full(key), self.source(key)})

    def _wrong(self, key: str, found: Any, wanted: str, nearest: tuple[str, ...] = ()) -> BadInputError:
        shown = found if isinstance(found, (int, float, bool)) else repr(found)[:60]
        return BadInputError(
            "NEST-D03",
            f"{self.full(key)} must be {wanted}",
            factors=[Factor(self.full(key), shown, CONFIG_FILE)],
            nearest=nearest,
        )

    def _path(self, key: str) -> Path:
        return _split(self.full(key))

    def _locate(self, path: Path, stack: tuple[Path, ...]) -> tuple[Path, Any]:
        """Return where ``path`` really is and its stored value; sections that are references are followed."""
        node: Any = self._root
        if self._mount and path[:1] == (self._mount,) and self._mount not in node:
            path = path[1:]
        for depth, part in enumerate(path):
            if isinstance(node, str):
                target = _reference(node, path[:depth])
                if target is None:
                    return path, _ABSENT
                return self._locate((*target, *path[depth:]), _push(stack, path[:depth]))
            node = _child(node, part)
        return path, node

    def _evaluate(self, path: Path, stack: tuple[Path, ...]) -> Any:
        path, raw = self._locate(path, stack)
        if not isinstance(raw, str) or "${" not in raw:
            return raw
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise _unreadable(path, raw, "too many interpolations depend on each other")
        stack = _push(stack, path)
        target = _reference(raw, path)
        if target is not None:
            found = self._evaluate(target, stack)
            if isinstance(found, _Absent):
                raise _unreadable(path, raw, f"{'.'.join(target)} does not exist")
            return found
        return self._expression(path, raw, stack)

    def _expression(self, path: Path, raw: str, stack: tuple[Path, ...]) -> Any:
        def node(key: Any, memo: set[int] | None = None) -> Any:
            # omegaconf 2.3 passes the text, 2.4 an object that holds it.
            text = getattr(key, "raw", key)
            found = self._evaluate(_absolute(text, path), stack)
            if isinstance(found, _Absent) or found == _MISSING:
                raise _unreadable(path, raw, f"{text} has no value")
            return found

        def resolver(name: str, args: tuple[Any, ...], args_str: tuple[str, ...]) -> Any:
            if name in _ARITHMETIC:
                if any(isinstance(arg, bool) or not isinstance(arg, (int, float)) for arg in args):
                    raise _unreadable(path, raw, f"{name} needs numbers")
                return _ARITHMETIC[name](*args)
            if name == "oc.env":
                default = args[1] if len(args) > 1 else None
                return os.environ.get(str(args[0]), None if default is None else str(default))
            if OmegaConf.has_resolver(name):
                return OmegaConf.select(self._config, ".".join(path))
            raise _unreadable(path, raw, f"the resolver {name!r} is not known before the application starts")

        try:
            visitor = GrammarVisitor(node, resolver, memo=set())
            found = visitor.visit(parse(raw))
        except BadInputError:
            raise
        except (OmegaConfBaseException, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise _unreadable(path, raw, " ".join(str(error).split())[:120] or type(error).__name__) from None
        return found


def _plain(config: DictConfig) -> Any:
    try:
        return OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    except (OmegaConfBaseException, RecursionError, ValueError) as error:
        raise BadInputError("NEST-D01", f"the configuration cannot be read: {error}") from None


def _split(key: str) -> Path:
    return tuple(part for part in re.split(r"[.\[\]]+", key) if part)


def _child(node: Any, part: str) -> Any:
    if isinstance(node, dict):
        # YAML allows integer keys; a dotted key can only name them as text.
        return node[part] if part in node else next((v for k, v in node.items() if str(k) == part), _ABSENT)
    if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
        return node[int(part)]
    return _ABSENT


def _section(node: Any, part: str) -> Any:
    """Return the section ``part`` of ``node``, created when absent or null."""
    found = _child(node, part)
    if isinstance(found, _Absent) or found is None:
        node[part] = {}
        return node[part]
    return found


def _absolute(key: str, at: Path) -> Path:
    """Return the path of an interpolation key; each leading dot climbs one section from ``at``."""
    dots = len(key) - len(key.lstrip("."))
    base = at[: max(0, len(at) - dots)] if dots else ()
    return (*base, *_split(key))


def _reference(raw: Any, at: Path) -> Path | None:
    """Return the target of ``${key}``, None for anything else."""
    match = _REFERENCE.match(raw) if isinstance(raw, str) else None
    target = _absolute(match.group(1), at) if match else ()
    return target or None


def _push(stack: tuple[Path, ...], path: Path) -> tuple[Path, ...]:
    if path in stack:
        names = " -> ".join(".".join(item) for item in (*stack[stack.index(path) :], path))
        raise BadInputError("NEST-D05", f"interpolations form a circle: {names}")
    if len(stack) >= _MAX_DEPTH:
        raise BadInputError("NEST-D05", f"interpolations are nested too deeply at {'.'.join(path)}")
    return (*stack, path)


def _unreadable(path: Path, raw: str, reason: str) -> BadInputError:
    return BadInputError(
        "NEST-D04",
        f"{'.'.join(path)} cannot be evaluated: {reason}",
        factors=[Factor(".".join(path), raw, CONFIG_FILE)],
    )
