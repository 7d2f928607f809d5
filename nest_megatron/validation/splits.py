"""How a stack divides layers over pipeline chunks, for records that print no split."""

from __future__ import annotations

from collections.abc import Sequence

from nest_megatron.dialects.layout_string import parse
from nest_megatron.graph.templates import layer_graph
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import BlockChoice, Recompute


def even_split(num_layers: int, chunks: int) -> tuple[int, ...]:
    """Return layer counts per chunk; where they do not divide, the first chunks have one more."""
    base, rest = divmod(num_layers, chunks)
    return tuple(base + (chunk < rest) for chunk in range(chunks))


def filled_split(num_layers: int, chunks: int) -> tuple[int, ...]:
    """Return chunks filled up to the smallest possible maximum, the last with what is left.

    DeepSpeed's balanced partition by layer type (deepspeed/runtime/utils.py, ``partition_balanced``).
    """
    most = -(-num_layers // chunks)
    starts = range(0, most * chunks, most)
    return tuple(max(0, min(most, num_layers - start)) for start in starts)


def split_with_ends(num_layers: int, chunks: int) -> tuple[int, ...] | None:
    """Return the split that counts embedding and loss as one layer each, None where that does not divide."""
    if chunks <= 2 or num_layers % chunks == 0 or (num_layers + 2) % chunks:
        return None
    each = (num_layers + 2) // chunks
    return (each - 1, *[each] * (chunks - 2), each - 1)


def split_by_parameters(num_layers: int, chunks: int, end_layers: float) -> tuple[int, ...]:
    """Return the split with the least parameters on the fullest chunk.

    Args:
        end_layers: parameters of the embedding (and of the head) over those of a layer.
    """
    if chunks == 2:
        return num_layers // 2, num_layers - num_layers // 2
    splits = []
    for ends in range(1, num_layers // chunks + 2):
        middle = even_split(num_layers - 2 * ends, chunks - 2)
        if min(middle) > 0:
            splits.append((max(*middle, ends + end_layers), (ends, *middle, ends)))
    return min(splits)[1] if splits else even_split(num_layers, chunks)


def end_layers(job: TrainJob) -> float:
    """Return the parameters of the embedding over those of the model's first layer kind."""
    choice = BlockChoice(
        tp=1, sequence_parallel=False, cp=1, ep=1, etp=1, micro_batch=1, recompute=Recompute()
    )
    graph = layer_graph(job, choice)
    layer = graph.blocks[job.model.layer_kinds[0]]
    return graph.embedding.dense_parameters / (layer.dense_parameters + layer.expert_parameters)


def split_of_layout(text: str, num_layers: int, chunks: int) -> tuple[int, ...] | None:
    """Return the layers per chunk of a ``pipeline_model_parallel_layout``; None for another model's."""
    sizes = tuple(segment.num_layers for segment in parse(text))
    return sizes if len(sizes) == chunks and sum(sizes) == num_layers else None


def recipe_split(layouts: Sequence[str], num_layers: int, chunks: int) -> tuple[int, ...] | None:
    """Return the first of ``layouts`` that has so many layers and chunks."""
    found = (split_of_layout(text, num_layers, chunks) for text in layouts)
    return next((split for split in found if split is not None), None)
