"""The transformer that is trained: shapes only, no parallelism, no precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

#: ``dense`` and ``moe`` are whole layers of a decoder-only model, ``encoder`` and ``decoder`` those of an
#: encoder-decoder; the others are the single-mixer layers of hybrid models.
BlockKind = Literal["dense", "moe", "encoder", "decoder", "attention", "mlp", "experts", "mamba"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Routed experts of the layers that have them.

    Args:
        num_experts: experts per MoE layer.
        top_k: experts each token is sent to.
        ffn_hidden_size: width of one routed expert.
        shared_ffn_hidden_size: width of the shared expert, 0 when there is none.
        layer_pattern: per layer, 1 where the layer is MoE; length ``num_layers``.
        capacity_factor: tokens per expert over the balanced number; None means dropless.
        grouped_gemm: experts of a rank run as one grouped GEMM.
        dispatcher: Megatron's ``moe_token_dispatcher_type``.
        group_topk: a token's experts lie in at most so many expert groups (``moe_router_group_topk``).
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    layer_pattern: tuple[int, ...]
    shared_ffn_hidden_size: int = 0
    capacity_factor: float | None = None
    grouped_gemm: bool = True
    dispatcher: str = "alltoall"
    group_topk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention widths; ``q_lora_rank`` 0 means queries are not compressed."""

    kv_lora_rank: int
    qk_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Mamba-2 mixer widths; inner width = ``num_heads * head_dim``."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Decoder of an encoder-decoder model (T5): its share of the layers, and its own sequence.

    Args:
        num_layers: the last so many of the model's layers are decoder layers, the others encoder layers.
        sequence_length: tokens of one decoder sequence; the job's sequence is the encoder's.
    """

    num_layers: int
    sequence_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes of a transformer.

    Args:
        num_layers: all layers; of an encoder-decoder, those of both stacks.
        num_query_groups: KV heads; equal to ``num_attention_heads`` without GQA.
        kv_channels: width of one head.
        gated_mlp: SwiGLU / GEGLU style, two up projections.
        vocab_size: before padding to ``make_vocab_size_divisible_by * tp``.
        learned_positions: a learned absolute position table of ``max_position_embeddings`` rows.
        tied_embeddings: the output layer shares the word embedding.
        rms_norm: RMSNorm (one vector) instead of LayerNorm (two).
        linear_bias: biases in every linear layer; ``qkv_bias`` only in the QKV projection.
        attention_window: tokens a query looks back on in sliding-window layers; 0 means there are none.
        windowed_share: share of the attention layers that are such.
        mtp_num_layers: multi-token-prediction depths after the last layer.
        squared_relu_copy: the MLP activation saves its input a second time.
        pooler_head: the replicated binary head and token types of BERT.
        hybrid_layers: the kind of every layer of a hybrid model, empty otherwise.
        decoder: the second stack of an encoder-decoder model.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int
    gated_mlp: bool = False
    make_vocab_size_divisible_by: int = 128
    max_position_embeddings: int = 0
    learned_positions: bool = False
    tied_embeddings: bool = True
    rms_norm: bool = False
    linear_bias: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    attention_window: int = 0
    windowed_share: float = 0.0
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    mamba: MambaSpec | None = None
    mtp_num_layers: int = 0
    squared_relu_copy: bool = False
    pooler_head: bool = False
    hybrid_layers: tuple[BlockKind, ...] = ()
    decoder: DecoderSpec | None = None

    def __post_init__(self) -> None:
        """Reject shapes that no framework can build.

        Raises:
            ValueError: a size is not positive, the MoE pattern has not one entry per layer, or a decoder
                leaves no encoder.
        """
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "ffn_hidden_size",
            "vocab_size",
            "make_vocab_size_divisible_by",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.moe is not None and len(self.moe.layer_pattern) != self.num_layers:
            raise ValueError(
                f"moe.layer_pattern has {len(self.moe.layer_pattern)} entries for {self.num_layers} layers"
            )
        decoder = self.decoder
        if decoder is not None and not (
            0 < decoder.num_layers < self.num_layers and decoder.sequence_length > 0
        ):
            raise ValueError(f"{decoder} leaves no encoder or no decoder among {self.num_layers} layers")

    @property
    def layer_kinds(self) -> tuple[BlockKind, ...]:
        """Block kind of each layer, in model order."""
        if self.hybrid_layers:
            return self.hybrid_layers
        pattern = () if self.moe is None else self.moe.layer_pattern
        decoders = 0 if self.decoder is None else self.decoder.num_layers
        return _layer_kinds(self.num_layers, decoders, pattern)

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """The distinct block kinds, in order of first appearance: the solver's kind slots."""
        return _distinct(self.layer_kinds)

    def padded_vocab_size(self, tp: int) -> int:
        """Return the vocabulary rounded up to ``make_vocab_size_divisible_by * tp`` (memory_model.md 2.1)."""
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple


@lru_cache(maxsize=256)
def _layer_kinds(num_layers: int, decoders: int, pattern: tuple[int, ...]) -> tuple[BlockKind, ...]:
    """Return the kind of each layer; the last ``decoders`` layers are an encoder-decoder's second stack."""
    if decoders:
        stacks: tuple[BlockKind, BlockKind] = ("encoder", "decoder")
        return stacks[:1] * (num_layers - decoders) + stacks[1:] * decoders
    kinds: tuple[BlockKind, BlockKind] = ("dense", "moe")
    return tuple(kinds[bool(flag)] for flag in pattern or (0,) * num_layers)


@lru_cache(maxsize=256)
def _distinct(layers: tuple[BlockKind, ...]) -> tuple[BlockKind, ...]:
    return tuple(dict.fromkeys(layers))
