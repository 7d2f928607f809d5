"""A published record -> the job, layout and cluster it describes, or the reason why it cannot be built.

Schema: the measured records of ``data/measured/README.md`` (one JSON object per run).  Facts the record
does not
print come from its software stack (``conf/validation/stacks.yaml``); each one is kept as an assumption.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from nest_megatron.cluster.load import load_cluster
from nest_megatron.dialects.profiles import load_profile
from nest_megatron.errors import BadInputError
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import Capabilities, Kernels, Recipe, TrainJob
from nest_megatron.specs.layout import Layout, Overlap, Recompute, Sharding
from nest_megatron.specs.model import ModelSpec
from nest_megatron.validation.arguments import job_of
from nest_megatron.validation.stacks import build_model, cluster_of, public_shape, stack_of

#: Fields of a record's model -> keys of a shape entry.
_SHAPE_KEYS = {
    "layers": "num_layers",
    "hidden": "hidden",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "ffn": "ffn",
    "vocab": "vocab",
    "experts": "experts",
    "topk": "top_k",
    "moe_ffn": "moe_ffn",
}

#: Machine of an argument record that names none; it decides the workspaces only.
_ASSUMED_ACCELERATOR = "A100-80GB-SXM"


class NotComputable(Exception):
    """The record lacks an input, or describes something the model does not cover; the text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Everything needed to predict one record.

    Attributes:
        brackets: facts the record leaves open; the prediction is then a point inside a bracket.
    """

    job: TrainJob
    layout: Layout
    cluster: Cluster
    brackets: tuple[str, ...]


def build(record: dict[str, Any]) -> Built:
    """Return the job, layout and cluster of ``record``.

    Raises:
        NotComputable: an input is missing, or the run is of a kind that is not modelled.
    """
    if record.get("megatron_args"):
        return _from_arguments(record)
    model_name = str(record["model"].get("name") or "")
    text = f"{model_name} | {record.get('accelerator')} | {record.get('notes') or ''}"
    if re.search(r"\blora\b", text.lower()):
        raise NotComputable("LoRA: frozen weights are not modelled")
    try:
        stack = stack_of(str(record.get("framework") or ""), text)
        sequence = int(_need(record, "seq_len"))
        model = _model(record, stack, sequence)
    except BadInputError as error:
        raise NotComputable(error.message) from None
    cluster = _cluster(record)
    brackets: list[str] = []
    layout = _layout(record, stack, model, brackets)
    kernels = _kernels(record, stack)
    job = TrainJob(
        name=str(record["id"]),
        dialect="record",
        framework=stack["profile"],
        framework_version=str(record.get("framework") or ""),
        megatron_core_version="0.16.1",
        model=model,
        num_gpus=layout.world,
        gpus_per_node=cluster.gpus_per_node,
        global_batch=layout.global_batch,
        sequence_length=sequence,
        recipe=_recipe(record, stack),
        kernels=kernels,
        user_layout=layout,
        profile=load_profile(stack["profile"]),
        capabilities=Capabilities(),
    )
    return Built(job=job, layout=layout, cluster=cluster, brackets=tuple(brackets))


def _from_arguments(record: dict[str, Any]) -> Built:
    unprinted = record.get("accelerator") is None
    cluster = _cluster(record | {"accelerator": _ASSUMED_ACCELERATOR} if unprinted else record)
    try:
        job, brackets = job_of(record, cluster)
    except BadInputError as error:
        raise NotComputable(error.message) from None
    if unprinted:
        brackets = (*brackets, f"the accelerator is not printed: {_ASSUMED_ACCELERATOR} is assumed")
    return Built(job=job, layout=job.user_layout, cluster=cluster, brackets=brackets)


def _kernels(record: dict[str, Any], stack: dict[str, Any]) -> Kernels:
    """Return the stack's kernels, with the CUDA graphs that the record's recipe flags name."""
    graphs = (record.get("recipe_flags") or {}).get("cg")
    changes = {} if graphs is None else {"cuda_graphs": graphs == "full"}
    return Kernels(**{**stack["kernels"], **changes})


def _need(record: dict[str, Any], key: str) -> Any:
    value = record.get(key)
    if value is None:
        raise NotComputable(f"{key} is not printed")
    return value


def _model(record: dict[str, Any], stack: dict[str, Any], sequence: int) -> ModelSpec:
    printed = {
        key: record["model"][name]
        for name, key in _SHAPE_KEYS.items()
        if record["model"].get(name) is not None
    }
    known = public_shape(str(record["model"].get("name") or ""))
    shape = {**stack["model"], **known, **printed, "name": record["model"].get("name")}
    dense = re.search(r"dense_layers=(\d+)", str(record.get("notes") or ""))
    if dense:
        shape["dense_first"] = int(dense.group(1))
    _infer(shape, record)
    if known.get("pattern"):
        shape.pop("num_layers", None)
    if not shape.get("vocab"):
        raise NotComputable("the vocabulary is not printed and the model is not a known one")
    try:
        return build_model(shape, sequence=sequence)
    except KeyError as missing:
        raise NotComputable(f"the model's {missing.args[0]} is not printed") from None


def _infer(shape: dict[str, Any], record: dict[str, Any]) -> None:
    """Fill depth from the printed parameter count (12 h^2 per layer) and heads from 128-wide ones."""
    billions, hidden = record["model"].get("params_b"), shape.get("hidden")
    if (
        hidden
        and not shape.get("num_layers")
        and billions
        and shape.get("vocab")
        and not shape.get("experts")
    ):
        shape["num_layers"] = round((billions * 1e9 - shape["vocab"] * hidden) / (12 * hidden**2))
    if hidden and not shape.get("heads"):
        shape["heads"] = hidden // 128


def _cluster(record: dict[str, Any]) -> Cluster:
    name = cluster_of(str(record.get("accelerator") or ""))
    if name is None:
        raise NotComputable(f"no data for the accelerator {record.get('accelerator')!r}")
    cluster = load_cluster(name)
    gpus, per_node = record.get("num_gpus"), record.get("gpus_per_node")
    if per_node and gpus and gpus >= per_node and cluster.gpus_per_node % per_node == 0:
        cluster = load_cluster(name, ranks_per_node=per_node)
    if gpus and (gpus < cluster.gpus_per_node or gpus % cluster.gpus_per_node == 0):
        cluster = load_cluster(name, num_gpus=gpus, ranks_per_node=min(gpus, cluster.gpus_per_node))
    return cluster


def _layout(record: dict[str, Any], stack: dict[str, Any], model: ModelSpec, brackets: list[str]) -> Layout:
    degree = {key: int(record.get(key) or 1) for key in ("tp", "pp", "vpp", "cp", "ep")}
    inner = degree["tp"] * degree["pp"] * degree["cp"]
    dp = record.get("dp") or (record.get("num_gpus") or 0) // inner
    if not dp:
        raise NotComputable("neither the GPU count nor the data-parallel size is printed")
    micro_batch, global_batch = _batches(record, stack, int(dp), degree["pp"])
    if global_batch < micro_batch * int(dp):
        raise NotComputable(
            f"a batch of {global_batch} gives {dp} ranks less than {micro_batch} sequences each"
        )
    world = inner * int(dp)
    etp = _expert_tensor_parallel(record, model, degree, world)
    if record.get("pp") is None and record.get("tp") is None and record.get("num_gpus", 1) != 1:
        brackets.append("the layout's degrees are not printed: 1 is assumed")
    sharding = _sharding(record, stack)
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
        num_layers_per_chunk=even_split(
            model.num_layers, degree["pp"] * degree["vpp"], rest_last=bool(stack.get("rest_last"))
        ),
        sharding=sharding,
        recompute=_recompute(record, brackets),
        overlap=_overlap(stack, degree, sharding, record),
    )


def _overlap(
    stack: dict[str, Any], degree: dict[str, int], sharding: Sharding, record: dict[str, Any]
) -> Overlap:
    """Return what the stack overlaps by itself."""
    if stack.get("overlap") == "off":
        return Overlap()
    flags = record.get("recipe_flags") or {}
    return Overlap(
        grad_reduce=True,
        param_gather=sharding == "optim",
        tp_comm=stack.get("overlap") == "userbuffers" and degree["tp"] > 1,
        p2p=degree["vpp"] > 1,
        expert_all_to_all=bool(flags.get("a2aov")) and degree["ep"] > 1,
    )


def _expert_tensor_parallel(
    record: dict[str, Any], model: ModelSpec, degree: dict[str, int], world: int
) -> int:
    """Return the printed size; unset means tp where the expert grid then divides the world, else 1."""
    if record.get("etp") or model.moe is None:
        return int(record.get("etp") or degree["tp"])
    follows = degree["tp"] * degree["ep"] * degree["pp"]
    return degree["tp"] if degree["ep"] == 1 and world % follows == 0 else 1


def even_split(num_layers: int, chunks: int, *, rest_last: bool = False) -> tuple[int, ...]:
    """Return layer counts per chunk; where they do not divide, the first or the last chunks have one more."""
    base, rest = divmod(num_layers, chunks)
    larger = range(chunks - rest, chunks) if rest_last else range(rest)
    return tuple(base + (chunk in larger) for chunk in range(chunks))


def _batches(record: dict[str, Any], stack: dict[str, Any], dp: int, pp: int) -> tuple[int, int]:
    local = re.search(r"local batch (\d+)", str(record.get("notes") or ""))
    if local and stack["profile"] == "fsdp2":
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


def _recompute(record: dict[str, Any], brackets: list[str]) -> Recompute:
    printed = record.get("recompute")
    if isinstance(printed, str):
        printed = {"mode": printed, "details": ""}
    if printed is None or printed.get("mode") is None:
        brackets.append("recomputation is not printed: none is assumed")
        return Recompute()
    mode, details = printed["mode"], str(printed.get("details") or "")
    if mode == "full":
        return Recompute(granularity="full", method="uniform", num_layers=1)
    if mode == "selective":
        modules = tuple(
            re.findall(r"core_attn|moe_act|layernorm|mla_up_proj|shared_experts|mlp|moe\b", details)
        )
        return Recompute(granularity="selective", modules=modules or ("core_attn",))
    return Recompute()


def _recipe(record: dict[str, Any], stack: dict[str, Any]) -> Recipe:
    """Return the recipe of the record's precision within its stack."""
    text = str(record.get("precision") or "bf16").lower()
    width = "4-bit" if re.search(r"fp4", text) else "8-bit" if re.search(r"fp8|float8", text) else "16-bit"
    entry = stack["recipes"].get(width)
    if entry is None:
        raise NotComputable(f"no {width} recipe is known for this stack")
    plain = "fp16" if "fp16" in text and "bf16" not in text else "bf16"
    dtype = {"4-bit": "fp4", "8-bit": "fp8", "16-bit": plain}[width]
    return Recipe(
        name=f"{stack['profile']} {text}",
        compute_dtype=dtype,
        activation_bytes=2,
        weight_bytes=entry["weight"],
        grad_bytes=entry["grad"],
        grad_reduce_bytes=min(4, entry["grad"]),
        param_gather_bytes=2,
        optimizer_bytes=entry["optimizer"],
        step_extra_bytes=entry.get("step_extra", 0),
        cached_weight_bytes=entry.get("cached_weight", 0),
        wgrad_fusion=entry.get("wgrad_fusion", True),
    )


def with_recompute(built: Built, recompute: Recompute) -> Built:
    """Return ``built`` under another recomputation choice, for the other end of a bracket."""
    layout = dataclasses.replace(built.layout, recompute=recompute)
    return dataclasses.replace(built, layout=layout, job=dataclasses.replace(built.job, user_layout=layout))
