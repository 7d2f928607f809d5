"""Environment variables that belong to a layout: the framework refuses or misbehaves without them."""

from __future__ import annotations

from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.layout import Layout

#: Generations whose kernel queues need one hardware connection for TP / CP (config_surface.md rule 42).
_ONE_CONNECTION = ("volta", "ampere", "hopper")


def environment(layout: Layout, cluster: Cluster) -> dict[str, str]:
    """Return variable -> value for ``layout`` on ``cluster``.

    Source: Megatron-LM arguments.py on CUDA_DEVICE_MAX_CONNECTIONS (config_surface.md rule 42); expandable
    segments against fragmentation, which conflict with the user buffers of TP overlap (cases.md row 11).
    """
    found: dict[str, str] = {}
    sharded = layout.sharding in ("optim_grads", "optim_grads_params")
    one_connection = cluster.accelerator.generation in _ONE_CONNECTION
    if (layout.tp > 1 or layout.cp > 1) and one_connection and not sharded:
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if not layout.overlap.tp_comm:
        found["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return found
