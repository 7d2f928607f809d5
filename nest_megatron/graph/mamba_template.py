"""Closed formulas of a Mamba-2 mixer (parameters and saved bytes: research/memory_model.md 2.3)."""

from __future__ import annotations

from nest_megatron.graph.layer_graph import Operator
from nest_megatron.graph.linear_template import gemm
from nest_megatron.graph.sizes import Sizes

CHUNK_TOKENS = 256
CONVOLUTION_WIDTH = 4


def mamba_operators(z: Sizes) -> list[Operator]:
    """Return projection, convolution + scan, gated norm and output of one Mamba-2 mixer on one rank.

    The scan keeps its output, the gated norm's output and fp32 chunk states; its kernel recomputes the
    convolution.  FLOP: two products with the state per token (state-space duality, arXiv 2405.21060).
    """
    mamba, t = z.model.mamba, z.choice.tp
    assert mamba is not None
    inner = mamba.num_heads * mamba.head_dim // t
    groups = 2 * mamba.num_groups * mamba.state_dim // t
    heads = mamba.num_heads // t
    projected = 2 * inner + groups + heads
    scan_flops = 4 * z.tokens * inner * mamba.state_dim
    traffic = 2 * z.act_bytes * z.tokens * (2 * inner + groups)
    states = 4 * z.tokens * inner * mamba.state_dim // CHUNK_TOKENS
    convolution = (inner + groups) * (CONVOLUTION_WIDTH + 1)
    return [
        gemm("mamba_in", z, projected, z.h, saved=z.act_bytes * z.tokens * projected),
        Operator(
            name="mamba_scan",
            kind="memory",
            forward_flops=scan_flops,
            backward_flops=2 * scan_flops,
            **z.passes(traffic),
            saved_bytes=2 * z.act_bytes * z.tokens * inner + states,
            transient_bytes=z.act_bytes * z.tokens * (4 * inner + groups),
            parameters=convolution + 3 * heads + inner,
        ),
        gemm("mamba_out", z, z.h, inner),
    ]
