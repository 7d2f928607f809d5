"""What megatron-core is told: one frozen record, independent of the configuration dialect it came from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nest_megatron.errors import BadInputError, Factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One training run.

    Args:
        transformer: arguments of ``TransformerConfig``; functions and dtypes are given by name, see
            ``model.transformer_config``.
        groups: arguments of ``initialize_model_parallel``.
        ddp: arguments of ``DistributedDataParallelConfig``.
        optimizer: arguments of ``OptimizerConfig``.
        vocab_size: rows of the word embedding, padding included.
        positions: ``rope``, ``learned_absolute`` or ``none``.
        transformer_engine: use its modules where it is installed.
        data: ``mock`` for a synthetic sequence, ``text`` for the shipped text.
        num_ranks: processes the configuration asks for; ``devices`` of them on each node.
    """

    name: str
    dialect: str
    transformer: Mapping[str, Any]
    groups: Mapping[str, Any]
    ddp: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    vocab_size: int
    sequence_length: int
    tied_embeddings: bool
    positions: str
    rotary_base: int
    rotary_percent: float
    micro_batch: int
    global_batch: int
    num_steps: int
    seed: int
    data: str
    transformer_engine: bool
    num_ranks: int
    devices: int

    @property
    def precision(self) -> str:
        """``bf16``, ``fp16`` or ``fp32``."""
        return next((name for name in ("bf16", "fp16") if self.transformer.get(name)), "fp32")

    @property
    def dp(self) -> int:
        """Data parallel size."""
        inner = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        size = self.num_ranks
        for name in inner:
            size //= self.groups[name]
        return size

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step and data parallel rank."""
        return self.global_batch // (self.micro_batch * self.dp)


def require(condition: object, message: str, **factors: object) -> None:
    """Refuse a configuration that this program cannot train.

    Raises:
        BadInputError: ``condition`` is false.
    """
    if not condition:
        raise BadInputError(
            "NEST-T01", message, factors=[Factor(name, value) for name, value in factors.items()]
        )


@contextlib.contextmanager
def refusals_of_megatron() -> Iterator[None]:
    """Turn what megatron-core raises at arguments it does not take into bad input.

    Raises:
        BadInputError: the block raised ValueError or AssertionError.
    """
    try:
        yield
    except (ValueError, AssertionError) as refusal:
        text = " ".join(str(refusal).split()) or type(refusal).__name__
        raise BadInputError("NEST-T05", f"megatron-core refuses the layout: {text}") from None


#: Activation of a NeMo or Megatron-LM configuration -> (name of the function, gated).
ACTIVATIONS: Mapping[str, tuple[str, bool]] = {
    "gelu": ("gelu", False),
    "swiglu": ("silu", True),
    "fast-swiglu": ("silu", True),
    "geglu": ("gelu", True),
    "fast-geglu": ("gelu", True),
    "squared-relu": ("squared_relu", False),
}


def moe_arguments(
    *,
    num_experts: int,
    top_k: int,
    ffn_hidden_size: int | None,
    shared_ffn_hidden_size: int | None,
    layer_pattern: Any,
    capacity_factor: float | None,
    aux_loss: float,
    dispatcher: str | None,
) -> dict[str, Any]:
    """Return the expert arguments of ``TransformerConfig``; experts run one after another (SequentialMLP)."""
    return {
        "num_moe_experts": num_experts,
        "moe_router_topk": top_k,
        "moe_router_pre_softmax": top_k == 1,
        "moe_ffn_hidden_size": ffn_hidden_size,
        "moe_shared_expert_intermediate_size": shared_ffn_hidden_size,
        "moe_layer_freq": layer_pattern,
        "moe_expert_capacity_factor": capacity_factor,
        "moe_router_load_balancing_type": "aux_loss" if aux_loss else "none",
        "moe_aux_loss_coeff": aux_loss,
        "moe_token_dispatcher_type": dispatcher or "allgather",
        "moe_grouped_gemm": False,
    }
