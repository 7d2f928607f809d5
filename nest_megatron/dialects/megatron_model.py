"""The model that Megatron-LM's arguments describe, as a ModelSpec.

Rules of ``megatron/training/arguments.py`` (``validate_args``, ``core_transformer_config_from_args``) and
``megatron/training/models/gpt.py``, the same from 0.8 to 0.19 unless said.
"""

from __future__ import annotations

import ast
import re
from pathlib import PurePath
from typing import Any

from nest_megatron.dialects.megatron_arguments import Arguments
from nest_megatron.dialects.megatron_hybrid import HybridPattern, read_pattern
from nest_megatron.dialects.megatron_t5 import read_decoder, trains_t5
from nest_megatron.dialects.vocabulary import assumed_vocab_size, known_vocab_size
from nest_megatron.errors import BadInputError
from nest_megatron.specs.model import MambaSpec, MLASpec, ModelSpec, MoESpec

#: More layers than any model has: a typing error, and a bound for the per-layer tuples.
MAX_LAYERS = 10_000
_MAX_EXPERTS = 100_000
#: First release whose NullTokenizer adds no end-of-document entry to ``--vocab-size``.
_PLAIN_NULL_TOKENIZER = (0, 18)
#: Tokenizer classes that read a sentencepiece model, and those that take a Hugging Face name.
_SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
_HUGGINGFACE = ("HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer")
_NULL = ("NullTokenizer", "NullMultimodalTokenizer")


def read_model(args: Arguments, *, assumptions: list[str]) -> ModelSpec:
    """Return the shapes that Megatron-LM builds.

    Raises:
        BadInputError: a shape is missing, of another type, or impossible.
    """
    hybrid = read_pattern(args)
    # The pattern wins over --num-layers (validate_args).
    kinds = hybrid.kinds if hybrid else ()
    num_layers = len(kinds) or _num_layers(args)
    decoder = read_decoder(args, num_layers, assumptions) if trains_t5(args) else None
    if decoder is not None:
        num_layers += decoder.num_layers
    hidden = args.required_integer("hidden_size")
    heads = args.required_integer("num_attention_heads")
    ffn = _ffn(args, hidden)
    vocab_size, divisible_by = _vocabulary(args, assumptions)
    if args.flag("multi_latent_attention") and args.flag("group_query_attention"):
        raise args.wrong("group_query_attention", "absent: latent attention has no query groups")
    window, windowed = _window(args)
    try:
        return ModelSpec(
            name=_name(args),
            num_layers=num_layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=_query_groups(args, heads, assumptions),
            kv_channels=_kv_channels(args, hidden, heads),
            ffn_hidden_size=ffn,
            vocab_size=vocab_size,
            gated_mlp=args.flag("swiglu") or args.flag("quick_geglu"),
            make_vocab_size_divisible_by=divisible_by,
            max_position_embeddings=args.integer("max_position_embeddings") or 0,
            learned_positions=_learned_positions(args),
            tied_embeddings=not args.flag("untie_embeddings_and_output_weights"),
            rms_norm=args.text("normalization") == "RMSNorm",
            linear_bias=args.flag("add_bias_linear"),
            qkv_bias=args.flag("add_qkv_bias"),
            qk_norm=args.flag("qk_layernorm"),
            hidden_dropout=_dropout(args, "hidden_dropout"),
            attention_dropout=_dropout(args, "attention_dropout"),
            attention_window=window,
            windowed_share=windowed,
            moe=_moe(args, num_layers=num_layers, ffn=ffn),
            mla=_mla(args),
            mamba=_mamba(args, hidden) if "mamba" in kinds else None,
            mtp_num_layers=_mtp_depths(args, hybrid),
            squared_relu_copy=args.flag("squared_relu"),
            pooler_head=trains_bert(args),
            hybrid_layers=kinds,
            decoder=decoder,
        )
    except ValueError as error:
        raise BadInputError("NEST-M08", f"the model cannot be built: {error}") from None


def _num_layers(args: Arguments) -> int:
    """Return ``--num-layers``, for which ``--encoder-num-layers`` is another name (validate_args)."""
    given = args.integer("encoder_num_layers", maximum=MAX_LAYERS)
    if given is None:
        return args.required_integer("num_layers", maximum=MAX_LAYERS)
    if args.has("num_layers"):
        raise args.wrong("encoder_num_layers", f"absent beside {args.key('num_layers')}")
    return given


def trains_bert(args: Arguments) -> bool:
    """Return whether the script trains BERT; its flags are those of a GPT."""
    return "bert" in args.script.lower() or args.has("bert_binary_head")


def _mtp_depths(args: Arguments, hybrid: HybridPattern | None) -> int:
    if hybrid is not None and hybrid.mtp:
        return len(hybrid.mtp)
    return args.integer("mtp_num_layers", minimum=0, maximum=MAX_LAYERS) or 0


def _mamba(args: Arguments, hidden: int) -> MambaSpec:
    """Return Mamba-2 widths; the inner width defaults to twice the hidden size (mamba_mixer.py, expand 2)."""
    head_dim = args.integer("mamba_head_dim") or 64
    return MambaSpec(
        num_heads=args.integer("mamba_num_heads") or max(1, 2 * hidden // head_dim),
        head_dim=head_dim,
        state_dim=args.integer("mamba_state_dim") or 128,
        num_groups=args.integer("mamba_num_groups") or 8,
    )


def read_sequence_length(args: Arguments) -> int:
    """Return tokens per sequence: ``--seq-length``, else ``--encoder-seq-length``.

    Raises:
        BadInputError: neither is given.
    """
    return args.integer("encoder_seq_length") or args.required_integer("seq_length")


def _name(args: Arguments) -> str:
    return args.script.removesuffix(".py") or "megatron-lm"


def _ffn(args: Arguments, hidden: int) -> int:
    """Return the FFN width; by default ``--swiglu``, not ``--quick-geglu``, keeps the parameter count."""
    given = args.integer("ffn_hidden_size")
    if given is not None:
        return given
    return int((4 * hidden * 2 / 3) / 64) * 64 if args.flag("swiglu") else 4 * hidden


def _kv_channels(args: Arguments, hidden: int, heads: int) -> int:
    given = args.integer("kv_channels")
    if given is not None:
        return given
    if hidden % heads:
        raise BadInputError(
            "NEST-M08",
            "without --kv-channels the attention heads must divide the hidden size",
            factors=[args.factor("hidden_size"), args.factor("num_attention_heads")],
        )
    return hidden // heads


def _query_groups(args: Arguments, heads: int, assumptions: list[str]) -> int:
    """Return KV heads; ``--num-query-groups`` alone changes nothing."""
    if args.flag("group_query_attention"):
        return args.integer("num_query_groups") or heads
    if args.has("num_query_groups"):
        assumptions.append(
            f"{args.key('num_query_groups')} is ignored, as in Megatron-LM, without --group-query-attention"
        )
    return heads


def _learned_positions(args: Arguments) -> bool:
    if args.flag("use_rotary_position_embeddings") or not args.flag("add_position_embedding"):
        return False
    return args.text("position_embedding_type") == "learned_absolute"


def _dropout(args: Arguments, name: str) -> float:
    found = args.number(name)
    if found is None or not 0.0 <= found < 1.0:
        raise args.wrong(name, "at least 0 and below 1")
    return found


def _vocabulary(args: Arguments, assumptions: list[str]) -> tuple[int, int]:
    """Return (entries before padding, divisor); ``--padded-vocab-size`` is used as it is."""
    padded = args.integer("padded_vocab_size")
    if padded is not None:
        return padded, 1
    divisor = args.integer("make_vocab_size_divisible_by") or 128
    if not args.flag("pad_vocab_size"):
        divisor = 1
    return _tokens(args, assumptions), divisor


def _tokens(args: Arguments, assumptions: list[str]) -> int:
    """Return the tokenizer's entries; each training script names one for when none is given."""
    usual = "BertWordPieceLowerCase" if trains_bert(args) or trains_t5(args) else "GPT2BPETokenizer"
    kind = args.text("tokenizer_type") or usual
    if kind.startswith("BertWordPiece"):
        return (known_vocab_size("megatron", kind) or 0) + (args.integer("vocab_extra_ids", minimum=0) or 0)
    if kind in _NULL:
        end_of_document = 0 if args.release >= _PLAIN_NULL_TOKENIZER else 1
        return args.required_integer("vocab_size") + end_of_document
    library, name = "megatron", kind
    if kind in _HUGGINGFACE:
        library, name = "huggingface", args.text("tokenizer_model") or ""
    elif kind in _SENTENCEPIECE:
        # The folder is often a variable that only the run knows; the file's name is what matters.
        raw = str(args.given["tokenizer_model"].raw) if args.has("tokenizer_model") else ""
        library, name = "sentencepiece", PurePath(raw).name
    size = known_vocab_size(library, name)
    if size is None and library != "megatron":
        size = known_vocab_size("megatron", kind)
    if size is not None:
        return size
    given = args.integer("vocab_size")
    if given is not None:
        assumptions.append(f"{args.key('vocab_size')} is taken as the size of {kind}'s vocabulary")
        return given
    assumed = assumed_vocab_size(library)
    assumptions.append(
        f"the vocabulary of {kind} {name if name != kind else ''}".rstrip()
        + f" is not known: {assumed.vocab_size} entries are assumed ({assumed.source}); "
        "--padded-vocab-size states it"
    )
    return assumed.vocab_size


def _moe(args: Arguments, *, num_layers: int, ffn: int) -> MoESpec | None:
    experts = args.integer("num_experts", minimum=0, maximum=_MAX_EXPERTS)
    if not experts:
        return None
    top_k = args.integer("moe_router_topk") or 2
    if top_k > experts:
        raise BadInputError(
            "NEST-M08",
            "a token cannot be sent to more experts than there are",
            factors=[args.factor("moe_router_topk"), args.factor("num_experts")],
        )
    capacity = args.number("moe_expert_capacity_factor")
    return MoESpec(
        num_experts=experts,
        top_k=top_k,
        ffn_hidden_size=args.integer("moe_ffn_hidden_size") or ffn,
        shared_ffn_hidden_size=args.integer("moe_shared_expert_intermediate_size", minimum=0) or 0,
        layer_pattern=_layer_pattern(args, num_layers),
        # TransformerConfig reads a negative factor as "no capacity".
        capacity_factor=capacity if capacity is not None and capacity > 0 else None,
        grouped_gemm=args.flag("moe_grouped_gemm"),
        dispatcher=args.text("moe_token_dispatcher_type") or "allgather",
        group_topk=args.integer("moe_router_group_topk"),
    )


def _window(args: Arguments) -> tuple[int, float]:
    """Return the keys a query looks back on in sliding-window layers, and the share of such layers.

    ``--window-size`` is ``left,right``; ``--window-attn-skip-freq N`` keeps full attention in every N-th
    layer, a list names the window layers with 1 (TransformerConfig, megatron-core 0.16).

    Raises:
        BadInputError: neither form.
    """
    sizes = re.findall(r"-?\d+", args.text("window_size") or "")
    if not sizes or int(sizes[0]) < 0:
        return 0, 0.0
    if not args.has("window_attn_skip_freq"):
        return int(sizes[0]), 1.0
    pattern = list_expression(args.text("window_attn_skip_freq") or "")
    if isinstance(pattern, int) and pattern > 0:
        return int(sizes[0]), (pattern - 1) / pattern
    if isinstance(pattern, list) and pattern and all(flag in (0, 1) for flag in pattern):
        return int(sizes[0]), sum(pattern) / len(pattern)
    raise args.wrong("window_attn_skip_freq", "a positive integer or a list expression of 0 and 1")


def _layer_pattern(args: Arguments, num_layers: int) -> tuple[int, ...]:
    """Return 1 per MoE layer; ``--moe-layer-freq`` is N (every N-th layer) or a list expression."""
    if not args.has("moe_layer_freq"):
        return (1,) * num_layers
    raw = args.given["moe_layer_freq"].raw
    pattern = raw if isinstance(raw, list) else list_expression(args.text("moe_layer_freq") or "")
    if isinstance(pattern, int) and pattern > 0:
        return tuple(int(layer % pattern == 0) for layer in range(num_layers))
    if isinstance(pattern, list) and len(pattern) == num_layers and all(flag in (0, 1) for flag in pattern):
        return tuple(int(flag) for flag in pattern)
    raise args.wrong(
        "moe_layer_freq", f"a positive integer or a list expression of {num_layers} entries 0 or 1"
    )


def list_expression(text: str) -> Any:
    """Return the value of a Python expression of integers, lists, ``+`` and ``*``; None when it is not one.

    Source: ``arguments.py: _eval_pattern``, which evaluates the same characters with ``eval``.
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value <= MAX_LAYERS:
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add):
            found = left + right
        else:
            lengths = [len(side) if isinstance(side, list) else side for side in (left, right)]
            if lengths[0] * lengths[1] > MAX_LAYERS:
                raise ValueError("too long")
            found = left * right
        return found
    raise ValueError("not a list expression")


def _mla(args: Arguments) -> MLASpec | None:
    """Return latent attention widths; the command line's defaults, not those of MLATransformerConfig."""
    if not args.flag("multi_latent_attention"):
        return None
    return MLASpec(
        q_lora_rank=args.integer("q_lora_rank", minimum=0) or 0,
        kv_lora_rank=args.integer("kv_lora_rank") or 32,
        qk_head_dim=args.integer("qk_head_dim") or 128,
        qk_rope_head_dim=args.integer("qk_pos_emb_head_dim") or 64,
        v_head_dim=args.integer("v_head_dim") or 128,
    )
