"""Case record -> TrainJob and Layout, field by field; what a record does not say stays an open choice."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from nest_megatron import rules
from nest_megatron.dialects.profiles import load_profile
from nest_megatron.specs.job import COMMAND_LINE, TrainJob
from nest_megatron.specs.layout import Layout, Overlap, Recompute, Sharding
from tests.builders import make_profile
from tests.cases.models import UNNAMED, NotComputable, model_spec, neutral_model, public_model
from tests.cases.stacks import Stack, cluster_name, stack_of

#: Micro-batches per stage where no batch is stated: enough for every schedule.
_MICRO_BATCHES_PER_STAGE = 8
_DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp", "sp")
_BATCH = ("mbs", "gbs", "seq", "num_microbatches")
#: Words in the sharding of a record that name something the memory model does not price here.
_UNPRICED_SHARDING = re.compile(r"fsdp|zero-?[23]|offload|cpu|8-bit|forced|vs ", re.IGNORECASE)
_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")

FULL = Recompute(granularity="full", method="uniform", num_layers=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One computable record.

    Args:
        layouts: every reading of what the record leaves open, the one with the least memory first.
        open: what is open, in words; ``growing`` when an open value could still add memory.
    """

    id: str
    job: TrainJob
    layouts: tuple[Layout, ...]
    open: tuple[str, ...]
    growing: bool

    @property
    def layout(self) -> Layout:
        """The layout as far as rules can see it."""
        return self.layouts[0]


def records(shared: Path) -> dict[str, dict[str, Any]]:
    """Return the case records by id."""
    plain = json.loads((shared / "data" / "cases" / "cases.json").read_text(encoding="utf-8"))
    return {record["id"]: record for record in plain["records"]}


def vary(record: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a record in which a sentence of the case changes some fields."""
    varied = copy.deepcopy(dict(record))
    for key, value in changes.items():
        if key in _DEGREES:
            varied["parallel"][key] = value
        elif key in _BATCH:
            varied["batch"][key] = value
        elif key == "mem_gb":
            varied["hardware"][key] = value
        else:
            varied[key] = value
    return varied


def build(record: Mapping[str, Any]) -> Case:
    """Return the job and layout of a record, for the rules.

    Raises:
        NotComputable: a fact that decides is missing; the message names it.
    """
    stack = stack_of(record)
    degrees = record["parallel"]
    if degrees.get("tp") is None and degrees.get("pp") is None:
        raise NotComputable("neither tp nor pp is stated")
    tp, pp, cp = (degrees.get(axis) or 1 for axis in ("tp", "pp", "cp"))
    ep = degrees.get("ep") or 1
    vpp = _chunks(record, pp)
    unnamed = record["model"]["name"] in UNNAMED
    model = neutral_model(pp * vpp) if unnamed else model_spec(record["model"])
    etp = degrees.get("etp") or _expert_tensor(record, tp, ep * pp)
    grid = math.lcm(tp * pp * cp, etp * ep * pp) if model.moe else tp * pp * cp
    num_gpus = record.get("num_gpus") or grid
    dp = max(1, num_gpus // (tp * pp * cp))
    batch = record["batch"]
    micro_batch = batch.get("mbs") or 1
    micro_batches = batch.get("num_microbatches") or _MICRO_BATCHES_PER_STAGE * pp
    global_batch = batch.get("gbs") or micro_batch * dp * micro_batches
    public = public_model(str(record["model"]["name"]))
    sequence = batch.get("seq") or (public.context if public else 4096)
    layout = Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        edp=max(1, num_gpus // (etp * ep * pp)),
        micro_batch=micro_batch,
        global_batch=global_batch,
        num_layers_per_chunk=_dealt(model.num_layers, pp * vpp, evenly=stack.deals_evenly),
        overlap=Overlap(p2p=vpp > 1),
    )
    layouts, unstated = _readings(record, layout, stack, sequence)
    job = TrainJob(
        name=str(record["id"]),
        dialect="case",
        framework=stack.profile,
        framework_version=stack.version,
        megatron_core_version=str(record.get("megatron_core_version") or stack.version),
        model=model,
        num_gpus=num_gpus,
        gpus_per_node=(record.get("hardware") or {}).get("gpus_per_node") or 8,
        global_batch=global_batch,
        sequence_length=sequence,
        recipe=_recipe(record, stack) or next(iter(stack.recipes.values())),
        kernels=stack.kernels,
        user_layout=layouts[0],
        profile=make_profile(),
        capabilities=stack.capabilities,
        origins=dict.fromkeys(("tp", "pp", "vpp", "ep", "etp", "num_gpus"), COMMAND_LINE),
    )
    growing = batch.get("mbs") is None
    return Case(
        id=str(record["id"]),
        job=job,
        layouts=layouts,
        open=(*unstated, *(("micro-batch",) if growing else ())),
        growing=growing,
    )


def build_for_memory(record: Mapping[str, Any]) -> tuple[Case, str]:
    """Return the case with the framework profile of its stack, and the name of its cluster.

    Raises:
        NotComputable: a fact that decides about memory is missing, or nothing here can express it.
    """
    case, stack = build(record), stack_of(record)
    name = str(record["model"]["name"])
    public = public_model(name)
    if record["model"]["name"] in UNNAMED or public is None:
        raise NotComputable(f"model {name} is not stated")
    if public.unmodelled:
        raise NotComputable(f"model {name} has {public.unmodelled}")
    if record.get("num_gpus") is None:
        raise NotComputable("the number of GPUs is not stated")
    if record["parallel"].get("tp") is None or record["parallel"].get("pp") is None:
        raise NotComputable("tp and pp are not both stated")
    if _UNPRICED_SHARDING.search(str(record.get("sharding"))):
        raise NotComputable(f"sharding {record['sharding']!r} is not priced")
    if _recipe(record, stack) is None:
        raise NotComputable(f"precision {record.get('precision')!r} has no recipe in {stack.profile}")
    cluster = cluster_name(record)
    if broken := rules.check(case.job, case.layout):
        raise NotComputable(f"as stated it is illegal: {broken[0].message}")
    return replace(case, job=replace(case.job, profile=load_profile(stack.profile))), cluster


def _expert_tensor(record: Mapping[str, Any], tp: int, rest: int) -> int:
    """Return an unstated etp: tp, as Megatron has it, unless only 1 divides the world of a record."""
    num_gpus = record.get("num_gpus")
    return tp if not num_gpus or num_gpus % (tp * rest) == 0 else 1


def _chunks(record: Mapping[str, Any], pp: int) -> int:
    """Return vpp, also from Megatron's older way to say it: layers per virtual stage."""
    degrees = record["parallel"]
    if per_chunk := degrees.get("layers_per_virtual_stage"):
        return max(1, model_spec(record["model"]).num_layers // pp // int(per_chunk))
    return int(degrees.get("vpp") or 1)


def _dealt(num_layers: int, chunks: int, *, evenly: bool) -> tuple[int, ...]:
    """Return layers per chunk: Megatron builds the floor everywhere unless it is told an uneven form."""
    each, rest = divmod(num_layers, chunks)
    return (each + 1,) * rest + (each,) * (chunks - rest) if evenly else (each,) * chunks


def _readings(
    record: Mapping[str, Any], layout: Layout, stack: Stack, sequence: int
) -> tuple[tuple[Layout, ...], tuple[str, ...]]:
    """Return the layout under every reading of recomputation, sharding and sequence parallelism."""
    recompute = recompute_readings(record.get("recompute"))
    sharding = sharding_readings(record.get("sharding"))
    sequence_parallel = _sequence_parallel(record, layout, stack, sequence)
    layouts = tuple(
        replace(layout, recompute=r, sharding=s, sequence_parallel=sp)
        for r, s, sp in product(recompute, sharding, sequence_parallel)
    )
    choices = {"recompute": recompute, "sharding": sharding, "sequence parallelism": sequence_parallel}
    return layouts, tuple(name for name, values in choices.items() if len(values) > 1)


def _sequence_parallel(
    record: Mapping[str, Any], layout: Layout, stack: Stack, sequence: int
) -> tuple[bool, ...]:
    """Return the readings of ``sp``: a stack with Transformer Engine may have it, experts need it."""
    stated = record["parallel"].get("sp")
    if layout.tp == 1:
        return (False,)
    if stated is not None:
        return (bool(stated),)
    if not stack.kernels.transformer_engine or sequence % (layout.cp * layout.tp):
        return (False,)
    return (True,) if "experts" in record["model"] or layout.ep > 1 else (True, False)


def recompute_readings(text: str | None) -> tuple[Recompute, ...]:
    """Return what a record's ``recompute`` can mean, least memory first."""
    words = (text or "unknown").lower()
    if words.startswith("none") and " vs " not in words:
        return (Recompute(),)
    if words.startswith("full"):
        return (FULL,)
    if words.startswith("selective") and " vs " not in words:
        named = tuple(m for m in _MODULES if re.search(rf"\b{m}\b", words))
        return (Recompute(granularity="selective", modules=named or ("core_attn",)),)
    return FULL, Recompute()


def sharding_readings(text: str | None) -> tuple[Sharding, ...]:
    """Return what a record's ``sharding`` can mean, least memory first."""
    words = (text or "unknown").lower()
    if words.startswith(("zero-1", "distributed optimizer")):
        return ("optim",)
    return ("none",) if words.startswith("none") else ("optim", "none")


def _recipe(record: Mapping[str, Any], stack: Stack) -> Any:
    """Return the bytes per parameter of the record's precision, None when the stack has none for it."""
    words = str(record.get("precision") or "").lower()
    for name, recipe in stack.recipes.items():
        if words.startswith(name):
            return recipe
    return None
