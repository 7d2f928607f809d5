"""Allocated peak of every pipeline stage, term by term, linear in what the stage holds and keeps in flight.

The planner multiplies the summed coefficients, the report the same coefficients term by term; so both give
the same bytes.  Formulas: research/memory_model.md section 2; index letters as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cython_dp import NUM_FEATURES, NUM_KINDS, Feature
from nest_megatron.graph.attention_template import FUSED_ATTENTION
from nest_megatron.specs.cluster import Accelerator
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.plan import Band
from nest_megatron.units import KIB, MIB

Int64 = npt.NDArray[np.int64]

#: Phases whose sums are compared (memory_model.md 2.7); ``layer`` once per layer kind.
LOSS, STEP, LAYER = "forward-backward, loss", "optimizer step", "forward-backward, layer"
_ALL, _RUNNING, _LOSS, _LAYER, _STEP = (LOSS, STEP, LAYER), (LOSS, LAYER), (LOSS,), (LAYER,), (STEP,)
#: Term -> the phases it is alive in.
TERMS: dict[str, tuple[str, ...]] = {
    "weights": _ALL,
    "gradients": _ALL,
    "optimizer": _ALL,
    "low-precision weight copies": _ALL,
    "dummy weight gradients": _ALL,
    "workspaces": _ALL,
    "unsharded units": _ALL,
    "activations": _RUNNING,
    "pipeline buffers": _RUNNING,
    "loss and logits": _LOSS,
    "recomputed unit": _LAYER,
    "layer backward": _LAYER,
    "step temporaries": _STEP,
}
# memory_model.md 2.2: cuBLAS keeps two workspaces, TE one per GEMM kind; both grew with Hopper.
_CUBLAS_BYTES = {True: 2 * 32 * MIB, False: 2 * 8 * MIB + 2 * 128 * KIB}
_TE_BYTES = {True: 32 * MIB, False: 4 * MIB}
_GROUPED_GEMM_WORKSPACES, _TP_OVERLAP_WORKSPACES = 4, 2
# Persistent buffer of the local (not Transformer Engine) attention, bytes per score.
_LOCAL_SCORE_BYTES = 2
_IDS_BYTES_PER_TOKEN = 32
#: Allocated / visible above which a layout is called TIGHT, and the most TIGHT may reach (DESIGN section 6).
TIGHT_ABOVE, OOM_ABOVE = 0.75, 0.96
SHARDING_CODES = {"none": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeColumns:
    """The layout axes the memory terms read, one array entry per node.

    Attributes:
        row: index into the memory rows; ``shard`` = dp * cp, ``expert_shard`` = edp, per instance.
        sharding: code of ``SHARDING_CODES``; ``tp_overlap``, ``expert_overlap``: 1 when that overlaps.
        selective: 1 with selective recomputation.
    """

    row: Int64
    pp: Int64
    shard: Int64
    expert_shard: Int64
    sharding: Int64
    tp_overlap: Int64
    expert_overlap: Int64
    selective: Int64
    num_micro_batches: Int64


def memory_terms(
    rows: Mapping[str, Int64], nodes: NodeColumns, job: TrainJob, accelerator: Accelerator
) -> dict[str, Int64]:
    """Return (N, NUM_FEATURES) int64 bytes per feature for every term of ``TERMS``.

    Args:
        rows: field of ``MemoryRow`` -> one value per row.
    """
    at = {name: values[nodes.row] for name, values in rows.items()}
    terms = {name: np.zeros((len(nodes.row), NUM_FEATURES), dtype=np.int64) for name in TERMS}
    _state_terms(terms, at, nodes, job)
    _workspace_terms(terms, at, nodes, job, accelerator)
    _activation_terms(terms, at, nodes, job)
    _loss_terms(terms, at, nodes, job, accelerator)
    _unsharded_terms(terms, at, nodes, job)
    return terms


def _ceil_div(a: Int64, b: Int64) -> Int64:
    return -(-a // b)


def _state_terms(terms: dict[str, Int64], at: Mapping[str, Int64], nodes: NodeColumns, job: TrainJob) -> None:
    """Weights, gradients, optimizer (memory_model.md 2.2): shards span dp * cp, experts' edp."""
    recipe, one = job.recipe, np.ones_like(nodes.shard)
    held: list[tuple[int, Int64, Int64]] = [
        (Feature.FIRST, at["parameters_first"], nodes.shard),
        (Feature.LAST, at["parameters_last_norm"] + output_parameters(at, nodes, job), nodes.shard),
        (Feature.LAST, at["expert_parameters_last"], nodes.expert_shard),
    ]
    for k in range(NUM_KINDS):
        held.append((Feature.HELD + k, at["dense_parameters"][:, k], nodes.shard))
        held.append((Feature.HELD + k, at["expert_parameters"][:, k], nodes.expert_shard))
    for feature, parameters, shard in held:
        weights_shard = np.where(nodes.sharding >= 3, shard, one)
        grads_shard = np.where(nodes.sharding >= 2, shard, one)
        state_shard = np.where(nodes.sharding >= 1, shard, one)
        terms["weights"][:, feature] += _ceil_div(recipe.weight_bytes * parameters, weights_shard)
        terms["gradients"][:, feature] += _ceil_div(recipe.grad_bytes * parameters, grads_shard)
        if recipe.end_optimizer_bytes is not None and feature in (Feature.FIRST, Feature.LAST):
            terms["optimizer"][:, feature] += recipe.end_optimizer_bytes * parameters
        else:
            terms["optimizer"][:, feature] += _ceil_div(recipe.optimizer_bytes * parameters, state_shard)
        terms["step temporaries"][:, feature] += _ceil_div(recipe.step_extra_bytes * parameters, state_shard)
    copies = terms["low-precision weight copies"]
    copies[:, _slots(Feature.HELD)] = recipe.cached_weight_bytes * at["gemm_weights"]


def _slots(feature: Feature) -> slice:
    return slice(feature, feature + NUM_KINDS)


def output_parameters(at: Mapping[str, Int64], nodes: NodeColumns, job: TrainJob) -> Int64:
    """Return the output layer's own parameters: none when it shares the embedding on the same rank.

    With multi-token prediction the last rank also holds a copy of the embedding.
    """
    copies = np.where(nodes.pp > 1, 1 if job.model.tied_embeddings else 0, 0)
    if job.model.mtp_num_layers:
        copies = np.where(nodes.pp > 1, copies + 1, copies)
    own = 0 if job.model.tied_embeddings else 1
    return (copies + own) * at["parameters_output"]


def _workspace_terms(
    terms: dict[str, Int64],
    at: Mapping[str, Int64],
    nodes: NodeColumns,
    job: TrainJob,
    accelerator: Accelerator,
) -> None:
    large = accelerator.generation in ("hopper", "blackwell")
    model, recipe, kernels = job.model, job.recipe, job.kernels
    workspaces = terms["workspaces"][:, Feature.ONE]
    if job.profile.fixed_workspace_bytes:
        workspaces += job.profile.fixed_workspace_bytes
    else:
        kinds = _GROUPED_GEMM_WORKSPACES if model.moe is not None and model.moe.grouped_gemm else 1
        workspaces += _CUBLAS_BYTES[large or kernels.large_cublas_workspace]
        if kernels.transformer_engine:
            workspaces += _TE_BYTES[large] * (kinds + _TP_OVERLAP_WORKSPACES * nodes.tp_overlap)
        elif kernels.attention not in FUSED_ATTENTION and not model.pooler_head:
            workspaces += _LOCAL_SCORE_BYTES * at["scores"]
    if recipe.wgrad_fusion and kernels.transformer_engine and job.profile.caches_dummy_wgrads:
        # TE caches one dummy gradient per distinct weight shape (memory_model.md section 0, term 1).
        dummy = terms["dummy weight gradients"]
        dummy[:, Feature.ANY] = recipe.weight_bytes * at["shared_weights"]
        dummy[:, _slots(Feature.HAS)] = recipe.weight_bytes * at["own_weights"]
        if not model.tied_embeddings:
            dummy[:, Feature.LAST] = recipe.weight_bytes * at["parameters_output"]


def _activation_terms(
    terms: dict[str, Int64], at: Mapping[str, Int64], nodes: NodeColumns, job: TrainJob
) -> None:
    """In-flight activations, boundary buffers, loss, recomputed unit and layer backward (2.3-2.7)."""
    facts, kernels = job.profile, job.kernels
    kept = np.where(nodes.selective, facts.selective_kept_share, 1.0)[:, None]
    saved = np.round(kept * at["saved_bytes"]).astype(np.int64)
    activations = terms["activations"]
    activations[:, _slots(Feature.LIVE)] = saved
    activations[:, Feature.LIVE_UNITS] = at["boundary_bytes"]
    activations[:, Feature.LIVE_FIRST] = at["saved_first_bytes"]
    activations[:, Feature.LAST] = at["saved_last_bytes"]
    activations[:, Feature.ONE] = _IDS_BYTES_PER_TOKEN * at["tokens"]
    # Overlapping the expert all-to-all keeps one more layer alive.
    activations[:, Feature.ANY] = nodes.expert_overlap * saved.max(axis=1)
    if facts.keeps_stage_outputs:
        activations[:, Feature.LIVE_EDGES] = np.where(nodes.pp > 1, at["boundary_bytes"], 0)
    if kernels.dataloader_mask:
        mask = at["tokens"] * job.sequence_length
        activations[:, Feature.FIRST] = mask
        activations[:, Feature.LAST] += np.where(nodes.pp > 1, mask, 0)
    terms["pipeline buffers"][:, Feature.ONE] = np.where(
        nodes.pp > 1, facts.pipeline_buffers * at["boundary_bytes"], 0
    )
    terms["recomputed unit"][:, _slots(Feature.UNIT)] = saved
    transient = at["transient_bytes"] + facts.boundary_transients * at["boundary_bytes"][:, None]
    terms["layer backward"][:, _slots(Feature.HAS)] = transient


def _loss_terms(
    terms: dict[str, Int64],
    at: Mapping[str, Int64],
    nodes: NodeColumns,
    job: TrainJob,
    accelerator: Accelerator,
) -> None:
    """Return loss bytes by implementation (memory_model.md 2.5): on local logits, or on gathered ones."""
    facts, kernels = job.profile, job.kernels
    logits = at["gathered_logits"] if facts.gathers_logits else at["local_logits"]
    if facts.loss_bytes_per_logit and kernels.loss != "te_fused":
        per_logit = np.full_like(logits, round(facts.loss_bytes_per_logit))
    else:
        newer = accelerator.generation == "blackwell" or accelerator.generation == "hopper"
        base = {"te_fused": 4, "native_fused": 10 if newer else 14, "vocab_parallel": 6}[kernels.loss]
        per_logit = np.full_like(logits, base + (2 if job.recipe.activation_bytes == 4 else 0))
    if kernels.deferred_embedding_wgrad:
        per_logit = per_logit + 2 * np.minimum(2, nodes.num_micro_batches - 1)
    terms["loss and logits"][:, Feature.LAST] = per_logit * logits
    # Each MTP depth retains its own logits (memory_model.md 2.5).
    terms["activations"][:, Feature.LAST] += 4 * job.model.mtp_num_layers * at["local_logits"]


def _unsharded_terms(
    terms: dict[str, Int64], at: Mapping[str, Int64], nodes: NodeColumns, job: TrainJob
) -> None:
    """Whole layers that fully sharded data parallelism gathers (memory_model.md 2.2, FSDP rows)."""
    recipe, facts = job.recipe, job.profile
    layer = (at["dense_parameters"] + at["expert_parameters"]).max(axis=1)
    per_layer = facts.unsharded_weight_units * recipe.param_gather_bytes * layer
    per_layer += facts.unsharded_grad_units * recipe.grad_reduce_bytes * layer
    gathers = nodes.sharding >= 3
    unsharded = terms["unsharded units"]
    unsharded[:, Feature.ANY] = np.where(gathers, per_layer, 0)
    ends = 2 * recipe.param_gather_bytes * at["parameters_output"]
    unsharded[:, Feature.ONE] = np.where(gathers, ends, 0)
    if facts.unsharded_with_pipeline:
        held = (at["dense_parameters"] + at["expert_parameters"]) * (
            recipe.param_gather_bytes + recipe.grad_reduce_bytes
        )
        unsharded[:, _slots(Feature.HELD)] = np.where((gathers & (nodes.pp > 1))[:, None], held, 0)


def phases(num_kinds: int) -> tuple[str, ...]:
    """Return the phases of a model with ``num_kinds`` layer kinds, in the order of ``phase_coefficients``."""
    return (LOSS, STEP, *(LAYER for _ in range(num_kinds)))


def phase_coefficients(terms: Mapping[str, Int64], num_kinds: int) -> Int64:
    """Return (N, phases, NUM_FEATURES): the terms summed over those alive in each phase.

    A layer phase sees one kind's recomputed unit and backward only: the peak is the largest over kinds.
    """
    some = next(iter(terms.values()))
    names = phases(num_kinds)
    total = np.zeros((some.shape[0], len(names), NUM_FEATURES), dtype=np.int64)
    for name, values in terms.items():
        for phase, phase_name in enumerate(names):
            if phase_name in TERMS[name]:
                total[:, phase, :] += values * term_mask(name, phase)
    return total


def term_mask(term: str, phase: int) -> Int64:
    """Return (NUM_FEATURES,) 0/1: the features of ``term`` that count in phase number ``phase``."""
    mask = np.ones(NUM_FEATURES, dtype=np.int64)
    if TERMS[term] == _LAYER:
        kind = phase - len((LOSS, STEP))
        for feature in (Feature.HAS, Feature.UNIT):
            mask[_slots(feature)] = np.arange(NUM_KINDS) == kind
    return mask


def device_bytes(allocated_bytes: Int64, job: TrainJob) -> Int64:
    """Return what the device reports for an allocated peak (memory_model.md section 3)."""
    scaled: Int64 = np.ceil(job.profile.device_factor * allocated_bytes).astype(np.int64)
    return scaled + fixed_device_bytes(job)


def fixed_device_bytes(job: TrainJob) -> int:
    """Return what lies outside the allocator: context, communicators, libraries."""
    profile = job.profile
    small = job.num_gpus <= profile.small_world_gpus
    return profile.device_fixed_small_bytes if small else profile.device_fixed_bytes


def feasible(allocated_bytes: Int64, job: TrainJob, visible_bytes: int) -> npt.NDArray[np.bool_]:
    """Return whether device memory plus what others hold fits (DESIGN section 6)."""
    return device_bytes(allocated_bytes, job) + job.reserved_bytes <= visible_bytes


def memory_limits(job: TrainJob, visible_bytes: int) -> tuple[int, int]:
    """Return the largest allocated peaks that FIT and that run (``feasible`` and ``band`` inverted)."""
    free = visible_bytes - job.reserved_bytes - fixed_device_bytes(job)
    runs = min(math.floor(free / job.profile.device_factor), math.floor(OOM_ABOVE * visible_bytes))
    return min(runs, math.ceil(TIGHT_ABOVE * visible_bytes) - 1), runs


def band(allocated_bytes: int, is_feasible: bool, visible_bytes: int) -> Band:
    """Return the risk label of one layout (DESIGN section 6, frequencies in memory_model.md section 0)."""
    share = allocated_bytes / visible_bytes
    if not is_feasible or share > OOM_ABOVE:
        return "OOM"
    return "FITS" if share < TIGHT_ABOVE else "TIGHT"
