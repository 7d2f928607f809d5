"""plan.json, schema 1: what the planner decided, what it predicts, and how far from optimal it can be."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nest_megatron.specs import codec
from nest_megatron.specs.layout import Layout, Order
from nest_megatron.specs.settings import RobustMeasure

SCHEMA = 1

Band = Literal["FITS", "TIGHT", "OOM"]
Outcome = Literal["rewritten", "kept", "repaired"]
#: Who decides which node gets which ranks: Slurm (names in natural order), torchrun's dynamic rendezvous
#: (names as strings), or the hostfiles beside the plan.
NodeOrder = Literal["slurm", "torchrun", "map"]


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
class OrderPrice:
    """Step time of the plan's layout under one of Megatron's rank orders on one order of nodes."""

    order: Order
    nodes: NodeOrder
    step_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisCrossings:
    """How many groups of one axis leave a unit of each level; the outermost level has one unit and is absent.

    Args:
        mapped, default: level name -> groups, with the map and in the scheduler's order.
    """

    axis: str
    size: int
    groups: int
    mapped: dict[str, int]
    default: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMap:
    """Which node holds which ranks, what that is worth, and how far from the best map it can be.

    Args:
        nodes: node of each block of ``gpus_per_node`` ranks; empty when the cluster has no node names.
        step_time_s: with the map; ``default_step_time_s``: in the scheduler's own order.
        bound_s: no assignment of ranks to GPUs is priced below this; None without node names.
        optimal: no other order of whole nodes is faster.
        priced: orders that were priced exactly; ``estimated``: orders that were only estimated.
    """

    order: Order
    nodes: tuple[str, ...]
    gpus_per_node: int
    step_time_s: float
    default_step_time_s: float
    bound_s: float | None
    optimal: bool
    priced: int
    estimated: int
    search_s: float
    prices: tuple[OrderPrice, ...]
    crossings: tuple[AxisCrossings, ...]

    @property
    def gain(self) -> float:
        """Share of the default order's step time that the map saves."""
        return 1.0 - self.step_time_s / self.default_step_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioPrice:
    """Step time of the plan and of the nominal plan with some levels at another bandwidth.

    Args:
        factors: level name -> bandwidth factor; empty for the network as it is.
    """

    factors: dict[str, float]
    step_time_s: float
    nominal_step_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Robust:
    """What a robust plan is worth under the cluster's scenarios.

    Args:
        value_s: the measure of the plan; ``nominal_value_s``: of the layout that is chosen without scenarios.
        lower_bound_s: no layout of the enumerated space, in the memory band of the nominal plan, is below it.
        gap: ``value_s / lower_bound_s - 1``; above zero also where the user's own layout is kept.
        visited: candidates solved under the scenarios; ``evaluated``: simulations.
    """

    measure: RobustMeasure
    value_s: float
    nominal_layout: Layout
    nominal_value_s: float
    lower_bound_s: float
    gap: float
    configurations: int
    visited: int
    evaluated: int
    scenarios: tuple[ScenarioPrice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The file contract between planning and launching.

    Args:
        outcome: ``rewritten`` (a better layout), ``kept`` (the user's is as good), ``repaired`` (the user's
            layout was illegal or did not fit).
        headline: the first line of every report.
        ratio: best predicted time over the user's, paired; (low, high) over the overlap interval, None
            when the user's layout has no time.
        prediction: of ``layout`` in the scheduler's default order of nodes; ``rank_map`` says what the
            hostfiles change.
        edits: dotted configuration key -> new value.
        robust: what the scenarios say, None when the plan was made for the network as it is.
    """

    layout: Layout
    prediction: Prediction
    certificate: Certificate
    outcome: Outcome
    headline: str
    ratio: tuple[float, float] | None
    rank_map: RankMap
    env: dict[str, str]
    edits: dict[str, Any]
    user: UserSide
    runner_ups: tuple[Candidate, ...]
    rejections: dict[str, int]
    assumptions: tuple[str, ...]
    provenance: dict[str, Any]
    robust: Robust | None = None
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
