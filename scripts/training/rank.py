"""One rank of a training: process groups, verification against the plan, steps, record."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from nest_megatron.launch.verify import verify_chunks, verify_groups, verify_node
from nest_megatron.specs.plan import Plan

from .loop import Step, Trainer
from .model import layers_per_chunk, parallel_groups
from .settings import Settings, refusals_of_megatron, require

#: A rank that waits longer than this for another one has lost it.
_TIMEOUT_MINUTES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a rank saw.

    Args:
        groups: name of ``cluster.rank_groups.GROUP_AXES`` -> ranks of this rank's group in Megatron.
        num_layers: layers of each model chunk of this rank.
        peak_allocated_bytes, peak_reserved_bytes: of this rank's CUDA device; None on a CPU.
        peak_resident_bytes: of this process.
    """

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    num_layers: tuple[int, ...]
    steps: tuple[Step, ...]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_resident_bytes: int


def train_rank(
    settings: Settings,
    plan: Plan | None,
    *,
    rank: int,
    local_rank: int,
    store: str,
    on_start: Callable[[Trainer], None] | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> Outcome:
    """Train as ``rank`` of ``settings.num_ranks`` and return what was seen.

    Args:
        plan: checked against this rank's node, groups and layers before the first step; None checks nothing.
        local_rank: number of this rank's device on its node.
        store: ``init_method`` of torch.distributed, such as ``env://`` or ``file:///path``.
        on_step: called after every step, on every rank.

    Raises:
        NestError: this rank is not where, or not what, the plan says.
        BadInputError: the degrees do not divide the number of ranks, or megatron-core refuses the layout.
    """
    if plan is not None:
        verify_node(plan, rank)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model_parallel = settings.num_ranks // settings.dp
    require(
        model_parallel * settings.dp == settings.num_ranks,
        "the degrees do not divide the number of ranks",
        num_ranks=settings.num_ranks,
        model_parallel=model_parallel,
    )
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=store,
        rank=rank,
        world_size=settings.num_ranks,
        timeout=timedelta(minutes=_TIMEOUT_MINUTES),
    )
    try:
        with refusals_of_megatron():
            parallel_state.initialize_model_parallel(**settings.groups, create_gloo_process_groups=False)
        groups = parallel_groups()
        if plan is not None:
            verify_groups(plan, rank, groups)
        model_parallel_cuda_manual_seed(settings.seed)
        trainer = Trainer(settings)
        num_layers = layers_per_chunk(trainer.chunks)
        if plan is not None:
            verify_chunks(plan, parallel_state.get_pipeline_model_parallel_rank(), num_layers)
        if on_start is not None:
            on_start(trainer)
        steps = []
        for step in trainer.steps():
            steps.append(step)
            if on_step is not None:
                on_step(step)
        # A rank that closes its sockets early ends others that still wait on theirs.
        torch.distributed.barrier()
        return Outcome(
            rank=rank,
            groups=groups,
            num_layers=num_layers,
            steps=tuple(steps),
            peak_allocated_bytes=torch.cuda.max_memory_allocated() if cuda else None,
            peak_reserved_bytes=torch.cuda.max_memory_reserved() if cuda else None,
            peak_resident_bytes=_resident_bytes(),
        )
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
