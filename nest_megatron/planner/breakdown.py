"""Where one layout's memory and time go: per stage and term, on the solver's own counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cython_dp import (
    NUM_KINDS,
    RECOMPUTE_BLOCK,
    RECOMPUTE_NONE,
    RECOMPUTE_UNIFORM,
    Column,
    Feature,
    Param,
    chunk_times,
    simulate,
    stage_features,
)
from nest_megatron.cost.blocks import GraphTime
from nest_megatron.cost.memory import TERMS, phases, term_mask
from nest_megatron.cost.tables import CostTables
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Recompute
from nest_megatron.specs.plan import StagePrediction

Int64 = npt.NDArray[np.int64]

_MODES = {"none": RECOMPUTE_NONE, "uniform": RECOMPUTE_UNIFORM, "block": RECOMPUTE_BLOCK}


def kind_prefix(job: TrainJob) -> npt.NDArray[np.int32]:
    """Return (NUM_KINDS, L + 1) counts of the layers of each kind slot before each layer."""
    kinds, layers = job.model.kinds, job.model.layer_kinds
    slots = np.array([kinds.index(kind) for kind in layers])
    flags = slots == np.arange(NUM_KINDS)[:, None]
    counts = np.concatenate([np.zeros((NUM_KINDS, 1)), np.cumsum(flags, axis=1)], axis=1)
    return np.ascontiguousarray(counts, dtype=np.int32)


def solver_mode(recompute: Recompute) -> int:
    """Return the solver's recompute mode of ``recompute``; selective recomputation is part of the row."""
    return _MODES[recompute.method] if recompute.granularity == "full" else RECOMPUTE_NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """One layout with everything the solver knows about it.

    Attributes:
        features: (pp, NUM_FEATURES) counts; ``terms``: term -> (NUM_FEATURES,) bytes.
        times, params: this node's columns; ``forward_s``, ``backward_s``: per chunk and micro-batch.
    """

    job: TrainJob
    layout: Layout
    features: Int64
    terms: dict[str, Int64]
    times: list[float]
    params: list[int]
    forward_s: list[float]
    backward_s: list[float]

    @classmethod
    def of(cls, job: TrainJob, layout: Layout, tables: CostTables, node: int) -> Detail:
        """Return the detail of ``layout``, whose node is number ``node`` of ``tables``."""
        sizes, prefix = layout.num_layers_per_chunk, kind_prefix(job)
        mode, count = solver_mode(layout.recompute), max(1, layout.recompute.num_layers)
        times = tables.node_times[node].tolist()
        forward, backward = chunk_times(sizes, prefix, layout.pp, layout.vpp, mode, count, times)
        m = layout.num_micro_batches
        return cls(
            job=job,
            layout=layout,
            features=stage_features(
                sizes, prefix, layout.pp, layout.vpp, m, layout.interleaving_group, mode, count
            ),
            terms={name: values[node] for name, values in tables.terms.items()},
            times=times,
            params=tables.node_params[node].tolist(),
            forward_s=forward,
            backward_s=backward,
        )

    def busy_s(self, stage: int) -> float:
        """Return the compute seconds of ``stage`` per micro-batch, communication inside blocks included."""
        total = 0.0
        for chunk in range(stage, self.layout.pp * self.layout.vpp, self.layout.pp):
            total += self.forward_s[chunk] + self.backward_s[chunk]
        return total


def stage_predictions(detail: Detail) -> tuple[StagePrediction, ...]:
    """Return the stage table: peak phase, its terms in bytes, busy time, chunks in flight."""
    layout, names = detail.layout, phases(len(detail.job.model.kinds))
    stages = []
    for stage in range(layout.pp):
        tables = [_phase_terms(detail, stage, phase) for phase in range(len(names))]
        totals = [sum(table.values()) for table in tables]
        phase = totals.index(max(totals))
        stages.append(
            StagePrediction(
                stage=stage,
                num_layers=sum(layout.num_layers_per_chunk[stage :: layout.pp]),
                allocated_bytes=totals[phase],
                phase=names[phase],
                terms_bytes={name: value for name, value in tables[phase].items() if value},
                busy_s=detail.busy_s(stage),
                in_flight=int(detail.features[stage][Feature.LIVE_CHUNKS]),
            )
        )
    return tuple(stages)


def _phase_terms(detail: Detail, stage: int, phase: int) -> dict[str, int]:
    name = phases(len(detail.job.model.kinds))[phase]
    return {
        term: int(detail.features[stage] @ (coefficients * term_mask(term, phase)))
        for term, coefficients in detail.terms.items()
        if name in TERMS[term]
    }


def time_split(
    detail: Detail, graph: GraphTime, pipeline_s: float, extra_s: float, step_s: float
) -> dict[str, float]:
    """Attribute the step to terms along the busiest stage; the terms sum to the step time.

    Args:
        pipeline_s: simulated makespan; ``extra_s``: exposed synchronisation plus optimizer.
    """
    layout, m = detail.layout, detail.layout.num_micro_batches
    busy = [detail.busy_s(stage) for stage in range(layout.pp)]
    stage = busy.index(max(busy))
    silent = simulate(
        detail.forward_s, detail.backward_s, layout.pp, layout.vpp, m, layout.interleaving_group, 0.0
    )
    split = {name: m * seconds for name, seconds in _stage_parts(detail, graph, stage).items()}
    split["bubble"] = silent - m * busy[stage]
    split["pp"] = pipeline_s - silent
    split["optimizer"] = _optimizer_s(detail)
    split["dp"] = extra_s - split["optimizer"]
    split["overhead"] = step_s - pipeline_s - extra_s
    return {name: float(seconds) for name, seconds in split.items() if seconds > 0}


def _stage_parts(detail: Detail, graph: GraphTime, stage: int) -> dict[str, float]:
    """Return seconds per micro-batch of ``stage`` by term; full recomputation is its own term."""
    row = detail.features[stage]
    held = [(graph.embedding, int(row[Feature.FIRST])), (graph.head, int(row[Feature.LAST]))]
    held += [
        (graph.layers[kind], int(row[Feature.HELD + slot]))
        for slot, kind in enumerate(detail.job.model.kinds)
    ]
    parts: dict[str, float] = {}
    for block, count in held:
        for name, seconds in block.parts_s.items():
            parts[name] = parts.get(name, 0.0) + count * seconds
    if detail.layout.recompute.granularity == "full":
        parts["recompute"] = parts.get("recompute", 0.0) + detail.busy_s(stage) - sum(parts.values())
    return parts


def _optimizer_s(detail: Detail) -> float:
    """Return the optimizer seconds of the slowest rank."""
    worst = 0.0
    for row in detail.features:
        dense = (
            row[Feature.FIRST] * detail.params[Param.FIRST] + row[Feature.LAST] * detail.params[Param.LAST]
        )
        expert = 0
        for slot in range(NUM_KINDS):
            dense += row[Feature.HELD + slot] * detail.params[Param.DENSE + slot]
            expert += row[Feature.HELD + slot] * detail.params[Param.EXPERT + slot]
        seconds = (
            dense * detail.times[Column.OPTIMIZER_DENSE] + expert * detail.times[Column.OPTIMIZER_EXPERT]
        )
        worst = max(worst, float(seconds))
    return worst
