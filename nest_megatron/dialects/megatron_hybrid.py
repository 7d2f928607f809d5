"""``--hybrid-layer-pattern``: a letter per layer, ``|`` between pipeline chunks, ``/`` before an MTP depth.

Source: ``megatron/core/models/hybrid/hybrid_layer_allocation.py`` of megatron-core 0.17 and later;
``--hybrid-override-pattern`` before, without ``|``.
"""

from __future__ import annotations

from dataclasses import dataclass

from nest_megatron.dialects.megatron_arguments import Arguments
from nest_megatron.specs.model import BlockKind

_LETTERS: dict[str, BlockKind] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}
_OTHER_LETTERS = {"G": "gated delta net", "D": "sparse attention", "+": "latent attention"}
#: Longer patterns are typing errors.
_MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class HybridPattern:
    """A hybrid model's layers.

    Args:
        field: the field that gives the pattern.
        chunks: letters of each pipeline chunk, in model order; one chunk when the pattern has no ``|``.
        mtp: pattern of each multi-token-prediction depth.
    """

    field: str
    chunks: tuple[str, ...]
    mtp: tuple[str, ...]

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Kind of every layer."""
        return tuple(_LETTERS[letter] for letter in "".join(self.chunks))

    def split(self, num_layers_per_chunk: tuple[int, ...]) -> str:
        """Return the pattern with ``|`` at other places."""
        letters, parts, start = "".join(self.chunks), [], 0
        for count in num_layers_per_chunk:
            parts.append(letters[start : start + count])
            start += count
        return "/".join(("|".join(parts), *self.mtp))


def read_pattern(args: Arguments) -> HybridPattern | None:
    """Return the pattern of a hybrid model, None for any other.

    Raises:
        BadInputError: a letter that is not planned, an empty pattern, or prediction depths that differ.
    """
    field = next(
        (name for name in ("hybrid_layer_pattern", "hybrid_override_pattern") if args.has(name)), None
    )
    if field is None:
        return None
    main, *mtp = (args.text(field) or "").split("/")
    letters = "".join((main.replace("|", ""), *mtp))
    if not main.replace("|", "") or len(letters) > _MAX_LAYERS:
        raise args.wrong(field, f"one letter per layer, at most {_MAX_LAYERS}")
    for letter in letters:
        if letter in _OTHER_LETTERS:
            raise args.wrong(field, f"without {letter} ({_OTHER_LETTERS[letter]}), which is not planned yet")
        if letter not in _LETTERS:
            raise args.wrong(field, f"made of {' '.join(_LETTERS)}, | and /; it has {letter!r}")
    if len(set(mtp)) > 1:
        raise args.wrong(field, "a pattern whose prediction depths are all the same")
    return HybridPattern(field, tuple(main.split("|")), tuple(mtp))
