"""The layout that a NeMo configuration asks for, as NeMo would run it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import get_args

from nest_megatron.dialects.access import ConfigView
from nest_megatron.dialects.nemo_settings import Optimizer, uses_megatron_core
from nest_megatron.dialects.nemo_versions import NemoVersion, plain_grad_overlap, recompute_modules
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs.layout import Granularity, Layout, Order, Overlap, Recompute, RecomputeMethod

#: Larger degrees are typing errors; the bound keeps the tuple of chunks small.
MAX_DEGREE = 100_000

TP = "model.tensor_model_parallel_size"
PP = "model.pipeline_model_parallel_size"
VPP = "model.virtual_pipeline_model_parallel_size"
CP = "model.context_parallel_size"
EP = "model.expert_model_parallel_size"
SP = "model.sequence_parallel"
MICRO_BATCH = "model.micro_batch_size"
FIRST_LAYERS = "model.num_layers_in_first_pipeline_stage"
LAST_LAYERS = "model.num_layers_in_last_pipeline_stage"
ACCOUNT_EMBEDDING = "model.account_for_embedding_in_pipeline_split"
ACCOUNT_LOSS = "model.account_for_loss_in_pipeline_split"
OPTIMIZER = "model.optim.name"
INSTANCES = "model.optim.num_distributed_optimizer_instances"
GRANULARITY = "model.activations_checkpoint_granularity"
METHOD = "model.activations_checkpoint_method"
RECOMPUTE_LAYERS = "model.activations_checkpoint_num_layers"
RECOMPUTE_MODULES = "model.recompute_modules"
GRAD_OVERLAP = "model.optim.overlap_grad_sync"
PARAM_OVERLAP = "model.optim.overlap_param_sync"
TP_OVERLAP = "model.ub_tp_comm_overlap"
P2P_OVERLAP = "model.overlap_p2p_comm"
P2P_BATCHED = "model.batch_p2p_comm"
ORDER = "model.use_tp_pp_dp_mapping"

#: Axis of specs.layout.AXES -> the keys that decide it.
AXIS_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tp": (TP,),
        "pp": (PP,),
        "vpp": (VPP,),
        "cp": (CP,),
        "ep": (EP,),
        "sequence_parallel": (SP,),
        "micro_batch": (MICRO_BATCH,),
        "layers": (FIRST_LAYERS, LAST_LAYERS, ACCOUNT_EMBEDDING, ACCOUNT_LOSS),
        "sharding": (OPTIMIZER,),
        "recompute": (GRANULARITY, METHOD, RECOMPUTE_LAYERS, RECOMPUTE_MODULES),
        "overlap": (GRAD_OVERLAP, PARAM_OVERLAP, TP_OVERLAP, P2P_OVERLAP),
        "order": (ORDER,),
    }
)
#: Axis -> attribute of Layout, where the names differ.
AXIS_FIELDS: Mapping[str, str] = MappingProxyType({"layers": "num_layers_per_chunk"})


def read_layout(
    view: ConfigView,
    version: NemoVersion,
    optimizer: Optimizer,
    *,
    num_gpus: int,
    num_layers: int,
    global_batch: int,
) -> Layout:
    """Return the layout, legal or not.

    Expert TP equals TP: no NeMo version passes an expert TP size, and megatron-core splits experts over TP by
    default (0.5.0 ``moe/experts.py``; from 0.10 on ``expert_tensor_parallel_size`` None means TP).
    Sequence parallelism at TP 1 and TP overlap without it are cleared, as NeMo does.

    Raises:
        BadInputError: a degree that is not a positive integer, or a flag of another type.
    """
    tp, pp, cp, ep = (view.integer(key, maximum=MAX_DEGREE) or 1 for key in (TP, PP, CP, EP))
    vpp = view.integer(VPP, maximum=MAX_DEGREE) or 1
    if pp * vpp > MAX_DEGREE:
        raise BadInputError(
            "NEST-D03",
            "the pipeline has more chunks than any model has layers",
            factors=[Factor(view.full(key), view.value(key), view.origin(key)) for key in (PP, VPP)],
        )
    sequence_parallel = view.flag(SP) and tp > 1
    instances = (view.integer(INSTANCES, maximum=MAX_DEGREE) or 1) if version.at_least(2, 2) else 1
    order: Order = "tp-cp-ep-dp-pp"
    if version.at_least(2, 0) and view.flag(ORDER):
        order = "tp-cp-ep-pp-dp"
    return Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=tp,
        dp=max(1, num_gpus // (tp * pp * cp)),
        edp=max(1, num_gpus // (tp * pp * ep)),
        sequence_parallel=sequence_parallel,
        micro_batch=view.required_integer(MICRO_BATCH),
        global_batch=global_batch,
        num_layers_per_chunk=_layers_per_chunk(view, version, pp=pp, vpp=vpp, num_layers=num_layers),
        sharding="optim" if optimizer.sharded else "none",
        num_optimizer_instances=instances if optimizer.kind == "megatron-core" else 1,
        recompute=_recompute(view, version),
        overlap=_overlap(view, optimizer, pp=pp, vpp=vpp, sequence_parallel=sequence_parallel),
        order=order,
    )


def accounted_layers(
    *, pp: int, vpp: int, num_layers: int, embedding: bool = True, loss: bool = True
) -> tuple[int, ...]:
    """Return layers per chunk when embedding and loss take one layer's slot each (floor if not divisible).

    Source: megatron-core ``transformer_block.py: get_num_layers_to_build``.
    """
    each = (num_layers + embedding + loss) // (pp * vpp)
    chunks = [each] * (pp * vpp)
    chunks[0] -= embedding
    chunks[-1] -= loss
    return tuple(chunks)


def uneven_layers(
    *, pp: int, vpp: int, num_layers: int, first: int | None, last: int | None
) -> tuple[int, ...]:
    """Return layers per chunk with given first and last ranks; the others share the rest (floor)."""
    per_rank: list[int | None] = [None] * pp
    per_rank[0] = first
    per_rank[-1] = last if last is not None else per_rank[-1]
    given = [count for count in per_rank if count is not None]
    shared = (num_layers - sum(given)) // max(1, pp - len(given))
    counts = [shared if count is None else count for count in per_rank]
    return tuple(counts[chunk % pp] // vpp for chunk in range(pp * vpp))


def _layers_per_chunk(
    view: ConfigView, version: NemoVersion, *, pp: int, vpp: int, num_layers: int
) -> tuple[int, ...]:
    """Return layers per chunk in model order; chunk j runs on pipeline rank j mod pp."""
    first = last = None
    if uses_megatron_core(view) and version.at_least(2, 2):
        embedding, loss = view.flag(ACCOUNT_EMBEDDING), view.flag(ACCOUNT_LOSS)
        if embedding or loss:
            return accounted_layers(pp=pp, vpp=vpp, num_layers=num_layers, embedding=embedding, loss=loss)
        # 2.2 hands the keys to megatron-core as well, but still demands an even split: read, not offered.
        first, last = view.integer(FIRST_LAYERS), view.integer(LAST_LAYERS)
    return uneven_layers(pp=pp, vpp=vpp, num_layers=num_layers, first=first, last=last)


def _recompute(view: ConfigView, version: NemoVersion) -> Recompute:
    granularity = view.choice(GRANULARITY, tuple(g for g in get_args(Granularity) if g != "none"))
    method = view.choice(METHOD, tuple(m for m in get_args(RecomputeMethod) if m != "none"))
    num_layers = view.integer(RECOMPUTE_LAYERS, minimum=0)
    if granularity is None:
        return Recompute()
    if granularity == "selective":
        return Recompute(granularity="selective", modules=recompute_modules(view, version))
    how: RecomputeMethod = "uniform" if method == "uniform" else "block" if method == "block" else "none"
    return Recompute(granularity="full", method=how, num_layers=num_layers or 0)


def _overlap(
    view: ConfigView, optimizer: Optimizer, *, pp: int, vpp: int, sequence_parallel: bool
) -> Overlap:
    """Return what is really hidden.

    Apex' optimizer overlaps the gradient sync unless told otherwise, megatron-core's only when told; both
    need O2, because autocast copies gradients after the backward pass.  A plain optimizer with O2 reduces
    asynchronously without pipeline and sequence parallelism (``configure_optimizers``).
    """
    if optimizer.sharded:
        grad = optimizer.o2 and view.flag(GRAD_OVERLAP, optimizer.kind == "apex")
        param = optimizer.o2 and view.flag(PARAM_OVERLAP)
    else:
        grad = pp == 1 and not sequence_parallel and plain_grad_overlap(view, optimizer) != "never"
        param = False
    return Overlap(
        grad_reduce=grad,
        param_gather=param,
        tp_comm=sequence_parallel and view.flag(TP_OVERLAP),
        p2p=vpp > 1 and view.flag(P2P_OVERLAP),
    )
