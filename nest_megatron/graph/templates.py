"""Closed formulas for the operator graph of every block kind: the provider that needs no torch.

Sources: saved bytes research/memory_model.md 2.3, parameters 2.1; GEMM shapes, memory-bound bytes and
collectives research/time_model.md section 2 (collective counts traced in research/mcore_cpu.md section 4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nest_megatron.graph.attention_template import (
    attention_operators,
    cross_attention_operators,
    mla_operators,
)
from nest_megatron.graph.layer_graph import Block, Collective, LayerGraph, Operator, Part
from nest_megatron.graph.linear_template import gemm, mlp_operators
from nest_megatron.graph.mamba_template import mamba_operators
from nest_megatron.graph.moe_template import moe_operators
from nest_megatron.graph.sizes import Sizes
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import BlockChoice
from nest_megatron.specs.model import BlockKind

# Mixer -> its offload modules, and the share of saved bytes that stays (memory_model.md 2.3, inferred).
OFFLOAD_KEPT: dict[str, tuple[tuple[str, ...], float]] = {
    "attention": (("attn_norm", "qkv_linear", "core_attn", "attn_proj"), 0.12),
    "experts": (("expert_fc1", "moe_act"), 0.20),
}
# Loss kernels that write no probabilities.
FUSED_LOSS = ("te_fused", "native_fused")


def layer_graph(job: TrainJob, choice: BlockChoice) -> LayerGraph:
    """Return the graph of every block kind of ``job.model`` under ``choice``.

    Bytes and FLOP are per rank and per micro-batch.
    """
    return LayerGraphs(job).graph(choice)


@dataclass(frozen=True, slots=True)
class _Shared:
    """What choices have in common that differ in ep and etp only: every block without experts."""

    blocks: dict[BlockKind, Block]
    embedding: Block
    head: Block


class LayerGraphs:
    """Layer graphs of one job: choices share blocks without experts, and parts whose sizes are the same."""

    def __init__(self, job: TrainJob) -> None:
        self._job = job
        self._kinds = sorted(job.model.kinds)
        self._shared: dict[BlockChoice, _Shared] = {}
        self._parts: dict[tuple[Any, ...], Part] = {}

    def graph(self, choice: BlockChoice) -> LayerGraph:
        """Return the graph of every block kind of the job's model under ``choice``."""
        dense = replace(choice, ep=1, etp=1)
        shared = self._without_experts(dense)
        sizes = Sizes.of(self._job, choice)
        blocks = {kind: shared.blocks.get(kind) or self._block(sizes, kind, dense) for kind in self._kinds}
        return LayerGraph(choice=choice, blocks=blocks, embedding=shared.embedding, head=shared.head)

    def _without_experts(self, choice: BlockChoice) -> _Shared:
        if choice not in self._shared:
            sizes = Sizes.of(self._job, choice)
            blocks = {
                kind: self._block(sizes.on_decoder() if kind == "decoder" else sizes, kind, choice)
                for kind in self._kinds
                if "experts" not in _MIXERS[kind]
            }
            self._shared[choice] = _Shared(blocks, _embedding(sizes), _head(sizes))
        return self._shared[choice]

    def _block(self, z: Sizes, kind: BlockKind, dense: BlockChoice) -> Block:
        parts = tuple(self._part(z, kind, mixer, dense) for mixer in _MIXERS[kind])
        return Block(kind=kind, parts=parts, collectives=tuple(_collectives(z, _MIXERS[kind])))

    def _part(self, z: Sizes, kind: BlockKind, mixer: str, dense: BlockChoice) -> Part:
        """Return a mixer behind its norm and residual, kept by everything that its operators read.

        Args:
            dense: the choice without expert parallelism, which only the experts read.
        """
        choice = z.choice
        if mixer == "experts":
            sizes = choice.tp, z.tokens, z.tokens_sp, choice.ep, choice.etp, choice.recompute
            key: tuple[Any, ...] = (mixer, sizes)
        else:
            key = (mixer, kind in ("encoder", "decoder") and kind, dense)
        if key not in self._parts:
            inside = _mixer_operators(z, mixer, causal=kind != "encoder")
            norm = _norm(z, _NORMS.get(mixer, "input_norm"))
            operators = _offloaded(z, mixer, [norm, *inside, _residual(z, f"residual_{mixer}")])
            self._parts[key] = Part(tuple(operators))
        return self._parts[key]


#: Block kind -> the mixers of one layer, each behind its own norm and residual.
_MIXERS: dict[BlockKind, tuple[str, ...]] = {
    "dense": ("attention", "mlp"),
    "moe": ("attention", "experts"),
    "encoder": ("attention", "mlp"),
    "decoder": ("attention", "cross_attention", "mlp"),
    "attention": ("attention",),
    "mlp": ("mlp",),
    "experts": ("experts",),
    "mamba": ("mamba",),
}
#: Mixer -> the name of the norm in front of it; the others' is ``input_norm``.
_NORMS = {"mlp": "pre_mlp_norm", "experts": "pre_mlp_norm", "cross_attention": "pre_cross_norm"}


def _offloaded(z: Sizes, mixer: str, operators: list[Operator]) -> list[Operator]:
    """Return ``operators`` with the share of their saved bytes that offloading leaves on the GPU."""
    modules, kept = OFFLOAD_KEPT.get(mixer, ((), 1.0))
    if not set(modules) & set(z.kernels.offloaded_modules):
        return operators
    return [replace(op, saved_bytes=round(kept * op.saved_bytes)) for op in operators]


def _mixer_operators(z: Sizes, mixer: str, *, causal: bool) -> list[Operator]:
    if mixer == "attention":
        return mla_operators(z) if z.model.mla is not None else attention_operators(z, causal=causal)
    if mixer == "cross_attention":
        return cross_attention_operators(z, Sizes.of(z.job, z.choice))
    if mixer == "experts":
        return moe_operators(z)
    return mamba_operators(z) if mixer == "mamba" else _mlp_operators(z)


def _norm(z: Sizes, name: str) -> Operator:
    elements = z.tokens_sp * z.h
    fused = z.kernels.fused_norm
    # Input (always) and output (dropped by `layernorm` recompute; one byte when the consumer reads fp8).
    output_bytes = z.low_bytes * elements
    unfused = 0 if fused else z.facts.unfused_norm_saved_bytes * elements
    return Operator(
        name=name,
        kind="memory",
        **z.passes(z.norm_bytes * elements, fused=fused),
        saved_bytes=z.act_bytes * elements + (0 if z.drops("layernorm") else output_bytes) + unfused,
        parameters=z.h if z.model.rms_norm else 2 * z.h,
    )


def _residual(z: Sizes, name: str) -> Operator:
    elements = z.tokens_sp * z.h
    fused = z.kernels.fused_residual
    per_element = z.time.residual_fused_bytes if fused else z.time.residual_unfused_bytes
    return Operator(
        name=name,
        kind="memory",
        **z.passes(per_element * elements, fused=fused),
        saved_bytes=elements if z.model.hidden_dropout > 0 else 0,
    )


def _mlp_operators(z: Sizes) -> list[Operator]:
    return mlp_operators(z, "mlp", z.model.ffn_hidden_size // z.choice.tp, module="mlp")


def _collectives(z: Sizes, mixers: tuple[str, ...]) -> list[Collective]:
    """Return the collectives of one block (time_model.md section 2; counts: mcore_cpu.md section 4)."""
    choice, found = z.choice, []
    full = z.act_bytes * z.tokens * z.h
    # An MoE layer keeps its tokens sequence-sharded: only attention (and a shared expert) gathers over tp.
    has_shared = z.model.moe is not None and z.model.moe.shared_ffn_hidden_size > 0
    pairs = sum(mixer != "experts" or has_shared or not choice.sequence_parallel for mixer in mixers)
    if choice.tp > 1 and pairs and choice.sequence_parallel:
        found.append(
            Collective(
                axis="tp",
                op="all_gather",
                num_bytes=full,
                forward=pairs,
                backward=2 * pairs,
                backward_hidden=pairs,
            )
        )
        found.append(
            Collective(axis="tp", op="reduce_scatter", num_bytes=full, forward=pairs, backward=pairs)
        )
    elif choice.tp > 1 and pairs:
        found.append(Collective(axis="tp", op="all_reduce", num_bytes=full, forward=pairs, backward=pairs))
    if choice.tp > 1 and "cross_attention" in mixers:
        found.extend(_encoder_output(Sizes.of(z.job, z.choice)))
    if choice.cp > 1 and "attention" in mixers:
        width = z.model.kv_channels * max(1, z.model.num_query_groups // choice.tp)
        step_bytes = 2 * z.act_bytes * z.tokens * width
        found.append(
            Collective(
                axis="cp", op="p2p", num_bytes=step_bytes, forward=choice.cp - 1, backward=2 * (choice.cp - 1)
            )
        )
    if "experts" in mixers:
        found.extend(_dispatch(z))
    return found


def _encoder_output(encoder: Sizes) -> list[Collective]:
    """Return what the keys and values of cross attention add: the column-parallel half of a pair."""
    full = encoder.act_bytes * encoder.tokens * encoder.h
    if not encoder.choice.sequence_parallel:
        return [Collective(axis="tp", op="all_reduce", num_bytes=full, forward=0, backward=1)]
    return [
        Collective(axis="tp", op="all_gather", num_bytes=full, forward=1, backward=1, backward_hidden=1),
        Collective(axis="tp", op="reduce_scatter", num_bytes=full, forward=0, backward=1),
    ]


def _dispatch(z: Sizes) -> list[Collective]:
    assert z.model.moe is not None
    routed = z.act_bytes * z.tokens_sp * z.model.moe.top_k * z.h
    found = []
    if z.choice.ep > 1:
        found.append(Collective(axis="ep", op="all_to_all", num_bytes=routed, forward=2, backward=2))
    if z.choice.etp > 1:
        gathered = routed * z.choice.etp
        found.append(Collective(axis="etp", op="all_gather", num_bytes=gathered, forward=1, backward=1))
        found.append(Collective(axis="etp", op="reduce_scatter", num_bytes=gathered, forward=1, backward=1))
    return found


def _embedding(z: Sizes) -> Block:
    """Return the embedding; an encoder-decoder looks both of its sequences up in the same tables."""
    model = z.model
    vocab = model.padded_vocab_size(z.choice.tp) // z.choice.tp
    positions = model.max_position_embeddings * z.h if model.learned_positions else 0
    parameters = vocab * z.h + positions + (2 * z.h if model.pooler_head else 0)
    operators: list[Operator] = []
    collectives: list[Collective] = []
    for name, part in _stacks(z, "embedding"):
        traffic = 4 * part.tokens * z.h
        operators.append(
            Operator(
                name=name,
                kind="memory",
                forward_bytes=traffic,
                backward_bytes=2 * traffic,
                parameters=0 if operators else parameters,
                saved_bytes=part.tokens_sp * z.h if model.hidden_dropout > 0 else 0,
            )
        )
        collectives += _edge_collectives(part, forward=1, backward=0)
    return Block(kind="embedding", parts=(Part(tuple(operators)),), collectives=tuple(collectives))


def _stacks(z: Sizes, name: str) -> list[tuple[str, Sizes]]:
    """Return (name, sizes) of each stack of layers, that of the loss first."""
    decoder = z.on_decoder()
    return [(name, decoder)] if decoder is z else [(name, decoder), (f"encoder_{name}", z)]


def _head(z: Sizes) -> Block:
    """Return final norms, output layer and loss; of an encoder-decoder, on the decoder's tokens."""
    model, last = z.model, z.on_decoder()
    vocab = model.padded_vocab_size(z.choice.tp) // z.choice.tp
    local_logits = last.tokens * vocab
    pooler = 2 * z.h * z.h + 6 * z.h if model.pooler_head else 0
    # T5LMHead gives the logits a bias where the output layer shares the embedding (t5_model.py).
    bias = vocab if model.decoder is not None and model.tied_embeddings else 0
    fused = z.kernels.loss in FUSED_LOSS
    traffic = (z.time.loss_fused_bytes if fused else z.time.loss_bytes) * local_logits
    operators = (
        *(_norm(part, name) for name, part in _stacks(z, "final_norm")),
        Operator(name="pooler", kind="memory", parameters=pooler),
        gemm("output_layer", last, vocab, z.h),
        Operator(
            name="loss",
            kind="memory",
            forward_bytes=round(traffic / 2),
            backward_bytes=round(traffic / 2),
            m=last.tokens,
            n=vocab,
            parameters=bias,
        ),
    )
    collectives = _edge_collectives(last, forward=0, backward=1)
    return Block(kind="head", parts=(Part(operators),), collectives=collectives)


def _edge_collectives(z: Sizes, *, forward: int, backward: int) -> tuple[Collective, ...]:
    """Return the vocabulary-parallel collective of the embedding or of the head.

    The embedding reduces its output; the head copies its input and reduces that gradient.  Under sequence
    parallelism each is a reduce-scatter one way and an all-gather the other (megatron-core, layers.py).
    """
    if z.choice.tp == 1:
        return ()
    full = z.act_bytes * z.tokens * z.h
    if not z.choice.sequence_parallel:
        return (Collective(axis="tp", op="all_reduce", num_bytes=full, forward=forward, backward=backward),)
    return (
        Collective(axis="tp", op="reduce_scatter", num_bytes=full, forward=forward, backward=backward),
        Collective(axis="tp", op="all_gather", num_bytes=full, forward=backward, backward=forward),
    )
