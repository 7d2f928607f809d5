"""Changing axes of a layout: what follows, and spelling that can be read back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron.errors import BadInputError
from nest_megatron.planner.change import changed, differences, parse_value, spelled
from nest_megatron.planner.space import enumerate_space
from nest_megatron.rules import check
from nest_megatron.rules.base import FIELDS
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import AXES, Layout, Recompute
from tests import builders

DENSE = builders.make_job({"tp": 2, "pp": 4, "vpp": 2, "sharding": "optim", "sequence_parallel": True})
EXPERTS = builders.make_job(
    {"tp": 2, "pp": 2, "ep": 8, "etp": 1, "sequence_parallel": True}, model=builders.mixtral()
)
SMALL = builders.make_job(model=builders.llama8b(num_layers=4), num_gpus=8, global_batch=8)


@pytest.mark.parametrize(
    ("job", "values", "follows"),
    [
        (DENSE, {"tp": 4}, {"dp": 4, "num_layers_per_chunk": (4,) * 8}),
        (DENSE, {"tp": 1}, {"dp": 16, "sequence_parallel": False}),
        (DENSE, {"pp": 8}, {"dp": 4, "vpp": 2, "num_layers_per_chunk": (2,) * 16}),
        (DENSE, {"pp": 1}, {"dp": 32, "vpp": 1, "num_layers_per_chunk": (32,)}),
        (DENSE, {"pp": 16}, {"vpp": 2, "num_layers_per_chunk": (1,) * 32}),
        (DENSE, {"layers": (7, 9, 9, 7)}, {"vpp": 1}),
        (EXPERTS, {"ep": 4}, {"edp": 8, "dp": 16, "etp": 1}),
        (EXPERTS, {"tp": 4}, {"etp": 1, "sequence_parallel": True, "dp": 8}),
        (EXPERTS, {"tp": 1}, {"etp": 1, "sequence_parallel": False}),
    ],
)
def test_what_depends_on_an_axis_follows(
    job: TrainJob, values: dict[str, Any], follows: dict[str, Any]
) -> None:
    """Degrees that follow from others, the split, SP and vpp come along, and the layout is legal."""
    layout = changed(job, job.user_layout, values)
    assert {name: getattr(layout, name) for name in follows} == follows
    assert {axis: getattr(layout, FIELDS[axis]) for axis in values} == values
    assert check(job, layout) == ()


def test_interleaving_ends_where_the_release_forbids_it() -> None:
    """On a release without two-stage interleaving, pp = 2 brings vpp = 1 unless vpp is asked for."""
    job = builders.make_job({"tp": 2, "pp": 4, "vpp": 2}, megatron_core_version="0.7.0")
    assert changed(job, job.user_layout, {"pp": 2}).vpp == 1
    asked = changed(job, job.user_layout, {"pp": 2, "vpp": 2})
    assert [violation.rule for violation in check(job, asked)] == ["layers.two_stage_interleaving"]


def test_a_recomputed_block_is_cut_to_the_new_chunk() -> None:
    """Block recomputation never names more layers than a chunk has; uniform groups still divide it."""
    block = Recompute(granularity="full", method="block", num_layers=8)
    job = builders.make_job({"tp": 2, "pp": 4, "recompute": block})
    assert changed(job, job.user_layout, {"pp": 8}).recompute.num_layers == 4
    uniform = Recompute(granularity="full", method="uniform", num_layers=8)
    job = builders.make_job({"tp": 2, "pp": 4, "recompute": uniform})
    assert changed(job, job.user_layout, {"pp": 8}).recompute.num_layers == 4


def test_nothing_asked_changes_nothing() -> None:
    """Every enumerated layout is its own change of no axis."""
    space = enumerate_space(SMALL)
    for i in range(0, len(space), 7):
        layout = space.layout(i)
        assert changed(SMALL, layout, {}) == layout
        assert differences(SMALL, layout, layout, besides={}) == ()


@settings(deadline=None)
@given(data=st.data())
def test_spelling_is_read_back(data: st.DataObject) -> None:
    """``parse_value`` returns what ``spelled`` wrote, for every axis that can be asked for."""
    space = enumerate_space(SMALL)
    layout = space.layout(data.draw(st.integers(0, len(space) - 1)))
    axis = data.draw(st.sampled_from([a for a in AXES if a != "overlap"]))
    name, _, text = spelled(layout, axis).partition("=")
    value: Any = {"true": True, "false": False}.get(
        text, int(text) if text.isdigit() and axis != "layers" else text
    )
    assert name == axis
    assert parse_value(axis, value, origin="test") == getattr(layout, FIELDS[axis])


@pytest.mark.parametrize(
    ("axis", "value"),
    [
        ("tp", 0),
        ("tp", True),
        ("tp", "4"),
        ("pp", 10**9),
        ("sequence_parallel", 1),
        ("sharding", "zero3"),
        ("order", "dp-tp"),
        ("recompute", "full"),
        ("recompute", "full/block/0"),
        ("recompute", 3),
        ("layers", []),
        ("layers", "4+x"),
        ("layers", "1*99999+1*99999"),
        ("layers", [1, -1]),
        ("overlap", "p2p"),
        ("dp", 4),
        ("tpp", 4),
    ],
)
def test_a_value_without_meaning_is_refused(axis: str, value: Any) -> None:
    """An unknown axis or a value of another kind is bad input, named with what would be right."""
    with pytest.raises(BadInputError) as caught:
        parse_value(axis, value, origin="test")
    assert caught.value.code in ("NEST-S03", "NEST-S04")
    assert axis in str(caught.value)


@given(st.one_of(st.none(), st.integers(), st.text(), st.lists(st.integers()), st.booleans(), st.floats()))
def test_any_value_is_read_or_refused(value: Any) -> None:
    """Hostile values end in a layout value or in one sentence."""
    for axis in AXES:
        try:
            parsed = parse_value(axis, value, origin="test")
        except BadInputError:
            continue
        assert isinstance(changed(SMALL, SMALL.user_layout, {axis: parsed}), Layout)
