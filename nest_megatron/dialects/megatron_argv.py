"""A Megatron-LM command line: words to flags and back, as its argparse parser reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from nest_megatron.dialects.megatron_arguments import flag_of
from nest_megatron.dialects.placeholders import is_placeholder
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs.job import COMMAND_LINE

#: torchrun, srun and mpirun options in front of the script -> what they count.
_LAUNCHER_OPTIONS = {
    "--nproc_per_node": "GPUS_PER_NODE",
    "--nproc-per-node": "GPUS_PER_NODE",
    "--nnodes": "NUM_NODES",
    "--nodes": "NUM_NODES",
    "-N": "NUM_NODES",
    "--ntasks-per-node": "GPUS_PER_NODE",
    "--gpus-per-node": "GPUS_PER_NODE",
    "--gpus_per_node": "GPUS_PER_NODE",
    "--gres": "GPUS_PER_NODE",
    "-np": "WORLD_SIZE",
    "--ntasks": "WORLD_SIZE",
    "-n": "WORLD_SIZE",
}


@dataclass(frozen=True, slots=True)
class Item:
    """One flag of a command line with the words that belong to it.

    Args:
        flag: with its dashes, without ``=value``.
        words: the value's words; empty for a switch.
        joined: the value was given as ``--flag=value``.
    """

    flag: str
    words: tuple[str, ...]
    joined: bool = False

    @property
    def value(self) -> Any:
        """The value as a test-case file would hold it: true, one word, or a list."""
        if not self.words:
            return True
        return self.words[0] if len(self.words) == 1 else list(self.words)

    def render(self) -> list[str]:
        """Return the words of the command line."""
        return [f"{self.flag}={self.words[0]}"] if self.joined else [self.flag, *self.words]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A command line, taken apart.

    Args:
        prefix: launcher, its options and the script.
        launcher: ``NUM_NODES``, ``GPUS_PER_NODE``, ``WORLD_SIZE`` as the launcher's options say.
        unset: placeholders that stand where a flag was expected; a shell expands them to nothing.
    """

    prefix: tuple[str, ...]
    items: tuple[Item, ...]
    script: str = ""
    launcher: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """Flag -> value; the last one wins, as in argparse."""
        return {item.flag: item.value for item in self.items}


def split_argv(argv: Sequence[str]) -> CommandLine:
    """Return a command line taken apart; everything up to the first ``.py`` word belongs to the launcher.

    Raises:
        BadInputError: a word that is not text, a flag without its value, a word that belongs to no flag, or
            a flag one typing error away from a known one.
    """
    words = list(argv)
    if not all(isinstance(word, str) for word in words):
        raise BadInputError("NEST-M05", "a command line is a list of words")
    start = next((i + 1 for i, word in enumerate(words) if word.endswith(".py")), 0)
    unset: list[str] = []
    items = tuple(_items(words[start:], unset))
    return CommandLine(
        prefix=tuple(words[:start]),
        items=items,
        script=PurePath(words[start - 1]).name if start else "",
        launcher=_launcher(words[:start]),
        unset=tuple(unset),
    )


def _items(words: list[str], unset: list[str]) -> Iterator[Item]:
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if not word.startswith("--"):
            if is_placeholder(word) or not word.strip():
                unset += [word] * bool(word.strip())
                continue
            raise _stray(word)
        flag, equals, value = word.partition("=")
        entry = flag_of(flag)
        if equals:
            yield Item(flag, (value,), joined=True)
            continue
        end = i
        while end < len(words) and not words[end].startswith("--"):
            end += 1
        if entry is not None and entry.kind in ("on", "off"):
            end = i
        elif entry is not None and not entry.kind.endswith("*"):
            end = min(end, i + 1)
            if end == i:
                raise BadInputError(
                    "NEST-M06",
                    f"{flag} needs a value",
                    factors=[Factor(flag, "absent", COMMAND_LINE)],
                    nearest=(f"{flag} <{entry.kind}>",),
                )
        yield Item(flag, tuple(words[i:end]))
        i = end


def _stray(word: str) -> BadInputError:
    return BadInputError(
        "NEST-M05",
        "the command line has a word that belongs to no flag",
        factors=[Factor("word", word[:60], COMMAND_LINE)],
    )


def _launcher(words: Sequence[str]) -> dict[str, str]:
    """Return the counts among a launcher's options; ``gpu:8`` of ``--gres`` counts 8."""
    found: dict[str, str] = {}
    for i, word in enumerate(words):
        option, equals, value = word.partition("=")
        name = _LAUNCHER_OPTIONS.get(option)
        if name is None:
            continue
        if not equals and i + 1 < len(words):
            value = words[i + 1]
        value = value.rpartition(":")[2]
        if value.isdecimal() or is_placeholder(value):
            found[name] = value
    return found


def edit_argv(line: CommandLine, edits: Mapping[str, Any]) -> list[str]:
    """Return the words of the command line after ``edits``, flag -> value.

    None removes a flag, true makes it a switch; a changed flag keeps its place, a new one is appended.
    """
    items: list[Item] = []
    last = {item.flag: i for i, item in enumerate(line.items)}
    for i, item in enumerate(line.items):
        if item.flag not in edits:
            items.append(item)
        elif i == last[item.flag] and edits[item.flag] is not None:
            items.append(_edited(item.flag, edits[item.flag], joined=item.joined))
    added = ((flag, value) for flag, value in edits.items() if flag not in last and value is not None)
    items += [_edited(flag, value, joined=False) for flag, value in added]
    return [*line.prefix, *(word for item in items for word in item.render())]


def _edited(flag: str, value: Any, *, joined: bool) -> Item:
    if value is True:
        return Item(flag, ())
    words = tuple(map(str, value)) if isinstance(value, (list, tuple)) else (str(value),)
    return Item(flag, words, joined=joined and len(words) == 1)
