"""Slurm's network topology in its written forms: ``scontrol show topology``, topology.conf, topology.yaml.

Formats: research/network.md section 3 (Slurm's man pages and the source of its topology plug-ins).  They
carry structure only: no bandwidth of any of them is trusted, ``LinkSpeed`` included.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nest_megatron.cluster.fields import load_yaml, shown
from nest_megatron.cluster.hosts import expand_hosts
from nest_megatron.errors import BadInputError, Factor, nearest_names
from nest_megatron.specs.codec import read_text

#: File name that means standard input.
STDIN = "-"

_PAIR = re.compile(r"([A-Za-z]+)=(\S*)")
_EMPTY = ("", "(null)", "N/A")
_YAML_KINDS = ("tree", "block", "flat", "ring", "torus3d")


@dataclass(frozen=True, slots=True)
class Group:
    """A switch or block and the nodes below it."""

    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SlurmTopology:
    """One topology.

    Args:
        kind: ``flat`` has no tiers: every node is as near as every other.
        tiers: groups of each tier, innermost first; a node may be in no group of a tier, or in several.
    """

    name: str
    kind: Literal["tree", "block", "flat"]
    tiers: tuple[tuple[Group, ...], ...]

    def knows(self, nodes: Iterable[str]) -> bool:
        """Return whether every one of ``nodes`` is in the innermost tier."""
        inside = {node for tier in self.tiers[:1] for group in tier for node in group.nodes}
        return self.kind == "flat" or inside.issuperset(nodes)


def read_topologies(source: str) -> tuple[SlurmTopology, ...]:
    """Return the topologies of a file, or of standard input for ``-``; the cluster's default one comes first.

    Raises:
        BadInputError: unreadable, or no topology in any of the three forms.
    """
    if source == STDIN:
        return parse_topologies(sys.stdin.read(), where="topology on standard input")
    return parse_topologies(read_text(Path(source)), where=f"topology file {source}")


def parse_topologies(text: str, *, where: str) -> tuple[SlurmTopology, ...]:
    """Return the topologies that ``text`` describes, the default one first.

    Raises:
        BadInputError: a line, a switch or a host list that cannot be read; a form that has no levels.
    """
    meaningful = [line for line in text.splitlines() if line.split("#")[0].strip()]
    if any(re.match(r"-?\s*topology:", line.lstrip()) for line in meaningful):
        return _from_yaml(text, where)
    records = [_record(line) for line in meaningful]
    for key, read in (("switchname", _tree_lines), ("blockname", _block_lines)):
        if any(key in record for record in records):
            return (read(records, where),)
    raise _error(
        where,
        "no switch and no block is described",
        [Factor("first line", shown(meaningful[0]) if meaningful else "none")],
        nearest=["the output of `scontrol show topology`", "topology.conf", "topology.yaml"],
    )


def _error(
    where: str, reason: str, factors: Sequence[Factor] = (), nearest: Iterable[str] = ()
) -> BadInputError:
    return BadInputError("NEST-C10", f"{where}: {reason}", factors=factors, nearest=nearest)


def _record(line: str) -> dict[str, str]:
    """Return the pairs of one line, keys in lower case; what stands before the first pair is a log prefix."""
    return {key.lower(): value for key, value in _PAIR.findall(line.split("#")[0])}


def _hosts(value: Any, where: str) -> tuple[str, ...]:
    if value is None or value in _EMPTY:
        return ()
    try:
        return expand_hosts(value, where=where)
    except BadInputError as error:
        raise _error(
            where,
            f"a host list cannot be read: {error.message}",
            error.factors,
            nearest=["print it whole: an SLURM_TOPO_LEN in the environment cuts the lines"],
        ) from None


# -- tree --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Switch:
    name: str
    nodes: tuple[str, ...]
    children: tuple[str, ...]


def _tree_lines(records: list[dict[str, str]], where: str) -> SlurmTopology:
    switches = [
        _Switch(
            record["switchname"],
            _hosts(record.get("nodes"), where),
            _hosts(record.get("switches"), where),
        )
        for record in records
        if "switchname" in record
    ]
    return _tree("switches", switches, where)


def _tree(name: str, switches: list[_Switch], where: str) -> SlurmTopology:
    """Order switches by height: a leaf has height 0, others one more than their highest child."""
    by_name = {switch.name: switch for switch in switches}
    if len(by_name) < len(switches):
        raise _error(where, "a switch is described twice", [Factor("switches", len(switches))])
    heights: dict[str, int] = {}
    below: dict[str, tuple[str, ...]] = {}
    for switch in switches:
        _descend(switch.name, by_name, heights, below, where)
    tiers = []
    for height in range(max(heights.values()) + 1):
        tiers.append(tuple(Group(n, below[n]) for n in by_name if heights[n] == height))
    return SlurmTopology(name, "tree", tuple(tiers))


def _descend(
    start: str,
    switches: dict[str, _Switch],
    heights: dict[str, int],
    below: dict[str, tuple[str, ...]],
    where: str,
) -> None:
    """Fill in the height and the nodes of ``start`` and of all switches below it."""
    path: list[str] = []

    def visit(name: str) -> None:
        if name in heights:
            return
        if name not in switches:
            near = nearest_names(name, list(switches)[:1000])
            raise _error(where, "a switch has a child that is not described", [Factor("child", name)], near)
        if name in path or len(path) > 100:
            raise _error(where, "a switch is below itself", [Factor("switch", name)])
        path.append(name)
        switch = switches[name]
        for child in switch.children:
            visit(child)
        path.pop()
        heights[name] = 1 + max((heights[child] for child in switch.children), default=-1)
        inside = [node for child in switch.children for node in below[child]]
        below[name] = tuple(dict.fromkeys([*inside, *switch.nodes]))

    visit(start)


# -- block -------------------------------------------------------------------------------------------------


def _block_lines(records: list[dict[str, str]], where: str) -> SlurmTopology:
    """Read blocks; larger ones stand in ``AggregatedBlock`` lines, or follow from ``BlockSizes``."""
    blocks = [
        Group(record["blockname"], _hosts(record.get("nodes"), where))
        for record in records
        if "blockname" in record
    ]
    larger: dict[int, list[Group]] = {}
    for record in records:
        if "aggregatedblock" in record:
            size = record.get("blocksize", "")
            if not size.isdecimal():
                raise _error(
                    where, "an AggregatedBlock without BlockSize", [Factor("BlockSize", shown(size))]
                )
            group = Group(record["aggregatedblock"], _hosts(record.get("nodes"), where))
            larger.setdefault(int(size), []).append(group)
    if larger:
        tiers = (tuple(blocks), *(tuple(larger[size]) for size in sorted(larger)))
        return SlurmTopology("blocks", "block", tiers)
    sizes = next((record["blocksizes"] for record in records if "blocksizes" in record), "")
    return _blocks("blocks", blocks, [size for size in sizes.split(",") if size], where)


def _blocks(name: str, blocks: list[Group], sizes: Sequence[object], where: str) -> SlurmTopology:
    """Build larger blocks as Slurm does: consecutive base blocks, a power of two at a time."""
    numbers = [int(str(size)) for size in sizes if str(size).isdecimal()]
    if len(numbers) < len(sizes) or any(n < 1 for n in numbers):
        raise _error(where, "block sizes are no positive numbers", [Factor("sizes", shown(sizes))])
    numbers.sort()
    tiers = [tuple(blocks)]
    for number in numbers[1:]:
        count = number // numbers[0]
        parts = [blocks[i : i + count] for i in range(0, len(blocks), count)]
        # An incomplete larger block does not exist: its blocks stand alone at this tier.
        tiers.append(
            tuple(
                Group("+".join(block.name for block in part), tuple(n for b in part for n in b.nodes))
                for part in parts
                if len(part) == count
            )
        )
    return SlurmTopology(name, "block", tuple(tiers))


# -- topology.yaml -----------------------------------------------------------------------------------------


def _from_yaml(text: str, where: str) -> tuple[SlurmTopology, ...]:
    plain = load_yaml(text, where=where)
    entries = plain if isinstance(plain, list) else [plain]
    found: list[SlurmTopology] = []
    refused: list[Factor] = []
    for entry in sorted(
        entries, key=lambda e: not (isinstance(e, dict) and e.get("cluster_default") is True)
    ):
        kind = _yaml_kind(entry, where)
        if kind in ("ring", "torus3d"):
            refused.append(Factor(str(entry["topology"]), kind))
        else:
            found.append(_yaml_topology(entry, kind, where))
    if not found:
        raise _error(where, "rings and tori have no levels that the planner prices", refused)
    return tuple(found)


def _yaml_kind(entry: Any, where: str) -> str:
    kinds = [kind for kind in _YAML_KINDS if isinstance(entry, dict) and kind in entry]
    if len(kinds) != 1 or not isinstance(entry.get("topology"), str):
        raise _error(
            where, "an entry needs a name and one kind", [Factor("entry", shown(entry))], nearest=_YAML_KINDS
        )
    return kinds[0]


def _yaml_topology(entry: dict[str, Any], kind: str, where: str) -> SlurmTopology:
    name = entry["topology"]
    where = f"{where}: {name}"
    if kind == "flat":
        return SlurmTopology(name, "flat", ())
    if kind == "tree":
        switches = [
            _Switch(switch, _hosts(fields.get("nodes"), where), _hosts(fields.get("children"), where))
            for switch, fields in _yaml_items(entry["tree"], "switches", "switch", where)
        ]
        return _tree(name, switches, where)
    blocks = [
        Group(block, _hosts(fields.get("nodes"), where))
        for block, fields in _yaml_items(entry["block"], "blocks", "block", where)
    ]
    sizes = entry["block"].get("block_sizes", [])
    return _blocks(name, blocks, sizes if isinstance(sizes, list) else [sizes], where)


def _yaml_items(plain: Any, key: str, name_key: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the fields of each switch or block."""
    items = plain.get(key) if isinstance(plain, dict) else None
    if not isinstance(items, list) or not items:
        raise _error(where, f"{key} must be a list", [Factor(key, shown(items))])
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get(name_key), str):
            raise _error(where, f"an entry of {key} needs a {name_key}", [Factor("entry", shown(item))])
        yield item[name_key], item
