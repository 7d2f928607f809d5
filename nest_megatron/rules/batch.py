"""Batch sizes: every global batch the job ever runs splits evenly into micro-batches."""

from __future__ import annotations

from nest_megatron.errors import Factor
from nest_megatron.rules.base import Broken, asked, data_parallel, derived, given, rule, version
from nest_megatron.rules.versions import VersionFacts, first_release
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
    """With interleaving, the micro-batches of every batch size form groups of the layout's size.

    The size is ``microbatch_group_size_per_vp_stage``, pp unless the configuration sets it (from 0.10 on): at
    least pp, at most all micro-batches, and a last group that is smaller still has pp of them.
    """
    if layout.vpp == 1:
        return None
    step = layout.micro_batch * data_parallel(job, layout)
    if not step:
        return None
    group = layout.interleaving_group
    if group != layout.pp and not facts.interleaving_groups:
        return Broken(
            f"groups of {group} micro-batches need megatron-core {first_release('interleaving_groups')}",
            (derived("micro_batch_group", group), version(facts), *asked(job, layout, "pp", "vpp")),
        )
    evaluation = job.evaluation_batch
    if _ungroupable(layout, job.global_batch, step):
        return _ungrouped(job, layout, "global_batch", job.global_batch, step)
    if evaluation is not None and _ungroupable(layout, evaluation, step):
        return _ungrouped(job, layout, "evaluation_batch", evaluation, step)
    for size in job.rampup_batches:
        if _ungroupable(layout, size, step):
            return _ungrouped(job, layout, "rampup_batches", size, step)
    return None


def _ungroupable(layout: Layout, size: int, step: int) -> bool:
    """Return whether the schedule refuses a batch; one that is no multiple of ``step`` breaks other rules."""
    count, rest = divmod(size, step)
    if rest:
        return False
    group, pp = layout.interleaving_group, layout.pp
    return not pp <= group <= count or 0 < count % group < pp


def _ungrouped(job: TrainJob, layout: Layout, name: str, size: int, step: int) -> Broken:
    group, pp = layout.interleaving_group, layout.pp
    needs = f"a multiple of pp = {pp} micro-batches"
    if group != pp:
        needs = f"groups of {group} micro-batches, at least pp = {pp}, and none left over or at least {pp}"
    return Broken(
        f"interleaving (vpp = {layout.vpp}) needs {needs}, a batch of {size} gives {size // step}",
        (
            given(job, name, size),
            derived("num_micro_batches", size // step),
            derived("micro_batch_group", group),
            derived("dp", data_parallel(job, layout)),
            *asked(job, layout, "micro_batch", "pp", "vpp", "tp", "cp"),
        ),
    )
