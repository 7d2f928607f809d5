"""Orders of the nodes of a tree: all of them modulo symmetry, and those that pack groups into units.

An order is an array (N): entry i is the node that holds the i-th block of ``gpus_per_node`` ranks.  Nodes are
numbered as in ``Cluster.nodes``.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from nest_megatron.cluster.slots import Ints, SlotTree

#: Interleavings of axis factors that one layout contributes at most; more are drawn at random.
MAX_SEQUENCES = 160


@dataclass(slots=True)
class Place:
    """A unit with the units or nodes below it; the same signature means that an automorphism swaps them."""

    signature: tuple[object, ...]
    children: list[Place] = field(default_factory=list)
    node: int = -1
    touched: bool = False
    free: int = 1

    @property
    def size(self) -> int:
        """Nodes of the unit."""
        return sum(child.size for child in self.children) if self.children else 1


def place_tree(tree: SlotTree) -> Place:
    """Return the whole cluster as nested units down to nodes; levels inside a node are left out."""
    per_node = tree.key.gpus_per_node
    num_nodes = tree.key.num_slots // per_node
    places = []
    for node in range(num_nodes):
        slots = slice(node * per_node, (node + 1) * per_node)
        inside = tuple(
            tuple(share[units[slots]].tolist())
            for units, share, gpus in zip(
                tree.unit_of_slot, tree.uplink_share, tree.key.level_gpus[:-1], strict=True
            )
            if gpus <= per_node
        )
        places.append(Place(("node", inside), node=node))
    nodes = np.arange(num_nodes)
    for units, share, gpus in zip(
        tree.unit_of_slot, tree.uplink_share, tree.key.level_gpus[:-1], strict=True
    ):
        if gpus > per_node:
            places, nodes = _enclosed(places, nodes, units[::per_node], share)
    return _unit(places, 1.0)


def _enclosed(
    places: list[Place], first_node: Ints, unit_of_node: Ints, share: np.ndarray
) -> tuple[list[Place], Ints]:
    """Return the units around ``places``, and one node of each."""
    members: dict[int, list[int]] = {}
    for index, node in enumerate(first_node):
        members.setdefault(int(unit_of_node[node]), []).append(index)
    units = [_unit([places[i] for i in inside], float(share[unit])) for unit, inside in members.items()]
    return units, np.array([first_node[inside[0]] for inside in members.values()])


def _unit(children: list[Place], share: float) -> Place:
    below = tuple(sorted((child.signature for child in children), key=repr))
    return Place((share, below), children=children, free=sum(child.free for child in children))


def arrangements(root: Place) -> Iterator[tuple[int, ...]]:
    """Yield one order of every class of orders that the automorphisms of the tree turn into each other.

    Units that look alike are taken in a fixed order when they are first used, so each class appears once.
    """
    order: list[int] = []
    total = root.free

    def step() -> Iterator[tuple[int, ...]]:
        if len(order) == total:
            yield tuple(order)
            return
        for path in _choices(root):
            fresh = [place for place in path if not place.touched]
            for place in path:
                place.free -= 1
                place.touched = True
            order.append(path[-1].node)
            yield from step()
            order.pop()
            for place in path:
                place.free += 1
            for place in fresh:
                place.touched = False

    return step()


def _choices(place: Place) -> Iterator[tuple[Place, ...]]:
    """Yield the paths to the next node: every used unit, and one unused unit of each kind."""
    if not place.children:
        yield (place,)
        return
    seen = set()
    for child in place.children:
        if not child.free:
            continue
        if not child.touched:
            if child.signature in seen:
                continue
            seen.add(child.signature)
        for path in _choices(child):
            yield (place, *path)


def packed(root: Place, block: int, *, largest_first: bool) -> list[int]:
    """Return the nodes unit after unit, whole blocks of ``block`` nodes first.

    What a unit has left after its whole blocks forms blocks with the rest of its neighbours, level by level.
    """
    whole, rest = _packed(root, block, largest_first)
    return [*whole, *rest]


def _packed(place: Place, block: int, largest_first: bool) -> tuple[list[int], list[int]]:
    if not place.children:
        nodes = [place.node]
        return (nodes, []) if block == 1 else ([], nodes)
    children = place.children
    if largest_first:
        children = sorted(children, key=lambda child: -child.size)
    parts = [_packed(child, block, largest_first) for child in children]
    whole = [node for part, _ in parts for node in part]
    rest = [node for _, part in parts for node in part]
    usable = len(rest) // block * block
    return whole + rest[:usable], rest[usable:]


def factor_sequences(radices: Sequence[int], seed: int) -> list[tuple[int, ...]]:
    """Return orders in which the prime factors of a mixed-radix number can be nested, innermost first.

    Entries are axis indices, one per prime factor; factors of one axis keep their order.  This is the set of
    tree factorisations of research/nest_paper.md 4.5, at the granularity of nodes.
    """
    labels = [axis for axis, radix in enumerate(radices) for _ in _primes(radix)]
    counts = [labels.count(axis) for axis in range(len(radices))]
    total = math.factorial(len(labels)) // math.prod(math.factorial(count) for count in counts)
    if total <= MAX_SEQUENCES:
        return sorted(_interleavings(counts, ()))
    # Whole axes nested in every order come first: those are the shapes that Megatron's orders can name.
    found = {
        tuple(axis for axis in nesting for _ in range(counts[axis]))
        for nesting in itertools.islice(itertools.permutations(range(len(counts))), MAX_SEQUENCES // 2)
    }
    rng = random.Random(seed)
    while len(found) < MAX_SEQUENCES:
        rng.shuffle(labels)
        found.add(tuple(labels))
    return sorted(found)


def _interleavings(counts: list[int], prefix: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not any(counts):
        yield prefix
    for axis, count in enumerate(counts):
        if count:
            rest = [*counts[:axis], count - 1, *counts[axis + 1 :]]
            yield from _interleavings(rest, (*prefix, axis))


def nested_positions(radices: Sequence[int], sequence: Sequence[int]) -> tuple[Ints, list[int]]:
    """Return positions with the factors of ``sequence`` nested innermost first, and the block sizes.

    Args:
        radices: of the position number, fastest first; their product is N.
    """
    primes = [_primes(radix) for radix in radices]
    digits = [(axis, prime) for axis, factors in enumerate(primes) for prime in factors]
    grid = np.arange(math.prod(radices), dtype=np.int64).reshape([prime for _, prime in reversed(digits)])
    waiting = {axis: [i for i, (a, _) in enumerate(digits) if a == axis] for axis in range(len(radices))}
    picked = [waiting[axis].pop(0) for axis in sequence]
    # The grid's last dimension runs fastest, so both lists are reversed.
    nested = grid.transpose([len(digits) - 1 - i for i in reversed(picked)]).ravel()
    return nested, list(itertools.accumulate((digits[i][1] for i in picked), lambda a, b: a * b))


def _primes(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors
