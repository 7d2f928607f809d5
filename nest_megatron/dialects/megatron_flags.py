"""The flag table of Megatron-LM: name, type, default by megatron-core version, and what each flag decides.

Read from ``megatron/training/arguments.py`` of the tags core_v0.8.0 to core_v0.19.0 of NVIDIA/Megatron-LM
and from the parser of the megatron-core 0.19.2 wheel.  Flags that decide nothing here (data, logging,
learning rate) are not listed; they pass through unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

#: ``on`` and ``off`` take no value, they set their field to true or false; ``int*``, ``str*`` take several.
Kind = Literal["int", "float", "str", "on", "off", "int*", "str*"]
Release = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    Args:
        name: without the leading dashes.
        field: name of the attribute that Megatron-LM stores it in; ``--yaml-cfg`` files use the same name.
        decides: axis of a layout, or field of a job; ``note`` when it only makes an assumption.
        since: first release that has the flag.
    """

    name: str
    kind: Kind
    default: object
    field: str
    decides: str
    since: Release


#: name, kind, default, what it decides.
_ROWS: tuple[tuple[str, Kind, object, str], ...] = (
    # layout
    ("tensor-model-parallel-size", "int", 1, "tp"),
    ("pipeline-model-parallel-size", "int", 1, "pp"),
    ("num-layers-per-virtual-pipeline-stage", "int", None, "vpp"),
    ("num-virtual-stages-per-pipeline-rank", "int", None, "vpp"),
    ("microbatch-group-size-per-virtual-pipeline-stage", "int", None, "micro_batch_group"),
    ("decoder-first-pipeline-num-layers", "int", None, "layers"),
    ("decoder-last-pipeline-num-layers", "int", None, "layers"),
    ("account-for-embedding-in-pipeline-split", "on", False, "layers"),
    ("account-for-loss-in-pipeline-split", "on", False, "layers"),
    ("pipeline-model-parallel-layout", "str", None, "layers"),
    ("context-parallel-size", "int", 1, "cp"),
    ("cp-comm-type", "str*", None, "note"),
    ("hierarchical-context-parallel-sizes", "int*", None, "note"),
    ("expert-model-parallel-size", "int", 1, "ep"),
    ("expert-tensor-parallel-size", "int", None, "etp"),
    ("sequence-parallel", "on", False, "sequence_parallel"),
    ("use-tp-pp-dp-mapping", "on", False, "order"),
    ("micro-batch-size", "int", None, "micro_batch"),
    ("use-distributed-optimizer", "on", False, "sharding"),
    ("use-megatron-fsdp", "on", False, "sharding"),
    ("use-custom-fsdp", "on", False, "sharding"),
    ("use-torch-fsdp2", "on", False, "sharding"),
    ("data-parallel-sharding-strategy", "str", "no_shard", "sharding"),
    ("outer-dp-sharding-strategy", "str", "no_shard", "note"),
    ("num-distributed-optimizer-instances", "int", 1, "instances"),
    ("overlap-grad-reduce", "on", False, "overlap"),
    ("overlap-param-gather", "on", False, "overlap"),
    ("overlap-param-gather-with-optimizer-step", "on", False, "note"),
    ("tp-comm-overlap", "on", False, "overlap"),
    ("tp-comm-overlap-cfg", "str", None, "note"),
    ("no-overlap-p2p-communication", "off", True, "overlap"),
    ("overlap-p2p-communication-warmup-flush", "on", False, "note"),
    ("overlap-moe-expert-parallel-comm", "on", False, "overlap"),
    ("delay-wgrad-compute", "on", False, "note"),
    ("recompute-activations", "on", False, "recompute"),
    ("recompute-granularity", "str", None, "recompute"),
    ("recompute-method", "str", None, "recompute"),
    ("recompute-num-layers", "int", None, "recompute"),
    ("recompute-modules", "str*", None, "recompute"),
    ("moe-layer-recompute", "on", False, "recompute"),
    ("distribute-saved-activations", "on", False, "note"),
    # batch, sequence, run
    ("global-batch-size", "int", None, "global_batch"),
    ("rampup-batch-size", "int*", None, "rampup_batches"),
    ("step-batch-size-schedule", "str", None, "rampup_batches"),
    ("eval-global-batch-size", "int", None, "evaluation_batch"),
    ("eval-micro-batch-size", "int", None, "evaluation_batch"),
    ("eval-iters", "int", 100, "evaluation_batch"),
    ("seq-length", "int", None, "sequence_length"),
    ("encoder-seq-length", "int", None, "sequence_length"),
    ("decoder-seq-length", "int", None, "sequence_length"),
    ("load", "str", None, "checkpoint"),
    ("finetune", "on", False, "checkpoint"),
    ("ckpt-format", "str", "torch_dist", "checkpoint"),
    ("yaml-cfg", "str", None, "run"),
    ("skip-train", "on", False, "run"),
    # model
    ("num-layers", "int", None, "num_layers"),
    ("encoder-num-layers", "int", None, "num_layers"),
    ("decoder-num-layers", "int", None, "num_layers"),
    ("hidden-size", "int", None, "hidden_size"),
    ("ffn-hidden-size", "int", None, "ffn_hidden_size"),
    ("num-attention-heads", "int", None, "num_attention_heads"),
    ("kv-channels", "int", None, "kv_channels"),
    ("group-query-attention", "on", False, "num_query_groups"),
    ("num-query-groups", "int", 1, "num_query_groups"),
    ("max-position-embeddings", "int", None, "max_position_embeddings"),
    ("position-embedding-type", "str", "learned_absolute", "learned_positions"),
    ("use-rotary-position-embeddings", "on", False, "learned_positions"),
    ("no-position-embedding", "off", True, "learned_positions"),
    ("swiglu", "on", False, "gated_mlp"),
    ("quick-geglu", "on", False, "gated_mlp"),
    ("squared-relu", "on", False, "squared_relu_copy"),
    ("normalization", "str", "LayerNorm", "rms_norm"),
    ("untie-embeddings-and-output-weights", "on", False, "tied_embeddings"),
    ("disable-bias-linear", "off", True, "linear_bias"),
    ("add-qkv-bias", "on", False, "qkv_bias"),
    ("qk-layernorm", "on", False, "qk_norm"),
    ("hidden-dropout", "float", 0.1, "hidden_dropout"),
    ("attention-dropout", "float", 0.1, "attention_dropout"),
    ("vocab-size", "int", None, "vocab_size"),
    ("padded-vocab-size", "int", None, "vocab_size"),
    ("make-vocab-size-divisible-by", "int", 128, "vocab_size"),
    ("no-pad-vocab-size", "off", True, "vocab_size"),
    ("vocab-extra-ids", "int", 0, "vocab_size"),
    ("tokenizer-type", "str", None, "vocab_size"),
    ("tokenizer-model", "str", None, "vocab_size"),
    ("num-experts", "int", None, "num_experts"),
    ("moe-router-topk", "int", 2, "top_k"),
    ("moe-ffn-hidden-size", "int", None, "moe_ffn_hidden_size"),
    ("moe-shared-expert-intermediate-size", "int", None, "shared_ffn_hidden_size"),
    ("moe-layer-freq", "str", 1, "layer_pattern"),
    ("moe-expert-capacity-factor", "float", None, "capacity_factor"),
    ("moe-grouped-gemm", "on", False, "grouped_gemm"),
    ("moe-token-dispatcher-type", "str", "allgather", "dispatcher"),
    ("moe-flex-dispatcher-backend", "str", "deepep", "dispatcher"),
    ("moe-enable-deepep", "on", False, "dispatcher"),
    ("moe-router-group-topk", "int", None, "group_topk"),
    ("moe-latent-size", "int", None, "note"),
    ("moe-router-enable-expert-bias", "on", False, "note"),
    ("moe-shared-expert-gate", "on", False, "note"),
    ("moe-shared-expert-overlap", "on", False, "note"),
    ("moe-pad-expert-input-to-capacity", "on", False, "note"),
    ("moe-router-force-load-balancing", "on", False, "note"),
    ("multi-latent-attention", "on", False, "mla"),
    ("q-lora-rank", "int", None, "mla"),
    ("kv-lora-rank", "int", 32, "mla"),
    ("qk-head-dim", "int", 128, "mla"),
    ("qk-pos-emb-head-dim", "int", 64, "mla"),
    ("v-head-dim", "int", 128, "mla"),
    ("window-size", "str", None, "attention_window"),
    ("window-attn-skip-freq", "str", None, "windowed_share"),
    ("mtp-num-layers", "int", None, "mtp_num_layers"),
    ("hybrid-layer-pattern", "str", None, "layers"),
    ("hybrid-override-pattern", "str", None, "hybrid_layers"),
    ("mamba-num-heads", "int", None, "mamba"),
    ("mamba-head-dim", "int", 64, "mamba"),
    ("mamba-state-dim", "int", 128, "mamba"),
    ("mamba-num-groups", "int", 8, "mamba"),
    ("mtp-use-repeated-layer", "on", False, "note"),
    # precision, optimizer
    ("bf16", "on", False, "recipe"),
    ("fp16", "on", False, "recipe"),
    ("accumulate-allreduce-grads-in-fp32", "on", False, "recipe"),
    ("grad-reduce-in-bf16", "on", False, "recipe"),
    ("fp8-format", "str", None, "recipe"),
    ("fp8-recipe", "str", "delayed", "recipe"),
    ("fp8-param-gather", "on", False, "recipe"),
    ("fp4-format", "str", None, "recipe"),
    ("first-last-layers-bf16", "on", False, "note"),
    ("optimizer", "str", "adam", "recipe"),
    ("sgd-momentum", "float", 0.9, "recipe"),
    ("use-precision-aware-optimizer", "on", False, "recipe"),
    ("main-grads-dtype", "str", "fp32", "recipe"),
    ("main-params-dtype", "str", "fp32", "recipe"),
    ("exp-avg-dtype", "str", "fp32", "recipe"),
    ("exp-avg-sq-dtype", "str", "fp32", "recipe"),
    ("no-gradient-accumulation-fusion", "off", True, "wgrad_fusion"),
    ("fp32-residual-connection", "on", False, "note"),
    ("optimizer-cpu-offload", "on", False, "note"),
    ("optimizer-offload-fraction", "float", 1.0, "note"),
    ("cpu-offloading-num-layers", "int", 0, "note"),
    ("fine-grained-activation-offloading", "on", False, "recipe"),
    ("offload-modules", "str*", None, "recipe"),
    ("defer-embedding-wgrad-compute", "on", False, "kernels"),
    ("wgrad-deferral-limit", "int", 0, "note"),
    # kernels
    ("transformer-impl", "str", "transformer_engine", "kernels"),
    ("attention-backend", "str", "auto", "kernels"),
    ("use-flash-attn", "on", False, "kernels"),
    ("no-masked-softmax-fusion", "off", True, "kernels"),
    ("no-bias-dropout-fusion", "off", True, "kernels"),
    ("no-bias-gelu-fusion", "off", True, "kernels"),
    ("no-bias-swiglu-fusion", "off", True, "kernels"),
    ("cross-entropy-loss-fusion", "on", False, "kernels"),
    ("cross-entropy-fusion-impl", "str", "native", "kernels"),
    ("enable-cuda-graph", "on", False, "kernels"),
    ("external-cuda-graph", "on", False, "kernels"),
    ("cuda-graph-impl", "str", "none", "kernels"),
    ("cuda-graph-scope", "str*", "full", "kernels"),
    ("use-transformer-engine-op-fuser", "on", False, "kernels"),
    ("fp8-dot-product-attention", "on", False, "kernels"),
    ("deterministic-mode", "on", False, "note"),
    ("no-create-attention-mask-in-dataloader", "off", True, "kernels"),
    ("mock-data", "on", False, "kernels"),
    # other models and runtimes
    ("hybrid-attention-ratio", "float", 0.0, "refusal"),
    ("hybrid-mlp-ratio", "float", 0.0, "refusal"),
    ("is-hybrid-model", "on", False, "refusal"),
    ("spec", "str*", None, "refusal"),
    ("bert-no-binary-head", "off", True, "note"),
    ("img-h", "int", 224, "refusal"),
    ("model-provider", "str", None, "refusal"),
    ("dataset-provider", "str", None, "refusal"),
    ("language-model-type", "str", None, "refusal"),
    ("heterogeneous-layers-config-path", "str", None, "refusal"),
    ("heterogeneous-layers-config-encoded-json", "str", None, "refusal"),
    ("experimental-attention-variant", "str", None, "refusal"),
    ("tensor-parallel-num-weight-shards", "int", None, "refusal"),
    ("expert-tensor-parallel-num-weight-shards", "int", None, "refusal"),
    ("encoder-tensor-model-parallel-size", "int", 0, "refusal"),
    ("encoder-pipeline-model-parallel-size", "int", 0, "refusal"),
    ("moe-extended-tp", "on", False, "refusal"),
    ("use-legacy-models", "on", False, "note"),
)

#: Flags whose field is not their name with underscores.
_FIELDS = {
    "disable-bias-linear": "add_bias_linear",
    "no-overlap-p2p-communication": "overlap_p2p_comm",
    "overlap-p2p-communication-warmup-flush": "overlap_p2p_comm_warmup_flush",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "no-masked-softmax-fusion": "masked_softmax_fusion",
    "no-bias-dropout-fusion": "bias_dropout_fusion",
    "no-bias-gelu-fusion": "bias_gelu_fusion",
    "no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "no-position-embedding": "add_position_embedding",
    "no-pad-vocab-size": "pad_vocab_size",
    "no-create-attention-mask-in-dataloader": "create_attention_mask_in_dataloader",
    "bert-no-binary-head": "bert_binary_head",
    "fp8-format": "fp8",
    "fp4-format": "fp4",
    "microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
}

#: First release of flags that a plan may have to write, or that date a command line.
_SINCE: Mapping[str, Release] = MappingProxyType(
    {
        "use-tp-pp-dp-mapping": (0, 7),
        "decoder-first-pipeline-num-layers": (0, 10),
        "decoder-last-pipeline-num-layers": (0, 10),
        "expert-tensor-parallel-size": (0, 10),
        "num-distributed-optimizer-instances": (0, 10),
        "use-torch-fsdp2": (0, 10),
        "attention-backend": (0, 11),
        "num-virtual-stages-per-pipeline-rank": (0, 11),
        "account-for-embedding-in-pipeline-split": (0, 11),
        "account-for-loss-in-pipeline-split": (0, 11),
        "use-precision-aware-optimizer": (0, 11),
        "recompute-modules": (0, 12),
        "mtp-num-layers": (0, 12),
        "pipeline-model-parallel-layout": (0, 13),
        "use-megatron-fsdp": (0, 14),
        "overlap-moe-expert-parallel-comm": (0, 14),
        "hybrid-layer-pattern": (0, 17),
        "step-batch-size-schedule": (0, 18),
    }
)
#: Last release that obeys a flag.
_UNTIL: Mapping[str, Release] = MappingProxyType({"rampup-batch-size": (0, 17)})
#: Field -> (first release of another default, that default).
_LATER_DEFAULTS: Mapping[str, tuple[Release, object]] = MappingProxyType(
    {"data_parallel_sharding_strategy": ((0, 18), "optim_grads_params")}
)

FLAGS: Mapping[str, Flag] = MappingProxyType(
    {
        name: Flag(
            name,
            kind,
            default,
            _FIELDS.get(name, name.replace("-", "_")),
            decides,
            _SINCE.get(name, (0, 0)),
        )
        for name, kind, default, decides in _ROWS
    }
)
BY_FIELD: Mapping[str, Flag] = MappingProxyType({flag.field: flag for flag in FLAGS.values()})


def default_of(field: str, release: Release) -> object:
    """Return the default that ``release`` gives a field."""
    since, later = _LATER_DEFAULTS.get(field, ((99, 0), None))
    return later if release >= since else BY_FIELD[field].default


def obeyed(flag: Flag, release: Release) -> bool:
    """Return whether ``release`` has the flag and does what it says."""
    return flag.since <= release <= _UNTIL.get(flag.name, (99, 0))
