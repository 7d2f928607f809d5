"""The nodes of one job: which they are, which units hold them, and in which order the scheduler starts them.

A cluster without node names is a shape; an allocation is concrete: every node has a name and a place in every
level, so that any order of the same nodes is another Cluster with permuted ``nodes``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence

from nest_megatron.cluster.hosts import expand_hosts
from nest_megatron.cluster.load import kept_units, resize
from nest_megatron.cluster.readers.slurm import SlurmTopology, read_topologies
from nest_megatron.cluster.slots import slot_tree
from nest_megatron.errors import BadInputError, Factor, PlannerFault, nearest_names
from nest_megatron.specs.cluster import Cluster, Level, Unit

#: Names that an error or an assumption lists.
_SHOWN = 4


def allocate(
    cluster: Cluster,
    *,
    nodelist: str | None = None,
    topology: str | None = None,
    num_gpus: int | None = None,
) -> Cluster:
    """Return ``cluster`` as the concrete nodes of one job, in the order in which Slurm starts them.

    Units that the cluster file names keep their nodes and uplinks; the topology places the other nodes.  What
    had to be assumed is said in ``assumptions``.  Without a list, a cluster without names stays as it is.

    Args:
        nodelist: Slurm bracket syntax, as ``$SLURM_JOB_NODELIST`` holds it; None means the file's own nodes.
        topology: file that ``read_topologies`` reads, or ``-``.
        num_gpus: GPUs of the job; None means all of the nodes.

    Raises:
        BadInputError: unreadable, nodes that the cluster or the topology does not know, units that are not
            nested, a topology without nodes, or fewer nodes than the job needs.
    """
    if nodelist is None and topology is None:
        return _scheduled(make_concrete(cluster)) if cluster.nodes else cluster
    nodes = cluster.nodes
    if nodelist is not None:
        nodes = natural_order(expand_hosts(nodelist, where="node list"))
    if not nodes:
        raise BadInputError(
            "NEST-C11",
            "a topology needs the nodes of the job",
            factors=[Factor("cluster", f"{cluster.name} names no nodes", cluster.source)],
            nearest=['--nodelist "$SLURM_JOB_NODELIST"', "nodes: [...] in the cluster file"],
        )
    if cluster.nodes:
        _check_known(nodes, cluster.nodes, cluster.source)
    said: list[str] = []
    if topology is not None:
        chosen = _choose(read_topologies(topology), nodes, topology)
        named = _with_topology(cluster, chosen, nodes, said)
    elif cluster.nodes:
        named = make_concrete(cluster).units
    else:
        named = ()
        said.append(
            "no topology was given: assumed that the nodes fill the units of each level in name order"
        )
    concrete = dataclasses.replace(
        cluster,
        nodes=nodes,
        num_nodes=len(nodes),
        units=kept_units(named, nodes),
        assumptions=(*cluster.assumptions, *said),
    )
    whole = resize(concrete, concrete.num_gpus)
    used = whole if num_gpus is None else resize(whole, num_gpus)
    if used.num_nodes < len(nodes):
        note = (
            f"the job uses {used.num_nodes} of the {len(nodes)} listed nodes: assumed the first in name order"
        )
        used = dataclasses.replace(used, assumptions=(*used.assumptions, note))
    return _scheduled(make_concrete(used))


def natural_order(nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the nodes as Slurm orders its node table, numbers by value: n2 before n10."""

    def key(name: str) -> tuple[list[tuple[int, int, str]], str]:
        parts = re.findall(r"\d+|\D+", name)
        return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts], name

    return tuple(sorted(nodes, key=key))


def string_order(nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the nodes as torchrun's dynamic rendezvous orders them, as plain strings: n10 before n2.

    Source: torch ``dynamic_rendezvous.py``, ``sorted(participants)`` (research/hydra_slurm.md 3.6).
    """
    return tuple(sorted(nodes))


def in_order(cluster: Cluster, nodes: Sequence[str]) -> Cluster:
    """Return a concrete cluster whose ranks run over its nodes in another order.

    Raises:
        PlannerFault: ``nodes`` are not exactly the nodes of ``cluster``.
    """
    if sorted(nodes) != sorted(cluster.nodes):
        raise PlannerFault("NEST-F20", "an order must hold each node once", factors=[Factor("n", len(nodes))])
    return dataclasses.replace(cluster, nodes=tuple(nodes))


def make_concrete(cluster: Cluster) -> Cluster:
    """Return ``cluster`` with a named unit for every node on every level that is larger than a node.

    Nodes that no unit names are packed by their place in ``nodes`` (``slots.slot_tree``); afterwards the
    order of ``nodes`` no longer decides where they are.
    """
    table = slot_tree(cluster).unit_of_slot
    by_name = {(unit.level, unit.nodes[0]): unit for unit in cluster.units}
    made: list[Unit] = []
    for index, level in enumerate(cluster.levels[:-1]):
        if level.gpus <= cluster.gpus_per_node:
            made += [unit for unit in cluster.units if unit.level == level.name]
            continue
        members: dict[int, list[str]] = {}
        for node, unit_id in zip(cluster.nodes, table[index][:: cluster.gpus_per_node].tolist(), strict=True):
            members.setdefault(unit_id, []).append(node)
        taken = {unit.name for unit in cluster.units if unit.level == level.name}
        free = (name for name in (f"{level.name}{i}" for i in range(len(members) * 2)) if name not in taken)
        for nodes in members.values():
            given = next((u for n in nodes if (u := by_name.get((level.name, n)))), None)
            made.append(given or Unit(level=level.name, name=next(free), nodes=tuple(nodes)))
    return dataclasses.replace(cluster, units=tuple(made))


def multi_node_levels(cluster: Cluster) -> tuple[Level, ...]:
    """Return the levels with several units that hold whole nodes each: where a node order matters."""
    return tuple(level for level in cluster.levels[:-1] if level.gpus > cluster.gpus_per_node)


def _scheduled(cluster: Cluster) -> Cluster:
    return in_order(cluster, natural_order(cluster.nodes))


def _check_known(nodes: Sequence[str], known: Sequence[str], origin: str) -> None:
    missing = sorted(set(nodes) - set(known))
    if missing:
        raise BadInputError(
            "NEST-C11",
            "the node list has nodes that are not known",
            factors=[Factor("unknown", _some(missing), origin), Factor("known", len(known), origin)],
            nearest=nearest_names(missing[0][:100], list(known)[:1000]),
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def _choose(topologies: Sequence[SlurmTopology], nodes: Sequence[str], source: str) -> SlurmTopology:
    """Return the first topology that knows every node; flat ones only when no other does."""
    for topology in sorted(topologies, key=lambda t: t.kind == "flat"):
        if topology.knows(nodes):
            return topology
    first = topologies[0]
    inside = [node for group in first.tiers[0] for node in group.nodes]
    _check_known(nodes, inside, f"topology {first.name} of {source}")
    raise PlannerFault("NEST-F20", "a topology that knows all nodes was passed over")


def _with_topology(
    cluster: Cluster, topology: SlurmTopology, nodes: Sequence[str], said: list[str]
) -> tuple[Unit, ...]:
    """Return the units of every multi-node level: the file's own, and the topology's for the other nodes."""
    levels = multi_node_levels(cluster)
    places = _places(topology, nodes)
    # A switch tree says nothing about NVLink; blocks are NVLink domains where those span nodes.
    hidden_domain = bool(levels) and levels[0] is cluster.levels[0] and topology.kind != "block"
    given = levels[1:] if hidden_domain else levels
    for tier in range(len(given), len(places)):
        count = len(set(places[tier].values()))
        if count > 1:
            said.append(
                f"topology {topology.name}: its tier {tier + 1} splits the nodes into {count} groups and "
                f"cluster {cluster.name} has no such level: priced as level {cluster.levels[-1].name!r}"
            )
    everything: dict[str, tuple[str, ...]] = dict.fromkeys(nodes, (f"all of {topology.name}",))
    placed = {level: places[i] if i < len(places) else everything for i, level in enumerate(given)}
    if hidden_domain:
        outer = places[0] if places else everything
        placed[levels[0]] = _packed(outer, levels[0].gpus // cluster.gpus_per_node)
        said.append(
            f"topology {topology.name} does not say which nodes share a domain of level {levels[0].name!r}: "
            "assumed that they fill it in name order below each switch"
        )
    units = list(cluster.units)
    for level in levels:
        own = {node for unit in cluster.units if unit.level == level.name for node in unit.nodes}
        members: dict[tuple[str, ...], list[str]] = {}
        for node in nodes:
            if node not in own:
                members.setdefault(placed[level][node], []).append(node)
        for place, inside in members.items():
            units.append(Unit(level=level.name, name=place[0], nodes=tuple(inside)))
            if len(inside) * cluster.gpus_per_node > level.gpus:
                said.append(
                    f"{place[0]} of topology {topology.name} holds {len(inside)} nodes of the job, more than "
                    f"one unit of level {level.name!r}: the topology counts"
                )
    return tuple(units)


def _places(topology: SlurmTopology, nodes: Sequence[str]) -> list[dict[str, tuple[str, ...]]]:
    """Return, for each tier, the place of every node: its group's name, then those of its outer groups.

    Nodes below the same switches share a place (a node with one NIC per rail is below several); a node that a
    tier leaves out keeps the place it has one tier below.
    """
    below: list[dict[str, str]] = []
    for tier in topology.tiers:
        groups: dict[str, list[str]] = {}
        for group in tier:
            for node in group.nodes:
                groups.setdefault(node, []).append(group.name)
        inner = below[-1] if below else {}
        below.append({node: "+".join(groups[node]) if node in groups else inner[node] for node in nodes})
    return [{node: tuple(tier[node] for tier in below[i:]) for node in nodes} for i in range(len(below))]


def _packed(outer: dict[str, tuple[str, ...]], size: int) -> dict[str, tuple[str, ...]]:
    """Return places that hold ``size`` nodes each, in name order inside each outer place."""
    seen: dict[tuple[str, ...], int] = {}
    packed = {}
    for node in natural_order(outer):
        place = outer[node]
        packed[node] = (f"{place[0]}/{seen.get(place, 0) // size}", *place)
        seen[place] = seen.get(place, 0) + 1
    return packed
