"""A cheap estimate of how well an order of nodes serves a layout's groups, and the search that lowers it.

The estimate is the resource-load form of research/network.md 1.4 counted on whole nodes: what the groups of
an axis send out of each unit over the unit's capacity, the busiest unit of the slowest level, weighted by the
seconds that the axis costs.  It only ranks orders; ``rankmap`` prices the best of them exactly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nest_megatron.cluster.slots import Floats, Ints, SlotTree
from nest_megatron.cost.sync import pp_stride
from nest_megatron.planner.arrangements import Place, factor_sequences, nested_positions, packed
from nest_megatron.specs.layout import Layout

#: Weight of the mean load beside the busiest one: it tells orders apart whose busiest units are equal.
MEAN_WEIGHT = 0.02
#: Estimates of one search of 128 nodes; in inverse proportion for others, so that the time stays the same.
ESTIMATES, ESTIMATED_NODES, FEWEST_ESTIMATES = 2000, 128, 400


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisGroups:
    """The concurrent groups of one axis in rank space, at the granularity of nodes.

    Args:
        positions: block of ranks of each member in ring order, groups that look alike listed once, (G, n).
        count: groups that look alike, (G).
        members: rank of each member of every group, (all groups, n).
        pairs: the axis sends all-to-all, where the order inside a group does not matter.
    """

    size: int
    stride: int
    positions: Ints
    count: Ints
    members: Ints
    pairs: bool

    @property
    def crosses_nodes(self) -> bool:
        """Some group has members on several nodes, so the order of nodes matters."""
        return bool((self.positions != self.positions[:, :1]).any())


def axes_of(layout: Layout) -> dict[str, tuple[int, int]]:
    """Return (size, stride) of the groups of every axis: they are {start + i * stride}.

    Source: research/config_surface.md 3.1; ``dp_cp`` are the ranks that synchronise dense gradients.
    """
    outer = layout.pp if layout.order == "tp-cp-ep-pp-dp" else 1
    found = {
        "tp": (layout.tp, 1),
        "cp": (layout.cp, layout.tp),
        "dp_cp": (layout.dp * layout.cp, layout.tp * outer),
        "pp": (layout.pp, pp_stride(layout)),
    }
    if layout.ep > 1 or layout.etp != layout.tp:
        found["ep"] = (layout.ep, layout.etp)
        found["etp"] = (layout.etp, 1)
        found["edp"] = (layout.edp, layout.etp * layout.ep * outer)
    return {axis: group for axis, group in found.items() if group[0] > 1}


def axis_groups(tree: SlotTree, size: int, stride: int, *, pairs: bool) -> AxisGroups:
    """Return the groups {start + i * stride} that tile the ranks in blocks, as ``group_shape`` does."""
    per_node = tree.key.gpus_per_node
    starts = np.arange(tree.key.num_slots // (size * stride), dtype=np.int64) * size * stride
    first = (starts[:, None] + np.arange(stride, dtype=np.int64)).reshape(-1, 1)
    members = first + np.arange(size, dtype=np.int64) * stride
    positions, count = np.unique(members // per_node, axis=0, return_counts=True)
    return AxisGroups(
        size=size, stride=stride, positions=positions, count=count, members=members, pairs=pairs
    )


class LoadEstimate:
    """Weighted seconds of the busiest units under an order of nodes; lower is better.

    Args:
        weights: seconds of each axis under the order that ``tree`` itself stands for; keys as ``axes``.
    """

    def __init__(
        self,
        tree: SlotTree,
        axes: Mapping[tuple[int, int], AxisGroups],
        weights: Mapping[tuple[int, int], float],
    ) -> None:
        per_node = tree.key.gpus_per_node
        self._levels: list[tuple[Ints, Floats]] = []
        for i, (unit_of_slot, share) in enumerate(zip(tree.unit_of_slot, tree.uplink_share, strict=True)):
            gpus = tree.key.level_gpus[i]
            # Units of one node that are alike send the same under every order.
            if gpus < per_node or (gpus == per_node and np.unique(share[unit_of_slot]).size == 1):
                continue
            rate = (
                np.bincount(unit_of_slot, minlength=share.size) * share * tree.key.usable_bytes_per_s[i + 1]
            )
            seconds = np.divide(1.0, rate, out=np.zeros_like(rate), where=rate > 0)
            self._levels.append((unit_of_slot[::per_node], seconds))
        self._axes = [_Flows.of(axis) for axis in axes.values() if axis.crosses_nodes]
        names = [(axis.size, axis.stride) for axis in axes.values() if axis.crosses_nodes]
        identity = np.arange(tree.key.num_slots // per_node)
        scales = [self._axis(axis, identity) for axis in self._axes]
        self._weights = [weights[n] / scale if scale else 0.0 for n, scale in zip(names, scales, strict=True)]

    def __call__(self, order: Ints) -> float:
        """Return the estimate of one order."""
        return sum(w * self._axis(axis, order) for w, axis in zip(self._weights, self._axes, strict=True))

    def _axis(self, axis: _Flows, order: Ints) -> float:
        busiest = mean = 0.0
        for unit_of_node, seconds in self._levels:
            unit_of_position = unit_of_node[order]
            units = unit_of_position[axis.positions]
            if axis.pairs:
                sent = axis.count * _share_outside(units, axis.size, seconds.size)
            else:
                sent = axis.count * (units != unit_of_position[axis.successors])
            load = np.bincount(units, weights=sent, minlength=seconds.size) * seconds
            busiest = max(busiest, float(load.max()))
            mean += float(load.sum()) / load.size
        return busiest + MEAN_WEIGHT * mean


@dataclass(frozen=True, slots=True)
class _Flows:
    """Members of an axis' groups, flat: position, position of the ring successor, multiplicity, (G * n)."""

    size: int
    positions: Ints
    successors: Ints
    count: Ints
    pairs: bool

    @classmethod
    def of(cls, axis: AxisGroups) -> _Flows:
        return cls(
            axis.size,
            axis.positions.ravel(),
            np.roll(axis.positions, -1, axis=1).ravel(),
            np.repeat(axis.count, axis.size),
            axis.pairs,
        )


def _share_outside(units: Ints, size: int, num_units: int) -> Floats:
    """Return the share of its buffer that each member of an all-to-all sends out of its unit, (G * n)."""
    keys = units + np.arange(units.size, dtype=np.int64) // size * num_units
    shares: Floats = 1.0 - np.bincount(keys)[keys] / size
    return shares


def constructed(root: Place, axes: Sequence[AxisGroups], *, per_node: int, seed: int) -> list[Ints]:
    """Return orders that nest the axes' factors in every way and pack the nested blocks into units."""
    num_nodes = root.size
    radices = node_radices([(axis.size, axis.stride) for axis in axes], num_nodes, per_node)
    sequences: dict[tuple[int, bool], Ints] = {}

    def nodes(block: int, largest_first: bool) -> Ints:
        key = (block, largest_first)
        if key not in sequences:
            sequences[key] = np.array(packed(root, block, largest_first=largest_first), dtype=np.int64)
        return sequences[key]

    found: dict[bytes, Ints] = {}
    for sequence in factor_sequences(radices, seed):
        positions, blocks = nested_positions(radices, sequence)
        for block in [1, *blocks]:
            for largest_first in (False, True):
                order = np.empty(num_nodes, dtype=np.int64)
                order[positions] = nodes(block, largest_first)
                found.setdefault(order.tobytes(), order)
    return list(found.values())


def node_radices(axes: Sequence[tuple[int, int]], num_nodes: int, per_node: int) -> list[int]:
    """Return the radices of the node number at which axes (size, stride) begin or end, fastest first."""
    ends = {stride for _, stride in axes} | {size * stride for size, stride in axes}
    boundaries = sorted(end // per_node for end in ends if end % per_node == 0)
    radices, last = [], 1
    for boundary in [*boundaries, num_nodes]:
        if boundary > last and boundary % last == 0 and num_nodes % boundary == 0:
            radices.append(boundary // last)
            last = boundary
    return radices


def improved(order: Ints, estimate: LoadEstimate, *, seed: int) -> tuple[Ints, int]:
    """Return what swaps of nodes and of aligned blocks make of ``order``, and the number of estimates.

    Deterministic: the seed and a count of estimates decide, never the clock.
    """
    rng = random.Random(seed)
    num_nodes = len(order)
    sizes = [b for b in (1, 2, 4, 8, 16, 32) if num_nodes % b == 0 and b * 2 <= num_nodes]
    budget = max(FEWEST_ESTIMATES, ESTIMATES * ESTIMATED_NODES // max(num_nodes, ESTIMATED_NODES))
    best, best_cost = order.copy(), estimate(order)
    patience = max(100, budget // 3)
    since = spent = 0
    while spent < budget and since < patience and sizes:
        # Single nodes are moved most: blocks are what the constructions already tried.
        block = sizes[min(int(rng.expovariate(1.0)), len(sizes) - 1)]
        first, second = rng.sample(range(num_nodes // block), 2)
        a, b = slice(first * block, (first + 1) * block), slice(second * block, (second + 1) * block)
        trial = best.copy()
        trial[a], trial[b] = best[b], best[a]
        cost = estimate(trial)
        spent += 1
        since += 1
        if cost < best_cost or (math.isclose(cost, best_cost, rel_tol=1e-12) and rng.random() < 0.5):
            since = since if cost >= best_cost * (1 - 1e-9) else 0
            best, best_cost = trial, min(cost, best_cost)
    return best, spent
