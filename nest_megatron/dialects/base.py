"""What every dialect provides: recognise a configuration, read it into a TrainJob, write a layout back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from omegaconf import DictConfig

from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.model import ModelSpec
from nest_megatron.specs.settings import PlanSettings

#: Tokens on the busiest expert rank over the balanced number, without a capacity limit (memory_model.md 7).
DROPLESS_IMBALANCE = 1.25


def routing_imbalance(model: ModelSpec, assumptions: list[str], *, forced_balance: bool = False) -> float:
    """Return the expert load to plan for, and say so where nothing in the configuration limits it."""
    if model.moe is None or model.moe.capacity_factor is not None or forced_balance:
        return 1.0
    assumptions.append(
        "dropless routing: the busiest expert rank is planned with "
        f"{DROPLESS_IMBALANCE} times its balanced share"
    )
    return DROPLESS_IMBALANCE


class Dialect(Protocol):
    """One configuration style.

    Readers never resolve interpolations they do not know, never change ``config`` and need neither torch
    nor the framework itself.
    """

    name: str

    def detect(self, config: DictConfig) -> bool:
        """Return whether ``config`` is written in this dialect."""
        ...

    def read(self, config: DictConfig, *, overrides: Sequence[str], settings: PlanSettings) -> TrainJob:
        """Return the job that ``config`` describes.

        Args:
            overrides: the command line's ``key=value`` strings that are already applied to ``config``;
                value overrides of a layout key become pins, group choices do not.

        Raises:
            BadInputError: a value is missing or has no meaning; one sentence names key and value.
        """
        ...

    def write(self, config: DictConfig, job: TrainJob, layout: Layout) -> dict[str, Any]:
        """Return the minimal edits, dotted key -> value, that make ``config`` ask for ``layout``.

        Keys whose value already says the same are left out, so that interpolations on edited keys follow.

        Raises:
            BadInputError: this dialect and version cannot express ``layout``.
        """
        ...
