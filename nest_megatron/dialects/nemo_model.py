"""The model section of a NeMo configuration as a ModelSpec."""

from __future__ import annotations

import ast
from pathlib import PurePath

from nest_megatron.dialects.access import ConfigView
from nest_megatron.dialects.nemo_settings import uses_megatron_core
from nest_megatron.dialects.vocabulary import assumed_vocab_size, known_vocab_size
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs.job import CONFIG_FILE
from nest_megatron.specs.model import MLASpec, ModelSpec, MoESpec

#: More layers than any model has: a typing error, and a bound for the per-layer tuples.
MAX_LAYERS = 10_000


def read_model(view: ConfigView, *, assumptions: list[str]) -> ModelSpec:
    """Return the shapes that NeMo builds.

    Defaults are those of ``MegatronGPTModel.model_provider_func`` and megatron-core's ``TransformerConfig``.

    Raises:
        BadInputError: a shape is missing, of another type, or impossible.
    """
    core = uses_megatron_core(view)
    num_layers = view.required_integer("model.num_layers", maximum=MAX_LAYERS)
    hidden = view.required_integer("model.hidden_size")
    heads = view.required_integer("model.num_attention_heads")
    ffn = view.integer("model.ffn_hidden_size") or 4 * hidden
    kv_channels = view.integer("model.kv_channels") or hidden // heads
    vocab_size, divisible_by = _vocabulary(view, assumptions)
    activation = view.text("model.activation") or "gelu"
    position = view.text("model.position_embedding_type") or "learned_absolute"
    # megatron-core builds the position table with encoder_seq_length rows, NeMo's own model with
    # max_position_embeddings.
    table = "model.encoder_seq_length" if core else "model.max_position_embeddings"
    try:
        return ModelSpec(
            name=model_name(view),
            num_layers=num_layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=view.integer("model.num_query_groups") or heads,
            kv_channels=kv_channels,
            ffn_hidden_size=ffn,
            vocab_size=vocab_size,
            gated_mlp=activation.endswith("glu"),
            make_vocab_size_divisible_by=divisible_by,
            max_position_embeddings=view.integer(table) or 0,
            learned_positions=position == "learned_absolute",
            tied_embeddings=view.flag("model.share_embeddings_and_output_weights", True),
            rms_norm=(view.text("model.normalization") or "layernorm").lower() == "rmsnorm",
            linear_bias=view.flag("model.bias", True),
            qkv_bias=view.flag("model.qkv_bias"),
            qk_norm=view.flag("model.qk_layernorm"),
            hidden_dropout=_dropout(view, "model.hidden_dropout"),
            attention_dropout=_dropout(view, "model.attention_dropout"),
            moe=_moe(view, num_layers=num_layers, ffn=ffn),
            mla=_mla(view),
        )
    except ValueError as error:
        raise BadInputError("NEST-D12", f"the model cannot be built: {error}") from None


def model_name(view: ConfigView) -> str:
    """Return the first name in the configuration that can be read without running the application."""
    for key in ("run.name", "name", "exp_manager.name"):
        try:
            name = view.text(key)
        except BadInputError:
            continue
        if name:
            return name
    return "nemo"


def read_sequence_length(view: ConfigView, *, assumptions: list[str]) -> int:
    """Return the tokens per sequence that the model is built for.

    Raises:
        BadInputError: no sequence length.
    """
    sequence = view.required_integer("model.encoder_seq_length")
    for key in ("model.data.seq_length", "model.data.train_ds.max_seq_length"):
        other = view.integer(key)
        if other is not None and other != sequence:
            assumptions.append(
                f"{view.full(key)}={other} differs from {view.full('model.encoder_seq_length')}={sequence}: "
                "the latter is planned for, because NeMo sizes the pipeline's tensors with it"
            )
    return sequence


def _dropout(view: ConfigView, key: str) -> float:
    found = view.number(key)
    if found is None:
        return 0.1  # NeMo's and megatron-core's default
    if not 0.0 <= found < 1.0:
        raise BadInputError(
            "NEST-D03",
            f"{view.full(key)} must be at least 0 and below 1",
            factors=[Factor(view.full(key), found, CONFIG_FILE)],
        )
    return found


def _vocabulary(view: ConfigView, assumptions: list[str]) -> tuple[int, int]:
    """Return (entries before padding, divisor); ``override_vocab_size`` is used as it is, without padding."""
    override = view.integer("model.override_vocab_size")
    if override is not None:
        return override, 1
    divisible_by = view.integer("model.make_vocab_size_divisible_by") or 128
    explicit = view.integer("model.tokenizer.vocab_size")
    if explicit is not None:
        return explicit, divisible_by
    library = view.text("model.tokenizer.library") or "huggingface"
    name = view.text("model.tokenizer.type") or ""
    if library == "sentencepiece":
        name = PurePath(_path_text(view, "model.tokenizer.model")).name
    size = known_vocab_size(library, name)
    if size is None:
        assumed = assumed_vocab_size(library)
        size = assumed.vocab_size
        assumptions.append(
            f"the vocabulary of tokenizer {library}:{name or 'without name'} is not known: {size} entries "
            f"are assumed ({assumed.source}); {view.full('model.override_vocab_size')} states it"
        )
    return size, divisible_by


def _path_text(view: ConfigView, key: str) -> str:
    """Return a path; its folder may be an interpolation that only the application can evaluate."""
    try:
        return view.text(key) or ""
    except BadInputError as error:
        stored = next((str(factor.value) for factor in error.factors), "")
        return stored.rpartition("}")[2]


def _moe(view: ConfigView, *, num_layers: int, ffn: int) -> MoESpec | None:
    experts = view.integer("model.num_moe_experts", maximum=100_000)
    if experts is None:
        return None
    capacity = view.number("model.moe_expert_capacity_factor")
    top_k = view.integer("model.moe_router_topk") or 2
    if top_k > experts:
        raise BadInputError(
            "NEST-D12",
            "a token cannot be sent to more experts than there are",
            factors=[
                Factor(view.full("model.moe_router_topk"), top_k, view.origin("model.moe_router_topk")),
                Factor(view.full("model.num_moe_experts"), experts, view.origin("model.num_moe_experts")),
            ],
        )
    return MoESpec(
        num_experts=experts,
        top_k=top_k,
        ffn_hidden_size=view.integer("model.moe_ffn_hidden_size") or ffn,
        shared_ffn_hidden_size=view.integer("model.moe_shared_expert_intermediate_size", minimum=0) or 0,
        layer_pattern=_layer_pattern(view, num_layers),
        # TransformerConfig reads a negative factor as "no capacity".
        capacity_factor=capacity if capacity is not None and capacity > 0 else None,
        grouped_gemm=view.flag("model.moe_grouped_gemm"),
        dispatcher=view.text("model.moe_token_dispatcher_type") or "allgather",
    )


def _layer_pattern(view: ConfigView, num_layers: int) -> tuple[int, ...]:
    """Return 1 per MoE layer; ``moe_layer_freq`` is N (every N-th layer), a list, or a list as text."""
    key = "model.moe_layer_freq"
    freq = view.value(key)
    if freq is None:
        return (1,) * num_layers
    if isinstance(freq, int) and not isinstance(freq, bool) and freq > 0:
        return tuple(1 if layer % freq == 0 else 0 for layer in range(num_layers))
    if isinstance(freq, str):
        try:
            freq = ast.literal_eval(freq)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            freq = None
    if isinstance(freq, list) and len(freq) == num_layers and all(flag in (0, 1) for flag in freq):
        return tuple(int(flag) for flag in freq)
    raise BadInputError(
        "NEST-D03",
        f"{view.full(key)} must be a positive integer or a list with 0 or 1 per layer",
        factors=[Factor(view.full(key), str(view.value(key))[:60], CONFIG_FILE)],
    )


def _mla(view: ConfigView) -> MLASpec | None:
    """Return latent attention widths; defaults of megatron-core's ``MLATransformerConfig``."""
    if not view.flag("model.multi_latent_attention"):
        return None
    return MLASpec(
        q_lora_rank=view.integer("model.q_lora_rank", minimum=0)
        or (0 if view.has("model.q_lora_rank") else 512),
        kv_lora_rank=view.integer("model.kv_lora_rank") or 512,
        qk_head_dim=view.integer("model.qk_head_dim") or 128,
        qk_rope_head_dim=view.integer("model.qk_pos_emb_head_dim") or 64,
        v_head_dim=view.integer("model.v_head_dim") or 128,
    )
