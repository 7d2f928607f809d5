"""Per-BlockChoice sizes and times: one row per distinct set of operators."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from nest_megatron.graph.layer_graph import Block, LayerGraph
from nest_megatron.specs.job import TrainJob

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Bytes and parameter counts of one rank under one BlockChoice; the linear memory model's inputs.

    Suffixes name the block kind: ``_dense`` and ``_moe`` per layer, ``_first`` and ``_last`` per end.
    """

    dense_parameters_dense: int
    dense_parameters_moe: int
    expert_parameters_moe: int
    parameters_first: int
    parameters_last_norm: int
    parameters_output: int
    gemm_weights_dense: int
    gemm_weights_moe: int
    saved_dense_bytes: int
    saved_moe_bytes: int
    unit_input_bytes: int
    transient_dense_bytes: int
    transient_moe_bytes: int
    saved_first_bytes: int
    saved_last_bytes: int
    loss_bytes: int
    boundary_bytes: int
    distinct_weights_dense: int
    distinct_weights_moe: int
    distinct_weights_both: int
    score_buffer_bytes: int


def memory_row(job: TrainJob, graph: LayerGraph) -> MemoryRow:
    """Return the memory row of ``graph``; formulas are the templates' (research/memory_model.md 2.1-2.6)."""
    empty = Block(kind="none", operators=())
    dense, moe = graph.blocks.get("dense", empty), graph.blocks.get("moe", empty)
    head, embedding = graph.head, graph.embedding
    choice = graph.choice
    tokens = choice.micro_batch * job.sequence_length // choice.cp
    sharded = tokens // choice.tp if choice.sequence_parallel else tokens
    hidden_bytes = job.recipe.activation_bytes * sharded * job.model.hidden_size
    output = next(op for op in head.operators if op.name == "output_layer")
    loss = next(op for op in head.operators if op.name == "loss")
    return MemoryRow(
        dense_parameters_dense=dense.dense_parameters,
        dense_parameters_moe=moe.dense_parameters,
        expert_parameters_moe=moe.expert_parameters,
        parameters_first=embedding.dense_parameters,
        parameters_last_norm=head.dense_parameters - output.parameters,
        parameters_output=output.parameters,
        gemm_weights_dense=_gemm_elements(dense),
        gemm_weights_moe=_gemm_elements(moe),
        saved_dense_bytes=dense.saved_bytes,
        saved_moe_bytes=moe.saved_bytes,
        unit_input_bytes=hidden_bytes,
        transient_dense_bytes=dense.transient_bytes,
        transient_moe_bytes=moe.transient_bytes,
        saved_first_bytes=embedding.saved_bytes,
        saved_last_bytes=head.operators[0].saved_bytes,
        loss_bytes=loss.transient_bytes,
        boundary_bytes=hidden_bytes,
        distinct_weights_dense=_distinct_elements(dense),
        distinct_weights_moe=_distinct_elements(moe),
        distinct_weights_both=_distinct_elements(dense, moe),
        score_buffer_bytes=_score_buffer(dense if dense.operators else moe),
    )


def _gemm_elements(block: Block) -> int:
    return sum(op.parameters for op in block.weights())


def _distinct_elements(*blocks: Block) -> int:
    """Return the elements of one copy of every distinct weight shape; experts count one matrix each."""
    shapes = {(op.n, op.k) for block in blocks for op in block.weights()}
    return sum(n * k for n, k in shapes)


def _score_buffer(block: Block) -> int:
    """Return the local attention's persistent score buffer (memory_model.md 2.2); none with flash kernels."""
    core = next((op for op in block.operators if op.kind == "attention"), None)
    if core is None or core.transient_bytes == 0:
        return 0
    return 2 * core.batch * core.m * core.n


def columns(rows: list[Any]) -> dict[str, Int64]:
    """Return one int64 array per field of a list of equal dataclass rows."""
    names = [field.name for field in fields(rows[0])]
    return {name: np.array([getattr(row, name) for row in rows], dtype=np.int64) for name in names}
