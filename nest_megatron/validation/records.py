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

from nest_megatron.dialects.profiles import load_profile
from nest_megatron.errors import BadInputError
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import Capabilities, Kernels, Recipe, TrainJob
from nest_megatron.specs.layout import Layout, Recompute
from nest_megatron.specs.model import ModelSpec
from nest_megatron.validation.arguments import job_of
from nest_megatron.validation.machines import record_cluster
from nest_megatron.validation.record_layout import NotComputable, record_layout
from nest_megatron.validation.splits import end_layers, split_by_parameters
from nest_megatron.validation.stacks import build_model, public_shape, stack_of
from nest_megatron.validation.switches import switches_of

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
    text = " | ".join(
        str(record.get(key) or "") for key in ("accelerator", "precision", "zero", "tp", "notes")
    )
    text = f"{model_name} | {text}"
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
    layout = record_layout(record, stack, model, brackets)
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
        kernels=_kernels(record, stack, model),
        user_layout=layout,
        profile=load_profile(stack["profile"]),
        capabilities=Capabilities(),
    )
    if stack.get("split") == "parameters" and layout.pp > 1:
        split = split_by_parameters(model.num_layers, layout.pp * layout.vpp, end_layers(job))
        layout = dataclasses.replace(layout, num_layers_per_chunk=split)
        job = dataclasses.replace(job, user_layout=layout)
    return Built(job=job, layout=layout, cluster=cluster, brackets=tuple(brackets))


def _from_arguments(record: dict[str, Any]) -> Built:
    unprinted = record.get("accelerator") is None
    cluster = _cluster(record | {"accelerator": _ASSUMED_ACCELERATOR} if unprinted else record)
    try:
        job, brackets = job_of(record, cluster)
        # A run of a plan is compared, and calibrates, under the profile that the plan was made with.
        if record.get("profile"):
            job = dataclasses.replace(job, profile=load_profile(str(record["profile"])))
    except BadInputError as error:
        raise NotComputable(error.message) from None
    if unprinted:
        brackets = (*brackets, f"the accelerator is not printed: {_ASSUMED_ACCELERATOR} is assumed")
    return Built(job=job, layout=job.user_layout, cluster=cluster, brackets=brackets)


def _kernels(record: dict[str, Any], stack: dict[str, Any], model: ModelSpec) -> Kernels:
    """Return the stack's kernels, with what the record's switches change."""
    switches = switches_of(record)
    stacked = {key: _frozen(value) for key, value in stack["kernels"].items()}
    if switches is None:
        return Kernels(**stacked)
    changes = {
        "cuda_graphs": switches.graphs == "full",
        "cuda_graph_modules": switches.graph_modules if switches.graphs == "te" else (),
        "flex_backend": switches.flex_backend,
        "fused_experts": switches.fuses_experts(biased=model.linear_bias),
        "fp8_attention": switches.fp8_attention,
    }
    return Kernels(**stacked | changes)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


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
    shape = {**known, **printed, **_routing(record), "name": record["model"].get("name")}
    shape = {**stack["model"], **shape, **stack.get("recipe_model", {})}
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


def _routing(record: dict[str, Any]) -> dict[str, Any]:
    """Return the dispatcher and the capacity that the record's switches name."""
    switches = switches_of(record)
    if switches is None:
        return {}
    capacity = {} if switches.capacity is None else {"capacity": float(switches.capacity)}
    return {"dispatcher": switches.dispatcher} | capacity


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
    cluster = record_cluster(record)
    if cluster is None:
        raise NotComputable(f"no data for the accelerator {record.get('accelerator')!r}")
    return cluster


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
        grad_reduce_bytes=entry.get("grad_reduce", min(4, entry["grad"])),
        param_gather_bytes=entry.get("param_gather", 2),
        optimizer_bytes=entry["optimizer"],
        step_extra_bytes=entry.get("step_extra", 0),
        cached_weight_bytes=entry.get("cached_weight", 0),
        wgrad_fusion=entry.get("wgrad_fusion", True),
    )


def with_recompute(built: Built, recompute: Recompute) -> Built:
    """Return ``built`` under another recomputation choice, for the other end of a bracket."""
    layout = dataclasses.replace(built.layout, recompute=recompute)
    return dataclasses.replace(built, layout=layout, job=dataclasses.replace(built.job, user_layout=layout))
