"""megatron-core itself as judge of layouts.

A layout is accepted when ``TransformerConfig`` can be constructed, every chunk would be built with the layer
count the layout says, the micro-batch calculator takes every batch size, and ``initialize_model_parallel``
succeeds on a fake process group for the first, a middle and the last rank.
"""

from __future__ import annotations

import logging
import sys
import warnings
from functools import cache
from typing import Any

from nest_megatron.rules.layers import split_form
from nest_megatron.rules.versions import facts_for
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Recompute
from nest_megatron.specs.model import ModelSpec

#: Rule -> why megatron-core 0.16.1 accepts what it refuses at construction time.
ORACLE_CANNOT_SEE: dict[str, str] = {
    "grid.derived_degrees": "dp and edp are no arguments, Megatron derives them",
    "grid.order_offered": "whether a dialect has a key for the order is not Megatron's to know",
    "batch.same_global_batch": "the global batch is an argument, there is nothing to compare it with",
    "batch.interleaved_groups": "checked by the interleaved schedule in the first training step",
    "layers.two_stage_interleaving": "checked by megatron.training's arguments only; trains silently wrong",
    "layers.encoder_decoder": "pretrain_t5.py refuses it before it builds the model",
    "layers.no_empty_chunk": "accepted where embedding and loss count as layers; here the string only",
    "attention.widths": "checked when the linear layers are built",
    "attention.sequence_over_context": "TransformerConfig does not know the sequence length",
    "attention.sequence_over_tensor": "TransformerConfig does not know the sequence length",
    "attention.positions": "TransformerConfig does not know the sequence length",
    "attention.context_parallel": "the attention module is chosen when the model is built",
    "attention.latent_attention": "checked by megatron.training's arguments only",
    "moe.experts_divide": "checked when the MoE layer is built",
    "moe.experts_need_sequence_parallel": "a warning at construction; the MoE layer's first forward raises",
    "moe.expert_width": "checked when the expert layers are built",
    "moe.expert_tensor_parallel": "whether a dialect has a key for etp is not Megatron's to know",
    "moe.expert_gradients": "nothing checks it: the gradients are silently wrong",
    "sharding.sharding_offered": "an argument of DistributedDataParallel, made after the model",
    "sharding.instances_offered": "optimizer sharding is an argument of the optimizer, made after the model",
    "sharding.gradient_sharding_order": "a rule of Megatron-Bridge",
    "recompute.modules": "megatron-core takes an empty list of modules, which recomputes nothing",
    "recompute.method": "megatron.training's arguments refuse a method with selective; 0 layers never end",
    "recompute.uniform_divides": "the first forward indexes past the last layer of the chunk",
    "overlap.param_gather": "an argument of DistributedDataParallel, made after the model",
    "overlap.p2p": "megatron.training's arguments clear it",
    "overlap.tensor_parallel": "checked by megatron.training's arguments only",
    "overlap.expert_all_to_all": "0.16 ignores a recomputed moe module here, later releases refuse it",
}

#: What megatron-core raises at arguments it does not take.
REFUSALS = (ValueError, AssertionError, RuntimeError, NotImplementedError)


@cache
def _megatron() -> dict[str, Any]:
    """Import megatron-core once, quietly, and return the names the oracle uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from megatron.core import num_microbatches_calculator, parallel_state
        from megatron.core.transformer.enums import LayerType
        from megatron.core.transformer.transformer_block import get_num_layers_to_build
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
        from torch.testing._internal.distributed.fake_pg import FakeStore
    logging.getLogger("megatron").setLevel(logging.ERROR)
    return {
        "torch": torch,
        "state": parallel_state,
        "calculator": num_microbatches_calculator,
        "layer_type": LayerType,
        "build": get_num_layers_to_build,
        "config": TransformerConfig,
        "mla_config": MLATransformerConfig,
        "store": FakeStore,
    }


def accepted_by_megatron(job: TrainJob, layout: Layout) -> tuple[bool, str]:
    """Return whether megatron-core accepts ``layout``, and its words when it does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for judge in (_judge_config, _judge_batches):
            if objection := judge(job, layout):
                return False, objection
        objection = judge_groups(
            job.num_gpus,
            layout.tp,
            layout.pp,
            layout.vpp,
            layout.cp,
            layout.ep,
            layout.etp,
            layout.num_optimizer_instances,
            layout.order,
        )
    return not objection, objection


def _judge_config(job: TrainJob, layout: Layout) -> str:
    """Construct the TransformerConfig and count the layers each chunk would build."""
    mcore = _megatron()
    if len(layout.num_layers_per_chunk) != layout.pp * layout.vpp:
        return f"{len(layout.num_layers_per_chunk)} layer counts for {layout.pp * layout.vpp} chunks"
    kind = mcore["config"] if job.model.mla is None else mcore["mla_config"]
    try:
        config = kind(**_config_arguments(job, layout))
        return built_otherwise(config, job, layout)
    except REFUSALS as refusal:
        return f"TransformerConfig: {refusal}"


def built_otherwise(config: Any, job: TrainJob, layout: Layout) -> str:
    """Return the first chunk that megatron-core would build with another layer count than the layout says."""
    for chunk in range(layout.pp * layout.vpp):
        built = _layers_built(config, layout, chunk)
        if built != layout.num_layers_per_chunk[chunk]:
            return f"builds {built} layers in chunk {chunk}, not {layout.num_layers_per_chunk[chunk]}"
    if sum(layout.num_layers_per_chunk) != job.model.num_layers:
        return f"builds {sum(layout.num_layers_per_chunk)} of {job.model.num_layers} layers"
    return ""


def _layers_built(config: Any, layout: Layout, chunk: int) -> int:
    """Return how many layers megatron-core would build for one chunk."""
    mcore = _megatron()
    virtual, stage = divmod(chunk, layout.pp)
    if config.pipeline_model_parallel_layout is not None:
        pieces = config.pipeline_model_parallel_layout.layout[stage][virtual]
        return int(pieces.count(mcore["layer_type"].decoder))
    return int(mcore["build"](config, vp_stage=virtual if layout.vpp > 1 else None, pp_rank=stage))


def _judge_batches(job: TrainJob, layout: Layout) -> str:
    """Give every batch size of the job to the micro-batch calculator."""
    calculator = _megatron()["calculator"]
    dp = job.num_gpus // (layout.tp * layout.pp * layout.cp)
    sizes = {job.global_batch, *job.rampup_batches}
    if job.evaluation_batch is not None:
        sizes.add(job.evaluation_batch)
    try:
        for size in sorted(sizes):
            calculator.ConstantNumMicroBatchesCalculator(size, layout.micro_batch, dp, False, 1)
    except (*REFUSALS, ZeroDivisionError) as refusal:
        return f"num_microbatches_calculator: {refusal or type(refusal).__name__}"
    return ""


@cache
def judge_groups(
    world: int, tp: int, pp: int, vpp: int, cp: int, ep: int, etp: int, instances: int, order: str
) -> str:
    """Create every process group of three ranks on a fake process group."""
    mcore = _megatron()
    distributed, state, without_einops = mcore["torch"].distributed, mcore["state"], False
    hook = sys.excepthook
    for rank in sorted({0, world // 2, world - 1}):
        distributed.init_process_group("fake", store=mcore["store"](), rank=rank, world_size=world)
        try:
            state.initialize_model_parallel(
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
                context_parallel_size=cp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=etp,
                num_distributed_optimizer_instances=instances,
                order=order,
                create_gloo_process_groups=False,
            )
        except (*REFUSALS, ZeroDivisionError) as refusal:
            return f"initialize_model_parallel: {refusal or type(refusal).__name__}"
        except ImportError as missing:
            # Without einops the groups between optimizer instances cannot be formed; every check on their
            # number came before, the checks after it do not depend on them.
            if instances == 1 or "einops" not in str(missing):
                raise
            without_einops = True
        finally:
            state.destroy_model_parallel()
            distributed.destroy_process_group()
            sys.excepthook = hook  # every init_process_group wraps it once more
        if without_einops:
            return judge_groups(world, tp, pp, vpp, cp, ep, etp, 1, order)
    return ""


def _config_arguments(job: TrainJob, layout: Layout) -> dict[str, Any]:
    """Return the TransformerConfig arguments of a model under a layout."""
    torch, model = _megatron()["torch"], job.model
    functional = torch.nn.functional
    arguments = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "ffn_hidden_size": model.ffn_hidden_size,
        "gated_linear_unit": model.gated_mlp,
        "activation_func": functional.silu if model.gated_mlp else functional.gelu,
        "normalization": "RMSNorm" if model.rms_norm else "LayerNorm",
        "add_bias_linear": model.linear_bias,
        "add_qkv_bias": model.qkv_bias,
        "mtp_num_layers": model.mtp_num_layers or None,
        "bf16": job.recipe.compute_dtype != "fp32",
        "pipeline_dtype": torch.bfloat16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.sequence_parallel,
        "tp_comm_overlap": layout.overlap.tp_comm,
        "overlap_p2p_comm": layout.overlap.p2p,
        "batch_p2p_comm": not layout.overlap.p2p,
        "overlap_moe_expert_parallel_comm": layout.overlap.expert_all_to_all,
    }
    arguments |= _moe_arguments(model, layout) | _recompute_arguments(layout.recompute)
    arguments |= _split_arguments(job, layout)
    if model.mla is not None:
        arguments |= {
            "multi_latent_attention": True,
            "q_lora_rank": model.mla.q_lora_rank or None,
            "kv_lora_rank": model.mla.kv_lora_rank,
            "qk_head_dim": model.mla.qk_head_dim,
            "qk_pos_emb_head_dim": model.mla.qk_rope_head_dim,
            "v_head_dim": model.mla.v_head_dim,
        }
    return arguments


def _moe_arguments(model: ModelSpec, layout: Layout) -> dict[str, Any]:
    if model.moe is None:
        return {}
    moe = model.moe
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_router_pre_softmax": moe.top_k == 1,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_layer_freq": list(moe.layer_pattern),
        "moe_grouped_gemm": moe.grouped_gemm,
        "moe_token_dispatcher_type": moe.dispatcher,
        "moe_expert_capacity_factor": moe.capacity_factor,
        "expert_tensor_parallel_size": layout.etp,
    }


def _recompute_arguments(recompute: Recompute) -> dict[str, Any]:
    if recompute.granularity == "none":
        return {}
    return {
        "recompute_granularity": recompute.granularity,
        "recompute_method": None if recompute.method == "none" else recompute.method,
        "recompute_num_layers": recompute.num_layers or None,
        "recompute_modules": list(recompute.modules),
    }


def _split_arguments(job: TrainJob, layout: Layout) -> dict[str, Any]:
    """Return the keys a dialect would write for the layer split; none when it has no form for it."""
    counts = layout.num_layers_per_chunk
    form = split_form(job, layout, facts_for(job.megatron_core_version))
    if form == "ends":
        return {
            "num_layers_in_first_pipeline_stage": sum(counts[0 :: layout.pp]),
            "num_layers_in_last_pipeline_stage": sum(counts[layout.pp - 1 :: layout.pp]),
        }
    if form == "account":
        return {
            "account_for_embedding_in_pipeline_split": counts[0] < max(counts),
            "account_for_loss_in_pipeline_split": counts[-1] < max(counts),
        }
    if form == "string":
        rows = [["decoder"] * count for count in counts]
        rows[0].insert(0, "embedding")
        rows[-1] += ["mtp"] * job.model.mtp_num_layers + ["loss"]
        return {"pipeline_model_parallel_layout": rows}
    return {}
