"""Resource-load form: seconds that every port is busy while given collectives run at the same time.

Research/network.md 1.4: T >= max over ports of the bytes of all concurrent groups over the port's capacity.
It holds for any set of groups, and for several axes that communicate together; latencies are not part of it.
Index letters: G groups, n members of a group in ring order, W slots, R resources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, assert_never

import numpy as np

from nest_megatron.cluster.crossings import Crossings, Pattern, crossings, sent
from nest_megatron.cluster.slots import Floats, Ints, slot_tree
from nest_megatron.cost.algorithms import Algorithms
from nest_megatron.cost.lines import CollectiveOp
from nest_megatron.errors import Factor, PlannerFault
from nest_megatron.specs.cluster import Cluster

Algorithm = Literal["ring", "tree", "nvls", "pairs"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """The groups of one axis that run one collective at the same time.

    Args:
        num_bytes: in the op's own convention (``CollectiveModel``).
        groups: physical slots in ring order, (G, n).
        algorithm: ``ring``, ``tree`` or ``nvls`` for an all-reduce; ``ring`` or ``pairs`` for other ops.
    """

    op: CollectiveOp
    num_bytes: float
    groups: Ints
    algorithm: Algorithm

    @property
    def pattern(self) -> Pattern:
        """What one unit of the traffic is (``cluster.crossings``)."""
        if self.op == "p2p":
            return "message"
        patterns: dict[Algorithm, Pattern] = {
            "ring": "ring",
            "tree": "tree",
            "nvls": "tree",
            "pairs": "pairs",
        }
        return patterns[self.algorithm]

    @property
    def unit_bytes(self) -> float:
        """Bytes of one unit: a ring edge carries 2(n-1)/n of an all-reduce, (n-1)/n of a gather."""
        if self.pattern != "ring":
            return self.num_bytes
        size = self.groups.shape[1]
        share: float = (2 if self.op == "all_reduce" else 1) * (size - 1) / size
        return share * self.num_bytes


@dataclass(frozen=True, slots=True)
class Busy:
    """The busiest resource of a phase.

    Args:
        seconds: how long it is busy, the least time of the phase.
        level: name of the level whose port it is; the innermost level's own name for a GPU's link inside.
        outward: the port leads out of a unit of ``level``; False for a link inside the innermost level.
        slots: the slots behind it.
    """

    seconds: float
    level: str
    outward: bool
    slots: tuple[int, ...] = field(repr=False)


class LoadForm:
    """Port loads of concurrent collectives on one cluster.

    Raises:
        PlannerFault: the cluster is a torus, whose links are counted by ``cluster.torus``.
        BadInputError: no communication constants for the accelerator's generation.
    """

    def __init__(self, cluster: Cluster) -> None:
        if cluster.torus:
            raise PlannerFault(
                "NEST-F12",
                "the load form counts the ports of a level tree, not torus links",
                factors=[Factor("torus", str(cluster.torus), cluster.source)],
            )
        self._cluster = cluster
        self._tree = slot_tree(cluster)
        self._algorithms = Algorithms(cluster)
        self._rates = self._tree.key.usable_bytes_per_s

    def phase_s(self, traffics: Sequence[Traffic]) -> float:
        """Return the least time in which all ``traffics`` end: that of the busiest resource."""
        return self.busiest(traffics).seconds

    def busiest(self, traffics: Sequence[Traffic]) -> Busy:
        """Return the resource that is busy longest while all ``traffics`` run."""
        names = [level.name for level in self._cluster.levels]
        best = Busy(0.0, names[0], False, ())
        for level in range(-1, len(names) - 1):
            busy = np.zeros(self._ports(level).max() + 1)
            for traffic in traffics:
                for ports, seconds in self._usage(traffic, level):
                    np.add.at(busy, ports, seconds * traffic.unit_bytes)
            port = int(busy.argmax())
            if busy[port] > best.seconds:
                slots = tuple(int(slot) for slot in np.flatnonzero(self._ports(level) == port))
                best = Busy(float(busy[port]), names[max(level, 0)], level >= 0, slots)
        return best

    def fair_times_s(self, traffics: Sequence[Traffic]) -> list[Floats]:
        """Return the transfer time of every group at its max-min fair rate, one array (G) per traffic.

        Rates are those while all groups run: what a group gains when another ends first is not counted.
        """
        usage = np.concatenate([self._usage_matrix(traffic) for traffic in traffics])
        sizes = np.concatenate([np.full(len(t.groups), t.unit_bytes) for t in traffics])
        times = sizes / _max_min(usage)
        ends = np.cumsum([len(traffic.groups) for traffic in traffics])[:-1]
        return np.split(times, ends)

    def _ports(self, level: int) -> Ints:
        """Port of every slot, (W): the slot's own link inside the innermost level for level -1."""
        if level < 0:
            return np.arange(self._tree.key.num_slots, dtype=np.int64)
        return self._tree.port_of_slot[level]

    def _usage(self, traffic: Traffic, level: int) -> Iterator[tuple[Ints, Floats]]:
        """Yield (ports, seconds per unit byte that each member keeps its port busy), (G, n) both."""
        groups = traffic.groups
        if groups.shape[1] == 1:
            return
        crossed = crossings(self._tree, groups)
        if level < 0:
            yield groups, self._inside_s_per_byte(traffic, crossed)
            return
        gpus = self._tree.port_gpus[level][self._tree.port_of_slot[level][groups]]
        units = sent(self._tree, crossed, level, traffic.pattern)
        yield self._tree.port_of_slot[level][groups], units / (gpus * self._rates[level + 1])

    def _inside_s_per_byte(self, traffic: Traffic, crossed: Crossings) -> Floats:
        """Seconds per unit byte on each member's own link inside its domain, (G, n) (network.md 1.2)."""
        groups = traffic.groups
        size = groups.shape[1]
        if crossed.levels:
            domains = crossed.levels[0]
            members, stays = domains.members[domains.entry], ~domains.leaves
        else:
            members, stays = np.full_like(groups, size), np.ones_like(groups, dtype=np.bool_)
        if traffic.op == "p2p":
            alone: Floats = stays / self._algorithms.domain_bytes_per_s(2)
            return alone
        busy_by_members = {
            int(count): self._busy_s_per_byte(traffic.algorithm, int(count), size)
            for count in np.unique(members)
        }
        per_byte = np.array([busy_by_members[int(count)] for count in members.ravel()]).reshape(members.shape)
        busy: Floats = per_byte * stays if traffic.algorithm == "ring" else per_byte
        return busy

    def _busy_s_per_byte(self, algorithm: Algorithm, members: int, size: int) -> float:
        """Seconds per unit byte of one of ``members`` GPUs in a domain; 0 where nobody else is in it."""
        model = self._algorithms
        if members == 1:
            return 0.0
        match algorithm:
            case "ring":
                return 1 / model.domain_bytes_per_s(members)
            case "tree":
                return 1 / model.tree_domain_bytes_per_s(members)
            case "nvls":
                return 1 / model.nvls_bytes_per_s(members)
            case "pairs":
                return (members - 1) / size / model.pairs_domain_bytes_per_s(members)
            case _:
                assert_never(algorithm)

    def _usage_matrix(self, traffic: Traffic) -> Floats:
        """Seconds per unit byte of each group at each resource, (G, R)."""
        blocks = []
        rows = np.arange(len(traffic.groups))[:, None]
        for level in range(-1, len(self._rates) - 1):
            block = np.zeros((len(traffic.groups), self._ports(level).max() + 1))
            for ports, seconds in self._usage(traffic, level):
                np.add.at(block, (np.broadcast_to(rows, ports.shape), ports), seconds)
            blocks.append(block)
        return np.concatenate(blocks, axis=1)


def _max_min(usage: Floats) -> Floats:
    """Return max-min fair rates in unit bytes/s, (G), by progressive filling over R shared resources.

    Args:
        usage: seconds per unit byte, (G, R); a group that uses nothing is infinitely fast.
    """
    rates = np.full(len(usage), np.inf)
    running = usage.any(axis=1)
    spare = np.ones(usage.shape[1])
    level = 0.0  # the rate that every running group has reached
    while running.any():
        demand = usage[running].sum(axis=0)
        used = demand > 0
        step = float((spare[used] / demand[used]).min())
        level += step
        spare[used] -= step * demand[used]
        full = used & (spare <= 1e-12)
        ended = running & (usage[:, full] > 0).any(axis=1)
        rates[ended] = level
        running &= ~ended
    return rates
