"""Parameter counts per rank against the modules that megatron-core itself builds, on meta tensors."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any
from unittest.mock import patch

import pytest

from nest_megatron.graph.templates import layer_graph
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import BlockChoice, Recompute
from nest_megatron.specs.model import ModelSpec, MoESpec
from tests.builders import make_job

pytestmark = pytest.mark.integration

DENSE = ModelSpec(
    name="dense",
    num_layers=2,
    hidden_size=512,
    num_attention_heads=16,
    num_query_groups=16,
    kv_channels=32,
    ffn_hidden_size=1536,
    vocab_size=32000,
    gated_mlp=True,
    rms_norm=False,
    linear_bias=True,
    learned_positions=True,
    max_position_embeddings=1024,
)
GROUPED = dataclasses.replace(
    DENSE, name="grouped", num_query_groups=8, linear_bias=False, learned_positions=False, gated_mlp=False
)
EXPERTS = dataclasses.replace(
    DENSE,
    name="experts",
    linear_bias=False,
    tied_embeddings=False,
    learned_positions=False,
    moe=MoESpec(
        num_experts=8, top_k=2, ffn_hidden_size=768, layer_pattern=(1, 1), shared_ffn_hidden_size=1024
    ),
)
MIXED = dataclasses.replace(EXPERTS, name="mixed", moe=dataclasses.replace(EXPERTS.moe, layer_pattern=(0, 1)))


def megatron_parameters(model: ModelSpec, tp: int, ep: int, etp: int) -> tuple[int, int]:
    """Return (all, expert) parameters of rank 0 as megatron-core builds the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_layer_local_spec,
        )
        from megatron.core.transformer.transformer_config import TransformerConfig
        from torch.testing._internal.distributed.fake_pg import FakeStore

        moe: dict[str, Any] = {}
        if model.moe is not None:
            moe = {
                "num_moe_experts": model.moe.num_experts,
                "moe_router_topk": model.moe.top_k,
                "moe_ffn_hidden_size": model.moe.ffn_hidden_size,
                "moe_shared_expert_intermediate_size": model.moe.shared_ffn_hidden_size,
                "moe_layer_freq": list(model.moe.layer_pattern),
                "moe_token_dispatcher_type": "alltoall",
            }
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=etp,
                create_gloo_process_groups=False,
            )
            config = TransformerConfig(
                num_layers=model.num_layers,
                hidden_size=model.hidden_size,
                num_attention_heads=model.num_attention_heads,
                num_query_groups=model.num_query_groups,
                ffn_hidden_size=model.ffn_hidden_size,
                gated_linear_unit=model.gated_mlp,
                activation_func=torch.nn.functional.silu,
                add_bias_linear=model.linear_bias,
                tensor_model_parallel_size=tp,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=etp,
                use_cpu_initialization=True,
                perform_initialization=False,
                gradient_accumulation_fusion=False,
                bias_activation_fusion=False,
                **moe,
            )
            spec = (
                get_gpt_layer_local_spec()
                if model.moe is None
                else get_gpt_decoder_block_spec(config, use_transformer_engine=False)
            )
            # A shared expert makes a CUDA stream when it is built; counting its parameters needs none.
            with torch.device("meta"), patch.object(torch.cuda, "Stream"):
                module = GPTModel(
                    config,
                    spec,
                    vocab_size=model.padded_vocab_size(tp),
                    max_sequence_length=1024,
                    share_embeddings_and_output_weights=model.tied_embeddings,
                    position_embedding_type="learned_absolute" if model.learned_positions else "rope",
                )
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name and "shared" not in name)
    return sum(sizes.values()), experts


def our_parameters(job: TrainJob, tp: int, ep: int, etp: int) -> tuple[int, int]:
    """Return (all, expert) parameters of rank 0 by the templates."""
    choice = BlockChoice(
        tp=tp, sequence_parallel=False, cp=1, ep=ep, etp=etp, micro_batch=1, recompute=Recompute()
    )
    graph, model = layer_graph(job, choice), job.model
    dense = sum(graph.blocks[kind].dense_parameters for kind in model.layer_kinds)
    experts = sum(graph.blocks[kind].expert_parameters for kind in model.layer_kinds)
    head = graph.head.dense_parameters
    if model.tied_embeddings:
        head -= next(op.parameters for op in graph.head.operators if op.name == "output_layer")
    return dense + experts + graph.embedding.dense_parameters + head, experts


@pytest.mark.parametrize("model", [DENSE, GROUPED], ids=lambda model: model.name)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_dense_models(model: ModelSpec, tp: int) -> None:
    """Dense and grouped-query models hold what megatron-core's own modules hold, for every tp."""
    assert our_parameters(make_job(model=model), tp, 1, tp) == megatron_parameters(model, tp, 1, tp)


@pytest.mark.parametrize("model", [EXPERTS, MIXED], ids=lambda model: model.name)
@pytest.mark.parametrize(
    ("tp", "ep", "etp"), list(itertools.product([1, 2, 4, 8], [1, 2, 4, 8], [1, 2, 4, 8]))
)
def test_expert_models(model: ModelSpec, tp: int, ep: int, etp: int) -> None:
    """Models with routed and shared experts match for every tp, ep and etp in {1, 2, 4, 8}."""
    assert our_parameters(make_job(model=model), tp, ep, etp) == megatron_parameters(model, tp, ep, etp)
