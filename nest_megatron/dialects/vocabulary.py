"""Vocabulary sizes of public tokenizers, from ``conf/model/vocabulary.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from nest_megatron.dialects.profiles import CONF, load_yaml
from nest_megatron.specs import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Tokenizers with one vocabulary; ``names`` are shell patterns, compared without case."""

    library: str
    names: tuple[str, ...]
    vocab_size: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """The size assumed for an unknown tokenizer of one library."""

    library: str
    vocab_size: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _VocabularyFile:
    tokenizers: tuple[Tokenizer, ...]
    assumed: tuple[Assumed, ...]


@cache
def _tables() -> _VocabularyFile:
    path = CONF / "model" / "vocabulary.yaml"
    return codec.from_plain(_VocabularyFile, load_yaml(path), source=path.name)


def known_vocab_size(library: str, name: str) -> int | None:
    """Return the vocabulary of a public tokenizer before padding, None when it is not in the table.

    Args:
        library: NeMo's ``tokenizer.library``: ``megatron``, ``huggingface`` or ``sentencepiece``.
        name: tokenizer type, or the file name of a sentencepiece model.
    """
    wanted = name.lower()
    for entry in _tables().tokenizers:
        if entry.library == library and any(fnmatchcase(wanted, pattern.lower()) for pattern in entry.names):
            return entry.vocab_size
    return None


def assumed_vocab_size(library: str) -> Assumed:
    """Return what is assumed for an unknown tokenizer; the largest size for an unknown library."""
    table = {entry.library: entry for entry in _tables().assumed}
    return table.get(library) or max(table.values(), key=lambda entry: entry.vocab_size)
