"""Records that carry Megatron-LM arguments: built through the dialect, like a user's own run."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from nest_megatron.dialects.megatron_lm import MegatronLMDialect, config_of
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.settings import PlanSettings

#: Tokens on the busiest expert rank of a short run with an untrained router (memory_model.md section 7).
UNTRAINED_ROUTING = 1.1
#: World of a run that prints none: small models run on one node, others on 64 GPUs up to a batch of 512, else
#: 128 (memory_model.md section 1, "Guessed inputs"); never less than the model-parallel size.
ONE_NODE, SMALL_WORLD, LARGE_WORLD, SMALL_BATCH, SMALL_HIDDEN = 8, 64, 128, 512, 1024


def job_of(record: dict[str, Any], cluster: Cluster) -> tuple[TrainJob, tuple[str, ...]]:
    """Return the job of the record's arguments, and what had to be assumed beside them.

    Raises:
        BadInputError: the dialect cannot read or does not plan the run.
    """
    arguments = _noted_arguments(record) | {k: v for k, v in record["megatron_args"].items() if k != "_env"}
    script = f"pretrain_{str(record['model'].get('name') or '').split(':', 1)[0]}.py"
    brackets = []
    world = record.get("num_gpus")
    if not world:
        world = assumed_world(arguments)
        brackets.append(f"the GPU count is not printed: {world} is assumed")
    config = config_of(arguments, environment=record["megatron_args"].get("_env"), script=script)
    settings = PlanSettings(num_gpus=int(world), framework_version="0.16.1")
    job = MegatronLMDialect().read(config, overrides=(), settings=settings)
    return _as_run(job, arguments, record, cluster), tuple(brackets)


def _noted_arguments(record: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that only the record's notes print, as JSON behind ``args:``."""
    found = re.search(r"args: (\{.*?\})\s*(?:;|$)", str(record.get("notes") or ""), re.DOTALL)
    if found is None:
        return {}
    try:
        noted = json.loads(found.group(1))
    except json.JSONDecodeError:
        return {}
    return noted if isinstance(noted, dict) else {}


def _as_run(job: TrainJob, arguments: dict[str, Any], record: dict[str, Any], cluster: Cluster) -> TrainJob:
    """Return ``job`` with what the machine decides: the attention that TE picks, and the router's state."""
    kernels = job.kernels
    automatic = arguments.get("attention-backend", "auto") == "auto"
    deterministic = arguments.get("deterministic-mode") or "deterministic mode" in str(record.get("notes"))
    if automatic and kernels.transformer_engine and kernels.attention == "flash" and not deterministic:
        # Transformer Engine takes cuDNN's attention on Hopper and newer (memory_model.md 2.3).
        newer = cluster.accelerator.generation in ("hopper", "blackwell")
        kernels = dataclasses.replace(kernels, attention="cudnn" if newer else "flash")
    imbalance = job.expert_imbalance if job.expert_imbalance == 1.0 else UNTRAINED_ROUTING
    return dataclasses.replace(
        job, kernels=kernels, expert_imbalance=imbalance, gpus_per_node=cluster.gpus_per_node
    )


def assumed_world(arguments: dict[str, Any]) -> int:
    """Return the world of a run whose GPU count is not printed."""

    def size(name: str) -> int:
        return int(arguments.get(name) or 1)

    tensor, context = size("tensor-model-parallel-size"), size("context-parallel-size")
    expert = size("expert-model-parallel-size") * int(arguments.get("expert-tensor-parallel-size") or tensor)
    need = size("pipeline-model-parallel-size") * max(tensor * context, expert)
    if size("hidden-size") <= SMALL_HIDDEN:
        return max(need, ONE_NODE)
    batch = arguments.get("global-batch-size")
    small = isinstance(batch, int) and batch <= SMALL_BATCH
    return max(need, SMALL_WORLD if small else LARGE_WORLD)
