"""Initial values that depend on the parameter's name and the seed, never on the layout.

Every rank draws the whole parameter and keeps its slice, so that all layouts start from the same model.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch
from megatron.core import parallel_state

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"local_experts\.(\d+)\.")
#: Projections whose spread shrinks with depth (Megatron's ``output_layer_init_method``).
_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")


def fill(chunk: Any, config: Any, *, seed: int) -> None:
    """Set every parameter of a model chunk.

    Norm weights are one, biases zero, matrices normal with ``config.init_method_std``, divided by
    sqrt(2 * layers) for projections back into the residual stream.
    """
    numbers = {index: layer.layer_number - 1 for index, layer in enumerate(chunk.decoder.layers)}
    with torch.no_grad():
        for name, parameter in chunk.named_parameters():
            whole_name = _whole_name(name, numbers, config)
            if chunk.share_embeddings_and_output_weights and whole_name == "output_layer.weight":
                whole_name = "embedding.word_embeddings.weight"  # the copy on the last stage
            parameter.copy_(_slice(whole_name, parameter, config, seed))


def _whole_name(name: str, numbers: dict[int, int], config: Any) -> str:
    """Return the name with the layer's and the expert's number in the whole model."""
    name = _LAYER.sub(lambda found: f"decoder.layers.{numbers[int(found[1])]}.", name)
    held = (config.num_moe_experts or 1) // parallel_state.get_expert_model_parallel_world_size()
    first = held * parallel_state.get_expert_model_parallel_rank()
    return _EXPERT.sub(lambda found: f"local_experts.{first + int(found[1])}.", name)


def _slice(name: str, parameter: torch.Tensor, config: Any, seed: int) -> torch.Tensor:
    """Return this rank's part of the parameter called ``name``."""
    size, rank = 1, 0
    if getattr(parameter, "tensor_model_parallel", False):
        if "local_experts" in name:
            size = parallel_state.get_expert_tensor_parallel_world_size()
            rank = parallel_state.get_expert_tensor_parallel_rank()
        else:
            size = parallel_state.get_tensor_model_parallel_world_size()
            rank = parallel_state.get_tensor_model_parallel_rank()
    dim = parameter.partition_dim if size > 1 else 0
    shape = list(parameter.shape)
    shape[dim] *= size
    whole = _whole(name, shape, config, seed)
    if config.gated_linear_unit and "linear_fc1" in name:
        # Each rank holds a slice of the gate above the same slice of the up projection.
        gate, up = whole.chunk(2, dim=dim)
        return torch.cat([gate.chunk(size, dim=dim)[rank], up.chunk(size, dim=dim)[rank]], dim=dim)
    return whole.chunk(size, dim=dim)[rank]


def _whole(name: str, shape: list[int], config: Any, seed: int) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape) if "norm" in name and name.endswith("weight") else torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    std = config.init_method_std
    if name.endswith(_OUTPUTS):
        std /= (2 * config.num_layers) ** 0.5
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
