"""The switches of a run that its record names: of the public recipe, or beside the measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nest_megatron.specs.job import FlexBackend

#: Backends that send from the GPU; others go through the host and are priced as all-to-all (moe.md 2.4).
_BACKENDS: dict[str, FlexBackend] = {"deepep": "deepep", "hybridep": "hybridep"}
#: First release whose fused expert MLP covers biased experts with a clamp (moe.md 2.2, inferred there).
_BIASED_EXPERTS_FUSED = "26.08"


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """What a record says about how its run was configured; None where it does not say.

    Attributes:
        graphs: ``none``, ``te`` (parts of a layer, ``graph_modules``) or ``full`` (the whole iteration).
        release: container release of the recipe.
    """

    dispatcher: str
    flex_backend: FlexBackend
    expert_overlap: bool
    graphs: str
    graph_modules: tuple[str, ...]
    recompute_modules: tuple[str, ...]
    fused_experts: bool
    fp8_attention: bool
    layout: str | None
    release: str
    capacity: float | None
    tp_overlap: bool | None
    dp_overlap: bool | None

    def fuses_experts(self, *, biased: bool) -> bool:
        """Return whether activation and quantisation run inside the expert GEMMs."""
        return self.fused_experts and (not biased or self.release >= _BIASED_EXPERTS_FUSED)


def switches_of(record: dict[str, Any]) -> Switches | None:
    """Return the switches of ``record``: ``recipe_flags``, or ``features``; None where it has neither."""
    flags, features = record.get("recipe_flags"), record.get("features")
    if flags is not None:
        sends = str(flags.get("disp") or "a2a")
        return Switches(
            dispatcher="alltoall" if sends == "a2a" else "flex",
            flex_backend=_BACKENDS.get(sends, ""),
            expert_overlap=bool(flags.get("a2aov")),
            graphs=str(flags.get("cg") or "none"),
            graph_modules=tuple(flags.get("cgs") or ()),
            recompute_modules=tuple(flags.get("rc") or ()),
            fused_experts=bool(flags.get("fgm")),
            fp8_attention=bool(flags.get("fp8att")),
            layout=flags.get("layout"),
            release=str(flags.get("rel") or ""),
            capacity=None,
            tp_overlap=None,
            dp_overlap=None,
        )
    if features is None:
        return None
    dispatcher = str(features.get("dispatcher") or "alltoall")
    return Switches(
        dispatcher="alltoall" if dispatcher == "alltoall" else "flex",
        flex_backend=_BACKENDS.get(dispatcher, ""),
        expert_overlap=bool(features.get("a2a_overlap")),
        graphs=str(features.get("cuda_graph") or "none"),
        graph_modules=(),
        recompute_modules=(),
        fused_experts=False,
        fp8_attention=False,
        layout=None,
        release="",
        capacity=features.get("capacity"),
        tp_overlap=features.get("tp_overlap"),
        dp_overlap=features.get("dp_overlap"),
    )
