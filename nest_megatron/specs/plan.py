"""plan.json, schema 1: what the planner decided, what it predicts, and how far from optimal it can be."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nest_megatron.specs import codec
from nest_megatron.specs.layout import Layout

SCHEMA = 1

Band = Literal["FITS", "TIGHT", "OOM"]
Outcome = Literal["rewritten", "kept", "repaired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """One pipeline stage: where its memory peaks, and its compute time per micro-batch.

    Args:
        terms_bytes: allocated bytes by term at the peak phase; they sum to ``allocated_bytes``.
        busy_s: forward plus backward time of all its chunks for one micro-batch.
        in_flight: micro-batch chunks whose activations are alive at the peak.
    """

    stage: int
    num_layers: int
    allocated_bytes: int
    phase: str
    terms_bytes: dict[str, int]
    busy_s: float
    in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one layout is expected to do.  Bands are 80 % intervals."""

    step_time_s: float
    step_time_band_s: tuple[float, float]
    tokens_per_s_per_gpu: float
    mfu: float
    peak_allocated_bytes: int
    peak_device_bytes: int
    visible_bytes: int
    feasible: bool
    band: Band
    worst_stage: int
    worst_phase: str
    stages: tuple[StagePrediction, ...]
    time_split: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How exact the search was: ``gap = objective_s / lower_bound_s - 1`` over the enumerated space."""

    search_s: float
    configurations: int
    evaluated: int
    pruned: dict[str, int]
    lower_bound_s: float
    objective_s: float
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout with its prediction: a runner-up, or the user's own."""

    layout: Layout
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSide:
    """The user's layout beside the plan; ``prediction`` is None when the layout cannot be built at all."""

    layout: Layout
    prediction: Prediction | None
    violations: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The file contract between planning and launching.

    Args:
        outcome: ``rewritten`` (a better layout), ``kept`` (the user's is as good), ``repaired`` (the user's
            layout was illegal or did not fit).
        headline: the first line of every report.
        ratio: best predicted time over the user's, paired; (low, high) over the overlap interval, None
            when the user's layout has no time.
        rank_map: node name or index of each rank's node, in rank order, one entry per node.
        edits: dotted configuration key -> new value.
    """

    layout: Layout
    prediction: Prediction
    certificate: Certificate
    outcome: Outcome
    headline: str
    ratio: tuple[float, float] | None
    rank_map: dict[str, Any]
    env: dict[str, str]
    edits: dict[str, Any]
    user: UserSide
    runner_ups: tuple[Candidate, ...]
    rejections: dict[str, int]
    assumptions: tuple[str, ...]
    provenance: dict[str, Any]
    schema: int = SCHEMA

    def to_json(self) -> str:
        """Return the plan as JSON text, keys in declaration order."""
        return json.dumps(codec.to_plain(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "plan.json") -> Plan:
        """Read a plan.

        Raises:
            BadInputError: not JSON, another schema, an unknown or missing key, or a value of the wrong type.
        """
        plain = codec.parse_json(text, source=source)
        codec.check_schema(plain, SCHEMA, source=source)
        return codec.from_plain(cls, plain, source=source)

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan from a file."""
        return cls.from_json(codec.read_text(path), source=str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFailure:
    """Published instead of a plan, so that waiting ranks stop with the same message."""

    code: str
    message: str
    exit_code: int
    schema: int = SCHEMA
    failed: bool = field(default=True)

    def to_json(self) -> str:
        """Return the failure record as JSON text."""
        return json.dumps(codec.to_plain(self), indent=2) + "\n"
