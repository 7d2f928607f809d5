"""Which unit of each level every slot (GPU position) lies in, and the ports through which it leaves it.

Index letters: W slots, K levels; slot = node index * gpus_per_node + local GPU index.  A port is what the
traffic of some slots shares on its way out of their unit: the unit's uplink, a NIC, or one rail of a leaf.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs.cluster import Cluster, Unit

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TreeKey:
    """All that the shape of groups depends on, hashable: a Cluster holds dicts and is not.

    Args:
        level_gpus: GPUs of one unit, levels inner to outer, (K).
        line_bytes_per_s: the levels' line rates, (K).
        usable_bytes_per_s: line rate times efficiency, (K).
        nodes: real names; left empty when no unit refers to them.
        nics_per_node: at most ``gpus_per_node``; NIC of local GPU l = l * nics_per_node // gpus_per_node.
        rails: every NIC of a node has its own leaf switch; a unit above the NICs is one leaf per rail.
        pxn: traffic to another rail takes NVLink to the GPU of that rail first, so it stays on one leaf.
        torus: axes, fastest first, whose product is the GPUs of one level; empty without a torus.
    """

    num_slots: int
    gpus_per_node: int
    level_names: tuple[str, ...]
    level_gpus: tuple[int, ...]
    line_bytes_per_s: tuple[float, ...]
    usable_bytes_per_s: tuple[float, ...]
    nodes: tuple[str, ...]
    units: tuple[Unit, ...]
    nics_per_node: int
    rails: bool
    pxn: bool
    torus: tuple[int, ...]

    @property
    def nic_level(self) -> int:
        """Innermost level whose unit holds a whole node: what leaves that unit passes a NIC."""
        return next(i for i, gpus in enumerate(self.level_gpus) if gpus >= self.gpus_per_node)

    @property
    def rail_level(self) -> int | None:
        """Level whose units have one uplink per rail, or None."""
        return self.nic_level + 1 if self.rails and self.nic_level + 1 < len(self.level_gpus) - 1 else None


@dataclass(frozen=True, slots=True)
class SlotTree:
    """Unit tables of the levels below the outermost one, whose single unit is the whole cluster.

    Args:
        unit_of_slot: K-1 arrays (W): index of the unit that holds the slot.
        uplink_share: K-1 arrays (units): a unit's uplink over the line rate of the level above.
        port_of_slot: K-1 arrays (W): index of the port through which the slot leaves its unit.
        port_gpus: K-1 arrays (ports): capacity of the port over the usable rate per GPU of the level above,
            that is the slots behind it times the uplink share of its unit (0 for an index without slots).
    """

    key: TreeKey
    unit_of_slot: tuple[Ints, ...]
    uplink_share: tuple[Floats, ...]
    port_of_slot: tuple[Ints, ...]
    port_gpus: tuple[Floats, ...]


def slot_tree(cluster: Cluster) -> SlotTree:
    """Return the unit tables of ``cluster``.

    Nodes that no unit of a level names are packed by position, ``gpus`` of the level at a time.

    Raises:
        BadInputError: units are not nested: one is split by the level above, or lies inside a node.
    """
    return tree_of(
        TreeKey(
            num_slots=cluster.num_gpus,
            gpus_per_node=cluster.gpus_per_node,
            level_names=tuple(level.name for level in cluster.levels),
            level_gpus=tuple(level.gpus for level in cluster.levels),
            line_bytes_per_s=tuple(level.bandwidth_bytes_per_s for level in cluster.levels),
            usable_bytes_per_s=tuple(level.usable_bytes_per_s for level in cluster.levels),
            nodes=cluster.nodes if cluster.units else (),
            units=cluster.units,
            nics_per_node=min(cluster.nics_per_node or cluster.gpus_per_node, cluster.gpus_per_node),
            rails=cluster.rails,
            pxn=cluster.pxn,
            torus=cluster.torus,
        )
    )


@lru_cache(maxsize=64)
def tree_of(key: TreeKey) -> SlotTree:
    """Return the unit tables of ``key``; the same object for equal keys."""
    tables = [_level_table(key, level) for level in range(len(key.level_gpus) - 1)]
    for level in range(1, len(tables)):
        _check_nested(key, tables[level - 1][0], tables[level][0], level)
    ports = [_ports(key, level, *table) for level, table in enumerate(tables)]
    return SlotTree(
        key,
        tuple(ids for ids, _ in tables),
        tuple(share for _, share in tables),
        tuple(port for port, _ in ports),
        tuple(gpus for _, gpus in ports),
    )


def _level_table(key: TreeKey, level: int) -> tuple[Ints, Floats]:
    """Return (unit of each slot, uplink share of each unit) of one level."""
    slots = np.arange(key.num_slots, dtype=np.int64)
    ids = slots // key.level_gpus[level]
    named = [unit for unit in key.units if unit.level == key.level_names[level]]
    if named and key.level_gpus[level] < key.gpus_per_node:
        raise BadInputError(
            "NEST-C05",
            "units of a level inside a node cannot be named by nodes",
            factors=[Factor("level", key.level_names[level])],
        )
    first_named = int(ids[-1]) + 1
    share = np.ones(first_named + len(named))
    position = {node: index for index, node in enumerate(key.nodes)}
    for offset, unit in enumerate(named):
        nodes = np.array([position[node] for node in unit.nodes], dtype=np.int64)
        local = np.arange(key.gpus_per_node, dtype=np.int64)
        ids[(nodes[:, None] * key.gpus_per_node + local).ravel()] = first_named + offset
        if unit.uplink_bytes_per_s is not None:
            share[first_named + offset] = unit.uplink_bytes_per_s / key.line_bytes_per_s[level + 1]
    ids.setflags(write=False)
    share.setflags(write=False)
    return ids, share


def _ports(key: TreeKey, level: int, ids: Ints, share: Floats) -> tuple[Ints, Floats]:
    """Return (port of each slot, slots behind each port times the uplink share of its unit) of one level."""
    slots = np.arange(key.num_slots, dtype=np.int64)
    node, local = np.divmod(slots, key.gpus_per_node)
    nic: Ints = local * key.nics_per_node // key.gpus_per_node
    port: Ints = ids
    if level == key.nic_level:
        port = node * key.nics_per_node + nic
    elif level == key.rail_level:
        port = ids * key.nics_per_node + nic
    gpus = np.bincount(port, weights=share[ids]).astype(np.float64)
    port.setflags(write=False)
    gpus.setflags(write=False)
    return port, gpus


def _check_nested(key: TreeKey, inner: Ints, outer: Ints, level: int) -> None:
    parent = np.full(int(inner.max()) + 1, -1, dtype=np.int64)
    parent[inner] = outer
    split = np.flatnonzero(parent[inner] != outer)
    if split.size:
        slot = int(split[0])
        node: Hashable = key.nodes[slot // key.gpus_per_node] if key.nodes else slot // key.gpus_per_node
        raise BadInputError(
            "NEST-C05",
            f"a unit of level {key.level_names[level - 1]!r} is split by level {key.level_names[level]!r}",
            factors=[Factor("nodes", node), Factor("level", key.level_names[level - 1])],
        )
