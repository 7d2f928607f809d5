"""Peak memory: the worked examples of the specification, exact identities, and monotone behaviour."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cython_dp import bounds
from nest_megatron.cluster.load import load_cluster
from nest_megatron.cost.memory import band, device_bytes, feasible, memory_limits
from nest_megatron.planner.evaluate import Evaluator, problem_of
from nest_megatron.specs.job import Kernels, TrainJob
from nest_megatron.specs.layout import Layout, Recompute
from nest_megatron.specs.plan import Prediction
from nest_megatron.units import GIB, gib
from tests import builders

H100 = load_cluster("dgx-h100", num_gpus=64)


def predict(job: TrainJob, **layout: object) -> Prediction:
    """Return the prediction of one layout of ``job`` on H100."""
    cluster = load_cluster("dgx-h100", num_gpus=job.num_gpus)
    return Evaluator(job, cluster).predict([builders.make_layout(job, **layout)])[0]


def gpt() -> TrainJob:
    """GPT-3 175B as in memory_model.md section 5."""
    model = builders.gpt175b(hidden_dropout=0.0, attention_dropout=0.0)
    return builders.make_job(model=model, sequence_length=2048, num_gpus=512, global_batch=2048)


def llama() -> TrainJob:
    """Llama3-70B as in memory_model.md section 5."""
    return builders.make_job(model=builders.llama70b(), sequence_length=8192, num_gpus=64, global_batch=1024)


def mixtral(num_gpus: int = 64) -> TrainJob:
    """Mixtral 8x7B as in memory_model.md section 5."""
    return builders.make_job(
        model=builders.mixtral(), sequence_length=4096, num_gpus=num_gpus, global_batch=1024
    )


FULL = Recompute(granularity="full", method="uniform", num_layers=1)


@pytest.mark.parametrize(
    ("job", "layout", "stage", "expected_gib"),
    [
        (gpt(), {"tp": 8, "pp": 8}, 0, 29.4),
        (gpt(), {"tp": 8, "pp": 8}, -1, 21.4),
        (gpt(), {"tp": 8, "pp": 8, "vpp": 6}, 0, 30.7),
        (gpt(), {"tp": 8, "pp": 8, "recompute": FULL}, 0, 21.1),
        (llama(), {"tp": 4, "pp": 4, "cp": 2}, 0, 59.9),
        (llama(), {"tp": 4, "pp": 4, "cp": 2}, -1, 45.1),
        (llama(), {"tp": 4, "pp": 4, "cp": 2, "vpp": 5}, 0, 63.0),
        (mixtral(), {"tp": 2, "ep": 8, "etp": 1}, 0, 60.2),
        (mixtral(), {"tp": 1, "pp": 4, "vpp": 8, "ep": 8, "etp": 1}, 0, 52.8),
        (mixtral(), {"tp": 1, "pp": 4, "vpp": 8, "ep": 8, "etp": 1}, -1, 47.5),
    ],
)
def test_worked_examples(job: TrainJob, layout: dict[str, object], stage: int, expected_gib: float) -> None:
    """Every worked example of memory_model.md section 5 is met within 1 %."""
    tp = layout["tp"]
    prediction = predict(job, sharding="optim", sequence_parallel=tp != 1, **layout)
    assert gib(prediction.stages[stage].allocated_bytes) == pytest.approx(expected_gib, rel=0.01)


def test_one_gpu_without_sharding_holds_parameters_times_bytes() -> None:
    """At tp = pp = dp = 1 weights, gradients and optimizer are parameters x (2 + 4 + 12) bytes exactly."""
    job = builders.make_job(num_gpus=1, global_batch=8)
    terms = predict(job, tp=1).stages[0].terms_bytes
    states = terms["weights"] + terms["gradients"] + terms["optimizer"]
    assert states == 8_030_261_248 * 18


def test_terms_of_every_stage_sum_to_its_peak() -> None:
    """The term table of each stage adds up to the allocated peak that is reported."""
    for stage in predict(mixtral(), tp=2, pp=4, vpp=2, ep=4, etp=1, sequence_parallel=True).stages:
        assert sum(stage.terms_bytes.values()) == stage.allocated_bytes


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_planner_and_report_give_the_same_bytes(data: st.DataObject) -> None:
    """The solver's peak equals the largest stage of the report, to the byte, for random layouts."""
    moe = data.draw(st.booleans())
    job = mixtral() if moe else llama()
    tp = data.draw(st.sampled_from([1, 2, 4, 8]))
    pp = data.draw(st.sampled_from([1, 2, 4]))
    vpp = data.draw(st.sampled_from([1, 2, 4])) if pp > 1 else 1
    recompute = data.draw(
        st.sampled_from([Recompute(), FULL, Recompute(granularity="full", method="block", num_layers=2)])
    )
    layout = builders.make_layout(
        job,
        tp=tp,
        pp=pp,
        vpp=vpp,
        ep=data.draw(st.sampled_from([1, 2, 4])) if moe else 1,
        etp=1 if moe else tp,
        sequence_parallel=tp > 1,
        sharding="optim",
        recompute=recompute,
    )
    evaluator = Evaluator(job, H100)
    peak = bounds(problem_of(job, evaluator.cost.tables([layout]), [layout]))[2][0]
    stages = evaluator.predict([layout])[0].stages
    assert peak == max(stage.allocated_bytes for stage in stages)


@settings(max_examples=30, deadline=None)
@given(tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4, 8]))
def test_more_shards_never_hold_more_state(tp: int, pp: int) -> None:
    """At fixed tp and pp, more data-parallel ranks never grow the sharded optimizer state."""
    held = []
    for num_gpus in (64, 128, 256, 512):
        job = dataclasses.replace(llama(), num_gpus=num_gpus)
        stage = predict(job, tp=tp, pp=pp, sharding="optim").stages[0]
        held.append(stage.terms_bytes["optimizer"])
    assert held == sorted(held, reverse=True)


def test_optimizer_shards_over_data_and_context_parallel_ranks() -> None:
    """The distributed optimizer shards over dp * cp (memory_model.md 2.2), not over dp alone."""
    plain = predict(llama(), tp=4, pp=4, sharding="optim").stages[0].terms_bytes
    split = predict(llama(), tp=4, pp=4, cp=2, sharding="optim").stages[0].terms_bytes
    assert split["optimizer"] == plain["optimizer"]


def test_limits_are_the_inverse_of_feasible() -> None:
    """The largest peak that runs is feasible and one byte more is not; the same for the safe band."""
    job = llama()
    visible = H100.accelerator.visible_bytes
    fits, runs = memory_limits(job, visible)
    assert list(feasible(np.array([runs, runs + 1]), job, visible)) == [True, False]
    assert [band(peak, True, visible) for peak in (fits, fits + 1)] == ["FITS", "TIGHT"]


def test_device_memory_is_the_profile_rule() -> None:
    """Device memory is 1.08 x allocated + 6 GiB unless a profile says otherwise (memory_model.md 3)."""
    job = llama()
    assert int(device_bytes(np.array([50 * GIB]), job)[0]) == pytest.approx(60 * GIB, rel=1e-9)


def test_reserved_memory_counts_against_feasibility() -> None:
    """What other processes hold makes a layout infeasible that would fit alone."""
    layout = {"tp": 4, "pp": 4, "cp": 2, "sharding": "optim", "sequence_parallel": True}
    assert predict(llama(), **layout).feasible
    assert not predict(dataclasses.replace(llama(), reserved_bytes=12 * GIB), **layout).feasible


def test_unfused_attention_stores_scores() -> None:
    """Without a fused core the scores dominate at 8k tokens (cases.md row 12)."""
    job = dataclasses.replace(llama(), kernels=Kernels(attention="unfused"))
    fused = predict(llama(), tp=8, pp=8, sequence_parallel=True).peak_allocated_bytes
    assert predict(job, tp=8, pp=8, sequence_parallel=True).peak_allocated_bytes > 2 * fused


def test_layout_is_not_needed_to_be_even() -> None:
    """Uneven stages are evaluated one by one: the stage with more layers holds more."""
    job = llama()
    layout = dataclasses.replace(builders.make_layout(job, tp=8, pp=4), num_layers_per_chunk=(18, 22, 22, 18))
    assert isinstance(layout, Layout)
    stages = Evaluator(job, H100).predict([layout])[0].stages
    assert [stage.num_layers for stage in stages] == [18, 22, 22, 18]
    assert stages[1].terms_bytes["weights"] > stages[3].terms_bytes["weights"] * 1.0
