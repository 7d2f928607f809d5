"""What to change when the global batch splits over no data parallel size: GPUs or batch, never silently."""

from __future__ import annotations

import dataclasses
import itertools

from nest_megatron.planner.space import enumerate_space
from nest_megatron.specs.job import TrainJob

#: Worlds and batches tried on each side; an empty space takes about 10 ms to enumerate.
_WORLDS, _BATCHES = 256, 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchShortage:
    """The batch is all that forbids every layout.

    Args:
        smallest_dp: the least data parallel size that the other rules and the pins allow.
        num_gpus: the largest smaller world on which the batch has a legal layout, None when none is near.
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
    return BatchShortage(
        smallest_dp=sizes[0],
        num_gpus=_smaller_world(job),
        global_batches=_nearest_batches(job, sizes),
    )


def _with_batch(job: TrainJob, global_batch: int) -> TrainJob:
    """Return the job with another batch; an evaluation batch that equals the old one follows."""
    evaluation = job.evaluation_batch
    if evaluation == job.global_batch:
        evaluation = global_batch
    return dataclasses.replace(job, global_batch=global_batch, evaluation_batch=evaluation)


def _nearest_batches(job: TrainJob, sizes: list[int]) -> tuple[int, ...]:
    """Return the nearest legal batch below and above, where there is one."""
    batch = job.global_batch
    below = sorted({batch // dp * dp for dp in sizes if dp < batch}, reverse=True)
    above = sorted({-(-batch // dp) * dp for dp in sizes})
    found: list[int] = []
    for candidates in (below, above):
        legal = (size for size in candidates[:_BATCHES] if len(enumerate_space(_with_batch(job, size))))
        found.extend(size for size in [next(legal, None)] if size is not None and size != batch)
    return tuple(found)


def _smaller_world(job: TrainJob) -> int | None:
    """Return the largest smaller world with a legal layout: whole nodes, or part of one node."""
    per_node = job.gpus_per_node
    whole = range((job.num_gpus - 1) // per_node * per_node, 0, -per_node)
    part = range(min(per_node, job.num_gpus) - 1, 0, -1)
    for world in itertools.islice(itertools.chain(whole, part), _WORLDS):
        if len(enumerate_space(dataclasses.replace(job, num_gpus=world))):
            return world
    return None
