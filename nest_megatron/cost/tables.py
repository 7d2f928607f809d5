"""From layouts to the solver's arrays: rows per BlockChoice, columns per node (no split yet)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cython_dp import NUM_COLUMNS, NUM_KINDS, NUM_PARAMS, Column, Param
from nest_megatron.cost.blocks import BlockPricer, GraphTime
from nest_megatron.cost.memory import (
    SHARDING_CODES,
    NodeColumns,
    memory_terms,
    output_parameters,
    phase_coefficients,
)
from nest_megatron.cost.overlap import HiddenShares
from nest_megatron.cost.rows import MemoryRow, columns, memory_row
from nest_megatron.graph.templates import layer_graph
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import BlockChoice, Layout, Overlap, Recompute

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

# time_model.md section 2: bucket size, optimizer traffic per parameter, jitter per doubling beyond one node.
BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK = 40_000_000, 1_000_000
OPTIMIZER_BYTES_PER_SHARDED, OPTIMIZER_BYTES_PER_LOCAL = 33, 6
JITTER_PER_DOUBLING, JITTER_FROM_GPUS = 0.004, 8


@dataclass(frozen=True, slots=True)
class Row:
    """Everything that depends on the BlockChoice and the overlap flags only."""

    memory: MemoryRow
    time: GraphTime
    boundary_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTables:
    """The solver's input for N nodes.

    Attributes:
        node_times: (N, NUM_COLUMNS) seconds; ``node_params``: (N, NUM_PARAMS) elements.
        node_memory: (N, phases, NUM_FEATURES) bytes; ``terms``: the same by term.
    """

    node_times: Float64
    node_params: Int64
    node_memory: Int64
    terms: dict[str, Int64]


class CostModel:
    """Prices layouts of one job on one cluster; rows are cached, so a search prices each BlockChoice once."""

    def __init__(self, job: TrainJob, cluster: Cluster) -> None:
        self.job = job
        self.cluster = cluster
        self.pricer = BlockPricer(job, cluster)
        self._rows: dict[tuple[BlockChoice, bool, bool], int] = {}
        self._built: list[Row] = []
        self._sync: dict[tuple[int, int, int, bool], tuple[float, float]] = {}

    def row(self, layout: Layout) -> int:
        """Return the index of the row of ``layout``; full recompute shares one row for all methods."""
        choice = BlockChoice.of(layout)
        if choice.recompute.granularity == "full":
            choice = dataclasses.replace(choice, recompute=Recompute(granularity="full"))
        key = (choice, layout.overlap.tp_comm, layout.overlap.expert_all_to_all)
        if key not in self._rows:
            self._rows[key] = len(self._built)
            self._built.append(self._build(choice, layout.overlap))
        return self._rows[key]

    def _build(self, choice: BlockChoice, overlap: Overlap) -> Row:
        graph = layer_graph(self.job, choice)
        memory = memory_row(self.job, graph)
        hidden = HiddenShares.of(self.job.profile, overlap)
        # Pipeline messages are scattered over tp and gathered on arrival (time_model.md section 2, "p2p").
        tokens = choice.micro_batch * self.job.sequence_length // choice.cp
        boundary = self.job.recipe.activation_bytes * tokens * self.job.model.hidden_size
        return Row(memory, self.pricer.graph(graph, hidden), boundary // choice.tp)

    def graph_time(self, layout: Layout) -> GraphTime:
        """Return the block times of ``layout``."""
        return self._built[self.row(layout)].time

    def tables(self, layouts: Sequence[Layout]) -> CostTables:
        """Return the solver's arrays for ``layouts``; their splits and vpp do not matter here."""
        rows = [self.row(layout) for layout in layouts]
        times = np.zeros((len(layouts), NUM_COLUMNS))
        for i, layout in enumerate(layouts):
            self._fill_times(times[i], layout, self._built[rows[i]])
        return CostTables(node_times=times, **self.memory(layouts, rows))

    def memory(self, layouts: Sequence[Layout], rows: Sequence[int]) -> dict[str, Any]:
        """Return the fields of ``tables`` that hold bytes and parameters; ``rows`` are those of ``row``."""
        nodes = self._node_columns(layouts, rows)
        memory = columns([row.memory for row in self._built])
        terms = memory_terms(memory, nodes, self.job, self.cluster.accelerator)
        return {
            "node_params": self._node_params(memory, nodes),
            "node_memory": phase_coefficients(terms, len(self.job.model.kinds)),
            "terms": terms,
        }

    def _node_columns(self, layouts: Sequence[Layout], rows: Sequence[int]) -> NodeColumns:
        def column(values: Sequence[int]) -> Int64:
            return np.array(values, dtype=np.int64)

        instances = [layout.num_optimizer_instances for layout in layouts]
        return NodeColumns(
            row=column(rows),
            pp=column([layout.pp for layout in layouts]),
            shard=column([max(1, x.dp * x.cp // n) for x, n in zip(layouts, instances, strict=True)]),
            expert_shard=column([max(1, x.edp // n) for x, n in zip(layouts, instances, strict=True)]),
            sharding=column([SHARDING_CODES[layout.sharding] for layout in layouts]),
            tp_overlap=column([int(layout.overlap.tp_comm) for layout in layouts]),
            expert_overlap=column([int(layout.overlap.expert_all_to_all) for layout in layouts]),
            selective=column([int(layout.recompute.granularity == "selective") for layout in layouts]),
            num_micro_batches=column([layout.num_micro_batches for layout in layouts]),
        )

    def _node_params(self, memory: dict[str, Int64], nodes: NodeColumns) -> Int64:
        at = {name: values[nodes.row] for name, values in memory.items()}
        params = np.zeros((len(nodes.row), NUM_PARAMS), dtype=np.int64)
        params[:, Param.DENSE : Param.DENSE + NUM_KINDS] = at["dense_parameters"]
        params[:, Param.EXPERT : Param.EXPERT + NUM_KINDS] = at["expert_parameters"]
        params[:, Param.FIRST] = at["parameters_first"]
        # MTP experts synchronise with the rest of the last rank.
        params[:, Param.LAST] = (
            at["expert_parameters_last"] + at["parameters_last_norm"] + output_parameters(at, nodes, self.job)
        )
        return params

    def _fill_times(self, times: Float64, layout: Layout, row: Row) -> None:
        graph = row.time
        for k, kind in enumerate(self.job.model.kinds):
            layer = graph.layers[kind]
            times[Column.FORWARD + k], times[Column.BACKWARD + k] = layer.forward_s, layer.backward_s
            times[Column.AGAIN + k] = layer.recompute_s
        times[Column.F_FIRST], times[Column.B_FIRST] = graph.embedding.forward_s, graph.embedding.backward_s
        times[Column.F_LAST], times[Column.B_LAST] = graph.head.forward_s, graph.head.backward_s
        hidden = HiddenShares.of(self.job.profile, layout.overlap)
        times[Column.P2P_HIDDEN] = hidden.p2p
        if layout.pp > 1:
            group = self.pricer.group(layout.pp, self._pp_stride(layout))
            times[Column.P2P] = self.pricer.collectives.time_s("p2p", row.boundary_bytes, group)
        self._fill_sync(times, layout, hidden)

    @staticmethod
    def _pp_stride(layout: Layout) -> int:
        inner = layout.tp * layout.cp
        return inner if layout.order == "tp-cp-ep-pp-dp" else inner * layout.dp

    def _fill_sync(self, times: Float64, layout: Layout, hidden: HiddenShares) -> None:
        """Gradient and parameter synchronisation per bucket, and the optimizer step, per parameter."""
        outer = layout.pp if layout.order == "tp-cp-ep-pp-dp" else 1
        bucket = max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK * layout.dp)
        sharded = layout.sharding != "none"
        alpha, beta = self._sync_terms(layout.dp * layout.cp, layout.tp * outer, bucket, sharded)
        times[Column.SYNC_ALPHA_DENSE], times[Column.SYNC_BETA_DENSE] = alpha, beta
        if self.job.model.moe is not None:
            alpha, beta = self._sync_terms(layout.edp, layout.etp * layout.ep * outer, bucket, sharded)
            times[Column.SYNC_ALPHA_EXPERT], times[Column.SYNC_BETA_EXPERT] = alpha, beta
        times[Column.BUCKET] = bucket
        times[Column.SYNC_HIDDEN] = hidden.dp
        rate = self.pricer.compute.hbm_bytes_per_s
        local = self.job.recipe.grad_bytes + OPTIMIZER_BYTES_PER_LOCAL
        shard = layout.dp * layout.cp if sharded else 1
        expert_shard = max(1, layout.edp) if sharded else 1
        times[Column.OPTIMIZER_DENSE] = (OPTIMIZER_BYTES_PER_SHARDED / shard + local) / rate
        times[Column.OPTIMIZER_EXPERT] = (OPTIMIZER_BYTES_PER_SHARDED / expert_shard + local) / rate

    def _sync_terms(self, size: int, stride: int, bucket: int, sharded: bool) -> tuple[float, float]:
        """Return latency per bucket and seconds per parameter: RS + AG when sharded, else one all-reduce."""
        key = (size, stride, bucket, sharded)
        if key not in self._sync:
            recipe, model, group = self.job.recipe, self.pricer.collectives, self.pricer.group(size, stride)
            wire = {"all_reduce": recipe.grad_reduce_bytes}
            if sharded:
                wire = {"reduce_scatter": recipe.grad_reduce_bytes, "all_gather": recipe.param_gather_bytes}
            alpha = beta = 0.0
            for op, bytes_per_parameter in wire.items():
                terms = model.terms(op, group, bucket * bytes_per_parameter)  # type: ignore[arg-type]
                alpha += terms.alpha_s
                beta += terms.beta_s_per_byte * bytes_per_parameter
            self._sync[key] = alpha, beta
        return self._sync[key]

    def step_time_s(self, pipeline_s: npt.ArrayLike) -> Float64:
        """Return step seconds from pipeline + synchronisation + optimizer: jitter, then fixed overhead."""
        doublings = math.log2(max(1.0, self.job.num_gpus / JITTER_FROM_GPUS))
        overhead = self.job.profile.step_overhead_s * (0.3 if self.job.kernels.cuda_graphs else 1.0)
        return np.asarray(pipeline_s) * (1.0 + JITTER_PER_DOUBLING * doublings) + overhead
