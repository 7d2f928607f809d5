"""Names of the columns that both implementations index: the contract between the caller and the solver."""

from __future__ import annotations

from enum import IntEnum

#: Recompute modes of a candidate.
RECOMPUTE_NONE, RECOMPUTE_UNIFORM, RECOMPUTE_BLOCK = 0, 1, 2


class Feature(IntEnum):
    """Counts of one pipeline rank; memory is linear in them."""

    ONE = 0  # constant per rank
    DENSE = 1  # dense layers held
    MOE = 2  # MoE layers held
    FIRST = 3  # holds the embedding
    LAST = 4  # holds the head
    ONLY_DENSE = 5  # 1 when it holds dense layers and no MoE layer
    ONLY_MOE = 6
    BOTH = 7
    LIVE_DENSE = 8  # in-flight micro-batches x plain dense layers
    LIVE_MOE = 9
    LIVE_UNITS = 10  # in-flight micro-batches x checkpointed units
    LIVE_FIRST = 11  # in-flight micro-batches of the chunk with the embedding
    UNIT_DENSE = 12  # layers of one recompute unit, when only dense layers are recomputed
    UNIT_MOE = 13
    UNIT_BOTH = 14
    LIVE_CHUNKS = 15  # in-flight chunk forwards


class Column(IntEnum):
    """Seconds (or seconds per parameter) of one node; F forward, B backward, R recompute of one layer."""

    F_DENSE = 0
    F_MOE = 1
    B_DENSE = 2
    B_MOE = 3
    R_DENSE = 4
    R_MOE = 5
    F_FIRST = 6
    B_FIRST = 7
    F_LAST = 8
    B_LAST = 9
    P2P = 10  # one hop between neighbouring ranks
    P2P_HIDDEN = 11  # share of it hidden when chunks are interleaved
    SYNC_ALPHA_DENSE = 12  # latency per bucket
    SYNC_BETA_DENSE = 13  # seconds per parameter
    SYNC_ALPHA_EXPERT = 14
    SYNC_BETA_EXPERT = 15
    BUCKET = 16  # parameters per bucket
    SYNC_HIDDEN = 17  # share that may hide behind compute
    OPTIMIZER_DENSE = 18  # seconds per parameter
    OPTIMIZER_EXPERT = 19


class Param(IntEnum):
    """Parameters per rank of one layer kind or end block."""

    DENSE_OF_DENSE = 0
    DENSE_OF_MOE = 1
    EXPERT_OF_MOE = 2
    FIRST = 3
    LAST = 4


NUM_FEATURES = len(Feature)
NUM_COLUMNS = len(Column)
NUM_PARAMS = len(Param)
