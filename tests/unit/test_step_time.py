"""Terms of the step-time model against hand counts, enumeration, and published steps."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from nest_megatron.cluster.groups import group_shape
from nest_megatron.cluster.load import load_cluster
from nest_megatron.cost.blocks import BlockPricer
from nest_megatron.cost.compute import ComputeModel
from nest_megatron.cost.dispatch import DispatchModel
from nest_megatron.cost.host import host_floor_s
from nest_megatron.cost.sync import SyncModel
from nest_megatron.cost.tables import CostModel
from nest_megatron.graph.templates import layer_graph
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import Kernels, TrainJob
from nest_megatron.specs.layout import BlockChoice, Layout, Overlap, Recompute
from nest_megatron.specs.model import MoESpec
from nest_megatron.validation.records import build
from tests import builders

PLAIN = BlockChoice(tp=1, sequence_parallel=False, cp=1, ep=1, etp=1, micro_batch=1, recompute=Recompute())


def step_s(job: TrainJob, cluster: Cluster, layout: Layout) -> float:
    """Return the simulated step time."""
    return Evaluator(job, cluster).step_times_s([layout])[0]


@pytest.mark.parametrize(("domains", "top_k"), [(2, 2), (4, 3), (4, 8)])
def test_copies_of_a_token_equal_the_mean_over_every_choice_of_experts(domains: int, top_k: int) -> None:
    """The network carries as many copies as distinct domains are hit, averaged over all assignments."""
    cluster = load_cluster("dgx-h100", num_gpus=8 * domains)
    pricer = BlockPricer(builders.make_job(model=builders.mixtral(), num_gpus=8 * domains), cluster)
    time = dataclasses.replace(
        pricer.time, dispatch_start_s=0.0, flex_domain_share=1e9, flex_network_share=1.0
    )
    model = DispatchModel(cluster, time)
    moe = MoESpec(num_experts=64, top_k=top_k, ffn_hidden_size=1, layer_pattern=(1,))
    group = group_shape(cluster, 8 * domains, 1)
    choices = list(itertools.product(range(domains), repeat=top_k))
    hit = sum(len(set(choice)) for choice in choices) / len(choices)
    leaving = hit * (domains - 1) / domains
    token_bytes = 1e9
    expected = token_bytes * leaving / cluster.levels[1].usable_bytes_per_s
    assert model.flex_s(token_bytes, moe, group) == pytest.approx(expected, rel=1e-9)


def test_group_limited_routing_caps_the_copies() -> None:
    """A router limited to one group sends one copy, whatever the top-k."""
    cluster = load_cluster("dgx-h100", num_gpus=64)
    pricer = BlockPricer(builders.make_job(model=builders.mixtral()), cluster)
    group = group_shape(cluster, 64, 1)
    free = MoESpec(num_experts=64, top_k=8, ffn_hidden_size=1, layer_pattern=(1,))
    limited = dataclasses.replace(free, group_topk=1)
    assert pricer.dispatch.flex_s(1e9, limited, group) < 0.3 * pricer.dispatch.flex_s(1e9, free, group)


def test_host_floor_multiplies_what_the_host_launches() -> None:
    """Latent attention, experts, fp8 and overlap each cost host time; graphs take it away."""
    job = builders.make_job(model=builders.deepseek_v2())
    time, floor = job.profile.time, job.profile.host_floor_s
    assert host_floor_s(job, "dense", expert_overlap=False) == pytest.approx(floor * time.mla_host_factor)
    moe = floor * time.mla_host_factor * job.profile.moe_host_factor
    assert host_floor_s(job, "moe", expert_overlap=False) == pytest.approx(moe)
    overlapped = host_floor_s(job, "moe", expert_overlap=True)
    assert overlapped == pytest.approx(moe * time.ep_overlap_host_factor)
    partial = dataclasses.replace(job, kernels=Kernels(cuda_graph_modules=("attn", "moe_router")))
    assert host_floor_s(partial, "moe", expert_overlap=False) < moe
    whole = dataclasses.replace(job, kernels=Kernels(cuda_graphs=True))
    assert host_floor_s(whole, "moe", expert_overlap=True) == 0.0


def test_a_layer_never_runs_faster_than_its_host() -> None:
    """With a tiny layer the block takes the host's time, forward and 1.2 times that backward."""
    job = builders.make_job(
        model=builders.llama8b(hidden_size=256, num_attention_heads=2, ffn_hidden_size=512)
    )
    cluster = load_cluster("dgx-h100", num_gpus=64)
    choice = dataclasses.replace(PLAIN, tp=1)
    pricer = BlockPricer(job, cluster)
    times = CostModel(job, cluster).graph_time(builders.make_layout(job))
    floor = job.profile.host_floor_s
    assert pricer.compute.block(layer_graph(job, choice).blocks["dense"]).forward_s < floor
    assert times.layers["dense"].forward_s == pytest.approx(floor)
    assert times.layers["dense"].backward_s == pytest.approx(1.2 * floor)


def test_shard_groups_replace_one_wide_reduction_by_two_levels() -> None:
    """Sync of sub-groups = reduce-scatter and gather inside, all-reduce of the shard across."""
    job = builders.make_job()
    cluster = load_cluster("dgx-h100", num_gpus=64)
    pricer = BlockPricer(job, cluster)
    layout = builders.make_layout(job, sharding="optim", num_optimizer_instances=8)
    _, beta = SyncModel(pricer).dense(layout)
    inside, across = pricer.group(8, 1), pricer.group(8, 8)
    recipe, model = job.recipe, pricer.collectives
    bucket = SyncModel(pricer).bucket(layout)
    grads, weights = recipe.grad_reduce_bytes, recipe.param_gather_bytes
    expected = model.terms("reduce_scatter", inside, bucket * grads).beta_s_per_byte * grads
    expected += model.terms("all_gather", inside, bucket * weights).beta_s_per_byte * weights
    expected += model.terms("all_reduce", across, bucket / 8 * grads).beta_s_per_byte * grads / 8
    assert beta == pytest.approx(expected)


def test_fully_sharded_weights_are_gathered_every_micro_batch() -> None:
    """More micro-batches cost more gathers; the once-per-step synchronisation is gone."""
    job = builders.make_job(global_batch=512)
    cluster = load_cluster("dgx-a100-80", num_gpus=64)
    sharded = builders.make_layout(job, sharding="optim_grads_params")
    zero1 = builders.make_layout(job, sharding="optim")
    model = CostModel(job, cluster)
    assert model.sync.dense(sharded) == (0.0, 0.0)
    assert model.sync.dense(zero1)[1] > 0
    assert step_s(job, cluster, sharded) > step_s(job, cluster, zero1)


def test_multi_token_prediction_is_work_of_the_last_stage() -> None:
    """One depth adds a layer, a projection and a second output layer to the head, nothing elsewhere."""
    job = builders.make_job(model=builders.deepseek_v2(), num_gpus=64)
    deeper = dataclasses.replace(job, model=dataclasses.replace(job.model, mtp_num_layers=1))
    cluster = load_cluster("dgx-h100", num_gpus=64)
    layout = builders.make_layout(job, ep=8, etp=1)
    plain, mtp = CostModel(job, cluster).graph_time(layout), CostModel(deeper, cluster).graph_time(layout)
    added = mtp.head.forward_s - plain.head.forward_s
    assert mtp.layers == plain.layers and mtp.embedding == plain.embedding
    assert added > plain.head.forward_s + plain.layers["moe"].forward_s
    assert sum(mtp.head.parts_s.values()) == pytest.approx(mtp.head.forward_s + mtp.head.backward_s)


def test_window_layers_cut_the_attention_work() -> None:
    """Half of the layers see 2 * 128 + 128 keys instead of half the sequence."""
    model = builders.llama8b()
    windowed = dataclasses.replace(model, attention_window=128, windowed_share=0.5)
    flops = []
    for one in (model, windowed):
        block = layer_graph(builders.make_job(model=one, sequence_length=4096), PLAIN).blocks["dense"]
        flops.append(next(op for op in block.operators if op.kind == "attention").forward_flops)
    assert flops[1] / flops[0] == pytest.approx((0.5 * 2048 + 0.5 * 384) / 2048)


def test_grouped_gemm_loses_more_with_fewer_tokens_per_expert() -> None:
    """Seconds per FLOP of the experts fall as more tokens reach each of them."""
    cluster = load_cluster("dgx-h100", num_gpus=64)
    job = builders.make_job(model=builders.deepseek_v2())
    compute = ComputeModel(cluster.accelerator, job)
    rates = []
    for micro_batch in (1, 4):
        graph = layer_graph(job, dataclasses.replace(PLAIN, ep=8, micro_batch=micro_batch))
        up = next(op for op in graph.blocks["moe"].operators if op.name == "expert_up")
        rates.append(compute.operator(up).forward_s / up.forward_flops)
    assert rates[1] < rates[0]


def test_sequential_experts_cost_one_gemm_each() -> None:
    """Without grouped GEMM the experts of a rank run one after the other, without the grouped factor."""
    model = builders.mixtral()
    assert model.moe is not None
    sequential = dataclasses.replace(model, moe=dataclasses.replace(model.moe, grouped_gemm=False))
    cluster = load_cluster("dgx-h100", num_gpus=64)
    choice = dataclasses.replace(PLAIN, ep=2)
    job = builders.make_job(model=sequential)
    up = next(op for op in layer_graph(job, choice).blocks["moe"].operators if op.name == "expert_up")
    compute = ComputeModel(cluster.accelerator, job)
    one = compute.operator(dataclasses.replace(up, batch=1))
    assert compute.operator(up).forward_s == pytest.approx(up.batch * one.forward_s)


def test_output_layer_stays_in_16_bit_under_fp8() -> None:
    """The head's GEMM runs at the bf16 rate unless the recipe says otherwise."""
    fp8 = dataclasses.replace(builders.BF16_ADAM, compute_dtype="fp8")
    cluster = load_cluster("dgx-h100", num_gpus=64)
    times = []
    for recipe, kernels in (
        (builders.BF16_ADAM, Kernels()),
        (fp8, Kernels()),
        (fp8, Kernels(fp8_output_layer=True)),
    ):
        job = builders.make_job(recipe=recipe, kernels=kernels)
        head = next(op for op in layer_graph(job, PLAIN).head.operators if op.name == "output_layer")
        times.append(ComputeModel(cluster.accelerator, job).operator(head).forward_s)
    assert times[1] == pytest.approx(times[0])
    assert times[2] < times[1]


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
    factor=st.floats(1.01, 4.0),
    what=st.sampled_from(["peak", "hbm", "link0", "link1", "link2"]),
    degrees=st.sampled_from(
        [{"tp": 4}, {"tp": 2, "pp": 4}, {"pp": 2, "vpp": 2}, {"cp": 2}, {"sharding": "optim_grads_params"}]
    ),
)
def test_better_hardware_never_predicts_a_slower_step(factor: float, what: str, degrees: dict) -> None:
    """More FLOP/s, HBM or link bandwidth never makes the predicted step longer."""
    job = builders.make_job()
    cluster = load_cluster("dgx-h100", num_gpus=64)
    layout = builders.make_layout(job, overlap=Overlap(grad_reduce=True), **degrees)
    accelerator = cluster.accelerator
    if what == "peak":
        peaks = {name: factor * value for name, value in accelerator.peak_flops_per_s.items()}
        accelerator = dataclasses.replace(accelerator, peak_flops_per_s=peaks)
    elif what == "hbm":
        accelerator = dataclasses.replace(accelerator, hbm_bytes_per_s=factor * accelerator.hbm_bytes_per_s)
    levels = tuple(
        dataclasses.replace(level, bandwidth_bytes_per_s=factor * level.bandwidth_bytes_per_s)
        if what == f"link{i}"
        else level
        for i, level in enumerate(cluster.levels)
    )
    better = dataclasses.replace(cluster, accelerator=accelerator, levels=levels)
    assert step_s(job, better, layout) <= step_s(job, cluster, layout) * (1 + 1e-12)


@pytest.mark.parametrize(("record", "measured_s"), [("actrecomp-0002", 1.10), ("actrecomp-0005", 49.05)])
def test_published_selene_steps_are_met_within_five_percent(
    shared: Path, record: str, measured_s: float
) -> None:
    """22B with selective, 530B with full recomputation (arXiv 2205.05198, table 5; docs/cost-model.md)."""
    records = json.loads((shared / "data/measured/perf.json").read_text())
    built = build(next(one for one in records if one["id"] == record))
    assert step_s(built.job, built.cluster, built.layout) == pytest.approx(measured_s, rel=0.05)
