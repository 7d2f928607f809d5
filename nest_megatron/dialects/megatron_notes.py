"""Facts of a Megatron-LM run that a TrainJob has no field for: each becomes one sentence of the plan."""

from __future__ import annotations

from collections.abc import Callable

from nest_megatron.dialects.layout_string import parse
from nest_megatron.dialects.megatron_arguments import Arguments
from nest_megatron.specs.job import Kernels
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.model import ModelSpec

#: Field -> what is done with it; added when the field is on or given.
_SENTENCES: tuple[tuple[str, str], ...] = (
    ("fp32_residual_connection", "the residual stream is priced at 2 bytes per element"),
    ("first_last_layers_bf16", "the first and last layers are priced in fp8 like the others"),
    ("moe_router_enable_expert_bias", "the expert biases (8 bytes per expert and layer) are not priced"),
    ("moe_shared_expert_gate", "the gate of the shared experts is not priced"),
    ("moe_shared_expert_overlap", "overlap of the shared experts with dispatch is not priced"),
    ("moe_pad_expert_input_to_capacity", "tokens padded to capacity are priced like full ones"),
    ("mtp_use_repeated_layer", "each prediction depth is priced with parameters of its own"),
    ("optimizer_cpu_offload", "the optimizer state is priced as if it stayed on the GPU"),
    ("fine_grained_activation_offloading", "an inferred 12 % (attention) and 20 % (experts) stay on the GPU"),
    ("distribute_saved_activations", "saved layer inputs are priced as replicated over TP"),
    ("delay_wgrad_compute", "delayed weight gradients are not priced"),
    ("overlap_p2p_comm_warmup_flush", "send and receive are priced as hidden in the steady phase only"),
    ("overlap_param_gather_with_optimizer_step", "its gain is not priced"),
    ("use_legacy_models", "Megatron-LM's legacy layers are priced like those of megatron-core"),
    ("deterministic_mode", "deterministic kernels are priced like the usual ones"),
)


def add_notes(args: Arguments, model: ModelSpec, layout: Layout, kernels: Kernels, notes: list[str]) -> None:
    """Append one sentence per fact that is read and not carried."""
    notes += [
        f"{args.key(name)}: {sentence}" for name, sentence in _SENTENCES if args.has(name) and args.flag(name)
    ]
    for reader in _READERS:
        sentence = reader(args, model, layout, kernels)
        if sentence:
            notes.append(sentence)


def _attention(args: Arguments, model: ModelSpec, layout: Layout, kernels: Kernels) -> str:
    if (
        kernels.transformer_engine
        and args.text("attention_backend") == "auto"
        and kernels.attention == "flash"
    ):
        return (
            "--attention-backend auto: FlashAttention is assumed; Transformer Engine takes cuDNN's attention "
            "where it is faster, mostly on Hopper and newer"
        )
    if kernels.transformer_engine and kernels.attention in ("fused_softmax", "unfused"):
        return "--attention-backend unfused inside Transformer Engine is priced like the local attention"
    return ""


def _bert(args: Arguments, model: ModelSpec, layout: Layout, kernels: Kernels) -> str:
    if not model.pooler_head:
        return ""
    head = "" if args.flag("bert_binary_head") else "; its binary head is priced although it is off"
    return f"BERT: attention is priced as causal, half of its real work{head}"


def _hybrid_prediction(args: Arguments, model: ModelSpec, layout: Layout, kernels: Kernels) -> str:
    if not model.hybrid_layers or not model.mtp_num_layers:
        return ""
    return "each prediction depth of the hybrid model is priced like one more of its last layer"


def _standalone_mtp(args: Arguments, model: ModelSpec, layout: Layout, kernels: Kernels) -> str:
    name = "pipeline_model_parallel_layout"
    if not args.has(name) or not model.mtp_num_layers:
        return ""
    segments = parse(args.text(name) or "")
    if segments[-1].mtp:
        return ""
    place = next(i for i, segment in enumerate(segments) if segment.mtp)
    return f"the prediction layers of chunk {place} are priced on the last chunk"


def _context(args: Arguments, model: ModelSpec, layout: Layout, kernels: Kernels) -> str:
    kinds = args.texts("cp_comm_type") or ("p2p",)
    if layout.cp == 1 or set(kinds) == {"p2p"}:
        return ""
    return f"{args.key('cp_comm_type')} {' '.join(kinds)}: context parallelism is priced as a ring (p2p)"


def _offloaded_layers(args: Arguments, model: ModelSpec, layout: Layout, kernels: Kernels) -> str:
    name = "cpu_offloading_num_layers"
    if not args.integer(name, minimum=0):
        return ""
    return f"{args.key(name)}: offloaded layers are priced as if they stayed on the GPU"


_READERS: tuple[Callable[[Arguments, ModelSpec, Layout, Kernels], str], ...] = (
    _attention,
    _bert,
    _hybrid_prediction,
    _standalone_mtp,
    _context,
    _offloaded_layers,
)
