"""Encoder-decoder models of ``pretrain_t5.py``: which run trains one, its decoder, what of it is not planned.

Sources: ``pretrain_t5.py``, ``megatron/core/models/T5`` and ``validate_args`` (releases 0.10 to 0.16).
"""

from __future__ import annotations

from nest_megatron.dialects.megatron_arguments import Arguments
from nest_megatron.errors import BadInputError
from nest_megatron.specs.model import DecoderSpec

#: Number above 0 -> what an encoder-decoder with it would be.
_COUNTS: tuple[tuple[str, str], ...] = (
    ("num_experts", "T5 with experts"),
    ("mtp_num_layers", "T5 with multi-token prediction"),
)
_SWITCHES: tuple[tuple[str, str], ...] = (
    ("multi_latent_attention", "T5 with latent attention"),
    ("group_query_attention", "T5 with query groups (its cross attention has none)"),
)


def trains_t5(args: Arguments) -> bool:
    """Return whether the run trains an encoder-decoder: its script says so, else a decoder's own sequence."""
    if args.script:
        return "t5" in args.script.lower().replace(".", "_").split("_")
    return args.has("decoder_seq_length")


def refuse_unplanned_t5(args: Arguments) -> None:
    """Return when the encoder-decoder is one that is planned.

    Raises:
        BadInputError: it has experts, query groups, a hybrid pattern, or positions that are not priced.
    """
    for name, what in _COUNTS:
        if args.integer(name, minimum=0):
            raise _refusal(args, name, what)
    for name, what in _SWITCHES:
        if args.flag(name):
            raise _refusal(args, name, what)
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        if args.has(name):
            raise _refusal(args, name, "T5 with a hybrid pattern")
    if args.text("position_embedding_type") == "relative":
        raise _refusal(args, "position_embedding_type", "T5 with relative positions")


def _refusal(args: Arguments, name: str, what: str) -> BadInputError:
    return BadInputError("NEST-M13", f"{what} is recognised but not planned yet", factors=[args.factor(name)])


def read_decoder(args: Arguments, encoder_layers: int, assumptions: list[str]) -> DecoderSpec:
    """Return the decoder; ``pretrain_t5.py`` builds it as deep as the encoder, whatever the flags say.

    Raises:
        BadInputError: the decoder's sequence length is missing.
    """
    asked = args.integer("decoder_num_layers")
    if asked not in (None, encoder_layers):
        assumptions.append(
            f"{args.key('decoder_num_layers')} {asked} is ignored, as by pretrain_t5.py: "
            f"the decoder has {encoder_layers} layers like the encoder"
        )
    return DecoderSpec(num_layers=encoder_layers, sequence_length=args.required_integer("decoder_seq_length"))
