"""Closed formulas of self attention, cross attention and multi-head latent attention on one rank.

Sources: saved bytes research/memory_model.md 2.3, parameters 2.1; GEMM shapes and memory-bound bytes
research/time_model.md section 2.
"""

from __future__ import annotations

from nest_megatron.graph.layer_graph import Operator
from nest_megatron.graph.linear_template import gemm
from nest_megatron.graph.sizes import Sizes

# Keys of one tile of a sliding-window kernel.
WINDOW_TILE = 128
# Kernels that never store the scores.
FUSED_ATTENTION = ("flash", "flash1", "cudnn")


def attention_operators(z: Sizes, *, causal: bool) -> list[Operator]:
    """Return self attention; without ``causal`` every token sees every other (the encoder of T5)."""
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
                **z.passes(z.norm_bytes * elements),
                saved_bytes=z.act_bytes * elements,
                parameters=2 * width,
            )
        )
    if not model.learned_positions:
        operators.append(
            Operator(
                name="rotary",
                kind="memory",
                **z.passes(z.time.rotary_bytes * z.tokens * heads * width),
                saved_bytes=z.facts.rotary_saved_bytes * z.tokens * z.h // t,
            )
        )
    saved = z.act_bytes * z.tokens * qkv_columns
    operators.append(_attention_core(z, heads, width, width, saved_qkv=saved, causal=causal))
    operators.append(gemm("attention_output", z, z.h, heads * width, bias=model.linear_bias))
    return operators


def cross_attention_operators(z: Sizes, encoder: Sizes) -> list[Operator]:
    """Return attention of the decoder's tokens ``z`` on the encoder's output (t5_spec.py, attention.py).

    Queries come from the decoder, keys and values from the encoder; there are no rotary embeddings, no
    query groups and no causal mask.
    """
    heads, width = z.model.num_attention_heads // z.choice.tp, z.model.kv_channels
    columns, bias = heads * width, z.model.linear_bias
    saved = z.act_bytes * columns * (z.tokens + 2 * encoder.tokens)
    core = _attention_core(
        z, heads, width, width, saved_qkv=saved, keys=encoder.sequence, causal=False, name="cross_core"
    )
    return [
        gemm("cross_query", z, columns, z.h, bias=bias),
        gemm("cross_key_value", encoder, 2 * columns, z.h, bias=bias),
        core,
        gemm("cross_output", z, z.h, columns, bias=bias),
    ]


def _attention_core(
    z: Sizes,
    heads: int,
    qk_width: int,
    v_width: int,
    *,
    saved_qkv: int,
    keys: int | None = None,
    causal: bool = True,
    name: str = "attention_core",
) -> Operator:
    """Return softmax(QK)V: FLOP of one rank, and what its kernel saves (memory_model.md 2.3).

    Args:
        keys: tokens that a query may look at, by default its own sequence; a causal mask halves the work.
    """
    b, c = z.choice.micro_batch, z.choice.cp
    queries, keys = z.sequence // c, z.sequence if keys is None else keys
    visible = _visible_keys(z, keys) if causal else keys
    flops = round(2 * b * queries * visible * heads * (qk_width + v_width))
    kernel = z.kernels.attention
    scores = b * heads * queries * keys
    forward_score, backward_score = _score_bytes(z)
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
        name=name,
        kind="attention",
        m=queries,
        n=keys,
        k=qk_width,
        batch=b * heads,
        forward_flops=flops,
        backward_flops=5 * flops // 2,
        forward_bytes=round(forward_score * scores),
        backward_bytes=round(backward_score * scores),
        saved_bytes=saved_qkv + output + core_saved,
        transient_bytes=transient,
        module="",
    )


def _visible_keys(z: Sizes, keys: int) -> float:
    """Return the keys a query works on under a causal mask, mean over plain and sliding-window layers.

    A window kernel works on whole tiles on both sides of the window (research/moe.md section 3, item 6).
    """
    causal = keys / 2
    window = min(causal, 2 * z.model.attention_window + WINDOW_TILE)
    return causal + z.model.windowed_share * (window - causal)


def _score_bytes(z: Sizes) -> tuple[float, float]:
    """Return HBM bytes per attention score, forward and backward; 0 for kernels that never store one."""
    if z.kernels.attention == "unfused":
        return z.time.score_forward_bytes, z.time.score_backward_bytes
    if z.kernels.attention == "fused_softmax":
        return z.time.softmax_forward_bytes, z.time.softmax_backward_bytes
    return 0.0, 0.0


def mla_operators(z: Sizes) -> list[Operator]:
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
            tokens=z.tokens_sp,
            saved=z.act_bytes * z.tokens_sp * latent,
        ),
        gemm("kv_up", z, heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank),
    ]
    if mla.q_lora_rank:
        operators.append(gemm("q_down", z, mla.q_lora_rank, z.h, tokens=z.tokens_sp))
        operators.append(gemm("q_up", z, heads * qk, mla.q_lora_rank))
    else:
        operators.append(gemm("q_proj", z, heads * qk, z.h))
    saved = 0 if z.drops("mla_up_proj") else up_saved
    operators.append(_attention_core(z, heads, qk, mla.v_head_dim, saved_qkv=saved))
    operators.append(gemm("attention_output", z, z.h, heads * mla.v_head_dim, bias=model.linear_bias))
    return operators
