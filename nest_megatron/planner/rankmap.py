"""Rank maps: which node of a concrete allocation holds which ranks, priced exactly.

A map permutes whole nodes (DESIGN section 7), so each map is a Cluster with its ``nodes`` in another order
and is priced like any other cluster.  The scheduler's order is always among the candidates; therefore a map
is never slower than it.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Iterable, Sequence

import numpy as np

from nest_megatron import rules
from nest_megatron.cluster.allocation import in_order, string_order
from nest_megatron.cluster.groups import GroupShape, worst_shape
from nest_megatron.cluster.slots import Ints, slot_tree
from nest_megatron.planner.arrangements import Place, arrangements, place_tree
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.planner.placement import (
    AxisGroups,
    LoadEstimate,
    axes_of,
    axis_groups,
    constructed,
    improved,
)
from nest_megatron.planner.slot_bound import slot_bound_s
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Order
from nest_megatron.specs.plan import AxisCrossings, NodeOrder, OrderPrice, RankMap

#: Every order is tried when the tree has at most this many that differ, on at most so many nodes.
EXACT_ORDERS, EXACT_NODES = 3000, 24
#: Estimated orders that are priced exactly, and those from which a local search starts.
FINALISTS, STARTS = 8, 3
#: Swaps that are priced exactly at the end, times nodes; and their largest number.
POLISHED_NODES, MOST_POLISHES = 2000, 100
#: A map that saves less keeps the scheduler's order.
SMALLEST_GAIN = 0.001
#: An axis without exposed time still counts with this share of the step in the estimate.
SMALLEST_WEIGHT = 0.002


def rank_map(
    job: TrainJob, cluster: Cluster, layout: Layout, *, orders: Iterable[Order] = (), seed: int = 0
) -> RankMap:
    """Return the best map of ``layout`` on the nodes of ``cluster``, which are in the scheduler's order.

    Args:
        orders: Megatron's rank orders that may replace the layout's own; those that are illegal are left out.
            Another one is taken only if it is not slower in the scheduler's order either, where the plan runs
            until its hostfiles are used.
    """
    started = time.perf_counter()
    candidates = [layout, *_other_orders(job, layout, orders)]
    searches = [_Search(job, cluster, candidate, seed) for candidate in candidates]
    prices: list[OrderPrice] = []
    for search in searches:
        prices += search.prices()
    chosen = searches[safest_gain([(search.default_s, search.best_s) for search in searches])]
    bound_s = slot_bound_s(job, cluster, chosen.layout) if cluster.nodes else None
    return RankMap(
        order=chosen.layout.order,
        nodes=chosen.names(chosen.best),
        gpus_per_node=cluster.gpus_per_node,
        step_time_s=chosen.best_s,
        default_step_time_s=chosen.default_s,
        bound_s=bound_s,
        optimal=bound_s is not None and (chosen.exact or chosen.best_s <= bound_s),
        priced=sum(search.priced for search in searches),
        estimated=sum(search.estimated for search in searches),
        search_s=time.perf_counter() - started,
        prices=tuple(prices),
        crossings=chosen.crossings(),
    )


def safest_gain(prices: Sequence[tuple[float, float]]) -> int:
    """Return which of several (seconds without a map, with it) to take: the first, or one better in both."""
    chosen = 0
    for index, (default_s, best_s) in enumerate(prices):
        safe = default_s <= prices[chosen][0]
        if safe and best_s < prices[chosen][1] * (1.0 - SMALLEST_GAIN):
            chosen = index
    return chosen


def _other_orders(job: TrainJob, layout: Layout, orders: Iterable[Order]) -> list[Layout]:
    others = [dataclasses.replace(layout, order=order) for order in orders if order != layout.order]
    return [other for other in others if not rules.check(job, other)]


class OrderPricer:
    """Exact step times of one layout under orders of the nodes of one cluster.

    An order is an array (N) of indices into ``cluster.nodes``; the identity is the scheduler's order.  An
    order enters the price through the shapes of the layout's groups only, so equal shapes share a price.
    """

    def __init__(self, job: TrainJob, cluster: Cluster, layout: Layout) -> None:
        self._job, self._cluster, self._layout = job, cluster, layout
        self._tree = slot_tree(cluster)
        evaluator = Evaluator(job, cluster)
        (self.prediction,) = evaluator.predict([layout])
        pairs = {axes_of(layout).get(axis) for axis in ("ep", "etp")}
        asked = {g: shape for g, shape in evaluator.cost.pricer.groups.items() if g[0] > 1}
        self.axes = {group: axis_groups(self._tree, *group, pairs=group in pairs) for group in asked}
        self._moving = [axis for axis in self.axes.values() if axis.crosses_nodes]
        self._fixed = {g: asked[g] for g, axis in self.axes.items() if not axis.crosses_nodes}
        #: Nodes with the same number are in the same units and alike.
        self.kind_of_node = _kinds(place_tree(self._tree))
        self._shapes: dict[tuple[tuple[int, int], bytes], GroupShape] = {}
        self._prices: dict[tuple[GroupShape, ...], float] = {}

    @property
    def priced(self) -> int:
        """Orders with different shapes that were priced."""
        return len(self._prices)

    def step_time_s(self, order: Ints) -> float:
        """Return the exact step time of one order."""
        shapes = tuple(self._shape(axis, order) for axis in self._moving)
        if shapes not in self._prices:
            evaluator = Evaluator(self._job, self._cluster)
            evaluator.cost.pricer.assume(self._fixed)
            groups = ((axis.size, axis.stride) for axis in self._moving)
            evaluator.cost.pricer.assume(dict(zip(groups, shapes, strict=True)))
            self._prices[shapes] = evaluator.step_times_s([self._layout])[0]
        return self._prices[shapes]

    def repriced_s(self, order: Ints) -> float:
        """Return the step time on a cluster whose nodes are in this order, measured anew."""
        cluster = in_order(self._cluster, [self._cluster.nodes[i] for i in order])
        return Evaluator(self._job, cluster).step_times_s([self._layout])[0]

    def leaving(self, group: tuple[int, int], order: Ints) -> dict[str, int]:
        """Return level name -> groups that leave a unit of the level."""
        slots = self._slots(axis_groups(self._tree, *group, pairs=False), order)
        names = self._tree.key.level_names[:-1]
        units = [table[slots] for table in self._tree.unit_of_slot]
        return {
            name: int((unit != unit[:, :1]).any(axis=1).sum())
            for name, unit in zip(names, units, strict=True)
        }

    def _slots(self, axis: AxisGroups, order: Ints) -> Ints:
        per_node = self._tree.key.gpus_per_node
        return order[axis.members // per_node] * per_node + axis.members % per_node

    def _shape(self, axis: AxisGroups, order: Ints) -> GroupShape:
        # Nodes of one kind are interchangeable, and so are the groups of an axis among each other.
        rows = np.column_stack([axis.count, self.kind_of_node[order][axis.positions]])
        key = (axis.size, axis.stride), rows[np.lexsort(rows.T[::-1])].tobytes()
        if key not in self._shapes:
            self._shapes[key] = worst_shape(self._tree, self._slots(axis, order))
        return self._shapes[key]


def _kinds(root: Place) -> Ints:
    """Return a number for each node; nodes with the same number are in the same units and alike."""
    kinds: dict[tuple[object, ...], int] = {}
    found: dict[int, int] = {}

    def visit(place: Place, path: tuple[int, ...]) -> None:
        if place.children:
            for index, child in enumerate(place.children):
                visit(child, (*path, index) if child.children else path)
        else:
            found[place.node] = kinds.setdefault((path, place.signature), len(kinds))

    visit(root, ())
    return np.array([found[node] for node in range(len(found))], dtype=np.int64)


class _Search:
    """The best order of nodes of one layout."""

    def __init__(self, job: TrainJob, cluster: Cluster, layout: Layout, seed: int) -> None:
        self.layout = layout
        self._cluster, self._seed = cluster, seed
        self._pricer = OrderPricer(job, cluster, layout)
        self._identity = np.arange(cluster.num_nodes, dtype=np.int64)
        self.default_s = self._pricer.prediction.step_time_s
        self.best, self.best_s = self._identity, self.default_s
        self.exact = True
        self.estimated = 0
        if cluster.nodes and any(axis.crosses_nodes for axis in self._pricer.axes.values()):
            self._run()
            self.best_s = self._pricer.repriced_s(self.best)
        if self.best_s > self.default_s * (1.0 - SMALLEST_GAIN):
            self.best, self.best_s = self._identity, self.default_s

    @property
    def priced(self) -> int:
        """Orders that were priced exactly."""
        return self._pricer.priced

    def names(self, order: Ints) -> tuple[str, ...]:
        """Return the node names in rank order; empty for a cluster without names."""
        return tuple(self._cluster.nodes[i] for i in order) if self._cluster.nodes else ()

    def prices(self) -> list[OrderPrice]:
        """Return the step time in the orders of the schedulers and of the map."""
        found: list[tuple[NodeOrder, float]] = [("slurm", self.default_s)]
        if self._cluster.nodes:
            found += [("torchrun", self._pricer.step_time_s(self._as_strings())), ("map", self.best_s)]
        return [OrderPrice(order=self.layout.order, nodes=nodes, step_time_s=s) for nodes, s in found]

    def crossings(self) -> tuple[AxisCrossings, ...]:
        """Return how many groups of each axis leave each level, with the map and without."""
        return tuple(
            AxisCrossings(
                axis=axis,
                size=group[0],
                groups=self._cluster.num_gpus // group[0],
                mapped=self._pricer.leaving(group, self.best),
                default=self._pricer.leaving(group, self._identity),
            )
            for axis, group in axes_of(self.layout).items()
        )

    def _as_strings(self) -> Ints:
        index = {name: i for i, name in enumerate(self._cluster.nodes)}
        return np.array([index[name] for name in string_order(self._cluster.nodes)], dtype=np.int64)

    def _run(self) -> None:
        root = place_tree(slot_tree(self._cluster))
        self._offer([self._as_strings()])
        if self._cluster.num_nodes <= EXACT_NODES:
            every = list(itertools.islice(arrangements(root), EXACT_ORDERS + 1))
            if len(every) <= EXACT_ORDERS:
                self._offer([np.array(order, dtype=np.int64) for order in every])
                return
        self.exact = False
        estimate = LoadEstimate(slot_tree(self._cluster), self._pricer.axes, self._weights())
        axes = list(self._pricer.axes.values())
        orders = [
            self._identity,
            self._as_strings(),
            *constructed(root, axes, per_node=self._cluster.gpus_per_node, seed=self._seed),
        ]
        self.estimated += len(orders)
        orders = _best_few(orders, [estimate(order) for order in orders], FINALISTS)
        self._offer(orders)
        for start in [self.best, *orders][:STARTS]:
            order, spent = improved(start, estimate, seed=self._seed)
            self.estimated += spent
            self._offer([order])
        self._polish()

    def _polish(self) -> None:
        """Swap pairs of unlike nodes as long as the exact price does not rise: the estimate is none."""
        rng = random.Random(self._seed)
        kinds = self._pricer.kind_of_node
        order, seconds = self.best.copy(), self.best_s
        for _ in range(min(MOST_POLISHES, POLISHED_NODES // len(order))):
            first, second = rng.sample(range(len(order)), 2)
            if kinds[order[first]] == kinds[order[second]]:
                continue
            trial = order.copy()
            trial[[first, second]] = order[[second, first]]
            trial_s = self._pricer.step_time_s(trial)
            if trial_s <= seconds:
                order, seconds = trial, trial_s
        self._offer([order])

    def _offer(self, orders: Sequence[Ints]) -> None:
        """Price orders and keep the fastest; of equal ones the first."""
        for order in orders:
            seconds = self._pricer.step_time_s(order)
            if seconds < self.best_s:
                self.best, self.best_s = order, seconds

    def _weights(self) -> dict[tuple[int, int], float]:
        """Return the seconds that each axis costs in the scheduler's order, from the report's own split."""
        split = self._pricer.prediction.time_split
        terms = {"dp_cp": "dp", "edp": "dp", "etp": "ep"}
        named = {group: terms.get(axis, axis) for axis, group in axes_of(self.layout).items()}
        least = SMALLEST_WEIGHT * self.default_s
        return {group: max(split.get(named.get(group, "dp"), 0.0), least) for group in self._pricer.axes}


def _best_few(orders: list[Ints], costs: list[float], count: int) -> list[Ints]:
    """Return the orders of least cost, one of each cost."""
    found: dict[float, Ints] = {}
    for i in sorted(range(len(orders)), key=lambda i: costs[i]):
        found.setdefault(round(costs[i], 9), orders[i])
        if len(found) == count:
            break
    return list(found.values())
