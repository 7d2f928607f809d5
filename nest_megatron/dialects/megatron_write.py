"""Minimal edits that make a Megatron-LM run ask for a layout, as field -> value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nest_megatron.dialects import layout_string
from nest_megatron.dialects.megatron_arguments import Arguments
from nest_megatron.dialects.megatron_flags import BY_FIELD, default_of
from nest_megatron.dialects.megatron_hybrid import read_pattern
from nest_megatron.dialects.nemo_layout import accounted_layers, uneven_layers
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.rules.versions import facts_for
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Sharding

_FSDP = ("use_megatron_fsdp", "use_custom_fsdp", "use_torch_fsdp2", "data_parallel_sharding_strategy")
#: How layers are placed: first, last, embedding slot, loss slot, layout string.
_EVEN: tuple[int | None, int | None, bool, bool, str | None] = (None, None, False, False, None)


@dataclass(frozen=True, slots=True)
class Target:
    """A field, and the value it must have; None means absent, which is Megatron-LM's default.

    Args:
        default: what Megatron-LM uses when the field is absent, where the flag table does not say it.
    """

    field: str
    value: Any
    default: Any = None

    def met_by(self, args: Arguments) -> bool:
        """Return whether the arguments already say so."""
        kind = BY_FIELD[self.field].kind
        if kind in ("on", "off"):
            return args.flag(self.field) == bool(self.value)
        if not args.has(self.field):
            return bool(self.value is None or self.value == self.default)
        if self.value is None:
            return False
        if kind == "int":
            return bool(args.integer(self.field, minimum=0) == self.value)
        if kind == "str*":
            return args.texts(self.field) == tuple(self.value)
        return bool(args.text(self.field) == self.value)


def layout_edits(args: Arguments, job: TrainJob, layout: Layout) -> dict[str, Any]:
    """Return field -> value for every field that must change; None removes it, switches are booleans.

    Raises:
        BadInputError: this release has no flag for ``layout``.
    """
    _check_expressible(job, layout)
    targets = {target.field: target for target in _targets(args, job, layout)}
    return {name: target.value for name, target in targets.items() if not target.met_by(args)}


def _check_expressible(job: TrainJob, layout: Layout) -> None:
    """Refuse what this release has no flag for; what the user already asks for needs no edit."""
    able, user = job.capabilities, job.user_layout
    own_etp = layout.etp != layout.tp
    kept_etp = layout.etp == user.etp != user.tp
    selective = layout.recompute.granularity == "selective"
    modules = set(layout.recompute.modules) - set(able.recompute_modules) - set(user.recompute.modules)
    instances = layout.num_optimizer_instances
    reasons = [
        (layout.cp not in (1, user.cp) and not able.context_parallel, "cp", layout.cp),
        (layout.ep not in (1, user.ep) and not able.expert_parallel, "ep", layout.ep),
        (own_etp and not able.expert_tensor_parallel and not kept_etp, "etp", layout.etp),
        (layout.sequence_parallel and layout.tp == 1, "sequence_parallel", True),
        (layout.sharding not in (*able.shardings, user.sharding), "sharding", layout.sharding),
        (layout.order not in (*able.orders, user.order), "order", layout.order),
        (layout.overlap.tp_comm and not layout.sequence_parallel, "overlap.tp_comm", True),
        (layout.overlap.p2p and layout.vpp == 1, "overlap.p2p", True),
        (layout.global_batch != user.global_batch, "global_batch", layout.global_batch),
        (
            instances not in (1, user.num_optimizer_instances) and not able.optimizer_instances,
            "num_optimizer_instances",
            instances,
        ),
        (selective and bool(modules), "recompute", "+".join(sorted(modules))),
    ]
    for broken, name, value in reasons:
        if broken:
            raise _inexpressible(job, name, value)


def _inexpressible(job: TrainJob, name: str, value: object) -> BadInputError:
    return BadInputError(
        "NEST-M14",
        f"megatron-core {job.megatron_core_version} has no flag for this value",
        factors=[Factor(name, value, "plan")],
    )


def _targets(args: Arguments, job: TrainJob, layout: Layout) -> Iterator[Target]:
    yield Target("tensor_model_parallel_size", layout.tp, 1)
    yield Target("pipeline_model_parallel_size", layout.pp, 1)
    yield Target("context_parallel_size", layout.cp, 1)
    yield Target("expert_model_parallel_size", layout.ep, 1)
    if args.has("expert_tensor_parallel_size") or layout.etp != layout.tp:
        yield Target("expert_tensor_parallel_size", layout.etp)
    yield Target("micro_batch_size", layout.micro_batch)
    if not args.has("step_batch_size_schedule"):
        # Without the flag the global batch would follow the new micro-batch and data parallel size.
        yield Target("global_batch_size", layout.global_batch, layout.micro_batch * layout.dp)
    if layout.tp > 1:
        # At TP 1 Megatron-LM clears it, so the command line may keep what it says.
        yield Target("sequence_parallel", layout.sequence_parallel)
    yield Target("use_tp_pp_dp_mapping", layout.order == "tp-cp-ep-pp-dp")
    yield from _pipeline(args, job, layout)
    yield from _sharding(args, job.user_layout.sharding, layout)
    yield from _recompute(job.user_layout, layout)
    yield from _overlap(layout)
    yield from _dependents(args, job.user_layout, layout)


def _pipeline(args: Arguments, job: TrainJob, layout: Layout) -> Iterator[Target]:
    user = job.user_layout
    now = (layout.pp, layout.vpp, layout.num_layers_per_chunk)
    if now == (user.pp, user.vpp, user.num_layers_per_chunk):
        return
    hybrid = read_pattern(args)
    if hybrid is not None and job.capabilities.layout_string:
        if len(layout.num_layers_per_chunk) != layout.pp * layout.vpp:
            raise _inexpressible(job, "num_layers_per_chunk", list(layout.num_layers_per_chunk))
        yield Target(hybrid.field, hybrid.split(layout.num_layers_per_chunk))
        return
    first, last, embedding, loss, text = _form(job, layout)
    yield Target("decoder_first_pipeline_num_layers", first)
    yield Target("decoder_last_pipeline_num_layers", last)
    yield Target("account_for_embedding_in_pipeline_split", embedding)
    yield Target("account_for_loss_in_pipeline_split", loss)
    yield Target("pipeline_model_parallel_layout", text)
    stages: int | None = None
    per_chunk: int | None = None
    if layout.vpp > 1 and text is None:
        uneven = first is not None or last is not None
        old = facts_for(job.megatron_core_version).account_embedding_and_loss is False
        if not uneven and (args.has("num_layers_per_virtual_pipeline_stage") or old):
            per_chunk = (job.model.num_layers + embedding + loss) // (layout.pp * layout.vpp)
        else:
            stages = layout.vpp
    yield Target("num_layers_per_virtual_pipeline_stage", per_chunk)
    yield Target("num_virtual_stages_per_pipeline_rank", stages)


def _form(job: TrainJob, layout: Layout) -> tuple[int | None, int | None, bool, bool, str | None]:
    """Return the simplest way to place the layers: evenly, with slots for the ends, uneven ends, a string."""
    chunks, pp, vpp, able = layout.num_layers_per_chunk, layout.pp, layout.vpp, job.capabilities
    num_layers = job.model.num_layers
    if len(chunks) != pp * vpp or sum(chunks) != num_layers:
        raise _inexpressible(job, "num_layers_per_chunk", list(chunks))
    if num_layers % (pp * vpp) == 0 and len(set(chunks)) == 1:
        return _EVEN
    if able.account_embedding_and_loss:
        for embedding, loss in ((True, True), (True, False), (False, True)):
            if (num_layers + embedding + loss) % (pp * vpp) == 0 and chunks == accounted_layers(
                pp=pp, vpp=vpp, num_layers=num_layers, embedding=embedding, loss=loss
            ):
                return None, None, embedding, loss, None
    if able.uneven_ends and pp > 1:
        ends = _ends(job, layout)
        if ends is not None:
            return *ends, False, False, None
    if able.layout_string:
        return None, None, False, False, layout_string.write(chunks, job.model.mtp_num_layers)
    raise _inexpressible(job, "num_layers_per_chunk", list(chunks))


def _ends(job: TrainJob, layout: Layout) -> tuple[int | None, int | None] | None:
    """Return layers of the first and last rank (None: like the middle), or None when that is not the form."""
    chunks, pp = layout.num_layers_per_chunk, layout.pp
    ranks = [sum(chunks[rank::pp]) for rank in range(pp)]
    middle = ranks[1] if pp > 2 else None
    first = ranks[0] if ranks[0] != middle else None
    last = ranks[-1] if ranks[-1] != middle else None
    if 0 in ranks or any(count % layout.vpp for count in (first, last) if count is not None):
        return None
    wanted = uneven_layers(pp=pp, vpp=layout.vpp, num_layers=job.model.num_layers, first=first, last=last)
    return (first, last) if wanted == chunks else None


def _sharding(args: Arguments, user: Sharding, layout: Layout) -> Iterator[Target]:
    if layout.sharding != user:
        for name in _FSDP:
            yield Target(name, False if BY_FIELD[name].kind == "on" else None)
        if args.text("ckpt_format") in ("fsdp_dtensor", "torch_dcp"):
            yield Target("ckpt_format", None)
        yield Target("use_distributed_optimizer", layout.sharding == "optim")
    yield Target("num_distributed_optimizer_instances", layout.num_optimizer_instances, 1)


def _recompute(user: Layout, layout: Layout) -> Iterator[Target]:
    recompute = layout.recompute
    if recompute == user.recompute:
        return
    full, selective = recompute.granularity == "full", recompute.granularity == "selective"
    yield Target("recompute_activations", False)
    yield Target("moe_layer_recompute", False)
    yield Target("recompute_granularity", None if recompute.granularity == "none" else recompute.granularity)
    yield Target("recompute_method", recompute.method if full and recompute.method != "none" else None)
    yield Target("recompute_num_layers", recompute.num_layers if full else None)
    modules = recompute.modules if selective else ()
    yield Target("recompute_modules", None if modules in ((), ("core_attn",)) else list(modules))
    yield Target("distribute_saved_activations", False)


def _overlap(layout: Layout) -> Iterator[Target]:
    overlap = layout.overlap
    yield Target("overlap_grad_reduce", overlap.grad_reduce)
    yield Target("overlap_param_gather", overlap.param_gather)
    yield Target("tp_comm_overlap", overlap.tp_comm)
    yield Target("overlap_moe_expert_parallel_comm", overlap.expert_all_to_all)
    if layout.vpp > 1:
        yield Target("overlap_p2p_comm", overlap.p2p)


def _dependents(args: Arguments, user: Layout, layout: Layout) -> Iterator[Target]:
    """Flags that are tuned for, or only legal with, what the plan changes: removed with it."""
    if (layout.tp, layout.micro_batch) != (user.tp, user.micro_batch) or not layout.overlap.tp_comm:
        yield Target("tp_comm_overlap_cfg", None)
    if layout.cp != user.cp and args.has("hierarchical_context_parallel_sizes"):
        yield Target("hierarchical_context_parallel_sizes", None)
        yield Target("cp_comm_type", None)
    if layout.interleaving_group != user.interleaving_group or layout.vpp == 1:
        group = layout.interleaving_group
        yield Target("microbatch_group_size_per_vp_stage", None if group == layout.pp else group)
    if layout.vpp == 1 or not layout.overlap.param_gather:
        yield Target("overlap_param_gather_with_optimizer_step", False)
    if layout.vpp == 1:
        yield Target("overlap_p2p_comm_warmup_flush", False)
    if layout.pp == 1:
        yield Target("defer_embedding_wgrad_compute", False)
    if not layout.overlap.expert_all_to_all:
        yield Target("delay_wgrad_compute", False)


def as_flags(edits: dict[str, Any]) -> dict[str, Any]:
    """Return field edits as flag -> value: true for a switch to set, None for a flag to remove."""
    found: dict[str, Any] = {}
    for name, value in edits.items():
        flag = BY_FIELD[name]
        if flag.kind in ("on", "off"):
            value = True if value != bool(default_of(name, (0, 0))) else None
        found[f"--{flag.name}"] = value
    return found
