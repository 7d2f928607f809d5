"""Shapes of the public models that the cases name, for what a record itself does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nest_megatron.specs.model import MLASpec, ModelSpec, MoESpec


class NotComputable(Exception):
    """A record lacks a fact, or holds one that nothing here can express; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicModel:
    """What a public source says about a model or its family.

    Args:
        shape: keys of a record's ``model`` entry, used where the record has none.
        traits: fields of ModelSpec that a record never has.
        context: tokens of a training sequence.
        unmodelled: a part that ModelSpec cannot express; such a model has rules but no memory.
    """

    source: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    traits: Mapping[str, Any] = field(default_factory=dict)
    context: int = 4096
    unmodelled: str = ""


_LLAMA = {"rms_norm": True, "linear_bias": False, "tied_embeddings": False}
_GPT = {"learned_positions": True, "max_position_embeddings": 2048}
_QWEN_MOE = {**_LLAMA, "qk_norm": True}
_DEEPSEEK_MLA = MLASpec(
    kv_lora_rank=512, qk_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536
)
_DEEPSEEK = {**_LLAMA, "mla": _DEEPSEEK_MLA}
_LINEAR = "linear-attention layers"
_SLIME = "THUDM/slime scripts/models"


def _qwen35(
    layers: int, hidden: int, heads: int, experts: int, topk: int, ffn: int, source: str
) -> PublicModel:
    shape = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": 2,
        "head_dim": 256,
        "moe_ffn": ffn,
        "experts": experts,
        "topk": topk,
        "shared_experts": 1,
        "vocab": 248320,
        "act": "swiglu",
    }
    return PublicModel(source=source, shape=shape, traits=_QWEN_MOE, unmodelled=_LINEAR)


#: Start of a record's model name -> public facts; the longest start wins.
PUBLIC: dict[str, PublicModel] = {
    "llama-": PublicModel(source="arXiv:2302.13971", traits=_LLAMA, context=2048),
    "llama2-": PublicModel(source="arXiv:2307.09288", traits=_LLAMA, context=4096),
    "llama3-": PublicModel(source="arXiv:2407.21783", traits=_LLAMA, context=8192),
    "qwen2.5-": PublicModel(source="arXiv:2412.15115", traits={**_LLAMA, "qkv_bias": True}, context=4096),
    "qwen3-": PublicModel(source="arXiv:2505.09388", traits=_QWEN_MOE, context=4096),
    "qwen3-next-": PublicModel(source="Qwen3-Next model card", traits=_QWEN_MOE, unmodelled=_LINEAR),
    "qwen3.5-35b-a3b": _qwen35(40, 2048, 16, 256, 8, 512, f"{_SLIME}/qwen3.5-35B-A3B.sh"),
    "qwen3.5-vl-35b-a3b": _qwen35(40, 2048, 16, 256, 8, 512, f"{_SLIME}/qwen3.5-35B-A3B.sh"),
    "qwen3.5-vl-122b-a10b": _qwen35(48, 3072, 32, 256, 8, 1024, "Qwen3.5-122B-A10B model card"),
    "qwen3.5-vl-397b": _qwen35(60, 4096, 32, 512, 10, 1024, f"{_SLIME}/qwen3.5-397B-A17B.sh"),
    "glm-4.7-30b-a3b": PublicModel(
        source="GLM-4.7-Flash model card",
        shape={
            "layers": 47,
            "first_dense": 1,
            "hidden": 2048,
            "heads": 20,
            "moe_ffn": 1536,
            "dense_ffn": 10240,
            "experts": 64,
            "topk": 4,
            "shared_experts": 1,
            "vocab": 154880,
            "act": "swiglu",
        },
        traits={
            **_LLAMA,
            "mla": MLASpec(
                kv_lora_rank=512, qk_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, q_lora_rank=768
            ),
        },
    ),
    "deepseek-v2": PublicModel(source="arXiv:2405.04434", traits=_DEEPSEEK, shape={"act": "swiglu"}),
    "deepseek-v3": PublicModel(source="arXiv:2412.19437", traits=_DEEPSEEK, shape={"act": "swiglu"}),
    "moonlight-16b": PublicModel(
        source="arXiv:2502.16982",
        shape={"act": "swiglu"},
        traits={
            **_LLAMA,
            "mla": MLASpec(kv_lora_rank=512, qk_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        },
    ),
    "gpt-neox-20b": PublicModel(source="arXiv:2204.06745", traits={"tied_embeddings": False}, context=2048),
    # ALiBi adds no table; the word embedding is shared and followed by a norm.
    "bloom-": PublicModel(source="arXiv:2211.05100", context=2048),
    "gpt-200b": PublicModel(source="bigscience tr11 chronicles: same family as BLOOM", context=2048),
    "gpt2-": PublicModel(
        source="GPT-2 paper, smallest model",
        shape={"hidden": 768, "heads": 12, "vocab": 50257, "act": "gelu"},
        traits={"learned_positions": True, "max_position_embeddings": 1024},
        context=1024,
    ),
    "gpt-13b": PublicModel(
        source="arXiv:2005.14165, table 2.1, with 40 heads of 128",
        shape={"layers": 40, "hidden": 5120, "heads": 40, "vocab": 50257, "act": "gelu"},
        traits=_GPT,
        context=2048,
    ),
    "gpt3-13b": PublicModel(
        source="arXiv:2005.14165, table 2.1, with 40 heads of 128",
        shape={"layers": 40, "hidden": 5120, "heads": 40, "vocab": 50257, "act": "gelu"},
        traits=_GPT,
        context=2048,
    ),
}

#: Names that a record uses when its point holds for any model, or its model is not stated.
UNNAMED = ("any", "unknown", "moe", "llama", "qwen3/gpt-oss (perf script)")


def public_model(name: str) -> PublicModel | None:
    """Return the public facts of a record's model, None when no entry matches."""
    starts = [start for start in PUBLIC if name.startswith(start)]
    return PUBLIC[max(starts, key=len)] if starts else None


def neutral_model(chunks: int) -> ModelSpec:
    """Return a model that no rule of the grid, the batch or the layers can object to.

    It stands in where a record does not name its model: rules that read the model cannot be judged then.
    """
    return ModelSpec(
        name="neutral",
        num_layers=4 * chunks,
        hidden_size=8192,
        num_attention_heads=64,
        num_query_groups=64,
        kv_channels=128,
        ffn_hidden_size=32768,
        vocab_size=131072,
        moe=MoESpec(num_experts=64, top_k=2, ffn_hidden_size=8192, layer_pattern=(1,) * 4 * chunks),
        linear_bias=False,
    )


def model_spec(stated: Mapping[str, Any]) -> ModelSpec:
    """Return the model of a record, completed by the public table.

    Raises:
        NotComputable: a size is in neither of them.
    """
    name = str(stated["name"])
    public = public_model(name)
    shape = {**(public.shape if public else {}), **{k: v for k, v in stated.items() if v is not None}}
    needed = ("layers", "hidden", "heads", "vocab")
    missing = [key for key in needed if key not in shape]
    if public is None or missing:
        lacks = f"no {', '.join(missing)}" if missing else "no public source for the rest of it"
        raise NotComputable(f"model {name}: {lacks}")
    heads, hidden = shape["heads"], shape["hidden"]
    gated = shape.get("act", "gelu") == "swiglu" or bool(public.traits.get("rms_norm"))
    return ModelSpec(
        name=name,
        num_layers=shape["layers"],
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=shape.get("kv_heads", heads),
        kv_channels=shape.get("head_dim", hidden // heads),
        ffn_hidden_size=shape.get("ffn") or shape.get("dense_ffn") or shape.get("moe_ffn") or 4 * hidden,
        vocab_size=shape["vocab"],
        gated_mlp=gated,
        moe=_experts(shape),
        mtp_num_layers=shape.get("mtp_layers", 0),
        **public.traits,
    )


def _experts(shape: Mapping[str, Any]) -> MoESpec | None:
    if "experts" not in shape:
        return None
    dense = shape.get("first_dense", 0)
    return MoESpec(
        num_experts=shape["experts"],
        top_k=shape["topk"],
        ffn_hidden_size=shape["moe_ffn"],
        shared_ffn_hidden_size=shape.get("shared_experts", 0) * shape["moe_ffn"],
        layer_pattern=(0,) * dense + (1,) * (shape["layers"] - dense),
    )
