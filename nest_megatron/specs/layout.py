"""One parallel layout: every degree and switch that a plan decides, in Megatron's words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Sharding = Literal["none", "optim", "optim_grads", "optim_grads_params"]
Granularity = Literal["none", "selective", "full"]
RecomputeMethod = Literal["none", "uniform", "block"]
Order = Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]

#: Every axis a plan may decide; pins, bounds, rules and edits use these names.
AXES: tuple[str, ...] = (
    "tp",
    "sequence_parallel",
    "cp",
    "pp",
    "ep",
    "etp",
    "micro_batch",
    "vpp",
    "layers",
    "sharding",
    "recompute",
    "overlap",
    "order",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Activation recomputation.

    Args:
        granularity: ``selective`` recomputes ``modules``; ``full`` recomputes whole layers.
        method: ``uniform`` checkpoints every ``num_layers`` layers of a chunk; ``block`` the first
            ``num_layers`` layers of each chunk (virtual stage).
        modules: Megatron's ``recompute_modules`` for ``selective``.
    """

    granularity: Granularity = "none"
    method: RecomputeMethod = "none"
    num_layers: int = 0
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Which communication the framework is told to hide."""

    grad_reduce: bool = False
    param_gather: bool = False
    tp_comm: bool = False
    p2p: bool = False
    expert_all_to_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A complete layout, ``world = tp * pp * cp * dp``; unchecked: ``rules/`` decides legality.

    Args:
        vpp: virtual chunks per pipeline rank (1 = no interleaving).
        etp: expert tensor parallel size; ``edp`` = world / (etp * ep * pp).
        num_layers_per_chunk: length ``pp * vpp`` in model order; chunk j runs on pipeline rank ``j % pp``.
        micro_batch_group: micro-batches per interleaving group; 0 means ``pp``, Megatron's default.
        order: rank order, left fastest (research/config_surface.md 3.1).
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    edp: int = 1
    sequence_parallel: bool = False
    micro_batch: int = 1
    global_batch: int = 1
    num_layers_per_chunk: tuple[int, ...] = ()
    sharding: Sharding = "none"
    num_optimizer_instances: int = 1
    micro_batch_group: int = 0
    recompute: Recompute = field(default_factory=Recompute)
    overlap: Overlap = field(default_factory=Overlap)
    order: Order = "tp-cp-ep-dp-pp"

    @property
    def world(self) -> int:
        """Ranks this layout occupies."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step, ``m`` (floor; the batch rules demand exact division)."""
        return self.global_batch // max(1, self.micro_batch * self.dp)

    @property
    def interleaving_group(self) -> int:
        """Micro-batches that run through one chunk before the next chunk starts."""
        return self.micro_batch_group or self.pp

    def describe(self) -> str:
        """Return the short form used in tables, for example ``TP4 PP8 VPP2 DP4 mbs1 SP``."""
        parts = [f"TP{self.tp}", f"PP{self.pp}"]
        if self.vpp > 1:
            parts.append(f"VPP{self.vpp}")
        if self.cp > 1:
            parts.append(f"CP{self.cp}")
        if self.ep > 1:
            parts.append(f"EP{self.ep}")
        if self.ep > 1 or self.etp != self.tp:
            parts.append(f"ETP{self.etp}")
        parts.append(f"DP{self.dp}")
        parts.append(f"mbs{self.micro_batch}")
        if self.sequence_parallel:
            parts.append("SP")
        if self.sharding != "none":
            parts.append({"optim": "ZeRO-1", "optim_grads": "ZeRO-2"}.get(self.sharding, "ZeRO-3"))
        if self.recompute.granularity == "selective":
            parts.append("rc:" + "+".join(self.recompute.modules))
        elif self.recompute.granularity == "full":
            parts.append(f"rc:full/{self.recompute.method}{self.recompute.num_layers}")
        if self.order != "tp-cp-ep-dp-pp":
            parts.append("order:pp-dp")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """The part of a layout that changes the operators inside one block; key of a LayerGraph."""

    tp: int
    sequence_parallel: bool
    cp: int
    ep: int
    etp: int
    micro_batch: int
    recompute: Recompute

    @classmethod
    def of(cls, layout: Layout) -> BlockChoice:
        """Return the block choice of ``layout``."""
        return cls(
            tp=layout.tp,
            sequence_parallel=layout.sequence_parallel,
            cp=layout.cp,
            ep=layout.ep,
            etp=layout.etp,
            micro_batch=layout.micro_batch,
            recompute=layout.recompute,
        )
