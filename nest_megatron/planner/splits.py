"""Layer counts per chunk worth trying, in the forms that ``rules.layers.split_form`` can write.

Chunk j of pp * vpp runs on pipeline rank j % pp.  The legality rules keep the splits that a dialect can
write.
"""

from __future__ import annotations

from functools import lru_cache

Split = tuple[int, ...]

#: Most layers by which the first or the last chunk of an interleaved pipeline is lighter than the largest.
LIGHTER_ENDS = 4


def even_split(num_layers: int, pieces: int) -> Split:
    """Return counts that differ by at most one; the first chunks, which hold more in flight, get fewer."""
    each, rest = divmod(num_layers, pieces)
    return (each,) * (pieces - rest) + (each + 1,) * rest


@lru_cache(maxsize=4096)
def written_splits(num_layers: int, pp: int, vpp: int, *, ends: bool) -> tuple[Split, ...]:
    """Return the even split, those with a layer's slot for embedding or loss, and those with their own ends.

    Args:
        ends: first and last stage may hold any number of layers, the same in each of their chunks.
    """
    found: dict[Split, None] = {}
    chunks = pp * vpp
    if num_layers % chunks == 0:
        found[(num_layers // chunks,) * chunks] = None
    for slots_first, slots_last in ((1, 1), (0, 1), (1, 0)):
        slots = num_layers + slots_first + slots_last
        if chunks > 1 and slots % chunks == 0 and slots // chunks > 1:
            each = slots // chunks
            found[(each - slots_first, *([each] * (chunks - 2)), each - slots_last)] = None
    if ends and pp > 1:
        for stages in _own_ends(num_layers, pp, vpp):
            found[tuple(stages[j % pp] // vpp for j in range(chunks))] = None
    return tuple(found)


def _own_ends(num_layers: int, pp: int, vpp: int) -> list[Split]:
    """Return the layers per stage of every split whose middle stages are equal, all multiples of ``vpp``."""
    if pp == 2:
        return [(first, num_layers - first) for first in range(vpp, num_layers, vpp)]
    found = []
    for middle in range(vpp, num_layers, vpp):
        rest = num_layers - (pp - 2) * middle
        for first in range(vpp, rest, vpp):
            if (rest - first) % vpp == 0:
                found.append((first, *([middle] * (pp - 2)), rest - first))
    return found


@lru_cache(maxsize=4096)
def balanced_splits(num_layers: int, pp: int, vpp: int) -> tuple[Split, ...]:
    """Return splits of an interleaved pipeline: middle chunks differ by one layer at most.

    The spare layers go to the later chunks of the middle stages first: they hold fewer activations, and the
    ends also hold embedding and head.
    """
    chunks = pp * vpp
    most = -(-num_layers // chunks)
    found: dict[Split, None] = {}
    for last in range(most, max(0, most - LIGHTER_ENDS) - 1, -1):
        for first in range(most, max(0, most - LIGHTER_ENDS) - 1, -1):
            each, spare = divmod(num_layers - first - last, chunks - 2)
            if each < 0 or max(first, last) > each + (spare > 0):
                continue
            sizes = [first, *([each] * (chunks - 2)), last]
            for j in _spare_order(pp, vpp)[:spare]:
                sizes[j] += 1
            found[tuple(sizes)] = None
    return tuple(found)


@lru_cache(maxsize=4096)
def _spare_order(pp: int, vpp: int) -> list[int]:
    """Return the chunks between the ends, later ones of a stage first, middle stages before the ends."""
    ranks = [*range(pp - 2, 0, -1), pp - 1, 0] if pp > 1 else [0]
    order = [chunk * pp + rank for chunk in range(vpp - 1, -1, -1) for rank in ranks]
    return [j for j in order if 0 < j < pp * vpp - 1]
