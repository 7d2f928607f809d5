"""How the groups of a parallel axis lie on the level tree: members, ring runs, hops and port loads by level.

Index letters: G groups, n members of a group, K levels, W slots.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nest_megatron.cluster.crossings import (
    PATTERNS,
    Crossings,
    Pattern,
    PortLoads,
    crossings,
    port_loads,
    tree_edges_cut,
)
from nest_megatron.cluster.slots import Ints, SlotTree, TreeKey, slot_tree, tree_of
from nest_megatron.cluster.torus import TorusShape, box_shape, routed_shape, torus_level
from nest_megatron.errors import Factor, PlannerFault
from nest_megatron.specs.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """What the price of a collective depends on (research/network.md 1.1 and 1.4).

    ``loads`` and ``torus`` count every group that runs at the same time; the rest describes the one with the
    fewest members per domain, of these the one with the most hops through outer levels.

    Args:
        size: members n.
        members: k_i, fewest members in one unit of level i that the group touches, (K); the last is n.
        runs: x_i, most maximal runs of the cyclic rank order inside one unit of level i, (K); 1 = contiguous.
        hops: ring hops whose lowest common unit is at level i, (K); they sum to n (0 for one member).
        num_domains: units of level 0 that the group touches.
        loads: busiest port of each level, (K-1) per traffic pattern.
        torus: link loads of a group, or of its part, inside one torus; None without a torus.
    """

    size: int
    members: tuple[int, ...]
    runs: tuple[int, ...]
    hops: tuple[int, ...]
    num_domains: int
    loads: PortLoads
    torus: TorusShape | None = None

    @property
    def single_domain(self) -> bool:
        """All members are in one unit of level 0."""
        return self.num_domains == 1


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts of G groups as arrays: (K-1, G) each, and the number of domains, (G)."""

    members: Ints
    runs: Ints
    exits: Ints
    num_domains: Ints


def group_shape(cluster: Cluster, size: int, stride: int) -> GroupShape:
    """Return the shape of the groups {start + i * stride, i < size} of a contiguous rank order.

    The groups tile the slots in blocks of ``size * stride`` and all of them run at the same time.  Where they
    all lie alike the loads come from the closed form, otherwise they are counted port by port.

    Raises:
        PlannerFault: a size or stride below 1, or a block larger than the cluster.
    """
    return _axis_shape(slot_tree(cluster).key, size, stride)


def shape_of_slots(cluster: Cluster, slots: Sequence[int]) -> GroupShape:
    """Return the shape of one group given as slots in ring order, which runs alone.

    Raises:
        PlannerFault: no slot, a slot twice, or a slot outside the cluster.
    """
    return shape_of_groups(cluster, [slots])


def shape_of_groups(cluster: Cluster, groups: Sequence[Sequence[int]]) -> GroupShape:
    """Return the shape of groups that run at the same time, each given as slots in ring order, (G, n).

    Raises:
        PlannerFault: no group, groups of different sizes, a slot twice, or a slot outside the cluster.
    """
    sizes = {len(group) for group in groups}
    slots = [slot for group in groups for slot in group]
    if len(sizes) != 1 or not slots or len(set(slots)) != len(slots):
        raise PlannerFault(
            "NEST-F10",
            "concurrent groups need distinct slots and one size",
            factors=[Factor("slots", len(slots)), Factor("sizes", str(sorted(sizes)))],
        )
    if min(slots) < 0 or max(slots) >= cluster.num_gpus:
        raise PlannerFault(
            "NEST-F10",
            "a group has a slot outside the cluster",
            factors=[Factor("slots", f"{min(slots)}..{max(slots)}"), Factor("num_gpus", cluster.num_gpus)],
        )
    return worst_shape(slot_tree(cluster), np.asarray(groups, dtype=np.int64))


def worst_shape(tree: SlotTree, groups: Ints) -> GroupShape:
    """Return the shape of G concurrent groups given as physical slots in ring order, (G, n), by counting.

    One tree serves every rank order: ``slot_of_rank[rank_groups]``.  The load form of network.md 1.4.
    """
    return _counted_shape(tree, groups)


@lru_cache(maxsize=1 << 16)
def _axis_shape(key: TreeKey, size: int, stride: int) -> GroupShape:
    block = size * stride
    if size < 1 or stride < 1 or block > key.num_slots:
        raise PlannerFault(
            "NEST-F10",
            "a group does not fit the cluster",
            factors=[Factor("size", size), Factor("stride", stride), Factor("num_gpus", key.num_slots)],
        )
    tree = tree_of(key)
    one = np.arange(size, dtype=np.int64) * stride
    if not _all_alike(key, size, stride):
        starts = np.arange(_period(key, block) // block, dtype=np.int64) * block
        offsets = np.arange(stride, dtype=np.int64)
        return _counted_shape(tree, (starts[:, None] + offsets).reshape(-1, 1) + one, stride=stride)
    groups = one[None, :]
    counts = _counts(crossings(tree, groups))
    loads = _closed_loads(key, [int(value) for value in counts.members[:, 0]], size, stride)
    return _shape(key, counts, 0, loads, groups, stride=stride)


def _counted_shape(tree: SlotTree, groups: Ints, *, stride: int | None = None) -> GroupShape:
    crossed = crossings(tree, groups)
    counts = _counts(crossed)
    return _shape(tree.key, counts, _worst(counts), port_loads(tree, crossed), groups, stride=stride)


def _all_alike(key: TreeKey, size: int, stride: int) -> bool:
    """Return whether every group lies on every level as the first one does, and no slot is idle.

    That holds on a tree of full, unnamed units when, at every level and at the node, stride and unit as well
    as block and unit divide each other.
    """
    block = size * stride
    boundaries = [gpus for gpus in key.level_gpus[:-1] if gpus < key.num_slots]
    full = not any(key.num_slots % gpus for gpus in (*boundaries, block))
    nics = key.gpus_per_node % key.nics_per_node == 0 and (key.pxn or key.rail_level is None)
    return (
        not key.units
        and full
        and nics
        and all(
            _divides(length, gpus) for gpus in (*boundaries, key.gpus_per_node) for length in (stride, block)
        )
    )


def _divides(one: int, other: int) -> bool:
    return one % other == 0 or other % one == 0


def _period(key: TreeKey, block: int) -> int:
    """Return the slots after which whole blocks on equal units repeat; all whole blocks otherwise."""
    whole = key.num_slots // block * block
    if key.units or len(key.level_gpus) == 1 or key.num_slots % key.level_gpus[-2]:
        return whole
    return min(whole, math.lcm(block, key.level_gpus[-2]))


def _closed_loads(key: TreeKey, members_by_level: list[int], size: int, stride: int) -> PortLoads:
    """Return the loads of groups that all lie alike: network.md 1.2 per port instead of per group.

    (GPUs below)/k groups share each unit, so a ring loads it by 1/k per GPU, an all-to-all by (n - k)/n and a
    tree by half of its cut edges over k.  Of point-to-point messages, those of the last ``stride`` slots of a
    unit leave it, through their own NICs and rails.
    """
    per_nic = key.gpus_per_node // key.nics_per_node
    nic_senders = min(stride, per_nic) / per_nic
    loads: dict[Pattern, list[float]] = {pattern: [] for pattern in PATTERNS}
    for level, gpus in enumerate(key.level_gpus[:-1]):
        members = members_by_level[level]
        if members == size:
            for column in loads.values():
                column.append(0.0)
            continue
        loads["ring"].append(1 / members)
        loads["tree"].append(
            tree_edges_cut(size // members_by_level[0], members // members_by_level[0]) / 2 / members
        )
        loads["pairs"].append((size - members) / size)
        if level == key.nic_level:
            loads["message"].append(nic_senders)
        elif level == key.rail_level:
            loads["message"].append(nic_senders * min(max(stride, key.gpus_per_node), gpus) / gpus)
        else:
            loads["message"].append(min(stride, gpus) / gpus)
    return PortLoads(**{pattern: tuple(column) for pattern, column in loads.items()})


def _counts(crossed: Crossings) -> _Counts:
    """Reduce the entries of every level to one number per group."""
    inner, num_groups = len(crossed.levels), len(crossed.groups)
    counts = _Counts(
        members=np.empty((inner, num_groups), dtype=np.int64),
        runs=np.empty((inner, num_groups), dtype=np.int64),
        exits=np.empty((inner, num_groups), dtype=np.int64),
        num_domains=np.ones(num_groups, dtype=np.int64),
    )
    for level, here in enumerate(crossed.levels):
        first = here.first_entry
        counts.members[level] = np.minimum.reduceat(here.members, first)
        counts.runs[level] = np.maximum(np.maximum.reduceat(here.runs, first), 1)
        counts.exits[level] = here.leaves.sum(axis=1)
    if crossed.levels:
        domains = crossed.levels[0]
        counts.num_domains[:] = np.diff(np.append(domains.first_entry, domains.members.size))
    return counts


def _worst(counts: _Counts) -> int:
    """Return the group with the fewest members per domain; the most hops through outer levels break a tie.

    The choice must not depend on any rate: a faster link would change latencies otherwise.
    """
    if not len(counts.members):
        return 0
    keys = (*counts.members[1:], *-counts.exits, counts.members[0])  # the last key counts most
    return int(np.lexsort(keys)[0])


def _shape(
    key: TreeKey, counts: _Counts, group: int, loads: PortLoads, groups: Ints, *, stride: int | None = None
) -> GroupShape:
    """Return one group's counts as plain numbers, with the outermost level added, and everybody's loads."""
    size = groups.shape[1]
    exits = [size if size > 1 else 0, *(int(value) for value in counts.exits[:, group]), 0]
    members = (*(int(value) for value in counts.members[:, group]), size)
    return GroupShape(
        size=size,
        members=members,
        runs=(*(int(value) for value in counts.runs[:, group]), 1),
        hops=tuple(outer - inner for outer, inner in itertools.pairwise(exits)),
        num_domains=int(counts.num_domains[group]),
        loads=loads,
        torus=_torus_shape(key, members, groups, stride),
    )


def _torus_shape(
    key: TreeKey, members: tuple[int, ...], groups: Ints, stride: int | None
) -> TorusShape | None:
    """Return the link loads inside the torus: by the axis formula for boxes, by routing for other groups."""
    level = torus_level(key.level_gpus, key.torus)
    if level is None or members[level] == 1:
        return None
    box = box_shape(key.torus, members[level], stride) if stride else None
    return box or routed_shape(key.torus, groups)
