"""Builders of jobs, models and layouts for tests: sensible defaults, any field can be overridden."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nest_megatron.dialects.profiles import step_constants
from nest_megatron.specs.job import Capabilities, FrameworkProfile, Kernels, Recipe, TrainJob
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.model import MLASpec, ModelSpec, MoESpec
from nest_megatron.units import bytes_from_gib

#: bf16 weights, fp32 gradients, Adam with fp32 master weights: 18 bytes per parameter before sharding.
BF16_ADAM = Recipe(
    name="bf16-mixed-adam",
    compute_dtype="bf16",
    activation_bytes=2,
    weight_bytes=2,
    grad_bytes=4,
    grad_reduce_bytes=4,
    param_gather_bytes=2,
    optimizer_bytes=12,
)

#: A dialect that can write everything a Layout can say.
EVERYTHING = Capabilities(
    expert_tensor_parallel=True,
    uneven_ends=True,
    account_embedding_and_loss=True,
    layout_string=True,
    shardings=("none", "optim", "optim_grads", "optim_grads_params"),
    optimizer_instances=True,
    recompute_modules=("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
    orders=("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"),
)


def make_profile(**overrides: Any) -> FrameworkProfile:
    """A framework profile with the planner's default device rule (1.08 * allocated + 6 GiB)."""
    fields: dict[str, Any] = {
        "name": "test",
        "device_factor": 1.08,
        "device_fixed_bytes": bytes_from_gib(6),
        "tp_overlap_share": 0.7,
        "tp_async_backward_share": 0.5,
        "dp_overlap_share": 0.8,
        "p2p_overlap_share": 0.8,
        "ep_overlap_share": 0.6,
        "host_floor_s": 0.0006,
        "moe_host_factor": 3.0,
        "step_overhead_s": 0.02,
        "time": step_constants()[0],
    }
    return FrameworkProfile(**fields | overrides)


def llama8b(**overrides: Any) -> ModelSpec:
    """Llama 3 8B (public model card)."""
    return _llama("llama3-8b", 32, 4096, 32, 14336, 128256, overrides)


def llama70b(**overrides: Any) -> ModelSpec:
    """Llama 3 70B (public model card)."""
    return _llama("llama3-70b", 80, 8192, 64, 28672, 128256, overrides)


def _llama(
    name: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int, overrides: dict[str, Any]
) -> ModelSpec:
    fields: dict[str, Any] = {
        "name": name,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": min(8, heads),
        "kv_channels": 128,
        "ffn_hidden_size": ffn,
        "vocab_size": vocab,
        "gated_mlp": True,
        "tied_embeddings": False,
        "rms_norm": True,
        "linear_bias": False,
    }
    return ModelSpec(**fields | overrides)


def gpt175b(**overrides: Any) -> ModelSpec:
    """GPT-3 175B (public paper)."""
    fields: dict[str, Any] = {
        "name": "gpt3-175b",
        "num_layers": 96,
        "hidden_size": 12288,
        "num_attention_heads": 96,
        "num_query_groups": 96,
        "kv_channels": 128,
        "ffn_hidden_size": 49152,
        "vocab_size": 50257,
        "max_position_embeddings": 2048,
        "learned_positions": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    }
    return ModelSpec(**fields | overrides)


def mixtral(**overrides: Any) -> ModelSpec:
    """Mixtral 8x7B (public model card)."""
    moe = MoESpec(num_experts=8, top_k=2, ffn_hidden_size=14336, layer_pattern=(1,) * 32)
    return _llama("mixtral-8x7b", 32, 4096, 32, 14336, 32000, {"moe": moe} | overrides)


def deepseek_v2(**overrides: Any) -> ModelSpec:
    """DeepSeek-V2 236B (public model card): latent attention, one dense layer, shared experts."""
    moe = MoESpec(
        num_experts=160,
        top_k=6,
        ffn_hidden_size=1536,
        shared_ffn_hidden_size=3072,
        layer_pattern=(0,) + (1,) * 59,
    )
    mla = MLASpec(kv_lora_rank=512, qk_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536)
    fields: dict[str, Any] = {"num_query_groups": 128, "moe": moe, "mla": mla}
    return _llama("deepseek-v2", 60, 5120, 128, 12288, 102400, fields | overrides)


def make_layout(job: TrainJob, **degrees: Any) -> Layout:
    """A layout of ``job``; dp, edp, etp (= tp), global batch and an even layer split are filled in."""
    layout = Layout(global_batch=job.global_batch)
    if "etp" not in degrees:
        degrees["etp"] = degrees.get("tp", 1)
    layout = replace(layout, **degrees)
    filled: dict[str, Any] = {
        "dp": job.num_gpus // (layout.tp * layout.pp * layout.cp),
        "edp": job.num_gpus // (layout.etp * layout.ep * layout.pp),
        "num_layers_per_chunk": _even(job.model.num_layers, layout.pp * layout.vpp),
    }
    return replace(layout, **{name: value for name, value in filled.items() if name not in degrees})


def _even(num_layers: int, pieces: int) -> tuple[int, ...]:
    base, rest = divmod(num_layers, pieces)
    return (base + 1,) * rest + (base,) * (pieces - rest)


def make_job(layout: dict[str, Any] | None = None, **overrides: Any) -> TrainJob:
    """A job on a stack that can do everything: Llama 3 8B, 64 GPUs, batch 256, sequence 4096.

    Args:
        layout: keyword arguments of ``make_layout`` for the user's layout.
        overrides: any field of TrainJob.
    """
    fields: dict[str, Any] = {
        "name": "test-job",
        "dialect": "test",
        "framework": "megatron-core",
        "framework_version": "0.16.1",
        "megatron_core_version": "0.16.1",
        "model": llama8b(),
        "num_gpus": 64,
        "gpus_per_node": 8,
        "global_batch": 256,
        "sequence_length": 4096,
        "recipe": BF16_ADAM,
        "kernels": Kernels(),
        "user_layout": Layout(),
        "profile": make_profile(),
        "capabilities": EVERYTHING,
    }
    job = TrainJob(**fields | overrides)
    if "user_layout" in overrides:
        return job
    return replace(job, user_layout=make_layout(job, **(layout or {})))
