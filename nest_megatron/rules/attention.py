"""Tensor, sequence and context parallelism of the dense part: heads, widths, sequence length."""

from __future__ import annotations

from nest_megatron.rules.base import Broken, asked, common_sequence, given, rule, version
from nest_megatron.rules.versions import VersionFacts, first_release
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout

_CONFIG = "megatron/core/transformer/transformer_config.py: __post_init__"


@rule("NEST-RA01", "tp", source=_CONFIG)
def heads(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The attention heads are a multiple of tp."""
    count = job.model.num_attention_heads
    if count % layout.tp == 0:
        return None
    return Broken(
        f"{count} attention heads cannot be divided by tp = {layout.tp}",
        (given(job, "num_attention_heads", count), *asked(job, layout, "tp")),
    )


@rule("NEST-RA02", "tp", source=_CONFIG)
def query_groups(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The KV heads are a multiple of tp; releases with KV replication also take tp as a multiple of them."""
    groups = job.model.num_query_groups
    if groups % layout.tp == 0 or (facts.kv_replication and layout.tp % groups == 0):
        return None
    more = "" if facts.kv_replication else f"; copies need megatron-core {first_release('kv_replication')}"
    return Broken(
        f"{groups} KV heads cannot be divided by tp = {layout.tp}{more}",
        (given(job, "num_query_groups", groups), *asked(job, layout, "tp"), version(facts)),
    )


@rule("NEST-RA03", "tp", source="megatron/core/tensor_parallel/layers.py: divide")
def widths(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Dense and shared-expert FFN widths are multiples of tp; the vocabulary is padded, they are not."""
    model, tp = job.model, layout.tp
    if model.moe is None:
        if model.ffn_hidden_size % tp == 0:
            return None
    else:
        shared = model.moe.shared_ffn_hidden_size
        if shared % tp:
            return Broken(
                f"the shared expert's width {shared} cannot be divided by tp = {tp}",
                (given(job, "shared_ffn_hidden_size", shared), *asked(job, layout, "tp")),
            )
        if model.ffn_hidden_size % tp == 0 or all(model.moe.layer_pattern):
            return None
    return Broken(
        f"the FFN width {model.ffn_hidden_size} cannot be divided by tp = {tp}",
        (given(job, "ffn_hidden_size", model.ffn_hidden_size), *asked(job, layout, "tp")),
    )


@rule("NEST-RA04", "tp", "sequence_parallel", source="megatron/core/model_parallel_config.py: __post_init__")
def sequence_parallel_needs_tp(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Sequence parallelism needs tp > 1."""
    if not layout.sequence_parallel or layout.tp > 1:
        return None
    return Broken("sequence parallelism needs tp > 1", asked(job, layout, "sequence_parallel", "tp"))


@rule("NEST-RA05", "cp", source="megatron/core/transformer/dot_product_attention.py: asserts cp = 1")
def context_parallel(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Context parallelism needs a dialect that has it and Transformer Engine's attention."""
    if layout.cp == 1 or (job.capabilities.context_parallel and job.kernels.transformer_engine):
        return None
    lacks = "Transformer Engine's attention" if job.capabilities.context_parallel else "a dialect that has it"
    return Broken(
        f"context parallelism needs {lacks}",
        (given(job, "transformer_engine", job.kernels.transformer_engine), *asked(job, layout, "cp")),
    )


@rule("NEST-RA06", "cp", source="megatron/training/arguments.py: seq_length % (2 * context_parallel_size)")
def sequence_over_context(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """With cp > 1 the sequence is a multiple of 2 * cp: each rank holds one early and one late slice."""
    if layout.cp == 1 or job.sequence_length % (2 * layout.cp) == 0:
        return None
    return Broken(
        f"the sequence of {job.sequence_length} tokens is not a multiple of 2*cp = {2 * layout.cp}",
        (given(job, "sequence_length", job.sequence_length), *asked(job, layout, "cp")),
    )


def _sequence_text(job: TrainJob) -> str:
    decoder = job.model.decoder
    return (
        f"{job.sequence_length}" if decoder is None else f"{job.sequence_length} or {decoder.sequence_length}"
    )


@rule(
    "NEST-RA07",
    "tp",
    "sequence_parallel",
    "cp",
    source="megatron/core/tensor_parallel/mappings.py: first dimension divisible by tensor parallel size",
)
def sequence_over_tensor(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """With sequence parallelism, each context slice of the sequence is a multiple of tp."""
    length = common_sequence(job)
    if not layout.sequence_parallel or length % (layout.cp * layout.tp) == 0:
        return None
    return Broken(
        f"the sequence of {_sequence_text(job)} tokens is not a multiple of cp*tp = {layout.cp * layout.tp}",
        (
            given(job, "sequence_length", job.sequence_length),
            *asked(job, layout, "sequence_parallel", "tp", "cp"),
        ),
    )


@rule("NEST-RA08", source="megatron/training/arguments.py: max_position_embeddings >= seq_length")
def positions(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The position table, where there is one, is as long as the sequence."""
    model = job.model
    longest = (
        job.sequence_length
        if model.decoder is None
        else max(job.sequence_length, model.decoder.sequence_length)
    )
    if not model.learned_positions or model.max_position_embeddings >= longest:
        return None
    return Broken(
        f"{model.max_position_embeddings} positions cannot hold a sequence of {longest} tokens",
        (
            given(job, "max_position_embeddings", model.max_position_embeddings),
            given(job, "sequence_length", longest),
        ),
    )


@rule("NEST-RA09", source="megatron/training/arguments.py: group_query_attention excluded")
def latent_attention(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Multi-head latent attention has no KV head groups."""
    model = job.model
    if model.mla is None or model.num_query_groups == model.num_attention_heads:
        return None
    return Broken(
        "multi-head latent attention cannot be combined with KV head groups",
        (
            given(job, "num_query_groups", model.num_query_groups),
            given(job, "num_attention_heads", model.num_attention_heads),
        ),
    )
