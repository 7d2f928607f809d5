"""Every rank checks that it is where the plan put it: its node before any process group, its groups after.

Needs neither torch nor Megatron: the application hands in what it sees.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence

from nest_megatron.cluster.allocation import natural_order
from nest_megatron.cluster.rank_groups import groups_of_rank
from nest_megatron.errors import Factor, NestError
from nest_megatron.specs.plan import Plan

_NEAREST = ("start the ranks with the plan's host file", "plan again on this allocation")


def verify_node(plan: Plan, rank: int, environment: Mapping[str, str] = os.environ) -> None:
    """Check that this process runs on a node that the plan foresees for ``rank``.

    That is the node of the rank map, or, without ``SLURM_HOSTFILE``, the one of Slurm's own order, whose time
    the plan predicts.  A plan without named nodes binds no rank to a node.

    Args:
        environment: ``SLURMD_NODENAME`` names the node; without it, the host name does.

    Raises:
        NestError: another node (NEST-L20), or a rank outside the plan (NEST-L21).
    """
    world, placed = plan.layout.world, plan.rank_map
    if not 0 <= rank < world:
        raise NestError(
            "NEST-L21",
            "the plan has no such rank",
            factors=[Factor("rank", rank, "environment"), Factor("world", world, "plan")],
        )
    if not placed.nodes:
        return
    index = rank // placed.gpus_per_node
    foreseen = {"rank map": placed.nodes[index]}
    if "SLURM_HOSTFILE" not in environment:
        foreseen["Slurm's order"] = natural_order(placed.nodes)[index]
    found = environment.get("SLURMD_NODENAME")
    origin = "SLURMD_NODENAME" if found else "host name"
    found = found or socket.gethostname()
    if _short(found) not in map(_short, foreseen.values()):
        raise NestError(
            "NEST-L20",
            f"rank {rank} runs on another node than planned: its groups would cross other links",
            factors=[
                Factor("node", found, origin),
                *(Factor("planned", node, name) for name, node in foreseen.items()),
            ],
            nearest=_NEAREST,
        )


def verify_groups(plan: Plan, rank: int, groups: Mapping[str, Sequence[int]]) -> None:
    """Check that the framework formed the groups that the plan priced.

    Args:
        groups: name of ``cluster.rank_groups.GROUP_AXES`` -> ranks of the group that ``rank`` is in.

    Raises:
        NestError: a group with other ranks (NEST-L22).
    """
    planned = groups_of_rank(dataclasses.replace(plan.layout, order=plan.rank_map.order), rank)
    for name, ranks in groups.items():
        if tuple(sorted(ranks)) != planned[name]:
            raise NestError(
                "NEST-L22",
                f"rank {rank} is in another {name} group than planned",
                factors=[
                    Factor("ranks", list(ranks), "framework"),
                    Factor("planned", list(planned[name]), "plan"),
                ],
                nearest=("the configuration the plan wrote, with its order of axes",),
            )


def verify_chunks(plan: Plan, pipeline_rank: int, num_layers: Sequence[int]) -> None:
    """Check that the framework built as many layers as planned; a silent remainder would train another model.

    Args:
        pipeline_rank: position of this rank's stage.
        num_layers: layers of each model chunk of this rank, virtual stages in order.

    Raises:
        NestError: another number of chunks or layers (NEST-L23).
    """
    planned = plan.layout.num_layers_per_chunk[pipeline_rank :: plan.layout.pp]
    if tuple(num_layers) != tuple(planned):
        raise NestError(
            "NEST-L23",
            f"pipeline rank {pipeline_rank} holds other layers than planned",
            factors=[
                Factor("layers", list(num_layers), "framework"),
                Factor("planned", list(planned), "plan"),
            ],
        )


def _short(name: str) -> str:
    return name.split(".", 1)[0].lower()
