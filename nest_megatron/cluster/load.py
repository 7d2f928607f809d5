"""Cluster and accelerator files -> frozen dataclasses in SI units (keys: docs/network.md)."""

from __future__ import annotations

import dataclasses
import math
import os
from functools import cache
from pathlib import Path
from typing import Any

from nest_megatron import units
from nest_megatron.cluster.fields import (
    Fields,
    parse_yaml,
    shipped_names,
    shipped_text,
    shown,
    sourced_values,
)
from nest_megatron.cluster.hosts import MAX_NODES, expand_hosts
from nest_megatron.cluster.levels import (
    MAX_GPUS,
    read_busbw,
    read_levels,
    read_scenarios,
    read_torus,
    read_units,
    round_up,
)
from nest_megatron.cluster.slots import slot_tree
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs.cluster import Accelerator, Cluster, Unit
from nest_megatron.specs.codec import read_text

#: Used, and said so, when nothing names a cluster.
DEFAULT_CLUSTER = "dgx-h100"

MAX_GPUS_PER_NODE = 1024

_DTYPES = ("bf16", "fp16", "fp8", "fp4", "fp32")
_CLUSTER_KEYS = ("accelerator", "gpus_per_node", "levels")
_CLUSTER_OPTIONS = (
    "base",
    "num_nodes",
    "nodes",
    "units",
    "nics_per_node",
    "rails",
    "pxn",
    "nvls",
    "torus",
    "busbw_by_group_size",
    "scenarios",
)


def shipped_accelerators() -> tuple[str, ...]:
    """Return the names that ``load_accelerator`` knows."""
    return shipped_names("accelerator")


def shipped_clusters() -> tuple[str, ...]:
    """Return the names of the cluster files in ``conf/cluster``."""
    return shipped_names("cluster")


@cache
def load_accelerator(name: str) -> Accelerator:
    """Return the accelerator of ``conf/accelerator/<name>.yaml``.

    Raises:
        BadInputError: unknown name (with the nearest ones), unknown or missing key, value out of range.
    """
    where = f"accelerator {name}"
    plain = parse_yaml(shipped_text("accelerator", name), where=where)
    generation = plain.pop("generation", None)
    if not isinstance(generation, str):
        raise BadInputError("NEST-C04", f"{where}: generation must be a text")
    values = sourced_values(plain, where=where)
    dtypes = [dtype for dtype in _DTYPES if f"peak_{dtype}_tflops" in values]
    fields = Fields.checked(
        values,
        where,
        required=(
            *(f"peak_{dtype}_tflops" for dtype in dtypes),
            *(f"gemm_efficiency_{dtype}" for dtype in dtypes),
            "visible_memory_GiB",
            "hbm_TB_per_s",
            "num_sms",
            "attention_efficiency_forward",
            "attention_efficiency_backward",
            "memory_efficiency",
            "wave_overhead_us",
            "kernel_gap_us",
        ),
    )

    def share(key: str) -> float:
        return fields.number(key, above=0, at_most=1)

    return Accelerator(
        name=name,
        generation=generation,
        peak_flops_per_s={
            dtype: units.flops_per_s_from_tflops(fields.number(f"peak_{dtype}_tflops", above=0, at_most=1e6))
            for dtype in dtypes
        },
        visible_bytes=units.bytes_from_gib(fields.number("visible_memory_GiB", above=0, at_most=1e5)),
        hbm_bytes_per_s=units.bytes_per_s_from_tb_per_s(fields.number("hbm_TB_per_s", above=0, at_most=1e4)),
        num_sms=fields.integer("num_sms", at_most=10**5),
        gemm_efficiency={dtype: share(f"gemm_efficiency_{dtype}") for dtype in dtypes},
        attention_efficiency_forward=share("attention_efficiency_forward"),
        attention_efficiency_backward=share("attention_efficiency_backward"),
        memory_efficiency=share("memory_efficiency"),
        wave_overhead_s=units.seconds_from_us(fields.number("wave_overhead_us", at_least=0, at_most=1e4)),
        kernel_gap_s=units.seconds_from_us(fields.number("kernel_gap_us", at_least=0, at_most=1e4)),
    )


def load_cluster(
    source: str | Path | None, *, num_gpus: int | None = None, ranks_per_node: int | None = None
) -> Cluster:
    """Return a cluster by shipped name, by file, or the embedded default.

    Args:
        source: name of a shipped cluster, path of a cluster file, or None for ``DEFAULT_CLUSTER``.
        num_gpus: scales the number of nodes; below one node the node shrinks.  What had to be assumed for
            that is said in ``Cluster.assumptions``.
        ranks_per_node: GPUs of a node that the job uses, when that is not all of them.

    Raises:
        BadInputError: unknown name, unreadable file, wrong key or value, or a ``num_gpus`` that does not fit.
    """
    name, text, where = _find(source)
    values = _with_base(parse_yaml(text, where=where), where)
    cluster = _build(values, name=name, where=where)
    slot_tree(cluster)  # refuses named units that are not nested
    if source is None:
        said = (
            f"no cluster was named: assumed {name} ({cluster.accelerator.name}, {len(cluster.levels)} levels)"
        )
        cluster = dataclasses.replace(cluster, assumptions=(said, *cluster.assumptions))
    if ranks_per_node is not None:
        cluster = occupy(cluster, ranks_per_node)
    return cluster if num_gpus is None else resize(cluster, num_gpus)


def occupy(cluster: Cluster, ranks_per_node: int) -> Cluster:
    """Return ``cluster`` as a job sees it that starts ``ranks_per_node`` ranks on each node.

    Fewer ranks than GPUs leave GPUs idle: every unit holds proportionally fewer of the job's, and the
    bandwidth per GPU stays what it is with all GPUs active.  More ranks than GPUs keep the cluster as it is.
    Both are said in ``assumptions``.
    """
    per_node = cluster.gpus_per_node
    if ranks_per_node == per_node:
        return cluster
    said = f"the job starts {ranks_per_node} ranks per node, a node of {cluster.name} has {per_node} GPUs"
    if ranks_per_node > per_node or per_node % ranks_per_node or cluster.torus:
        said += ": assumed that every GPU of a node is used"
        return dataclasses.replace(cluster, assumptions=(*cluster.assumptions, said))
    levels = [
        dataclasses.replace(level, gpus=max(ranks_per_node, level.gpus * ranks_per_node // per_node))
        for level in cluster.levels
    ]
    # A level that no longer holds more than the one below it has no traffic of its own.
    kept = [level for i, level in enumerate(levels) if i == 0 or level.gpus > levels[i - 1].gpus]
    return dataclasses.replace(
        cluster,
        gpus_per_node=ranks_per_node,
        levels=tuple(kept),
        assumptions=(*cluster.assumptions, f"{said}: assumed that the others are idle"),
    )


def _find(source: str | Path | None) -> tuple[str, str, str]:
    """Return name, text and a description of the place of a cluster file."""
    if source is None:
        source = DEFAULT_CLUSTER
    looks_like_path = isinstance(source, Path) or os.sep in source or source.endswith((".yaml", ".yml"))
    if isinstance(source, str) and not looks_like_path and source in shipped_clusters():
        return source, shipped_text("cluster", source), f"shipped cluster {source}"
    try:
        if looks_like_path or Path(source).is_file():
            return Path(source).stem, read_text(Path(source)), f"cluster file {source}"
    except ValueError as error:  # a NUL byte in the name
        raise BadInputError("NEST-C01", f"no cluster file {shown(str(source))}: {error}") from None
    return str(source), shipped_text("cluster", str(source)), ""


def _with_base(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Merge a file over the shipped file that its ``base`` names; its keys replace the base's keys whole."""
    if "base" not in values:
        return values
    base = values["base"]
    if not isinstance(base, str):
        raise BadInputError(
            "NEST-C04", f"{where}: base must be a shipped cluster", factors=[Factor("base", shown(base))]
        )
    under = parse_yaml(shipped_text("cluster", base), where=f"shipped cluster {base}")
    if "base" in under:
        raise BadInputError(
            "NEST-C04", f"{where}: base must not have a base itself", factors=[Factor("base", base, where)]
        )
    if "nodes" in values:
        under.pop("num_nodes", None)
    return {**under, **values}


def _build(values: dict[str, Any], *, name: str, where: str) -> Cluster:
    fields = Fields.checked(values, where, required=_CLUSTER_KEYS, optional=_CLUSTER_OPTIONS)
    if fields.has("num_nodes") == fields.has("nodes"):
        raise BadInputError("NEST-C03", f"{where} must give either num_nodes or nodes, and not both")
    nodes = expand_hosts(values["nodes"], where=where) if fields.has("nodes") else ()
    num_nodes = len(nodes) or fields.integer("num_nodes", at_most=MAX_NODES)
    gpus_per_node = fields.integer("gpus_per_node", at_most=MAX_GPUS_PER_NODE)
    levels = read_levels(fields, num_gpus=num_nodes * gpus_per_node, gpus_per_node=gpus_per_node)
    torus = read_torus(fields, levels) if fields.has("torus") else ()
    return Cluster(
        name=name,
        accelerator=load_accelerator(fields.text("accelerator")),
        gpus_per_node=gpus_per_node,
        num_nodes=num_nodes,
        levels=levels,
        nodes=nodes,
        units=read_units(fields, levels, nodes) if fields.has("units") else (),
        nics_per_node=fields.integer("nics_per_node", at_most=1024) if fields.has("nics_per_node") else None,
        rails=fields.flag("rails") if fields.has("rails") else True,
        pxn=fields.flag("pxn") if fields.has("pxn") else True,
        nvls=fields.flag("nvls") if fields.has("nvls") else False,
        torus=torus,
        busbw_by_group_size_bytes_per_s=read_busbw(fields, levels[0])
        if fields.has("busbw_by_group_size")
        else {},
        scenarios=read_scenarios(fields, levels) if fields.has("scenarios") else (),
        source=where,
    )


def resize(cluster: Cluster, num_gpus: int) -> Cluster:
    """Return ``cluster`` with ``num_gpus`` GPUs.

    Fewer than one node shrinks the node, more than the outermost level holds extends that level; both are
    said in ``assumptions``.  Real node names are never invented: with ``nodes`` only the first ones are kept.

    Raises:
        BadInputError: not positive, not whole nodes, or more than the named nodes hold.
    """
    _check_size(cluster, num_gpus)
    per_node = cluster.gpus_per_node
    num_nodes = max(1, num_gpus // per_node)
    said = list(cluster.assumptions)
    if num_gpus < per_node:
        said.append(
            f"{num_gpus} GPUs are fewer than one node: assumed a node of {num_gpus}, not {per_node}, GPUs"
        )
        per_node = num_gpus
    levels, torus = cluster.levels, cluster.torus
    if num_gpus > levels[-1].gpus:
        extends_torus = bool(torus) and math.prod(torus) == levels[-1].gpus
        # A torus grows along its slowest axis, by whole planes of the others.
        plane = math.prod(torus[:-1]) if extends_torus else 1
        whole = math.lcm(levels[-2].gpus if levels[1:] else 1, plane)
        top = dataclasses.replace(levels[-1], gpus=round_up(num_gpus, whole))
        if extends_torus:
            torus = (*torus[:-1], top.gpus // plane)
        said.append(f"level {top.name!r} holds {levels[-1].gpus} GPUs: assumed that it extends to {top.gpus}")
        levels = (*levels[:-1], top)
    nodes = cluster.nodes[:num_nodes]
    return dataclasses.replace(
        cluster,
        gpus_per_node=per_node,
        num_nodes=num_nodes,
        levels=levels,
        torus=torus,
        nodes=nodes,
        units=kept_units(cluster.units, nodes),
        assumptions=tuple(said),
    )


def _check_size(cluster: Cluster, num_gpus: int) -> None:
    per_node = cluster.gpus_per_node
    factors = [Factor("num_gpus", shown(num_gpus)), Factor("gpus_per_node", per_node, cluster.source)]
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or not 1 <= num_gpus <= MAX_GPUS:
        raise BadInputError(
            "NEST-C06", f"num_gpus must be a whole number from 1 to {MAX_GPUS}", factors=factors
        )
    if num_gpus > per_node and num_gpus % per_node:
        whole = num_gpus // per_node * per_node
        raise BadInputError(
            "NEST-C06",
            "num_gpus must be a multiple of gpus_per_node",
            factors=factors,
            nearest=[str(whole), str(whole + per_node)],
        )
    if cluster.nodes and num_gpus > cluster.num_gpus:
        raise BadInputError(
            "NEST-C06",
            "num_gpus is more than the named nodes hold",
            factors=[*factors, Factor("nodes", len(cluster.nodes), cluster.source)],
            nearest=[str(cluster.num_gpus)],
        )


def kept_units(named: tuple[Unit, ...], nodes: tuple[str, ...]) -> tuple[Unit, ...]:
    """Drop the nodes that a smaller cluster does not have, and units without nodes."""
    kept = set(nodes)
    trimmed = (dataclasses.replace(unit, nodes=tuple(n for n in unit.nodes if n in kept)) for unit in named)
    return tuple(unit for unit in trimmed if unit.nodes)
