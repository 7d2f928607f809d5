"""What to change when the global batch splits over no data parallel size: GPUs or batch, never silently."""

from __future__ import annotations

import dataclasses

from nest_megatron.planner.space import enumerate_space
from nest_megatron.specs.job import TrainJob

#: Worlds tried before the search for one with a legal layout ends.
_TRIES = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchShortage:
    """The batch is all that forbids every layout.

    Args:
        smallest_dp: the least data parallel size that the other rules and the pins allow.
        num_gpus: the largest smaller world on which the batch has a legal layout, None when none was found.
        global_batches: the nearest batches below and above that have a legal layout on all GPUs.
    """

    smallest_dp: int
    num_gpus: int | None
    global_batches: tuple[int, ...]


def batch_shortage(job: TrainJob) -> BatchShortage | None:
    """Return what would help a job without any legal layout, None when its batch is not the reason.

    A batch of one sequence per GPU divides evenly over every data parallel size, so the layouts that are
    legal with it are those that only the batch forbids.
    """
    relaxed = _with_batch(job, job.num_gpus)
    nodes = enumerate_space(dataclasses.replace(relaxed, rampup_batches=())).nodes
    if not nodes:
        return None
    sizes = sorted({node.dp for node in nodes})
    model_parallel = {node.tp * node.cp * node.pp for node in nodes}
    return BatchShortage(
        smallest_dp=sizes[0],
        num_gpus=_smaller_world(job, model_parallel),
        global_batches=_nearest_batches(job, sizes),
    )


def _with_batch(job: TrainJob, global_batch: int) -> TrainJob:
    """Return the job with another batch; an evaluation batch that equals the old one follows."""
    follows = job.evaluation_batch in (None, job.global_batch)
    return dataclasses.replace(
        job,
        global_batch=global_batch,
        evaluation_batch=job.evaluation_batch and global_batch if follows else job.evaluation_batch,
    )


def _nearest_batches(job: TrainJob, sizes: list[int]) -> tuple[int, ...]:
    """Return the nearest legal batch below and above, where there is one."""
    batch = job.global_batch
    below = sorted({batch // dp * dp for dp in sizes if dp < batch}, reverse=True)
    above = sorted({-(-batch // dp) * dp for dp in sizes})
    found: list[int] = []
    for candidates in (below, above):
        legal = (size for size in candidates[:_TRIES] if len(enumerate_space(_with_batch(job, size))))
        found.extend(size for size in [next(legal, None)] if size is not None and size != batch)
    return tuple(found)


def _smaller_world(job: TrainJob, model_parallel: set[int]) -> int | None:
    """Return the largest world of whole nodes below the job's on which some layout is legal."""
    divisors = [dp for dp in range(1, min(job.global_batch, job.num_gpus) + 1) if job.global_batch % dp == 0]
    per_node = job.gpus_per_node
    worlds = {size * dp for size in model_parallel for dp in divisors if size * dp < job.num_gpus}
    whole = sorted((world for world in worlds if world % per_node == 0 or world < per_node), reverse=True)
    for world in whole[:_TRIES]:
        if len(enumerate_space(dataclasses.replace(job, num_gpus=world))):
            return world
    return None
