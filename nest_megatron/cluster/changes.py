"""What happened to a cluster since a plan was made: nodes lost or replaced, links degraded, another size."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from nest_megatron.cluster.fields import shown
from nest_megatron.cluster.hosts import expand_hosts
from nest_megatron.errors import BadInputError, Factor, nearest_names
from nest_megatron.specs.cluster import Cluster, Unit
from nest_megatron.specs.job import COMMAND_LINE
from nest_megatron.units import BytesPerSecond

#: Kind of change -> how it is written.
FORMS = {
    "lost": "lost=NODES, for example lost=gpu[007,012]; lost=N nodes of a cluster without names",
    "nodes": "nodes=NODES, all nodes of the job now",
    "topology": "topology=FILE, as --topology reads it",
    "cluster": "cluster=NAME or FILE",
    "gpus": "gpus=N, the world to plan for",
    "degraded": "degraded=NAME:FACTOR, the share that a unit's uplink, a node or a level has left",
}
#: Names that an error lists.
_SHOWN = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes since the plan.

    Args:
        lost: node names that are gone; ``lost_count``: their number where nodes have no names.
        nodes, topology, cluster: replace what the plan was made with; None keeps it.
        num_gpus: the world to plan for; None lets the planner use as many nodes as a layout can.
        degraded: (unit, node or level, factor on its bandwidth), in the order given.
    """

    lost: tuple[str, ...] = ()
    lost_count: int = 0
    nodes: str | None = None
    topology: str | None = None
    cluster: str | None = None
    num_gpus: int | None = None
    degraded: tuple[tuple[str, float], ...] = ()


def read_changes(texts: Sequence[str]) -> Changes:
    """Return what ``KIND=VALUE`` texts say.

    Raises:
        BadInputError: an unknown kind (with the nearest), a value it cannot take, a kind given twice that can
            hold one value only.
    """
    found: dict[str, Any] = {"lost": (), "lost_count": 0, "degraded": ()}
    for text in texts:
        kind, _, value = text.partition("=")
        if kind not in FORMS:
            raise BadInputError(
                "NEST-R01",
                f"{shown(kind)} is no kind of change",
                factors=[Factor("--changed", shown(text), COMMAND_LINE)],
                nearest=[FORMS[near] for near in nearest_names(kind[:100], tuple(FORMS))] or FORMS.values(),
            )
        if not value:
            raise _unreadable(kind, text)
        if kind == "lost" and value.isdecimal():
            found["lost_count"] += int(value[:9])
        elif kind == "lost":
            found["lost"] += expand_hosts(value, where="lost nodes")
        elif kind == "degraded":
            found["degraded"] += (_degraded(value, text),)
        elif kind in found or (kind == "gpus" and "num_gpus" in found):
            raise BadInputError(
                "NEST-R01",
                f"{kind} is given twice",
                factors=[Factor("--changed", shown(text), COMMAND_LINE)],
            )
        elif kind == "gpus":
            if not value.isdecimal() or not 0 < int(value[:9]) < 10**8:
                raise _unreadable(kind, text)
            found["num_gpus"] = int(value[:9])
        else:
            found[kind] = value
    return Changes(**found)


def _degraded(value: str, text: str) -> tuple[str, float]:
    name, _, share = value.rpartition(":")
    try:
        factor = float(share)
    except ValueError:
        raise _unreadable("degraded", text) from None
    if not name or not math.isfinite(factor) or not 0 < factor <= 100:
        raise _unreadable("degraded", text)
    return name, factor


def _unreadable(kind: str, text: str) -> BadInputError:
    return BadInputError(
        "NEST-R01",
        "a change cannot be read",
        factors=[Factor("--changed", shown(text), COMMAND_LINE)],
        nearest=[FORMS[kind]],
    )


def described(changes: Changes) -> tuple[str, ...]:
    """Return one sentence per change."""
    said = [f"lost: {', '.join(changes.lost[:_SHOWN])} ({len(changes.lost)} nodes)"] if changes.lost else []
    said += [f"lost: {changes.lost_count} nodes without names"] if changes.lost_count else []
    for kind, value in (
        ("nodes", changes.nodes),
        ("topology", changes.topology),
        ("cluster", changes.cluster),
        ("GPUs", changes.num_gpus),
    ):
        said += [f"{kind}: {value}"] if value is not None else []
    said += [f"degraded: {name} at {factor:g} of its bandwidth" for name, factor in changes.degraded]
    return tuple(said)


def remaining(nodes: Sequence[str], lost: Sequence[str], origin: str) -> tuple[str, ...]:
    """Return ``nodes`` without those that are lost.

    Raises:
        BadInputError: a lost node is not among them, or none is left.
    """
    unknown = [node for node in lost if node not in set(nodes)]
    if unknown:
        raise BadInputError(
            "NEST-R02",
            f"{unknown[0]} is lost and was not a node of the job",
            factors=[Factor("nodes", len(nodes), origin)],
            nearest=nearest_names(unknown[0][:100], list(nodes)[:1000])
            if nodes
            else ["lost=1: nodes have no names"],
        )
    left = tuple(node for node in nodes if node not in set(lost))
    if not left:
        raise BadInputError("NEST-R02", "every node is lost", factors=[Factor("nodes", len(nodes), origin)])
    return left


def degrade(cluster: Cluster, degraded: Sequence[tuple[str, float]]) -> Cluster:
    """Return ``cluster`` with some bandwidths multiplied.

    A level's name scales the whole level.  A unit's name scales the unit's uplink toward the level above; a
    node's name scales what leaves the node, where the innermost level is one node.  All are said in
    ``assumptions``.

    Raises:
        BadInputError: an unknown name (with the nearest ones), or a unit without an uplink.
    """
    for name, factor in degraded:
        cluster = _degraded_once(cluster, name, factor)
        said = f"degraded: {name} at {factor:g} of its bandwidth"
        cluster = dataclasses.replace(cluster, assumptions=(*cluster.assumptions, said))
    return cluster


def _degraded_once(cluster: Cluster, name: str, factor: float) -> Cluster:
    levels = cluster.levels
    if name in {level.name for level in levels}:
        scaled = [
            dataclasses.replace(
                level, bandwidth_bytes_per_s=BytesPerSecond(level.bandwidth_bytes_per_s * factor)
            )
            if level.name == name
            else level
            for level in levels
        ]
        return dataclasses.replace(cluster, levels=tuple(scaled))
    above = {inner.name: outer for inner, outer in itertools.pairwise(levels)}
    units = list(cluster.units)
    found = [i for i, unit in enumerate(units) if unit.name == name and unit.level in above]
    if not found and name in cluster.nodes and len(levels) > 1 and levels[0].gpus == cluster.gpus_per_node:
        found = [len(units)]
        units.append(Unit(level=levels[0].name, name=name, nodes=(name,)))
    if not found:
        known = [*(level.name for level in levels), *(unit.name for unit in units), *cluster.nodes]
        raise BadInputError(
            "NEST-R03",
            f"nothing of the cluster is named {shown(name)}",
            factors=[
                Factor("degraded", shown(name), COMMAND_LINE),
                Factor("nodes", f"{len(cluster.nodes)} named of {cluster.num_nodes}", cluster.source),
            ],
            nearest=nearest_names(name[:100], known[:1000]) or known[:_SHOWN],
        )
    for i in found:
        own = units[i].uplink_bytes_per_s
        rate = above[units[i].level].bandwidth_bytes_per_s if own is None else own
        units[i] = dataclasses.replace(units[i], uplink_bytes_per_s=BytesPerSecond(rate * factor))
    return dataclasses.replace(cluster, units=tuple(units))
