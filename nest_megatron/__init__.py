"""NEST for Megatron: the parallel layout and rank map that fit the model, the memory and the real network.

``plan`` and ``check`` take a configuration (OmegaConf) and are all most callers need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nest_megatron.errors import NestError as NestError
    from nest_megatron.pipeline import check_config as check
    from nest_megatron.pipeline import plan_config as plan
    from nest_megatron.specs.cluster import Cluster as Cluster
    from nest_megatron.specs.layout import Layout as Layout
    from nest_megatron.specs.model import ModelSpec as ModelSpec
    from nest_megatron.specs.plan import Plan as Plan

__all__ = ["Cluster", "Layout", "ModelSpec", "NestError", "Plan", "check", "plan"]

_HOMES = {
    "plan": ("nest_megatron.pipeline", "plan_config"),
    "check": ("nest_megatron.pipeline", "check_config"),
    "Plan": ("nest_megatron.specs.plan", "Plan"),
    "Layout": ("nest_megatron.specs.layout", "Layout"),
    "Cluster": ("nest_megatron.specs.cluster", "Cluster"),
    "ModelSpec": ("nest_megatron.specs.model", "ModelSpec"),
    "NestError": ("nest_megatron.errors", "NestError"),
}


def __getattr__(name: str) -> Any:
    """Import public names on first use: every Hydra application imports this package at start."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
