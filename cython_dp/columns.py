"""Names of the columns that both implementations index: the contract between the caller and the solver."""

from __future__ import annotations

from enum import IntEnum

#: Recompute modes of a candidate.
RECOMPUTE_NONE, RECOMPUTE_UNIFORM, RECOMPUTE_BLOCK = 0, 1, 2


#: Layer kinds one model may mix; what slot k means is the caller's business.
NUM_KINDS = 4


class Feature(IntEnum):
    """Counts of one pipeline rank; memory is linear in them.  ``HELD + k`` is the slot of kind k."""

    ONE = 0  # constant per rank
    FIRST = 1  # holds the embedding
    LAST = 2  # holds the head
    ANY = 3  # holds at least one layer
    LIVE_FIRST = 4  # in-flight micro-batches of the chunk with the embedding
    LIVE_UNITS = 5  # in-flight micro-batches x checkpointed units
    LIVE_CHUNKS = 6  # in-flight chunk forwards
    LIVE_EDGES = 7  # in-flight chunk forwards that hold layers (their outputs travel on)
    HELD = 8  # layers of each kind
    LIVE = 12  # in-flight micro-batches x plain layers of each kind
    HAS = 16  # 1 when the rank holds a layer of the kind
    UNIT = 20  # layers of one recompute unit, when a layer of the kind is recomputed


class Column(IntEnum):
    """Seconds (or seconds per parameter) of one node; ``FORWARD + k`` is one layer of kind k, and so on."""

    FORWARD = 0
    BACKWARD = 4
    AGAIN = 8  # recomputation of one layer
    F_FIRST = 12
    B_FIRST = 13
    F_LAST = 14
    B_LAST = 15
    P2P = 16  # one hop between neighbouring ranks
    P2P_HIDDEN = 17  # share of it hidden when chunks are interleaved
    SYNC_ALPHA_DENSE = 18  # latency per bucket
    SYNC_BETA_DENSE = 19  # seconds per parameter
    SYNC_ALPHA_EXPERT = 20
    SYNC_BETA_EXPERT = 21
    BUCKET = 22  # parameters per bucket
    SYNC_HIDDEN = 23  # share that may hide behind compute
    OPTIMIZER_DENSE = 24  # seconds per parameter
    OPTIMIZER_EXPERT = 25


class Param(IntEnum):
    """Parameters per rank of one layer of kind k (``DENSE + k``, ``EXPERT + k``) or of an end block."""

    DENSE = 0
    EXPERT = 4
    FIRST = 8
    LAST = 9


NUM_FEATURES = 24
NUM_COLUMNS = 26
NUM_PARAMS = 10
