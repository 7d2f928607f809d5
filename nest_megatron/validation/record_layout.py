"""The layout of a published record: printed degrees, and what its stack does where nothing is printed."""

from __future__ import annotations

import math
import re
from typing import Any

from nest_megatron.specs.layout import Layout, Overlap, Recompute, Sharding
from nest_megatron.specs.model import ModelSpec
from nest_megatron.validation.splits import (
    even_split,
    filled_split,
    recipe_split,
    split_of_layout,
    split_with_ends,
)
from nest_megatron.validation.switches import switches_of

#: Ranks over which recipes spread experts where a record does not print it (time_model.md, prototype rule).
EXPERT_DOMAIN = 8


class NotComputable(Exception):
    """The record lacks an input, or describes something the model does not cover; the text says which."""


def record_layout(
    record: dict[str, Any], stack: dict[str, Any], model: ModelSpec, brackets: list[str]
) -> Layout:
    """Return the layout that a record prints, completed by the facts of its stack; ``brackets`` grow.

    Raises:
        NotComputable: a degree or batch is neither printed nor known.
    """
    degree = {key: int(record.get(key) or 1) for key in ("tp", "pp", "vpp", "cp", "ep")}
    if record.get("vpp") is None and degree["pp"] > 1:
        degree["vpp"] = _usual_chunks(stack, model, degree["pp"])
    inner = degree["tp"] * degree["pp"] * degree["cp"]
    dp = record.get("dp") or (record.get("num_gpus") or 0) // inner
    if not dp:
        raise NotComputable("neither the GPU count nor the data-parallel size is printed")
    if record.get("ep") is None and model.moe is not None:
        # Recipes spread the experts over the ranks of one NVLink domain, or of a node where it is a rack.
        degree["ep"] = math.gcd(
            math.gcd(model.moe.num_experts, degree["tp"] * degree["cp"] * int(dp)), EXPERT_DOMAIN
        )
    micro_batch, global_batch = _batches(record, stack, int(dp), degree["pp"])
    if global_batch < micro_batch * int(dp):
        raise NotComputable(
            f"a batch of {global_batch} gives {dp} ranks less than {micro_batch} sequences each"
        )
    world = inner * int(dp)
    etp = _expert_tensor_parallel(record, stack, model, degree, world)
    if record.get("pp") is None and record.get("tp") is None and record.get("num_gpus", 1) != 1:
        brackets.append("the layout's degrees are not printed: 1 is assumed")
    sharding = _sharding(record, stack)
    ranks = int(dp) * degree["cp"]
    return Layout(
        tp=degree["tp"],
        pp=degree["pp"],
        vpp=degree["vpp"],
        cp=degree["cp"],
        ep=degree["ep"],
        etp=etp,
        dp=int(dp),
        edp=max(1, world // (etp * degree["ep"] * degree["pp"])),
        sequence_parallel=_sequence_parallel(record, stack, degree["tp"]),
        micro_batch=micro_batch,
        global_batch=global_batch,
        num_layers_per_chunk=_split(record, stack, model, degree["pp"] * degree["vpp"]),
        sharding=sharding,
        num_optimizer_instances=1 if sharding == "none" else ranks // _shard_group(record, ranks),
        recompute=_recompute(record, stack, brackets),
        overlap=_overlap(stack, degree, sharding, record),
    )


def _usual_chunks(stack: dict[str, Any], model: ModelSpec, pp: int) -> int:
    """Return the virtual stages that the stack's recipes use where a record prints none."""
    usual = stack.get("usual_vpp", ())
    return next((v for v in usual if model.num_layers % (pp * v) == 0), 1)


def _split(record: dict[str, Any], stack: dict[str, Any], model: ModelSpec, chunks: int) -> tuple[int, ...]:
    """Return the layers per chunk: printed layout, the recipes' layouts, both ends counted, or even."""
    layers = model.num_layers
    switches = switches_of(record)
    printed = switches.layout if switches else None
    split = split_of_layout(printed, layers, chunks) if printed else None
    split = split or recipe_split(stack.get("recipe_layouts", ()), layers, chunks)
    if split is None and stack.get("split") in ("ends", "filled"):
        split = split_with_ends(layers, chunks)
    if split is None and stack.get("split") == "filled":
        split = filled_split(layers, chunks)
    return split or even_split(layers, chunks)


def _shard_group(record: dict[str, Any], ranks: int) -> int:
    """Return how many of the data-parallel ``ranks`` share one optimizer state."""
    zero = str(record.get("zero") or "").lower()
    printed = re.search(r"shard (?:group |size )?(\d+)|fsdp (\d+), dp", zero)
    replicas = re.search(r"dcn_dp=(\d+)", zero)
    group = ranks
    if printed:
        group = int(printed.group(1) or printed.group(2))
    elif replicas:
        group = ranks // int(replicas.group(1))
    elif "hsdp" in zero:
        group = int(record.get("gpus_per_node") or ranks)
    return group if 0 < group <= ranks and ranks % group == 0 else ranks


def _overlap(
    stack: dict[str, Any], degree: dict[str, int], sharding: Sharding, record: dict[str, Any]
) -> Overlap:
    """Return what the stack overlaps by itself, with what the record's switches change."""
    switches = switches_of(record)
    if stack.get("overlap") == "off":
        return Overlap()
    data, tensor = True, stack.get("overlap") == "userbuffers"
    if switches is not None:
        data = data if switches.dp_overlap is None else switches.dp_overlap
        tensor = tensor if switches.tp_overlap is None else switches.tp_overlap
    return Overlap(
        grad_reduce=data,
        param_gather=data and sharding == "optim",
        tp_comm=tensor and degree["tp"] > 1,
        p2p=degree["vpp"] > 1,
        expert_all_to_all=switches is not None and switches.expert_overlap and degree["ep"] > 1,
    )


def _expert_tensor_parallel(
    record: dict[str, Any], stack: dict[str, Any], model: ModelSpec, degree: dict[str, int], world: int
) -> int:
    """Return the printed size; unset is tp in Megatron, and 1 in recipes that spread experts over ep."""
    if record.get("etp") or model.moe is None:
        return int(record.get("etp") or degree["tp"])
    follows = degree["tp"] * degree["ep"] * degree["pp"]
    unset = stack.get("unset_etp") == "tp" or degree["ep"] == 1
    return degree["tp"] if unset and world % follows == 0 else 1


def _batches(record: dict[str, Any], stack: dict[str, Any], dp: int, pp: int) -> tuple[int, int]:
    local = re.search(r"local batch (\d+)", str(record.get("notes") or ""))
    if local and record.get("micro_batch") is None and stack["profile"] == "fsdp2":
        return max(1, int(local.group(1)) // pp), int(local.group(1)) * dp
    micro, whole = record.get("micro_batch"), record.get("global_batch")
    if micro is None and whole is None:
        raise NotComputable("neither micro-batch nor global batch is printed")
    micro = int(micro or 1)
    return micro, int(whole or micro * dp * 8)


def _sequence_parallel(record: dict[str, Any], stack: dict[str, Any], tp: int) -> bool:
    printed = record.get("sp")
    if printed is not None:
        return bool(printed) and tp > 1
    return stack["sequence_parallel"] == "with_tp" and tp > 1


def _sharding(record: dict[str, Any], stack: dict[str, Any]) -> Sharding:
    """Return the sharding that the record prints, else the stack's own."""
    zero = str(record.get("zero") or "").lower()
    text = f"{zero} {str(record.get('framework') or '').lower()}"
    if "stage not in table" in zero or ("offload" in text and "offload=n" not in text):
        raise NotComputable("the ZeRO stage is not printed, or state is offloaded to the host")
    if "fsdp" in zero or re.search(r"zero.?3", text):
        return "optim_grads_params"
    if re.search(r"zero.?2", text):
        return "optim_grads"
    if zero in ("none", "ddp"):
        return "none"
    sharding: Sharding = stack["sharding"]
    return sharding


_MODULES = r"core_attn|moe_act|layernorm|mla_up_proj|shared_experts|mlp|moe\b"


def _recompute(record: dict[str, Any], stack: dict[str, Any], brackets: list[str]) -> Recompute:
    printed = record.get("recompute")
    switches = switches_of(record)
    recipe = (switches.recompute_modules if switches else ()) or tuple(stack.get("recompute_modules", ()))
    if printed is None and recipe:
        return Recompute(granularity="selective", modules=recipe)
    if isinstance(printed, str):
        printed = {"mode": printed, "details": ""}
    if printed is None or printed.get("mode") is None:
        brackets.append("recomputation is not printed: none is assumed")
        return Recompute()
    mode, details = printed["mode"], str(printed.get("details") or "")
    if mode == "full":
        return Recompute(granularity="full", method="uniform", num_layers=1)
    if mode == "selective":
        modules = tuple(re.findall(_MODULES, details))
        return Recompute(granularity="selective", modules=modules or ("core_attn",))
    return Recompute()
