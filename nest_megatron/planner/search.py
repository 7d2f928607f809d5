"""Find the fastest layout that runs: bounds on everything, simulation of what can still win, final selection.

The certificate covers the enumerated space at nominal assumptions (DESIGN section 7); the final selection
among near ties is outside of it and stated in the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cython_dp import Problem, best_first, bounds, smallest_block
from nest_megatron.cost.memory import device_bytes, memory_limits
from nest_megatron.cost.tables import CostModel, CostTables
from nest_megatron.errors import Factor, NoPlanError
from nest_megatron.planner.advise import advise
from nest_megatron.planner.batches import batch_shortage
from nest_megatron.planner.breakdown import kind_prefix
from nest_megatron.planner.space import Space, enumerate_space
from nest_megatron.rules import RULES
from nest_megatron.rules.base import FIELDS
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import AXES, Layout
from nest_megatron.specs.plan import Certificate
from nest_megatron.units import gib

#: Plans within this share of the fastest count as equal (time_model.md section 1, "Ties").
TIE = 0.03
#: A TIGHT plan must beat the best one that FITS by this share (DESIGN section 6).
TIGHT_GAIN = 0.10
RUNNER_UPS = 3
#: Repairs that the error names when nothing fits.
NAMED_REPAIRS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Outcome of one search.

    Attributes:
        best: the selected layout; ``fastest``: the one with the least simulated time.
        runner_ups: the next ones with another degree, fastest first.
        tight: no layout FITS, or the tight one gains enough.
        forced: nothing is feasible and the user insists.
        rejections: first true reason -> number of layouts (or prefixes of layouts) it cut.
    """

    best: Layout
    fastest: Layout
    runner_ups: tuple[Layout, ...]
    certificate: Certificate
    rejections: dict[str, int]
    tight: bool
    forced: bool


@dataclass(frozen=True, slots=True)
class _Searched:
    """Solver results over the whole space."""

    space: Space
    problem: Problem
    bound_s: npt.NDArray[np.float64]
    extra_s: npt.NDArray[np.float64]
    peak_bytes: npt.NDArray[np.int64]
    feasible: npt.NDArray[np.bool_]
    fits: npt.NDArray[np.bool_]


def search(job: TrainJob, cluster: Cluster, *, force: bool = False) -> SearchResult:
    """Return the best layout of ``job`` on ``cluster``.

    Raises:
        NoPlanError: no layout is legal, or none that is legal fits the memory (and ``force`` is off).
    """
    started = time.perf_counter()
    space = enumerate_space(job)
    if not len(space):
        raise _nothing_legal(job, space)
    state = _solve(job, cluster, space)
    groups = {"fits": state.fits, "tight": state.feasible & ~state.fits}
    if not state.feasible.any():
        if not force:
            raise _nothing_fits(job, cluster, state)
        groups = {"fits": state.feasible, "tight": state.peak_bytes == state.peak_bytes.min()}
    found = {name: _best_first(state, mask) for name, mask in groups.items()}
    best_s = {
        name: np.nanmin(times) if np.isfinite(times).any() else np.inf for name, (times, _) in found.items()
    }
    tight = bool(best_s["tight"] < best_s["fits"] * (1.0 - TIGHT_GAIN))
    name = "tight" if tight else "fits"
    times, _ = found[name]
    chosen = _select(job, state, times, cluster.accelerator.visible_bytes)
    certificate = _certificate(state, groups[name], times, sum(n for _, n in found.values()), started)
    return SearchResult(
        best=state.space.layout(chosen),
        fastest=state.space.layout(int(np.nanargmin(times))),
        runner_ups=_runner_ups(state, times, chosen),
        certificate=certificate,
        rejections=_rejections(state, certificate),
        tight=tight,
        forced=not state.feasible.any(),
    )


def _solve(job: TrainJob, cluster: Cluster, space: Space) -> _Searched:
    tables = CostModel(job, cluster).tables(space.nodes)
    limits = memory_limits(job, cluster.accelerator.visible_bytes)
    automatic = candidate_problem(job, tables, space)
    space = space.with_blocks(*(smallest_block(automatic, limit) for limit in limits))
    problem = candidate_problem(job, tables, space)
    bound_s, extra_s, peak, _, _ = bounds(problem)
    fits_below, runs_below = limits
    return _Searched(space, problem, bound_s, extra_s, peak, peak <= runs_below, peak <= fits_below)


def candidate_problem(job: TrainJob, tables: CostTables, space: Space) -> Problem:
    """Return the solver's problem over every candidate of ``space``."""
    return Problem(
        prefix=kind_prefix(job),
        node_pp=np.array([node.pp for node in space.nodes], dtype=np.int32),
        node_m=np.array([node.num_micro_batches for node in space.nodes], dtype=np.int32),
        node_times=tables.node_times,
        node_params=tables.node_params,
        node_memory=tables.node_memory,
        node=space.node,
        vpp=space.vpp,
        group=space.group,
        mode=space.mode,
        num_recompute=space.num_recompute,
        split_start=space.split_start,
        sizes=space.sizes,
    )


def _best_first(state: _Searched, mask: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.float64], int]:
    """Simulate the candidates of ``mask`` that can come within TIE of its best."""
    members = np.flatnonzero(mask)
    order = members[np.argsort(state.bound_s[members], kind="stable")]
    times, evaluated = best_first(state.problem, order, state.bound_s, state.extra_s, TIE)
    return times, evaluated


def _select(job: TrainJob, state: _Searched, times: npt.NDArray[np.float64], visible_bytes: int) -> int:
    """Among plans within TIE prefer more head-room (steps of 1 %), then fewer changes, then speed."""
    best = np.nanmin(times)
    near = np.flatnonzero(times <= best * (1.0 + TIE))
    used = state.peak_bytes[near] // (visible_bytes // 100)
    least = near[used == used.min()]

    def key(i: int) -> tuple[int, float, int]:
        return changes(job.user_layout, state.space.layout(int(i))), float(times[i]), int(i)

    # Only the fastest few of equal head-room need their changes counted.
    fastest = least[np.argsort(times[least], kind="stable")][:64]
    return int(min(fastest, key=key))


def changes(user: Layout, other: Layout) -> int:
    """Return the number of axes on which ``other`` differs from ``user``."""
    return sum(getattr(user, FIELDS[axis]) != getattr(other, FIELDS[axis]) for axis in AXES)


def _runner_ups(state: _Searched, times: npt.NDArray[np.float64], chosen: int) -> tuple[Layout, ...]:
    """Return the fastest other layouts, one per set of (tp, cp, pp, ep, etp, micro-batch)."""
    degrees: Callable[[Layout], tuple[int, ...]] = lambda x: (x.tp, x.cp, x.pp, x.ep, x.etp, x.micro_batch)  # noqa: E731
    seen = {degrees(state.space.nodes[int(state.space.node[chosen])])}
    found: list[Layout] = []
    for i in np.argsort(times, kind="stable"):
        if not np.isfinite(times[i]) or len(found) == RUNNER_UPS:
            break
        node = degrees(state.space.nodes[int(state.space.node[i])])
        if node not in seen:
            seen.add(node)
            found.append(state.space.layout(int(i)))
    return tuple(found)


def _certificate(
    state: _Searched,
    mask: npt.NDArray[np.bool_],
    times: npt.NDArray[np.float64],
    evaluated: int,
    started: float,
) -> Certificate:
    objective = float(np.nanmin(times))
    open_bounds = state.bound_s[mask & ~np.isfinite(times)]
    lower = min(objective, float(open_bounds.min())) if open_bounds.size else objective
    return Certificate(
        search_s=time.perf_counter() - started,
        configurations=len(state.space),
        evaluated=evaluated,
        pruned={
            "rule": sum(state.space.rejections.values()),
            "memory": int((~state.feasible).sum()),
            "bound": int(state.feasible.sum()) - evaluated,
        },
        lower_bound_s=lower,
        objective_s=objective,
        gap=objective / lower - 1.0,
    )


def _rejections(state: _Searched, certificate: Certificate) -> dict[str, int]:
    """Return the histogram of first reasons: the rules in their own words, then memory and speed."""
    words = {rule.name: f"{rule.code}: {rule.doc}" for rule in RULES}
    found = {words[name]: count for name, count in state.space.rejections.items()}
    found["does not fit in memory"] = certificate.pruned["memory"]
    found["slower (proven by its lower bound)"] = certificate.pruned["bound"]
    return {reason: count for reason, count in found.items() if count}


def _nothing_legal(job: TrainJob, space: Space) -> NoPlanError:
    reasons = sorted(space.rejections.items(), key=lambda item: -item[1])[:3]
    message = "no layout is legal" + (" under these pins" if job.pins or job.bounds else "")
    nearest = [f"release the pin of {axis}" for axis in job.pins]
    shortage = batch_shortage(job)
    if shortage is not None:
        message += (
            f": a global batch of {job.global_batch} cannot be split evenly, because {job.num_gpus} GPUs "
            f"leave at least {shortage.smallest_dp} data parallel ranks, and a plan never changes the batch"
        )
        nearest += [f"{shortage.num_gpus} GPUs"] if shortage.num_gpus else []
        nearest += [f"a global batch of {size}" for size in shortage.global_batches]
    return NoPlanError(
        "NEST-P01",
        message,
        factors=[
            Factor("num_gpus", job.num_gpus, job.origin("num_gpus")),
            Factor("global_batch", job.global_batch, job.origin("global_batch")),
            *(Factor(axis, value, job.origin(axis)) for axis, value in job.pins.items()),
            *(Factor("rejected", f"{count} x {space.examples[name]}") for name, count in reasons),
        ],
        nearest=nearest,
    )


def _nothing_fits(job: TrainJob, cluster: Cluster, state: _Searched) -> NoPlanError:
    smallest = int(state.peak_bytes.argmin())
    layout = state.space.layout(smallest)
    peak = int(state.peak_bytes[smallest])
    need = int(device_bytes(np.array([peak]), job)[0]) + job.reserved_bytes
    visible = cluster.accelerator.visible_bytes
    repair = advise(job, cluster, layout)
    return NoPlanError(
        "NEST-P02",
        f"none of {len(state.space)} legal layouts fits in {gib(visible):.1f} GiB of "
        f"{cluster.accelerator.name}: "
        f"the smallest needs {gib(need):.1f} GiB",
        factors=[
            Factor("smallest layout", layout.describe(), "planner"),
            Factor("allocated_GiB", round(gib(peak), 1), "memory model"),
            Factor("reserved_GiB", round(gib(job.reserved_bytes), 1), job.origin("reserved")),
            *(Factor(axis, value, job.origin(axis)) for axis, value in job.pins.items()),
        ],
        nearest=[
            *(advice.describe() for advice in repair.advice[:NAMED_REPAIRS]),
            *(
                ()
                if repair.advice
                else ("another model, batch or sequence: no two changes of its layout fit",)
            ),
            "force=true to run it anyway",
        ],
    )
