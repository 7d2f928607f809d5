"""Seconds of one operator on one accelerator: tile waves, fused attention, memory-bound passes.

Source of every formula: research/time_model.md section 2; grouped GEMM research/moe.md section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from nest_megatron.errors import BadInputError, Factor
from nest_megatron.graph.layer_graph import Block, Operator, Part
from nest_megatron.specs.cluster import Accelerator
from nest_megatron.specs.job import TrainJob

# Tile height, width, share of the full tile's rate.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.93), (64, 128, 0.75))
# HBM bytes per output element: plain store, and fp32 accumulation of a weight gradient in the epilogue.
STORE_BYTES, ACCUMULATE_BYTES = 2, 8
# Attention: occupancy floor, rows of one thread block.
OCCUPANCY_FLOOR, ROWS_PER_BLOCK, NARROW_HEAD = 0.35, 128, 64
OPERAND_BYTES = {"fp8": 1.0, "fp4": 0.56, "fp32": 4.0}
LOW_PRECISION = ("fp8", "fp4")


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
        # Attention runs in 16 bit beside low-precision GEMMs; a device without such units uses its own.
        self.plain_dtype = next(d for d in ("bf16", "fp16", self.dtype) if d in accelerator.peak_flops_per_s)
        self.kernels = job.kernels
        self.time = job.profile.time
        self.wgrad_fusion = job.recipe.wgrad_fusion
        self.grouped = job.model.moe is None or job.model.moe.grouped_gemm
        self.hbm_bytes_per_s = accelerator.hbm_bytes_per_s * accelerator.memory_efficiency
        self._parts: dict[Part, PassTime] = {}
        self._gemm_s = lru_cache(maxsize=None)(self._gemm_time)

    def block(self, block: Block) -> PassTime:
        """Return the compute time of one block and micro-batch."""
        total = PassTime(0.0, 0.0)
        for part in block.parts:
            if part not in self._parts:
                self._parts[part] = sum(map(self.operator, part.operators), PassTime(0.0, 0.0))
            total = total + self._parts[part]
        return total

    def operator(self, op: Operator) -> PassTime:
        """Return forward and backward seconds of ``op``."""
        if op.kind == "gemm":
            return self._linear(op)
        if op.kind == "grouped_gemm":
            return self._experts(op)
        if op.kind == "attention":
            return self._attention(op)
        return PassTime(self.memory_s(op.forward_bytes), self.memory_s(op.backward_bytes))

    def memory_s(self, num_bytes: float) -> float:
        """Return seconds of one memory-bound kernel that moves ``num_bytes``."""
        return num_bytes / self.hbm_bytes_per_s + self.accelerator.kernel_gap_s if num_bytes else 0.0

    def _linear(self, op: Operator) -> PassTime:
        """Price one linear layer: the output layer stays in 16 bit unless the recipe says otherwise."""
        head = op.name == "output_layer" and not self.kernels.fp8_output_layer
        dtype = self.plain_dtype if head and self.dtype in LOW_PRECISION else self.dtype
        return self._gemms(op, dtype) + self._casts(op, dtype, forward=True, backward=True)

    def _gemms(self, op: Operator, dtype: str) -> PassTime:
        """Return the forward GEMM, and the input- and weight-gradient GEMMs."""
        stored = ACCUMULATE_BYTES if self.wgrad_fusion else STORE_BYTES
        forward = self._gemm_s(op.m, op.n, op.k, op.batch, STORE_BYTES, dtype)
        backward = self._gemm_s(op.m, op.k, op.n, op.batch, STORE_BYTES, dtype)
        backward += self._gemm_s(op.n, op.k, op.m, op.batch, stored, dtype)
        if not self.wgrad_fusion:
            backward += self.memory_s(self.time.unfused_wgrad_bytes * op.n * op.k * op.batch)
        return PassTime(forward, backward)

    def _casts(self, op: Operator, dtype: str, *, forward: bool, backward: bool) -> PassTime:
        """Return the casts of the input and of the output gradient; weights are cast once per step."""
        if dtype not in LOW_PRECISION:
            return PassTime(0.0, 0.0)
        per_row = self.time.fp8_cast_bytes * op.m * op.batch
        return PassTime(
            self.memory_s(per_row * op.k) if forward else 0.0,
            self.memory_s(per_row * op.n) if backward else 0.0,
        )

    def _experts(self, op: Operator) -> PassTime:
        """Price the experts of one rank; a fused MLP casts inside its GEMMs what lies between them."""
        time, fused = self.time, self.kernels.fused_experts
        first = op.name == "expert_up"
        casts = self._casts(op, self.dtype, forward=first or not fused, backward=not first or not fused)
        if not self.grouped:
            one = self._gemms(replace(op, batch=1), self.dtype)
            return PassTime(op.batch * one.forward_s, op.batch * one.backward_s) + casts
        factor = time.single_expert_factor
        if op.batch > 1:
            factor = time.fused_experts_factor if fused else time.grouped_factor
        plain = self._gemms(op, self.dtype)
        return PassTime(factor * plain.forward_s, factor * plain.backward_s) + casts

    def _attention(self, op: Operator) -> PassTime:
        acc = self.accelerator
        rate = acc.peak_flops_per_s[self.plain_dtype] * self._attention_share(op)
        forward = op.forward_flops / (
            rate * acc.attention_efficiency_forward * self._occupancy(op.batch, op.m, waves=2)
        )
        backward = op.backward_flops / (
            rate * acc.attention_efficiency_backward * self._occupancy(op.batch, op.n, waves=1)
        )
        gaps = 2 * acc.kernel_gap_s
        return PassTime(
            forward + self.memory_s(op.forward_bytes) + gaps,
            backward + self.memory_s(op.backward_bytes) + gaps,
        )

    def _attention_share(self, op: Operator) -> float:
        """Return the kernel's rate over the accelerator's attention efficiency."""
        time, share = self.time, 1.0
        if self.kernels.attention == "flash1":
            share *= time.flash1_share
        # Transformer Engine picks cuDNN or flash-attn 3 on Hopper; eager stacks run flash-attn 2 there.
        if self.kernels.attention == "flash" and not self.kernels.transformer_engine:
            share *= time.flash2_hopper_share if self.accelerator.generation == "hopper" else 1.0
        if self.kernels.fp8_attention and self.dtype in LOW_PRECISION:
            share *= time.fp8_attention_factor
        return share * (time.narrow_head_share if op.k <= NARROW_HEAD else 1.0)

    def _occupancy(self, batch: int, rows: int, *, waves: int) -> float:
        """Return the rate that ``batch`` heads of ``rows`` rows reach, over a full device."""
        blocks = batch * math.ceil(rows / ROWS_PER_BLOCK)
        full = min(1.0, blocks / (waves * self.accelerator.num_sms))
        return OCCUPANCY_FLOOR + (1 - OCCUPANCY_FLOOR) * full

    def _gemm_time(self, m: int, n: int, k: int, batch: int, store_bytes: int, dtype: str) -> float:
        """Return seconds of ``batch`` GEMMs (m x k) @ (k x n): best tile, or the HBM bound if larger."""
        acc = self.accelerator
        per_sm = acc.peak_flops_per_s[dtype] / acc.num_sms * acc.gemm_efficiency[dtype]
        compute_s = math.inf
        for height, width, share in TILES:
            waves = math.ceil(math.ceil(m / height) * math.ceil(n / width) * batch / acc.num_sms)
            tile_s = 2 * height * width * k / (per_sm * share) + acc.wave_overhead_s
            compute_s = min(compute_s, waves * tile_s)
        operand = OPERAND_BYTES.get(dtype, 2.0)
        moved = batch * (operand * (m * k + k * n) + store_bytes * m * n)
        return max(compute_s, moved / self.hbm_bytes_per_s) + acc.kernel_gap_s
