"""Stack and model facts: ``conf/validation/stacks.yaml`` and ``conf/model/public.yaml``."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

from nest_megatron.dialects.profiles import CONF, load_yaml
from nest_megatron.errors import BadInputError
from nest_megatron.specs.model import BlockKind, MambaSpec, MLASpec, ModelSpec, MoESpec

_HYBRID: dict[str, BlockKind] = {"M": "mamba", "E": "experts", "*": "attention", "-": "mlp"}


@cache
def _data(folder: str, name: str) -> Any:
    return load_yaml(Path(CONF) / folder / name)


def stack_of(framework: str, text: str) -> dict[str, Any]:
    """Return the facts of the stack that ``framework`` names, with every matching variant laid over.

    Args:
        text: model name and notes of the record, where a source says which kernels ran.

    Raises:
        BadInputError: no stack matches.
    """
    for entry in _data("validation", "stacks.yaml")["stacks"]:
        if re.search(entry["match"], framework.lower()):
            found: dict[str, Any] = copy.deepcopy(entry)
            for variant in entry["variants"]:
                if re.search(variant["match"], f"{framework} | {text}".lower()):
                    _lay_over(found, variant)
            return found
    raise BadInputError("NEST-V02", f"the software stack {framework!r} is not known")


def _lay_over(base: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            base[key] = {**base[key], **value}
        elif key != "match":
            base[key] = value


def cluster_of(accelerator: str) -> str | None:
    """Return the shipped cluster for the accelerator text of a record, None when there is none."""
    for entry in _data("validation", "stacks.yaml")["clusters"]:
        if re.search(entry["match"], accelerator):
            return str(entry["cluster"])
    return None


def network_of(text: str) -> float | None:
    """Return the Gb/s per node of the machine that ``text`` (source and accelerator) names, or None."""
    for entry in _data("validation", "stacks.yaml")["machines"]:
        if re.search(entry["match"], text):
            return float(entry["network_Gb_per_s_per_node"])
    return None


def public_shape(name: str) -> dict[str, Any]:
    """Return the shape entry of the public model that ``name`` names, empty when none matches."""
    for entry in _data("model", "public.yaml")["models"]:
        if re.search(entry["match"], name.lower()):
            return dict(entry)
    return {}


def build_model(shape: dict[str, Any], *, sequence: int) -> ModelSpec:
    """Return the ModelSpec of a merged shape entry.

    Raises:
        KeyError: a size that every model needs is missing.
        ValueError: a size is not positive.
    """
    hidden, heads = int(shape["hidden"]), int(shape["heads"])
    pattern = shape.get("pattern")
    hybrid = tuple(_HYBRID[letter] for letter in pattern) if pattern else ()
    num_layers = len(hybrid) or int(shape["num_layers"])
    positions = int(shape.get("learned_positions", 0))
    dropout = float(shape.get("dropout", 0.0))
    mla, mamba = shape.get("mla"), shape.get("mamba")
    return ModelSpec(
        name=str(shape.get("name", "")),
        num_layers=num_layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=int(shape.get("kv_heads") or heads),
        kv_channels=int(shape.get("head_dim") or hidden // heads),
        ffn_hidden_size=int(shape.get("ffn") or 4 * hidden),
        vocab_size=int(shape["vocab"]),
        gated_mlp=bool(shape.get("gated", True)),
        max_position_embeddings=max(positions, sequence) if positions else 0,
        learned_positions=bool(positions),
        tied_embeddings=bool(shape.get("tied", False)),
        rms_norm=bool(shape.get("rms_norm", True)),
        linear_bias=bool(shape.get("bias", False)),
        qk_norm=bool(shape.get("qk_norm", False)),
        hidden_dropout=dropout,
        attention_dropout=dropout,
        attention_window=int(shape.get("window", 0)),
        windowed_share=float(shape.get("windowed_share", 0.0)),
        mtp_num_layers=int(shape.get("mtp", 0)),
        moe=_moe(shape, num_layers),
        mla=MLASpec(
            kv_lora_rank=mla["kv_lora"],
            qk_head_dim=mla["qk"],
            qk_rope_head_dim=mla["rope"],
            v_head_dim=mla["v"],
            q_lora_rank=mla["q_lora"],
        )
        if mla
        else None,
        mamba=MambaSpec(
            num_heads=mamba["heads"],
            head_dim=mamba["head_dim"],
            state_dim=mamba["state"],
            num_groups=mamba["groups"],
        )
        if mamba
        else None,
        hybrid_layers=hybrid,
    )


def _moe(shape: dict[str, Any], num_layers: int) -> MoESpec | None:
    if not shape.get("experts"):
        return None
    dense, every = int(shape.get("dense_first", 0)), int(shape.get("moe_every", 1))
    pattern = [int(i >= dense and (i + 1) % every == 0) for i in range(num_layers)]
    return MoESpec(
        num_experts=int(shape["experts"]),
        top_k=int(shape["top_k"]),
        ffn_hidden_size=int(shape.get("moe_ffn") or shape["ffn"]),
        shared_ffn_hidden_size=int(shape.get("shared_ffn", 0)),
        layer_pattern=tuple(pattern),
        capacity_factor=shape.get("capacity"),
        grouped_gemm=bool(shape.get("grouped_gemm", True)),
        dispatcher=str(shape.get("dispatcher", "alltoall")),
        group_topk=shape.get("group_topk"),
    )
