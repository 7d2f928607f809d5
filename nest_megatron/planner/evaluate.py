"""What a given layout does: memory stage by stage, simulated step time, and where the time goes.

The search and the report call the same solver on the same coefficients, so a reported figure is the figure
that was compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from cython_dp import Problem, bounds, step_time
from nest_megatron.cost.band import step_time_band_s
from nest_megatron.cost.memory import band, device_bytes, feasible, phases
from nest_megatron.cost.overlap import interval_ends
from nest_megatron.cost.tables import CostModel, CostTables
from nest_megatron.graph.templates import layer_graph
from nest_megatron.planner.breakdown import Detail, kind_prefix, solver_mode, stage_predictions, time_split
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import BlockChoice, Layout, Recompute
from nest_megatron.specs.plan import Prediction, StagePrediction


def split_starts(splits: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Return where each of some splits starts when they are laid end to end; none for none."""
    return np.cumsum([0, *(len(split) for split in splits)], dtype=np.int32)[: len(splits)]


def problem_of(job: TrainJob, tables: CostTables, layouts: Sequence[Layout]) -> Problem:
    """Return the solver problem with one node and one candidate per layout."""

    def i32(values: Sequence[int]) -> npt.NDArray[np.int32]:
        return np.array(values, dtype=np.int32)

    return Problem(
        prefix=kind_prefix(job),
        node_pp=i32([x.pp for x in layouts]),
        node_m=i32([x.num_micro_batches for x in layouts]),
        node_times=tables.node_times,
        node_params=tables.node_params,
        node_memory=tables.node_memory,
        node=i32(range(len(layouts))),
        vpp=i32([x.vpp for x in layouts]),
        group=i32([x.interleaving_group for x in layouts]),
        mode=i32([solver_mode(x.recompute) for x in layouts]),
        num_recompute=i32([max(1, x.recompute.num_layers) for x in layouts]),
        split_start=split_starts([x.num_layers_per_chunk for x in layouts]),
        sizes=i32([n for x in layouts for n in x.num_layers_per_chunk]),
    )


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
        self._factor = 1.0 if job.step_scale is None else job.step_scale.factor

    @cached_property
    def _model_flops(self) -> int:
        """FLOP of one step; only full predictions need them, comparisons of step times do not."""
        return model_flops(self.job)

    def step_times_s(self, layouts: Sequence[Layout]) -> list[float]:
        """Return the simulated step time of each layout, seconds."""
        problem = problem_of(self.job, self.cost.tables(layouts), layouts)
        _, extra_s, *_ = bounds(problem)
        times = [step_time(problem, i, float(extra_s[i])) for i in range(len(layouts))]
        return [self._factor * float(t) for t in self.cost.step_time_s(times)]

    def predict(self, layouts: Sequence[Layout]) -> list[Prediction]:
        """Return the full prediction of each layout."""
        if not layouts:
            return []
        tables = self.cost.tables(layouts)
        problem = problem_of(self.job, tables, layouts)
        _, extra_s, peak, rank, phase = bounds(problem)
        found = []
        for i, layout in enumerate(layouts):
            detail = Detail.of(self.job, layout, tables, i)
            pipeline_s = step_time(problem, i, float(extra_s[i])) - float(extra_s[i])
            step_s = float(self.cost.step_time_s(pipeline_s + float(extra_s[i])))
            names = phases(len(self.job.model.kinds))
            found.append(
                self._prediction(
                    detail,
                    step_s,
                    int(peak[i]),
                    stage_predictions(detail),
                    worst=(int(rank[i]), names[int(phase[i])]),
                    split=time_split(
                        detail, self.cost.graph_time(layout), pipeline_s, float(extra_s[i]), step_s
                    ),
                )
            )
        return found

    def _scaled(
        self, stages: tuple[StagePrediction, ...], split: dict[str, float]
    ) -> tuple[tuple[StagePrediction, ...], dict[str, float]]:
        """Return stage table and split under the calibrated factor, which multiplies every second alike."""
        factor = self._factor
        if factor == 1.0:
            return stages, split
        scaled = tuple(dataclasses.replace(stage, busy_s=factor * stage.busy_s) for stage in stages)
        return scaled, {name: factor * seconds for name, seconds in split.items()}

    def _prediction(
        self,
        detail: Detail,
        step_s: float,
        peak: int,
        stages: tuple[StagePrediction, ...],
        *,
        worst: tuple[int, str],
        split: dict[str, float],
    ) -> Prediction:
        job, visible = self.job, self.cluster.accelerator.visible_bytes
        step_s = self._factor * step_s
        stages, split = self._scaled(stages, split)
        fits = bool(feasible(np.array([peak]), job, visible)[0])
        accelerator = self.cluster.accelerator
        peak_flops = accelerator.peak_flops_per_s[job.recipe.compute_dtype] * job.num_gpus
        tokens = job.global_batch * job.sequence_length
        return Prediction(
            step_time_s=step_s,
            step_time_band_s=step_time_band_s(job, detail.layout, step_s, split),
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
