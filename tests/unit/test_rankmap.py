"""Rank maps against three optima that do not share the search: all node orders, all GPU maps, a MILP."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from nest_megatron import rules
from nest_megatron.cluster.allocation import in_order, make_concrete, natural_order
from nest_megatron.cluster.load import load_cluster
from nest_megatron.cluster.rank_groups import rank_groups
from nest_megatron.cluster.slots import slot_tree
from nest_megatron.launch.hostfile import NODES_NAME, RANKS_NAME, write_hostfiles
from nest_megatron.planner import rankmap
from nest_megatron.planner.arrangements import arrangements, factor_sequences, packed, place_tree
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.planner.placement import LoadEstimate, axes_of, axis_groups
from nest_megatron.planner.rankmap import SMALLEST_GAIN, OrderPricer, rank_map, safest_gain
from nest_megatron.specs.cluster import Cluster, Unit
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout
from tests.builders import make_job, make_layout, mixtral
from tests.placement import (
    best_node_order_s,
    best_slot_map_s,
    fragmented,
    placement_gap,
    small_layout,
    small_tree,
)


def two_leaves(order: str = "abcdefgh") -> Cluster:
    """Eight nodes whose names alternate between two leaves, with a slow spine."""
    base = load_cluster("dgx-h100-2to1")
    units = (
        Unit(level="leaf", name="even", nodes=("a", "c", "e", "g")),
        Unit(level="leaf", name="odd", nodes=("b", "d", "f", "h")),
    )
    cluster = dataclasses.replace(base, nodes=tuple("abcdefgh"), num_nodes=8, units=units)
    return in_order(cluster, order)


def small_case(
    seed: int, nodes: tuple[int, ...], per_node: tuple[int, ...]
) -> tuple[TrainJob, Layout, Cluster]:
    """A random small tree and a random layout on it."""
    rng = random.Random(seed)
    cluster = small_tree(
        rng, nodes=rng.choice(nodes), per_node=rng.choice(per_node), depth=rng.choice((1, 1, 2))
    )
    return *small_layout(rng, cluster.num_gpus), cluster


# -- optimality ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_small_maps_equal_brute_force(seed: int) -> None:
    """On 3 to 5 nodes no permutation of the nodes is faster, beyond the gain that a map must reach."""
    job, layout, cluster = small_case(seed, (3, 4, 5), (2, 4))
    found = rank_map(job, cluster, layout)
    best_s = best_node_order_s(job, cluster, layout)
    assert found.optimal
    if found.gain > 0:
        assert found.step_time_s == pytest.approx(best_s, rel=1e-12)
    else:
        assert found.step_time_s * (1 - SMALLEST_GAIN) <= best_s
    priced = Evaluator(job, in_order(cluster, found.nodes)).step_times_s([layout])[0]
    assert priced == pytest.approx(found.step_time_s, rel=1e-12)
    assert found.bound_s <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_no_map_of_gpus_is_below_the_bound(seed: int) -> None:
    """Every assignment of ranks to GPUs, node by node or not, is priced at the bound or above."""
    job, layout, cluster = small_case(seed, (3,), (2,))
    found = rank_map(job, cluster, layout)
    best_s = best_slot_map_s(job, cluster, layout)
    assert found.bound_s <= best_s * (1 + 1e-9)
    assert best_s <= found.step_time_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_the_search_reaches_the_least_load_of_a_mixed_integer_program(seed: int) -> None:
    """What the constructions and the local search of large allocations find has the MILP's least load."""
    ours, least = placement_gap(seed, nodes=(8, 9, 10, 12))
    assert least * (1 - 1e-9) <= ours <= least * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_a_map_is_never_slower_than_the_scheduler(seed: int) -> None:
    """On fragmented allocations of 16 to 128 nodes; ``scripts/bench_rankmap.py`` does the same for 200."""
    job, cluster, layout = fragmented(seed)
    found = rank_map(job, cluster, layout, orders=job.capabilities.orders)
    default_s = Evaluator(job, cluster).step_times_s([layout])[0]
    placed = dataclasses.replace(layout, order=found.order)
    mapped_s = Evaluator(job, in_order(cluster, found.nodes)).step_times_s([placed])[0]
    assert mapped_s <= default_s
    assert mapped_s == pytest.approx(found.step_time_s, rel=1e-12)
    assert found.bound_s <= mapped_s
    assert Counter(found.nodes) == Counter(cluster.nodes)


def test_alternating_leaves_are_untangled() -> None:
    """Names that alternate between two leaves make each ring hop cross the spine; the map untangles them."""
    job = make_job({"tp": 8, "pp": 2, "sequence_parallel": True, "sharding": "optim"})
    found = rank_map(job, two_leaves(), job.user_layout)
    leaf_of = {node: unit.name for unit in two_leaves().units for node in unit.nodes}
    for stage in (found.nodes[:4], found.nodes[4:]):
        assert len({leaf_of[node] for node in stage}) == 1
    (dp,) = (axis for axis in found.crossings if axis.axis == "dp_cp")
    assert (dp.default["leaf"], dp.mapped["leaf"]) == (16, 0)
    assert found.gain > 0.01


def test_a_slow_leaf_is_avoided_by_what_hurts_most() -> None:
    """One of two leaves has a slow uplink; data parallel groups stay inside, only pipelines leave it."""
    cluster = two_leaves()
    units = (dataclasses.replace(cluster.units[0], uplink_bytes_per_s=1e9), cluster.units[1])
    slow = dataclasses.replace(cluster, units=units)
    job = make_job({"tp": 8, "pp": 2, "sequence_parallel": True})
    found = rank_map(job, slow, job.user_layout)
    assert found.gain > 0.1
    assert found.default_step_time_s > rank_map(job, cluster, job.user_layout).default_step_time_s


# -- invariance ------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_map() -> None:
    """No clock and no hash order decides: two runs agree in everything but the time they took."""
    job, cluster, layout = fragmented(1)
    first, second = (dataclasses.replace(rank_map(job, cluster, layout), search_s=0.0) for _ in range(2))
    assert first == second


def test_names_do_not_matter() -> None:
    """Renaming nodes so that their order stays the same changes no price."""
    job = make_job({"tp": 8, "pp": 2})
    cluster = two_leaves()
    new = {name: f"x{name}" for name in cluster.nodes}
    renamed = dataclasses.replace(
        cluster,
        nodes=tuple(new[n] for n in cluster.nodes),
        units=tuple(dataclasses.replace(u, nodes=tuple(new[n] for n in u.nodes)) for u in cluster.units),
    )
    one, other = (rank_map(job, c, job.user_layout) for c in (cluster, renamed))
    assert one.step_time_s == other.step_time_s
    assert tuple(new[n] for n in one.nodes) == other.nodes


def test_without_names_the_order_stays_the_schedulers() -> None:
    """A cluster of unknown nodes has no map, no bound and no host files; its crossings are still said."""
    job = make_job({"tp": 8, "pp": 2})
    cluster = load_cluster("dgx-h100-2to1", num_gpus=64)
    found = rank_map(job, cluster, job.user_layout)
    assert (found.nodes, found.bound_s, found.gain) == ((), None, 0.0)
    assert {axis.axis for axis in found.crossings} == {"tp", "pp", "dp_cp"}


def test_string_order_is_priced_beside_the_default() -> None:
    """Torchrun's dynamic rendezvous would start n10 before n2; its price stands beside Slurm's."""
    base = load_cluster("dgx-h100-2to1")
    names = natural_order(f"n{i}" for i in range(1, 17))
    leaf = dataclasses.replace(base.levels[1], gpus=64)
    cluster = make_concrete(
        dataclasses.replace(base, nodes=names, num_nodes=16, levels=(base.levels[0], leaf, base.levels[2]))
    )
    job = make_job({"tp": 8, "pp": 4, "sharding": "optim"}, num_gpus=128)
    prices = {price.nodes: price.step_time_s for price in rank_map(job, cluster, job.user_layout).prices}
    assert prices["torchrun"] > prices["slurm"] >= prices["map"]


def test_another_order_string_is_taken_only_when_it_is_safe() -> None:
    """The chosen order string is not slower in the scheduler's order of nodes, where the plan runs first."""
    for seed in range(6):
        job, layout, cluster = small_case(seed + 100, (4,), (4,))
        found = rank_map(job, cluster, layout, orders=job.capabilities.orders)
        own_s = Evaluator(job, cluster).step_times_s([layout])[0]
        assert found.default_step_time_s <= own_s * (1 + 1e-12)
        assert not rules.check(job, dataclasses.replace(layout, order=found.order))
        by_order = {(p.order, p.nodes): p.step_time_s for p in found.prices}
        assert by_order[found.order, "map"] == found.step_time_s


@pytest.mark.parametrize(
    ("prices", "chosen"),
    [
        ([(2.0, 1.0), (3.0, 0.5)], 0),
        ([(2.0, 1.0), (2.0, 0.5)], 1),
        ([(2.0, 1.0), (1.0, 0.9999)], 0),
        ([(2.0, 1.0), (1.5, 0.9), (1.9, 0.1)], 1),
    ],
)
def test_a_faster_map_does_not_excuse_a_slower_default(
    prices: list[tuple[float, float]], chosen: int
) -> None:
    """The host files may never be used: what is slower without them is not taken, however fast with them."""
    assert safest_gain(prices) == chosen


# -- parts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
def test_axes_are_the_groups_of_megatron(order: str) -> None:
    """Size and stride of every axis give the rank groups of megatron-core's generator."""
    job = make_job(model=mixtral(), num_gpus=32)
    layout = make_layout(job, tp=2, pp=4, ep=2, etp=2, order=order)
    groups = rank_groups(layout)
    tree = slot_tree(load_cluster("dgx-h100", num_gpus=32))
    for axis, group in axes_of(layout).items():
        members = axis_groups(tree, *group, pairs=False).members
        assert sorted(map(tuple, members.tolist())) == sorted(groups[axis])


def test_every_priced_group_has_an_axis() -> None:
    """What the cost model asks for is what the report names: no group is priced under no axis."""
    job = make_job(model=mixtral(), num_gpus=64)
    for degrees in ({"tp": 2, "pp": 2, "ep": 4, "etp": 1}, {"tp": 4, "cp": 2, "pp": 2, "ep": 2, "etp": 2}):
        layout = make_layout(job, **degrees)
        pricer = OrderPricer(job, load_cluster("dgx-h100", num_gpus=64), layout)
        assert set(pricer.axes) <= set(axes_of(layout).values())


@pytest.mark.parametrize("seed", range(5))
def test_arrangements_are_the_orders_modulo_symmetry(seed: int) -> None:
    """Every permutation of the nodes is equivalent to exactly one arrangement, found by its unit pattern."""
    cluster = small_tree(random.Random(seed), nodes=5, per_node=2, depth=2)
    tree = slot_tree(cluster)

    def pattern(order: tuple[int, ...]) -> tuple[object, ...]:
        """Units in the order of their first use, with what makes one unit unlike another."""
        levels = []
        for units, share in zip(tree.unit_of_slot, tree.uplink_share, strict=True):
            unit = units[:: cluster.gpus_per_node][list(order)]
            first = {u: i for i, u in enumerate(dict.fromkeys(unit.tolist()))}
            levels.append(tuple((first[u], round(float(share[u]), 9)) for u in unit.tolist()))
        return tuple(levels)

    found = [pattern(order) for order in arrangements(place_tree(tree))]
    assert len(found) == len(set(found))
    assert set(found) == {pattern(order) for order in itertools.permutations(range(5))}


def test_the_estimate_of_an_all_to_all_ignores_the_order_inside_a_group() -> None:
    """A ring pays for each time it leaves a leaf; an all-to-all only for where its members are."""
    cluster = two_leaves("acegbdfh")
    tree = slot_tree(cluster)
    identity, alternating = np.arange(8), np.array([0, 4, 1, 5, 2, 6, 3, 7])
    loads = {}
    for pairs in (False, True):
        axis = axis_groups(tree, 8, 8, pairs=pairs)
        estimate = LoadEstimate(tree, {(8, 8): axis}, {(8, 8): 1.0})
        loads[pairs] = estimate(alternating) / estimate(identity)
    assert loads[False] == pytest.approx(4.0)
    assert loads[True] == pytest.approx(1.0)


def test_packing_keeps_blocks_whole() -> None:
    """Of leaves with 5, 3 and 4 nodes, blocks of two lie inside a leaf as long as there is room for them."""
    base = load_cluster("dgx-h100")
    names = [f"n{i:02d}" for i in range(12)]
    sizes = (5, 3, 4)
    starts = [0, 5, 8]
    units = tuple(
        Unit(level="leaf", name=f"l{i}", nodes=tuple(names[s : s + n]))
        for i, (s, n) in enumerate(zip(starts, sizes, strict=True))
    )
    cluster = dataclasses.replace(base, nodes=tuple(names), num_nodes=12, units=units)
    root = place_tree(slot_tree(cluster))
    leaf = np.repeat([0, 1, 2], sizes)
    for largest_first in (False, True):
        order = packed(root, 2, largest_first=largest_first)
        assert sorted(order) == list(range(12))
        blocks = leaf[order].reshape(-1, 2)
        assert int((blocks[:, 0] == blocks[:, 1]).sum()) == 5


def test_factor_sequences_are_all_interleavings() -> None:
    """Of 4 x 6 nodes: factors 2, 2 of one axis and 2, 3 of the other, each axis in its own order."""
    assert len(factor_sequences([4, 6], 0)) == 6
    assert (0, 0, 1, 1) in factor_sequences([4, 6], 0)
    many = factor_sequences([64, 64, 16], 0)
    assert len(many) == len(set(many)) == 160
    assert (0,) * 6 + (1,) * 6 + (2,) * 4 in many


def test_an_exact_search_agrees_with_the_heuristic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all orders can be tried, the search for large allocations finds the same price."""
    for seed in range(6):
        job, layout, cluster = small_case(seed, (5,), (4,))
        exact_s = rank_map(job, cluster, layout).step_time_s
        with monkeypatch.context() as patch:
            patch.setattr(rankmap, "EXACT_NODES", 0)
            heuristic = rank_map(job, cluster, layout)
        assert heuristic.step_time_s == pytest.approx(exact_s, rel=SMALLEST_GAIN)
        assert heuristic.estimated > 0


# -- host files ------------------------------------------------------------------------------------------


def test_host_files_repeat_what_the_map_says(tmp_path: Path) -> None:
    """One line per rank, one per node; without names old files are removed."""
    job = make_job({"tp": 8, "pp": 2})
    found = rank_map(job, two_leaves(), job.user_layout)
    plan = tmp_path / "plan.json"
    assert [path.name for path in write_hostfiles(found, plan)] == [RANKS_NAME, NODES_NAME]
    ranks = (tmp_path / RANKS_NAME).read_text().splitlines()
    assert len(ranks) == 64
    assert ranks[::8] == list(found.nodes) == (tmp_path / NODES_NAME).read_text().splitlines()
    assert all(ranks[i] == ranks[i // 8 * 8] for i in range(64))
    assert write_hostfiles(dataclasses.replace(found, nodes=()), plan) == ()
    assert not list(tmp_path.iterdir())
