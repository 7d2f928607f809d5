"""Repair advice: it is legal, it fits, it is complete for single changes, and it says what cannot help."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest

from nest_megatron.cluster.load import load_cluster
from nest_megatron.errors import NoPlanError
from nest_megatron.planner.advise import BEARABLE, GPUS, Repair, advise
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.planner.search import search
from nest_megatron.planner.space import enumerate_space
from nest_megatron.rules import check
from nest_megatron.rules.nearest import alternatives
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import Capabilities, TrainJob
from nest_megatron.specs.layout import Recompute
from tests import builders

#: Too large: 70B in four tensor ranks only; a 236B mixture of experts in 512; a long sequence.
DENSE = builders.make_job(
    {"tp": 4, "sharding": "optim"}, model=builders.llama70b(), num_gpus=64, sequence_length=8192
)
EXPERTS = builders.make_job(
    {"tp": 1, "pp": 4, "ep": 8, "etp": 1, "sharding": "optim"},
    model=builders.deepseek_v2(),
    num_gpus=512,
    global_batch=1024,
)
LONG = builders.make_job(
    {"tp": 8, "sequence_parallel": True, "sharding": "optim"}, global_batch=64, sequence_length=262144
)


def cluster_of(job: TrainJob) -> Cluster:
    """Return an H100 cluster of the job's size."""
    return load_cluster("dgx-h100", num_gpus=job.num_gpus)


def advice_on(job: TrainJob) -> Repair:
    """Return the advice on the job's own layout."""
    return advise(job, cluster_of(job), job.user_layout)


@pytest.mark.parametrize("job", [DENSE, EXPERTS, LONG], ids=["dense", "experts", "long"])
def test_every_advice_is_legal_fits_and_is_priced_as_the_report_prices(job: TrainJob) -> None:
    """Legality, memory and time of each advice are what rules and evaluator say about its layout."""
    repair = advice_on(job)
    before = Evaluator(job, cluster_of(job)).predict([job.user_layout])[0]
    assert not before.feasible
    assert repair.advice
    assert repair.peak_device_bytes == before.peak_device_bytes
    for advice in repair.advice:
        changed = dataclasses.replace(job, num_gpus=advice.num_gpus)
        assert check(changed, advice.layout) == ()
        after = Evaluator(changed, cluster_of(changed)).predict([advice.layout])[0]
        assert after.feasible
        assert after.band == advice.fits
        assert before.peak_allocated_bytes - after.peak_allocated_bytes == advice.saved_bytes
        assert after.step_time_s / before.step_time_s == pytest.approx(advice.time_ratio, rel=1e-9)
    order = [(len(a.changes), a.num_gpus > job.num_gpus, a.time_ratio) for a in repair.advice]
    assert order == sorted(order)


@pytest.mark.parametrize("job", [DENSE, LONG], ids=["dense", "long"])
def test_no_single_change_is_missed(job: TrainJob) -> None:
    """Where a change of one axis fits at a bearable price, advice on that axis is given, and no worse."""
    layout, evaluator = job.user_layout, Evaluator(job, cluster_of(job))
    before_s = evaluator.step_times_s([layout])[0]
    advised = {a.changes[0].partition("=")[0]: a for a in advice_on(job).advice if len(a.changes) == 1}
    for axis in ("tp", "cp", "pp", "recompute"):
        legal = [x for _, _, x in alternatives(job, layout, axis) if check(job, x) == ()]
        fitting = [p for p in evaluator.predict(legal) if p.band == "FITS"]
        best = min((p.step_time_s / before_s for p in fitting), default=BEARABLE * 2)
        if best <= BEARABLE:
            assert advised[axis].time_ratio <= best * (1 + 1e-9)


@pytest.mark.parametrize("job", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_pairs_are_named_only_where_neither_change_helps_alone(job: TrainJob) -> None:
    """The advice is minimal: no pair contains an axis that is advised alone."""
    advice = advice_on(job).advice
    axes = [{change.partition("=")[0] for change in a.changes} for a in advice]
    alone = set().union(*(a for a in axes if len(a) == 1))
    assert any(len(a) == 2 for a in axes)
    assert all(not a & alone for a in axes if len(a) == 2)


def test_more_nodes_do_not_help_a_long_sequence_but_context_parallelism_does() -> None:
    """At 262,144 tokens eight times the GPUs leave the activations of a GPU as they are; CP4 fits."""
    repair = advice_on(LONG)
    assert repair.advice[0].changes == ("cp=4",)
    more = repair.no_help[0]
    assert more.change.startswith(GPUS)
    assert next(iter(more.stays_bytes)) == "activations"
    assert more.peak_device_bytes > repair.limit_bytes


def test_sharding_over_one_rank_saves_nothing() -> None:
    """A distributed optimizer at dp * cp = 1 is named as no help, with exactly zero saved."""
    job = builders.make_job({"tp": 4, "pp": 2}, model=builders.llama70b(), num_gpus=8, global_batch=64)
    found = {item.change: item.saved_bytes for item in advice_on(job).no_help}
    assert found["sharding=optim"] == 0


def test_larger_worlds_are_looked_at_where_nothing_else_can_change() -> None:
    """One GPU and every layer recomputed: blocks of layers are all that is left, and none fits."""
    few = Capabilities(expert_parallel=False, shardings=("none",), recompute_modules=())
    every_layer = Recompute(granularity="full", method="uniform", num_layers=1)
    job = builders.make_job({"recompute": every_layer}, num_gpus=1, global_batch=8, capabilities=few)
    advice = advice_on(job).advice
    assert advice
    assert all(one.num_gpus > 1 for one in advice)


def test_pins_are_named_when_advice_releases_them() -> None:
    """Where pins leave nothing that fits, the error names changes of pinned axes as releases."""
    job = dataclasses.replace(LONG, pins={"cp": 1, "tp": 8, "recompute": "none"})
    advice = advise(job, cluster_of(job), job.user_layout).advice
    assert {a.changes: a.releases for a in advice}[("cp=4",)] == ("cp",)
    with pytest.raises(NoPlanError) as caught:
        search(job, cluster_of(job))
    assert caught.value.code == "NEST-P02"
    assert any("releases the pin of" in text for text in caught.value.nearest)


@pytest.mark.parametrize("job", [DENSE, EXPERTS, LONG], ids=["dense", "experts", "long"])
def test_advice_takes_about_a_second(job: TrainJob) -> None:
    """All variations of one layout are judged in a few batches of the solver."""
    started = time.process_time()
    advice_on(job)
    assert time.process_time() - started < 3.0


def unfit_job(seed: int) -> TrainJob:
    """Return a seeded job of a public model whose own legal layout does not fit its cluster."""
    rng = random.Random(seed)
    while True:
        job = builders.make_job(
            model=rng.choice((builders.llama70b, builders.gpt175b, builders.mixtral, builders.deepseek_v2))(),
            num_gpus=8 * rng.choice((1, 2, 3, 4, 8, 16)),
            global_batch=rng.choice((64, 96, 256)),
            sequence_length=2048,
            megatron_core_version=rng.choice(("0.5.0", "0.9.0", "0.16.1")),
        )
        space = enumerate_space(job)
        for i in rng.sample(range(len(space)), min(20, len(space))):
            layout = space.layout(i)
            if not Evaluator(job, cluster_of(job)).predict([layout])[0].feasible:
                return dataclasses.replace(job, user_layout=layout)


@pytest.mark.parametrize("seed", range(4))
def test_advice_on_random_layouts_is_legal_and_fits(seed: int) -> None:
    """On any layout that does not fit, every advice is legal on its GPUs and runs; the rest says why not."""
    job = unfit_job(seed)
    repair = advice_on(job)
    assert repair.advice or repair.no_help
    for advice in repair.advice:
        changed = dataclasses.replace(job, num_gpus=advice.num_gpus)
        assert check(changed, advice.layout) == ()
        assert advice.peak_device_bytes <= repair.limit_bytes
        assert advice.fits in ("FITS", "TIGHT")
    for item in repair.no_help:
        assert item.peak_device_bytes > repair.limit_bytes
