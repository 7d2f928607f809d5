"""The values each axis may take before any rule is applied: natural domains, cut by pins and bounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from nest_megatron.graph.attention_template import FUSED_ATTENTION
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Overlap, Recompute

#: Largest micro-batch that is enumerated; beyond it GEMMs are long past saturation (time_model.md section 3).
MAX_MICRO_BATCH = 64
#: Block recomputation of as few layers per chunk as the memory limit needs: memory falls and time grows with
#: the number of layers, so every other number is slower or does not fit.  The search fills the number in.
BLOCK_AUTO = Recompute(granularity="full", method="block", num_layers=1)


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of ``number``, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


class Domains:
    """Axis domains of one job.

    A pin leaves one value, a bound the values it lists; composite axes (layers, recompute, overlap) are
    pinned to what the configuration says, because their pinned value is already part of ``user_layout``.
    """

    def __init__(self, job: TrainJob) -> None:
        self.job = job
        self.fixed = {axis: self._pinned(axis) for axis in job.pins}
        self._world = divisors(job.num_gpus)
        self._overlaps: dict[tuple[bool, ...], Overlap] = {}

    def _pinned(self, axis: str) -> Any:
        value = self.job.pins[axis]
        if axis == "layers":
            return self.job.user_layout.num_layers_per_chunk
        if axis in ("recompute", "overlap"):
            return getattr(self.job.user_layout, axis)
        return value

    def _cut(self, axis: str, natural: Iterable[Any]) -> tuple[Any, ...]:
        if axis in self.fixed:
            return (self.fixed[axis],)
        if axis in self.job.bounds:
            return tuple(self.job.bounds[axis])
        return tuple(natural)

    def tp(self) -> tuple[int, ...]:
        """Divisors of the world that divide the heads."""
        heads = self.job.model.num_attention_heads
        return self._cut("tp", (d for d in self._world if heads % d == 0))

    def cp(self, tp: int) -> tuple[int, ...]:
        """Divisors of the world left over by tp; 1 where the dialect has no context parallelism."""
        if not self.job.capabilities.context_parallel:
            return self._cut("cp", (1,))
        return self._cut("cp", divisors(self.job.num_gpus // tp) if self.job.num_gpus % tp == 0 else (1,))

    def pp(self, tp: int, cp: int) -> tuple[int, ...]:
        """Divisors of the world left over by tp and cp, at most one stage per layer; 1 for encoder-decoders.

        Source: Megatron-LM's pretrain_t5.py refuses a pipeline.
        """
        if self.job.model.decoder is not None:
            return self._cut("pp", (1,))
        inner = tp * cp
        left = self.job.num_gpus // inner if self.job.num_gpus % inner == 0 else 1
        return self._cut("pp", (d for d in divisors(left) if d <= self.job.model.num_layers))

    def sequence_parallel(self, tp: int) -> tuple[bool, ...]:
        """On or off above tp = 1; a framework clears it at tp = 1, so a pin has no meaning there."""
        return (False,) if tp == 1 else self._cut("sequence_parallel", (False, True))

    def ep(self) -> tuple[int, ...]:
        """Divisors of the number of experts; 1 for a dense model."""
        moe = self.job.model.moe
        if moe is None or not self.job.capabilities.expert_parallel:
            return self._cut("ep", (1,))
        return self._cut("ep", divisors(moe.num_experts))

    def etp(self, tp: int) -> tuple[int, ...]:
        """Divisors of tp (a wider expert split only adds traffic); tp for a dense model."""
        if self.job.model.moe is None:
            return (tp,)
        if not self.job.capabilities.expert_tensor_parallel:
            return self._cut("etp", (tp,))
        return self._cut("etp", divisors(tp))

    def micro_batch(self) -> tuple[int, ...]:
        """Divisors of the global batch up to ``MAX_MICRO_BATCH``."""
        return self._cut("micro_batch", (d for d in divisors(self.job.global_batch) if d <= MAX_MICRO_BATCH))

    def sharding(self) -> tuple[str, ...]:
        """What the dialect can express and the cost model prices (no sharding, ZeRO-1)."""
        return self._cut("sharding", (s for s in self.job.capabilities.shardings if s in ("none", "optim")))

    def order(self) -> tuple[str, ...]:
        """Rank orders the dialect has a switch for."""
        return self._cut("order", self.job.capabilities.orders)

    def vpp(self, pp: int) -> tuple[int, ...]:
        """1 without a pipeline, else up to one layer per chunk."""
        if pp == 1 or not self.job.capabilities.virtual_pipeline:
            return self._cut("vpp", (1,)) if pp > 1 else (1,)
        return self._cut("vpp", range(1, self.job.model.num_layers // pp + 1))

    def selective(self) -> tuple[Recompute, ...]:
        """Row-changing recompute choices: nothing, and attention scores where they are stored at all."""
        nothing = Recompute()
        if "recompute" in self.fixed:
            pinned: Recompute = self.fixed["recompute"]
            return (pinned,) if pinned.granularity == "selective" else (nothing,)
        choices = [nothing]
        # A flash kernel never stores the scores: recomputing them costs time and frees nothing.
        if (
            self.job.kernels.attention not in FUSED_ATTENTION
            and "core_attn" in self.job.capabilities.recompute_modules
        ):
            choices.append(Recompute(granularity="selective", modules=("core_attn",)))
        allowed = self.job.bounds.get("recompute")
        return tuple(c for c in choices if not allowed or c.granularity in (*allowed, "none"))

    def recompute(self, row: Recompute, sizes: Sequence[int]) -> tuple[Recompute, ...]:
        """Choices within one row: a selective row is itself; else none, everything, or ``BLOCK_AUTO``."""
        if "recompute" in self.fixed:
            return (self.fixed["recompute"],)
        if row.granularity == "selective":
            return (row,)
        choices = [Recompute()]
        if self.job.capabilities.full_recompute:
            choices.append(Recompute(granularity="full", method="uniform", num_layers=1))
            if max(sizes, default=1) > 1:
                choices.append(BLOCK_AUTO)
        allowed = self.job.bounds.get("recompute")
        return tuple(c for c in choices if not allowed or c.granularity in allowed)

    def splits(self, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
        """Layer counts per chunk worth trying: even, lighter ends, slots for embedding and loss."""
        if "layers" in self.fixed:
            return (self.fixed["layers"],)
        return _splits(self.job.model.num_layers, pp, vpp)

    def overlap(self, layout: Any, *, vpp: int) -> Overlap:
        """Return the overlap flags that go with a layout: the user's, as far as their conditions hold."""
        key = (layout.sharding != "none", layout.sequence_parallel, layout.ep > 1, layout.pp == 1, vpp > 1)
        if key not in self._overlaps:
            self._overlaps[key] = self._overlap(*key)
        return self._overlaps[key]

    def _overlap(
        self, sharded: bool, sequence_parallel: bool, experts: bool, flat: bool, chunks: bool
    ) -> Overlap:
        if "overlap" in self.fixed:
            pinned: Overlap = self.fixed["overlap"]
            return pinned
        asked = self.job.user_layout.overlap
        reduces = asked.grad_reduce
        if not sharded and self.job.capabilities.unsharded_grad_overlap != "as_asked":
            able = self.job.capabilities.unsharded_grad_overlap == "without_pp_and_sp"
            reduces = able and flat and not sequence_parallel
        return Overlap(
            grad_reduce=reduces,
            param_gather=asked.param_gather and reduces and sharded,
            tp_comm=asked.tp_comm and sequence_parallel and self.job.kernels.transformer_engine,
            p2p=chunks,
            expert_all_to_all=asked.expert_all_to_all and experts and (flat or chunks),
        )


@lru_cache(maxsize=4096)
def _splits(num_layers: int, pp: int, vpp: int) -> tuple[tuple[int, ...], ...]:
    """Return splits in the forms of ``rules.layers.split_form``; the rules keep the expressible ones."""
    found: dict[tuple[int, ...], None] = {}
    chunks = pp * vpp
    if num_layers % chunks == 0:
        found[(num_layers // chunks,) * chunks] = None
    for slots_first, slots_last in ((1, 1), (0, 1), (1, 0)):
        slots = num_layers + slots_first + slots_last
        if chunks > 1 and slots % chunks == 0 and slots // chunks > 1:
            each = slots // chunks
            found[(each - slots_first, *([each] * (chunks - 2)), each - slots_last)] = None
    for first, last in _ends(num_layers, pp, vpp):
        middle = (num_layers - first - last) // (pp - 2) if pp > 2 else 0
        stages = (first, *([middle] * (pp - 2)), last)
        found[tuple(stages[j % pp] // vpp for j in range(chunks))] = None
    return tuple(found)


def _ends(num_layers: int, pp: int, vpp: int) -> list[tuple[int, int]]:
    """Return (first, last) stage totals, multiples of vpp, at most two chunk rows below the middle."""
    if pp < 2:
        return []
    # Embedding and head are extra work: ends heavier than the middle only move the bottleneck there.
    middle = -(-num_layers // pp)
    lightest = max(vpp, middle - 2 * vpp)
    found = []
    for first in range(lightest, middle + vpp):
        for last in range(lightest, middle + vpp):
            rest, middles = num_layers - first - last, pp - 2
            if first % vpp or last % vpp or (middles == 0 and rest):
                continue
            if middles == 0 or (rest > 0 and rest % (middles * vpp) == 0):
                found.append((first, last))
    return found
