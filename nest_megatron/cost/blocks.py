"""Seconds of one block per micro-batch: compute, exposed communication by axis, recomputation, host floor.

Formulas: research/time_model.md section 2 (exposure of TP and CP; recompute), moe.md section 3 items 2 and 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nest_megatron.cluster.groups import GroupShape, group_shape
from nest_megatron.cost.collectives import CollectiveModel
from nest_megatron.cost.compute import ComputeModel, PassTime
from nest_megatron.cost.dispatch import DispatchModel
from nest_megatron.cost.host import BACKWARD_HOST_FACTOR, EXPERT_KINDS, host_floor_s
from nest_megatron.cost.overlap import HiddenShares
from nest_megatron.graph.layer_graph import Block, Collective, LayerGraph, Operator
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import BlockChoice, Recompute
from nest_megatron.specs.model import BlockKind

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
        self.time = job.profile.time
        self.compute = ComputeModel(cluster.accelerator, job)
        self.collectives = CollectiveModel(cluster)
        self.dispatch = DispatchModel(cluster, self.time)
        self._groups: dict[tuple[int, int], GroupShape] = {}
        self._collectives_s: dict[tuple[str, int, int, int], float] = {}
        self._shared: dict[tuple[Block, int, int, Recompute, HiddenShares], BlockTime] = {}

    def group(self, size: int, stride: int) -> GroupShape:
        """Return the shape of the groups {start + i * stride}; hashing a cluster is slow."""
        key = (size, stride)
        if key not in self._groups:
            self._groups[key] = group_shape(self.cluster, size, stride)
        return self._groups[key]

    @property
    def groups(self) -> dict[tuple[int, int], GroupShape]:
        """(size, stride) -> shape of every group that a price asked for so far."""
        return dict(self._groups)

    def assume(self, groups: Mapping[tuple[int, int], GroupShape]) -> None:
        """Price with these shapes instead of those of the cluster's own rank order (bounds of rank maps)."""
        self._groups.update(groups)
        self._collectives_s.clear()
        self._shared.clear()

    def graph(self, graph: LayerGraph, hidden: HiddenShares) -> GraphTime:
        """Return the time of each block of ``graph``; multi-token prediction counts as part of the head."""
        layers = {kind: self._layer(graph, kind, hidden) for kind in graph.blocks}
        head = self._block(graph.head, graph.choice, hidden, host_s=0.0)
        if self.job.model.mtp_num_layers:
            depth = _sum([layers[self.job.model.layer_kinds[-1]], head, self._mtp_projection(graph)])
            head = _sum([head, *[depth] * self.job.model.mtp_num_layers])
        return GraphTime(
            layers=layers,
            embedding=self._block(graph.embedding, graph.choice, hidden, host_s=0.0),
            head=head,
        )

    def _mtp_projection(self, graph: LayerGraph) -> BlockTime:
        """Return the 2h x h projection in front of a multi-token-prediction layer, split over tp."""
        tokens = next(op.m for op in graph.head.operators if op.name == "output_layer")
        hidden = self.job.model.hidden_size
        columns = max(1, hidden // graph.choice.tp)
        cost = self.compute.operator(
            Operator(name="mtp_projection", kind="gemm", m=tokens, n=columns, k=2 * hidden)
        )
        return BlockTime(
            forward_s=cost.forward_s,
            backward_s=cost.backward_s,
            recompute_s=cost.forward_s,
            parts_s={"compute": cost.forward_s + cost.backward_s},
        )

    def _layer(self, graph: LayerGraph, kind: BlockKind, hidden: HiddenShares) -> BlockTime:
        overlapped = hidden.ep > 0 and graph.choice.ep > 1
        host_s = host_floor_s(self.job, kind, expert_overlap=overlapped)
        return self._block(graph.blocks[kind], graph.choice, hidden, host_s=host_s)

    def _block(self, block: Block, choice: BlockChoice, hidden: HiddenShares, *, host_s: float) -> BlockTime:
        """Return the time of ``block``; without experts, graphs that differ in ep and etp share it."""
        if block.kind in EXPERT_KINDS:
            return self._price(block, choice, hidden, host_s)
        key = (block, choice.tp, choice.cp, choice.recompute, hidden)
        if key not in self._shared:
            self._shared[key] = self._price(block, choice, hidden, host_s)
        return self._shared[key]

    def _price(self, block: Block, choice: BlockChoice, hidden: HiddenShares, host_s: float) -> BlockTime:
        compute = self.compute.block(block)
        repeated = _recomputed(block, choice)
        again = sum(self.compute.operator(op).forward_s for op in repeated)
        # The host launches what runs again, too.
        backward_host_s = host_s * (BACKWARD_HOST_FACTOR + len(repeated) / len(block.operators))
        comm = self._communication(block, choice, hidden, compute)
        forward = compute.forward_s + sum(t.forward_s for t in comm.values())
        backward = compute.backward_s + again + sum(t.backward_s for t in comm.values())
        wait = max(0.0, host_s - forward) + max(0.0, backward_host_s - backward)
        parts = {"compute": compute.forward_s + compute.backward_s, "recompute": again, "host": wait}
        parts.update({axis: t.forward_s + t.backward_s for axis, t in comm.items()})
        forward = max(forward, host_s)
        return BlockTime(
            forward_s=forward,
            backward_s=max(backward, backward_host_s),
            recompute_s=forward,
            parts_s={name: seconds for name, seconds in parts.items() if seconds},
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
                exposed = self._expert(collective, seconds, hidden, compute)
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
        key = (collective.op, collective.num_bytes, size, stride)
        if key not in self._collectives_s:
            self._collectives_s[key] = self._exchange_s(collective, self.group(size, stride))
        return self._collectives_s[key]

    def _exchange_s(self, collective: Collective, group: GroupShape) -> float:
        """Return the seconds of one collective on a group; routed tokens may travel by another kernel."""
        moe = self.job.model.moe
        flex = moe is not None and moe.dispatcher == "flex" and self.job.kernels.flex_backend
        if moe is not None and flex and collective.op == "all_to_all":
            return self.dispatch.flex_s(collective.num_bytes / moe.top_k, moe, group)
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
        backward = (plain + self.time.wgrad_gather_exposed * collective.backward_hidden) * seconds
        forward_share = hidden.tp_forward if inside else 0.0
        window = self.time.tp_window_share
        return PassTime(
            max(forward * (1 - forward_share), forward - window * compute.forward_s),
            max(backward * (1 - hidden.tp_backward), backward - window * compute.backward_s / 2),
        )

    def _expert(
        self, collective: Collective, seconds: float, hidden: HiddenShares, compute: PassTime
    ) -> PassTime:
        """Return what the token exchange leaves exposed: the share not hidden, or beyond the shorter pass."""
        forward, backward = collective.forward * seconds, collective.backward * seconds
        window = self.time.ep_window_share * min(compute.forward_s, compute.backward_s)
        if not hidden.ep:
            return PassTime(forward, backward)
        return PassTime(
            max(forward * (1 - hidden.ep), forward - window),
            max(backward * (1 - hidden.ep), backward - window),
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


def _recomputed(block: Block, choice: BlockChoice) -> list[Operator]:
    """Return the operators whose forward pass selective recomputation runs again."""
    if choice.recompute.granularity != "selective":
        return []
    prefixes = tuple(p for module in choice.recompute.modules for p in MODULE_OPERATORS.get(module, ()))
    return [op for op in block.operators if op.name.startswith(prefixes)]


def _sum(blocks: Sequence[BlockTime]) -> BlockTime:
    """Return the times of ``blocks`` one after the other."""
    parts: dict[str, float] = {}
    for block in blocks:
        for name, seconds in block.parts_s.items():
            parts[name] = parts.get(name, 0.0) + seconds
    return BlockTime(
        forward_s=sum(block.forward_s for block in blocks),
        backward_s=sum(block.backward_s for block in blocks),
        recompute_s=sum(block.recompute_s for block in blocks),
        parts_s=parts,
    )
