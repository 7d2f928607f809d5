"""The run record: one JSON object in the schema of published measurements, read by calibrate and validate.

Schema: the fields of the measured records, and ``peak_reserved_bytes``, ``visible_bytes``, ``plan_digest``
(DESIGN section 3).  ``megatron_args`` are Megatron-LM's arguments of the same run, so that readers rebuild
the job exactly.
"""

from __future__ import annotations

import importlib.metadata
import statistics
from collections.abc import Sequence
from typing import Any

from nest_megatron.specs.plan import Plan

from .loop import Step
from .rank import Outcome
from .settings import Settings

#: Steps that warm caches and allocators; they are not timed.
_WARM_UP = 2
#: Name of the accelerator of a run without CUDA, as in conf/accelerator.
CPU_ACCELERATOR = "cpu-core"


def step_time_s(steps: Sequence[Step]) -> float:
    """Return the median time of the steps after the warm-up; of all steps when there are no more."""
    timed = steps[_WARM_UP:] or steps
    return statistics.median(step.step_time_s for step in timed)


def run_record(
    settings: Settings,
    outcomes: Sequence[Outcome],
    plan: Plan | None,
    *,
    accelerator: str,
    visible_bytes: int | None,
) -> dict[str, Any]:
    """Return the record of a finished run.

    Args:
        outcomes: of every rank whose memory is known here; the largest peak counts.
        accelerator: name of the device of a rank.
        visible_bytes: what CUDA reports as the device's memory; None without CUDA.
    """
    groups, model = settings.groups, settings.transformer
    step_s = step_time_s(outcomes[0].steps)
    tokens = settings.global_batch * settings.sequence_length
    allocated = max((o.peak_allocated_bytes or 0 for o in outcomes), default=0) or None
    version = importlib.metadata.version("megatron-core")
    return {
        "id": f"own-{settings.name}-{(plan_digest(plan) or 'unplanned')[:12]}",
        "family": "own",
        "tier": "own",
        "source": "scripts/train.py",
        "accelerator": accelerator,
        "num_gpus": settings.num_ranks,
        "gpus_per_node": settings.devices,
        "interconnect": None,
        "model": {
            "name": settings.name,
            "layers": model["num_layers"],
            "hidden": model["hidden_size"],
            "heads": model["num_attention_heads"],
            "kv_heads": model["num_query_groups"],
            "ffn": model["ffn_hidden_size"],
            "vocab": settings.vocab_size,
            "experts": model.get("num_moe_experts"),
            "topk": model.get("moe_router_topk"),
            "moe_ffn": model.get("moe_ffn_hidden_size"),
            "params_b": None,
            "named": False,
        },
        "seq_len": settings.sequence_length,
        "global_batch": settings.global_batch,
        "micro_batch": settings.micro_batch,
        "tp": groups["tensor_model_parallel_size"],
        "pp": groups["pipeline_model_parallel_size"],
        "vpp": groups["virtual_pipeline_model_parallel_size"] or 1,
        "dp": settings.dp,
        "cp": groups["context_parallel_size"],
        "ep": groups["expert_model_parallel_size"],
        "etp": groups["expert_tensor_parallel_size"],
        "sp": model["sequence_parallel"],
        "zero": "zero-1" if settings.ddp["use_distributed_optimizer"] else "none",
        "recompute": {
            "mode": model.get("recompute_granularity") or "none",
            "details": " ".join(model.get("recompute_modules") or ()),
        },
        "precision": settings.precision,
        "framework": f"megatron-core {version}",
        "measured": {
            "step_time_s": step_s,
            "tokens_per_s_per_gpu": tokens / step_s / settings.num_ranks,
            "tflops_per_gpu": None,
            "mfu": None,
            "hfu": None,
            "peak_mem_gb": None,
            "peak_mem_bytes": allocated,
            "mem_unit": None,
            "mem_scope": "max allocated over the ranks of one node" if allocated else None,
            "oom": False,
        },
        "derived": ["step_time_s", "tokens_per_s_per_gpu"],
        "group": None,
        "group_kind": None,
        "scale_group": None,
        "notes": f"median of the steps after the first {_WARM_UP}; loss {outcomes[0].steps[-1].loss:.4f}",
        "megatron_args": megatron_arguments(settings),
        "peak_reserved_bytes": max((o.peak_reserved_bytes or 0 for o in outcomes), default=0) or None,
        "peak_resident_bytes": max(o.peak_resident_bytes for o in outcomes),
        "visible_bytes": visible_bytes,
        "plan_digest": plan_digest(plan),
        "profile": None if plan is None else plan.provenance.get("profile"),
    }


def plan_digest(plan: Plan | None) -> str | None:
    """Return the digest that a sealed plan carries."""
    return None if plan is None else plan.provenance.get("plan_digest")


#: Argument of TransformerConfig -> Megatron-LM's flag of the same meaning.
_NUMBERS = {
    "num_layers": "num-layers",
    "hidden_size": "hidden-size",
    "ffn_hidden_size": "ffn-hidden-size",
    "num_attention_heads": "num-attention-heads",
    "kv_channels": "kv-channels",
    "normalization": "normalization",
    "hidden_dropout": "hidden-dropout",
    "attention_dropout": "attention-dropout",
    "tensor_model_parallel_size": "tensor-model-parallel-size",
    "pipeline_model_parallel_size": "pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "context_parallel_size": "context-parallel-size",
    "expert_model_parallel_size": "expert-model-parallel-size",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
    "pipeline_model_parallel_layout": "pipeline-model-parallel-layout",
    "recompute_granularity": "recompute-granularity",
    "recompute_method": "recompute-method",
    "recompute_num_layers": "recompute-num-layers",
    "num_moe_experts": "num-experts",
    "moe_router_topk": "moe-router-topk",
    "moe_ffn_hidden_size": "moe-ffn-hidden-size",
    "moe_token_dispatcher_type": "moe-token-dispatcher-type",
}
_SWITCHES = {
    "gated_linear_unit": "swiglu",
    "add_qkv_bias": "add-qkv-bias",
    "qk_layernorm": "qk-layernorm",
    "bf16": "bf16",
    "fp16": "fp16",
    "sequence_parallel": "sequence-parallel",
    "account_for_embedding_in_pipeline_split": "account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "account-for-loss-in-pipeline-split",
}


def megatron_arguments(settings: Settings) -> dict[str, Any]:
    """Return the flags with which Megatron-LM would run the same job; switches that are off are left out."""
    model, ddp = settings.transformer, settings.ddp
    flags = {flag: model[name] for name, flag in _NUMBERS.items() if model.get(name) is not None}
    flags |= {flag: True for name, flag in _SWITCHES.items() if model.get(name)}
    if flags.get("num-virtual-stages-per-pipeline-rank") and "pipeline-model-parallel-layout" in flags:
        del flags["num-virtual-stages-per-pipeline-rank"]  # the string says it
    switches = {
        "disable-bias-linear": not model["add_bias_linear"],
        "no-overlap-p2p-communication": not model["overlap_p2p_comm"],
        "untie-embeddings-and-output-weights": not settings.tied_embeddings,
        "group-query-attention": model["num_query_groups"] != model["num_attention_heads"],
        "use-distributed-optimizer": ddp["use_distributed_optimizer"],
        "overlap-grad-reduce": ddp["overlap_grad_reduce"],
        "overlap-param-gather": ddp["overlap_param_gather"],
        "use-tp-pp-dp-mapping": settings.groups["order"] == "tp-cp-ep-pp-dp",
    }
    flags |= {flag: True for flag, on in switches.items() if on}
    if model["num_query_groups"] != model["num_attention_heads"]:
        flags["num-query-groups"] = model["num_query_groups"]
    if model.get("num_moe_experts"):
        flags["expert-tensor-parallel-size"] = settings.groups["expert_tensor_parallel_size"]
    if model.get("recompute_granularity") == "selective":
        flags["recompute-modules"] = list(model["recompute_modules"] or ["core_attn"])
    return flags | {
        "micro-batch-size": settings.micro_batch,
        "global-batch-size": settings.global_batch,
        "seq-length": settings.sequence_length,
        "max-position-embeddings": settings.sequence_length,
        "position-embedding-type": settings.positions,
        "padded-vocab-size": settings.vocab_size,
        "num-distributed-optimizer-instances": settings.groups["num_distributed_optimizer_instances"],
    }
