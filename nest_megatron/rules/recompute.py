"""Activation recomputation: granularity, method, modules, layer counts."""

from __future__ import annotations

from nest_megatron.errors import Factor
from nest_megatron.rules.base import Broken, asked, rule, version
from nest_megatron.rules.versions import VersionFacts
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout

_CONFIG = "megatron/core/transformer/transformer_config.py: __post_init__"


def _factors(job: TrainJob, layout: Layout) -> tuple[Factor, ...]:
    chosen = layout.recompute
    origin = asked(job, layout, "recompute")[0].origin
    return (
        Factor("recompute.granularity", chosen.granularity, origin),
        Factor("recompute.method", chosen.method, origin),
        Factor("recompute.num_layers", chosen.num_layers, origin),
        Factor("recompute.modules", chosen.modules, origin),
    )


@rule("NEST-RK01", "recompute", source=f"{_CONFIG}; megatron/training/arguments.py: validate_args")
def method(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Full recomputation needs a method and a layer count, selective recomputation excludes both."""
    chosen = layout.recompute
    if chosen.granularity == "full":
        if not job.capabilities.full_recompute:
            return Broken(f"{job.dialect} has no full recomputation", _factors(job, layout))
        if chosen.method == "none" or chosen.num_layers < 1:
            return Broken("full recomputation needs a method and at least one layer", _factors(job, layout))
    elif chosen.granularity == "selective" and (chosen.method != "none" or chosen.num_layers):
        return Broken("selective recomputation takes modules only", _factors(job, layout))
    return None


@rule("NEST-RK02", "recompute", source=f"{_CONFIG}: allowed_modules")
def modules(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Selective recomputation names modules that the dialect, the version and the model have."""
    if layout.recompute.granularity != "selective":
        return None
    chosen = layout.recompute.modules
    if not chosen:
        return Broken("selective recomputation names no module", _factors(job, layout))
    for module in chosen:
        if module not in job.capabilities.recompute_modules or module not in facts.recompute_modules:
            return Broken(
                f"{module} cannot be recomputed in this dialect and version",
                (*_factors(job, layout), version(facts)),
            )
        if module == "moe_act" and (job.model.moe is None or not job.model.moe.grouped_gemm):
            return Broken("recomputing moe_act needs experts in one grouped GEMM", _factors(job, layout))
        if module == "mla_up_proj" and job.model.mla is None:
            return Broken("recomputing mla_up_proj needs multi-head latent attention", _factors(job, layout))
    return None


@rule(
    "NEST-RK03",
    "layers",
    "recompute",
    source="megatron/core/transformer/transformer_block.py: _checkpointed_forward indexes past the end",
)
def uniform_divides(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Uniform full recomputation works in groups of layers that divide every chunk."""
    chosen = layout.recompute
    if chosen.granularity != "full" or chosen.method != "uniform" or chosen.num_layers <= 1:
        return None
    for count in layout.num_layers_per_chunk:
        if count % chosen.num_layers:
            return Broken(
                f"a chunk of {count} layers cannot be divided into groups of {chosen.num_layers}",
                (*_factors(job, layout), *asked(job, layout, "layers")),
            )
    return None
