"""The network part of a cluster file: levels, named units and the optional tables."""

from __future__ import annotations

import math

from nest_megatron import units
from nest_megatron.cluster.fields import Fields, shown
from nest_megatron.cluster.hosts import MAX_NODES, expand_hosts
from nest_megatron.errors import BadInputError, Factor, nearest_names
from nest_megatron.specs.cluster import Level, Unit

MAX_GPUS = MAX_NODES * 8
MAX_GB_PER_S = 1e6
MAX_LATENCY_US = 1e6

_LEVEL_KEYS = ("name", "gpus", "bandwidth_GB_per_s_per_gpu", "efficiency", "latency_us")


def read_levels(fields: Fields, *, num_gpus: int, gpus_per_node: int) -> tuple[Level, ...]:
    """Read the levels: strictly growing, each a multiple of the one below, the last one holding every GPU."""
    levels: list[Level] = []
    for index, plain in enumerate(fields.items("levels")):
        level = Fields.checked(plain, f"{fields.where}: levels[{index}]", required=_LEVEL_KEYS)
        gpus = level.integer("gpus", at_most=MAX_GPUS)
        below = levels[-1].gpus if levels else 1
        if gpus % below or (levels and gpus == below):
            raise level.fail(
                "gpus", f"a multiple of, and more than, the {below} of level {levels[-1].name!r}"
            )
        if level.text("name") in [known.name for known in levels]:
            raise level.fail("name", "used once")
        rate = level.number("bandwidth_GB_per_s_per_gpu", above=0, at_most=MAX_GB_PER_S)
        levels.append(
            Level(
                name=level.text("name"),
                gpus=gpus,
                bandwidth_bytes_per_s=units.bytes_per_s_from_gb_per_s(rate),
                efficiency=level.number("efficiency", above=0, at_most=1),
                latency_s=units.seconds_from_us(
                    level.number("latency_us", at_least=0, at_most=MAX_LATENCY_US)
                ),
            )
        )
    if not levels:
        raise fields.fail("levels", "a list of at least one level")
    if levels[-1].gpus < num_gpus:
        raise BadInputError(
            "NEST-C04",
            f"{fields.where}: the outermost level does not hold every GPU",
            factors=[
                Factor(f"{levels[-1].name}.gpus", levels[-1].gpus),
                Factor("nodes * gpus_per_node", num_gpus),
            ],
            nearest=[f"{levels[-1].name}.gpus: {round_up(num_gpus, levels[-1].gpus)}"],
        )
    if levels[0].gpus % gpus_per_node and gpus_per_node % levels[0].gpus:
        raise fields.fail("gpus_per_node", f"a divisor or a multiple of the {levels[0].gpus} GPUs of level 0")
    return tuple(levels)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


def read_units(fields: Fields, levels: tuple[Level, ...], nodes: tuple[str, ...]) -> tuple[Unit, ...]:
    """Read named units: known level and nodes, no node twice in a level.

    Raises:
        BadInputError: otherwise.
    """
    if not nodes:
        raise BadInputError(
            "NEST-C03", f"{fields.where}: units name nodes, so nodes must be given, not num_nodes"
        )
    names = [level.name for level in levels]
    position = {node: index for index, node in enumerate(nodes)}
    taken: dict[tuple[str, str], str] = {}
    result: list[Unit] = []
    for index, plain in enumerate(fields.items("units")):
        where = f"{fields.where}: units[{index}]"
        unit = _read_unit(plain, where, names)
        for node in unit.nodes:
            if node not in position:
                raise _unit_error(where, "a node that the cluster does not have", node, nodes)
            if (unit.level, node) in taken:
                raise _unit_error(where, f"a node that is also in unit {taken[unit.level, node]!r}", node)
            taken[unit.level, node] = unit.name
        result.append(unit)
    return tuple(result)


def _unit_error(where: str, reason: str, node: str, known: tuple[str, ...] = ()) -> BadInputError:
    # Close names of a large cluster are looked for among the first nodes only: the search is quadratic.
    return BadInputError(
        "NEST-C05",
        f"{where}: {reason}",
        factors=[Factor("nodes", shown(node), where)],
        nearest=nearest_names(node[:100], known[:1000]),
    )


def _read_unit(plain: object, where: str, names: list[str]) -> Unit:
    unit = Fields.checked(
        plain, where, required=("level", "name", "nodes"), optional=("uplink_GB_per_s_per_gpu",)
    )
    level = unit.text("level")
    if level not in names:
        raise BadInputError(
            "NEST-C04",
            f"{where}: unknown level",
            factors=[Factor("level", shown(level), where)],
            nearest=nearest_names(level[:100], names) or names,
        )
    uplink = None
    if unit.has("uplink_GB_per_s_per_gpu"):
        if level == names[-1]:
            raise unit.fail("uplink_GB_per_s_per_gpu", "left out: nothing is above the outermost level")
        rate = unit.number("uplink_GB_per_s_per_gpu", above=0, at_most=MAX_GB_PER_S)
        uplink = units.bytes_per_s_from_gb_per_s(rate)
    return Unit(
        level=level,
        name=unit.text("name"),
        nodes=expand_hosts(unit.values["nodes"], where=where),
        uplink_bytes_per_s=uplink,
    )


def read_torus(fields: Fields, levels: tuple[Level, ...]) -> tuple[int, ...]:
    """Read the axes of a torus: their product is the GPUs of one level."""
    axes = fields.items("torus")
    good = all(
        isinstance(axis, int) and not isinstance(axis, bool) and 1 <= axis <= MAX_GPUS for axis in axes
    )
    sizes = [level.gpus for level in levels]
    if not axes or len(axes) > 8 or not good or math.prod(axes) not in sizes:
        raise fields.fail("torus", f"whole numbers whose product is the GPUs of one level ({sizes})")
    return tuple(axes)


def read_busbw(fields: Fields, domain: Level) -> dict[int, float]:
    """Read measured bus bandwidths by number of members in the innermost domain."""
    table = fields.values["busbw_by_group_size"]
    if not isinstance(table, dict) or not table:
        raise fields.fail("busbw_by_group_size", "a mapping of members to GB/s")
    result: dict[int, float] = {}
    for members, rate in table.items():
        good = isinstance(members, int) and not isinstance(members, bool) and 2 <= members <= domain.gpus
        number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        if not good or not number or not 0 < rate <= MAX_GB_PER_S:
            raise fields.fail(
                "busbw_by_group_size",
                f"a mapping of 2 to {domain.gpus} members to at most {MAX_GB_PER_S:g} GB/s",
            )
        result[members] = units.bytes_per_s_from_gb_per_s(float(rate))
    return dict(sorted(result.items()))


def read_scenarios(fields: Fields, levels: tuple[Level, ...]) -> tuple[dict[str, float], ...]:
    """Read scenarios: level name -> factor on its bandwidth."""
    result = []
    for index, plain in enumerate(fields.items("scenarios")):
        scenario = Fields.checked(
            plain,
            f"{fields.where}: scenarios[{index}]",
            required=(),
            optional=[level.name for level in levels],
        )
        result.append({key: scenario.number(key, above=0, at_most=100) for key in scenario.values})
    return tuple(result)
