"""Host files of a rank map, beside plan.json: with them srun and torchrun start ranks on its nodes."""

from __future__ import annotations

from pathlib import Path

from nest_megatron.errors import BadInputError
from nest_megatron.launch.publish import write_atomically
from nest_megatron.specs.plan import RankMap

#: One line per rank: ``SLURM_HOSTFILE=hostfile.ranks srun --distribution=arbitrary`` puts rank r on line r
#: (research/hydra_slurm.md 3.3).
RANKS_NAME = "hostfile.ranks"
#: One line per node: one task per node, whose number is torchrun's ``--node-rank`` (hydra_slurm.md 3.6).
NODES_NAME = "hostfile.nodes"


def write_hostfiles(rank_map: RankMap, plan_path: Path) -> tuple[Path, ...]:
    """Write both files beside ``plan_path`` and return their paths; without node names remove old ones.

    Raises:
        BadInputError: the folder cannot be written.
    """
    nodes = rank_map.nodes
    texts = {
        RANKS_NAME: "".join(f"{node}\n" * rank_map.gpus_per_node for node in nodes),
        NODES_NAME: "".join(f"{node}\n" for node in nodes),
    }
    paths = []
    for name, text in texts.items():
        path = plan_path.with_name(name)
        if text:
            write_atomically(path, text)
            paths.append(path)
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise BadInputError("NEST-L04", f"an old {name} cannot be removed: {error}") from None
    return tuple(paths)
