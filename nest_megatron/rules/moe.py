"""Experts: how many, how wide, and what expert parallelism needs from the rest."""

from __future__ import annotations

from nest_megatron.rules.base import Broken, asked, given, rule, version
from nest_megatron.rules.versions import VersionFacts
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout

_MOE_LAYER = "megatron/core/transformer/moe/moe_layer.py"


@rule("NEST-RM01", "ep", source="megatron/core/transformer/transformer_config.py: __post_init__")
def experts_exist(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Expert parallelism needs experts and a dialect that has it."""
    if layout.ep == 1 or (job.model.moe is not None and job.capabilities.expert_parallel):
        return None
    lacks = "a model with experts" if job.model.moe is None else "a dialect that has it"
    return Broken(f"expert parallelism needs {lacks}", asked(job, layout, "ep"))


@rule("NEST-RM02", "ep", source=f"{_MOE_LAYER}: num_moe_experts % expert_model_parallel_size")
def experts_divide(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The experts are a multiple of ep."""
    moe = job.model.moe
    if moe is None or moe.num_experts % layout.ep == 0:
        return None
    return Broken(
        f"{moe.num_experts} experts cannot be divided by ep = {layout.ep}",
        (given(job, "num_experts", moe.num_experts), *asked(job, layout, "ep")),
    )


@rule("NEST-RM03", "tp", "sequence_parallel", source=f"{_MOE_LAYER}: forward raises while training")
def experts_need_sequence_parallel(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """A model with experts and tp > 1 trains only with sequence parallelism."""
    if job.model.moe is None or layout.tp == 1 or layout.sequence_parallel:
        return None
    return Broken(
        "a model with experts needs sequence parallelism when tp > 1",
        asked(job, layout, "sequence_parallel", "tp"),
    )


@rule("NEST-RM04", "etp", source="megatron/core/tensor_parallel/layers.py: divide")
def expert_width(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The width of an expert is a multiple of etp."""
    moe = job.model.moe
    if moe is None or moe.ffn_hidden_size % layout.etp == 0:
        return None
    return Broken(
        f"the expert width {moe.ffn_hidden_size} cannot be divided by etp = {layout.etp}",
        (given(job, "moe_ffn_hidden_size", moe.ffn_hidden_size), *asked(job, layout, "etp")),
    )


@rule("NEST-RM05", "etp", source="megatron/core/transformer/transformer_config.py, from 0.15 on")
def expert_bias(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Experts with biases need etp = 1."""
    if job.model.moe is None or layout.etp == 1:
        return None
    if not job.model.linear_bias or not facts.moe_bias_needs_etp_one:
        return None
    return Broken(
        "experts with biases need etp = 1",
        (given(job, "linear_bias", True), version(facts), *asked(job, layout, "etp")),
    )


@rule("NEST-RM06", "tp", "etp", source="megatron/core/model_parallel_config.py: expert_tensor_parallel_size")
def expert_tensor_parallel(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Where the dialect or version has no expert tensor parallel size, experts use tp."""
    if job.model.moe is None or layout.etp == layout.tp:
        return None
    if job.capabilities.expert_tensor_parallel and facts.expert_tensor_parallel:
        return None
    return Broken(
        f"experts cannot use another tensor parallel size than tp = {layout.tp} in this dialect and version",
        (version(facts), *asked(job, layout, "etp", "tp")),
    )


@rule(
    "NEST-RM07",
    "tp",
    "ep",
    "etp",
    source="megatron/core/tensor_parallel/layers.py: expert_parallel; NVIDIA/Megatron-LM pull request 5916",
)
def expert_gradients(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """With ep = 1, experts use etp = tp.

    megatron-core marks expert weights for the expert data parallel group only when ep > 1.  Otherwise their
    gradients are reduced over the dense layers' group, and with etp < tp the copies of an expert drift apart.
    """
    if job.model.moe is None or layout.ep > 1 or layout.etp == layout.tp:
        return None
    return Broken(
        f"without expert parallelism, experts with etp other than tp = {layout.tp} train silently wrong",
        asked(job, layout, "etp", "ep", "tp"),
    )
