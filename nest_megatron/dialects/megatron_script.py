"""A shell or sbatch script that starts Megatron-LM, as the mapping that its test-case files use."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nest_megatron.dialects.megatron_argv import CommandLine, split_argv
from nest_megatron.dialects.megatron_flags import FLAGS
from nest_megatron.dialects.placeholders import names_in
from nest_megatron.dialects.shell_text import Shell, statements
from nest_megatron.errors import BadInputError, Factor

#: Keys of a test-case file (tests/functional_tests of NVIDIA/Megatron-LM), and the two that a script adds.
MODEL_ARGS = "MODEL_ARGS"
ENV_VARS = "ENV_VARS"
SCRIPT = "TRAINING_SCRIPT_PATH"
NOTES = "NOTES"

_SBATCH = re.compile(r"^#SBATCH\s+(.*)$", re.MULTILINE)
_REDIRECTION = re.compile(r"^[0-9&]?[<>]")
_SCRIPT_FILE = re.compile(r"\S*\.py(?![\w.])")
_SILENT = ("echo", "printf", "cat", "mkdir", "cp", "rm", "cd", "source", ".", "pip", "tee")


def looks_like_script(text: str) -> bool:
    """Return whether ``text`` starts a Python program with Megatron-LM's flags, and is not YAML."""
    if not _SCRIPT_FILE.search(text):
        return False
    words = set(re.findall(r"--([a-z][a-z0-9-]+)", text))
    return len(words & FLAGS.keys()) >= 3


def read_script(text: str, *, environment: Mapping[str, str], source: str) -> dict[str, Any]:
    """Return ``MODEL_ARGS``, ``ENV_VARS``, ``TRAINING_SCRIPT_PATH`` and ``NOTES`` of the training command.

    Args:
        environment: variables that exist before the script starts; ``${TP:-4}`` takes ``TP`` from here.

    Raises:
        BadInputError: no command of the script starts a Python program with Megatron-LM's flags, or its
            flags cannot be taken apart.
    """
    shell = Shell(environment)
    left_out: list[str] = []
    for command in statements(text, shell, left_out):
        line = _training_command(command, shell)
        if line is not None:
            return _mapping(line, text, shell, left_out)
    raise BadInputError(
        "NEST-M07",
        f"{source} starts no Python program with Megatron-LM's flags",
        factors=[Factor("not run", "; ".join(left_out) or "nothing", source)],
        nearest=("torchrun ... pretrain_gpt.py --num-layers ...",),
    )


def _training_command(command: Sequence[str], shell: Shell) -> CommandLine | None:
    """Return the command line if this command trains; a quoted command (``bash -c "..."``) is opened."""
    if command[0] in _SILENT:
        return None
    words = list(_flat(shell.words(list(command))))
    if not any(word.endswith(".py") for word in words):
        return None
    if sum(word.partition("=")[0].lstrip("-") in FLAGS for word in words if word.startswith("--")) < 3:
        return None
    return split_argv(words)


def _flat(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if _REDIRECTION.match(word):
            return
        if " " in word.strip() and _SCRIPT_FILE.search(word) and "--" in word:
            try:
                yield from _flat([part for part in shlex.split(word) if part not in (";", "&&")])
            except ValueError:
                yield word
        else:
            yield word


def _mapping(line: CommandLine, text: str, shell: Shell, left_out: list[str]) -> dict[str, Any]:
    environment = {
        name: shell.variables[name]
        for name in sorted(shell.exported)
        if name in shell.variables and not names_in(shell.variables[name])
    }
    directives = [word for match in _SBATCH.finditer(text) for word in match[1].split("#")[0].split()]
    counts = {**split_argv([*directives, "x.py"]).launcher, **line.launcher}
    # Placeholders that the script does not assign stay, so that an error can name them.
    environment.update({name: shell.expand(value) for name, value in counts.items()})
    notes = [*left_out, *(f"{word} is not set: read as empty" for word in line.unset)]
    return {MODEL_ARGS: line.arguments, ENV_VARS: environment, SCRIPT: line.script, NOTES: notes}
