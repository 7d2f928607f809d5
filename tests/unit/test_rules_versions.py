from __future__ import annotations

from itertools import pairwise

import pytest

from nest_megatron.errors import BadInputError
from nest_megatron.rules.versions import NEWEST, OLDEST, facts_for


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("0.16.1", "0.16"),
        ("0.17.0rc0", "0.17"),
        ("core_r0.9.0", "0.9"),
        ("core_v0.13.1", "0.13"),
        ("v0.10", "0.10"),
        ("main", "0.20"),
        ("1.0.0", "0.20"),
        ("0.31", "0.20"),
    ],
)
def test_versions_are_read(text: str, release: str) -> None:
    """Packages, branches and tags name a release; newer ones than known have the newest facts."""
    assert facts_for(text).version == release


@pytest.mark.parametrize("text", ["", "latest", "0", "0.x", "nemo-2.0", "0.4.0"])
def test_unreadable_versions_are_bad_input(text: str) -> None:
    """What is no version, or older than any known rule set, is bad input with a proposal."""
    with pytest.raises(BadInputError) as caught:
        facts_for(text)
    assert caught.value.nearest


def test_facts_only_grow() -> None:
    """A later release never loses a recompute module or a fact."""
    known = [facts_for(f"0.{minor}") for minor in range(OLDEST[1], NEWEST[1] + 1)]
    for older, newer in pairwise(known):
        assert set(older.recompute_modules) <= set(newer.recompute_modules)
        for fact in older.__dataclass_fields__:
            if isinstance(getattr(older, fact), bool):
                assert getattr(older, fact) <= getattr(newer, fact), fact
