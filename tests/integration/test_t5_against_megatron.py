"""Encoder-decoder templates against the T5 modules of megatron-core: parameters and saved bytes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from nest_megatron.graph.templates import layer_graph
from nest_megatron.specs.job import Kernels, TrainJob
from nest_megatron.specs.layout import BlockChoice, Recompute
from nest_megatron.specs.model import DecoderSpec, ModelSpec
from tests.builders import make_job

pytestmark = pytest.mark.integration

ENCODER_TOKENS, DECODER_TOKENS, MICRO_BATCH = 256, 64, 2
#: What megatron-core keeps beside the template's bytes: the statistics of the norms (mcore_cpu.md section 4).
EXTRA = 0.002


def t5(**changes: Any) -> ModelSpec:
    """A T5 with heads that do not fill the hidden size, as in the public 11B shape."""
    fields: dict[str, Any] = {
        "name": "t5",
        "num_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "kv_channels": 64,
        "ffn_hidden_size": 1280,
        "vocab_size": 32000,
        "max_position_embeddings": ENCODER_TOKENS,
        "learned_positions": True,
        "decoder": DecoderSpec(num_layers=2, sequence_length=DECODER_TOKENS),
    }
    return ModelSpec(**fields | changes)


@contextmanager
def megatron(model: ModelSpec, tp: int) -> Iterator[SimpleNamespace]:
    """Give the model's TransformerConfig and T5's local layer specs, inside a fake group of ``tp`` ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from megatron.core import parallel_state
        from megatron.core.models.T5 import t5_spec
        from megatron.core.transformer.transformer_config import TransformerConfig
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
        try:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tp, create_gloo_process_groups=False
            )
            config = TransformerConfig(
                num_layers=model.decoder.num_layers if model.decoder else 0,
                hidden_size=model.hidden_size,
                num_attention_heads=model.num_attention_heads,
                kv_channels=model.kv_channels,
                ffn_hidden_size=model.ffn_hidden_size,
                add_bias_linear=model.linear_bias,
                tensor_model_parallel_size=tp,
                params_dtype=torch.bfloat16,
                bf16=True,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                use_cpu_initialization=True,
                perform_initialization=False,
                gradient_accumulation_fusion=False,
                bias_activation_fusion=False,
                attention_softmax_in_fp32=False,
                masked_softmax_fusion=False,
            )
            yield SimpleNamespace(torch=torch, config=config, spec=t5_spec)
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def megatron_parameters(model: ModelSpec, tp: int) -> int:
    """Return the parameters of one rank of megatron-core's T5Model."""
    with megatron(model, tp) as core:
        from megatron.core.models.T5 import T5Model
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        assert model.decoder is not None
        layers = (core.spec.encoder_model_with_local_spec(), core.spec.decoder_model_with_local_spec())
        encoder, decoder = (
            TransformerBlockSubmodules([layer] * model.decoder.num_layers, layer_norm=core.spec.LNImpl)
            for layer in layers
        )
        with core.torch.device("meta"):
            module = T5Model(
                core.config,
                core.config,
                encoder,
                decoder,
                vocab_size=model.padded_vocab_size(tp),
                max_sequence_length=model.max_position_embeddings,
                share_embeddings_and_output_weights=model.tied_embeddings,
                position_embedding_type="learned_absolute",
            )
        return sum(parameter.numel() for parameter in module.parameters())


def job_of(model: ModelSpec) -> TrainJob:
    """Return a job with megatron-core's local, unfused kernels."""
    kernels = Kernels(attention="unfused", transformer_engine=False)
    return make_job(model=model, sequence_length=ENCODER_TOKENS, kernels=kernels)


def choice_of(tp: int) -> BlockChoice:
    """Return the block choice of ``tp`` without anything else."""
    return BlockChoice(
        tp=tp,
        sequence_parallel=False,
        cp=1,
        ep=1,
        etp=tp,
        micro_batch=MICRO_BATCH,
        recompute=Recompute(),
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_parameters(tp: int, bias: bool, tied: bool) -> None:
    """Both stacks, the shared embedding, both final norms and the logits' bias hold what T5Model holds."""
    model = t5(linear_bias=bias, tied_embeddings=tied)
    graph = layer_graph(job_of(model), choice_of(tp))
    layers = sum(graph.blocks[kind].dense_parameters for kind in model.layer_kinds)
    head = graph.head.dense_parameters
    if tied:
        head -= next(op.parameters for op in graph.head.operators if op.name == "output_layer")
    assert layers + graph.embedding.dense_parameters + head == megatron_parameters(model, tp)


def saved_bytes(model: ModelSpec, kind: str) -> int:
    """Return the bytes that one real layer on the CPU keeps for backward, without parameters and masks."""
    with megatron(model, 1) as core:
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        from megatron.core.transformer.spec_utils import build_module

        torch = core.torch
        spec = getattr(core.spec, f"{kind}_model_with_local_spec")()
        layer = build_module(spec, config=core.config, layer_number=1).to(torch.bfloat16)
        own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        found: dict[int, int] = {}

        def keep(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        def hidden(tokens: int) -> Any:
            shape = (tokens, MICRO_BATCH, model.hidden_size)
            return torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)

        def mask(queries: int, keys: int) -> Any:
            made = torch.zeros(MICRO_BATCH, 1, queries, keys, dtype=torch.bool)
            own.add(made.untyped_storage().data_ptr())
            return made

        decoder = kind == "decoder"
        tokens = DECODER_TOKENS if decoder else ENCODER_TOKENS
        # The scores' buffer asks for a CUDA device, dropout (off here) for its random state.
        on_cpu = patch.object(torch.cuda, "current_device", return_value="cpu")
        no_dropout = patch.object(CudaRNGStatesTracker, "fork", nullcontext)
        masks = mask(tokens, tokens), mask(tokens, ENCODER_TOKENS)
        with on_cpu, no_dropout, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = layer(
                hidden(tokens),
                attention_mask=masks[0],
                context=hidden(ENCODER_TOKENS) if decoder else None,
                context_mask=masks[1] if decoder else None,
            )
            total = sum(found.values())
        del output
        return total


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_saved_bytes(kind: str) -> None:
    """A layer keeps what the template says; the encoder's output, which all decoder layers share, apart."""
    model = t5(linear_bias=False)
    graph = layer_graph(job_of(model), choice_of(1))
    ours = sum(block.saved_bytes for name, block in graph.blocks.items() if name == kind)
    shared = 2 * MICRO_BATCH * ENCODER_TOKENS * model.hidden_size if kind == "decoder" else 0
    assert saved_bytes(model, kind) - shared == pytest.approx(ours, rel=EXTRA)
