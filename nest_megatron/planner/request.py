"""How a plan was asked for: enough to ask again, with what has changed since."""

from __future__ import annotations

import dataclasses
from typing import Any

from nest_megatron.cluster.changes import Changes, remaining
from nest_megatron.cluster.hosts import expand_hosts
from nest_megatron.cluster.load import load_cluster
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs import codec
from nest_megatron.specs.job import COMMAND_LINE, TrainJob
from nest_megatron.specs.plan import Plan
from nest_megatron.specs.settings import PlanSettings

#: Key of the request in a plan's provenance.
KEY = "request"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The inputs of a plan beside the configuration file; plan.json carries them in its provenance.

    Args:
        overrides: ``key=value`` texts that were applied to the configuration.
        available_gpus: what earlier changes left; None for all that the job asks for.
        degraded: (unit, node or level, factor) of this and earlier changes.
    """

    overrides: tuple[str, ...] = ()
    settings: PlanSettings = dataclasses.field(default_factory=PlanSettings)
    available_gpus: int | None = None
    degraded: tuple[tuple[str, float], ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """Return the request as dicts, lists and scalars."""
        plain: dict[str, Any] = codec.to_plain(self)
        return plain


def request_of(plan: Plan, *, source: str) -> PlanRequest:
    """Return how ``plan`` was asked for.

    Raises:
        BadInputError: the plan does not say it, or in another form.
    """
    plain = plan.provenance.get(KEY)
    if plain is None:
        raise BadInputError(
            "NEST-R04",
            f"{source} does not say how it was asked for",
            factors=[Factor("nest_megatron", plan.provenance.get("nest_megatron", "unknown"), source)],
            nearest=["plan once more with this version: nest-megatron plan --json"],
        )
    return codec.from_plain(PlanRequest, plain, source=f"{source}: provenance.{KEY}")


def check_same_job(job: TrainJob, plan: Plan, source: str) -> None:
    """Refuse a configuration that describes another job than the plan's.

    Raises:
        BadInputError: model, batch, sequence or precision differ.
    """
    said = {
        "model": (job.model.name, plan.provenance.get("model")),
        "num_layers": (job.model.num_layers, sum(plan.layout.num_layers_per_chunk)),
        "global_batch": (job.global_batch, plan.layout.global_batch),
        "sequence_length": (job.sequence_length, plan.provenance.get("sequence_length")),
        "recipe": (job.recipe.name, plan.provenance.get("recipe")),
        "dialect": (job.dialect, plan.provenance.get("dialect")),
    }
    different = {name: values for name, values in said.items() if values[0] != values[1]}
    if different:
        raise BadInputError(
            "NEST-R05",
            "the configuration is not that of the plan",
            factors=[
                factor
                for name, (now, then) in different.items()
                for factor in (Factor(name, now, source), Factor(name, then, "plan"))
            ],
            nearest=["--config FILE: the configuration that the plan was made from", "plan anew"],
        )


def after(request: PlanRequest, changes: Changes, job: TrainJob) -> tuple[PlanRequest, tuple[int, ...]]:
    """Return the request after the changes, and the numbers of GPUs that may be used, largest first.

    A job never grows by itself: only a new node list or a number of GPUs gives it more than it had.

    Raises:
        BadInputError: a lost node that was none, nothing left, or a topology that cannot be read again.
    """
    settings = dataclasses.replace(
        request.settings,
        topology=changes.topology or request.settings.topology,
        cluster=changes.cluster or request.settings.cluster,
    )
    if settings.topology == "-":
        raise BadInputError(
            "NEST-R04",
            "the plan's topology came from standard input and cannot be read again",
            factors=[Factor("topology", "-", "plan")],
            nearest=["--changed topology=FILE"],
        )
    settings, available = _available(request, changes, settings, job)
    request = dataclasses.replace(
        request,
        settings=settings,
        available_gpus=available,
        degraded=(*request.degraded, *changes.degraded),
    )
    if changes.num_gpus is not None:
        return dataclasses.replace(request, available_gpus=changes.num_gpus), (changes.num_gpus,)
    per_node = job.gpus_per_node
    return request, tuple(range(available, 0, -per_node)) if available > per_node else (available,)


def _available(
    request: PlanRequest, changes: Changes, settings: PlanSettings, job: TrainJob
) -> tuple[PlanSettings, int]:
    per_node = job.gpus_per_node
    most = job.num_gpus if request.available_gpus is None else request.available_gpus
    listed = changes.nodes or settings.nodelist
    nodes = expand_hosts(listed, where="node list") if listed else load_cluster(settings.cluster).nodes
    if nodes:
        if changes.lost_count:
            raise BadInputError(
                "NEST-R02",
                "the nodes of the job have names: say which ones are lost",
                factors=[Factor("lost", changes.lost_count, COMMAND_LINE)],
                nearest=[f"lost={nodes[0]}"],
            )
        left = remaining(nodes, changes.lost, "plan" if changes.nodes is None else COMMAND_LINE)
        if changes.nodes or changes.lost:
            settings = dataclasses.replace(settings, nodelist=",".join(left))
        held = len(left) * per_node
        return settings, held if changes.nodes else min(held, most)
    if changes.lost:
        remaining(nodes, changes.lost, "cluster without node names")
    available = most - changes.lost_count * per_node
    if available < 1:
        raise BadInputError(
            "NEST-R02",
            "every node is lost",
            factors=[Factor("lost", changes.lost_count, COMMAND_LINE), Factor("num_gpus", most, "plan")],
        )
    return settings, available
