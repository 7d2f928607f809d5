"""What a plan is made from: dialect, job, cluster and calibration, and how its provenance says so."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from nest_megatron.calibration.store import apply, load_store
from nest_megatron.cluster.allocation import allocate
from nest_megatron.cluster.load import load_cluster
from nest_megatron.dialects import registry
from nest_megatron.dialects.base import Dialect
from nest_megatron.planner.freedom import apply_settings
from nest_megatron.planner.request import PlanRequest
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.settings import PlanSettings


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a plan is made from.

    Args:
        source: file or application the configuration came from.
        calibration: what the store knew, in words; ``request``: how the plan was asked for, for ``replan``.
    """

    dialect: Dialect
    job: TrainJob
    cluster: Cluster
    source: str
    calibration: str
    request: dict[str, Any]


def read_inputs(config: DictConfig, overrides: Sequence[str], settings: PlanSettings, source: str) -> Inputs:
    """Read the job from ``config`` and the cluster from ``settings``, each with what is known about it.

    Raises:
        BadInputError: configuration, cluster or settings cannot be read.
    """
    dialect, job = read_job(config, overrides, settings)
    # A node list decides first which nodes there are; without one the file's first nodes are taken.
    from_file = job.num_gpus if settings.nodelist is None else None
    cluster = load_for(job, settings, from_file)
    cluster = allocate(cluster, nodelist=settings.nodelist, topology=settings.topology, num_gpus=job.num_gpus)
    job, calibration = calibrated(job, cluster, settings)
    request = PlanRequest(overrides=tuple(overrides), settings=settings)
    return Inputs(dialect, job, cluster, source, calibration, request.to_plain())


def read_job(
    config: DictConfig, overrides: Sequence[str], settings: PlanSettings
) -> tuple[Dialect, TrainJob]:
    """Return the dialect of ``config`` and the job it describes.

    Raises:
        BadInputError: no dialect knows the configuration, or it or the settings cannot be read.
    """
    dialect = registry.by_name(settings.dialect) if settings.dialect else registry.detect(config)
    return dialect, apply_settings(dialect.read(config, overrides=overrides, settings=settings), settings)


def load_for(job: TrainJob, settings: PlanSettings, num_gpus: int | None) -> Cluster:
    """Return the cluster of the settings, cut to ``num_gpus`` where given.

    Raises:
        BadInputError: the cluster file cannot be read, or is too small.
    """
    # Fewer GPUs than one node is the cluster's own business; whole nodes use `gpus_per_node` of each.
    ranks_per_node = job.gpus_per_node if job.num_gpus >= job.gpus_per_node else None
    return load_cluster(settings.cluster, num_gpus=num_gpus, ranks_per_node=ranks_per_node)


def calibrated(job: TrainJob, cluster: Cluster, settings: PlanSettings) -> tuple[TrainJob, str]:
    """Return the job with what the store knows about it, and the words for the provenance."""
    return apply(job, cluster, load_store()) if settings.calibration else (job, "off")


def provenance_of(inputs: Inputs, settings: PlanSettings) -> dict[str, Any]:
    """Return where a plan comes from, as plan.json holds it."""
    job, cluster = inputs.job, inputs.cluster
    return {
        "nest_megatron": importlib.metadata.version("nest-megatron"),
        "source": inputs.source,
        "dialect": job.dialect,
        "framework": job.framework,
        "framework_version": job.framework_version,
        "profile": job.profile.name,
        "megatron_core_version": job.megatron_core_version,
        "model": job.model.name,
        "num_gpus": job.num_gpus,
        "sequence_length": job.sequence_length,
        "recipe": job.recipe.name,
        "cluster": cluster.name,
        "cluster_source": cluster.source,
        "accelerator": cluster.accelerator.name,
        "pins": {axis: str(value) for axis, value in job.pins.items()},
        "force": settings.force,
        "calibration": inputs.calibration,
        "request": inputs.request,
    }
