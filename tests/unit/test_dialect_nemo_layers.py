"""Layers per chunk against megatron-core's own ``get_num_layers_to_build``."""

from __future__ import annotations

import pytest

from nest_megatron.dialects.nemo_layout import accounted_layers, uneven_layers

pytestmark = pytest.mark.integration


def megatron_chunks(*, pp: int, vpp: int, num_layers: int, **split: object) -> tuple[int, ...]:
    """Return layers per chunk in model order as megatron-core builds them, without process groups."""
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    torch = pytest.importorskip("torch")
    config = block.TransformerConfig(
        num_layers=num_layers,
        hidden_size=64,
        num_attention_heads=4,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=torch.bfloat16,
        **split,
    )
    return tuple(
        block.get_num_layers_to_build(config, vp_stage=stage if vpp > 1 else None, pp_rank=rank)
        for stage in range(vpp)
        for rank in range(pp)
    )


@pytest.mark.parametrize(
    ("pp", "vpp", "num_layers"), [(2, 1, 14), (4, 2, 30), (8, 2, 126), (8, 1, 62), (4, 4, 126)]
)
def test_counted_embedding_and_loss_match_megatron_core(pp: int, vpp: int, num_layers: int) -> None:
    """With both account flags, the chunks are those that megatron-core builds."""
    built = megatron_chunks(
        pp=pp,
        vpp=vpp,
        num_layers=num_layers,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    assert accounted_layers(pp=pp, vpp=vpp, num_layers=num_layers) == built
    assert sum(built) == num_layers


@pytest.mark.parametrize(
    ("pp", "vpp", "num_layers", "first", "last"),
    [
        (4, 1, 80, None, None),
        (4, 1, 80, 18, 20),
        (2, 1, 32, 14, None),
        (4, 2, 28, 4, None),
        (8, 1, 61, 4, 3),
        (4, 1, 31, None, 7),
    ],
)
def test_uneven_ends_match_megatron_core(
    pp: int, vpp: int, num_layers: int, first: int | None, last: int | None
) -> None:
    """With first and last keys, or neither, the chunks are those that megatron-core builds."""
    built = megatron_chunks(
        pp=pp,
        vpp=vpp,
        num_layers=num_layers,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    assert uneven_layers(pp=pp, vpp=vpp, num_layers=num_layers, first=first, last=last) == built
    assert sum(built) == num_layers
