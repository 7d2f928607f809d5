"""How a communication group lies on the level tree: members per unit, runs of the ring, hops by level.

Index letters: G groups, n members of a group, K levels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nest_megatron.cluster.slots import Floats, Ints, SlotTree, TreeKey, slot_tree, tree_of
from nest_megatron.errors import Factor, PlannerFault
from nest_megatron.specs.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """What the price of a collective depends on (research/network.md 1.1 and 1.4).

    Args:
        size: members n.
        members: k_i, fewest members in one unit of level i that the group touches, (K); the last is n.
        runs: x_i, most maximal runs of the cyclic rank order inside one unit of level i, (K); 1 = contiguous.
        hops: ring hops whose lowest common unit is at level i, (K); they sum to n (0 for one member).
        uplink_share: worst uplink of a touched unit of level i over the line rate of the level above, (K).
        num_domains: units of level 0 that the group touches.
    """

    size: int
    members: tuple[int, ...]
    runs: tuple[int, ...]
    hops: tuple[int, ...]
    uplink_share: tuple[float, ...]
    num_domains: int

    @property
    def single_domain(self) -> bool:
        """All members are in one unit of level 0."""
        return self.num_domains == 1


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Shapes of G groups as arrays: (K-1, G) each, and the number of domains, (G)."""

    members: Ints
    runs: Ints
    exits: Ints
    share: Floats
    num_domains: Ints


def group_shape(cluster: Cluster, size: int, stride: int) -> GroupShape:
    """Return the shape of the groups {start + i * stride, i < size} of a contiguous rank order.

    The groups tile the slots in blocks of ``size * stride``.  Where they lie differently (they straddle units
    unevenly) the worst one counts: the lowest ring bandwidth min_i(k_i * b_i / x_i), because the slowest
    group ends the phase.

    Raises:
        PlannerFault: a size or stride below 1, or a block larger than the cluster.
    """
    return _worst_shape(slot_tree(cluster).key, size, stride)


def shape_of_slots(cluster: Cluster, slots: Sequence[int]) -> GroupShape:
    """Return the shape of one group given as slots in ring order.

    Raises:
        PlannerFault: no slot, a slot twice, or a slot outside the cluster.
    """
    members = np.asarray(slots, dtype=np.int64)
    if not members.size or np.unique(members).size != members.size:
        raise PlannerFault("NEST-F10", "a group needs distinct slots", factors=[Factor("slots", len(slots))])
    if members.min() < 0 or members.max() >= cluster.num_gpus:
        raise PlannerFault(
            "NEST-F10",
            "a group has a slot outside the cluster",
            factors=[
                Factor("slots", f"{members.min()}..{members.max()}"),
                Factor("num_gpus", cluster.num_gpus),
            ],
        )
    tree = slot_tree(cluster)
    return _shape_at(tree, _shapes(tree, members[None, :]), 0, members.size)


@lru_cache(maxsize=1 << 16)
def _worst_shape(key: TreeKey, size: int, stride: int) -> GroupShape:
    if size < 1 or stride < 1 or size * stride > key.num_slots:
        raise PlannerFault(
            "NEST-F10",
            "a group does not fit the cluster",
            factors=[Factor("size", size), Factor("stride", stride), Factor("num_gpus", key.num_slots)],
        )
    tree = tree_of(key)
    starts = _distinct_starts(key, size, stride)
    groups = starts[:, None] + np.arange(size, dtype=np.int64) * stride
    shapes = _shapes(tree, groups)
    return _shape_at(tree, shapes, _worst(tree, shapes, size), size)


def _distinct_starts(key: TreeKey, size: int, stride: int) -> Ints:
    """Return starts that cover every shape: all of them, or one per class when the tree is symmetric.

    Shifting a group by whole units of the largest inner level changes nothing, and if at every level the
    stride divides the unit or the unit divides the stride, all offsets inside a block are alike.
    """
    block = size * stride
    num_blocks = key.num_slots // block
    inner = key.level_gpus[:-1]
    if key.units:
        period, offsets = num_blocks, stride
    else:
        period = inner[-1] // math.gcd(block, inner[-1]) if inner else 1
        aligned = all(gpus % stride == 0 or stride % gpus == 0 for gpus in inner)
        offsets = 1 if aligned else stride
    blocks = np.arange(min(period, num_blocks), dtype=np.int64) * block
    return (blocks[:, None] + np.arange(offsets, dtype=np.int64)).ravel()


def _shapes(tree: SlotTree, groups: Ints) -> _Shapes:
    """Measure G groups given as slots in ring order, (G, n)."""
    num_groups = len(groups)
    inner = len(tree.unit_of_slot)
    members = np.empty((inner, num_groups), dtype=np.int64)
    runs = np.empty_like(members)
    exits = np.empty_like(members)
    share = np.empty((inner, num_groups))
    num_domains = np.ones(num_groups, dtype=np.int64)
    for level, (unit_of_slot, uplink) in enumerate(zip(tree.unit_of_slot, tree.uplink_share, strict=True)):
        units = unit_of_slot[groups]
        # One sorted key per (group, unit) makes every per-unit count a bincount.
        keys = units + np.arange(num_groups, dtype=np.int64)[:, None] * uplink.size
        touched, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        leaves = units != np.roll(units, -1, axis=1)
        unit_runs = np.bincount(inverse.ravel(), weights=leaves.ravel(), minlength=touched.size)
        first = np.searchsorted(touched // uplink.size, np.arange(num_groups))
        members[level] = np.minimum.reduceat(counts, first)
        runs[level] = np.maximum(np.maximum.reduceat(unit_runs, first), 1)
        exits[level] = leaves.sum(axis=1)
        share[level] = np.minimum.reduceat(uplink[touched % uplink.size], first)
        if level == 0:
            num_domains = np.diff(np.append(first, touched.size))
    return _Shapes(members, runs, exits, share, num_domains)


def _worst(tree: SlotTree, shapes: _Shapes, size: int) -> int:
    """Return the group with the lowest ring bandwidth; the fewest members per unit break a tie."""
    if not len(shapes.members):
        return 0
    uplink = np.array(tree.key.usable_bytes_per_s[1:])[:, None]
    rate = np.where(shapes.members < size, shapes.members * shapes.share / shapes.runs * uplink, np.inf)
    return int(np.lexsort((*shapes.members[::-1], rate.min(axis=0)))[0])


def _shape_at(tree: SlotTree, shapes: _Shapes, group: int, size: int) -> GroupShape:
    """Return one group of ``shapes`` as plain numbers, with the outermost level added."""
    exits = [size if size > 1 else 0, *(int(value) for value in shapes.exits[:, group]), 0]
    return GroupShape(
        size=size,
        members=(*(int(value) for value in shapes.members[:, group]), size),
        runs=(*(int(value) for value in shapes.runs[:, group]), 1),
        hops=tuple(outer - inner for outer, inner in itertools.pairwise(exits)),
        uplink_share=(*(float(value) for value in shapes.share[:, group]), 1.0),
        num_domains=int(shapes.num_domains[group]),
    )
