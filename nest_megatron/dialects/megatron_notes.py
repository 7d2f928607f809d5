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
    ("moe_router_force_load_balancing", "experts get equal numbers of tokens"),
    ("mtp_use_repeated_layer", "each prediction depth is priced with parameters of its own"),
    ("optimizer_cpu_offload", "the optimizer state is priced as if it stayed on the GPU"),
    ("fine_grained_activation_offloading", "offloaded activations are priced as if they stayed on the GPU"),
    ("defer_embedding_wgrad_compute", "inputs kept for the deferred output-layer gradient are not priced"),
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
    if kernels.transformer_engine and args.text("attention_backend") == "fused":
        return "--attention-backend fused (cuDNN) is priced like FlashAttention"
    if (
        kernels.transformer_engine
        and args.text("attention_backend") == "auto"
        and kernels.attention == "flash"
    ):
        return "--attention-backend auto: a fused kernel is assumed to take these heads and this mask"
    if kernels.transformer_engine and kernels.attention != "flash":
        return "--attention-backend unfused inside Transformer Engine is priced like the local attention"
    return ""


def _mask(args: Arguments, model: ModelSpec, layout: Layout, kernels: Kernels) -> str:
    if args.flag("create_attention_mask_in_dataloader") and not args.flag("mock_data"):
        return "the attention mask that the dataloader makes is not priced (micro-batch * s^2 / cp bytes)"
    return ""


def _micro_batch_groups(args: Arguments, model: ModelSpec, layout: Layout, kernels: Kernels) -> str:
    name = "microbatch_group_size_per_vp_stage"
    size = args.integer(name)
    if size is None or layout.vpp == 1 or size == layout.pp:
        return ""
    return f"{args.key(name)} {size}: chunks are priced in groups of {layout.pp} micro-batches"


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


def _outer_sharding(args: Arguments, model: ModelSpec, layout: Layout, kernels: Kernels) -> str:
    if layout.sharding in ("none", "optim"):
        return ""
    return (
        f"{layout.sharding} (FSDP): the unsharded weights and gradients of the units at work are not priced; "
        "plans without FSDP are compared with it"
    )


def _offloaded_layers(args: Arguments, model: ModelSpec, layout: Layout, kernels: Kernels) -> str:
    name = "cpu_offloading_num_layers"
    if not args.integer(name, minimum=0):
        return ""
    return f"{args.key(name)}: offloaded layers are priced as if they stayed on the GPU"


_READERS: tuple[Callable[[Arguments, ModelSpec, Layout, Kernels], str], ...] = (
    _attention,
    _mask,
    _micro_batch_groups,
    _standalone_mtp,
    _context,
    _outer_sharding,
    _offloaded_layers,
)
