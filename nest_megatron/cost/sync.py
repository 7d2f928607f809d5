"""Data-parallel synchronisation: once per step by buckets, or every micro-batch when parameters are sharded.

Source of every formula: research/time_model.md section 2, "DP sync per rank" and "FSDP".
"""

from __future__ import annotations

from nest_megatron.cost.blocks import BlockPricer
from nest_megatron.cost.compute import PassTime
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout

#: Share of a rank-by-rank broadcast that is left when its group stays inside one NVLink domain.
BROADCAST_INSIDE_DOMAIN = 0.2


def shard_size(layout: Layout) -> int:
    """Return the ranks that share one copy of the dense optimizer state."""
    if layout.sharding == "none":
        return 1
    return max(1, layout.dp * layout.cp // layout.num_optimizer_instances)


def expert_shard_size(layout: Layout) -> int:
    """Return the ranks that share one copy of the experts' optimizer state."""
    return 1 if layout.sharding == "none" else max(1, layout.edp // layout.num_optimizer_instances)


def shards_parameters(job: TrainJob, layout: Layout) -> bool:
    """Return whether weights are gathered every micro-batch: fully sharded, and freed after use."""
    keeps = job.profile.unsharded_with_pipeline and layout.pp > 1
    return layout.sharding == "optim_grads_params" and not keeps


def pp_stride(layout: Layout) -> int:
    """Return the distance in ranks of neighbouring pipeline stages."""
    inner = layout.tp * layout.cp
    return inner if layout.order == "tp-cp-ep-pp-dp" else inner * layout.dp


class SyncModel:
    """Prices the synchronisation of one job; terms are cached by group and bucket."""

    def __init__(self, pricer: BlockPricer) -> None:
        self._pricer = pricer
        self._job = pricer.job
        self._terms: dict[tuple[str, int, int, float, int], tuple[float, float]] = {}

    def bucket(self, layout: Layout) -> float:
        """Return the parameters of one gradient bucket."""
        time = self._job.profile.time
        return max(time.bucket_parameters, time.bucket_parameters_per_rank * layout.dp * layout.cp)

    def dense(self, layout: Layout) -> tuple[float, float]:
        """Return latency per bucket and seconds per parameter of the dense parameters, once per step."""
        ranks, stride = layout.dp * layout.cp, layout.tp * _outer(layout)
        return self._step(layout, ranks, stride, shard_size(layout))

    def expert(self, layout: Layout) -> tuple[float, float]:
        """Return the same of the experts; zeros for a dense model."""
        if self._job.model.moe is None:
            return 0.0, 0.0
        stride = layout.etp * layout.ep * _outer(layout)
        return self._step(layout, layout.edp, stride, expert_shard_size(layout))

    def broadcast_s(self, layout: Layout) -> float:
        """Return the seconds that a rank-by-rank broadcast of updated parameters adds to a step."""
        each, ranks = self._job.profile.shard_broadcast_s, shard_size(layout)
        if not each or ranks == 1:
            return 0.0
        inside = self._pricer.group(ranks, layout.tp * _outer(layout)).num_domains == 1
        return each * ranks * (BROADCAST_INSIDE_DOMAIN if inside else 1.0)

    def gathers(
        self, layout: Layout, dense: int, expert: int, *, forward_s: float, backward_s: float
    ) -> PassTime:
        """Return what gathers and reductions of one block add to its passes: exposed time and contention.

        Args:
            dense, expert: parameters of the block on one rank before sharding.
            forward_s, backward_s: time of the passes that may hide them.
        """
        outer = _outer(layout)
        gather = reduce = 0.0
        for parameters, ranks, stride in (
            (dense, shard_size(layout), layout.tp * outer),
            (expert, expert_shard_size(layout), layout.etp * layout.ep * outer),
        ):
            if parameters:
                gather += self._collective_s("all_gather", parameters, ranks, stride)
                reduce += self._collective_s("reduce_scatter", parameters, ranks, stride)
        time = self._job.profile.time
        return PassTime(
            _exposed_s(gather, forward_s, time.fsdp_overlap_share, time.fsdp_contention),
            _exposed_s(gather + reduce, backward_s, time.fsdp_overlap_share, time.fsdp_contention),
        )

    def _collective_s(self, op: str, parameters: int, ranks: int, stride: int) -> float:
        recipe = self._job.recipe
        width = recipe.param_gather_bytes if op == "all_gather" else recipe.grad_reduce_bytes
        group = self._pricer.group(ranks, stride)
        return self._pricer.collectives.time_s(op, width * parameters, group)  # type: ignore[arg-type]

    def _step(self, layout: Layout, ranks: int, stride: int, shard: int) -> tuple[float, float]:
        """Return latency per bucket and seconds per parameter of one step's synchronisation.

        Sharded: reduce-scatter and all-gather inside the shard group, and an all-reduce of the shard across
        groups; else one all-reduce.  Fully sharded parameters leave the all-reduce across groups only.
        """
        bucket, recipe = self.bucket(layout), self._job.recipe
        if layout.sharding == "none":
            return self._bucketed("all_reduce", ranks, stride, bucket, recipe.grad_reduce_bytes)
        parts = []
        if not shards_parameters(self._job, layout):
            parts += [
                self._bucketed("reduce_scatter", shard, stride, bucket, recipe.grad_reduce_bytes),
                self._bucketed("all_gather", shard, stride, bucket, recipe.param_gather_bytes),
            ]
        if ranks > shard:
            alpha, beta = self._bucketed(
                "all_reduce", ranks // shard, stride * shard, bucket / shard, recipe.grad_reduce_bytes
            )
            parts.append((alpha, beta / shard))
        return sum(alpha for alpha, _ in parts), sum(beta for _, beta in parts)

    def _bucketed(self, op: str, ranks: int, stride: int, bucket: float, width: int) -> tuple[float, float]:
        key = (op, ranks, stride, bucket, width)
        if key not in self._terms:
            group = self._pricer.group(ranks, stride)
            terms = self._pricer.collectives.terms(op, group, bucket * width)  # type: ignore[arg-type]
            self._terms[key] = terms.alpha_s, terms.beta_s_per_byte * width
        return self._terms[key]


def _outer(layout: Layout) -> int:
    """Return the factor by which pipeline stages between data-parallel ranks stretch their groups."""
    return layout.pp if layout.order == "tp-cp-ep-pp-dp" else 1


def _exposed_s(communication_s: float, compute_s: float, share: float, contention: float) -> float:
    """Return seconds that communication beside ``compute_s`` adds: what stays exposed, and what it slows."""
    return max(0.0, communication_s - share * compute_s) + contention * min(communication_s, compute_s)
