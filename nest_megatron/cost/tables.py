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
from nest_megatron.cost.sync import (
    SyncModel,
    expert_shard_size,
    pp_stride,
    shard_size,
    shards_parameters,
)
from nest_megatron.graph.layer_graph import LayerGraph
from nest_megatron.graph.templates import LayerGraphs
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import BlockChoice, Layout, Overlap, Recompute

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

#: The step jitter counts doublings from one node of so many GPUs (time_model.md section 2, "Total").
JITTER_FROM_GPUS = 8


@dataclass(frozen=True, slots=True)
class Boundary:
    """Bytes that one rank sends to the next stage, and that tp then gathers (0: nothing to gather)."""

    message_bytes: int
    gathered_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """What depends on the BlockChoice and the overlap flags only; memory rows are built when asked for."""

    graph: LayerGraph
    time: GraphTime
    boundary: Boundary


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
        self._graphs = LayerGraphs(job)
        self._rows: dict[tuple[BlockChoice, bool, bool], int] = {}
        self._built: list[Row] = []
        self._memory: dict[int, MemoryRow] = {}
        self.sync = SyncModel(self.pricer)

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
        graph = self._graphs.graph(choice)
        hidden = HiddenShares.of(self.job.profile, overlap)
        return Row(graph, self.pricer.graph(graph, hidden), self._boundary(choice))

    def _memory_row(self, row: int) -> MemoryRow:
        if row not in self._memory:
            self._memory[row] = memory_row(self.job, self._built[row].graph)
        return self._memory[row]

    def _boundary(self, choice: BlockChoice) -> Boundary:
        """Return the message between pipeline stages (time_model.md section 2, "p2p")."""
        job = self.job
        tokens = choice.micro_batch * job.sequence_length // choice.cp
        whole = job.recipe.activation_bytes * tokens * job.model.hidden_size
        if choice.sequence_parallel:
            return Boundary(whole // choice.tp, 0)
        if job.profile.scatters_pipeline_messages and choice.tp > 1:
            return Boundary(whole // choice.tp, whole)
        return Boundary(whole, 0)

    def graph_time(self, layout: Layout) -> GraphTime:
        """Return the block times of ``layout``."""
        return self._built[self.row(layout)].time

    def tables(self, layouts: Sequence[Layout]) -> CostTables:
        """Return the solver's arrays for ``layouts``; their splits and vpp do not matter here."""
        rows = [self.row(layout) for layout in layouts]
        times = np.zeros((len(layouts), NUM_COLUMNS))
        for i, layout in enumerate(layouts):
            self._fill_times(times[i], layout, rows[i])
        return CostTables(node_times=times, **self.memory(layouts, rows))

    def memory(self, layouts: Sequence[Layout], rows: Sequence[int]) -> dict[str, Any]:
        """Return the fields of ``tables`` that hold bytes and parameters; ``rows`` are those of ``row``."""
        used, place = np.unique(np.array(rows, dtype=np.int64), return_inverse=True)
        nodes = self._node_columns(layouts, place)
        memory = columns([self._memory_row(int(row)) for row in used])
        terms = memory_terms(memory, nodes, self.job, self.cluster.accelerator)
        return {
            "node_params": self._node_params(memory, nodes),
            "node_memory": phase_coefficients(terms, len(self.job.model.kinds)),
            "terms": terms,
        }

    def _node_columns(self, layouts: Sequence[Layout], rows: Int64) -> NodeColumns:
        def column(values: Sequence[int]) -> Int64:
            return np.array(values, dtype=np.int64)

        instances = [layout.num_optimizer_instances for layout in layouts]
        return NodeColumns(
            row=rows,
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

    def _fill_times(self, times: Float64, layout: Layout, row: int) -> None:
        built = self._built[row]
        graph = built.time
        for k, kind in enumerate(self.job.model.kinds):
            layer = graph.layers[kind]
            times[Column.FORWARD + k], times[Column.BACKWARD + k] = layer.forward_s, layer.backward_s
            times[Column.AGAIN + k] = layer.recompute_s
        times[Column.F_FIRST], times[Column.B_FIRST] = graph.embedding.forward_s, graph.embedding.backward_s
        times[Column.F_LAST], times[Column.B_LAST] = graph.head.forward_s, graph.head.backward_s
        hidden = HiddenShares.of(self.job.profile, layout.overlap)
        times[Column.P2P_HIDDEN] = hidden.p2p
        if layout.pp > 1:
            times[Column.P2P] = self._hop_s(layout, built.boundary)
        if shards_parameters(self.job, layout):
            self._add_gathers(times, layout, self._memory_row(row))
        self._fill_sync(times, layout, hidden)

    def _hop_s(self, layout: Layout, boundary: Boundary) -> float:
        """Return the seconds of one message to the next stage, its gather on arrival included."""
        collectives, factor = self.pricer.collectives, self.job.profile.time.p2p_factor
        stage = self.pricer.group(layout.pp, pp_stride(layout))
        seconds = collectives.time_s("p2p", factor * boundary.message_bytes, stage)
        if boundary.gathered_bytes:
            tensor = self.pricer.group(layout.tp, 1)
            seconds += collectives.time_s("all_gather", boundary.gathered_bytes, tensor)
        return seconds

    def _add_gathers(self, times: Float64, layout: Layout, memory: MemoryRow) -> None:
        """Add what fully sharded parameters cost every micro-batch, per layer and at both ends."""
        for k, _ in enumerate(self.job.model.kinds):
            parameters = memory.dense_parameters[k], memory.expert_parameters[k]
            forward_s, backward_s = times[Column.FORWARD + k], times[Column.BACKWARD + k]
            again_s = times[Column.AGAIN + k]
            extra = self.sync.gathers(layout, *parameters, forward_s=forward_s, backward_s=backward_s)
            # A recomputed layer's longer backward pass hides more: the columns must not depend on the split.
            longer = self.sync.gathers(
                layout, *parameters, forward_s=forward_s, backward_s=backward_s + again_s
            )
            times[Column.FORWARD + k] += extra.forward_s
            times[Column.BACKWARD + k] += extra.backward_s
            times[Column.AGAIN + k] += longer.backward_s - extra.backward_s
        ends = (
            (Column.F_FIRST, Column.B_FIRST, memory.parameters_first, 0),
            (
                Column.F_LAST,
                Column.B_LAST,
                memory.parameters_last_norm + memory.parameters_output,
                memory.expert_parameters_last,
            ),
        )
        for forward, backward, dense, expert in ends:
            extra = self.sync.gathers(
                layout, dense, expert, forward_s=times[forward], backward_s=times[backward]
            )
            times[forward] += extra.forward_s
            times[backward] += extra.backward_s

    def _fill_sync(self, times: Float64, layout: Layout, hidden: HiddenShares) -> None:
        """Gradient and parameter synchronisation per bucket, and the optimizer step, per parameter."""
        bucket = self.sync.bucket(layout)
        dense, expert = self.sync.dense(layout), self.sync.expert(layout)
        times[Column.SYNC_ALPHA_DENSE], times[Column.SYNC_BETA_DENSE] = dense
        times[Column.SYNC_ALPHA_EXPERT], times[Column.SYNC_BETA_EXPERT] = expert
        times[Column.BUCKET] = bucket
        times[Column.SYNC_HIDDEN] = hidden.dp
        constants, rate = self.job.profile.time, self.pricer.compute.hbm_bytes_per_s
        # Fully sharded gradients and weights leave the rank its share of them only.
        whole = 1 if layout.sharding != "optim_grads_params" else 0
        local = whole * (self.job.recipe.grad_bytes + constants.optimizer_local_bytes)
        sharded = constants.optimizer_sharded_bytes
        times[Column.OPTIMIZER_DENSE] = (sharded / shard_size(layout) + local) / rate
        times[Column.OPTIMIZER_EXPERT] = (sharded / expert_shard_size(layout) + local) / rate
        broadcast_s = self.sync.broadcast_s(layout)
        if broadcast_s:
            times[Column.OPTIMIZER_DENSE] += broadcast_s / self._parameters_per_rank(layout)

    def _parameters_per_rank(self, layout: Layout) -> float:
        """Return the mean dense parameters of one rank."""
        memory = self._memory_row(self.row(layout))
        layers = self.job.model.layer_kinds
        total = sum(memory.dense_parameters[self.job.model.kinds.index(kind)] for kind in layers)
        ends = memory.parameters_first + memory.parameters_last_norm + memory.parameters_output
        return (total + ends) / layout.pp

    def step_time_s(self, pipeline_s: npt.ArrayLike) -> Float64:
        """Return step seconds from pipeline + synchronisation + optimizer: jitter, then fixed overhead."""
        doublings = math.log2(max(1.0, self.job.num_gpus / JITTER_FROM_GPUS))
        constants, kernels = self.job.profile.time, self.job.kernels
        overhead = self.job.profile.step_overhead_s
        if kernels.cuda_graphs or kernels.cuda_graph_modules:
            overhead *= constants.graphed_overhead_share
        return np.asarray(pipeline_s) * (1.0 + constants.jitter_per_doubling * doublings) + overhead
