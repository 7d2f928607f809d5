"""Closed formulas of the operator graph against published totals and traced figures."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.graph.templates import layer_graph
from nest_megatron.specs.job import Kernels, TrainJob
from nest_megatron.specs.layout import BlockChoice, Recompute
from tests import builders

NOTHING = BlockChoice(tp=1, sequence_parallel=False, cp=1, ep=1, etp=1, micro_batch=1, recompute=Recompute())


def choice(**changes: object) -> BlockChoice:
    """Return a BlockChoice that differs from the trivial one by ``changes``."""
    return dataclasses.replace(NOTHING, **changes)  # type: ignore[arg-type]


def total_parameters(job: TrainJob) -> int:
    """Return the parameters of the whole model on one rank."""
    graph = layer_graph(job, NOTHING)
    layers = sum(
        graph.blocks[kind].dense_parameters + graph.blocks[kind].expert_parameters
        for kind in job.model.layer_kinds
    )
    head = graph.head.dense_parameters
    if job.model.tied_embeddings:
        head -= next(op.parameters for op in graph.head.operators if op.name == "output_layer")
    return layers + graph.embedding.dense_parameters + head


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (builders.llama8b(), 8_030_261_248),
        (builders.llama70b(), 70_553_706_496),
        (builders.mixtral(), 46_702_792_704),
    ],
    ids=["llama3-8b", "llama3-70b", "mixtral-8x7b"],
)
def test_parameters_equal_the_published_checkpoints(model, published: int) -> None:
    """The parameter count of each family equals that of the public checkpoint exactly."""
    job = builders.make_job(model=model)
    assert total_parameters(job) == published


def test_gpt175b_layer_flops_equal_the_traced_layer() -> None:
    """GEMM FLOP of a GPT-175B layer equal the trace, 7.628 TFLOP with both causal halves (mcore_cpu.md 4)."""
    job = builders.make_job(model=builders.gpt175b(), sequence_length=2048)
    block = layer_graph(job, NOTHING).blocks["dense"]
    core = next(op for op in block.operators if op.kind == "attention")
    assert block.forward_flops + core.forward_flops == pytest.approx(7.628e12, rel=2e-4)


@pytest.mark.parametrize(("tp", "dropout", "expected"), [(8, 0.0, 4.004), (8, 0.1, 4.25)])
def test_saved_bytes_match_the_traced_layer(tp: int, dropout: float, expected: float) -> None:
    """TP8 + SP with a fused core saves 4.0 (34/8 with dropout) x sbh bytes per layer (mcore_cpu.md 4)."""
    model = builders.gpt175b(hidden_dropout=dropout, attention_dropout=dropout)
    job = builders.make_job(model=model, sequence_length=2048)
    block = layer_graph(job, choice(tp=tp, sequence_parallel=True)).blocks["dense"]
    sbh = 2048 * 12288
    assert block.saved_bytes / sbh == pytest.approx(expected, rel=0.01)


def test_selective_recompute_drops_the_unfused_scores() -> None:
    """Recomputing core attention removes exactly the stored scores: 34 x sbh remain (arXiv 2205.05198)."""
    job = builders.make_job(
        model=builders.gpt175b(), sequence_length=2048, kernels=Kernels(attention="unfused")
    )
    selective = Recompute(granularity="selective", modules=("core_attn",))
    sbh = 2048 * 12288
    kept = layer_graph(job, NOTHING).blocks["dense"].saved_bytes / sbh
    dropped = layer_graph(job, choice(recompute=selective)).blocks["dense"].saved_bytes / sbh
    assert dropped == pytest.approx(34.0)
    assert kept - dropped == pytest.approx(5 * 96 * 2048 / 12288)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_sequence_parallelism_divides_everything_by_tp(tp: int) -> None:
    """With SP every saved byte of a layer is divided by tp; without, norms and residuals are not."""
    job = builders.make_job(model=builders.gpt175b(hidden_dropout=0.0), sequence_length=2048)
    whole = layer_graph(job, NOTHING).blocks["dense"].saved_bytes
    split = layer_graph(job, choice(tp=tp, sequence_parallel=tp > 1)).blocks["dense"].saved_bytes
    assert split * tp == whole


def test_tp_collectives_have_the_traced_counts() -> None:
    """TP + SP: 2 gathers and 2 scatters forward, 4 and 2 backward; TP alone: 2 and 2 all-reduces."""
    job = builders.make_job(model=builders.gpt175b(), sequence_length=2048)
    sharded = layer_graph(job, choice(tp=8, sequence_parallel=True)).blocks["dense"].collectives
    counts = {c.op: (c.forward, c.backward) for c in sharded}
    assert counts == {"all_gather": (2, 4), "reduce_scatter": (2, 2)}
    plain = layer_graph(job, choice(tp=8)).blocks["dense"].collectives
    assert {c.op: (c.forward, c.backward) for c in plain} == {"all_reduce": (2, 2)}
    assert plain[0].num_bytes == 2 * 2048 * 12288


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (8, 1), (4, 2), (1, 2)])
def test_experts_divide_over_ep_and_etp(ep: int, etp: int) -> None:
    """Expert parameters divide by ep * etp, everything else stays."""
    job = builders.make_job(model=builders.mixtral())
    whole = layer_graph(job, choice(tp=2, sequence_parallel=True)).blocks["moe"]
    split = layer_graph(job, choice(tp=2, sequence_parallel=True, ep=ep, etp=etp)).blocks["moe"]
    assert split.expert_parameters * ep * etp == whole.expert_parameters
    assert split.dense_parameters == whole.dense_parameters
