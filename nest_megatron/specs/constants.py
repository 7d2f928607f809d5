"""Constants of the step-time formulas: counted bytes, and shares fitted on measured training steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConstants:
    """What the step-time formulas multiply; values with their sources are in ``conf/framework/common.yaml``.

    A stack's own profile may replace single ones.  Bytes are HBM traffic per element of one pass; shares and
    factors have no unit.  Formulas: research/time_model.md section 2, research/moe.md section 3.

    Args:
        norm_fused_bytes, norm_unfused_bytes, residual_fused_bytes, residual_unfused_bytes: per element of
            the hidden states.
        backward_traffic_fused, backward_traffic_unfused: backward traffic over forward traffic.
        rotary_bytes: per query element; activation_gated_bytes, activation_plain_bytes: per FFN element.
        unfused_activation_factor: activation traffic without fusion.
        softmax_forward_bytes, softmax_backward_bytes: per attention score with a fused softmax;
            score_forward_bytes, score_backward_bytes: with every step a kernel of its own.
        loss_fused_bytes, loss_bytes: per local logit, both passes.
        fp8_cast_bytes: per operand element of the cast and transpose in front of an fp8 or fp4 GEMM.
        unfused_wgrad_bytes: per weight, when gradient accumulation is a kernel of its own.
        flash1_share, flash2_hopper_share: rate of flash-attn 1, and of flash-attn 2 on Hopper, over the
            accelerator's attention efficiency; fp8_attention_factor: of fp8 attention;
            narrow_head_share: of heads up to 64 wide.
        grouped_factor, fused_experts_factor, single_expert_factor: time of a grouped GEMM over one GEMM of
            the same FLOP: with the activation apart, with it fused, with one local expert.
        permute_alltoall_passes, permute_flex_passes, router_passes: passes over one ideal read and write.
        expert_bias_passes: factor of the expert activation with biases and a clamp.
        flex_network_share, flex_domain_share: rate of DeepEP / HybridEP over the usable rate of a level.
        dispatch_start_s: latency of one flex dispatch or combine.
        ep_window_share: share of a pass that may hide all-to-all.
        mla_host_factor, fp8_host_factor, ep_overlap_host_factor, capacity_host_factor: host floor of an MoE
            block with latent attention, fp8, expert overlap, and token dropping (no host wait).
        attention_graph_host_factor, router_graph_host_factor: with CUDA graphs on attention and router, and
            on the router only.
        p2p_factor: time of a pipeline message over its transfer time alone.
        tp_window_share: share of a pass's compute that may hide tensor-parallel communication.
        wgrad_gather_exposed: share of the gather for weight gradients that stays exposed.
        fsdp_overlap_share: share of a pass that may hide its gathers and reductions; fsdp_contention: what
            one hidden second of them costs the compute.
        bucket_parameters, bucket_parameters_per_rank: gradient bucket, per data-parallel rank beyond.
        optimizer_sharded_bytes, optimizer_local_bytes: per parameter of the rank's shard, and of the rank.
        jitter_per_doubling: growth of the step per doubling beyond 8 GPUs.
        graphed_overhead_share: fixed step overhead that CUDA graphs leave.
    """

    norm_fused_bytes: float
    norm_unfused_bytes: float
    residual_fused_bytes: float
    residual_unfused_bytes: float
    backward_traffic_fused: float
    backward_traffic_unfused: float
    rotary_bytes: float
    activation_gated_bytes: float
    activation_plain_bytes: float
    unfused_activation_factor: float
    softmax_forward_bytes: float
    softmax_backward_bytes: float
    score_forward_bytes: float
    score_backward_bytes: float
    loss_fused_bytes: float
    loss_bytes: float
    fp8_cast_bytes: float
    unfused_wgrad_bytes: float
    flash1_share: float
    flash2_hopper_share: float
    fp8_attention_factor: float
    narrow_head_share: float
    grouped_factor: float
    fused_experts_factor: float
    single_expert_factor: float
    permute_alltoall_passes: float
    permute_flex_passes: float
    router_passes: float
    expert_bias_passes: float
    flex_network_share: float
    flex_domain_share: float
    dispatch_start_s: float
    ep_window_share: float
    mla_host_factor: float
    fp8_host_factor: float
    ep_overlap_host_factor: float
    capacity_host_factor: float
    attention_graph_host_factor: float
    router_graph_host_factor: float
    p2p_factor: float
    tp_window_share: float
    wgrad_gather_exposed: float
    fsdp_overlap_share: float
    fsdp_contention: float
    bucket_parameters: float
    bucket_parameters_per_rank: float
    optimizer_sharded_bytes: float
    optimizer_local_bytes: float
    jitter_per_doubling: float
    graphed_overhead_share: float
