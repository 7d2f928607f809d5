"""What a rule is, what breaking one looks like, and the registry that families fill."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nest_megatron.errors import Factor, PlannerFault
from nest_megatron.rules.versions import VersionFacts
from nest_megatron.specs.job import DERIVED, TrainJob
from nest_megatron.specs.layout import AXES, Layout

#: Origin of a layout value that differs from the one the configuration asked for.
PLANNED = "planner"

#: Axis -> field of Layout, where the names differ.
FIELDS: dict[str, str] = {axis: axis for axis in AXES} | {"layers": "num_layers_per_chunk"}


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule's verdict against a layout: what is wrong, in one sentence, and the quantities involved."""

    message: str
    factors: tuple[Factor, ...]


#: Returns None when the rule holds.  Legal layouts take this path 1e5 times: no allocation before a verdict.
RuleFunction = Callable[[TrainJob, Layout, VersionFacts], Broken | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One legality rule.

    Args:
        code: stable identifier, ``NEST-R`` + family letter + number.
        family: module that holds it.
        name: ``family.function``, the key of rejection histograms.
        axes: the axes of a layout its verdict depends on; dp counts as tp, cp, pp, and edp as etp, ep, pp.
        doc: one sentence.
        source: where Megatron enforces it, or what happens when nobody does.
    """

    code: str
    family: str
    name: str
    axes: frozenset[str]
    function: RuleFunction
    doc: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A broken rule, ready for a person: code, sentence, factors with origins, nearest legal choices."""

    code: str
    rule: str
    message: str
    factors: tuple[Factor, ...]
    nearest: tuple[str, ...]
    source: str

    def render(self) -> str:
        """Return the whole text: code, sentence, factors, nearest choices."""
        text = f"{self.code}: {self.message}"
        if self.factors:
            text += " [" + ", ".join(str(f) for f in self.factors) + "]"
        if self.nearest:
            text += " Nearest: " + "; ".join(self.nearest) + "."
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-shaped data, as stored in a plan's ``user.violations``."""
        return {
            "code": self.code,
            "rule": self.rule,
            "message": self.message,
            "factors": [{"name": f.name, "value": _plain(f.value), "origin": f.origin} for f in self.factors],
            "nearest": list(self.nearest),
            "source": self.source,
        }


def _plain(value: object) -> object:
    """Return ``value`` as JSON can hold it."""
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


_REGISTRY: dict[str, Rule] = {}


def rule(code: str, *axes: str, source: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule function under ``code``, reading exactly ``axes``.

    Raises:
        PlannerFault: the code is taken, an axis does not exist, or the function has no docstring.
    """

    def register(function: RuleFunction) -> RuleFunction:
        family = function.__module__.rsplit(".", 1)[-1]
        unknown = set(axes) - set(AXES)
        if code in _REGISTRY or unknown or not function.__doc__:
            raise PlannerFault("NEST-RX01", f"rule {code} is defective", factors=[Factor("axes", axes)])
        _REGISTRY[code] = Rule(
            code=code,
            family=family,
            name=f"{family}.{function.__name__}",
            axes=frozenset(axes),
            function=function,
            doc=" ".join(function.__doc__.split("\n\n")[0].split()),
            source=source,
        )
        return function

    return register


def registered() -> tuple[Rule, ...]:
    """Return every rule, in the order the families were imported."""
    return tuple(_REGISTRY.values())


def data_parallel(job: TrainJob, layout: Layout) -> int:
    """Return dp = world / (tp * pp * cp), 0 when the world does not divide."""
    model = layout.tp * layout.pp * layout.cp
    return 0 if job.num_gpus % model else job.num_gpus // model


def expert_data_parallel(job: TrainJob, layout: Layout) -> int:
    """Return edp = world / (etp * ep * pp), 0 when the world does not divide; models without experts too."""
    experts = layout.etp * layout.ep * layout.pp
    return 0 if job.num_gpus % experts else job.num_gpus // experts


def common_sequence(job: TrainJob) -> int:
    """Return the largest number that divides every sequence of the model: an encoder-decoder has two."""
    decoder = job.model.decoder
    return job.sequence_length if decoder is None else math.gcd(job.sequence_length, decoder.sequence_length)


def asked(job: TrainJob, layout: Layout, *axes: str) -> tuple[Factor, ...]:
    """Return one factor per axis, each with its origin."""
    factors = []
    for axis in axes:
        value = getattr(layout, FIELDS[axis])
        same = value == getattr(job.user_layout, FIELDS[axis])
        factors.append(Factor(axis, value, job.origin(axis) if same else PLANNED))
    return tuple(factors)


def given(job: TrainJob, name: str, value: object) -> Factor:
    """Return a factor that the configuration fixes."""
    return Factor(name, value, job.origin(name))


def derived(name: str, value: object) -> Factor:
    """Return a factor that follows from others."""
    return Factor(name, value, DERIVED)


def version(facts: VersionFacts) -> Factor:
    """Return the factor that names the megatron-core release whose rules apply."""
    return Factor("megatron_core_version", facts.version)
