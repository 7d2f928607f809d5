"""What concurrent groups send through the ports of one level: runs, members and bytes by traffic pattern.

Resource-load form of research/network.md 1.4.  Index letters: G groups that run at the same time, n members
of a group in ring order, W slots, K levels, E pairs of a group and a unit that it touches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, assert_never, get_args

import numpy as np

from nest_megatron.cluster.slots import Floats, Ints, SlotTree

#: What one unit is.  ring: a ring edge; tree: a buffer; pairs: a send buffer of all-to-all; message: itself.
Pattern = Literal["ring", "tree", "pairs", "message"]
PATTERNS: tuple[Pattern, ...] = get_args(Pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortLoads:
    """Busiest port of each level below the outermost one, one number per level and pattern, (K-1) each.

    A load is the number of pattern units (``Pattern``) that leave through the port over the GPUs behind it
    (``SlotTree.port_gpus``).  Times the bytes of a unit and over b_{i+1}, the usable rate per GPU of the
    level above, it is the time that the port is busy.
    """

    ring: tuple[float, ...]
    tree: tuple[float, ...]
    pairs: tuple[float, ...]
    message: tuple[float, ...]

    def of(self, pattern: Pattern) -> tuple[float, ...]:
        """Return the loads of one pattern."""
        return {"ring": self.ring, "tree": self.tree, "pairs": self.pairs, "message": self.message}[pattern]


@dataclass(frozen=True, slots=True)
class Crossing:
    """How G groups cross the units of one level.

    Args:
        units: unit of every member, (G, n).
        leaves: the ring hop of the member leaves its unit, (G, n).
        entry: index into the E tables of every member, (G, n).
        first_entry: first entry of each group, (G).
        unit_of_entry, members, runs: the unit, k and x of every entry, (E).
    """

    units: Ints
    leaves: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
    entry: Ints
    first_entry: Ints
    unit_of_entry: Ints
    members: Ints
    runs: Ints


def cross(tree: SlotTree, groups: Ints, level: int) -> Crossing:
    """Count members and ring runs of every group in every unit of ``level`` that it touches."""
    num_groups = len(groups)
    units = tree.unit_of_slot[level][groups]
    num_units = tree.uplink_share[level].size
    # One key per (group, unit), in ascending order of group, makes every per-unit count a bincount.
    keys = units + np.arange(num_groups, dtype=np.int64)[:, None] * num_units
    touched, entry, members = _entries(keys, num_groups * num_units)
    leaves = units != np.roll(units, -1, axis=1)
    return Crossing(
        units=units,
        leaves=leaves,
        entry=entry,
        first_entry=np.searchsorted(touched, np.arange(num_groups, dtype=np.int64) * num_units),
        unit_of_entry=touched % num_units,
        members=members,
        runs=np.bincount(entry[leaves], minlength=touched.size),
    )


def _entries(keys: Ints, num_keys: int) -> tuple[Ints, Ints, Ints]:
    """Return (distinct keys ascending, their index for every element, their counts)."""
    if num_keys > 16 * keys.size:  # too sparse for a table of all keys
        touched, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        return touched, inverse.reshape(keys.shape), counts
    counts = np.bincount(keys.ravel(), minlength=num_keys)
    touched = np.flatnonzero(counts)
    index = np.empty(num_keys, dtype=np.int64)
    index[touched] = np.arange(touched.size)
    return touched, index[keys], counts[touched]


@dataclass(frozen=True)
class Crossings:
    """How G groups, (G, n) slots in ring order, cross every level below the outermost one."""

    groups: Ints
    levels: tuple[Crossing, ...]

    @cached_property
    def _first_member(self) -> Ints:
        """Flat index of the first member in each (group, domain) entry, (E of level 0)."""
        entry = self.levels[0].entry.ravel()
        first = np.empty(self.levels[0].members.size, dtype=np.int64)
        # Written from the back, so the first member of each entry stays.
        first[entry[::-1]] = np.arange(entry.size - 1, -1, -1)
        return first

    @cached_property
    def _tree_edges(self) -> Ints:
        """Both ends of every edge of every group's two trees, as (group, domain) entries, (edges, 2).

        The trees run over the domains of a group in the order in which its ranks reach them.
        """
        # Entries are sorted by group; inside a group they must follow the first member in it.
        reached = np.argsort(self._first_member)
        first_entry = self.levels[0].first_entry
        counts = np.diff(np.append(first_entry, reached.size))
        edges = [
            reached[first_entry[counts == num, None, None] + double_tree(int(num))].reshape(-1, 2)
            for num in np.unique(counts)
        ]
        return np.concatenate(edges)

    def tree_edges_cut(self, level: int) -> Ints:
        """Return how many edges of both trees leave each (group, unit) entry of ``level``, (E)."""
        here = self.levels[level]
        # The entry of ``level`` in which each domain entry lies.
        outer = here.entry.ravel()[self._first_member]
        ends = outer[self._tree_edges]
        leaving = ends[:, 0] != ends[:, 1]
        return np.bincount(ends[leaving].ravel(), minlength=here.members.size)


def crossings(tree: SlotTree, groups: Ints) -> Crossings:
    """Measure how ``groups`` cross every level below the outermost one."""
    return Crossings(groups, tuple(cross(tree, groups, level) for level in range(len(tree.unit_of_slot))))


def sent(tree: SlotTree, crossed: Crossings, level: int, pattern: Pattern) -> Floats:
    """Return the pattern units that each member sends out of its unit of ``level``, (G, n).

    NCCL spreads a ring and a tree over channels that leave through different members of the unit, so each of
    the k members sends 1/k of the unit's traffic.  An all-to-all member sends (n - k)/n of its buffer out, a
    point-to-point member its own message.  Without PXN what changes rails also leaves through the leaf.
    """
    here, size = crossed.levels[level], crossed.groups.shape[1]
    own_rail = level == tree.key.rail_level and not tree.key.pxn
    match pattern:
        case "ring":
            per_entry = here.runs / here.members
        case "tree":
            per_entry = crossed.tree_edges_cut(level) / 2 / here.members
        case "pairs":
            if own_rail:
                per_port = _members_behind_port(tree.port_of_slot[level][crossed.groups])
                apart: Floats = (size - per_port) / size
                return apart
            per_entry = (size - here.members) / size
        case "message":
            if own_rail:
                ports = tree.port_of_slot[level][crossed.groups]
                changes: Floats = (ports != np.roll(ports, -1, axis=1)).astype(np.float64)
                return changes
            leaves: Floats = here.leaves.astype(np.float64)
            return leaves
        case _:
            assert_never(pattern)
    shares: Floats = per_entry[here.entry]
    return shares


def port_loads(tree: SlotTree, crossed: Crossings) -> PortLoads:
    """Return the busiest port of each level under each pattern, all G groups sending at the same time."""
    loads: dict[Pattern, list[float]] = {pattern: [] for pattern in PATTERNS}
    for level, gpus in enumerate(tree.port_gpus):
        ports = tree.port_of_slot[level][crossed.groups].ravel()
        for pattern, column in loads.items():
            units = np.bincount(ports, weights=sent(tree, crossed, level, pattern).ravel())
            column.append(float((units[ports] / gpus[ports]).max()))
    return PortLoads(**{pattern: tuple(column) for pattern, column in loads.items()})


def _members_behind_port(ports: Ints) -> Ints:
    """Return for each member how many members of its own group are behind its port, (G, n)."""
    num_ports = int(ports.max()) + 1
    keys = ports + np.arange(len(ports), dtype=np.int64)[:, None] * num_ports
    _, entry, counts = _entries(keys, len(ports) * num_ports)
    behind: Ints = counts[entry]
    return behind


# -- double binary tree ----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def double_tree(num_nodes: int) -> Ints:
    """Return the edges of NCCL's two trees over ``num_nodes`` domains in rank order, (2 * (N - 1), 2).

    The first is the in-order binary tree of NCCL's ``ncclGetBtree``; the second is its mirror image, or its
    shift by one when N is odd (``ncclGetDtree``, NVIDIA/nccl src/graph/trees.cc).
    """
    child = np.arange(1, num_nodes, dtype=np.int64)
    bit = child & -child
    parent = (child ^ bit) | (bit << 1)
    parent = np.where(parent >= num_nodes, child ^ bit, parent)
    first = np.stack([child, parent], axis=1)
    second = (first + 1) % num_nodes if num_nodes % 2 else num_nodes - 1 - first
    edges = np.concatenate([first, second])
    edges.setflags(write=False)
    return edges


@lru_cache(maxsize=1 << 14)
def tree_edges_cut(num_nodes: int, per_unit: int) -> int:
    """Return the most edges of both trees that leave one unit of ``per_unit`` consecutive domains."""
    units = double_tree(num_nodes) // per_unit
    ends = units[units[:, 0] != units[:, 1]]
    return int(np.bincount(ends.ravel()).max()) if ends.size else 0
