"""``--yaml-cfg`` files: flat keys beside the sections ``language_model`` and ``model_parallel``.

Source: ``megatron/training/yaml_arguments.py`` of NVIDIA/Megatron-LM.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from nest_megatron.dialects.megatron_arguments import Given
from nest_megatron.dialects.megatron_flags import BY_FIELD

MODEL = "language_model"
PARALLEL = "model_parallel"

#: Names of megatron-core's dataclasses for fields that Megatron-LM's flags call otherwise.
_RENAMED = {
    "num_moe_experts": "num_experts",
    "bias_activation_fusion": "bias_gelu_fusion",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "fp8_param": "fp8_param_gather",
}
#: Words of ``activation_func`` -> the switch that means the same.
_ACTIVATIONS = {"swiglu": "swiglu", "squaredrelu": "squared_relu"}
#: Fields of ModelParallelConfig: where a new key belongs; everything else of a layout is flat.
_PARALLEL_FIELDS = frozenset(
    {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
        "tp_comm_overlap",
        "overlap_p2p_comm",
        "microbatch_group_size_per_vp_stage",
        "defer_embedding_wgrad_compute",
        "overlap_moe_expert_parallel_comm",
    }
)
_MODEL_FIELDS = frozenset(
    {
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "distribute_saved_activations",
    }
)


def is_yaml_cfg(plain: Mapping[str, Any]) -> bool:
    """Return whether a configuration has the two sections of a ``--yaml-cfg`` file."""
    return all(isinstance(plain.get(section), Mapping) for section in (MODEL, PARALLEL))


def fields_of(plain: Mapping[str, Any]) -> dict[str, Given]:
    """Return field -> argument; a section's key wins over a flat one, null counts as absent."""
    given: dict[str, Given] = {}
    sections: tuple[tuple[str, Mapping[str, Any]], ...] = (
        ("", plain),
        (f"{MODEL}.", plain[MODEL]),
        (f"{PARALLEL}.", plain[PARALLEL]),
    )
    for prefix, section in sections:
        for name, value in section.items():
            field = _RENAMED.get(str(name), str(name))
            if field in BY_FIELD and value is not None:
                given[field] = Given(_literal(value), f"{prefix}{name}")
    activation = str(plain[MODEL].get("activation_func", ""))
    if activation in _ACTIVATIONS:
        given[_ACTIVATIONS[activation]] = Given(True, f"{MODEL}.activation_func")
    if plain[MODEL].get("num_query_groups") is not None:
        # The file builds TransformerConfig itself, where the number alone counts.
        given["group_query_attention"] = Given(True, f"{MODEL}.num_query_groups")
    return given


def _literal(value: Any) -> Any:
    """Return None-like words of YAML 1.1 readers as they are; tuples in text become lists."""
    if isinstance(value, str) and value.startswith("("):
        try:
            return list(ast.literal_eval(value))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return value
    return value


def spelling() -> dict[str, str]:
    """Return field -> dotted key of fields that are absent."""
    found = {name: name for name in BY_FIELD}
    found |= {name: f"{PARALLEL}.{name}" for name in _PARALLEL_FIELDS}
    return found | {name: f"{MODEL}.{name}" for name in _MODEL_FIELDS}
