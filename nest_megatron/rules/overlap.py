"""Overlap switches: what each needs before the framework can hide that communication."""

from __future__ import annotations

from nest_megatron.errors import Factor
from nest_megatron.rules.base import Broken, asked, given, rule, version
from nest_megatron.rules.versions import VersionFacts
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout

_ARGUMENTS = "megatron/training/arguments.py: validate_args"
_CONFIG = "megatron/core/transformer/transformer_config.py: __post_init__"


def _flag(job: TrainJob, layout: Layout, name: str) -> Factor:
    return Factor(f"overlap.{name}", getattr(layout.overlap, name), asked(job, layout, "overlap")[0].origin)


@rule("NEST-RO01", "sharding", "overlap", source=_ARGUMENTS)
def param_gather(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Overlapping the parameter gather needs a sharded optimizer and overlapped gradient reduction."""
    overlap = layout.overlap
    if not overlap.param_gather or (layout.sharding != "none" and overlap.grad_reduce):
        return None
    return Broken(
        "overlapping the parameter gather needs a sharded optimizer and overlapped gradient reduction",
        (
            _flag(job, layout, "param_gather"),
            _flag(job, layout, "grad_reduce"),
            *asked(job, layout, "sharding"),
        ),
    )


@rule("NEST-RO02", "vpp", "overlap", source=f"{_ARGUMENTS} clears it; the 1F1B schedule refuses it")
def p2p(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Only an interleaved pipeline can overlap its point-to-point messages."""
    if not layout.overlap.p2p or layout.vpp > 1:
        return None
    return Broken(
        "p2p overlap needs interleaving (vpp > 1)", (_flag(job, layout, "p2p"), *asked(job, layout, "vpp"))
    )


@rule("NEST-RO03", "sequence_parallel", "overlap", source=_ARGUMENTS)
def tensor_parallel(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Overlapping tensor parallel communication needs sequence parallelism and Transformer Engine."""
    if not layout.overlap.tp_comm or (layout.sequence_parallel and job.kernels.transformer_engine):
        return None
    return Broken(
        "tensor parallel overlap needs sequence parallelism and Transformer Engine",
        (
            _flag(job, layout, "tp_comm"),
            *asked(job, layout, "sequence_parallel"),
            given(job, "transformer_engine", job.kernels.transformer_engine),
        ),
    )


@rule("NEST-RO04", "pp", "ep", "vpp", "recompute", "overlap", source=_CONFIG)
def expert_all_to_all(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Expert all-to-all overlap needs ep > 1, interleaving when pp > 1, no recomputed MoE layer."""
    if not layout.overlap.expert_all_to_all:
        return None
    lacks = _lacks(job, layout, facts)
    if lacks is None:
        return None
    return Broken(
        f"overlapping the expert all-to-all needs {lacks}",
        (
            _flag(job, layout, "expert_all_to_all"),
            version(facts),
            *asked(job, layout, "ep", "pp", "vpp", "recompute"),
        ),
    )


def _lacks(job: TrainJob, layout: Layout, facts: VersionFacts) -> str | None:
    """Return what the expert all-to-all overlap lacks, None when nothing."""
    recompute, moe = layout.recompute, job.model.moe
    if not facts.expert_all_to_all_overlap:
        return "a newer megatron-core"
    if layout.ep == 1 or moe is None:
        return "ep > 1"
    if moe.dispatcher != "alltoall" and moe.dispatcher != "flex":
        return f"the alltoall or flex dispatcher, not {moe.dispatcher}"
    if job.recipe.compute_dtype == "fp32":
        return "16-bit training"
    if layout.pp > 1 and layout.vpp == 1:
        return "interleaving (vpp > 1) when pp > 1"
    if recompute.granularity == "full":
        return "no full recomputation"
    if recompute.granularity == "selective" and "moe" in recompute.modules:
        return "no recomputed MoE layer"
    if job.model.mtp_num_layers > 1 or (job.model.mtp_num_layers == 1 and layout.pp == 1):
        return "at most one multi-token-prediction layer, and pp > 1 with one"
    return None
