"""What a layout needs at least, from few of its axes: cuts whole subtrees before anything is priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from cython_dp.reference import BOUND_SAFETY
from nest_megatron.cost.memory import SHARDING_CODES
from nest_megatron.cost.rows import memory_row
from nest_megatron.cost.tables import CostModel
from nest_megatron.graph.templates import layer_graph
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import BlockChoice, Layout, Recompute

#: What decides the operators of a layout and so the time of its blocks, recomputation aside.
_ROW = attrgetter(
    *(field for field in BlockChoice.__slots__ if field != "recompute"),
    "overlap.tp_comm",
    "overlap.expert_all_to_all",
)


class StateFloor:
    """The mean over pipeline ranks of weights, gradients and optimizer: no more than the largest rank's.

    Splitting over tp, ep and etp divides parameters at best, so those of one unsplit rank decide
    (research/memory_model.md 2.2).
    """

    def __init__(self, job: TrainJob, limit_bytes: int) -> None:
        """Prepare the floor.

        Args:
            limit_bytes: largest allocated peak of interest.
        """
        self.limit_bytes, self.recipe = limit_bytes, job.recipe
        whole = BlockChoice(
            tp=1, sequence_parallel=False, cp=1, ep=1, etp=1, micro_batch=1, recompute=Recompute()
        )
        row = memory_row(job, layer_graph(job, whole))
        slots = [job.model.kinds.index(kind) for kind in job.model.layer_kinds]
        self.layers = sum(row.dense_parameters[slot] for slot in slots)
        self.ends = row.parameters_first + row.parameters_last_norm
        self.ends += 0 if job.model.tied_embeddings else row.parameters_output
        self.experts = sum(row.expert_parameters[slot] for slot in slots) + row.expert_parameters_last

    def fits(self, layout: Any) -> bool:
        """Return False when the states alone exceed the limit; reads all degrees and the sharding."""
        instances = layout.num_optimizer_instances
        dense = self._bytes(layout.sharding, max(1, layout.dp * layout.cp // instances))
        expert = self._bytes(layout.sharding, max(1, layout.edp // instances))
        layers = self.layers * dense + self.ends * self._end_bytes(dense)
        total = layers / (layout.tp * layout.pp)
        total += self.experts * expert / (layout.ep * layout.etp * layout.pp)
        return bool(total <= self.limit_bytes)

    def _bytes(self, sharding: str, shard: int) -> float:
        """Return bytes per parameter of weights, gradients and optimizer state."""
        code, recipe = SHARDING_CODES[sharding], self.recipe
        return (
            recipe.weight_bytes / (shard if code >= 3 else 1)
            + recipe.grad_bytes / (shard if code >= 2 else 1)
            + recipe.optimizer_bytes / (shard if code >= 1 else 1)
        )

    def _end_bytes(self, dense: float) -> float:
        """Return bytes per parameter of embedding and head, whose optimizer may differ."""
        return dense if self.recipe.end_optimizer_bytes is None else 0.0


def work_floors(
    cost: CostModel, nodes: Sequence[Layout], interleaves: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Return (N,) seconds that no candidate of a node can beat: the work of all micro-batches over p.

    Without interleaving the fill of the pipeline comes on top
    (``cython_dp.reference.split.FreeSplit.work_s``, its case m > p).  Prices each distinct set of operators
    once; messages, synchronisation and recomputation are left out.

    Args:
        interleaves: (N,) whether the node has a candidate with vpp > 1.
    """
    kinds = cost.job.model.layer_kinds
    counts = {kind: kinds.count(kind) for kind in cost.job.model.kinds}
    work_s: dict[Any, float] = {}
    floors = np.empty(len(nodes))
    for i, node in enumerate(nodes):
        key = _ROW(node)
        if key not in work_s:
            graph = cost.graph_time(replace(node, recompute=Recompute()))
            blocks = [(1, graph.embedding), (1, graph.head)]
            blocks += [(count, graph.layers[kind]) for kind, count in counts.items()]
            work_s[key] = sum(count * (block.forward_s + block.backward_s) for count, block in blocks)
        m, p = node.num_micro_batches, node.pp
        rounds = m if interleaves[i] else max(m, p, m + p - 1 if m > p else 0)
        floors[i] = rounds * work_s[key] / p
    return floors * BOUND_SAFETY
