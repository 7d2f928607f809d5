from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron.cluster.groups import GroupShape, group_shape, shape_of_slots
from nest_megatron.cluster.load import load_accelerator
from nest_megatron.cluster.slots import slot_tree
from nest_megatron.errors import BadInputError, PlannerFault
from nest_megatron.specs.cluster import Cluster, Level, Unit

#: size, members, runs, hops, num_domains
Counted = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def tree(*gpus: int, num_gpus: int | None = None, gpus_per_node: int = 1) -> Cluster:
    """A cluster whose levels hold ``gpus`` GPUs, each four times slower than the one below."""
    levels = tuple(
        Level(name=f"level{i}", gpus=n, bandwidth_bytes_per_s=400e9 / 4**i, efficiency=1.0, latency_s=1e-6)
        for i, n in enumerate(gpus)
    )
    return Cluster(
        name="test",
        accelerator=load_accelerator("h100-sxm-80gb"),
        gpus_per_node=gpus_per_node,
        num_nodes=(num_gpus or gpus[-1]) // gpus_per_node,
        levels=levels,
    )


def by_hand(cluster: Cluster, slots: list[int]) -> Counted:
    """The definition of a shape, counted slot by slot."""
    sizes = [level.gpus for level in cluster.levels[:-1]]
    members, runs, domains = [], [], 1
    hops = [0] * len(cluster.levels)
    pairs = list(zip(slots, slots[1:] + slots[:1], strict=True)) if len(slots) > 1 else []
    for a, b in pairs:
        hops[next((i for i, n in enumerate(sizes) if a // n == b // n), len(sizes))] += 1
    for n in sizes:
        inside = Counter(slot // n for slot in slots)
        leaving = Counter(a // n for a, b in pairs if a // n != b // n)
        members.append(min(inside.values()))
        runs.append(max([1, *leaving.values()]))
    if sizes:
        domains = len({slot // sizes[0] for slot in slots})
    return len(slots), (*members, len(slots)), (*runs, 1), tuple(hops), domains


def counted(shape: GroupShape) -> Counted:
    """The part of a shape that describes one group."""
    return shape.size, shape.members, shape.runs, shape.hops, shape.num_domains


TREES = st.sampled_from(
    [(8, 32, 128), (4, 12, 48), (6, 36), (3, 9, 27, 81), (72, 144), (5, 20, 60), (64,), (2, 4, 8, 16, 32)]
)


@settings(max_examples=300, deadline=None)
@given(TREES, st.integers(1, 20), st.integers(1, 20))
def test_group_shape_describes_the_group_that_is_spread_most(
    gpus: tuple[int, ...], size: int, stride: int
) -> None:
    """No real group of the tiling has fewer members in a domain, nor more outer hops at as few members."""
    cluster = tree(*gpus)
    block = size * stride
    if block > cluster.num_gpus:
        with pytest.raises(PlannerFault):
            group_shape(cluster, size, stride)
        return
    every = [
        by_hand(cluster, [start + offset + i * stride for i in range(size)])
        for start in range(0, cluster.num_gpus - block + 1, block)
        for offset in range(stride)
    ]
    described = counted(group_shape(cluster, size, stride))
    assert described in every

    def spread(shape: Counted) -> tuple[int, ...]:
        _, members, _, hops, _ = shape
        return (members[0], *(-count for count in hops[:0:-1]))

    assert spread(described) == min(spread(shape) for shape in every)


@settings(max_examples=200, deadline=None)
@given(TREES, st.data())
def test_shape_of_slots_counts_what_the_definition_says(gpus: tuple[int, ...], data: st.DataObject) -> None:
    """Any ordered list of slots has the members, runs and hops that counting gives."""
    cluster = tree(*gpus)
    slots = data.draw(st.lists(st.integers(0, cluster.num_gpus - 1), unique=True, min_size=1, max_size=24))
    shape = shape_of_slots(cluster, slots)
    assert counted(shape) == by_hand(cluster, slots)
    assert sum(shape.hops) == (len(slots) if len(slots) > 1 else 0)


def test_partly_filled_outer_level() -> None:
    """A cluster smaller than its outermost level is one unit of that level."""
    cluster = tree(8, 32, 4096, num_gpus=64)
    assert group_shape(cluster, 64, 1).members == (8, 32, 64)


def test_tensor_group_that_straddles_a_rack_is_the_one_priced() -> None:
    """Of the TP=16 groups on 72-GPU domains the one that lies 8 + 8 on two racks counts (network.md 1.4)."""
    shape = group_shape(tree(72, 144), 16, 1)
    assert (shape.members[0], shape.num_domains) == (8, 2)


def test_single_member() -> None:
    """A group of one touches one domain and has no hop."""
    shape = group_shape(tree(8, 32), 1, 4)
    assert (shape.size, shape.num_domains, shape.hops) == (1, 1, (0, 0))
    assert shape.single_domain


@pytest.mark.parametrize("slots", [[], [1, 1], [-1, 2], [0, 32]])
def test_slots_that_are_no_group_are_refused(slots: list[int]) -> None:
    """Repeated, negative or foreign slots are a fault of the caller, not a wrong price."""
    with pytest.raises(PlannerFault):
        shape_of_slots(tree(8, 32), slots)


def named(units: tuple[Unit, ...]) -> Cluster:
    """Eight nodes of 4 GPUs, two nodes per leaf, with named units."""
    return dataclasses.replace(
        tree(4, 8, 32, gpus_per_node=4), nodes=tuple(f"n{i}" for i in range(8)), units=units
    )


def test_degraded_uplink_loads_its_port_more() -> None:
    """A quarter of one leaf's uplink counts four times, for the groups that pass it and only for those."""
    leaf = Unit(level="level1", name="slow", nodes=("n4", "n5"), uplink_bytes_per_s=400e9 / 16 / 4)
    cluster = named((leaf,))
    assert group_shape(named(()), 4, 8).loads.ring[1] == 1.0
    assert group_shape(cluster, 4, 8).loads.ring[1] == 4.0
    # Alone, a ring shares its rail of the leaf, 2 GPUs, with nobody.
    assert shape_of_slots(cluster, [0, 8, 24]).loads.ring[1] == 1 / 2
    assert shape_of_slots(cluster, [0, 16]).loads.ring[1] == 4 / 2


def test_uneven_named_units_replace_positions() -> None:
    """A leaf that names three nodes holds the members on those three nodes."""
    cluster = named((Unit(level="level1", name="wide", nodes=("n0", "n1", "n7")),))
    assert shape_of_slots(cluster, [0, 4, 28]).members == (1, 3, 3)
    # n6 stays where its position puts it, alone since n7 moved.
    assert shape_of_slots(cluster, [24, 28]).members == (1, 1, 2)


def test_units_split_by_the_level_above_are_refused() -> None:
    """A domain whose nodes lie under two leaves is no tree; the message names node and level."""
    with pytest.raises(BadInputError, match=r"split.*level0|level0.*split"):
        slot_tree(
            dataclasses.replace(
                named((Unit(level="level0", name="odd", nodes=("n1", "n2")),)),
            )
        )
