"""Per-BlockChoice sizes and times: one row per distinct set of operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from cython_dp import NUM_KINDS
from nest_megatron.graph.layer_graph import Block, LayerGraph
from nest_megatron.specs.job import TrainJob

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Bytes and parameter counts of one rank under one BlockChoice; the linear memory model's inputs.

    Tuples have one entry per layer-kind slot (``ModelSpec.kinds``, padded to NUM_KINDS); the rest are per
    embedding (``_first``), head (``_last``) or rank.

    Attributes:
        saved_last_bytes, parameters_last_norm, expert_parameters_last: MTP depths included.
        shared_weights: elements of the weight shapes that every kind has; ``own_weights`` the others.
    """

    dense_parameters: tuple[int, ...]
    expert_parameters: tuple[int, ...]
    gemm_weights: tuple[int, ...]
    own_weights: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    transient_bytes: tuple[int, ...]
    shared_weights: int
    parameters_first: int
    parameters_last_norm: int
    parameters_output: int
    expert_parameters_last: int
    saved_first_bytes: int
    saved_last_bytes: int
    local_logits: int
    gathered_logits: int
    boundary_bytes: int
    tokens: int
    scores: int


def memory_row(job: TrainJob, graph: LayerGraph) -> MemoryRow:
    """Return the memory row of ``graph``; formulas are the templates' (research/memory_model.md 2.1-2.6)."""
    blocks = [graph.blocks[kind] for kind in job.model.kinds]
    head, embedding, choice = graph.head, graph.embedding, graph.choice
    tokens = choice.micro_batch * job.sequence_length // choice.cp
    decoder = job.model.decoder
    others = 0 if decoder is None else choice.micro_batch * decoder.sequence_length // choice.cp
    longest = max(tokens, others)
    sharded = longest // choice.tp if choice.sequence_parallel else longest
    output = next(op for op in head.operators if op.name == "output_layer")
    loss = next(op for op in head.operators if op.name == "loss")
    shapes = [{(op.n, op.k) for op in block.weights()} for block in blocks]
    shared = set.intersection(*shapes)
    hidden_bytes = job.recipe.activation_bytes * sharded * job.model.hidden_size
    # Each multi-token-prediction depth is one more last layer, a 2h x h projection and three norms.
    last, depths = graph.blocks[job.model.layer_kinds[-1]], job.model.mtp_num_layers
    norm = head.operators[0].parameters
    mtp = depths * (last.dense_parameters + 2 * job.model.hidden_size**2 // choice.tp + 3 * norm)
    return MemoryRow(
        dense_parameters=_slots(block.dense_parameters for block in blocks),
        expert_parameters=_slots(block.expert_parameters for block in blocks),
        gemm_weights=_slots(_gemm_elements(block) for block in blocks),
        own_weights=_slots(_elements(shape - shared) for shape in shapes),
        saved_bytes=_slots(block.saved_bytes for block in blocks),
        transient_bytes=_slots(block.transient_bytes for block in blocks),
        shared_weights=_elements(shared),
        parameters_first=embedding.dense_parameters,
        parameters_last_norm=head.dense_parameters - output.parameters + mtp,
        expert_parameters_last=depths * last.expert_parameters,
        parameters_output=output.parameters,
        saved_first_bytes=embedding.saved_bytes,
        saved_last_bytes=head.saved_bytes + depths * (last.saved_bytes + 2 * hidden_bytes),
        local_logits=loss.m * loss.n,
        gathered_logits=loss.m * loss.n * choice.tp,
        boundary_bytes=hidden_bytes,
        tokens=tokens + others,
        scores=max(_scores(block) for block in blocks),
    )


def _slots(values: Iterable[int]) -> tuple[int, ...]:
    """Return ``values`` padded with zeros to one entry per kind slot."""
    known = tuple(values)
    return known + (0,) * (NUM_KINDS - len(known))


def _gemm_elements(block: Block) -> int:
    return sum(op.parameters for op in block.weights())


def _elements(shapes: set[tuple[int, int]]) -> int:
    """Return the elements of one copy of every weight shape; experts count one matrix each."""
    return sum(n * k for n, k in shapes)


def _scores(block: Block) -> int:
    """Return the attention scores of one micro-batch, of the largest attention where there are two."""
    return max((op.batch * op.m * op.n for op in block.operators if op.kind == "attention"), default=0)


def columns(rows: Sequence[MemoryRow]) -> dict[str, Int64]:
    """Return one int64 array per field: (R,), or (R, NUM_KINDS) for what each layer kind has its own of."""
    found = {}
    for field in fields(MemoryRow):
        shape = (len(rows), NUM_KINDS) if str(field.type).startswith("tuple") else (len(rows),)
        found[field.name] = np.array([getattr(row, field.name) for row in rows], dtype=np.int64).reshape(
            shape
        )
    return found
