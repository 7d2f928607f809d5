"""Software stacks and devices that the cases name, and the shipped data that describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nest_megatron.specs.job import Capabilities, Kernels, Recipe
from tests.builders import BF16_ADAM, EVERYTHING
from tests.cases.models import NotComputable


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One software stack.

    Args:
        version: megatron-core release whose rules apply where the record names none.
        deals_evenly: the stack itself deals layers that do not divide; else every stage gets the floor.
        recipes: precision of a record -> bytes per parameter.
    """

    profile: str
    version: str
    capabilities: Capabilities
    kernels: Kernels
    recipes: Mapping[str, Recipe]
    deals_evenly: bool = False


MEGATRON = Stack(
    profile="megatron-core",
    version="main",
    capabilities=EVERYTHING,
    kernels=Kernels(),
    recipes={"bf16": BF16_ADAM, "fp16": replace(BF16_ADAM, name="fp16-mixed-adam", compute_dtype="fp16")},
)
#: DeepSpeed's pipeline engine: gradients in 16 bits, layers dealt by parameters, no Transformer Engine.
_DEEPSPEED_FP16 = replace(
    BF16_ADAM,
    name="fp16-deepspeed",
    compute_dtype="fp16",
    grad_bytes=2,
    grad_reduce_bytes=2,
    wgrad_fusion=False,
)
MEGATRON_DEEPSPEED = Stack(
    profile="megatron-deepspeed",
    # Uneven stages come with the engine; no Megatron release limits them.
    version="main",
    capabilities=replace(EVERYTHING, layout_string=True, shardings=("none", "optim")),
    kernels=Kernels(attention="fused_softmax", transformer_engine=False),
    recipes={"fp16": _DEEPSPEED_FP16},
    deals_evenly=True,
)

_NO_RULES = "its engine is not Megatron's, and no dialect reads it"
#: Start of a record's repository -> its stack, or why there is none; the longest start wins.
STACKS: dict[str, Stack | str] = {
    "": MEGATRON,
    "bigscience-workshop/": MEGATRON_DEEPSPEED,
    "EleutherAI/gpt-neox": MEGATRON_DEEPSPEED,
    "deepspeedai/Megatron-DeepSpeed": MEGATRON_DEEPSPEED,
    "deepspeedai/DeepSpeed": f"DeepSpeed: {_NO_RULES}",
    "deepseek-ai/DeepEP": f"DeepEP benchmark: {_NO_RULES}",
    "SparkJiao/llama-pipeline-parallel": f"DeepSpeed: {_NO_RULES}",
    "pytorch/torchtitan": f"torchtitan: {_NO_RULES}",
    "NVIDIA-NeMo/Automodel": f"Automodel: {_NO_RULES}",
    "intelligent-machine-learning/dlrover": f"DLRover: {_NO_RULES}",
}

#: Start of a record's GPU name -> (GB it must state, cluster file, file of the accelerator); A800 is an A100
#: with fewer NVLinks, the memory is the same.
_DEVICES: tuple[tuple[str, int | None, str], ...] = (
    ("H100", 80, "dgx-h100"),
    ("H800", 80, "dgx-h100"),
    ("A100", 80, "dgx-a100-80"),
    ("A100", 40, "dgx-a100-40"),
    ("A800", 40, "dgx-a100-40"),
    ("GB200", None, "gb200-nvl72"),
)


def stack_of(record: Mapping[str, Any]) -> Stack:
    """Return the stack of a record.

    Raises:
        NotComputable: it is none whose rules we have.
    """
    repository = str(record["repo"])
    found = STACKS[max((start for start in STACKS if repository.startswith(start)), key=len)]
    if isinstance(found, str):
        raise NotComputable(found)
    return found


def cluster_name(record: Mapping[str, Any]) -> str:
    """Return the shipped cluster whose device has the memory of the record's.

    Raises:
        NotComputable: no GPU is stated, or none that we ship.
    """
    hardware = record.get("hardware") or {}
    gpu, size = str(hardware.get("gpu", "not stated")), hardware.get("mem_gb")
    for start, expected, cluster in _DEVICES:
        if gpu.startswith(start) and expected in (None, size):
            return cluster
    raise NotComputable(f"no shipped device for {gpu}")
