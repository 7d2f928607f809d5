"""Which unit of each level every slot (GPU position) lies in, and how good that unit's uplink is.

Index letters: W slots, K levels; slot = node index * gpus_per_node + local GPU index.
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
    """

    num_slots: int
    gpus_per_node: int
    level_names: tuple[str, ...]
    level_gpus: tuple[int, ...]
    line_bytes_per_s: tuple[float, ...]
    usable_bytes_per_s: tuple[float, ...]
    nodes: tuple[str, ...]
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class SlotTree:
    """Unit tables of the levels below the outermost one, whose single unit is the whole cluster.

    Args:
        unit_of_slot: K-1 arrays (W): index of the unit that holds the slot.
        uplink_share: K-1 arrays (units): a unit's uplink over the line rate of the level above.
    """

    key: TreeKey
    unit_of_slot: tuple[Ints, ...]
    uplink_share: tuple[Floats, ...]


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
        )
    )


@lru_cache(maxsize=64)
def tree_of(key: TreeKey) -> SlotTree:
    """Return the unit tables of ``key``; the same object for equal keys."""
    tables = [_level_table(key, level) for level in range(len(key.level_gpus) - 1)]
    for level in range(1, len(tables)):
        _check_nested(key, tables[level - 1][0], tables[level][0], level)
    return SlotTree(key, tuple(ids for ids, _ in tables), tuple(share for _, share in tables))


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
