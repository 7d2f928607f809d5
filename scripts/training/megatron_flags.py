"""Megatron-LM flags -> settings, as ``megatron/training`` reads them (``arguments.py``, ``initialize.py``).

It reads the flags only, never a plan; the mapping of flags is that of the ``megatron_lm`` dialect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .settings import ACTIVATIONS, Settings, moe_arguments, require

#: Flag -> argument of TransformerConfig of the same meaning.
_TRANSFORMER = {
    "num-layers": "num_layers",
    "hidden-size": "hidden_size",
    "num-attention-heads": "num_attention_heads",
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
    "pipeline-model-parallel-layout": "pipeline_model_parallel_layout",
    "recompute-granularity": "recompute_granularity",
    "recompute-method": "recompute_method",
    "recompute-num-layers": "recompute_num_layers",
    "microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
}


def settings_of(flags: Mapping[str, Any], *, num_ranks: int, devices: int, name: str) -> Settings:
    """Return the run that Megatron-LM's flags ask for.

    Args:
        flags: flag, with or without dashes -> value; true stands for a switch.
        num_ranks: processes; ``devices`` of them on each node.

    Raises:
        BadInputError: the flags ask for something this program does not train.
    """
    given = {str(key).lstrip("-"): value for key, value in flags.items() if value is not None}
    tp, pp = given.get("tensor-model-parallel-size", 1), given.get("pipeline-model-parallel-size", 1)
    for flag in ("use-megatron-fsdp", "use-torch-fsdp2", "fp8-format"):
        require(not given.get(flag), "this is not trained", flag=flag)
    groups = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": _virtual(given, pp),
        "context_parallel_size": given.get("context-parallel-size", 1),
        "expert_model_parallel_size": given.get("expert-model-parallel-size", 1),
        "expert_tensor_parallel_size": given.get("expert-tensor-parallel-size", tp),
        "num_distributed_optimizer_instances": given.get("num-distributed-optimizer-instances", 1),
        "order": "tp-cp-ep-pp-dp" if given.get("use-tp-pp-dp-mapping") else "tp-cp-ep-dp-pp",
    }
    sharded = bool(given.get("use-distributed-optimizer"))
    vocab = given.get("padded-vocab-size")
    require(vocab, "--padded-vocab-size must say the vocabulary: no tokenizer is read")
    return Settings(
        name=name,
        dialect="megatron_lm",
        transformer=_transformer(given, groups),
        groups=groups,
        ddp={
            "use_distributed_optimizer": sharded,
            "overlap_grad_reduce": bool(given.get("overlap-grad-reduce")),
            "overlap_param_gather": bool(given.get("overlap-param-gather")),
            "num_distributed_optimizer_instances": groups["num_distributed_optimizer_instances"],
            "grad_reduce_in_fp32": True,
        },
        optimizer={
            "optimizer": "adam",
            "lr": given["lr"],
            "weight_decay": given.get("weight-decay", 0.01),
            "adam_beta1": given.get("adam-beta1", 0.9),
            "adam_beta2": given.get("adam-beta2", 0.999),
            "clip_grad": given.get("clip-grad", 1.0),
            "use_distributed_optimizer": sharded,
            "overlap_param_gather": bool(given.get("overlap-param-gather")),
        },
        vocab_size=vocab,
        sequence_length=given["seq-length"],
        tied_embeddings=not given.get("untie-embeddings-and-output-weights"),
        positions=given.get("position-embedding-type", "learned_absolute"),
        rotary_base=given.get("rotary-base", 10000),
        rotary_percent=given.get("rotary-percent", 1.0),
        micro_batch=given["micro-batch-size"],
        global_batch=given["global-batch-size"],
        num_steps=given["train-iters"],
        seed=given.get("seed", 1234),
        data="mock",
        transformer_engine=given.get("transformer-impl", "transformer_engine") == "transformer_engine",
        num_ranks=num_ranks,
        devices=devices,
    )


def _virtual(given: Mapping[str, Any], pp: int) -> int | None:
    """Return virtual stages per rank, from the number, the layers of one, or the layout string."""
    size = given.get("num-virtual-stages-per-pipeline-rank")
    layers = given.get("num-layers-per-virtual-pipeline-stage")
    string = given.get("pipeline-model-parallel-layout")
    if size is None and layers is not None:
        size = given["num-layers"] // (pp * layers)
    if size is None and string is not None:
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        size = len(PipelineParallelLayerLayout.from_str(string, pp).layout[0])
    return size if size and size > 1 else None


def _transformer(given: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    tp, vpp = groups["tensor_model_parallel_size"], groups["virtual_pipeline_model_parallel_size"]
    hidden, heads = given["hidden-size"], given["num-attention-heads"]
    gated = bool(given.get("swiglu"))
    # Overlap is Megatron-LM's default; it has effect only between virtual stages.
    overlap_p2p = bool(vpp) and not given.get("no-overlap-p2p-communication")
    function, _ = ACTIVATIONS["swiglu" if gated else "gelu"]
    arguments = {name: given[flag] for flag, name in _TRANSFORMER.items() if flag in given}
    arguments |= {
        "ffn_hidden_size": given.get("ffn-hidden-size", 4 * hidden),
        "num_query_groups": given.get("num-query-groups", heads)
        if given.get("group-query-attention")
        else heads,
        "kv_channels": given.get("kv-channels", hidden // heads),
        "activation_func": function,
        "gated_linear_unit": gated,
        "normalization": given.get("normalization", "LayerNorm"),
        "layernorm_epsilon": given.get("norm-epsilon", 1e-5),
        "add_bias_linear": not given.get("disable-bias-linear"),
        "add_qkv_bias": bool(given.get("add-qkv-bias")),
        "qk_layernorm": bool(given.get("qk-layernorm")),
        "init_method_std": given.get("init-method-std", 0.02),
        "hidden_dropout": given.get("hidden-dropout", 0.1),
        "attention_dropout": given.get("attention-dropout", 0.1),
        "bf16": bool(given.get("bf16")),
        "fp16": bool(given.get("fp16")),
        "sequence_parallel": bool(given.get("sequence-parallel")) and tp > 1,
        "tp_comm_overlap": bool(given.get("tp-comm-overlap")) and tp > 1,
        "overlap_p2p_comm": overlap_p2p,
        "batch_p2p_comm": not overlap_p2p,
        "account_for_embedding_in_pipeline_split": bool(given.get("account-for-embedding-in-pipeline-split")),
        "account_for_loss_in_pipeline_split": bool(given.get("account-for-loss-in-pipeline-split")),
        "recompute_modules": _words(given.get("recompute-modules")),
    }
    omitted = ("order", "num_distributed_optimizer_instances")
    arguments |= {key: value for key, value in groups.items() if key not in omitted}
    if given.get("recompute-activations"):
        arguments["recompute_granularity"] = "selective"
    return arguments | _moe(given)


def _words(value: Any) -> list[str] | None:
    return value.split() if isinstance(value, str) else list(value) if value else None


def _moe(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("num-experts") is None:
        return {}
    return moe_arguments(
        num_experts=given["num-experts"],
        top_k=given.get("moe-router-topk", 2),
        ffn_hidden_size=given.get("moe-ffn-hidden-size"),
        shared_ffn_hidden_size=given.get("moe-shared-expert-intermediate-size"),
        layer_pattern=given.get("moe-layer-freq", 1),
        capacity_factor=given.get("moe-expert-capacity-factor"),
        aux_loss=given.get("moe-aux-loss-coeff", 0.0),
        dispatcher=given.get("moe-token-dispatcher-type"),
    )
