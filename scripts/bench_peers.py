"""Tasks a-d of research/peers.md section 2: our plan and time, and the peers' listed plans in our evaluator.

A listed plan that the text leaves open is completed as its tool means it: ``sharded optimizer`` is ZeRO-1,
``attention recompute`` recomputes the attention core, and layers are dealt evenly.  The ratio is its step
time over ours.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nest_megatron import rules
from nest_megatron.cluster.load import load_cluster
from nest_megatron.dialects import registry
from nest_megatron.dialects.files import load_config
from nest_megatron.planner.domains import Domains
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.planner.freedom import apply_settings
from nest_megatron.planner.search import search
from nest_megatron.planner.splits import even_split
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Recompute
from nest_megatron.specs.settings import PlanSettings
from nest_megatron.units import gib

JOBS = Path(__file__).resolve().parent / "jobs"
ATTENTION = Recompute(granularity="selective", modules=("core_attn",))


@dataclass(frozen=True, slots=True)
class Listed:
    """A plan that peers.md lists, with what its tool predicts and spent."""

    tool: str
    predicted_s: float
    search_cpu_s: float
    degrees: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """One task: a script of ``scripts/jobs`` on a cluster."""

    name: str
    script: str
    cluster: str
    gpus: int
    plans: tuple[Listed, ...]


TASKS = (
    Task(
        "a: GPT-3 175B, 1,024 A100",
        "gpt3_175b.sh",
        "dgx-a100-80",
        1024,
        (
            Listed("Calculon", 14.31, 24.2, {"tp": 8, "pp": 4, "vpp": 8, "micro_batch": 2}),
            Listed(
                "Calculon, no overlap", 15.87, 24.2, {"tp": 2, "pp": 8, "vpp": 12, "recompute": ATTENTION}
            ),
            Listed("SimuMax", 22.49, 56.5, {"tp": 4, "pp": 16}),
            Listed("llm-analysis", 21.6, 0.16, {"tp": 2, "pp": 1, "sharding": "optim_grads_params"}),
        ),
    ),
    Task(
        "b: Llama 3 70B, 64 H100",
        "llama3_70b.sh",
        "dgx-h100",
        64,
        (
            Listed("Calculon", 21.56, 24.7, {"tp": 4, "pp": 4, "vpp": 5, "recompute": ATTENTION}),
            Listed("SimuMax", 17.34, 59.0, {"tp": 4, "pp": 8}),
            Listed("llm-analysis", 18.2, 0.17, {"tp": 4, "pp": 1, "sharding": "optim_grads_params"}),
            Listed("NVIDIA recipe (FP8 there)", 10.15, 0.0, {"tp": 4, "pp": 8, "vpp": 5}),
        ),
    ),
    Task(
        "c: Mixtral 8x7B, 64 H100",
        "mixtral_8x7b.sh",
        "dgx-h100",
        64,
        (
            Listed("SimuMax", 3.09, 29.4, {"tp": 1, "pp": 8, "ep": 8}),
            Listed("SimuMax by hand", 2.87, 29.4, {"tp": 1, "pp": 4, "vpp": 8, "ep": 8}),
            Listed(
                "llm-analysis",
                1.79,
                0.62,
                {"tp": 1, "pp": 1, "ep": 8, "micro_batch": 2, "sharding": "optim_grads_params"},
            ),
        ),
    ),
    Task(
        "d: GPT-3 175B, 64 A100",
        "gpt3_175b.sh",
        "dgx-a100-80",
        64,
        (
            Listed("Calculon", 223.0, 38.3, {"tp": 4, "pp": 8, "micro_batch": 2, "recompute": ATTENTION}),
            Listed("SimuMax", 298.3, 84.0, {"tp": 8, "pp": 8}),
            Listed("llm-analysis", 359.6, 0.19, {"tp": 4, "pp": 8}),
        ),
    ),
)


def read(task: Task) -> TrainJob:
    """Return the job of a task."""
    settings = PlanSettings(cluster=task.cluster, num_gpus=task.gpus)
    config, _ = load_config(JOBS / task.script)
    return apply_settings(registry.detect(config).read(config, overrides=(), settings=settings), settings)


def complete(job: TrainJob, degrees: dict[str, Any]) -> Layout:
    """Return a whole layout of the listed degrees."""
    layout = Layout(global_batch=job.global_batch, **({"sharding": "optim"} | degrees))
    layout = replace(
        layout,
        etp=1 if job.model.moe is not None else layout.tp,
        sequence_parallel=layout.tp > 1,
        dp=job.num_gpus // (layout.tp * layout.pp * layout.cp),
    )
    layout = replace(
        layout,
        edp=job.num_gpus // (layout.etp * layout.ep * layout.pp),
        num_layers_per_chunk=even_split(job.model.num_layers, layout.pp * layout.vpp),
    )
    return replace(layout, overlap=Domains(job).overlap(layout, vpp=layout.vpp))


def report(task: Task) -> None:
    """Print our plan and the listed ones."""
    job = read(task)
    cluster = load_cluster(task.cluster, num_gpus=task.gpus, ranks_per_node=job.gpus_per_node)
    started = time.process_time()
    result = search(job, cluster)
    seconds = time.process_time() - started
    evaluator = Evaluator(job, cluster)
    ours = evaluator.predict([result.best])[0]
    print(f"\n{task.name}")
    head = f"  {'tool':26s}{'its step s':>11s}{'its CPU s':>10s}{'step s':>8s}{'GiB':>7s}{'ratio':>7s}"
    print(f"{head}  verdict; layout")
    print(
        f"  {'ours':26s}{ours.step_time_s:11.2f}{seconds:10.2f}{ours.step_time_s:8.2f}"
        f"{gib(ours.peak_device_bytes):7.1f}{1.0:7.2f}  {ours.band}; {result.best.describe()}"
    )
    for listed in task.plans:
        layout = complete(job, listed.degrees)
        start = f"  {listed.tool:26s}{listed.predicted_s:11.2f}{listed.search_cpu_s:10.2f}"
        prediction = evaluator.predict([layout])[0]
        # What our dialect cannot write may still run: its price is given beside the rule it breaks.
        broken = rules.first_code(job, layout)
        verdict = prediction.band + (f", {broken}" if broken else "")
        print(
            f"{start}{prediction.step_time_s:8.2f}{gib(prediction.peak_device_bytes):7.1f}"
            f"{prediction.step_time_s / ours.step_time_s:7.2f}  {verdict}; {layout.describe()}"
        )


def main() -> None:
    """Print every task."""
    for task in TASKS:
        report(task)


if __name__ == "__main__":
    main()
