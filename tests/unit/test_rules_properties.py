from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron import rules
from nest_megatron.errors import PlannerFault
from nest_megatron.rules.base import FIELDS, Rule
from nest_megatron.rules.nearest import layer_shapes
from nest_megatron.rules.versions import facts_for
from nest_megatron.specs.job import Kernels, TrainJob
from nest_megatron.specs.layout import AXES, Layout, Overlap, Recompute
from tests.builders import EVERYTHING, deepseek_v2, llama8b, make_job, mixtral
from tests.legality_cases import CASES, EVEN_ONLY, NEVER_OFFERED, NO_STRING, Case

ALL_CASES = (*CASES, *NEVER_OFFERED)
MODELS = (
    llama8b(),
    mixtral(),
    deepseek_v2(),
    mixtral(linear_bias=True),
    llama8b(num_layers=7, num_query_groups=2),
)
VERSIONS = ("0.5.0", "0.7.0", "0.8.0", "0.9.0", "0.10.0", "0.13.0", "0.15.0", "0.16.1", "main")
DEGREES = st.sampled_from((1, 1, 2, 2, 3, 4, 8))

#: Axis -> values, legal or not.
VALUES: dict[str, st.SearchStrategy[object]] = {
    "tp": DEGREES,
    "cp": DEGREES,
    "pp": DEGREES,
    "ep": DEGREES,
    "etp": DEGREES,
    "vpp": DEGREES,
    "micro_batch": DEGREES,
    "sequence_parallel": st.booleans(),
    "layers": st.lists(st.integers(-1, 32), max_size=8).map(tuple)
    | st.builds(lambda n, k: (n,) * k, st.sampled_from((4, 8, 16, 32)), st.integers(1, 8)),
    "sharding": st.tuples(
        st.sampled_from(("none", "optim", "optim_grads", "optim_grads_params")),
        st.sampled_from((0, 1, 1, 2, 3)),
    ),
    "recompute": st.builds(
        Recompute,
        granularity=st.sampled_from(("none", "selective", "full")),
        method=st.sampled_from(("none", "uniform", "block")),
        num_layers=st.integers(0, 5),
        modules=st.lists(st.sampled_from(("core_attn", "moe_act", "mla_up_proj", "x")), max_size=2).map(
            tuple
        ),
    ),
    "overlap": st.builds(
        Overlap,
        grad_reduce=st.booleans(),
        param_gather=st.booleans(),
        tp_comm=st.booleans(),
        p2p=st.booleans(),
        expert_all_to_all=st.booleans(),
    ),
    "order": st.sampled_from(("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")),
}


@st.composite
def jobs(draw: st.DrawFn) -> TrainJob:
    """Jobs of several models, worlds, versions and dialects."""
    return make_job(
        model=draw(st.sampled_from(MODELS)),
        num_gpus=draw(st.sampled_from((1, 8, 12, 64))),
        global_batch=draw(st.sampled_from((1, 48, 64, 256))),
        sequence_length=draw(st.sampled_from((1024, 1026, 4096))),
        megatron_core_version=draw(st.sampled_from(VERSIONS)),
        capabilities=draw(st.sampled_from((EVERYTHING, NO_STRING, EVEN_ONLY))),
        kernels=Kernels(transformer_engine=draw(st.booleans())),
        rampup_batches=draw(st.sampled_from(((), (16, 32)))),
        evaluation_batch=draw(st.sampled_from((None, 24))),
    )


def with_axis(job: TrainJob, layout: Layout, axis: str, value: object) -> Layout:
    """``layout`` with one axis set and dp, edp as the planner would derive them."""
    if axis == "sharding":
        assert isinstance(value, tuple)
        layout = replace(layout, sharding=value[0], num_optimizer_instances=value[1])
    else:
        layout = replace(layout, **{FIELDS[axis]: value})
    return replace(
        layout,
        dp=job.num_gpus // (layout.tp * layout.pp * layout.cp),
        edp=job.num_gpus // (layout.etp * layout.ep * layout.pp),
    )


@st.composite
def wild(draw: st.DrawFn) -> tuple[TrainJob, Layout]:
    """A job and a layout whose axes are drawn independently."""
    job = draw(jobs())
    layout = Layout(global_batch=job.global_batch)
    for axis in AXES:
        layout = with_axis(job, layout, axis, draw(VALUES[axis]))
    return job, layout


#: Rules that can break while every degree is positive and dp, edp are derived.
POSITIVE = tuple(r for r in rules.RULES if r.name not in ("grid.degrees", "grid.derived_degrees"))

#: Axis -> a few values that matter to some rule.
OTHER_VALUES: dict[str, tuple[object, ...]] = {
    "tp": (1, 2, 3, 8),
    "cp": (1, 2, 3),
    "pp": (1, 2, 3, 8),
    "ep": (1, 2, 3, 8),
    "etp": (1, 2, 3, 8),
    "vpp": (1, 2, 5),
    "micro_batch": (1, 2, 3),
    "sequence_parallel": (False, True),
    "layers": ((32,), (16, 16), (8,) * 4, (0, 32), (10, 6, 8, 8)),
    "sharding": (("none", 1), ("optim", 1), ("optim", 2), ("optim", 3), ("optim_grads", 1)),
    "recompute": (
        Recompute(),
        Recompute(granularity="full"),
        Recompute(granularity="full", method="uniform", num_layers=5),
        Recompute(granularity="selective", modules=("moe_act",)),
    ),
    "overlap": (
        Overlap(),
        Overlap(p2p=True),
        Overlap(param_gather=True),
        Overlap(tp_comm=True),
        Overlap(expert_all_to_all=True),
    ),
    "order": ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"),
}

#: An expert grid equal to the dense one, so that every axis of the order rule can unbalance it.
FOLDED = Case(
    "grid.order_of_two_grids",
    "own",
    {"model": mixtral()},
    {"tp": 2, "cp": 2, "pp": 2, "ep": 4, "etp": 1, "sequence_parallel": True, "order": "tp-cp-ep-pp-dp"},
    {"sharding": "optim", "num_optimizer_instances": 2},
)


def verdicts(job: TrainJob, layout: Layout, chosen: tuple[Rule, ...]) -> dict[str, bool]:
    """Rule code -> whether the layout breaks it."""
    facts = facts_for(job.megatron_core_version)
    return {rule.code: rule.function(job, layout, facts) is not None for rule in chosen}


@settings(max_examples=300, deadline=None)
@given(wild(), st.sampled_from(AXES), st.data())
def test_rules_read_only_the_axes_they_declare(
    drawn: tuple[TrainJob, Layout], axis: str, data: st.DataObject
) -> None:
    """A rule's verdict does not change with an axis it does not declare."""
    job, layout = drawn
    changed = with_axis(job, layout, axis, data.draw(VALUES[axis]))
    others = tuple(rule for rule in rules.RULES if axis not in rule.axes)
    assert verdicts(job, layout, others) == verdicts(job, changed, others)


def test_declared_axes_matter() -> None:
    """Each axis a rule declares changes its verdict somewhere, so no rule waits for an axis in vain."""
    flipped: set[tuple[str, str]] = set()
    for example in (*ALL_CASES, FOLDED):
        job, layout = example.build()
        for start in (layout, example.repaired()):
            before = verdicts(job, start, POSITIVE) if start.micro_batch else {}
            for axis in AXES:
                for value in OTHER_VALUES[axis]:
                    after = verdicts(job, with_axis(job, start, axis, value), POSITIVE)
                    flipped.update((code, axis) for code in before if before[code] != after[code])
    missing = {
        (rule.name, axis) for rule in POSITIVE for axis in rule.axes if (rule.code, axis) not in flipped
    }
    assert missing == set()


@settings(max_examples=100, deadline=None)
@given(wild(), st.permutations(AXES))
def test_depth_order_applies_every_rule_once(drawn: tuple[TrainJob, Layout], order: list[str]) -> None:
    """Any binding order holds each rule once, where its last axis is bound, and agrees with check."""
    job, layout = drawn
    levels = rules.rules_by_depth(order)
    flat = [rule for level in levels for rule in level]
    assert sorted(r.code for r in flat) == sorted(r.code for r in rules.RULES)
    for i, level in enumerate(levels):
        for rule in level:
            assert rule.axes <= set(order[: i + 1])
            assert order[i] in rule.axes or (i == 0 and not rule.axes)
    legal = all(rules.first_code(job, layout, level) is None for level in levels)
    assert legal == (rules.check(job, layout) == ())


@settings(max_examples=100, deadline=None)
@given(wild())
def test_first_code_is_the_first_violation(drawn: tuple[TrainJob, Layout]) -> None:
    """The fast judge and the explaining one agree."""
    job, layout = drawn
    codes = [violation.code for violation in rules.check(job, layout)]
    assert rules.first_code(job, layout) == (codes[0] if codes else None)


def test_frozen_axes_count_as_bound() -> None:
    """An axis left out of the binding order is bound from the start."""
    (only,) = rules.rules_by_depth(["tp"])
    assert only == rules.RULES
    pp, vpp = rules.rules_by_depth(["pp", "vpp"])
    assert {rule.name for rule in vpp} == {rule.name for rule in rules.RULES if "vpp" in rule.axes}
    assert len(pp) + len(vpp) == len(rules.RULES)


@pytest.mark.parametrize("order", [[], ["tp", "tp"], ["dp"]])
def test_a_wrong_binding_order_is_our_fault(order: list[str]) -> None:
    """A binding order with unknown, repeated or no axes is refused as a defect of the planner."""
    with pytest.raises(PlannerFault):
        rules.rules_by_depth(order)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 130), st.integers(1, 16), st.integers(1, 6))
def test_layer_shapes_lose_no_layer(num_layers: int, pp: int, vpp: int) -> None:
    """Every proposed split has one positive count per chunk and holds all layers."""
    for shape in layer_shapes(num_layers, pp, vpp):
        assert len(shape) == pp * vpp
        assert sum(shape) == num_layers
        assert min(shape) >= 1
    assert bool(layer_shapes(num_layers, pp, vpp)) == (num_layers >= pp * vpp)
