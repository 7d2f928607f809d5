"""The operator graph of one block kind under one BlockChoice: what runs, what it moves, what it saves.

Index letters used in this room: T tokens on this rank (micro_batch * sequence / cp), h hidden, a heads,
g KV groups, d head width, f FFN width, V padded vocabulary, E experts, k top-k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nest_megatron.specs.layout import BlockChoice
from nest_megatron.specs.model import BlockKind

OperatorKind = Literal["gemm", "grouped_gemm", "attention", "memory"]
CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]
CommAxis = Literal["tp", "cp", "ep", "etp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One kernel (or fused group) of a block's forward pass on one rank.

    Args:
        m, n, k: GEMM shape; ``batch`` equal GEMMs (experts, heads).
        forward_flops, backward_flops: multiply-adds count two.
        forward_bytes, backward_bytes: HBM traffic of memory-bound work, beyond GEMM operands.
        saved_bytes: bytes kept for backward per micro-batch.
        parameters: elements held by this rank; ``expert`` ones belong to the expert optimizer group.
        module: Megatron recompute module that drops ``saved_bytes`` when it is recomputed, or "".
        transient_bytes: bytes alive only while this operator's backward runs.
    """

    name: str
    kind: OperatorKind
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    forward_flops: int = 0
    backward_flops: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    saved_bytes: int = 0
    transient_bytes: int = 0
    parameters: int = 0
    expert: bool = False
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a block.

    Args:
        num_bytes: full buffer for all-reduce, gathered size for all-gather / reduce-scatter, per-rank send
            buffer for all-to-all, message for p2p (research/network.md 1.1).
        forward, backward: how often it runs in each pass.
        backward_hidden: of the backward runs, how many hide behind half of a weight-gradient GEMM.
    """

    axis: CommAxis
    op: CollectiveOp
    num_bytes: int
    forward: int
    backward: int
    backward_hidden: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Operators that blocks of several choices share; compared by identity, so prices keep."""

    operators: tuple[Operator, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """One block kind: its operators in order, and its collectives; compared by identity, so prices keep."""

    kind: str
    parts: tuple[Part, ...]
    collectives: tuple[Collective, ...] = ()

    @property
    def operators(self) -> tuple[Operator, ...]:
        """The operators of all parts."""
        return tuple(op for part in self.parts for op in part.operators)

    @property
    def dense_parameters(self) -> int:
        """Elements that shard over the dense data-parallel group."""
        return sum(op.parameters for op in self.operators if not op.expert)

    @property
    def expert_parameters(self) -> int:
        """Elements that shard over the expert data-parallel group."""
        return sum(op.parameters for op in self.operators if op.expert)

    @property
    def forward_flops(self) -> int:
        """FLOP of one forward pass on this rank."""
        return sum(op.forward_flops for op in self.operators)

    @property
    def saved_bytes(self) -> int:
        """Bytes saved for backward with nothing recomputed."""
        return sum(op.saved_bytes for op in self.operators)

    @property
    def transient_bytes(self) -> int:
        """Largest extra working set of the backward pass: one operator runs at a time."""
        return max((op.transient_bytes for op in self.operators), default=0)

    def saved_without(self, modules: tuple[str, ...]) -> int:
        """Return the saved bytes when ``modules`` are recomputed."""
        return sum(op.saved_bytes for op in self.operators if not (op.module and op.module in modules))

    def weights(self) -> Iterator[Operator]:
        """Yield the GEMMs that own a weight, one per distinct shape of this block."""
        return (op for op in self.operators if op.parameters and op.kind in ("gemm", "grouped_gemm"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """Every block of a model under one BlockChoice: layer kinds, embedding, head."""

    choice: BlockChoice
    blocks: dict[BlockKind, Block]
    embedding: Block
    head: Block
