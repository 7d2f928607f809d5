"""Edits written as Hydra overrides, read back by Hydra's own parser."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from nest_megatron.errors import PlannerFault
from nest_megatron.launch.overrides import override_strings

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF)),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@given(VALUES)
def test_hydra_reads_the_same_value_back(value: object) -> None:
    """Whatever a plan edits, Hydra's parser gives the same value and the same type back, and no sweep."""
    (text,) = override_strings({"model.key": value})
    override = OverridesParser.create().parse_override(text)
    assert override.is_force_add()
    assert not override.is_sweep_override()
    assert override.key_or_group == "model.key"
    assert override.value() == value
    assert type(override.value()) is type(value)


@pytest.mark.parametrize(
    "text", ["null", "true", "1", "1e3", "a,b", "[1]", "{a:1}", "", " x ", "it's", "\\", "a\\'"]
)
def test_text_stays_text(text: str) -> None:
    """Text that looks like another type, a list or a sweep stays the same text."""
    (written,) = override_strings({"key": text})
    assert OverridesParser.create().parse_override(written).value() == text


def test_value_without_a_spelling_is_refused() -> None:
    """A value that the grammar cannot carry is a defect of ours, not a silently different override."""
    with pytest.raises(PlannerFault):
        override_strings({"key": {1: 2}})
