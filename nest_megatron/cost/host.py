"""Host time of one block: what the CPU needs to launch a layer, whatever the GPU does meanwhile.

Source: research/time_model.md section 2 "Host floor", research/moe.md section 3 item 5.
"""

from __future__ import annotations

from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.model import BlockKind

#: Backward host time relative to forward.
BACKWARD_HOST_FACTOR = 1.2
EXPERT_KINDS = ("moe", "experts")


def host_floor_s(job: TrainJob, kind: BlockKind, *, expert_overlap: bool) -> float:
    """Return the host seconds of one forward pass of a block of ``kind``; 0 inside an iteration graph."""
    kernels, time, model = job.kernels, job.profile.time, job.model
    if kernels.cuda_graphs:
        return 0.0
    seconds = job.profile.host_floor_s
    if model.mla is not None:
        seconds *= time.mla_host_factor
    if kind not in EXPERT_KINDS:
        return seconds
    seconds *= job.profile.moe_host_factor
    if job.recipe.compute_dtype in ("fp8", "fp4"):
        seconds *= time.fp8_host_factor
    if expert_overlap:
        seconds *= time.ep_overlap_host_factor
    dropped = model.moe is not None and model.moe.capacity_factor is not None
    if dropped:
        seconds *= time.capacity_host_factor
    if "attn" in kernels.cuda_graph_modules or (dropped and kernels.cuda_graph_modules):
        seconds *= time.attention_graph_host_factor
    elif kernels.cuda_graph_modules:
        seconds *= time.router_graph_host_factor
    return seconds
