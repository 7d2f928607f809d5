"""Linear layers and MLPs: the parts that dense blocks, shared experts and heads have in common."""

from __future__ import annotations

from nest_megatron.graph.layer_graph import Operator
from nest_megatron.graph.sizes import Sizes


def gemm(
    name: str,
    z: Sizes,
    n: int,
    k: int,
    *,
    tokens: int | None = None,
    bias: bool = False,
    module: str = "",
    saved: int = 0,
) -> Operator:
    """Return a linear layer of ``tokens x k -> tokens x n``; backward is two GEMMs of the same FLOP."""
    tokens = z.tokens if tokens is None else tokens
    flops = 2 * tokens * n * k
    return Operator(
        name=name,
        kind="gemm",
        m=tokens,
        n=n,
        k=k,
        forward_flops=flops,
        backward_flops=2 * flops,
        parameters=n * k + (n if bias else 0),
        saved_bytes=saved,
        module=module,
    )


def mlp_operators(z: Sizes, name: str, width: int, *, module: str) -> list[Operator]:
    """Return a dense (or shared-expert) MLP of local width ``width``."""
    model = z.model
    gates = 2 if model.gated_mlp else 1
    up = z.tokens * width * gates
    # Recomputing a whole MoE layer covers its shared expert.
    kept = not z.drops(module) and not (module == "shared_experts" and z.drops("moe"))
    copies = 2 if model.squared_relu_copy else 1
    activation_traffic = z.activation_bytes * z.tokens * width
    if not z.kernels.fused_activation:
        activation_traffic *= z.time.unfused_activation_factor
    return [
        gemm(
            f"{name}_up", z, gates * width, z.h, bias=model.linear_bias, saved=z.act_bytes * up if kept else 0
        ),
        Operator(
            name=f"{name}_activation",
            kind="memory",
            **z.passes(activation_traffic),
            saved_bytes=copies * z.low_bytes * z.tokens * width if kept else 0,
            transient_bytes=z.act_bytes * z.tokens * width * (1 + gates) + 2 * z.act_bytes * z.tokens * z.h,
        ),
        gemm(f"{name}_down", z, z.h, width, bias=model.linear_bias),
    ]
