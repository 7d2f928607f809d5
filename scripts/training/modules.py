"""What megatron-core leaves to Transformer Engine: norms under sequence parallelism, and attention."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional


class Norm:
    """Builds LayerNorm or RMSNorm and marks its parameters as replicated under sequence parallelism.

    megatron-core sums the gradients of marked parameters over the tensor parallel ranks; its own local norm
    refuses sequence parallelism.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> torch.nn.Module:
        """Return the norm that ``config.normalization`` names, over ``hidden_size`` elements."""
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class AllGatherAttention(MegatronModule):
    """Causal attention that gathers keys and values over the context parallel ranks.

    Each context parallel rank i of n holds the chunks i and 2n-1-i of 2n equal chunks of the sequence, as
    ``megatron.core.utils.get_batch_on_this_cp_rank`` deals them.  Queries stay; keys and values of all ranks
    are gathered and put into sequence order, and the backward pass scatters their gradients.
    """

    def __init__(self, config: Any, layer_number: int, **kwargs: Any) -> None:
        """Take what megatron-core hands to every core attention; only the softmax scale matters here."""
        super().__init__(config=config)
        self.softmax_scale = kwargs.get("softmax_scale")
        self.dropout = config.attention_dropout
        self.current_max_attn_logits = None

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Attend causally.

        Args:
            query: (s/cp, b, heads, d); ``key`` and ``value``: (s/cp, b, groups, d), of this rank.

        Returns:
            (s/cp, b, heads * d), in the order of ``query``.
        """
        size = parallel_state.get_context_parallel_world_size()
        mask = None
        if size > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = (_in_sequence_order(x, size, group) for x in (key, value))
            mask = _causal_mask(len(query), size, group.rank(), query.device)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def _chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return the two of 2 * ``size`` chunks that a context parallel rank holds."""
    return rank, 2 * size - 1 - rank


def _in_sequence_order(local: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """Gather (s/cp, ...) of all ranks into (s, ...) in sequence order."""
    gathered = gather_from_sequence_parallel_region(local, group=group)
    held = [chunk for rank in range(size) for chunk in _chunks_of(rank, size)]
    place = sorted(range(2 * size), key=held.__getitem__)
    chunks = gathered.unflatten(0, (2 * size, -1))
    return chunks[torch.tensor(place, device=local.device)].flatten(0, 1)


def _causal_mask(length: int, size: int, rank: int, device: torch.device) -> torch.Tensor:
    """Return (s/cp, s): which keys each query of this rank may see."""
    chunk = length // 2
    steps = torch.arange(chunk, device=device)
    position = torch.cat([index * chunk + steps for index in _chunks_of(rank, size)])
    return position[:, None] >= torch.arange(length * size, device=device)[None, :]
