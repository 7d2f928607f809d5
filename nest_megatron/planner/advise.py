"""Repair advice: the smallest changes that make a layout fit its GPUs, what each costs, and what cannot help.

Every single axis, every pair of axes and more GPUs at the same global batch are tried.  A pair is only named
when none of its axes helps alone at a bearable price.  Pins are ignored, since advice is about releasing
them, and named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt

from cython_dp import bounds, smallest_block
from nest_megatron.cluster.load import resize
from nest_megatron.cost.memory import band, device_bytes, feasible, memory_limits
from nest_megatron.planner.change import changed, differences, spelled
from nest_megatron.planner.domains import BLOCK_AUTO, Domains, divisors
from nest_megatron.planner.evaluate import Evaluator, problem_of
from nest_megatron.rules import first_code
from nest_megatron.rules.base import FIELDS
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Recompute
from nest_megatron.specs.plan import Band, Prediction
from nest_megatron.units import gib

#: The pseudo-axis of a larger cluster, and the factors that are tried.
GPUS = "num_gpus"
GPU_FACTORS = (2, 4, 8)
#: Most pieces of advice returned, and layouts per set of axes whose time is simulated.
MAX_ADVICE, SIMULATED = 8, 3
#: A change that multiplies the step time by more than this is named only when nothing cheaper helps.
BEARABLE = 2.0
#: A memory term that shrinks by less than this share stays, for the reader.
STAYS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change, or two, after which the layout fits.

    Attributes:
        changes: the axes to set, spelled ``axis=value``; ``follows``: what changes with them.
        saved_bytes: allocated peak of the worst stage, before minus after.
        time_ratio: step time after over before, same global batch, nominal assumptions.
        fits: risk label afterwards; ``releases``: pinned axes among the changes.
    """

    changes: tuple[str, ...]
    follows: tuple[str, ...]
    layout: Layout
    num_gpus: int
    saved_bytes: int
    peak_device_bytes: int
    time_ratio: float
    fits: Band
    releases: tuple[str, ...]

    def describe(self) -> str:
        """Return the advice in one line: what to set, GiB saved, step time, risk label, pins to release."""
        what = " ".join(self.changes)
        if self.follows:
            what += f" (with {' '.join(self.follows)})"
        released = f", releases the pin of {' and '.join(self.releases)}" if self.releases else ""
        saved = f"saves {gib(self.saved_bytes):.1f} GiB"
        return f"{what}: {saved}, {self.time_ratio:.2f}x the step time, {self.fits}{released}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoHelp:
    """The best value of one axis, and why it is not enough.

    Attributes:
        stays_bytes: terms of the worst stage that do not shrink with it, largest first.
    """

    change: str
    num_gpus: int
    saved_bytes: int
    peak_device_bytes: int
    stays_bytes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Advice for one layout that does not fit; fewest changes first, then the faster."""

    layout: Layout
    peak_device_bytes: int
    limit_bytes: int
    advice: tuple[Advice, ...]
    no_help: tuple[NoHelp, ...]


@dataclass(frozen=True, slots=True)
class _Trial:
    """One legal variation with its solver results."""

    values: dict[str, Any]
    layout: Layout
    peak_bytes: int
    bound_s: float
    feasible: bool
    band: Band

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(self.values)


class _World:
    """Judges variations of one layout on one number of GPUs."""

    def __init__(self, job: TrainJob, cluster: Cluster, layout: Layout) -> None:
        self.job, self.cluster, self.layout = job, cluster, layout
        self.evaluator = Evaluator(job, cluster)

    def judge(self, variations: Iterable[Mapping[str, Any]]) -> list[_Trial]:
        """Return the legal ones; an automatic block is filled in for both memory limits."""
        kept: dict[Layout, dict[str, Any]] = {}
        for values in variations:
            layout = changed(self.job, self.layout, {a: v for a, v in values.items() if a != GPUS})
            if layout.num_layers_per_chunk and layout not in kept and first_code(self.job, layout) is None:
                kept[layout] = dict(values)
        layouts = list(kept)
        if not layouts:
            return []
        layouts, chosen = self._with_blocks(layouts, list(kept.values()))
        bound_s, _, peak, *_ = bounds(self._problem(layouts))
        visible = self.cluster.accelerator.visible_bytes
        runs = feasible(peak, self.job, visible)
        return [
            _Trial(v, x, int(p), float(b), bool(r), band(int(p), bool(r), visible))
            for v, x, p, b, r in zip(chosen, layouts, peak, bound_s, runs, strict=True)
        ]

    def _problem(self, layouts: list[Layout]) -> Any:
        return problem_of(self.job, self.evaluator.cost.tables(layouts), layouts)

    def _with_blocks(
        self, layouts: list[Layout], values: list[dict[str, Any]]
    ) -> tuple[list[Layout], list[dict[str, Any]]]:
        """Replace ``BLOCK_AUTO`` by the fewest recomputed layers that FIT, and that run."""
        automatic = [i for i, v in enumerate(values) if v.get("recompute") is BLOCK_AUTO]
        if not automatic:
            return layouts, values
        problem = self._problem([layouts[i] for i in automatic])
        limits = memory_limits(self.job, self.cluster.accelerator.visible_bytes)
        counts: list[npt.NDArray[np.int32]] = [smallest_block(problem, limit) for limit in limits]
        found, chosen = [], []
        dropped = set(automatic)
        for i, layout in enumerate(layouts):
            if i not in dropped:
                found.append(layout)
                chosen.append(values[i])
        for k, i in enumerate(automatic):
            for count in dict.fromkeys(int(c[k]) for c in counts):
                if count > 0:
                    block = dataclasses.replace(BLOCK_AUTO, num_layers=count)
                    found.append(dataclasses.replace(layouts[i], recompute=block))
                    chosen.append({**values[i], "recompute": block})
        return found, chosen


def advise(job: TrainJob, cluster: Cluster, layout: Layout) -> Repair:
    """Return what makes a legal ``layout`` fit.

    Args:
        layout: legal under ``job``; when it fits already, everything that fits too is still named.
    """
    home = _World(job, cluster, layout)
    (before,) = home.judge([{}])
    values = _values(job, layout)
    trials = home.judge([*_singles(values), *_doubles(values)])
    worlds = {job.num_gpus: home}
    for factor in GPU_FACTORS:
        larger = dataclasses.replace(job, num_gpus=factor * job.num_gpus)
        world = _World(larger, _resized(cluster, larger.num_gpus), layout)
        worlds[larger.num_gpus] = world
        more = {GPUS: larger.num_gpus}
        trials += world.judge([more, *({**more, **single} for single in _singles(_values(larger, layout)))])
    groups: dict[frozenset[str], list[_Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.axes, []).append(trial)
    useless = [
        min(group, key=lambda t: (t.peak_bytes, t.bound_s))
        for axes, group in groups.items()
        if len(axes) == 1 and not any(trial.feasible for trial in group)
    ]
    return Repair(
        layout=layout,
        peak_device_bytes=_device(job, before.peak_bytes),
        limit_bytes=cluster.accelerator.visible_bytes - job.reserved_bytes,
        advice=_advice(worlds, groups, before),
        no_help=_no_help(worlds, before, useless),
    )


def _resized(cluster: Cluster, num_gpus: int) -> Cluster:
    """Return a larger cluster of the same kind; named nodes and units are of the one that exists."""
    return resize(dataclasses.replace(cluster, nodes=(), units=()), num_gpus)


def _values(job: TrainJob, layout: Layout) -> dict[str, tuple[Any, ...]]:
    """Return the other values of each axis that could lower the peak, pins and bounds ignored."""
    domains = Domains(dataclasses.replace(job, pins={}, bounds={}), wide=True)
    recompute: list[Recompute] = [r for r in domains.selective() if r.granularity == "selective"]
    if job.capabilities.full_recompute:
        recompute += [Recompute(granularity="full", method="uniform", num_layers=1), BLOCK_AUTO]
    found: dict[str, tuple[Any, ...]] = {
        "tp": domains.tp(),
        "cp": domains.cp(1),
        "pp": domains.pp(1, 1),
        "ep": domains.ep(),
        "etp": divisors(layout.tp) if job.capabilities.expert_tensor_parallel else (),
        "sequence_parallel": domains.sequence_parallel(layout.tp)[-1:],
        # More chunks and larger micro-batches only add to the peak.
        "vpp": tuple(range(1, layout.vpp)),
        "micro_batch": tuple(n for n in domains.micro_batch() if n < layout.micro_batch),
        "recompute": tuple(recompute),
        "sharding": domains.shardings(),
    }
    if job.model.moe is None:
        del found["ep"], found["etp"]
    return {
        axis: others
        for axis, values in found.items()
        if (others := tuple(v for v in values if v != getattr(layout, FIELDS[axis])))
    }


def _singles(values: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for axis, choices in values.items():
        for value in choices:
            yield {axis: value}


def _doubles(values: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for first, second in combinations(values, 2):
        for a, b in product(values[first], values[second]):
            yield {first: a, second: b}


def _advice(
    worlds: Mapping[int, _World], groups: Mapping[frozenset[str], list[_Trial]], before: _Trial
) -> tuple[Advice, ...]:
    """Return the best of each set of axes, fewest changes first, then the same GPUs, then the faster."""
    before_s = worlds[min(worlds)].evaluator.step_times_s([before.layout])[0]
    best = {
        axes: _best(worlds, fitting, before, before_s)
        for axes, group in groups.items()
        if (fitting := [trial for trial in group if trial.feasible])
    }
    cheap = {axes: advice for axes, advice in best.items() if advice.time_ratio <= BEARABLE} or best
    alone = {axis for axes in cheap if len(axes) == 1 for axis in axes}
    found = [
        (len(axes), GPUS in axes, advice.time_ratio, advice)
        for axes, advice in cheap.items()
        if len(axes) == 1 or not axes & alone
    ]
    return tuple(advice for *_, advice in sorted(found, key=lambda item: item[:3])[:MAX_ADVICE])


def _best(worlds: Mapping[int, _World], group: list[_Trial], before: _Trial, before_s: float) -> Advice:
    """Return the fastest of ``group`` on the fewest GPUs; one that FITS goes before one that is TIGHT."""
    safest = [trial for trial in group if trial.band == "FITS"] or group
    fewest = min(trial.values.get(GPUS, 0) for trial in safest)
    ordered = sorted((t for t in safest if t.values.get(GPUS, 0) == fewest), key=lambda t: t.bound_s)
    fastest = ordered[:SIMULATED]
    timed = [
        (world.evaluator.step_times_s([trial.layout])[0], trial)
        for trial in fastest
        for world in [_world(worlds, trial)]
    ]
    seconds, trial = min(timed, key=lambda item: item[0])
    job = _world(worlds, trial).job
    return Advice(
        changes=_changes(trial),
        follows=differences(job, before.layout, trial.layout, besides=trial.values),
        layout=trial.layout,
        num_gpus=job.num_gpus,
        saved_bytes=before.peak_bytes - trial.peak_bytes,
        peak_device_bytes=_device(job, trial.peak_bytes),
        time_ratio=seconds / before_s,
        fits=trial.band,
        releases=tuple(axis for axis in trial.values if axis in job.pins or axis in job.bounds),
    )


def _world(worlds: Mapping[int, _World], trial: _Trial) -> _World:
    return worlds[trial.values[GPUS] if GPUS in trial.values else min(worlds)]


def _changes(trial: _Trial) -> tuple[str, ...]:
    return tuple(
        f"{GPUS}={value}" if axis == GPUS else spelled(trial.layout, axis)
        for axis, value in trial.values.items()
    )


def _device(job: TrainJob, peak_bytes: int) -> int:
    return int(device_bytes(np.array([peak_bytes]), job)[0])


def _no_help(worlds: Mapping[int, _World], before: _Trial, useless: list[_Trial]) -> tuple[NoHelp, ...]:
    """Say of each axis that cannot repair alone what it saves, and what it leaves as it is; GPUs first."""
    useless = [trial for trial in useless if trial.peak_bytes <= before.peak_bytes]
    useless.sort(key=lambda t: (GPUS not in t.values, t.peak_bytes))
    (old,) = worlds[min(worlds)].evaluator.predict([before.layout])
    found = []
    for trial in useless:
        world = _world(worlds, trial)
        (new,) = world.evaluator.predict([trial.layout])
        found.append(
            NoHelp(
                change=_changes(trial)[0],
                num_gpus=world.job.num_gpus,
                saved_bytes=before.peak_bytes - trial.peak_bytes,
                peak_device_bytes=_device(world.job, trial.peak_bytes),
                stays_bytes=_stays(_worst_terms(old), _worst_terms(new)),
            )
        )
    return tuple(found)


def _worst_terms(prediction: Prediction) -> dict[str, int]:
    return next(s.terms_bytes for s in prediction.stages if s.stage == prediction.worst_stage)


def _stays(old: Mapping[str, int], new: Mapping[str, int]) -> dict[str, int]:
    kept = {term: size for term, size in new.items() if size > (1 - STAYS) * old.get(term, 0)}
    return dict(sorted(kept.items(), key=lambda item: -item[1]))
