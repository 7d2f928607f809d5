"""NeMo-style keys -> settings: the same mapping that NeMo's MegatronGPTModel makes, written anew.

It reads the configuration only, never a plan, so that training shows what the edits of a plan really ask for.
Source: github.com/NVIDIA/NeMo at v2.3.0, ``megatron_gpt_model.py`` (``model_provider_func``,
``build_transformer_config``, ``setup_mcore_distributed_parallel``) and ``megatron_base_model.py``.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from .settings import ACTIVATIONS, Settings, moe_arguments, require

_PRECISIONS = {"bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16"}
_FP32 = ("32", "32-true", "None")
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
#: ``optim.name`` of optimizers whose states are sharded over data parallel ranks.
_SHARDED = ("mcore_distributed_optim", "distributed_fused_adam")


def settings_of(config: DictConfig) -> Settings:
    """Return the run that a NeMo-style configuration asks for.

    Raises:
        BadInputError: the configuration asks for something this program does not train.
    """
    get = _Getter(config)
    model_flag = get("model.mcore_gpt")
    require(model_flag, "only megatron-core models are trained", mcore_gpt=model_flag)
    require(not get("model.fp8"), "fp8 is not trained", fp8=get("model.fp8"))
    require(not get("model.rampup_batch_size"), "batch ramp-up is not trained")
    tp = get("model.tensor_model_parallel_size", 1)
    groups = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": get("model.pipeline_model_parallel_size", 1),
        "virtual_pipeline_model_parallel_size": _virtual(get),
        "context_parallel_size": get("model.context_parallel_size", 1),
        "expert_model_parallel_size": get("model.expert_model_parallel_size", 1),
        "expert_tensor_parallel_size": tp,  # NeMo has no key: experts follow the other layers
        "num_distributed_optimizer_instances": get("model.optim.num_distributed_optimizer_instances", 1),
        "order": "tp-cp-ep-pp-dp" if get("model.use_tp_pp_dp_mapping", False) else "tp-cp-ep-dp-pp",
    }
    sharded = get("model.optim.name") in _SHARDED
    sequence = get("model.encoder_seq_length")
    learned = get("model.position_embedding_type", "learned_absolute")
    vocab, divisor = get("model.override_vocab_size"), 1
    if vocab is None:
        vocab, divisor = (
            get("model.tokenizer.vocab_size"),
            get("model.make_vocab_size_divisible_by", 128) * tp,
        )
    require(vocab, "model.override_vocab_size or model.tokenizer.vocab_size must say the vocabulary")
    devices = get("trainer.devices", 1)
    return Settings(
        name=str(get("name", "nemo")),
        dialect="nemo",
        transformer=_transformer(get, groups),
        groups=groups,
        ddp={
            "use_distributed_optimizer": sharded,
            "overlap_grad_reduce": sharded and get("model.optim.overlap_grad_sync", False),
            "overlap_param_gather": sharded and get("model.optim.overlap_param_sync", False),
            "num_distributed_optimizer_instances": groups["num_distributed_optimizer_instances"],
            "grad_reduce_in_fp32": get("model.optim.grad_sync_dtype", "fp32") in ("fp32", "float32"),
        },
        optimizer={
            "optimizer": "adam",
            "lr": get("model.optim.lr"),
            "weight_decay": get("model.optim.weight_decay", 0.01),
            "adam_beta1": get("model.optim.betas", [0.9, 0.999])[0],
            "adam_beta2": get("model.optim.betas", [0.9, 0.999])[1],
            "clip_grad": get("trainer.gradient_clip_val") or 0.0,
            "use_distributed_optimizer": sharded,
            "overlap_param_gather": sharded and get("model.optim.overlap_param_sync", False),
        },
        vocab_size=-(-vocab // divisor) * divisor,
        sequence_length=sequence,
        tied_embeddings=get("model.share_embeddings_and_output_weights", True),
        positions=learned,
        rotary_base=get("model.rotary_base", 10000),
        rotary_percent=get("model.rotary_percentage", 1.0),
        micro_batch=get("model.micro_batch_size"),
        global_batch=get("model.global_batch_size"),
        num_steps=get("trainer.max_steps"),
        seed=get("model.seed", 1234),
        data=get("model.data.data_impl", "mock"),
        transformer_engine=get("model.transformer_engine", False),
        num_ranks=devices * get("trainer.num_nodes", 1),
        devices=devices,
    )


class _Getter:
    """Reads dotted keys; null counts as absent, as in NeMo."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config

    def __call__(self, key: str, default: Any = None) -> Any:
        found = OmegaConf.select(self._config, key)
        if OmegaConf.is_config(found):
            found = OmegaConf.to_container(found, resolve=True)
        return default if found is None else found


def _virtual(get: _Getter) -> int | None:
    size = get("model.virtual_pipeline_model_parallel_size", 1)
    return size if size > 1 else None


def _transformer(get: _Getter, groups: dict[str, Any]) -> dict[str, Any]:
    tp, vpp = groups["tensor_model_parallel_size"], groups["virtual_pipeline_model_parallel_size"]
    activation = get("model.activation", "gelu")
    require(activation in ACTIVATIONS, "this activation is not trained", activation=activation)
    function, gated = ACTIVATIONS[activation]
    norm = str(get("model.normalization", "layernorm")).lower()
    require(norm in _NORMS, "this norm is not trained", normalization=norm)
    hidden, heads = get("model.hidden_size"), get("model.num_attention_heads")
    overlap_p2p = bool(vpp) and get("model.overlap_p2p_comm", False)
    return {
        "num_layers": get("model.num_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": get("model.ffn_hidden_size", 4 * hidden),
        "num_attention_heads": heads,
        "num_query_groups": get("model.num_query_groups", heads),
        "kv_channels": get("model.kv_channels", hidden // heads),
        "activation_func": function,
        "gated_linear_unit": gated,
        "normalization": _NORMS[norm],
        "layernorm_epsilon": get("model.layernorm_epsilon", 1e-5),
        "add_bias_linear": get("model.bias", True),
        "add_qkv_bias": get("model.qkv_bias", False),
        "qk_layernorm": get("model.qk_layernorm", False),
        "init_method_std": get("model.init_method_std", 0.02),
        "hidden_dropout": get("model.hidden_dropout", 0.1),
        "attention_dropout": get("model.attention_dropout", 0.1),
        **_precision(get),
        **{key: value for key, value in groups.items() if key not in ("order", _INSTANCES)},
        "sequence_parallel": get("model.sequence_parallel", False) and tp > 1,
        "tp_comm_overlap": get("model.ub_tp_comm_overlap", False) and tp > 1,
        "overlap_p2p_comm": overlap_p2p,
        "batch_p2p_comm": get("model.batch_p2p_comm", True) and not overlap_p2p,
        "num_layers_in_first_pipeline_stage": get("model.num_layers_in_first_pipeline_stage"),
        "num_layers_in_last_pipeline_stage": get("model.num_layers_in_last_pipeline_stage"),
        "account_for_embedding_in_pipeline_split": get(
            "model.account_for_embedding_in_pipeline_split", False
        ),
        "account_for_loss_in_pipeline_split": get("model.account_for_loss_in_pipeline_split", False),
        **_recompute(get),
        **_moe(get),
    }


_INSTANCES = "num_distributed_optimizer_instances"


def _precision(get: _Getter) -> dict[str, Any]:
    asked = str(get("model.precision") or get("trainer.precision"))
    require(asked in _PRECISIONS or asked in _FP32, "this precision is not trained", precision=asked)
    name = _PRECISIONS.get(asked)
    if name is not None:
        o2 = get("model.megatron_amp_O2", False)
        require(o2, "16-bit training needs megatron_amp_O2: autocast is not trained", precision=asked)
    return {"bf16": name == "bf16", "fp16": name == "fp16"}


def _recompute(get: _Getter) -> dict[str, Any]:
    granularity = get("model.activations_checkpoint_granularity")
    if granularity is None:
        return {}
    if granularity == "selective":
        return {
            "recompute_granularity": granularity,
            "recompute_modules": get("model.recompute_modules", ["core_attn"]),
        }
    return {
        "recompute_granularity": granularity,
        "recompute_method": get("model.activations_checkpoint_method"),
        "recompute_num_layers": get("model.activations_checkpoint_num_layers"),
    }


def _moe(get: _Getter) -> dict[str, Any]:
    experts = get("model.num_moe_experts")
    if experts is None:
        return {}
    capacity = get("model.moe_expert_capacity_factor")
    return moe_arguments(
        num_experts=experts,
        top_k=get("model.moe_router_topk", 2),
        ffn_hidden_size=get("model.moe_ffn_hidden_size"),
        shared_ffn_hidden_size=get("model.moe_shared_expert_intermediate_size"),
        layer_pattern=get("model.moe_layer_freq", 1),
        capacity_factor=capacity if capacity and capacity > 0 else None,
        aux_loss=get("model.moe_aux_loss_coeff", 0.0),
        dispatcher=get("model.moe_token_dispatcher_type"),
    )
