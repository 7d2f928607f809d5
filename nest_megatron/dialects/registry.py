"""The known dialects: by name, or by what a configuration looks like."""

from __future__ import annotations

from omegaconf import DictConfig

from nest_megatron.dialects.base import Dialect
from nest_megatron.dialects.fragments import fragment
from nest_megatron.dialects.launcher import LauncherDialect
from nest_megatron.dialects.megatron_lm import MegatronLMDialect
from nest_megatron.dialects.nemo import NemoDialect
from nest_megatron.errors import BadInputError, Factor, nearest_names

#: In the order in which they are tried; each with the sentence that says what ``detect`` looks for.
_DIALECTS: tuple[tuple[Dialect, str], ...] = (
    (LauncherDialect(), "launcher: stages and a section training, or a stage file that names ${training.}"),
    (NemoDialect(), "nemo: sections trainer and model, with model.tensor_model_parallel_size"),
    (
        MegatronLMDialect(),
        "megatron_lm: flags under MODEL_ARGS, or --yaml-cfg; a script with pretrain_gpt.py",
    ),
)


def names() -> tuple[str, ...]:
    """Return the names of all dialects."""
    return tuple(dialect.name for dialect, _ in _DIALECTS)


def detect(config: DictConfig) -> Dialect:
    """Return the dialect that ``config`` is written in.

    Raises:
        BadInputError: none fits; the message says what each dialect looks for, or what the file is.
    """
    for dialect, _ in _DIALECTS:
        if dialect.detect(config):
            return dialect
    part = fragment(config)
    if part is not None:
        raise BadInputError("NEST-D08", f"this file configures {part}; it describes no training job")
    raise BadInputError(
        "NEST-D06",
        "this configuration is in no known dialect",
        factors=[Factor("top-level keys", ", ".join(map(str, list(config)[:12])) or "none")],
        nearest=tuple(looked_for for _, looked_for in _DIALECTS),
    )


def by_name(name: str) -> Dialect:
    """Return the dialect of that name.

    Raises:
        BadInputError: there is none; the nearest names are given.
    """
    for dialect, _ in _DIALECTS:
        if dialect.name == name:
            return dialect
    raise BadInputError(
        "NEST-D07",
        f"there is no dialect {name!r}",
        factors=[Factor("known", ", ".join(names()))],
        nearest=nearest_names(name, names()),
    )
