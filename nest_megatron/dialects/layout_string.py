"""``pipeline_model_parallel_layout``: the text form of layers per pipeline chunk, read and written.

Grammar (megatron-core 0.13 and later, ``pipeline_parallel_layer_layout.py: parse_str_to_list``): ``E``
embedding, ``t`` transformer layer, ``m`` multi-token-prediction layer, ``L`` loss, ``|`` ends a segment,
``x*n`` repeats one symbol, ``(...)*n`` repeats a group (not nested), commas are decoration.  Segments are
v-major: segment i runs on pipeline rank ``i mod pp``.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from nest_megatron.errors import BadInputError, Factor

#: Bounds of an unrolled layout; longer ones are typing errors.
_MAX_SYMBOLS = 200_000
_GROUP = re.compile(r"\(([^)]+)\)\*([0-9]+)", re.ASCII)
_REPEAT = re.compile(r"(.)\*([0-9]+)", re.ASCII)
_SYMBOLS = "EtmL"


@dataclass(frozen=True, slots=True)
class Segment:
    """One pipeline chunk: its transformer and multi-token-prediction layers, and the two ends.

    Args:
        num_layers: transformer layers.
        mtp: multi-token-prediction layers.
    """

    num_layers: int
    mtp: int = 0
    embedding: bool = False
    loss: bool = False


def parse(text: str) -> tuple[Segment, ...]:
    """Return the segments of a layout string, in model order.

    Raises:
        BadInputError: an unknown symbol, a group without a count, a length out of bounds, or the embedding
            is not the first symbol of the first segment, or the loss not the last one of the last.
    """
    flat = _unrolled(text)
    unknown = sorted(set(flat) - {*_SYMBOLS, "|"})
    if unknown:
        raise _broken(
            text, f"it has {''.join(unknown)[:20]!r}; its symbols are E, t, m, L, |, *n and (...)*n"
        )
    parts = flat.split("|")
    if flat.count("E") != 1 or not parts[0].startswith("E"):
        raise _broken(text, "the embedding E must be there once, as the first symbol")
    if flat.count("L") != 1 or not parts[-1].endswith("L"):
        raise _broken(text, "the loss L must be there once, as the last symbol")
    if "mt" in flat.replace("|", ""):
        raise _broken(text, "multi-token-prediction layers m come after every transformer layer t")
    if sum("m" in part for part in parts) > 1:
        raise _broken(text, "all multi-token-prediction layers m must be in one segment")
    return tuple(
        Segment(part.count("t"), part.count("m"), embedding="E" in part, loss="L" in part) for part in parts
    )


def _unrolled(text: str) -> str:
    flat = text.replace(",", "")
    if len(flat) > _MAX_SYMBOLS:
        raise _broken(text, f"it is longer than {_MAX_SYMBOLS} characters")
    for pattern in (_GROUP, _REPEAT):
        length = len(flat)
        for match in pattern.finditer(flat):
            # A count of many digits is refused before it is read as a number.
            if len(match[2]) > 9:
                raise _broken(text, f"the count {match[2][:12]}... is too large")
            length += len(match[1]) * int(match[2])
        if length > _MAX_SYMBOLS:
            raise _broken(text, f"it unrolls to more than {_MAX_SYMBOLS} symbols")
        flat = pattern.sub(lambda found: found[1] * int(found[2]), flat)
    return flat


def _broken(text: str, reason: str) -> BadInputError:
    return BadInputError(
        "NEST-M20",
        f"the pipeline layout cannot be read: {reason}",
        factors=[Factor("pipeline_model_parallel_layout", text[:80])],
        nearest=("Et*3|(tt|)*29m|L",),
    )


def write(num_layers_per_chunk: tuple[int, ...], mtp: int = 0) -> str:
    """Return the layout string of a pipeline; ``mtp`` layers go before the loss, equal chunks are grouped.

    Raises:
        BadInputError: no chunk, or a negative count.
    """
    if not num_layers_per_chunk or min(num_layers_per_chunk) < 0 or mtp < 0:
        raise BadInputError(
            "NEST-M21",
            "a pipeline layout needs at least one chunk, and no negative count",
            factors=[Factor("num_layers_per_chunk", list(num_layers_per_chunk)), Factor("mtp", mtp)],
        )
    *bodies, last = [_repeat("t", count) for count in num_layers_per_chunk]
    tail = f"{last}{_repeat('m', mtp)}L"
    if not bodies:
        return f"E{tail}"
    text = f"E{bodies[0]}|"
    for body, group in itertools.groupby(zip(bodies[1:], num_layers_per_chunk[1:-1], strict=True)):
        text += _segments(*body, len(list(group)))
    return text + tail


def _segments(body: str, num_layers: int, times: int) -> str:
    """Return ``times`` equal segments; inside a group a repeated symbol is spelled out, as Megatron does."""
    if times == 1:
        return f"{body}|"
    # "*" binds to one symbol, so an empty segment needs no parentheses: |*3.
    return f"({'t' * num_layers}|)*{times}" if num_layers else f"|*{times}"


def _repeat(symbol: str, count: int) -> str:
    return symbol * count if count < 3 else f"{symbol}*{count}"
