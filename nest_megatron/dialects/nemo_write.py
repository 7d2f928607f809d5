"""Minimal edits that make a NeMo configuration ask for a layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nest_megatron.dialects import nemo_layout as keys
from nest_megatron.dialects.access import ConfigView
from nest_megatron.dialects.nemo_layout import accounted_layers, uneven_layers
from nest_megatron.dialects.nemo_settings import read_optimizer
from nest_megatron.dialects.nemo_versions import parse_release
from nest_megatron.errors import BadInputError, Factor, PlannerFault
from nest_megatron.specs.job import Capabilities, TrainJob
from nest_megatron.specs.layout import Layout

_SAVED_SIZE = "exp_manager.checkpoint_callback_params.model_parallel_size"
_TP_OVERLAP_CFG = "model.ub_tp_comm_overlap_cfg"
#: Rounds until edits and the interpolations that depend on them agree; the second one settles real files.
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class _Target:
    """A key, the value it must have, and what NeMo uses when the value is null or absent."""

    key: str
    value: Any
    default: Any = None

    def met_by(self, view: ConfigView) -> bool:
        """Return whether the configuration already says so."""
        found = view.value(self.key)
        now = self.default if found is None else found
        wanted = self.default if self.value is None else self.value
        return bool(now == wanted)


def layout_edits(view: ConfigView, job: TrainJob, layout: Layout) -> dict[str, Any]:
    """Return full dotted key -> value for every key whose value must change.

    A key that refers to another key of the same name is edited there, so that everything that refers to it
    follows; a key whose interpolation follows by itself is left alone.

    Raises:
        BadInputError: this NeMo version cannot express ``layout``.
    """
    _check_expressible(job, layout)
    targets = tuple(_targets(view, job, layout))
    edits: dict[str, Any] = {}
    current = view
    for _ in range(_ROUNDS):
        unmet = [target for target in targets if not target.met_by(current)]
        if not unmet:
            return edits
        for target in unmet:
            if target.met_by(current):
                continue  # an edit of this round reached it
            source = view.source(target.key)
            # An edited source that still gives another value is shared with a key that needs its own value.
            edits[view.full(target.key) if source in edits else source] = target.value
            current = view.edited(edits)
    raise PlannerFault(
        "NEST-D40",
        "edits and interpolations do not settle",
        factors=[Factor(key, value, "edit") for key, value in edits.items()],
    )


def _check_expressible(job: TrainJob, layout: Layout) -> None:
    """Refuse what this version has no key for; what the user already asks for needs no edit."""
    able, user = job.capabilities, job.user_layout
    reasons = [
        (layout.vpp not in (1, user.vpp) and not able.virtual_pipeline, "vpp", layout.vpp),
        (layout.cp not in (1, user.cp) and not able.context_parallel, "cp", layout.cp),
        (layout.ep not in (1, user.ep) and not able.expert_parallel, "ep", layout.ep),
        (layout.etp != layout.tp, "etp", layout.etp),
        (layout.sequence_parallel and layout.tp == 1, "sequence_parallel", True),
        (layout.sharding not in (*able.shardings, user.sharding), "sharding", layout.sharding),
        (layout.order not in (*able.orders, user.order), "order", layout.order),
        (layout.overlap.expert_all_to_all, "overlap.expert_all_to_all", True),
        (layout.overlap.tp_comm and not layout.sequence_parallel, "overlap.tp_comm", True),
        (layout.overlap.p2p and layout.vpp == 1, "overlap.p2p", True),
        (layout.global_batch != user.global_batch, "global_batch", layout.global_batch),
        (_no_instances_key(able, layout, user), "num_optimizer_instances", layout.num_optimizer_instances),
        (_modules_without_key(able, layout), "recompute", "+".join(layout.recompute.modules)),
    ]
    for broken, name, value in reasons:
        if broken:
            raise _inexpressible(job, name, value)


def _no_instances_key(able: Capabilities, layout: Layout, user: Layout) -> bool:
    asked = layout.num_optimizer_instances
    return asked not in (1, user.num_optimizer_instances) and not able.optimizer_instances


def _modules_without_key(able: Capabilities, layout: Layout) -> bool:
    recompute = layout.recompute
    return recompute.granularity == "selective" and not set(recompute.modules) <= set(able.recompute_modules)


def _inexpressible(job: TrainJob, name: str, value: object) -> BadInputError:
    return BadInputError(
        "NEST-D41",
        f"NeMo {job.framework_version} has no key for this value",
        factors=[Factor(name, value, "plan")],
    )


def _targets(view: ConfigView, job: TrainJob, layout: Layout) -> Iterator[_Target]:
    yield _Target(keys.TP, layout.tp, 1)
    yield _Target(keys.PP, layout.pp, 1)
    yield _Target(keys.VPP, layout.vpp if layout.vpp > 1 else None, 1)
    yield _Target(keys.CP, layout.cp, 1)
    yield _Target(keys.EP, layout.ep, 1)
    yield _Target(keys.MICRO_BATCH, layout.micro_batch)
    yield from _sequence_parallel(view, job, layout)
    yield from _layers(job, layout)
    yield from _sharding(view, job, layout)
    yield from _recompute(job, layout)
    yield from _pipeline_overlap(view, job, layout)
    if layout.order != job.user_layout.order:
        yield _Target(keys.ORDER, layout.order == "tp-cp-ep-pp-dp", False)
    yield from _saved_size(view, job, layout)


def _sequence_parallel(view: ConfigView, job: TrainJob, layout: Layout) -> Iterator[_Target]:
    """SP and TP overlap; at TP 1 NeMo clears both, so the file may keep what it says."""
    if layout.tp == 1:
        return
    yield _Target(keys.SP, layout.sequence_parallel, False)
    if not layout.sequence_parallel:
        return
    yield _Target(keys.TP_OVERLAP, layout.overlap.tp_comm, False)
    user = job.user_layout
    tuned = view.value(_TP_OVERLAP_CFG) is not None
    if layout.overlap.tp_comm and tuned and (layout.tp, layout.micro_batch) != (user.tp, user.micro_batch):
        # The buffer file is tuned for one TP size and micro-batch; null selects NeMo's defaults.
        yield _Target(_TP_OVERLAP_CFG, None)


def _layers(job: TrainJob, layout: Layout) -> Iterator[_Target]:
    """Layers per chunk: even, embedding and loss counted as layers, or own first and last ranks."""
    chunks = layout.num_layers_per_chunk
    pp, vpp, num_layers = layout.pp, layout.vpp, job.model.num_layers
    able, user = job.capabilities, job.user_layout
    if (pp, vpp, chunks) == (user.pp, user.vpp, user.num_layers_per_chunk):
        return
    first: int | None = None
    last: int | None = None
    accounted = False
    if chunks != uneven_layers(pp=pp, vpp=vpp, num_layers=num_layers, first=None, last=None):
        accounted = (
            able.account_embedding_and_loss
            and sum(chunks) == num_layers
            and chunks == accounted_layers(pp=pp, vpp=vpp, num_layers=num_layers)
        )
        if not accounted:
            first, last = _ends(job, layout)
    yield _Target(keys.FIRST_LAYERS, first)
    yield _Target(keys.LAST_LAYERS, last)
    yield _Target(keys.ACCOUNT_EMBEDDING, accounted, False)
    yield _Target(keys.ACCOUNT_LOSS, accounted, False)


def _ends(job: TrainJob, layout: Layout) -> tuple[int | None, int | None]:
    """Return layers of the first and the last pipeline rank, None where they equal the middle ranks.

    With two stages only the first is given: NeMo divides the rest by the number of stages without a key.
    """
    chunks, pp, vpp = layout.num_layers_per_chunk, layout.pp, layout.vpp
    ranks = [sum(chunks[rank::pp]) for rank in range(pp)] if len(chunks) == pp * vpp else []
    if pp > 1 and ranks and job.capabilities.uneven_ends:
        middle = ranks[1] if pp > 2 else None
        first = ranks[0] if ranks[0] != middle else None
        last = ranks[-1] if middle is not None and ranks[-1] != middle else None
        wanted = uneven_layers(pp=pp, vpp=vpp, num_layers=job.model.num_layers, first=first, last=last)
        if wanted == chunks:
            return first, last
    raise _inexpressible(job, "num_layers_per_chunk", list(chunks))


def _sharding(view: ConfigView, job: TrainJob, layout: Layout) -> Iterator[_Target]:
    user = job.user_layout
    optimizer = read_optimizer(view)
    kind = optimizer.kind
    if layout.sharding != user.sharding:
        name = "fused_adam"
        if layout.sharding == "optim":
            core = parse_release(job.framework_version, origin="job") >= (2, 0)
            name = "mcore_distributed_optim" if core else "distributed_fused_adam"
            kind = "megatron-core" if core else "apex"
        yield _Target(keys.OPTIMIZER, name)
    if layout.sharding != "optim":
        return
    if layout.num_optimizer_instances != user.num_optimizer_instances:
        yield _Target(keys.INSTANCES, layout.num_optimizer_instances, 1)
    if optimizer.o2:
        yield _Target(keys.GRAD_OVERLAP, layout.overlap.grad_reduce, kind == "apex")
        yield _Target(keys.PARAM_OVERLAP, layout.overlap.param_gather, False)


def _recompute(job: TrainJob, layout: Layout) -> Iterator[_Target]:
    recompute, user = layout.recompute, job.user_layout.recompute
    if recompute == user:
        return
    full = recompute.granularity == "full"
    yield _Target(keys.GRANULARITY, None if recompute.granularity == "none" else recompute.granularity)
    yield _Target(keys.METHOD, recompute.method if full and recompute.method != "none" else None)
    yield _Target(keys.RECOMPUTE_LAYERS, recompute.num_layers if full else None)
    if recompute.granularity == "selective" and recompute.modules != job.capabilities.recompute_modules:
        yield _Target(keys.RECOMPUTE_MODULES, list(recompute.modules))


def _pipeline_overlap(view: ConfigView, job: TrainJob, layout: Layout) -> Iterator[_Target]:
    """Send and receive: overlapped only with VPP, never batched then (model_parallel_config.py)."""
    user = job.user_layout
    if layout.vpp == 1 and user.vpp == 1:
        return
    clash = layout.overlap.p2p and view.flag(keys.P2P_BATCHED, True)
    if (layout.vpp > 1, layout.overlap.p2p) == (user.vpp > 1, user.overlap.p2p) and not clash:
        return
    yield _Target(keys.P2P_OVERLAP, layout.overlap.p2p, False)
    yield _Target(keys.P2P_BATCHED, not layout.overlap.p2p, True)


def _saved_size(view: ConfigView, job: TrainJob, layout: Layout) -> Iterator[_Target]:
    """exp_manager's copy of TP times PP, when it is a literal that the new sizes make stale."""
    user = job.user_layout
    if layout.tp * layout.pp == user.tp * user.pp:
        return
    if not view.is_interpolation(_SAVED_SIZE) and view.value(_SAVED_SIZE) is not None:
        yield _Target(_SAVED_SIZE, layout.tp * layout.pp)
