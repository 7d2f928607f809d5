"""The values each axis may take before any rule is applied: natural domains, cut by pins and bounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from nest_megatron.graph.attention_template import FUSED_ATTENTION
from nest_megatron.planner.splits import Split, balanced_splits, even_split, written_splits
from nest_megatron.rules import facts_for
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Overlap, Recompute

#: Largest micro-batch that is enumerated; beyond it GEMMs are long past saturation (time_model.md section 3).
MAX_MICRO_BATCH = 64
#: Shortest slice of a sequence per context-parallel rank, and narrowest slice of the hidden size per
#: tensor-parallel rank beyond one node, that are enumerated as long as something fits without them: smaller
#: ones leave GEMMs and messages that are mostly latency (time_model.md section 2, "Wave quantisation").
MIN_SLICE_TOKENS, MIN_SLICE_WIDTH = 1024, 512
#: Fewest ranks over which one of several optimizer instances still shards its state.
MIN_SHARD_RANKS = 32
MAX_OPTIMIZER_INSTANCES = 8
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

    def __init__(self, job: TrainJob, *, wide: bool = False) -> None:
        """Prepare the domains; ``wide`` lifts ``MIN_SLICE_TOKENS`` and ``MIN_SLICE_WIDTH``."""
        self.job = job
        self.wide = wide
        self.fixed = {axis: self._pinned(axis) for axis in job.pins}
        self._world = divisors(job.num_gpus)
        self._overlaps: dict[tuple[bool, ...], Overlap] = {}
        facts, able = facts_for(job.megatron_core_version), job.capabilities
        self._string = able.layout_string and facts.layout_string
        self._ends = able.uneven_ends and facts.uneven_ends
        self._instances = able.optimizer_instances and facts.optimizer_instances
        self._splits: dict[tuple[int, int], tuple[bool, tuple[Split, ...]]] = {}

    @property
    def least(self) -> int:
        """Fewest layers of a chunk: only a layout string can leave one empty."""
        return 0 if self._string else 1

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
        """Divisors of the world that divide the heads, up to one node or ``MIN_SLICE_WIDTH`` per rank."""
        model = self.job.model
        most = max(self.job.gpus_per_node, model.hidden_size // MIN_SLICE_WIDTH)
        if self.wide:
            most = model.num_attention_heads
        return self._cut("tp", (d for d in self._world if model.num_attention_heads % d == 0 and d <= most))

    def cp(self, tp: int) -> tuple[int, ...]:
        """Divisors of the world left over by tp, down to ``MIN_SLICE_TOKENS``; 1 without the feature."""
        if not self.job.capabilities.context_parallel or self.job.num_gpus % tp:
            return self._cut("cp", (1,))
        sequence = self.job.sequence_length
        most = sequence if self.wide else max(2, sequence // MIN_SLICE_TOKENS)
        return self._cut("cp", (d for d in divisors(self.job.num_gpus // tp) if d <= most))

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

    def sharding(self, layout: Any) -> tuple[tuple[str, int], ...]:
        """(sharding, optimizer instances): what the dialect can express; several when each is large.

        A pin or bound of sharding keeps the user's number of instances.
        """
        asked = self.job.user_layout.num_optimizer_instances
        if "sharding" in self.fixed or "sharding" in self.job.bounds:
            return tuple((name, asked if name != "none" else 1) for name in self.shardings())
        found = [(name, 1) for name in self.job.capabilities.shardings]
        if self._instances:
            counts = {d for d in divisors(layout.dp * layout.cp) if 1 < d <= MAX_OPTIMIZER_INSTANCES}
            counts = {d for d in counts if layout.dp * layout.cp // d >= MIN_SHARD_RANKS} | {asked}
            found += [
                (name, count)
                for name in self.job.capabilities.shardings
                if name != "none"
                for count in sorted(counts - {1})
            ]
        return tuple(found)

    def shardings(self) -> tuple[str, ...]:
        """Sharding values that the dialect can express."""
        return self._cut("sharding", self.job.capabilities.shardings)

    def order(self) -> tuple[str, ...]:
        """Rank orders the dialect has a switch for."""
        return self._cut("order", self.job.capabilities.orders)

    def vpp(self, pp: int) -> tuple[int, ...]:
        """1 without a pipeline, else up to one layer per chunk."""
        if pp == 1 or not self.job.capabilities.virtual_pipeline:
            return self._cut("vpp", (1,)) if pp > 1 else (1,)
        return self._cut("vpp", range(1, self.job.model.num_layers // pp + 1))

    def selective(self) -> tuple[Recompute, ...]:
        """Row-changing recompute choices: nothing, and the ladder of modules from cheap to large.

        Cheap modules free much for little work; a flash kernel never stores scores, so there recomputing the
        attention core costs time and frees nothing.
        """
        nothing = Recompute()
        if "recompute" in self.fixed:
            pinned: Recompute = self.fixed["recompute"]
            return (pinned,) if pinned.granularity == "selective" else (nothing,)
        choices = [nothing]
        choices += [Recompute(granularity="selective", modules=modules) for modules in self._modules()]
        asked = self.job.user_layout.recompute
        if asked.granularity == "selective" and asked not in choices:
            choices.append(asked)
        allowed = self.job.bounds.get("recompute")
        return tuple(c for c in choices if not allowed or c.granularity in (*allowed, "none"))

    def _modules(self) -> list[tuple[str, ...]]:
        """Return nested sets of modules that this model has and this dialect and version can recompute."""
        model = self.job.model
        able = set(self.job.capabilities.recompute_modules)
        able &= set(facts_for(self.job.megatron_core_version).recompute_modules)
        rungs: list[tuple[str, ...]] = []
        if self.job.kernels.attention not in FUSED_ATTENTION and "core_attn" in able:
            rungs.append(("core_attn",))
        cheap = []
        if model.moe is not None and model.moe.grouped_gemm:
            cheap.append("moe_act")
        if model.mla is not None:
            cheap.append("mla_up_proj")
        fitting = tuple(name for name in cheap if name in able)
        return rungs + ([(*(rungs[-1] if rungs else ()), *fitting)] if fitting else [])

    def variants(
        self, row: Recompute, pp: int, vpp: int
    ) -> Iterator[tuple[Recompute, bool, tuple[Split, ...]]]:
        """Yield (recompute, whether the split is free, the splits to choose from) of one row.

        A selective row is itself; else nothing, every layer, or ``BLOCK_AUTO`` is recomputed.  Uniform
        groups of more than one layer keep fewer inputs and hold more at once; they must divide every chunk,
        so they go with equal chunks.
        """
        free, listed = self.splits(pp, vpp)
        num_layers = self.job.model.num_layers
        each = num_layers // (pp * vpp) if num_layers % (pp * vpp) == 0 else 0
        for recompute in self._recomputations(row):
            if recompute.method == "uniform" and recompute.num_layers > 1 and "layers" not in self.fixed:
                yield recompute, False, written_splits(num_layers, pp, vpp, ends=self._string or self._ends)
            elif recompute is not BLOCK_AUTO or max(map(max, listed)) > 1:
                yield recompute, free, listed
        if self._recomputes_all(row) and "recompute" not in self.fixed and "layers" not in self.fixed:
            for group in divisors(each)[1:] if each else ():
                groups = Recompute(granularity="full", method="uniform", num_layers=group)
                yield groups, False, ((each,) * (pp * vpp),)

    def _recomputes_all(self, row: Recompute) -> bool:
        allowed = self.job.bounds.get("recompute")
        able = self.job.capabilities.full_recompute and (not allowed or "full" in allowed)
        return able and row.granularity == "none"

    def _recomputations(self, row: Recompute) -> tuple[Recompute, ...]:
        if "recompute" in self.fixed:
            return (self.fixed["recompute"],)
        if row.granularity == "selective":
            return (row,)
        allowed = self.job.bounds.get("recompute")
        nothing = (Recompute(),) if not allowed or "none" in allowed else ()
        every = Recompute(granularity="full", method="uniform", num_layers=1)
        return (*nothing, every, BLOCK_AUTO) if self._recomputes_all(row) else nothing

    def splits(self, pp: int, vpp: int) -> tuple[bool, tuple[Split, ...]]:
        """Return whether the stages may hold any numbers of layers, and the splits to choose from otherwise.

        A free split comes with one example.  With interleaving a layout string is searched over chunks that
        differ by one layer, with lighter ends.
        """
        if "layers" in self.fixed:
            return False, (self.fixed["layers"],)
        if (pp, vpp) not in self._splits:
            num_layers = self.job.model.num_layers
            if self._string and pp > 1:
                free = vpp == 1
                listed = (even_split(num_layers, pp),) if free else balanced_splits(num_layers, pp, vpp)
            else:
                free, listed = False, written_splits(num_layers, pp, vpp, ends=self._ends)
            self._splits[pp, vpp] = free, listed
        return self._splits[pp, vpp]

    def searches_split(self, split: Split, pp: int, vpp: int) -> bool:
        """Return whether a search looks at this split."""
        free, listed = self.splits(pp, vpp)
        return (free and min(split) >= self.least) or split in listed

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
