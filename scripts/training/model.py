"""Build the model chunks of one rank from megatron-core's own modules."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from .initial import fill
from .modules import AllGatherAttention, Norm
from .settings import Settings, refusals_of_megatron, require

_FUNCTIONS = {"gelu": functional.gelu, "silu": functional.silu, "squared_relu": squared_relu}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def uses_transformer_engine(settings: Settings) -> bool:
    """Return whether the run asks for Transformer Engine and can have it."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    return settings.transformer_engine and installed and torch.cuda.is_available()


def transformer_config(settings: Settings) -> TransformerConfig:
    """Return megatron-core's configuration.

    Raises:
        BadInputError: tensor parallel overlap without Transformer Engine, which implements it, or a layout
            that megatron-core refuses.
    """
    engine = uses_transformer_engine(settings)
    given = dict(settings.transformer)
    require(engine or not given["tp_comm_overlap"], "tensor parallel overlap needs Transformer Engine")
    dtype = DTYPES[settings.precision]
    given |= {"activation_func": _FUNCTIONS[given["activation_func"]], "params_dtype": dtype}
    if settings.groups["pipeline_model_parallel_size"] > 1:
        given["pipeline_dtype"] = dtype
    cuda = torch.cuda.is_available()
    with refusals_of_megatron():
        return TransformerConfig(
            **given,
            use_cpu_initialization=not cuda,
            perform_initialization=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=engine,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            # Gloo sends from the tensor itself, later: freeing its data early would send rubbish.
            deallocate_pipeline_outputs=cuda,
        )


def build_chunks(settings: Settings, config: TransformerConfig) -> list[GPTModel]:
    """Return this rank's model chunks with the initial values of ``initial.fill``."""
    vpp = settings.groups["virtual_pipeline_model_parallel_size"] or 1
    chunks = []
    default = torch.get_default_dtype()
    # Some tables are made in the default dtype; fp32 ones would turn every activation to fp32.
    torch.set_default_dtype(DTYPES[settings.precision])
    try:
        for stage in range(vpp):
            chunks.append(_chunk(settings, config, stage if vpp > 1 else None))
    finally:
        torch.set_default_dtype(default)
    for chunk in chunks:
        fill(chunk, config, seed=settings.seed)
        chunk.cuda()
    return chunks


def _chunk(settings: Settings, config: TransformerConfig, stage: int | None) -> GPTModel:
    engine = uses_transformer_engine(settings)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=engine, vp_stage=stage)
    if not engine:
        spec.layer_specs = [_with_own_modules(layer) for layer in spec.layer_specs]
        spec.layer_norm = Norm
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=settings.vocab_size,
        max_sequence_length=settings.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        parallel_output=True,
        share_embeddings_and_output_weights=settings.tied_embeddings,
        position_embedding_type=settings.positions,
        rotary_percent=settings.rotary_percent,
        rotary_base=settings.rotary_base,
        vp_stage=stage,
    )


def _with_own_modules(layer: ModuleSpec) -> ModuleSpec:
    """Return the layer with our norm and attention instead of megatron-core's local ones."""
    parts = layer.submodules
    attention = parts.self_attention
    changes: dict[str, Any] = {"core_attention": AllGatherAttention}
    for name in ("q_layernorm", "k_layernorm"):
        if "Identity" not in getattr(attention.submodules, name).__name__:
            changes[name] = Norm
    attention = replace(attention, submodules=replace(attention.submodules, **changes))
    parts = replace(parts, input_layernorm=Norm, pre_mlp_layernorm=Norm, self_attention=attention)
    return replace(layer, submodules=parts)


def layers_per_chunk(chunks: list[Any]) -> tuple[int, ...]:
    """Return the number of transformer layers that each chunk of this rank holds."""
    return tuple(len(chunk.decoder.layers) for chunk in chunks)


def parallel_groups() -> Mapping[str, tuple[int, ...]]:
    """Return the ranks of every group that this rank is in, by the names of ``cluster.rank_groups``."""
    state = parallel_state
    groups = {
        "tp": state.get_tensor_model_parallel_group(),
        "cp": state.get_context_parallel_group(),
        "pp": state.get_pipeline_model_parallel_group(),
        "dp": state.get_data_parallel_group(),
        "dp_cp": state.get_data_parallel_group(with_context_parallel=True),
        "tp_cp": state.get_tensor_and_context_parallel_group(),
        "tp_pp": state.get_model_parallel_group(),
        "ep": state.get_expert_model_parallel_group(),
        "etp": state.get_expert_tensor_parallel_group(),
        "edp": state.get_expert_data_parallel_group(),
        "etp_ep": state.get_expert_tensor_and_model_parallel_group(),
    }
    ranks = torch.distributed.get_process_group_ranks
    return {name: tuple(ranks(group)) for name, group in groups.items()}
