"""What each term of the step-time model is worth: the term made neutral, errors and order compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Overlap, Recompute
from nest_megatron.validation.ranking import mean_regret, pair_order, ranking
from scripts.step_time.problem import MeasuredRow

#: A rate so high that what it prices is free.
FREE = 1e6
Case = tuple[TrainJob, Cluster, Layout]
Change = Callable[[TrainJob, Cluster, Layout], Case]


def _time(**values: Any) -> Change:
    def change(job: TrainJob, cluster: Cluster, layout: Layout) -> Case:
        known = {key: value(job) if callable(value) else value for key, value in values.items()}
        time = dataclasses.replace(job.profile.time, **known)
        return _profiled(job, time=time), cluster, layout

    return change


def _profile(**values: Any) -> Change:
    return lambda job, cluster, layout: (_profiled(job, **values), cluster, layout)


def _profiled(job: TrainJob, **values: Any) -> TrainJob:
    return dataclasses.replace(job, profile=dataclasses.replace(job.profile, **values))


def _accelerator(**values: float) -> Change:
    def change(job: TrainJob, cluster: Cluster, layout: Layout) -> Case:
        accelerator: Any = dataclasses.replace(cluster.accelerator, **values)  # type: ignore[arg-type]
        return job, dataclasses.replace(cluster, accelerator=accelerator), layout

    return change


def _kernels(**values: Any) -> Change:
    def change(job: TrainJob, cluster: Cluster, layout: Layout) -> Case:
        return dataclasses.replace(job, kernels=dataclasses.replace(job.kernels, **values)), cluster, layout

    return change


def _free_network(job: TrainJob, cluster: Cluster, layout: Layout) -> Case:
    levels = tuple(
        dataclasses.replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * FREE)
        for level in cluster.levels
    )
    return job, dataclasses.replace(cluster, levels=levels), layout


def _same_network(job: TrainJob, cluster: Cluster, layout: Layout) -> Case:
    inner = cluster.levels[0].bandwidth_bytes_per_s
    levels = tuple(dataclasses.replace(level, bandwidth_bytes_per_s=inner) for level in cluster.levels)
    return job, dataclasses.replace(cluster, levels=levels), layout


def _no_recompute(job: TrainJob, cluster: Cluster, layout: Layout) -> Case:
    return job, cluster, dataclasses.replace(layout, recompute=Recompute())


def _no_overlap(job: TrainJob, cluster: Cluster, layout: Layout) -> Case:
    return job, cluster, dataclasses.replace(layout, overlap=Overlap())


TERMS: tuple[tuple[str, Change], ...] = (
    ("all bytes on the network", _free_network),
    ("network levels (one rate)", _same_network),
    ("recompute", _no_recompute),
    ("memory-bound work", _accelerator(memory_efficiency=FREE)),
    (
        "unfused norm and residual",
        _time(
            norm_unfused_bytes=lambda job: job.profile.time.norm_fused_bytes,
            residual_unfused_bytes=lambda job: job.profile.time.residual_fused_bytes,
        ),
    ),
    ("loss traffic", _time(loss_bytes=0.0, loss_fused_bytes=0.0)),
    ("GEMM waves", _accelerator(wave_overhead_s=0.0)),
    ("kernel gaps", _accelerator(kernel_gap_s=0.0)),
    ("fp8 casts", _time(fp8_cast_bytes=0.0)),
    ("attention kernel (flash 1, flash 2 on Hopper)", _time(flash1_share=1.0, flash2_hopper_share=1.0)),
    ("every overlap credit", _no_overlap),
    ("tensor-parallel overlap", _profile(tp_overlap_share=0.0, tp_async_backward_share=0.0)),
    ("pipeline message factor", _time(p2p_factor=1.0)),
    ("FSDP contention", _time(fsdp_contention=0.0)),
    ("optimizer", _time(optimizer_sharded_bytes=0.0, optimizer_local_bytes=0.0)),
    ("rank-by-rank parameter broadcast", _profile(shard_broadcast_s=0.0)),
    (
        "jitter and fixed overhead",
        lambda job, cluster, layout: _time(jitter_per_doubling=0.0)(
            _profiled(job, step_overhead_s=0.0), cluster, layout
        ),
    ),
    ("host floor", _profile(host_floor_s=0.0)),
    (
        "host: latent attention, fp8, overlap",
        _time(mla_host_factor=1.0, fp8_host_factor=1.0, ep_overlap_host_factor=1.0),
    ),
    ("CUDA graph scopes", _kernels(cuda_graphs=False, cuda_graph_modules=())),
    ("flex dispatcher (one copy per domain)", _kernels(flex_backend="")),
    ("fused expert MLP", _kernels(fused_experts=False)),
    ("biased experts", _time(expert_bias_passes=1.0)),
    ("fp8 attention", _kernels(fp8_attention=False)),
)


def ablate(rows: Sequence[MeasuredRow]) -> None:
    """Print errors and order with one term off at a time; constants are not fitted again."""
    print(f"{'term made neutral':48s} {'rows':>5s} {'MAPE':>6s} {'MoE':>6s} {'order':>6s} {'regret':>6s}")
    base = _line("nothing", rows, lambda job, cluster, layout: (job, cluster, layout), None)
    for name, change in TERMS:
        _line(name, rows, change, base)


def _line(name: str, rows: Sequence[MeasuredRow], change: Change, base: Any) -> Any:
    predicted = np.array([_step_s(row, change) for row in rows])
    measured = np.array([row.measured_s for row in rows])
    errors = 100 * np.abs(predicted / measured - 1)
    moe = np.array([row.built.job.model.moe is not None for row in rows])
    changed = len(rows) if base is None else int((np.abs(predicted / base - 1) > 1e-4).sum())
    pairs = zip(rows, predicted.tolist(), strict=True)
    sweeps = ranking([(row.record, {"step_time_s": seconds}) for row, seconds in pairs]).sweeps
    print(
        f"{name:48s} {changed:5d} {errors.mean():6.2f} {errors[moe].mean():6.2f} "
        f"{pair_order(sweeps):6.3f} {mean_regret(sweeps):6.2f}",
        flush=True,
    )
    return predicted if base is None else base


def _step_s(row: MeasuredRow, change: Change) -> float:
    """Return the predicted step seconds of ``row`` under ``change``."""
    job, cluster, layout = change(row.built.job, row.built.cluster, row.built.layout)
    return Evaluator(job, cluster).step_times_s([layout])[0]
