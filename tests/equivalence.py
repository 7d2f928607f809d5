"""Trains the plans of the covering design beside the same models in one process.

One import of torch and megatron-core, forked ranks: a process per rank would import for minutes.
``scripts/equivalence_table.py`` prints the runs.
"""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nest_megatron.cluster.rank_groups import rank_groups
from nest_megatron.dialects.megatron_lm import MegatronLMDialect
from nest_megatron.errors import NestError
from nest_megatron.pipeline import plan_config
from nest_megatron.rules import Violation, check
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.plan import Plan
from nest_megatron.specs.settings import PlanSettings
from tests.covering import CLUSTER, Model, Target, point_of

#: Relative difference that fp32 sums in another order may make; the runs show a tenth of it or less.
TOLERANCE = 1e-5
#: Seconds without a result of any rank; the longest run takes a tenth of it.
TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One trained configuration beside its one-process reference.

    Args:
        worst: largest relative difference of loss and gradient norm over the steps; None without a result.
        groups_equal: every rank's groups are those of the plan's rank map.
        refusal: what stopped the run.
    """

    name: str
    dialect: str
    world: int
    point: tuple[Any, ...]
    worst: float | None
    groups_equal: bool
    seconds: float
    refusal: str = ""


class Trainings:
    """Runs configurations in forked ranks; references are kept by model."""

    def __init__(self) -> None:
        """Import torch and megatron-core, once."""
        warnings.simplefilter("ignore")  # what is absent without a GPU, and what torch will rename
        from scripts.training import cpu

        cpu.activate()
        import torch

        torch.set_num_threads(1)
        from scripts.training import rank

        self._train_rank = rank.train_rank
        self._references: dict[Any, list[float]] = {}

    def outcomes(self, settings: Any, plan: Plan | None) -> list[Any]:
        """Return what each rank saw."""
        from scripts.training.local import run_ranks

        def task(rank: int, store: str) -> Any:
            return self._train_rank(settings, plan, rank=rank, local_rank=rank, store=store)

        return run_ranks(task, settings.num_ranks, timeout_s=TIMEOUT_S)

    def compare(self, name: str, settings: Any, reference: Any, plan: Plan | None, **facts: Any) -> Run:
        """Train ``settings`` and return how far it is from ``reference``, which is trained once per key.

        Args:
            reference: (key, settings of the one-process run).
            plan: verified by every rank; None forces a configuration that no plan would hold.
        """
        key, alone = reference
        if key not in self._references:
            self._references[key] = _curve(self.outcomes(alone, None)[0])
        started = time.perf_counter()
        worst, equal, refusal = None, False, ""
        try:
            found = self.outcomes(settings, plan)
            worst = max(_difference(_curve(outcome), self._references[key]) for outcome in found)
            equal = plan is not None and _groups_equal(plan, found)
        except NestError as error:
            refusal = error.render().splitlines()[-1] if "Traceback" in error.message else error.render()
        return Run(
            name=name,
            world=settings.num_ranks,
            worst=worst,
            groups_equal=equal,
            seconds=time.perf_counter() - started,
            refusal=refusal,
            **facts,
        )


def _curve(outcome: Any) -> list[float]:
    return [value for step in outcome.steps for value in (step.loss, step.grad_norm)]


def _difference(found: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference; a number that is none differs without bound."""
    differences = [abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)]
    return max(d if d == d else float("inf") for d in differences)


def _groups_equal(plan: Plan, outcomes: list[Any]) -> bool:
    planned = rank_groups(dataclasses.replace(plan.layout, order=plan.rank_map.order))
    return all(
        tuple(sorted(ranks)) in planned[name] and outcome.rank in ranks
        for outcome in outcomes
        for name, ranks in outcome.groups.items()
    )


def planned(config: DictConfig, settings: PlanSettings) -> tuple[Plan, DictConfig]:
    """Return the planner's answer and the configuration with its edits, as the task of an app gets it."""
    plan = plan_config(config, settings=settings)
    edited = OmegaConf.create(OmegaConf.to_container(config))
    for key, value in plan.edits.items():
        OmegaConf.update(edited, key, value, merge=False, force_add=True)
    return plan, edited


def flags_of(config: DictConfig) -> Mapping[str, Any]:
    """Return the Megatron-LM flags of a configuration."""
    flags = OmegaConf.to_container(config.MODEL_ARGS)
    assert isinstance(flags, dict)
    return {str(name): value for name, value in flags.items()}


def megatron_settings(config: DictConfig, world: int) -> Any:
    """Return what the trainer reads from Megatron-LM flags."""
    from scripts.training.megatron_flags import settings_of

    return settings_of(flags_of(config), num_ranks=world, devices=world, name="equivalence")


def run_design(trainings: Trainings, design: list[Target]) -> Iterator[Run]:
    """Train every target of the design as the planner planned it."""
    for number, target in enumerate(design):
        config = target.config()
        plan, edited = planned(config, target.settings())
        reference = target.model, megatron_settings(target.model.config("none"), 1)
        layers = "-".join(map(str, plan.layout.num_layers_per_chunk))
        yield trainings.compare(
            f"{number:02d} {plan.layout.describe()} layers {layers}",
            megatron_settings(edited, target.world),
            reference,
            plan,
            dialect="megatron_lm",
            point=point_of(plan.layout, target.model),
        )


#: What makes a shipped configuration quick, and its third step insensitive to rounding.
_SHORT: dict[str, Any] = {
    "trainer.max_steps": 3,
    "model.encoder_seq_length": 32,
    "model.global_batch_size": 16,
    "model.optim.lr": 0.0002,
    "model.data.data_impl": "mock",
}
#: Pins of plans for the shipped NeMo-style configurations: name, GPUs, pins.
NEMO_PLANS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("megatron_llama_tiny", 2, {"tp": 2, "sequence_parallel": True}),
    ("megatron_llama_tiny", 4, {"pp": 2, "vpp": 2, "tp": 1, "cp": 1}),
    ("megatron_llama_tiny", 8, {"tp": 2, "cp": 2, "pp": 2, "recompute": "full"}),
    ("megatron_llama_tiny", 8, {"pp": 4, "tp": 2, "order": "tp-cp-ep-pp-dp", "cp": 1}),
    ("megatron_moe_tiny", 4, {"ep": 4, "tp": 1, "pp": 1}),
    ("megatron_moe_tiny", 8, {"ep": 2, "tp": 2, "pp": 2, "cp": 1}),
)


def run_nemo(trainings: Trainings) -> Iterator[Run]:
    """Train plans of the shipped NeMo-style configurations, shortened to three steps of fp32."""
    from scripts.training.nemo_keys import settings_of

    for name, world, pin in NEMO_PLANS:
        config = OmegaConf.load(f"scripts/conf/{name}.yaml")
        assert isinstance(config, DictConfig)
        for key, value in (_SHORT | {"trainer.devices": world}).items():
            OmegaConf.update(config, key, value)
        settings = PlanSettings(cluster=CLUSTER, pin=pin, calibration=False)
        plan, edited = planned(config, settings)
        alone = OmegaConf.merge(
            config, OmegaConf.create({"trainer": {"devices": 1}, "model": _alone(config)})
        )
        assert isinstance(alone, DictConfig)
        yield trainings.compare(
            f"{name} {plan.layout.describe()}",
            settings_of(edited),
            (name, settings_of(alone)),
            plan,
            dialect="nemo",
            point=(),
        )


def _alone(config: DictConfig) -> dict[str, Any]:
    """Return the layout keys of a one-process run."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return dict.fromkeys(sizes, 1) | {
        "expert_model_parallel_size": 1 if "num_moe_experts" in config.model else None,
        "virtual_pipeline_model_parallel_size": None,
        "sequence_parallel": False,
    }


def run_forced(trainings: Trainings) -> Iterator[tuple[Run, str]]:
    """Train what no plan holds; each with the codes of the rules by which the planner refuses it.

    megatron-core 0.16 trains all of them without a word.
    """
    wrong: dict[str, dict[str, Any]] = {
        "pp2 vpp2 without p2p overlap": {
            "--pipeline-model-parallel-size": 2,
            "--num-virtual-stages-per-pipeline-rank": 2,
            "--no-overlap-p2p-communication": True,
            "--micro-batch-size": 4,
        },
        "experts with tp2 ep1 etp1": {
            "--tensor-model-parallel-size": 2,
            "--sequence-parallel": True,
            "--expert-tensor-parallel-size": 1,
            "--micro-batch-size": 8,
        },
    }
    for name, flags in wrong.items():
        model = Model(layers=8, tied=False, experts="experts" in name)
        config = model.config("none")
        config.MODEL_ARGS.update(flags)
        reference = model, megatron_settings(model.config("none"), 1)
        settings = megatron_settings(config, 2)
        run = trainings.compare(name, settings, reference, None, dialect="megatron_lm", point=())
        job = _job(config, 2)
        yield run, _codes(check(job, job.user_layout))
    yield _dropped_layer(trainings)


def _dropped_layer(trainings: Trainings) -> tuple[Run, str]:
    """Train seven of eight layers, as a split with a remainder would."""
    whole, cut = (Model(layers=layers, tied=False, experts=False) for layers in (8, 7))
    config = cut.config("none")
    config.MODEL_ARGS.update(
        {
            "--pipeline-model-parallel-size": 2,
            "--decoder-first-pipeline-num-layers": 4,
            "--micro-batch-size": 8,
        }
    )
    reference = whole, megatron_settings(whole.config("none"), 1)
    name = "layers 4-3 of 8"
    run = trainings.compare(
        name, megatron_settings(config, 2), reference, None, dialect="megatron_lm", point=()
    )
    job = _job(whole.config("none"), 2)
    layout = dataclasses.replace(job.user_layout, pp=2, dp=1, edp=1, num_layers_per_chunk=(4, 3))
    return run, _codes(check(job, layout))


def run_verified(trainings: Trainings) -> Iterator[Run]:
    """Train against a plan that another configuration, or another node, was made for: every rank refuses."""
    model = Model(layers=8, tied=False, experts=False)
    pins = {"tp": 1, "pp": 2, "vpp": 1, "cp": 1, "order": "tp-cp-ep-dp-pp"}
    plan, edited = planned(
        model.config("none"), PlanSettings(cluster=CLUSTER, num_gpus=4, pin=pins, calibration=False)
    )
    reference = model, megatron_settings(model.config("none"), 1)
    other_order, fewer_layers = (OmegaConf.create(OmegaConf.to_container(edited)) for _ in range(2))
    other_order.MODEL_ARGS.update({"--use-tp-pp-dp-mapping": True})
    fewer_layers.MODEL_ARGS.update({"--num-layers": 7, "--decoder-first-pipeline-num-layers": 4})
    elsewhere = dataclasses.replace(
        plan, rank_map=dataclasses.replace(plan.rank_map, nodes=("node1", "node2"), gpus_per_node=2)
    )
    # The node of this process, as Slurm says it; only a plan with named nodes looks.
    os.environ["SLURMD_NODENAME"] = "node3"
    cases = {
        "another order of ranks": (other_order, plan),
        "another number of layers": (fewer_layers, plan),
        "another node": (edited, elsewhere),
    }
    for name, (config, against) in cases.items():
        yield trainings.compare(
            name, megatron_settings(config, 4), reference, against, dialect="megatron_lm", point=()
        )


def _job(config: DictConfig, world: int) -> TrainJob:
    return MegatronLMDialect().read(
        config, overrides=(), settings=PlanSettings(num_gpus=world, dialect="megatron_lm")
    )


def _codes(violations: Sequence[Violation]) -> str:
    return " ".join(violation.code for violation in violations)
