"""What a given layout does: memory stage by stage, simulated step time, and where the time goes.

The search and the report call the same solver on the same coefficients, so a reported figure is the figure
that was compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cython_dp import (
    RECOMPUTE_BLOCK,
    RECOMPUTE_NONE,
    RECOMPUTE_UNIFORM,
    Column,
    Feature,
    Problem,
    bounds,
    chunk_times,
    simulate,
    stage_features,
    step_time,
)
from nest_megatron.cost.memory import PHASES, TERMS, band, device_bytes, feasible
from nest_megatron.cost.overlap import interval_ends
from nest_megatron.cost.tables import CostModel, CostTables
from nest_megatron.graph.templates import layer_graph
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import BlockChoice, Layout, Recompute
from nest_megatron.specs.plan import Prediction, StagePrediction

#: Half width of the 80 % band of an uncalibrated step time, dense and MoE: leave-one-family-out error
#: (time_model.md section 4.3: median 7.7 %, p90 24 %) and leave-one-release-out (moe.md section 1: p90 27 %).
BAND_DENSE, BAND_MOE = 0.17, 0.25
MODES = {"none": RECOMPUTE_NONE, "uniform": RECOMPUTE_UNIFORM, "block": RECOMPUTE_BLOCK}


@dataclass(frozen=True, slots=True)
class _Detail:
    """Per-layout solver input, kept for the breakdown."""

    layout: Layout
    sizes: list[int]
    mode: int
    num_recompute: int
    times: list[float]
    features: npt.NDArray[np.int64]


def moe_prefix(job: TrainJob) -> npt.NDArray[np.int32]:
    """Return (L + 1,) counts of MoE layers before each layer."""
    flags = [kind == "moe" for kind in job.model.layer_kinds]
    return np.concatenate([[0], np.cumsum(flags)]).astype(np.int32)


def problem_of(job: TrainJob, tables: CostTables, layouts: Sequence[Layout]) -> Problem:
    """Return the solver problem with one node and one candidate per layout."""

    def i32(values: Sequence[int]) -> npt.NDArray[np.int32]:
        return np.array(values, dtype=np.int32)

    starts = np.concatenate([[0], np.cumsum([len(x.num_layers_per_chunk) for x in layouts])[:-1]])
    return Problem(
        moe_prefix=moe_prefix(job),
        node_pp=i32([x.pp for x in layouts]),
        node_m=i32([x.num_micro_batches for x in layouts]),
        node_times=tables.node_times,
        node_params=tables.node_params,
        node_memory=tables.node_memory,
        node=i32(range(len(layouts))),
        vpp=i32([x.vpp for x in layouts]),
        group=i32([x.pp for x in layouts]),
        mode=i32([_mode(x.recompute) for x in layouts]),
        num_recompute=i32([max(1, x.recompute.num_layers) for x in layouts]),
        split_start=i32(starts.tolist()),
        sizes=i32([n for x in layouts for n in x.num_layers_per_chunk]),
    )


def _mode(recompute: Recompute) -> int:
    return MODES[recompute.method] if recompute.granularity == "full" else RECOMPUTE_NONE


def model_flops(job: TrainJob) -> int:
    """Return the FLOP of one step that any layout must do: causal attention, no recompute."""
    choice = BlockChoice(
        tp=1, sequence_parallel=False, cp=1, ep=1, etp=1, micro_batch=1, recompute=Recompute()
    )
    balanced = dataclasses.replace(job, expert_imbalance=1.0)
    graph = layer_graph(balanced, choice)
    layers = sum(graph.blocks[kind].forward_flops for kind in job.model.layer_kinds)
    return 3 * job.global_batch * (layers + graph.head.forward_flops)


class Evaluator:
    """Predicts layouts of one job on one cluster."""

    def __init__(self, job: TrainJob, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        self.cost = CostModel(job, cluster)
        self._model_flops = model_flops(job)

    def step_times_s(self, layouts: Sequence[Layout]) -> list[float]:
        """Return the simulated step time of each layout, seconds."""
        problem = problem_of(self.job, self.cost.tables(layouts), layouts)
        _, extra_s, *_ = bounds(problem)
        times = [step_time(problem, i, float(extra_s[i])) for i in range(len(layouts))]
        return [float(t) for t in self.cost.step_time_s(times)]

    def predict(self, layouts: Sequence[Layout]) -> list[Prediction]:
        """Return the full prediction of each layout."""
        if not layouts:
            return []
        tables = self.cost.tables(layouts)
        problem = problem_of(self.job, tables, layouts)
        _, extra_s, peak, rank, phase = bounds(problem)
        found = []
        for i, layout in enumerate(layouts):
            detail = self._detail(layout, tables, i)
            pipeline_s = step_time(problem, i, float(extra_s[i])) - float(extra_s[i])
            step_s = float(self.cost.step_time_s(pipeline_s + float(extra_s[i])))
            stages = self._stages(detail, {name: values[i] for name, values in tables.terms.items()})
            found.append(
                self._prediction(
                    detail,
                    step_s,
                    int(peak[i]),
                    stages,
                    worst=(int(rank[i]), PHASES[int(phase[i])]),
                    split=self._split(detail, pipeline_s, float(extra_s[i]), step_s, tables, i),
                )
            )
        return found

    def _detail(self, layout: Layout, tables: CostTables, i: int) -> _Detail:
        sizes = list(layout.num_layers_per_chunk)
        mode, count = _mode(layout.recompute), max(1, layout.recompute.num_layers)
        m = layout.num_micro_batches
        features = stage_features(
            sizes, moe_prefix(self.job).tolist(), layout.pp, layout.vpp, m, layout.pp, mode, count
        )
        return _Detail(layout, sizes, mode, count, tables.node_times[i].tolist(), features)

    def _stages(
        self, detail: _Detail, terms: dict[str, npt.NDArray[np.int64]]
    ) -> tuple[StagePrediction, ...]:
        layout = detail.layout
        forward, backward = self._chunk_times(detail)
        stages = []
        for stage in range(layout.pp):
            values = {name: int(detail.features[stage] @ term) for name, term in terms.items()}
            totals = [
                sum(value for name, value in values.items() if TERMS[name][phase])
                for phase in range(len(PHASES))
            ]
            phase = totals.index(max(totals))
            busy = sum(
                forward[c * layout.pp + stage] + backward[c * layout.pp + stage] for c in range(layout.vpp)
            )
            stages.append(
                StagePrediction(
                    stage=stage,
                    num_layers=sum(detail.sizes[stage :: layout.pp]),
                    allocated_bytes=totals[phase],
                    phase=PHASES[phase],
                    terms_bytes={n: v for n, v in values.items() if v and TERMS[n][phase]},
                    busy_s=busy,
                    in_flight=int(detail.features[stage][Feature.LIVE_CHUNKS]),
                )
            )
        return tuple(stages)

    def _chunk_times(self, detail: _Detail) -> tuple[list[float], list[float]]:
        return chunk_times(
            detail.sizes,
            moe_prefix(self.job).tolist(),
            detail.layout.pp,
            detail.layout.vpp,
            detail.mode,
            detail.num_recompute,
            detail.times,
        )

    def _split(
        self, detail: _Detail, pipeline_s: float, extra_s: float, step_s: float, tables: CostTables, i: int
    ) -> dict[str, float]:
        """Attribute the step to terms along the busiest stage; the terms sum to the step time."""
        layout, m = detail.layout, detail.layout.num_micro_batches
        forward, backward = self._chunk_times(detail)
        busy = [
            sum(forward[c * layout.pp + r] + backward[c * layout.pp + r] for c in range(layout.vpp))
            for r in range(layout.pp)
        ]
        stage = busy.index(max(busy))
        parts = self._stage_parts(detail, stage)
        silent = simulate(forward, backward, layout.pp, layout.vpp, m, layout.pp, 0.0)
        split = {name: m * seconds for name, seconds in parts.items()}
        split["bubble"] = silent - m * busy[stage]
        split["pp"] = pipeline_s - silent
        optimizer = self._optimizer_s(detail, tables, i)
        split["optimizer"] = optimizer
        split["dp"] = extra_s - optimizer
        split["overhead"] = step_s - pipeline_s - extra_s
        return {name: float(seconds) for name, seconds in split.items() if seconds > 0}

    def _stage_parts(self, detail: _Detail, stage: int) -> dict[str, float]:
        """Return seconds per micro-batch of ``stage`` by term; full recomputation is its own term."""
        graph, row = self.cost.graph_time(detail.layout), detail.features[stage]
        held = (
            (graph.dense, int(row[Feature.DENSE])),
            (graph.moe, int(row[Feature.MOE])),
            (graph.embedding, int(row[Feature.FIRST])),
            (graph.head, int(row[Feature.LAST])),
        )
        parts: dict[str, float] = {}
        for block, count in held:
            for name, seconds in block.parts_s.items():
                parts[name] = parts.get(name, 0.0) + count * seconds
        forward, backward = self._chunk_times(detail)
        layout = detail.layout
        busy = sum(
            forward[c * layout.pp + stage] + backward[c * layout.pp + stage] for c in range(layout.vpp)
        )
        if detail.mode != RECOMPUTE_NONE:
            parts["recompute"] = parts.get("recompute", 0.0) + busy - sum(parts.values())
        return parts

    def _optimizer_s(self, detail: _Detail, tables: CostTables, i: int) -> float:
        params = tables.node_params[i]
        rows = detail.features
        dense = (
            rows[:, Feature.DENSE] * params[0]
            + rows[:, Feature.MOE] * params[1]
            + rows[:, Feature.FIRST] * params[3]
            + rows[:, Feature.LAST] * params[4]
        )
        expert = rows[:, Feature.MOE] * params[2]
        seconds = (
            dense * detail.times[Column.OPTIMIZER_DENSE] + expert * detail.times[Column.OPTIMIZER_EXPERT]
        )
        return float(seconds.max())

    def _prediction(
        self,
        detail: _Detail,
        step_s: float,
        peak: int,
        stages: tuple[StagePrediction, ...],
        *,
        worst: tuple[int, str],
        split: dict[str, float],
    ) -> Prediction:
        job, visible = self.job, self.cluster.accelerator.visible_bytes
        width = BAND_MOE if job.model.moe is not None else BAND_DENSE
        fits = bool(feasible(np.array([peak]), job, visible)[0])
        accelerator = self.cluster.accelerator
        peak_flops = accelerator.peak_flops_per_s[job.recipe.compute_dtype] * job.num_gpus
        tokens = job.global_batch * job.sequence_length
        return Prediction(
            step_time_s=step_s,
            step_time_band_s=(step_s * (1 - width), step_s * (1 + width)),
            tokens_per_s_per_gpu=tokens / step_s / job.num_gpus,
            mfu=self._model_flops / step_s / peak_flops,
            peak_allocated_bytes=peak,
            peak_device_bytes=int(device_bytes(np.array([peak]), job)[0]),
            visible_bytes=visible,
            feasible=fits,
            band=band(peak, fits, visible),
            worst_stage=worst[0],
            worst_phase=worst[1],
            stages=stages,
            time_split=split,
        )


def paired_ratio(job: TrainJob, cluster: Cluster, best: Layout, other: Layout) -> tuple[float, float]:
    """Return the lowest and highest time(best) / time(other), both priced under the same assumptions.

    The assumptions are the nominal overlap shares and each share at either end of its interval (DESIGN
    section 7, "Do no harm").
    """
    ratios = []
    for variant in (job, *interval_ends(job)):
        best_s, other_s = Evaluator(variant, cluster).step_times_s([best, other])
        ratios.append(best_s / other_s)
    return min(ratios), max(ratios)
