"""Our rank groups are Megatron's: compared with ``RankGenerator`` for random grids and both order strings."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest

from nest_megatron.cluster.rank_groups import GROUP_AXES, groups_of_rank, rank_groups
from nest_megatron.errors import PlannerFault
from nest_megatron.specs.layout import Layout, Order

pytestmark = pytest.mark.integration

GRIDS = 500
LARGEST_WORLD = 1024
#: Group -> the token that ``initialize_model_parallel`` asks its generator for, when the name is not it.
TOKENS = {"dp_cp": "dp-cp", "tp_cp": "tp-cp", "tp_pp": "tp-pp", "etp": "tp", "edp": "dp", "etp_ep": "tp-ep"}


@pytest.fixture(scope="module")
def generator() -> Any:
    """megatron-core's own ``RankGenerator``; it needs no process group."""
    pytest.importorskip("megatron.core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.parallel_state import RankGenerator
    return RankGenerator


def random_grids(seed: int) -> Iterator[Layout]:
    """Yield layouts of random degrees, not only powers of two, both grids covering the same ranks."""
    chance = random.Random(seed)
    while True:
        tp, cp, dp, pp = (chance.choice((1, 1, 2, 2, 3, 4, 5, 8, 16)) for _ in range(4))
        inner = tp * cp * dp
        if inner * pp > LARGEST_WORLD:
            continue
        etp = chance.choice([d for d in range(1, inner + 1) if inner % d == 0])
        ep = chance.choice([d for d in range(1, inner // etp + 1) if inner // etp % d == 0])
        yield Layout(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep, edp=inner // etp // ep)


def by_megatron(generator: Any, layout: Layout) -> dict[str, set[tuple[int, ...]]]:
    """Return name -> groups as megatron-core forms them."""
    dense = generator(
        tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=layout.order, rank_offset=0
    )
    expert = generator(
        tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=layout.order, rank_offset=0
    )
    grids = {"dense": dense, "expert": expert}
    return {
        name: {tuple(group) for group in grids[grid].get_ranks(TOKENS.get(name, name))}
        for name, (grid, _) in GROUP_AXES.items()
    }


def test_groups_are_those_of_rank_generator(generator: Any) -> None:
    """500 random grids, worlds up to 1,024, both orders: every group of every kind is the same."""
    worlds = []
    for layout in itertools.islice(random_grids(0), GRIDS):
        worlds.append(layout.world)
        for order in get_args(Order):
            ordered = replace(layout, order=order)
            ours = {name: set(groups) for name, groups in rank_groups(ordered).items()}
            assert ours == by_megatron(generator, ordered), ordered.describe()
    assert max(worlds) > LARGEST_WORLD // 2
    assert len({world & (world - 1) == 0 for world in worlds}) == 2, "both powers of two and other worlds"


def test_the_orders_differ_where_they_should() -> None:
    """With pipeline and data parallelism the two order strings give other groups; tensor groups stay."""
    layout = Layout(tp=2, pp=2, dp=2, etp=2, edp=2)
    first, second = (rank_groups(replace(layout, order=order)) for order in get_args(Order))
    assert first["dp"] == second["pp"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert first["pp"] == second["dp"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert first["tp"] == second["tp"]


def test_every_rank_is_in_one_group_of_each_kind() -> None:
    """The groups of a kind partition the ranks."""
    for layout in itertools.islice(random_grids(1), 20):
        for name, groups in rank_groups(layout).items():
            assert sorted(itertools.chain.from_iterable(groups)) == list(range(layout.world)), name
        rank = layout.world - 1
        assert all(rank in group for group in groups_of_rank(layout, rank).values())


def test_an_expert_grid_of_another_size_is_our_fault() -> None:
    """A layout whose two grids have other numbers of ranks never reaches a launch."""
    with pytest.raises(PlannerFault, match="NEST-X10"):
        rank_groups(Layout(tp=2, dp=2, etp=1, ep=1, edp=2))
