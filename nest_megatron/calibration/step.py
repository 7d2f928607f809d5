"""``nest-megatron calibrate step RUN.json [RUN.json ...]``: learn from logged step times.

Runs of one model on one machine, stack and precision give one factor, the median of measured over predicted.
A mixture-of-experts model needs two, GPU time and host floor: its layers wait for the host at small
micro-batches, so only runs with different micro-batches tell them apart (research/moe.md 2.3 and its ranking
advice).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nest_megatron.calibration.runs import Run, predict_run, read_run
from nest_megatron.calibration.store import StepCalibration, remember_step, step_key_of, with_step
from nest_megatron.cost.band import bubble_share, communication_share
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.validation.metrics import measured_step_s

#: Host floor over GPU time that is searched, relative to the prediction.
HOST_RANGE = (0.1, 10.0)
#: Steps of the search over that range: coarse grid, then golden section.
_GRID, _REFINE = 16, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedStep:
    """What was learned, how far off the runs were before and after, and where it was stored.

    Args:
        before, after: relative error of each run, prediction / measurement - 1.
        left_out: error of each run under a factor from the others; None with one run, or with two scalars.
    """

    key: str
    entry: StepCalibration
    before: dict[str, float]
    after: dict[str, float]
    left_out: dict[str, float] | None
    path: Path

    def render(self) -> str:
        """Return the result as text."""
        entry = self.entry
        host = "" if entry.host_factor is None else f", host floor x {entry.host_factor:.3f}"
        lines = [f"{self.key}: step time x {entry.gpu_factor:.3f}{host}"]
        if entry.host_factor == entry.gpu_factor:
            lines.append("  the host floor limits none of these runs: it is scaled like GPU time")
        for name in self.before:
            text = f"  {name}: error {self.before[name]:+.1%} before, {self.after[name]:+.1%} after"
            if self.left_out is not None:
                text += f", {self.left_out[name]:+.1%} with a factor from the other runs"
            lines.append(text)
        lines.append(f"stored in {self.path}; every plan of this model on this machine and stack uses it")
        return "\n".join(lines)


def calibrate_step(paths: Sequence[Path], *, store: Path | None = None) -> CalibratedStep:
    """Compare run records with their predictions and remember the factors; they replace an older entry.

    Args:
        paths: records of the measured schema with ``measured.step_time_s`` or tokens/s.

    Raises:
        BadInputError: a record is unreadable, lacks its time, cannot be predicted, or is of another machine,
            stack, precision or model than the first; or a mixture-of-experts model with one micro-batch.
    """
    runs = [read_run(path) for path in paths]
    measured_s = {run.name: _measured_s(run) for run in runs}
    key = _common_key(runs)
    entry = fit_step(runs)
    before = {run.name: predicted_s(run) / measured_s[run.name] - 1 for run in runs}
    return CalibratedStep(
        key=key,
        entry=entry,
        before=before,
        after={run.name: predicted_s(run, entry) / measured_s[run.name] - 1 for run in runs},
        left_out=_left_out(before) if len(runs) > 1 and entry.host_factor is None else None,
        path=remember_step(key, entry, store),
    )


def fit_step(runs: Sequence[Run]) -> StepCalibration:
    """Return the factors of ``runs``, which share machine, stack, precision and model.

    Raises:
        BadInputError: a mixture-of-experts model, and all runs have the same micro-batch.
    """
    if runs[0].built.job.model.moe is None:
        return one_factor(runs)
    batches = sorted({run.built.layout.micro_batch for run in runs})
    if len(batches) < 2:
        raise BadInputError(
            "NEST-K05",
            "a mixture-of-experts model is calibrated by runs with different micro-batches: they tell GPU "
            "time and host floor apart",
            factors=[Factor("micro_batch", batches[0], ", ".join(run.name for run in runs))],
            nearest=["one run at micro-batch 1 and one at 4"],
        )
    ratio = _host_over_gpu(runs)
    gpu = math.exp(statistics.fmean(_log_ratios(runs, ratio)))
    return _entry(runs, gpu_factor=gpu, host_factor=gpu * ratio)


def one_factor(runs: Sequence[Run]) -> StepCalibration:
    """Return the median of measured over predicted as a factor on the whole step."""
    return _entry(runs, gpu_factor=math.exp(statistics.median(_log_ratios(runs, 1.0))), host_factor=None)


def _entry(runs: Sequence[Run], *, gpu_factor: float, host_factor: float | None) -> StepCalibration:
    steps = [(entry["step_time_s"], entry["time_split"]) for entry in map(predict_run, runs)]
    return StepCalibration(
        gpu_factor=gpu_factor,
        host_factor=host_factor,
        runs=tuple(run.name for run in runs),
        communication_share=statistics.fmean(communication_share(*step) for step in steps),
        bubble_share=statistics.fmean(bubble_share(*step) for step in steps),
        log2_micro_batch=statistics.fmean(math.log2(run.built.layout.micro_batch) for run in runs),
    )


def predicted_s(run: Run, entry: StepCalibration | None = None) -> float:
    """Return the predicted step seconds of ``run``, calibrated by ``entry`` if given.

    Raises:
        BadInputError: the run cannot be priced.
    """
    job = run.built.job
    return float(predict_run(run, job if entry is None else with_step(job, entry))["step_time_s"])


def _log_ratios(runs: Sequence[Run], ratio: float) -> list[float]:
    """Return log(measured / predicted) of each run with the host floor over GPU time at ``ratio``."""
    found = []
    for run in runs:
        profile = run.built.job.profile
        profile = dataclasses.replace(profile, host_floor_s=ratio * profile.host_floor_s)
        seconds = predict_run(run, dataclasses.replace(run.built.job, profile=profile))["step_time_s"]
        found.append(math.log(_measured_s(run) / seconds))
    return found


def _host_over_gpu(runs: Sequence[Run]) -> float:
    """Return the host floor over GPU time at which all runs ask for the same GPU factor.

    1 where no floor in the range brings them closer together: the host limits none of them.
    """

    def spread(log_ratio: float) -> float:
        return statistics.pstdev(_log_ratios(runs, math.exp(log_ratio)))

    low, high = (math.log(end) for end in HOST_RANGE)
    grid = [low + (high - low) * i / _GRID for i in range(_GRID + 1)]
    spreads = [spread(point) for point in grid]
    best = spreads.index(min(spreads))
    # At the low end of the range no floor is left that could bind.
    if spreads[best] >= spreads[0]:
        return 1.0
    return math.exp(_golden(spread, grid[max(0, best - 1)], grid[min(_GRID, best + 1)]))


def _golden(value: Callable[[float], float], low: float, high: float) -> float:
    """Return the place of the least ``value`` between ``low`` and ``high`` by golden-section search."""
    share = (math.sqrt(5.0) - 1.0) / 2.0
    for _ in range(_REFINE):
        left, right = high - share * (high - low), low + share * (high - low)
        if value(left) <= value(right):
            high = right
        else:
            low = left
    return (low + high) / 2.0


def _left_out(before: dict[str, float]) -> dict[str, float]:
    """Return the error of each run under the median factor of the others."""
    found = {}
    for name, error in before.items():
        others = [1 / (1 + other) for key, other in before.items() if key != name]
        found[name] = (1 + error) * statistics.median(others) - 1
    return found


def _measured_s(run: Run) -> float:
    """Return the measured step seconds.

    Raises:
        BadInputError: the record has none.
    """
    seconds = measured_step_s(run.record)
    if seconds is None or not math.isfinite(seconds) or seconds <= 0:
        raise BadInputError(
            "NEST-K01",
            f"{run.path} has no measured step time",
            factors=[Factor("measured.step_time_s", run.record["measured"].get("step_time_s"))],
        )
    return seconds


def _common_key(runs: Sequence[Run]) -> str:
    """Return the store key of all runs.

    Raises:
        BadInputError: they do not share one, or two have the same id.
    """
    keys = {str(run.path): step_key_of(run.built.job, run.built.cluster) for run in runs}
    if len(set(keys.values())) > 1:
        raise BadInputError(
            "NEST-K03",
            "the runs differ in machine, stack, precision or model: calibrate them one by one",
            factors=[Factor(path, key) for path, key in keys.items()],
        )
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise BadInputError(
            "NEST-K03", "two runs have the same id", factors=[Factor("id", name) for name in names]
        )
    return next(iter(keys.values()))
