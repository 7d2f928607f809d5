"""Find the fastest layout that runs: bounds on everything, simulation of what can still win, final selection.

The certificate covers the enumerated space at nominal assumptions (DESIGN section 7); the final selection
among near ties is outside of it and stated in the plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cython_dp import Found, Problem, best_first, bounds
from nest_megatron.cost.memory import device_bytes, memory_limits
from nest_megatron.cost.tables import CostModel, CostTables
from nest_megatron.errors import Factor, NoPlanError
from nest_megatron.planner.advise import advise
from nest_megatron.planner.batches import batch_shortage
from nest_megatron.planner.breakdown import kind_prefix
from nest_megatron.planner.evaluate import split_starts
from nest_megatron.planner.floors import StateFloor, work_floors
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
#: Nodes priced in full before the first solution says which others can matter.
FIRST_NODES = 512
#: Simulations of a part that only says which nodes can matter.
PROBES = 512
#: Simulations when the caller sets no budget.
UNLIMITED = 2**62


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
class _Solved:
    """The priced part of a space and what the solver found in it under one memory limit.

    Attributes:
        configurations: candidates of the whole space; those outside the part are slower than what was found.
    """

    space: Space
    tables: CostTables
    job: TrainJob
    found: Found
    configurations: int

    def layout(self, i: int) -> Layout:
        """Return the fastest layout found of candidate ``i``."""
        return self.space.layout(i, sizes=self.found.sizes[i], num_recompute=int(self.found.num_recompute[i]))

    @property
    def best_s(self) -> float:
        """Least simulated time, infinite when nothing was simulated."""
        times = self.found.time_s
        return float(np.nanmin(times)) if np.isfinite(times).any() else math.inf

    def bounded_by(self, seconds: float) -> _Solved:
        """Return the same solution where ``seconds`` bounds from below what may still be faster."""
        lower_s = min(seconds, self.found.lower_bound_s)
        return replace(self, found=replace(self.found, lower_bound_s=lower_s))

    def peak_bytes(self, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the allocated peak of the solutions of some candidates."""
        sizes = [self.found.sizes[int(i)] for i in chosen]
        space = self.space
        problem = Problem(
            **_node_arrays(self.job, self.tables, space),
            node=space.node[chosen],
            vpp=space.vpp[chosen],
            group=space.group[chosen],
            mode=space.mode[chosen],
            num_recompute=self.found.num_recompute[chosen].astype(np.int32),
            split_start=split_starts(sizes),
            sizes=np.array([n for split in sizes for n in split], dtype=np.int32),
        )
        return bounds(problem)[2]


def search(
    job: TrainJob, cluster: Cluster, *, force: bool = False, budget: int | None = None
) -> SearchResult:
    """Return the best layout of ``job`` on ``cluster``.

    Args:
        budget: simulations of each memory band after which the search answers with the best so far; its
            certificate has the gap.  None searches to the end.

    Raises:
        NoPlanError: no layout is legal, or none that is legal fits the memory (and ``force`` is off).
    """
    started = time.perf_counter()
    budget = UNLIMITED if budget is None else budget
    fits_below, runs_below = memory_limits(job, cluster.accelerator.visible_bytes)
    state = StateFloor(job, runs_below)
    for wide in (False, True):
        space = enumerate_space(job, state=state, wide=wide)
        if not len(space):
            continue
        fits = _solve(job, CostModel(job, cluster), space, fits_below, budget)
        # Cut short, the safe band may hold more than was found: its bound decides.
        cutoff_s = fits.found.lower_bound_s * (1.0 - TIGHT_GAIN)
        problem = candidate_problem(job, fits.tables, fits.space)
        runs = best_first(problem, runs_below, TIE, cutoff_s=cutoff_s, budget=budget)
        tight = replace(fits, found=runs)
        if math.isfinite(min(fits.best_s, tight.best_s)):
            chosen = tight if tight.best_s < cutoff_s else fits
            if chosen is fits and tight.found.lower_bound_s < cutoff_s:
                # Cut short, the tight band may hold a layout that would have been taken.
                chosen = fits.bounded_by(tight.found.lower_bound_s)
            evaluated = fits.found.evaluated + tight.found.evaluated
            return _result(cluster, chosen, evaluated, started, tight=chosen is tight, forced=False)
    return _forced(job, cluster, started, force=force)


def _solve(job: TrainJob, cost: CostModel, space: Space, limit_bytes: int, budget: int) -> _Solved:
    """Search the nodes with the least work first; the rest only where it can still matter.

    The first part is searched without finishing free splits: it only says which other nodes can matter.
    """
    interleaves = np.zeros(len(space.nodes), dtype=np.bool_)
    interleaves[space.node[space.vpp > 1]] = True
    floors = work_floors(cost, space.nodes, interleaves)
    order = np.argsort(floors, kind="stable")
    count, best_s = min(FIRST_NODES, len(order)), math.inf
    while count < len(order) and not math.isfinite(best_s):
        part = space.only(np.sort(order[:count]))
        problem = candidate_problem(job, cost.tables(part.nodes), part)
        times = best_first(problem, limit_bytes, leaves=0, budget=PROBES).time_s
        best_s = float(np.nanmin(times)) if np.isfinite(times).any() else math.inf
        if not math.isfinite(best_s):
            count = min(4 * count, len(order))
    wanted = int((floors <= best_s * (1.0 + TIE)).sum())
    part = space.only(np.sort(order[:wanted]))
    tables = cost.tables(part.nodes)
    found = best_first(candidate_problem(job, tables, part), limit_bytes, TIE, budget=budget)
    return _Solved(part, tables, job, found, len(space))


def _forced(job: TrainJob, cluster: Cluster, started: float, *, force: bool) -> SearchResult:
    """Return the layout with the smallest need, when the user insists.

    Raises:
        NoPlanError: no layout is legal, or ``force`` is off.
    """
    space = enumerate_space(job)
    if not len(space):
        space = enumerate_space(job, wide=True)
    if not len(space):
        raise _nothing_legal(job, space)
    tables = CostModel(job, cluster).tables(space.nodes)
    problem = candidate_problem(job, tables, space)
    peak_bytes = bounds(problem)[2]
    if not force:
        raise _nothing_fits(job, cluster, space, peak_bytes)
    found = best_first(problem, int(peak_bytes.min()))
    solved = _Solved(space, tables, job, found, len(space))
    return _result(cluster, solved, found.evaluated, started, tight=False, forced=True)


def _result(
    cluster: Cluster, solved: _Solved, evaluated: int, started: float, *, tight: bool, forced: bool
) -> SearchResult:
    times = solved.found.time_s
    chosen = _select(solved, cluster.accelerator.visible_bytes)
    certificate = _certificate(solved, evaluated, started)
    return SearchResult(
        best=solved.layout(chosen),
        fastest=solved.layout(int(np.nanargmin(times))),
        runner_ups=_runner_ups(solved, chosen),
        certificate=certificate,
        rejections=_rejections(solved.space, certificate),
        tight=tight,
        forced=forced,
    )


def _node_arrays(job: TrainJob, tables: CostTables, space: Space) -> dict[str, Any]:
    return {
        "prefix": kind_prefix(job),
        "node_pp": np.array([node.pp for node in space.nodes], dtype=np.int32),
        "node_m": np.array([node.num_micro_batches for node in space.nodes], dtype=np.int32),
        "node_times": tables.node_times,
        "node_params": tables.node_params,
        "node_memory": tables.node_memory,
    }


def candidate_problem(job: TrainJob, tables: CostTables, space: Space) -> Problem:
    """Return the solver's problem over every candidate of ``space``."""
    return Problem(
        **_node_arrays(job, tables, space),
        node=space.node,
        vpp=space.vpp,
        group=space.group,
        mode=space.mode,
        num_recompute=space.num_recompute,
        split_start=space.split_start,
        sizes=space.sizes,
        free=space.free,
        choice_first=space.choice_first,
        choice_count=space.choice_count,
        choices=space.choices,
        floor=space.floor,
        least=space.domains.least,
    )


def _select(solved: _Solved, visible_bytes: int) -> int:
    """Among plans within TIE prefer more head-room (steps of 1 %), then fewer changes, then speed."""
    times = solved.found.time_s
    near = np.flatnonzero(times <= solved.best_s * (1.0 + TIE))
    used = solved.peak_bytes(near) // (visible_bytes // 100)
    least = near[used == used.min()]

    def key(i: int) -> tuple[int, float, int]:
        return changes(solved.job.user_layout, solved.layout(int(i))), float(times[i]), int(i)

    # Only the fastest few of equal head-room need their changes counted.
    fastest = least[np.argsort(times[least], kind="stable")][:64]
    return int(min(fastest, key=key))


def changes(user: Layout, other: Layout) -> int:
    """Return the number of axes on which ``other`` differs from ``user``."""
    return sum(getattr(user, FIELDS[axis]) != getattr(other, FIELDS[axis]) for axis in AXES)


def _runner_ups(solved: _Solved, chosen: int) -> tuple[Layout, ...]:
    """Return the fastest other layouts, one per set of (tp, cp, pp, ep, etp, micro-batch)."""
    degrees: Callable[[Layout], tuple[int, ...]] = lambda x: (x.tp, x.cp, x.pp, x.ep, x.etp, x.micro_batch)  # noqa: E731
    space, times = solved.space, solved.found.time_s
    seen = {degrees(space.nodes[int(space.node[chosen])])}
    found: list[Layout] = []
    for i in np.argsort(times, kind="stable"):
        if not np.isfinite(times[i]) or len(found) == RUNNER_UPS:
            break
        node = degrees(space.nodes[int(space.node[i])])
        if node not in seen:
            seen.add(node)
            found.append(solved.layout(int(i)))
    return tuple(found)


def _certificate(solved: _Solved, evaluated: int, started: float) -> Certificate:
    found, space = solved.found, solved.space
    simulated = int(np.isfinite(found.time_s).sum())
    return Certificate(
        search_s=time.perf_counter() - started,
        configurations=solved.configurations,
        evaluated=evaluated,
        pruned={
            "rule": sum(space.rejections.values()),
            "memory": found.out_of_memory + space.too_large,
            "bound": solved.configurations - found.out_of_memory - simulated,
        },
        lower_bound_s=found.lower_bound_s,
        objective_s=solved.best_s,
        gap=solved.best_s / found.lower_bound_s - 1.0,
    )


def _rejections(space: Space, certificate: Certificate) -> dict[str, int]:
    """Return the histogram of first reasons: the rules in their own words, then memory and speed."""
    words = {rule.name: f"{rule.code}: {rule.doc}" for rule in RULES}
    found = {words[name]: count for name, count in space.rejections.items()}
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


def _nothing_fits(
    job: TrainJob, cluster: Cluster, space: Space, peak_bytes: npt.NDArray[np.int64]
) -> NoPlanError:
    smallest = int(peak_bytes.argmin())
    layout = space.layout(smallest)
    peak = int(peak_bytes[smallest])
    need = int(device_bytes(np.array([peak]), job)[0]) + job.reserved_bytes
    visible = cluster.accelerator.visible_bytes
    repair = advise(job, cluster, layout)
    return NoPlanError(
        "NEST-P02",
        f"none of {len(space)} legal layouts fits in {gib(visible):.1f} GiB of "
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
