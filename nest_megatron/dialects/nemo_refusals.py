"""NeMo configurations that are recognised, named and not planned: one clear sentence each."""

from __future__ import annotations

from nest_megatron.dialects.access import ConfigView
from nest_megatron.dialects.nemo_layout import PP, TP
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs.job import CONFIG_FILE

#: Keys that only one kind of model has -> what the model is.
_OTHER_MODELS: tuple[tuple[str, str], ...] = (
    ("model.bert_binary_head", "a BERT encoder"),
    ("model.mcore_bert", "a BERT encoder"),
    ("model.mcore_t5", "a T5 encoder-decoder"),
    ("model.pipeline_model_parallel_split_rank", "a T5 encoder-decoder"),
    ("model.encoder", "an encoder-decoder"),
    ("model.retro", "a RETRO model"),
    ("model.mm_cfg", "a multimodal model"),
    ("model.vision", "a vision-language model"),
    ("model.vision_pretraining_type", "a vision transformer"),
    ("model.control_stage_config", "a ControlNet for a diffusion model"),
    ("model.unet_config", "a diffusion model"),
    ("model.first_stage_config", "a diffusion model"),
    ("model.unet_type", "an Imagen diffusion model"),
    ("model.guidance_scale", "a NeRF text-to-3D model"),
    ("mesh_resolution", "a NeRF text-to-3D model"),
)
_SPLIT = "model.pipeline_model_parallel_split_rank"
#: Switches that change memory or the graph in ways that no formula here covers -> their name.
_OTHER_RUNTIMES: tuple[tuple[str, str], ...] = (
    ("model.fsdp", "torch FSDP"),
    ("model.cpu_offloading", "offloading of activations to the CPU"),
    ("model.moe_extended_tp", "experts split over TP times EP"),
)
_INFERENCE_KEYS = ("gpt_model_file", "checkpoint_dir", "inference", "hparams_file")


def refuse_unplanned(view: ConfigView) -> None:
    """Return when the configuration trains a decoder with full weights.

    Raises:
        BadInputError: it validates or serves a model, tunes adapters, trains another kind of model, takes its
            shapes from a checkpoint, or uses a runtime that is not planned.
    """
    _refuse_inference(view)
    _refuse_adapters(view)
    for key, kind in _OTHER_MODELS:
        if view.has(key):
            sentence = f"this configuration trains {kind}{_sizes(view)}; only decoder-only GPT is planned"
            raise _refusal(view, key, sentence)
    for key, name in _OTHER_RUNTIMES:
        if view.flag(key):
            raise _refusal(view, key, f"{name} is recognised but not planned yet")
    if view.value("model.num_layers") is None and view.has("model.restore_from_path"):
        raise _refusal(
            view,
            "model.restore_from_path",
            "the shapes of this fine-tuning job are in a .nemo checkpoint, not in the configuration",
            nearest=("add model.num_layers, hidden_size, num_attention_heads and ffn_hidden_size",),
        )


def _sizes(view: ConfigView) -> str:
    """Return the parallel sizes in words, as far as they can be read; encoders have the same keys as GPT."""
    found = []
    for name, key in (("TP", TP), ("PP", PP), ("split at stage ", _SPLIT)):
        try:
            size = view.value(key)
        except BadInputError:
            continue
        if isinstance(size, int) and size > 0:
            found.append(f"{name}{size}")
    return f" ({' '.join(found)})" if found else ""


def _refuse_inference(view: ConfigView) -> None:
    key = next((key for key in _INFERENCE_KEYS if view.has(key)), None)
    if key is not None and view.value("model.optim.name") is None:
        raise _refusal(view, key, "this is a validation or inference configuration; nothing is trained")
    if view.flag("model.skip_train"):
        raise _refusal(view, "model.skip_train", "this run only validates; nothing is trained")


def _refuse_adapters(view: ConfigView) -> None:
    scheme = view.value("model.peft.peft_scheme")
    if scheme not in (None, "none", ""):
        raise _refusal(
            view,
            "model.peft.peft_scheme",
            "parameter-efficient fine-tuning (PEFT/LoRA) is recognised but not planned yet",
            nearest=("full fine-tuning: model.peft.peft_scheme=none",),
        )


def _refusal(view: ConfigView, key: str, sentence: str, *, nearest: tuple[str, ...] = ()) -> BadInputError:
    found = view.value(key) if not isinstance(view.value(key), (dict, list)) else "a section"
    return BadInputError(
        "NEST-D20", sentence, factors=[Factor(view.full(key), found, CONFIG_FILE)], nearest=nearest
    )
