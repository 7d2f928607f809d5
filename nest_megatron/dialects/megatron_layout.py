"""The layout that Megatron-LM's arguments ask for, as Megatron-LM would run it."""

from __future__ import annotations

from typing import get_args

from nest_megatron.dialects.layout_string import parse
from nest_megatron.dialects.megatron_arguments import Arguments
from nest_megatron.dialects.megatron_hybrid import HybridPattern, read_pattern
from nest_megatron.dialects.nemo_layout import accounted_layers, uneven_layers
from nest_megatron.errors import BadInputError
from nest_megatron.specs.layout import (
    Granularity,
    Layout,
    Order,
    Overlap,
    Recompute,
    RecomputeMethod,
    Sharding,
)
from nest_megatron.specs.model import ModelSpec

#: Larger degrees are typing errors; the bound keeps the tuple of chunks small.
MAX_DEGREE = 100_000

_PLACEMENTS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
#: Axis of specs.layout.AXES -> the fields that decide it.
AXIS_FIELDS: dict[str, tuple[str, ...]] = {
    "tp": ("tensor_model_parallel_size",),
    "pp": ("pipeline_model_parallel_size",),
    "vpp": ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
    "cp": ("context_parallel_size",),
    "ep": ("expert_model_parallel_size",),
    "etp": ("expert_tensor_parallel_size",),
    "sequence_parallel": ("sequence_parallel",),
    "micro_batch": ("micro_batch_size",),
    "layers": (*_PLACEMENTS, "hybrid_layer_pattern"),
    "sharding": (
        "use_distributed_optimizer",
        "use_megatron_fsdp",
        "use_custom_fsdp",
        "use_torch_fsdp2",
        "data_parallel_sharding_strategy",
    ),
    "recompute": (
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "recompute_activations",
    ),
    "overlap": (
        "overlap_grad_reduce",
        "overlap_param_gather",
        "tp_comm_overlap",
        "overlap_p2p_comm",
        "overlap_moe_expert_parallel_comm",
    ),
    "order": ("use_tp_pp_dp_mapping",),
}
_SHARDINGS: dict[str, Sharding] = {
    "no_shard": "none",
    "optim": "optim",
    "optim_grads": "optim_grads",
    "optim_grads_params": "optim_grads_params",
}


def read_layout(
    args: Arguments, model: ModelSpec, *, num_gpus: int, global_batch: int | None, assumptions: list[str]
) -> Layout:
    """Return the layout, legal or not.

    Expert TP defaults to TP.  Sequence parallelism at TP 1 and p2p overlap without interleaving are cleared,
    as ``validate_args`` does.

    Args:
        global_batch: None means micro-batch times data parallel size, Megatron-LM's default.

    Raises:
        BadInputError: a degree that is not a positive integer, or flags that exclude each other.
    """
    tp, pp, cp, ep = (
        args.integer(AXIS_FIELDS[axis][0], maximum=MAX_DEGREE) or 1 for axis in ("tp", "pp", "cp", "ep")
    )
    etp = args.integer("expert_tensor_parallel_size", maximum=MAX_DEGREE) or tp
    vpp, chunks = _pipeline(args, model, pp)
    dp = max(1, num_gpus // (tp * pp * cp))
    micro_batch = args.required_integer("micro_batch_size")
    sequence_parallel = args.flag("sequence_parallel") and tp > 1
    if args.flag("sequence_parallel") and tp == 1:
        assumptions.append("--sequence-parallel is cleared at TP 1, as Megatron-LM does")
    return Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        edp=max(1, num_gpus // (etp * pp * ep)),
        sequence_parallel=sequence_parallel,
        micro_batch=micro_batch,
        global_batch=micro_batch * dp if global_batch is None else global_batch,
        num_layers_per_chunk=chunks,
        sharding=read_sharding(args),
        num_optimizer_instances=args.integer("num_distributed_optimizer_instances", maximum=MAX_DEGREE) or 1,
        micro_batch_group=args.integer("microbatch_group_size_per_vp_stage", maximum=MAX_DEGREE) or 0,
        recompute=_recompute(args),
        overlap=_overlap(args, vpp=vpp),
        order=_order(args),
    )


def _order(args: Arguments) -> Order:
    return "tp-cp-ep-pp-dp" if args.flag("use_tp_pp_dp_mapping") else "tp-cp-ep-dp-pp"


def read_sharding(args: Arguments) -> Sharding:
    """Return what is sharded over data parallel ranks; without FSDP the strategy flag has no effect."""
    if args.flag("use_torch_fsdp2"):
        return "optim_grads_params"
    if args.flag("use_megatron_fsdp") or args.flag("use_custom_fsdp"):
        return _SHARDINGS[args.choice("data_parallel_sharding_strategy", tuple(_SHARDINGS)) or "no_shard"]
    return "optim" if args.flag("use_distributed_optimizer") else "none"


def _pipeline(args: Arguments, model: ModelSpec, pp: int) -> tuple[int, tuple[int, ...]]:
    """Return (vpp, layers per chunk in model order); chunk j runs on pipeline rank j mod pp.

    Source: ``validate_args``; ``core/transformer/transformer_block.py: get_num_layers_to_build``.
    """
    asked = [name for name in (*AXIS_FIELDS["vpp"], "pipeline_model_parallel_layout") if args.has(name)]
    if len(asked) > 1:
        raise _clash(args, asked, "at most one of these may be given")
    ends = [name for name in _PLACEMENTS if args.has(name)]
    hybrid = read_pattern(args)
    if hybrid is not None and len(hybrid.chunks) > 1:
        return _from_pattern(args, hybrid, pp, [*asked, *ends])
    if args.has("pipeline_model_parallel_layout"):
        if len(ends) > 1:
            raise _clash(args, ends, "a layout string excludes the other flags that place layers")
        return _from_string(args, model, pp)
    embedding = args.flag("account_for_embedding_in_pipeline_split")
    loss = args.flag("account_for_loss_in_pipeline_split")
    first = args.integer("decoder_first_pipeline_num_layers", maximum=MAX_DEGREE)
    last = args.integer("decoder_last_pipeline_num_layers", maximum=MAX_DEGREE)
    if (embedding or loss) and (first is not None or last is not None):
        raise _clash(args, ends, "uneven ends exclude embedding and loss slots")
    vpp = args.integer("num_virtual_stages_per_pipeline_rank", maximum=MAX_DEGREE) or 1
    per_chunk = args.integer("num_layers_per_virtual_pipeline_stage", maximum=MAX_DEGREE)
    if per_chunk is not None:
        if first is not None or last is not None:
            raise _clash(args, [*asked, *ends], "with uneven ends, --num-virtual-stages-per-pipeline-rank")
        slots = model.num_layers + embedding + loss
        if slots % (pp * per_chunk):
            raise _clash(args, asked, f"{slots} layer slots are not a multiple of {pp} stages times this")
        vpp = slots // (pp * per_chunk)
    if pp * vpp > MAX_DEGREE:
        raise _clash(args, asked, "the pipeline has more chunks than any model has layers")
    if embedding or loss:
        return vpp, accounted_layers(
            pp=pp, vpp=vpp, num_layers=model.num_layers, embedding=embedding, loss=loss
        )
    return vpp, uneven_layers(pp=pp, vpp=vpp, num_layers=model.num_layers, first=first, last=last)


def _from_string(args: Arguments, model: ModelSpec, pp: int) -> tuple[int, tuple[int, ...]]:
    name = "pipeline_model_parallel_layout"
    segments = parse(args.text(name) or "")
    if len(segments) % pp:
        raise args.wrong(name, f"a layout whose {len(segments)} segments are a multiple of {pp} stages")
    mtp = sum(segment.mtp for segment in segments)
    if mtp != model.mtp_num_layers:
        raise args.wrong(
            name, f"a layout with {model.mtp_num_layers} m, one per --mtp-num-layers; it has {mtp}"
        )
    for i, segment in enumerate(segments[:-pp]):
        if segment.mtp:
            raise args.wrong(name, f"a layout with m on the last chunk of a rank; it is in segment {i}")
    return len(segments) // pp, tuple(segment.num_layers for segment in segments)


def _from_pattern(
    args: Arguments, hybrid: HybridPattern, pp: int, others: list[str]
) -> tuple[int, tuple[int, ...]]:
    if others:
        raise _clash(
            args, [hybrid.field, *others], "a pattern with | excludes the other flags that place layers"
        )
    if len(hybrid.chunks) % pp:
        raise args.wrong(
            hybrid.field, f"a pattern whose {len(hybrid.chunks)} segments are a multiple of {pp} stages"
        )
    return len(hybrid.chunks) // pp, tuple(len(chunk) for chunk in hybrid.chunks)


def _clash(args: Arguments, names: list[str], sentence: str) -> BadInputError:
    return BadInputError("NEST-M10", sentence, factors=[args.factor(name) for name in names])


def _recompute(args: Arguments) -> Recompute:
    granularity = args.choice("recompute_granularity", tuple(g for g in get_args(Granularity) if g != "none"))
    if args.flag("recompute_activations") or args.flag("moe_layer_recompute"):
        granularity = "selective"
    method = args.choice("recompute_method", tuple(m for m in get_args(RecomputeMethod) if m != "none"))
    num_layers = args.integer("recompute_num_layers", minimum=0) or 0
    if granularity is None:
        return Recompute()
    if granularity == "selective":
        modules = args.texts("recompute_modules") or ("core_attn",)
        if args.flag("moe_layer_recompute") and "moe" not in modules:
            modules = (*modules, "moe")
        return Recompute(granularity="selective", modules=modules)
    how: RecomputeMethod = "uniform" if method == "uniform" else "block" if method == "block" else "none"
    return Recompute(granularity="full", method=how, num_layers=num_layers)


def _overlap(args: Arguments, *, vpp: int) -> Overlap:
    return Overlap(
        grad_reduce=args.flag("overlap_grad_reduce"),
        param_gather=args.flag("overlap_param_gather"),
        tp_comm=args.flag("tp_comm_overlap"),
        p2p=vpp > 1 and args.flag("overlap_p2p_comm"),
        expert_all_to_all=args.flag("overlap_moe_expert_parallel_comm"),
    )
