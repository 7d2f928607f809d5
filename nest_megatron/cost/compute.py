"""Seconds of one operator on one accelerator: tile waves, fused attention, memory-bound passes.

Source of every formula: research/time_model.md section 2, constants section 3 (fitted column); grouped
GEMM and host floor research/moe.md section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from nest_megatron.errors import BadInputError, Factor
from nest_megatron.graph.layer_graph import Block, Operator
from nest_megatron.specs.cluster import Accelerator
from nest_megatron.specs.job import TrainJob

# Tile height, width, share of the full tile's rate.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.93), (64, 128, 0.75))
# Share of a partial last wave that is lost (1 = a whole wave).
WAVE_SOFTNESS = 0.60
# HBM bytes per output element: plain store, and fp32 accumulation of a weight gradient in the epilogue.
STORE_BYTES, ACCUMULATE_BYTES = 2, 8
# Elementwise bytes per weight when the accumulation is a kernel of its own.
UNFUSED_WGRAD_BYTES = 10
# Bytes per operand element of the cast and transpose in front of an fp8 or fp4 GEMM.
FP8_CAST_BYTES = 3.1
# Attention: occupancy floor, query rows per block, penalty of narrow heads.
OCCUPANCY_FLOOR, QUERY_ROWS_PER_BLOCK, NARROW_HEAD, NARROW_HEAD_SHARE = 0.35, 128, 64, 0.75
# Grouped GEMM: base factor, factor of one local expert, and the small-M term (moe.md table, r3).
GROUPED_FACTOR, SINGLE_EXPERT_FACTOR, GROUPED_SMALL_M, GROUPED_REFERENCE_M = 1.18, 0.71, 0.42, 256
OPERAND_BYTES = {"fp8": 1.0, "fp4": 0.56, "fp32": 4.0}


@dataclass(frozen=True, slots=True)
class PassTime:
    """Forward and backward seconds of an operator or block, without communication."""

    forward_s: float
    backward_s: float

    def __add__(self, other: PassTime) -> PassTime:
        """Return the sum of both passes."""
        return PassTime(self.forward_s + other.forward_s, self.backward_s + other.backward_s)


class ComputeModel:
    """Prices operators on one accelerator under one precision recipe."""

    def __init__(self, accelerator: Accelerator, job: TrainJob) -> None:
        self.accelerator = accelerator
        self.dtype = job.recipe.compute_dtype
        if self.dtype not in accelerator.peak_flops_per_s:
            raise BadInputError(
                "NEST-A01",
                f"{accelerator.name} has no {self.dtype} units, and the job computes in {self.dtype}",
                factors=[Factor("precision", job.recipe.name, job.origin("precision"))],
                nearest=[f"precision {name}" for name in accelerator.peak_flops_per_s],
            )
        self.wgrad_fusion = job.recipe.wgrad_fusion
        self.gap_s = 0.0 if job.kernels.cuda_graphs else accelerator.kernel_gap_s
        self.hbm_bytes_per_s = accelerator.hbm_bytes_per_s * accelerator.memory_efficiency
        self._gemm_s = lru_cache(maxsize=None)(self._gemm_time)

    def block(self, block: Block) -> PassTime:
        """Return the compute time of one block and micro-batch."""
        total = PassTime(0.0, 0.0)
        for operator in block.operators:
            total = total + self.operator(operator)
        return total

    def operator(self, op: Operator) -> PassTime:
        """Return forward and backward seconds of ``op``."""
        if op.kind == "gemm":
            return self._linear(op)
        if op.kind == "grouped_gemm":
            return self._grouped(op)
        if op.kind == "attention":
            return self._attention(op)
        return PassTime(self._memory_s(op.forward_bytes), self._memory_s(op.backward_bytes))

    def _memory_s(self, num_bytes: int) -> float:
        return num_bytes / self.hbm_bytes_per_s + self.gap_s if num_bytes else 0.0

    def _linear(self, op: Operator) -> PassTime:
        forward = self._gemm_s(op.m, op.n, op.k, op.batch, STORE_BYTES)
        dgrad = self._gemm_s(op.m, op.k, op.n, op.batch, STORE_BYTES)
        stored = ACCUMULATE_BYTES if self.wgrad_fusion else STORE_BYTES
        wgrad = self._gemm_s(op.n, op.k, op.m, op.batch, stored)
        if not self.wgrad_fusion:
            wgrad += UNFUSED_WGRAD_BYTES * op.n * op.k * op.batch / self.hbm_bytes_per_s
        return PassTime(forward, dgrad + wgrad)

    def _grouped(self, op: Operator) -> PassTime:
        base = SINGLE_EXPERT_FACTOR if op.batch == 1 else GROUPED_FACTOR
        factor = base + GROUPED_SMALL_M * GROUPED_REFERENCE_M / op.m
        plain = self._linear(op)
        return PassTime(factor * plain.forward_s, factor * plain.backward_s)

    def _attention(self, op: Operator) -> PassTime:
        acc = self.accelerator
        peak = acc.peak_flops_per_s["bf16" if "bf16" in acc.peak_flops_per_s else "fp16"]
        blocks = op.batch * math.ceil(op.m / QUERY_ROWS_PER_BLOCK)
        occupancy = OCCUPANCY_FLOOR + (1 - OCCUPANCY_FLOOR) * min(1.0, blocks / (2 * acc.num_sms))
        rate = peak * occupancy * (NARROW_HEAD_SHARE if op.k <= NARROW_HEAD else 1.0)
        forward = op.forward_flops / (rate * acc.attention_efficiency_forward)
        backward = op.backward_flops / (rate * acc.attention_efficiency_backward)
        return PassTime(
            forward + self._memory_s(op.forward_bytes) + self.gap_s,
            backward + self._memory_s(op.backward_bytes) + self.gap_s,
        )

    def _gemm_time(self, m: int, n: int, k: int, batch: int, store_bytes: int) -> float:
        """Return seconds of ``batch`` GEMMs (m x k) @ (k x n): best tile, or the HBM bound if larger."""
        acc = self.accelerator
        per_sm = acc.peak_flops_per_s[self.dtype] / acc.num_sms * acc.gemm_efficiency[self.dtype]
        compute_s = math.inf
        for height, width, share in TILES:
            waves = math.ceil(m / height) * math.ceil(n / width) * batch / acc.num_sms
            waves = waves + (math.ceil(waves) - waves) * WAVE_SOFTNESS if waves > 1 else 1.0
            tile_s = 2 * height * width * k / (per_sm * share) + acc.wave_overhead_s
            compute_s = min(compute_s, waves * tile_s)
        operand = OPERAND_BYTES.get(self.dtype, 2.0)
        moved = batch * (operand * (m * k + k * n) + store_bytes * m * n)
        memory_s = moved / self.hbm_bytes_per_s
        cast_s = 0.0
        if self.dtype in ("fp8", "fp4"):
            cast_s = FP8_CAST_BYTES * batch * (m * k + k * n) / self.hbm_bytes_per_s
        return max(compute_s, memory_s) + cast_s + self.gap_s
