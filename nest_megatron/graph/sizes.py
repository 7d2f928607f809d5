"""Per-rank sizes shared by every template: tokens, bytes per element, what is recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from nest_megatron.specs.constants import StepConstants
from nest_megatron.specs.job import FrameworkProfile, Kernels, Recipe, TrainJob
from nest_megatron.specs.layout import BlockChoice
from nest_megatron.specs.model import ModelSpec


class Traffic(TypedDict):
    """HBM bytes of a memory-bound operator in both passes, as the fields of ``Operator``."""

    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one rank under one BlockChoice.

    Attributes:
        sequence: tokens of one sequence that this part of the model works on.
        tokens: T = micro_batch * sequence / cp.
        tokens_sp: T / tp with sequence parallelism, else T.
        act_bytes: bytes of a stored activation element; ``low_bytes`` of one that an fp8 GEMM reads.
    """

    job: TrainJob
    choice: BlockChoice
    sequence: int
    tokens: int
    tokens_sp: int
    act_bytes: int
    low_bytes: int

    @classmethod
    def of(cls, job: TrainJob, choice: BlockChoice) -> Sizes:
        """Return the sizes of ``job`` under ``choice``; of an encoder-decoder, those of its encoder."""
        return cls._on(job, choice, job.sequence_length)

    def on_decoder(self) -> Sizes:
        """Return the sizes of the decoder; ``self`` where one stack of layers is all there is."""
        decoder = self.model.decoder
        return self if decoder is None else self._on(self.job, self.choice, decoder.sequence_length)

    @classmethod
    def _on(cls, job: TrainJob, choice: BlockChoice, sequence: int) -> Sizes:
        tokens = choice.micro_batch * sequence // choice.cp
        return cls(
            job=job,
            choice=choice,
            sequence=sequence,
            tokens=tokens,
            tokens_sp=tokens // choice.tp if choice.sequence_parallel else tokens,
            act_bytes=job.recipe.activation_bytes,
            low_bytes=1 if job.recipe.compute_dtype in ("fp8", "fp4") else job.recipe.activation_bytes,
        )

    @property
    def model(self) -> ModelSpec:
        """The model."""
        return self.job.model

    @property
    def recipe(self) -> Recipe:
        """The precision recipe."""
        return self.job.recipe

    @property
    def kernels(self) -> Kernels:
        """The kernel implementations."""
        return self.job.kernels

    @property
    def facts(self) -> FrameworkProfile:
        """The facts of the software stack."""
        return self.job.profile

    @property
    def time(self) -> StepConstants:
        """The constants of the step-time formulas: HBM bytes per element of one pass."""
        return self.job.profile.time

    def passes(self, forward_bytes: float, *, fused: bool = True) -> Traffic:
        """Return the traffic of a memory-bound operator: ``forward_bytes``, and what backward moves."""
        time = self.job.profile.time
        factor = time.backward_traffic_fused if fused else time.backward_traffic_unfused
        return {"forward_bytes": round(forward_bytes), "backward_bytes": round(factor * forward_bytes)}

    @property
    def norm_bytes(self) -> float:
        """HBM bytes per element of one norm."""
        time = self.job.profile.time
        return time.norm_fused_bytes if self.kernels.fused_norm else time.norm_unfused_bytes

    @property
    def activation_bytes(self) -> float:
        """HBM bytes per FFN element of one activation function."""
        time = self.job.profile.time
        return time.activation_gated_bytes if self.model.gated_mlp else time.activation_plain_bytes

    @property
    def h(self) -> int:
        """Hidden size."""
        return self.job.model.hidden_size

    def drops(self, module: str) -> bool:
        """Return whether selective recomputation drops what ``module`` saves."""
        recompute = self.choice.recompute
        return recompute.granularity == "selective" and module in recompute.modules
