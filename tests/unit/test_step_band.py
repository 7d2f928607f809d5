"""80 % bands of the step time: shape, least widths, and the shipped coefficients."""

from __future__ import annotations

import dataclasses
import math

import pytest

from nest_megatron.cost.band import (
    CALIBRATED,
    MOE_LEAST_SHARE,
    NOISE,
    UNCALIBRATED,
    BandCoefficients,
    band_amounts,
    band_coefficients,
    half_width,
    step_time_band_s,
)
from nest_megatron.specs.scale import StepScale
from tests.builders import make_job, make_layout, mixtral

SPLIT = {"compute": 7.0, "tp": 1.0, "dp": 0.5, "bubble": 1.0, "host": 0.2, "overhead": 0.3}


def test_the_shipped_coefficients_have_every_term() -> None:
    """Both sets name exactly the terms of the model; the error of every prediction is not zero throughout."""
    coefficients = band_coefficients()
    assert tuple(coefficients.uncalibrated) == UNCALIBRATED
    assert tuple(coefficients.calibrated) == CALIBRATED
    assert coefficients.uncalibrated["model"] > 0


def test_amounts_are_shares_of_the_step() -> None:
    """Communication, bubble and overhead are shares; flags follow the job."""
    job = make_job({"tp": 2, "sharding": "optim"})
    amounts = band_amounts(job, job.user_layout, 10.0, SPLIT)
    assert amounts == {
        "model": 1.0,
        "full_shard": 0.0,
        "eager_kernels": 0.0,
        "low_precision": 0.0,
        "communication": pytest.approx(0.15),
        "bubble": pytest.approx(0.1),
        "overhead": pytest.approx(0.05),
    }
    fp8 = dataclasses.replace(job, recipe=dataclasses.replace(job.recipe, compute_dtype="fp8"))
    eager = dataclasses.replace(fp8, kernels=dataclasses.replace(job.kernels, transformer_engine=False))
    layout = make_layout(eager, sharding="optim_grads_params")
    flags = band_amounts(eager, layout, 10.0, SPLIT)
    assert (flags["full_shard"], flags["eager_kernels"], flags["low_precision"]) == (1.0, 1.0, 1.0)


def test_distances_are_to_the_calibration_runs() -> None:
    """With a scale, the amounts hold 1 / sqrt(runs) and the distances in communication and micro-batch."""
    scale = StepScale(
        factor=1.1, num_runs=4, communication_share=0.05, bubble_share=0.3, log2_micro_batch=0.0
    )
    job = make_job({"micro_batch": 4}, step_scale=scale)
    amounts = band_amounts(job, job.user_layout, 10.0, SPLIT)
    assert amounts["runs"] == 0.5
    assert amounts["communication_change"] == pytest.approx(0.10)
    assert amounts["bubble_change"] == pytest.approx(0.20)
    assert amounts["batch_change"] == 2.0


def test_terms_add_as_squares() -> None:
    """Two terms of 3 and 4 percent make a half width of 5 percent in log, on both sides of the step."""
    uncalibrated = dict.fromkeys(UNCALIBRATED, 0.0) | {"model": 0.03, "bubble": 0.4}
    coefficients = BandCoefficients(uncalibrated, dict.fromkeys(CALIBRATED, 0.0))
    job = make_job({})
    amounts = band_amounts(job, job.user_layout, 10.0, SPLIT)
    assert half_width(job, amounts, coefficients) == pytest.approx(0.05)
    low, high = step_time_band_s(job, job.user_layout, 10.0, SPLIT)
    assert math.sqrt(low * high) == pytest.approx(10.0)


def test_no_band_is_narrower_than_the_noise() -> None:
    """A band never goes below the spread of repeated runs, an uncalibrated MoE band never below 20 %."""
    nothing = BandCoefficients(dict.fromkeys(UNCALIBRATED, 0.0), dict.fromkeys(CALIBRATED, 0.0))
    scale = StepScale(factor=1.0, num_runs=2, communication_share=0.0, bubble_share=0.0, log2_micro_batch=0.0)
    for job, least in (
        (make_job({}), NOISE),
        (make_job({}, model=mixtral()), -math.log(1 - MOE_LEAST_SHARE)),
        (make_job({}, model=mixtral(), step_scale=scale), NOISE),
    ):
        amounts = band_amounts(job, job.user_layout, 10.0, SPLIT)
        assert half_width(job, amounts, nothing) == pytest.approx(least)


@pytest.mark.parametrize("term", ["tp", "cp", "ep", "dp", "pp", "bubble"])
def test_more_of_an_uncertain_term_widens_the_band(term: str) -> None:
    """The same step with a second more of communication or bubble, and less compute, is less certain."""
    job = make_job({})
    more = SPLIT | {term: SPLIT.get(term, 0.0) + 1.0, "compute": 6.0}
    before = step_time_band_s(job, job.user_layout, 10.0, SPLIT)
    after = step_time_band_s(job, job.user_layout, 10.0, more)
    assert after[0] < before[0] and after[1] > before[1]
