"""Megatron-LM runs that are recognised, named and not planned: one clear sentence each."""

from __future__ import annotations

from nest_megatron.dialects.megatron_arguments import Arguments
from nest_megatron.dialects.megatron_t5 import refuse_unplanned_t5, trains_t5
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs.job import CONFIG_FILE

#: Part of the training script's name -> the model it trains.
_SCRIPTS: tuple[tuple[str, str], ...] = (
    ("vlm", "a vision-language model"),
    ("mimo", "a multimodal model"),
    ("vision", "a vision model"),
    ("retro", "a RETRO model"),
    ("ict", "a retriever"),
)
#: Field that only one kind of model has -> what the model is.
_FIELDS: tuple[tuple[str, str], ...] = (
    ("hybrid_attention_ratio", "a hybrid model given by ratios (write --hybrid-layer-pattern)"),
    ("hybrid_mlp_ratio", "a hybrid model given by ratios (write --hybrid-layer-pattern)"),
    ("model_provider", "a multimodal model"),
    ("dataset_provider", "a multimodal model"),
    ("language_model_type", "a multimodal model"),
    ("img_h", "a vision-language model"),
    ("heterogeneous_layers_config_path", "a model whose layers all differ"),
    ("heterogeneous_layers_config_encoded_json", "a model whose layers all differ"),
    ("experimental_attention_variant", "a model with experimental attention"),
)
#: Switches and degrees that change memory or the groups in ways that no formula here covers -> their name.
_RUNTIMES: tuple[tuple[str, str], ...] = (
    ("tensor_parallel_num_weight_shards", "weight sharding on the TP axis"),
    ("expert_tensor_parallel_num_weight_shards", "weight sharding on the expert TP axis"),
    ("encoder_tensor_model_parallel_size", "a separate encoder TP size"),
    ("encoder_pipeline_model_parallel_size", "a separate encoder pipeline"),
    ("moe_latent_size", "latent experts"),
)
_TRAINING = ("train", "finetune", "sft")


def refuse_unplanned(args: Arguments) -> None:
    """Return when the run trains a GPT, a BERT, a T5 or a hybrid model.

    Raises:
        BadInputError: it trains another model, does not train, or uses a runtime that is not planned.
    """
    script = args.script.lower()
    for part, kind in _SCRIPTS:
        if part in script.replace(".", "_").split("_"):
            raise _model_refusal("script", args.script, kind)
    if script and not any(word in script for word in _TRAINING):
        raise BadInputError(
            "NEST-M13",
            f"{args.script} is no training script of Megatron-LM",
            factors=[Factor("script", args.script, CONFIG_FILE)],
            nearest=("pretrain_gpt.py",),
        )
    for name, kind in _FIELDS:
        if args.has(name):
            raise _model_refusal(args.key(name), str(args.given[name].raw)[:60], kind)
    _refuse_spec(args)
    if trains_t5(args):
        refuse_unplanned_t5(args)
    if args.flag("skip_train"):
        raise BadInputError(
            "NEST-M13", "this run only evaluates; nothing is trained", factors=[args.factor("skip_train")]
        )
    for name, what in _RUNTIMES:
        if (args.integer(name, minimum=0) or 0) > 1:
            raise BadInputError(
                "NEST-M13", f"{what} is recognised but not planned yet", factors=[args.factor(name)]
            )
    if args.flag("moe_extended_tp"):
        raise BadInputError(
            "NEST-M13",
            "experts split over TP times EP are recognised but not planned yet",
            factors=[args.factor("moe_extended_tp")],
        )


def _refuse_spec(args: Arguments) -> None:
    spec = " ".join(args.texts("spec") or ())
    hybrid = args.has("hybrid_layer_pattern") or args.has("hybrid_override_pattern")
    own = not hybrid if "mamba" in spec or "hybrid" in spec else spec not in ("", "local")
    if own:
        raise _model_refusal(args.key("spec"), spec, "a model with layers of its own")


def _model_refusal(key: str, value: str, kind: str) -> BadInputError:
    return BadInputError(
        "NEST-M13",
        f"this run trains {kind}; only GPT, BERT, T5 and hybrid models are planned",
        factors=[Factor(key, value, CONFIG_FILE)],
    )
