"""80 % band of a step time: half width in log, composed of what is uncertain about this prediction.

``half = sqrt(sum((coefficient[term] * amount[term]) ** 2))`` and the band is ``step * exp(-half)`` to
``step * exp(half)``.  The amounts are properties of the prediction; the coefficients are fitted on published
steps by ``scripts/bench_bands.py``, once without calibration and once with a scalar from runs of the same
model (``conf/validation/step_time_bands.yaml``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from nest_megatron.cluster.fields import Fields, parse_yaml, shipped_text, sourced_values
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout

#: Terms of a time split that are exposed communication.
COMMUNICATION = ("tp", "cp", "ep", "dp", "pp")
LOW_PRECISION = ("fp8", "fp4")
#: Terms of a band without calibration, and after it.
UNCALIBRATED = (
    "model",
    "full_shard",
    "eager_kernels",
    "low_precision",
    "communication",
    "bubble",
    "overhead",
)
CALIBRATED = ("model", "runs", "communication_change", "bubble_change", "batch_change", "eager_kernels")
#: Repeats of one layout differ by up to this share (noise floor of the measured data).
NOISE = 0.03
#: Without calibration an MoE band reaches at least 20 % below and above (research/moe.md, ranking advice).
MOE_LEAST_SHARE = 0.20


@dataclass(frozen=True, slots=True)
class BandCoefficients:
    """Term -> half width in log per unit of its amount, without and with a calibration scalar."""

    uncalibrated: Mapping[str, float]
    calibrated: Mapping[str, float]


@cache
def band_coefficients() -> BandCoefficients:
    """Return the shipped coefficients.

    Raises:
        BadInputError: the data file lost a key, a source, or holds a negative number.
    """
    where = "conf/validation/step_time_bands.yaml"
    plain = parse_yaml(shipped_text("validation", "step_time_bands"), where=where)
    names = {"uncalibrated": UNCALIBRATED, "calibrated": CALIBRATED}
    values = Fields.checked(sourced_values(plain, where=where), where, required=names).values
    return BandCoefficients(
        **{name: _coefficients(values[name], f"{where}: {name}", terms) for name, terms in names.items()}
    )


def _coefficients(plain: object, where: str, terms: Sequence[str]) -> dict[str, float]:
    fields = Fields.checked(plain, where, required=terms)
    return {term: fields.number(term, at_least=0.0, at_most=10.0) for term in terms}


def communication_share(step_s: float, split_s: Mapping[str, float]) -> float:
    """Return the share of exposed communication in a step of ``step_s``, whose terms are ``split_s``."""
    return sum(split_s.get(term, 0.0) for term in COMMUNICATION) / step_s


def bubble_share(step_s: float, split_s: Mapping[str, float]) -> float:
    """Return the share of the pipeline bubble in a step of ``step_s``, whose terms are ``split_s``."""
    return split_s.get("bubble", 0.0) / step_s


def band_amounts(
    job: TrainJob, layout: Layout, step_s: float, split_s: Mapping[str, float]
) -> dict[str, float]:
    """Return term -> amount for one prediction.

    ``model`` is 1, the error that every prediction has; ``full_shard``, ``eager_kernels`` and
    ``low_precision`` are 1 where the job has them; ``communication`` (its bandwidth and overlap are
    uncertain), ``bubble`` and ``overhead`` (host time and fixed overhead) are shares of the step.  With a
    calibration, ``runs`` is 1 / sqrt of the number of runs; ``communication_change``, ``bubble_change`` and
    ``batch_change`` are the distances to their mean in these shares and in log2 of the micro-batch.

    Args:
        split_s: term of the step -> seconds.
    """
    communication, bubble = communication_share(step_s, split_s), bubble_share(step_s, split_s)
    amounts = {
        "model": 1.0,
        "full_shard": float(layout.sharding == "optim_grads_params"),
        "eager_kernels": float(not job.kernels.transformer_engine),
        "low_precision": float(job.recipe.compute_dtype in LOW_PRECISION),
        "communication": communication,
        "bubble": bubble,
        "overhead": (split_s.get("host", 0.0) + split_s.get("overhead", 0.0)) / step_s,
    }
    scale = job.step_scale
    if scale is not None:
        amounts |= {
            "runs": 1.0 / math.sqrt(scale.num_runs),
            "communication_change": abs(communication - scale.communication_share),
            "bubble_change": abs(bubble - scale.bubble_share),
            "batch_change": abs(math.log2(layout.micro_batch) - scale.log2_micro_batch),
        }
    return amounts


def half_width(job: TrainJob, amounts: Mapping[str, float], coefficients: BandCoefficients) -> float:
    """Return the half width in log of the 80 % band."""
    scale = job.step_scale
    chosen = coefficients.uncalibrated if scale is None else coefficients.calibrated
    half = math.sqrt(sum((value * amounts[term]) ** 2 for term, value in chosen.items()))
    return max(half, least_half_width(experts=job.model.moe is not None, calibrated=scale is not None))


def least_half_width(*, experts: bool, calibrated: bool) -> float:
    """Return the half width in log that no band goes below."""
    return -math.log(1.0 - MOE_LEAST_SHARE) if experts and not calibrated else NOISE


def step_time_band_s(
    job: TrainJob, layout: Layout, step_s: float, split_s: Mapping[str, float]
) -> tuple[float, float]:
    """Return the 80 % band of a step of ``step_s`` seconds, whose terms are ``split_s``."""
    half = half_width(job, band_amounts(job, layout, step_s, split_s), band_coefficients())
    return step_s * math.exp(-half), step_s * math.exp(half)
