"""Batch sizes: every global batch the job ever runs splits evenly into micro-batches."""

from __future__ import annotations

from nest_megatron.errors import Factor
from nest_megatron.rules.base import Broken, asked, data_parallel, derived, given, rule
from nest_megatron.rules.versions import VersionFacts
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout

_CALCULATOR = "megatron/core/num_microbatches_calculator.py"
_GRID = ("tp", "cp", "pp", "micro_batch")


@rule("NEST-RB01", source="own: the global batch decides the training result, a plan never changes it")
def same_global_batch(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """A layout keeps the job's global batch."""
    if layout.global_batch == job.global_batch:
        return None
    return Broken(
        f"the layout trains with a global batch of {layout.global_batch} instead of {job.global_batch}",
        (given(job, "global_batch", job.global_batch), Factor("layout.global_batch", layout.global_batch)),
    )


def _indivisible(job: TrainJob, layout: Layout, what: str, name: str, size: int) -> Broken:
    dp = data_parallel(job, layout)
    return Broken(
        f"the {what} {size} is not a multiple of micro_batch*dp = {layout.micro_batch * dp}",
        (
            given(job, name, size),
            derived("dp", dp),
            *asked(job, layout, "micro_batch", "tp", "pp", "cp"),
            given(job, "num_gpus", job.num_gpus),
        ),
    )


@rule("NEST-RB02", *_GRID, source=f"{_CALCULATOR}: ConstantNumMicroBatchesCalculator")
def global_batch(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The global batch is a multiple of micro_batch * dp."""
    step = layout.micro_batch * data_parallel(job, layout)
    if not step or job.global_batch % step == 0:
        return None
    return _indivisible(job, layout, "global batch", "global_batch", job.global_batch)


@rule("NEST-RB03", *_GRID, source=f"{_CALCULATOR}: RampupBatchsizeNumMicroBatchesCalculator.update")
def rampup_batches(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Every batch size of the ramp-up is a multiple of micro_batch * dp."""
    if not job.rampup_batches:
        return None
    step = layout.micro_batch * data_parallel(job, layout)
    if not step:
        return None
    for size in job.rampup_batches:
        if size % step:
            return _indivisible(job, layout, "ramp-up batch", "rampup_batches", size)
    return None


@rule("NEST-RB04", *_GRID, source="megatron/training/arguments.py: evaluation batch")
def evaluation_batch(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The evaluation batch is a multiple of micro_batch * dp."""
    size = job.evaluation_batch
    if size is None:
        return None
    step = layout.micro_batch * data_parallel(job, layout)
    if not step or size % step == 0:
        return None
    return _indivisible(job, layout, "evaluation batch", "evaluation_batch", size)


@rule(
    "NEST-RB05",
    *_GRID,
    "vpp",
    source="megatron/core/pipeline_parallel/schedules.py: forward_backward_pipelining_with_interleaving",
)
def interleaved_groups(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """With interleaving, the number of micro-batches is a multiple of pp at every batch size.

    Releases from 0.10 on allow other group sizes, but only through ``microbatch_group_size_per_vp_stage``,
    which a layout does not set; its default is pp, and a remainder below pp is refused.
    """
    if layout.vpp == 1:
        return None
    step = layout.micro_batch * data_parallel(job, layout)
    if not step:
        return None
    group = step * layout.pp
    evaluation = job.evaluation_batch
    if job.global_batch % group and job.global_batch % step == 0:
        return _ungrouped(job, layout, "global_batch", job.global_batch, step)
    if evaluation is not None and evaluation % group and evaluation % step == 0:
        return _ungrouped(job, layout, "evaluation_batch", evaluation, step)
    for size in job.rampup_batches:
        if size % group and size % step == 0:
            return _ungrouped(job, layout, "rampup_batches", size, step)
    return None


def _ungrouped(job: TrainJob, layout: Layout, name: str, size: int, step: int) -> Broken:
    return Broken(
        f"interleaving (vpp = {layout.vpp}) needs a multiple of pp = {layout.pp} micro-batches, "
        f"a batch of {size} gives {size // step}",
        (
            given(job, name, size),
            derived("num_micro_batches", size // step),
            derived("dp", data_parallel(job, layout)),
            *asked(job, layout, "micro_batch", "pp", "vpp", "tp", "cp"),
        ),
    )
