"""Seconds of one block per micro-batch: compute, exposed communication by axis, recomputation, host floor.

Formulas: research/time_model.md section 2 (exposure of TP, CP, EP; recompute; host floor), moe.md 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nest_megatron.cluster.groups import GroupShape, group_shape
from nest_megatron.cost.collectives import CollectiveModel
from nest_megatron.cost.compute import ComputeModel, PassTime
from nest_megatron.cost.overlap import HiddenShares
from nest_megatron.graph.layer_graph import Block, Collective, LayerGraph
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import BlockChoice
from nest_megatron.specs.model import BlockKind

#: Backward host time relative to forward (time_model.md section 2, "Host floor").
BACKWARD_HOST_FACTOR = 1.2
#: Share of a sequence-parallel gather for the weight gradient that stays exposed.
WGRAD_GATHER_EXPOSED = 0.5
#: Usable share of a compute window that hides communication (network.md section 5, eta).
WINDOW_USE = 0.9
#: Recompute module -> prefix of the operators whose forward pass runs again.
MODULE_OPERATORS = {
    "core_attn": ("attention_core", "cross_core"),
    "layernorm": ("input_norm", "pre_mlp_norm", "pre_cross_norm"),
    "mlp": ("mlp_",),
    "moe": ("router", "permute", "expert_", "shared_expert"),
    "moe_act": ("expert_activation",),
    "shared_experts": ("shared_expert",),
    "mla_up_proj": ("kv_up", "q_up"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTime:
    """Seconds of one block and micro-batch.

    Attributes:
        forward_s, backward_s: everything on the critical path, selective recomputation included.
        recompute_s: one more forward pass, paid when the layer is fully recomputed.
        parts_s: term -> seconds; they sum to ``forward_s + backward_s``.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    parts_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTime:
    """Times of every block of a LayerGraph."""

    layers: dict[BlockKind, BlockTime]
    embedding: BlockTime
    head: BlockTime


class BlockPricer:
    """Prices blocks of one job on one cluster; rank order puts tp innermost, then cp, then dp."""

    def __init__(self, job: TrainJob, cluster: Cluster) -> None:
        self.job = job
        self.cluster = cluster
        self.compute = ComputeModel(cluster.accelerator, job)
        self.collectives = CollectiveModel(cluster)
        self._groups: dict[tuple[int, int], GroupShape] = {}

    def group(self, size: int, stride: int) -> GroupShape:
        """Return the shape of the groups {start + i * stride}; hashing a cluster is slow."""
        key = (size, stride)
        if key not in self._groups:
            self._groups[key] = group_shape(self.cluster, size, stride)
        return self._groups[key]

    def graph(self, graph: LayerGraph, hidden: HiddenShares) -> GraphTime:
        """Return the time of each block of ``graph``."""
        return GraphTime(
            layers={kind: self._layer(graph, kind, hidden) for kind in graph.blocks},
            embedding=self._block(graph.embedding, graph.choice, hidden, host_s=0.0),
            head=self._block(graph.head, graph.choice, hidden, host_s=0.0),
        )

    def _layer(self, graph: LayerGraph, kind: BlockKind, hidden: HiddenShares) -> BlockTime:
        block = graph.blocks[kind]
        profile = self.job.profile
        host_s = 0.0 if self.job.kernels.cuda_graphs else profile.host_floor_s
        if kind == "moe":
            host_s *= profile.moe_host_factor
        return self._block(block, graph.choice, hidden, host_s=host_s)

    def _block(self, block: Block, choice: BlockChoice, hidden: HiddenShares, *, host_s: float) -> BlockTime:
        compute = self.compute.block(block)
        again = self._selective_recompute(block, choice)
        comm = self._communication(block, choice, hidden, compute)
        forward = compute.forward_s + sum(t.forward_s for t in comm.values())
        backward = compute.backward_s + again + sum(t.backward_s for t in comm.values())
        wait = max(0.0, host_s - forward) + max(0.0, BACKWARD_HOST_FACTOR * host_s - backward)
        parts = {"compute": compute.forward_s + compute.backward_s, "recompute": again, "host": wait}
        parts.update({axis: t.forward_s + t.backward_s for axis, t in comm.items()})
        forward = max(forward, host_s)
        return BlockTime(
            forward_s=forward,
            backward_s=max(backward, BACKWARD_HOST_FACTOR * host_s),
            recompute_s=forward,
            parts_s={name: seconds for name, seconds in parts.items() if seconds},
        )

    def _selective_recompute(self, block: Block, choice: BlockChoice) -> float:
        if choice.recompute.granularity != "selective":
            return 0.0
        prefixes = tuple(p for module in choice.recompute.modules for p in MODULE_OPERATORS.get(module, ()))
        return sum(
            self.compute.operator(op).forward_s for op in block.operators if op.name.startswith(prefixes)
        )

    def _communication(
        self, block: Block, choice: BlockChoice, hidden: HiddenShares, compute: PassTime
    ) -> dict[str, PassTime]:
        """Return the exposed seconds per axis; ``etp`` counts as ``ep``."""
        total: dict[str, PassTime] = {}
        for collective in block.collectives:
            seconds = self._collective_s(collective, choice)
            if collective.axis == "cp":
                exposed = self._ring(block, collective, choice, seconds)
            elif collective.axis == "tp":
                exposed = self._tensor(collective, choice, seconds, hidden, compute)
            else:
                exposed = PassTime(
                    collective.forward * (1 - hidden.ep) * seconds,
                    collective.backward * (1 - hidden.ep) * seconds,
                )
            axis = "ep" if collective.axis == "etp" else collective.axis
            total[axis] = total.get(axis, PassTime(0.0, 0.0)) + exposed
        return total

    def _collective_s(self, collective: Collective, choice: BlockChoice) -> float:
        size, stride = {
            "tp": (choice.tp, 1),
            "cp": (choice.cp, choice.tp),
            "ep": (choice.ep, choice.etp),
            "etp": (choice.etp, 1),
        }[collective.axis]
        group = self.group(size, stride)
        return self.collectives.time_s(collective.op, collective.num_bytes, group)

    def _tensor(
        self,
        collective: Collective,
        choice: BlockChoice,
        seconds: float,
        hidden: HiddenShares,
        compute: PassTime,
    ) -> PassTime:
        """Return what TP communication leaves exposed: the share not hidden, or beyond the GEMMs.

        Userbuffers need one NVLink domain.  In the backward pass only the weight-gradient half of the GEMMs
        is independent of the communication (network.md section 5).
        """
        inside = self.group(choice.tp, 1).num_domains == 1
        forward = collective.forward * seconds
        plain = collective.backward - collective.backward_hidden
        backward = (plain + WGRAD_GATHER_EXPOSED * collective.backward_hidden) * seconds
        forward_share = hidden.tp_forward if inside else 0.0
        return PassTime(
            max(forward * (1 - forward_share), forward - WINDOW_USE * compute.forward_s),
            max(backward * (1 - hidden.tp_backward), backward - WINDOW_USE * compute.backward_s / 2),
        )

    def _ring(self, block: Block, ring: Collective, choice: BlockChoice, step_s: float) -> PassTime:
        """Return what ring attention leaves exposed: each step hides behind one chunk's attention."""
        core = next(op for op in block.operators if op.kind == "attention")
        attention = self.compute.operator(core)
        steps = choice.cp - 1
        return PassTime(
            steps * max(0.0, step_s - attention.forward_s / choice.cp),
            steps * max(0.0, ring.backward / ring.forward * step_s - attention.backward_s / choice.cp),
        )
