"""Closed formulas for the operator graph of GPT, Llama and MoE blocks: the provider that needs no torch.

Sources: saved bytes research/memory_model.md 2.3, parameters 2.1; GEMM shapes, memory-bound bytes and
collectives research/time_model.md section 2 (collective counts traced in research/mcore_cpu.md section 4).
"""

from __future__ import annotations

from dataclasses import replace

from nest_megatron.graph.layer_graph import Block, Collective, LayerGraph, Operator
from nest_megatron.graph.linear_template import BACKWARD_TRAFFIC, gemm, mlp_operators
from nest_megatron.graph.mamba_template import mamba_operators
from nest_megatron.graph.moe_template import moe_operators
from nest_megatron.graph.sizes import Sizes
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import BlockChoice
from nest_megatron.specs.model import BlockKind

# HBM bytes per element of one pass, by fusion state (research/time_model.md section 3, fitted column).
NORM_BYTES = {True: 4, False: 50}
RESIDUAL_BYTES = {True: 6, False: 25}
ROTARY_BYTES = 8
# Bytes per attention score of unfused and fused-softmax cores, forward and backward (same table).
SCORE_BYTES = {"unfused": (20, 30), "fused_softmax": (11, 16)}
# Kernels that never store the scores.
FUSED_ATTENTION = ("flash", "flash1", "cudnn")
# Mixer -> its offload modules, and the share of saved bytes that stays (memory_model.md 2.3, inferred).
OFFLOAD_KEPT: dict[str, tuple[tuple[str, ...], float]] = {
    "attention": (("attn_norm", "qkv_linear", "core_attn", "attn_proj"), 0.12),
    "experts": (("expert_fc1", "moe_act"), 0.20),
}
# HBM bytes per local logit of the loss, forward + backward (time_model.md section 2, "Head / loss").
LOSS_TRAFFIC_BYTES = {"te_fused": 14, "native_fused": 14, "vocab_parallel": 36}


def layer_graph(job: TrainJob, choice: BlockChoice) -> LayerGraph:
    """Return the graph of every block kind of ``job.model`` under ``choice``.

    Bytes and FLOP are per rank and per micro-batch.
    """
    sizes = Sizes.of(job, choice)
    kinds: set[BlockKind] = set(job.model.layer_kinds)
    blocks = {kind: _block(sizes, kind) for kind in sorted(kinds)}
    return LayerGraph(choice=choice, blocks=blocks, embedding=_embedding(sizes), head=_head(sizes))


#: Block kind -> the mixers of one layer, each behind its own norm and residual.
_MIXERS: dict[BlockKind, tuple[str, ...]] = {
    "dense": ("attention", "mlp"),
    "moe": ("attention", "experts"),
    "attention": ("attention",),
    "mlp": ("mlp",),
    "experts": ("experts",),
    "mamba": ("mamba",),
}


def _block(z: Sizes, kind: BlockKind) -> Block:
    operators: list[Operator] = []
    for mixer in _MIXERS[kind]:
        name = "input_norm" if mixer != "mlp" and mixer != "experts" else "pre_mlp_norm"
        layer = [_norm(z, name), *_mixer_operators(z, mixer), _residual(z, f"residual_{mixer}")]
        operators += _offloaded(z, mixer, layer)
    return Block(kind=kind, operators=tuple(operators), collectives=tuple(_collectives(z, _MIXERS[kind])))


def _offloaded(z: Sizes, mixer: str, operators: list[Operator]) -> list[Operator]:
    """Return ``operators`` with the share of their saved bytes that offloading leaves on the GPU."""
    modules, kept = OFFLOAD_KEPT.get(mixer, ((), 1.0))
    if not set(modules) & set(z.kernels.offloaded_modules):
        return operators
    return [replace(op, saved_bytes=round(kept * op.saved_bytes)) for op in operators]


def _mixer_operators(z: Sizes, mixer: str) -> list[Operator]:
    if mixer == "attention":
        return _mla_operators(z) if z.model.mla is not None else _attention_operators(z)
    if mixer == "experts":
        return moe_operators(z)
    return mamba_operators(z) if mixer == "mamba" else _mlp_operators(z)


def _norm(z: Sizes, name: str) -> Operator:
    elements = z.tokens_sp * z.h
    fused = z.kernels.fused_norm
    traffic = NORM_BYTES[fused] * elements
    # Input (always) and output (dropped by `layernorm` recompute; one byte when the consumer reads fp8).
    output_bytes = z.low_bytes * elements
    unfused = 0 if fused else z.facts.unfused_norm_saved_bytes * elements
    return Operator(
        name=name,
        kind="memory",
        forward_bytes=traffic,
        backward_bytes=round(BACKWARD_TRAFFIC[fused] * traffic),
        saved_bytes=z.act_bytes * elements + (0 if z.drops("layernorm") else output_bytes) + unfused,
        parameters=z.h if z.model.rms_norm else 2 * z.h,
    )


def _residual(z: Sizes, name: str) -> Operator:
    elements = z.tokens_sp * z.h
    fused = z.kernels.fused_residual
    traffic = RESIDUAL_BYTES[fused] * elements
    return Operator(
        name=name,
        kind="memory",
        forward_bytes=traffic,
        backward_bytes=round(BACKWARD_TRAFFIC[fused] * traffic),
        saved_bytes=elements if z.model.hidden_dropout > 0 else 0,
    )


def _attention_operators(z: Sizes) -> list[Operator]:
    model, t = z.model, z.choice.tp
    heads, groups = model.num_attention_heads // t, max(1, model.num_query_groups // t)
    width = model.kv_channels
    bias = model.linear_bias or model.qkv_bias
    qkv_columns = (heads + 2 * groups) * width
    operators = [gemm("qkv", z, qkv_columns, z.h, bias=bias)]
    if model.qk_norm:
        elements = z.tokens * (heads + groups) * width
        operators.append(
            Operator(
                name="qk_norm",
                kind="memory",
                forward_bytes=NORM_BYTES[z.kernels.fused_norm] * elements,
                backward_bytes=round(BACKWARD_TRAFFIC[True] * NORM_BYTES[z.kernels.fused_norm] * elements),
                saved_bytes=z.act_bytes * elements,
                parameters=2 * width,
            )
        )
    if not model.learned_positions:
        traffic = ROTARY_BYTES * z.tokens * heads * width
        operators.append(
            Operator(
                name="rotary",
                kind="memory",
                forward_bytes=traffic,
                backward_bytes=round(BACKWARD_TRAFFIC[True] * traffic),
                saved_bytes=z.facts.rotary_saved_bytes * z.tokens * z.h // t,
            )
        )
    operators.append(_attention_core(z, heads, width, width, saved_qkv=z.act_bytes * z.tokens * qkv_columns))
    operators.append(gemm("attention_output", z, z.h, heads * width, bias=model.linear_bias))
    return operators


def _attention_core(z: Sizes, heads: int, qk_width: int, v_width: int, *, saved_qkv: int) -> Operator:
    """Return softmax(QK)V: causal FLOP of one rank, and what its kernel saves (memory_model.md 2.3)."""
    b, s, c = z.choice.micro_batch, z.job.sequence_length, z.choice.cp
    flops = 2 * b * (s // c) * s * heads * (qk_width + v_width) // 2
    kernel = z.kernels.attention
    scores = b * heads * (s // c) * s
    forward_score, backward_score = SCORE_BYTES.get(kernel, (0, 0))
    output = (z.act_bytes if z.low_bytes == z.act_bytes else z.act_bytes + 1) * z.tokens * heads * v_width
    transient = 0
    if kernel in FUSED_ATTENTION:
        # flash-attn lays the output out anew unless the batch is one (memory_model.md 2.3); cuDNN does not.
        copies = kernel != "cudnn" and b > 1
        core_saved = 4 * z.tokens * heads + (z.act_bytes * z.tokens * heads * v_width if copies else 0)
        transient = 8 * z.tokens * heads * v_width if kernel == "flash1" else 0
    else:
        per_score = z.facts.score_saved_bytes or (5 if z.model.attention_dropout > 0 else 2)
        core_saved = 0 if z.drops("core_attn") else per_score * scores * z.act_bytes // 2
        transient = z.facts.score_transient_bytes * scores
    return Operator(
        name="attention_core",
        kind="attention",
        m=s // c,
        n=s,
        k=qk_width,
        batch=b * heads,
        forward_flops=flops,
        backward_flops=5 * flops // 2,
        forward_bytes=forward_score * scores,
        backward_bytes=backward_score * scores,
        saved_bytes=saved_qkv + output + core_saved,
        transient_bytes=transient,
        module="",
    )


def _mla_operators(z: Sizes) -> list[Operator]:
    """Return multi-head latent attention; down-projections are replicated over tp (memory_model.md 2.1)."""
    model, mla, t = z.model, z.model.mla, z.choice.tp
    assert mla is not None
    heads = model.num_attention_heads // t
    qk = mla.qk_head_dim + mla.qk_rope_head_dim
    latent = 2 * mla.kv_lora_rank + mla.qk_rope_head_dim + 2 * mla.q_lora_rank
    up_saved = z.act_bytes * z.tokens * heads * (2 * qk + mla.qk_head_dim + mla.v_head_dim)
    operators = [
        gemm(
            "kv_down",
            z,
            mla.kv_lora_rank + mla.qk_rope_head_dim,
            z.h,
            saved=z.act_bytes * z.tokens_sp * latent,
        ),
        gemm("kv_up", z, heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank),
    ]
    if mla.q_lora_rank:
        operators.append(gemm("q_down", z, mla.q_lora_rank, z.h))
        operators.append(gemm("q_up", z, heads * qk, mla.q_lora_rank))
    else:
        operators.append(gemm("q_proj", z, heads * qk, z.h))
    saved = 0 if z.drops("mla_up_proj") else up_saved
    operators.append(_attention_core(z, heads, qk, mla.v_head_dim, saved_qkv=saved))
    operators.append(gemm("attention_output", z, z.h, heads * mla.v_head_dim, bias=model.linear_bias))
    return operators


def _mlp_operators(z: Sizes) -> list[Operator]:
    return mlp_operators(z, "mlp", z.model.ffn_hidden_size // z.choice.tp, module="mlp")


def _collectives(z: Sizes, mixers: tuple[str, ...]) -> list[Collective]:
    """Return the collectives of one block (time_model.md section 2; counts: mcore_cpu.md section 4)."""
    choice, found = z.choice, []
    full = z.act_bytes * z.tokens * z.h
    # An MoE layer keeps its tokens sequence-sharded: only attention (and a shared expert) gathers over tp.
    has_shared = z.model.moe is not None and z.model.moe.shared_ffn_hidden_size > 0
    pairs = sum(mixer != "experts" or has_shared or not choice.sequence_parallel for mixer in mixers)
    if choice.tp > 1 and pairs and choice.sequence_parallel:
        found.append(
            Collective(
                axis="tp",
                op="all_gather",
                num_bytes=full,
                forward=pairs,
                backward=2 * pairs,
                backward_hidden=pairs,
            )
        )
        found.append(
            Collective(axis="tp", op="reduce_scatter", num_bytes=full, forward=pairs, backward=pairs)
        )
    elif choice.tp > 1 and pairs:
        found.append(Collective(axis="tp", op="all_reduce", num_bytes=full, forward=pairs, backward=pairs))
    if choice.cp > 1 and "attention" in mixers:
        width = z.model.kv_channels * max(1, z.model.num_query_groups // choice.tp)
        step_bytes = 2 * z.act_bytes * z.tokens * width
        found.append(
            Collective(
                axis="cp", op="p2p", num_bytes=step_bytes, forward=choice.cp - 1, backward=2 * (choice.cp - 1)
            )
        )
    if "experts" in mixers:
        found.extend(_dispatch(z))
    return found


def _dispatch(z: Sizes) -> list[Collective]:
    assert z.model.moe is not None
    routed = z.act_bytes * z.tokens_sp * z.model.moe.top_k * z.h
    found = []
    if z.choice.ep > 1:
        found.append(Collective(axis="ep", op="all_to_all", num_bytes=routed, forward=2, backward=2))
    if z.choice.etp > 1:
        gathered = routed * z.choice.etp
        found.append(Collective(axis="etp", op="all_gather", num_bytes=gathered, forward=1, backward=1))
        found.append(Collective(axis="etp", op="reduce_scatter", num_bytes=gathered, forward=1, backward=1))
    return found


def _embedding(z: Sizes) -> Block:
    model = z.model
    vocab = model.padded_vocab_size(z.choice.tp) // z.choice.tp
    positions = model.max_position_embeddings * z.h if model.learned_positions else 0
    traffic = 4 * z.tokens * z.h
    operator = Operator(
        name="embedding",
        kind="memory",
        forward_bytes=traffic,
        backward_bytes=2 * traffic,
        parameters=vocab * z.h + positions + (2 * z.h if model.pooler_head else 0),
        saved_bytes=z.tokens_sp * z.h if model.hidden_dropout > 0 else 0,
    )
    return Block(kind="embedding", operators=(operator,), collectives=_edge_collectives(z))


def _head(z: Sizes) -> Block:
    model = z.model
    vocab = model.padded_vocab_size(z.choice.tp) // z.choice.tp
    local_logits = z.tokens * vocab
    pooler = 2 * z.h * z.h + 6 * z.h if model.pooler_head else 0
    traffic = LOSS_TRAFFIC_BYTES[z.kernels.loss] * local_logits
    operators = (
        _norm(z, "final_norm"),
        Operator(name="pooler", kind="memory", parameters=pooler),
        gemm("output_layer", z, vocab, z.h),
        Operator(
            name="loss",
            kind="memory",
            forward_bytes=traffic // 2,
            backward_bytes=traffic // 2,
            m=z.tokens,
            n=vocab,
        ),
    )
    return Block(kind="head", operators=operators, collectives=_edge_collectives(z))


def _edge_collectives(z: Sizes) -> tuple[Collective, ...]:
    """Return the vocabulary-parallel reduction of the embedding, or the gather in front of the head."""
    if z.choice.tp == 1:
        return ()
    full = z.act_bytes * z.tokens * z.h
    op = "reduce_scatter" if z.choice.sequence_parallel else "all_reduce"
    return (Collective(axis="tp", op=op, num_bytes=full, forward=1, backward=1),)  # type: ignore[arg-type]
