"""A seeded covering design over the axes of a layout: few plans in which every legal pair of values meets.

What is legal is the planner's own space: every layout it would consider for the tiny jobs below.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig

from nest_megatron.dialects.megatron_lm import MegatronLMDialect, config_of
from nest_megatron.planner.freedom import apply_settings
from nest_megatron.planner.space import enumerate_space
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.settings import PlanSettings

CLUSTER = "cpu-node"
WORLDS = (2, 4, 8, 16)
GLOBAL_BATCH = 16
#: Axis -> the values that are tried.
VALUES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "sp": (False, True),
    "pp": (1, 2, 4),
    "vpp": (1, 2),
    "uneven": (False, True),
    "cp": (1, 2),
    "ep": (0, 1, 2, 4),  # 0: no experts
    "etp": ("tp", "1"),
    "dp": (1, 2, 4),
    "sharding": ("none", "optim"),
    "recompute": ("none", "selective", "full"),
    "tied": (False, True),
    "order": ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"),
}
_FLAGS: dict[str, Any] = {
    "hidden-size": 32,
    "ffn-hidden-size": 64,
    "num-attention-heads": 8,
    "group-query-attention": True,
    "num-query-groups": 4,
    "seq-length": 16,
    "max-position-embeddings": 16,
    "padded-vocab-size": 64,
    "micro-batch-size": 1,
    "global-batch-size": GLOBAL_BATCH,
    "lr": 0.001,
    "train-iters": 3,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "overlap-grad-reduce": True,
    "overlap-param-gather": True,
    "use-distributed-optimizer": True,
}
_EXPERTS: dict[str, Any] = {
    "num-experts": 4,
    "moe-router-topk": 2,
    "moe-ffn-hidden-size": 32,
    "moe-token-dispatcher-type": "alltoall",
    "moe-aux-loss-coeff": 0.0,
}

Point = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """The parts of a job that a layout does not decide.

    Args:
        layers: 8 divide evenly over every pipeline tried, 7 over none.
    """

    layers: int
    tied: bool
    experts: bool

    def config(self, recompute: str) -> DictConfig:
        """Return the Megatron-LM flags; ``selective`` is asked for by the user, planners rarely pick it."""
        flags = _FLAGS | {"num-layers": self.layers} | (_EXPERTS if self.experts else {})
        if not self.tied:
            flags = flags | {"untie-embeddings-and-output-weights": True}
        if recompute == "selective":
            flags = flags | {"recompute-granularity": "selective"}
        return config_of(flags)


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What a plan is pinned to."""

    point: Point
    model: Model
    world: int
    layout: Layout

    @property
    def named(self) -> dict[str, Any]:
        """Axis -> value."""
        return dict(zip(VALUES, self.point, strict=True))

    def config(self) -> DictConfig:
        """Return the flags before planning: even stages are the user's own, uneven ones the planner's."""
        config = self.model.config(self.named["recompute"])
        if self._even_stages:
            config.MODEL_ARGS["--pipeline-model-parallel-size"] = self.layout.pp
            if self.layout.vpp > 1:
                config.MODEL_ARGS["--num-virtual-stages-per-pipeline-rank"] = self.layout.vpp
        return config

    @property
    def _even_stages(self) -> bool:
        return self.layout.pp > 1 and not self.named["uneven"]

    def settings(self) -> PlanSettings:
        """Return the pins; uneven splits and micro-batch stay the planner's choice."""
        layout, recompute = self.layout, self.named["recompute"]
        pin = {axis: getattr(layout, axis) for axis in ("tp", "cp", "pp", "vpp", "ep", "sharding", "order")}
        if layout.tp > 1:
            pin["sequence_parallel"] = layout.sequence_parallel
        if self.model.experts:
            pin["etp"] = layout.etp
        # What the user's flags say cannot be pinned by value, only frozen.
        frozen = {"recompute": recompute == "selective", "layers": self._even_stages}
        free = {axis: False for axis, asked in frozen.items() if asked}
        if recompute != "selective":
            pin["recompute"] = recompute
        return PlanSettings(
            cluster=CLUSTER, num_gpus=self.world, pin=pin, free=free, calibration=False, dialect="megatron_lm"
        )


def point_of(layout: Layout, model: Model) -> Point:
    """Return the axis values of a layout; those outside ``VALUES`` make it no member of the design."""
    return (
        layout.tp,
        layout.sequence_parallel,
        layout.pp,
        layout.vpp,
        len(set(layout.num_layers_per_chunk)) > 1,
        layout.cp,
        layout.ep if model.experts else 0,
        "tp" if layout.etp == layout.tp else "1" if layout.etp == 1 else "between",
        layout.dp,
        layout.sharding,
        layout.recompute.granularity,
        model.tied,
        layout.order,
    )


def legal_targets() -> list[Target]:
    """Return one target per distinct legal point, smallest world first, in a fixed order."""
    found: dict[Point, Target] = {}
    for world in WORLDS:
        for model, recompute in itertools.product(_models(), ("none", "selective")):
            for layout in _layouts(model, world, recompute):
                point = point_of(layout, model)
                members = zip(point, VALUES.values(), strict=True)
                if point not in found and all(value in allowed for value, allowed in members):
                    found[point] = Target(point, model, world, layout)
    return list(found.values())


def _models() -> Iterator[Model]:
    for layers, tied, experts in itertools.product((8, 7), (False, True), (False, True)):
        yield Model(layers, tied, experts)


def _layouts(model: Model, world: int, recompute: str) -> Iterator[Layout]:
    # Splits of even and uneven layers are told apart by the model, so that a pin of neither is needed.
    free = {"recompute": False} if recompute == "selective" else {}
    settings = PlanSettings(num_gpus=world, free=free, pin={"micro_batch": 1}, dialect="megatron_lm")
    job = MegatronLMDialect().read(model.config(recompute), overrides=(), settings=settings)
    space = enumerate_space(apply_settings(job, settings))
    for index in range(len(space)):
        layout = space.layout(index)
        uneven = len(set(layout.num_layers_per_chunk)) > 1
        if uneven == (model.layers == 7 and layout.pp > 1):
            yield layout


def pairs_of(point: Point) -> frozenset[tuple[int, Any, int, Any]]:
    """Return every pair of axis values in a point."""
    numbered = list(enumerate(point))
    return frozenset((i, a, j, b) for (i, a), (j, b) in itertools.combinations(numbered, 2))


def covering_design(*, seed: int, targets: list[Target]) -> list[Target]:
    """Return targets that hold every pair which any of ``targets`` holds; greedy, small worlds preferred."""
    numbers: dict[tuple[int, Any, int, Any], int] = {}
    masks = []
    for target in targets:
        mask = 0
        for pair in sorted(pairs_of(target.point), key=str):
            mask |= 1 << numbers.setdefault(pair, len(numbers))
        masks.append(mask)
    left = (1 << len(numbers)) - 1
    order = list(range(len(targets)))
    random.Random(seed).shuffle(order)
    chosen = []
    while left:
        # A plan of many processes costs more time than one of few.
        best = max(order, key=lambda i: (masks[i] & left).bit_count() / (4 + targets[i].world))
        chosen.append(targets[best])
        left &= ~masks[best]
    return chosen
