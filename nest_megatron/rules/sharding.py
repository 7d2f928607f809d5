"""Optimizer, gradient and parameter sharding over the data parallel ranks."""

from __future__ import annotations

from nest_megatron.errors import Factor
from nest_megatron.rules.base import (
    Broken,
    asked,
    derived,
    expert_data_parallel,
    rule,
    version,
)
from nest_megatron.rules.grid import DEFAULT_ORDER
from nest_megatron.rules.versions import VersionFacts
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout


@rule("NEST-RS01", "sharding", source="megatron/core/distributed: data_parallel_sharding_strategy")
def sharding_offered(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The sharding can be asked for in this dialect and version."""
    sharding = layout.sharding
    if sharding in job.capabilities.shardings and (
        sharding == "none" or sharding == "optim" or facts.gradient_sharding
    ):
        return None
    return Broken(
        f"sharding {sharding} cannot be chosen in {job.dialect}",
        (
            version(facts),
            *asked(job, layout, "sharding"),
            Factor("shardings", "+".join(job.capabilities.shardings), job.dialect),
        ),
    )


def _instances(layout: Layout) -> Factor:
    return Factor("num_optimizer_instances", layout.num_optimizer_instances)


@rule("NEST-RS02", "sharding", source="megatron/core/optimizer: num_distributed_optimizer_instances")
def instances_offered(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Several optimizer instances need a sharded optimizer, and a dialect and version that have them."""
    if layout.num_optimizer_instances == 1:
        return None
    if layout.num_optimizer_instances < 1:
        return Broken("there is at least one optimizer instance", (_instances(layout),))
    if layout.sharding == "none":
        return Broken(
            "several optimizer instances need a sharded optimizer",
            (_instances(layout), *asked(job, layout, "sharding")),
        )
    if job.capabilities.optimizer_instances and facts.optimizer_instances:
        return None
    return Broken(f"{job.dialect} has one optimizer instance only", (_instances(layout), version(facts)))


@rule(
    "NEST-RS03",
    "tp",
    "pp",
    "ep",
    "etp",
    "sharding",
    source="megatron/core/parallel_state.py: partial distributed optimizer groups",
)
def instances_divide(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Both dp * cp = world / (tp * pp) and edp are multiples of the optimizer instances."""
    instances = layout.num_optimizer_instances
    if instances <= 1:
        return None
    model = layout.tp * layout.pp
    dense = 0 if job.num_gpus % model else job.num_gpus // model
    experts = expert_data_parallel(job, layout)
    if dense % instances == 0 and experts % instances == 0:
        return None
    return Broken(
        f"dp*cp = {dense} and edp = {experts} must be multiples of {instances} optimizer instances",
        (
            _instances(layout),
            derived("dp*cp", dense),
            derived("edp", experts),
            *asked(job, layout, "tp", "pp", "ep", "etp"),
        ),
    )


@rule(
    "NEST-RS04",
    "sharding",
    "order",
    source="Megatron-Bridge training/config.py: Megatron-FSDP excludes use_tp_pp_dp_mapping",
)
def gradient_sharding_order(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Sharded gradients (Megatron-FSDP) need the default rank order."""
    if layout.order == DEFAULT_ORDER or layout.sharding == "none" or layout.sharding == "optim":
        return None
    return Broken(
        "sharded gradients or parameters cannot be combined with the order that puts pp before dp",
        asked(job, layout, "sharding", "order"),
    )
