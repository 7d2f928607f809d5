"""Closed formulas of a routed-expert layer: router, dispatch, grouped experts, shared expert.

Sources: research/memory_model.md 2.3 (routed experts, router), research/moe.md section 3 items 3 and 4.
"""

from __future__ import annotations

from nest_megatron.graph.layer_graph import Operator
from nest_megatron.graph.linear_template import gemm, mlp_operators
from nest_megatron.graph.sizes import Sizes

# HBM bytes per routed element of permute + unpermute, and per token and expert of the router (moe.md 3.4).
PERMUTE_BYTES = 8
ROUTER_BYTES = 20
# Router logits, probabilities and their fp32 copies kept per token and expert (memory_model.md 2.3).
ROUTER_SAVED_BYTES = 12


def moe_operators(z: Sizes) -> list[Operator]:
    """Return the operators of one MoE layer on one rank.

    Tokens per rank: n = T_sp * k * etp, times the imbalance of dropless routing or the capacity factor.
    """
    model, moe, choice = z.model, z.model.moe, z.choice
    assert moe is not None
    gates = 2 if model.gated_mlp else 1
    load = moe.capacity_factor if moe.capacity_factor is not None else z.job.expert_imbalance
    pairs = round(z.tokens_sp * moe.top_k * choice.etp * load)
    local_experts = max(1, moe.num_experts // choice.ep)
    width = moe.ffn_hidden_size // choice.etp
    kept = not z.drops("moe")
    act_kept = kept and not z.drops("moe_act")
    flex = moe.dispatcher == "flex"
    passes = z.time.permute_flex_passes if flex else z.time.permute_alltoall_passes
    activation = z.time.router_passes * z.activation_bytes * pairs * width
    if model.linear_bias:
        activation *= z.time.expert_bias_passes
    router = gemm("router", z, moe.num_experts, z.h)
    operators = [
        Operator(
            name="router",
            kind="memory",
            forward_flops=router.forward_flops,
            backward_flops=router.backward_flops,
            **z.passes(z.time.router_passes * ROUTER_BYTES * z.tokens_sp * moe.num_experts),
            saved_bytes=ROUTER_SAVED_BYTES * z.tokens_sp * moe.num_experts if kept else 0,
            parameters=moe.num_experts * z.h,
        ),
        Operator(
            name="permute",
            kind="memory",
            **z.passes(passes * PERMUTE_BYTES * pairs * z.h),
            saved_bytes=z.act_bytes * pairs * z.h if kept else 0,
            transient_bytes=pairs * (z.act_bytes * width * (2 + gates) + 2 * z.act_bytes * z.h),
        ),
        _expert_gemm(
            "expert_up", z, pairs, gates * width, z.h, local_experts, gates * width * z.act_bytes * kept
        ),
        Operator(
            name="expert_activation",
            kind="memory",
            **z.passes(0 if z.kernels.fused_experts else activation),
            # Non-gated experts keep the activation twice (memory_model.md 2.3).
            saved_bytes=z.low_bytes * pairs * width * (1 if model.gated_mlp else 2) if act_kept else 0,
        ),
        _expert_gemm("expert_down", z, pairs, z.h, width, local_experts, 0),
    ]
    if moe.shared_ffn_hidden_size:
        shared_width = moe.shared_ffn_hidden_size // choice.tp
        operators.extend(mlp_operators(z, "shared_expert", shared_width, module="shared_experts"))
    return operators


def _expert_gemm(
    name: str, z: Sizes, pairs: int, n: int, k: int, local_experts: int, saved_per_pair: int
) -> Operator:
    """Return a grouped GEMM over the local experts; ``parameters`` count all of them."""
    flops = 2 * pairs * n * k
    bias = n if z.model.linear_bias else 0
    return Operator(
        name=name,
        kind="grouped_gemm",
        m=max(1, pairs // local_experts),
        n=n,
        k=k,
        batch=local_experts,
        forward_flops=flops,
        backward_flops=2 * flops,
        saved_bytes=pairs * saved_per_pair,
        parameters=local_experts * (n * k + bias),
        expert=True,
    )
