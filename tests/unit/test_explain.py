"""Why not this layout: every kind of answer, against the planner's own verdicts."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from nest_megatron.cluster.load import load_cluster
from nest_megatron.planner.evaluate import Evaluator, paired_ratio
from nest_megatron.planner.explain import Explanation, explain
from nest_megatron.planner.search import search
from nest_megatron.report.explain import render_explanation, verdict
from nest_megatron.rules import check
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Recompute
from tests import builders

JOB = builders.make_job({"tp": 4, "pp": 2, "sharding": "optim", "sequence_parallel": True})
CLUSTER = load_cluster("dgx-h100", num_gpus=JOB.num_gpus)


@pytest.fixture(scope="module")
def planned() -> Layout:
    """The layout that the search selects."""
    return search(JOB, CLUSTER).best


def ask(reference: Layout, job: TrainJob = JOB, base: Any = "plan", **why: Any) -> Explanation:
    """Ask why ``reference`` does not have other values."""
    return explain(job, CLUSTER, reference, why, base=base)


def text_of(explanation: Explanation) -> str:
    """Return the printed answer."""
    stream = io.StringIO()
    render_explanation(explanation, console=Console(file=stream, width=120))
    return stream.getvalue()


def test_an_illegal_layout_is_answered_with_its_rules(planned: Layout) -> None:
    """The violations are those of the rules, with factors and nearest choices."""
    answer = ask(planned, tp=3)
    assert answer.answer == "illegal"
    assert answer.prediction is None
    assert [v["code"] for v in answer.violations] == [v.code for v in check(JOB, answer.layout)]
    printed = text_of(answer)
    assert printed.startswith("ILLEGAL: with tp=3, ")
    assert "nearest:" in printed


def test_a_layout_that_does_not_fit_is_answered_with_terms_and_repair() -> None:
    """Too much memory: the worst stage, its terms, and what would make it fit."""
    job = dataclasses.replace(JOB, model=builders.llama70b())
    reference = search(job, CLUSTER).best
    answer = ask(reference, job, tp=1, pp=1, cp=1, recompute=Recompute())
    assert answer.answer == "does not fit"
    assert answer.prediction is not None
    assert not answer.prediction.feasible
    assert answer.repair is not None
    printed = text_of(answer)
    assert printed.startswith("DOES NOT FIT: ")
    assert "To make it fit, change" in printed
    assert "What does not help" in printed


def test_a_slower_layout_is_answered_with_the_ratio_and_the_term(planned: Layout) -> None:
    """The ratio is the paired one, the growth of all terms is the difference of the step times."""
    answer = ask(planned, recompute=Recompute(granularity="full", method="uniform", num_layers=1))
    assert answer.answer == "slower"
    assert answer.ratio == paired_ratio(JOB, CLUSTER, answer.layout, planned)
    assert next(iter(answer.growth_s)) == "recompute"
    assert answer.prediction is not None
    assert answer.reference_prediction is not None
    difference = answer.prediction.step_time_s - answer.reference_prediction.step_time_s
    assert sum(answer.growth_s.values()) == pytest.approx(difference, abs=1e-3)
    assert "recompute grows most" in verdict(answer)
    assert "Time per step, ms" in text_of(answer)


def test_the_same_layout_is_said_to_be_the_same(planned: Layout) -> None:
    """A question whose axes already have these values needs no comparison."""
    answer = ask(planned, tp=planned.tp)
    assert answer.answer == "same"
    assert answer.ratio == (1.0, 1.0)
    assert text_of(answer).startswith("SAME: ")


def test_a_near_tie_is_answered_with_what_decides() -> None:
    """Within 3 % of the plan, the reasons name head-room, changes or the shorter step."""
    result = search(JOB, CLUSTER)
    others = [x for x in (result.fastest, *result.runner_ups) if x != result.best]
    near = [x for x in others if max(paired_ratio(JOB, CLUSTER, x, result.best)) < 1.03]
    assert near
    for other in near:
        why = {axis: getattr(other, axis) for axis in ("tp", "pp", "vpp", "cp", "micro_batch", "sharding")}
        answer = ask(result.best, **why, layers=other.num_layers_per_chunk, recompute=other.recompute)
        assert answer.answer in ("equal", "faster")
        assert answer.reasons


def test_pins_are_the_first_reason(planned: Layout) -> None:
    """A faster layout that a pin forbids is answered with the pin and its origin."""
    slow = dataclasses.replace(JOB, pins={"tp": 8}, origins={"tp": "command line"})
    reference = search(slow, CLUSTER).best
    assert reference.tp == 8
    answer = ask(reference, slow, tp=planned.tp)
    assert answer.reasons[0] == "tp is pinned (command line)"


def test_a_user_layout_that_is_illegal_is_still_a_base() -> None:
    """From an illegal layout the question is answered, without a ratio."""
    job = builders.make_job({"tp": 3, "dp": 21})
    answer = ask(job.user_layout, job, base="user", tp=4)
    assert answer.answer == "not comparable"
    assert answer.ratio is None
    assert "itself is illegal" in text_of(answer)


def test_what_is_not_searched_is_said(planned: Layout) -> None:
    """A layout outside of the enumerated space is answered with where it lies."""
    heavy = ask(planned, vpp=2, pp=2, layers=(4, 12, 8, 8))
    assert any("split of the layers is not searched" in reason for reason in heavy.reasons)


def test_memory_and_time_are_the_evaluators(planned: Layout) -> None:
    """The explanation carries the prediction that plan and check would print for that layout."""
    answer = ask(planned, recompute=Recompute(granularity="full", method="block", num_layers=1))
    assert answer.prediction == Evaluator(JOB, CLUSTER).predict([answer.layout])[0]
