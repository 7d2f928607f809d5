"""The rank grid: every degree divides the world, dense and expert grids agree, the order exists."""

from __future__ import annotations

from nest_megatron.rules.base import (
    Broken,
    asked,
    data_parallel,
    derived,
    expert_data_parallel,
    given,
    rule,
    version,
)
from nest_megatron.rules.versions import VersionFacts, first_release
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout

DEFAULT_ORDER = "tp-cp-ep-dp-pp"

_PARALLEL_STATE = "megatron/core/parallel_state.py: initialize_model_parallel"

_DEGREES = ("tp", "cp", "pp", "ep", "etp", "micro_batch", "vpp")


@rule("NEST-RG01", *_DEGREES, source="own: a degree counts ranks, chunks or sequences")
def degrees(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Every degree is at least 1."""
    if (
        layout.tp >= 1
        and layout.cp >= 1
        and layout.pp >= 1
        and layout.ep >= 1
        and layout.etp >= 1
        and layout.micro_batch >= 1
        and layout.vpp >= 1
    ):
        return None
    wrong = [axis for axis in _DEGREES if getattr(layout, axis) < 1]
    return Broken(f"{' and '.join(wrong)} must be at least 1", asked(job, layout, *wrong))


@rule("NEST-RG02", "tp", "cp", "pp", source=_PARALLEL_STATE)
def world(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The world is a multiple of tp * pp * cp."""
    model = layout.tp * layout.pp * layout.cp
    if job.num_gpus % model == 0:
        return None
    return Broken(
        f"{job.num_gpus} GPUs cannot be divided into groups of tp*pp*cp = {model}",
        (given(job, "num_gpus", job.num_gpus), *asked(job, layout, "tp", "pp", "cp")),
    )


@rule("NEST-RG03", "tp", "etp", "ep", "pp", source=_PARALLEL_STATE)
def expert_world(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The world is a multiple of etp * ep * pp, even without experts; tp and cp do not count."""
    if job.model.moe is None and layout.etp == layout.tp:
        return None  # what `world` says
    experts = layout.etp * layout.ep * layout.pp
    if job.num_gpus % experts == 0:
        return None
    return Broken(
        f"{job.num_gpus} GPUs cannot be divided into groups of etp*ep*pp = {experts}",
        (given(job, "num_gpus", job.num_gpus), *asked(job, layout, "etp", "ep", "pp")),
    )


@rule("NEST-RG04", "tp", "cp", "pp", "ep", source=f"{_PARALLEL_STATE}, megatron-core before 0.10")
def expert_inside_data(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Before expert folding, ep divides dp."""
    if facts.expert_folding or layout.ep == 1:
        return None
    dp = data_parallel(job, layout)
    if dp % layout.ep == 0:
        return None
    return Broken(
        f"dp = {dp} is not a multiple of ep = {layout.ep}; expert folding needs megatron-core "
        f"{first_release('expert_folding')}",
        (version(facts), derived("dp", dp), *asked(job, layout, "ep", "tp", "pp", "cp")),
    )


@rule("NEST-RG05", "cp", "ep", source=f"{_PARALLEL_STATE}, megatron-core before 0.8")
def expert_with_context(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Old releases cannot combine expert and context parallelism."""
    if facts.expert_with_context or layout.ep == 1 or layout.cp == 1:
        return None
    return Broken(
        f"ep and cp combine only from megatron-core {first_release('expert_with_context')} on",
        (version(facts), *asked(job, layout, "ep", "cp")),
    )


@rule("NEST-RG06", "tp", "cp", "pp", "ep", "etp", source="own: dp and edp follow from the world")
def derived_degrees(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """A layout states dp and edp as what the world leaves."""
    dp = data_parallel(job, layout)
    if dp and layout.dp != dp:
        return Broken(
            f"dp must be {dp} on {job.num_gpus} GPUs, the layout says {layout.dp}",
            (given(job, "num_gpus", job.num_gpus), *asked(job, layout, "tp", "pp", "cp")),
        )
    if job.model.moe is None:
        return None
    edp = expert_data_parallel(job, layout)
    if edp and layout.edp != edp:
        return Broken(
            f"edp must be {edp} on {job.num_gpus} GPUs, the layout says {layout.edp}",
            (given(job, "num_gpus", job.num_gpus), *asked(job, layout, "etp", "ep", "pp")),
        )
    return None


@rule("NEST-RG07", "order", source="megatron/training/initialize.py: use_tp_pp_dp_mapping")
def order_offered(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The rank order can be asked for in this dialect and version."""
    if layout.order in job.capabilities.orders and (facts.pp_before_dp or layout.order == DEFAULT_ORDER):
        return None
    return Broken(
        f"the rank order {layout.order} cannot be chosen in {job.dialect}",
        (version(facts), *asked(job, layout, "order")),
    )


@rule("NEST-RG08", "tp", "cp", "pp", "ep", "etp", "order", source=_PARALLEL_STATE)
def order_of_two_grids(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """With pp > 1, an order that does not end in pp needs edp = dp, even without experts."""
    if layout.order == DEFAULT_ORDER or layout.pp == 1:
        return None
    dp = data_parallel(job, layout)
    edp = expert_data_parallel(job, layout)
    if dp == edp or not dp or not edp:
        return None
    return Broken(
        f"the order {layout.order} needs dp = edp when pp > 1; dp is {dp}, edp is {edp}",
        (
            derived("dp", dp),
            derived("edp", edp),
            *asked(job, layout, "tp", "cp", "pp", "ep", "etp", "order"),
        ),
    )


@rule("NEST-RG09", "cp", "ep", "order", source="megatron/core/parallel_state.py: RankGenerator, before 0.11")
def order_names_axes(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Old releases spell the pp-before-dp order without cp and ep, so both must be 1."""
    if facts.pp_order_names_all_axes or layout.order == DEFAULT_ORDER or (layout.cp == 1 and layout.ep == 1):
        return None
    return Broken(
        f"the order with pp before dp knows cp and ep only from megatron-core "
        f"{first_release('pp_order_names_all_axes')} on",
        (version(facts), *asked(job, layout, "cp", "ep", "order")),
    )
