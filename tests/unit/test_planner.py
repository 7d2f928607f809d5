"""The search: equal to trying everything, faithful to pins, harmless, and clear when there is no plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cython_dp import bounds
from nest_megatron import rules
from nest_megatron.cluster.load import load_cluster
from nest_megatron.cost.memory import feasible
from nest_megatron.errors import BadInputError, NoPlanError
from nest_megatron.planner.evaluate import Evaluator, paired_ratio, problem_of
from nest_megatron.planner.freedom import apply_settings
from nest_megatron.planner.search import TIE, changes, search
from nest_megatron.planner.space import Space, enumerate_space
from nest_megatron.specs.job import CheckpointState, TrainJob
from nest_megatron.specs.layout import Layout, Recompute
from nest_megatron.specs.settings import PlanSettings
from nest_megatron.units import GIB
from tests import builders
from tests.dp.instances import compositions

#: A dialect that writes the layers of the first and the last stage, and no layout string.
OWN_ENDS = dataclasses.replace(builders.EVERYTHING, layout_string=False)
DEFAULTS: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "sharding": "optim"}


def job_of(model=None, **overrides: Any) -> TrainJob:
    """Return a small job: 8 layers on 8 GPUs unless overridden."""
    fields: dict[str, Any] = {
        "model": model or builders.llama8b(num_layers=8),
        "num_gpus": 8,
        "global_batch": 32,
        "sequence_length": 2048,
    }
    return builders.make_job(DEFAULTS, **fields | overrides)


def cluster_of(job: TrainJob):
    """Return an H100 cluster of the job's size."""
    return load_cluster("dgx-h100", num_gpus=job.num_gpus)


def splits_of(space: Space, i: int, num_layers: int) -> list[tuple[int, ...]]:
    """Return every split that candidate ``i`` leaves open."""
    layout = space.layout(i)
    chunks = layout.pp * layout.vpp
    if space.free[i]:
        return list(compositions(num_layers, chunks, space.domains.least))
    first, count = int(space.choice_first[i]), int(space.choice_count[i])
    starts = space.choices[first : first + count]
    return [tuple(space.sizes[start : start + chunks].tolist()) for start in starts]


def everything(job: TrainJob) -> list[tuple[float, int, Layout]]:
    """Return (seconds, allocated bytes, layout) of every layout of the space: all splits, all block sizes."""
    space = enumerate_space(job)
    layouts: list[Layout] = []
    for i in range(len(space)):
        for sizes in splits_of(space, i, job.model.num_layers):
            layout = space.layout(i, sizes=sizes)
            open_count = layout.recompute.method == "block" and not space.num_recompute[i]
            for count in range(1, max(sizes)) if open_count else [layout.recompute.num_layers]:
                block = dataclasses.replace(layout.recompute, num_layers=count)
                layouts.append(dataclasses.replace(layout, recompute=block))
    evaluator = Evaluator(job, cluster_of(job))
    peaks = bounds(problem_of(job, evaluator.cost.tables(layouts), layouts))[2]
    runs = feasible(peaks, job, cluster_of(job).accelerator.visible_bytes)
    seconds = evaluator.step_times_s(layouts)
    return [
        found
        for found, ok in zip(zip(seconds, peaks.tolist(), layouts, strict=True), runs, strict=True)
        if ok
    ]


@pytest.mark.parametrize(
    "job",
    [
        job_of(builders.llama8b(num_layers=4)),
        job_of(builders.llama8b(num_layers=5), num_gpus=4),
        job_of(
            builders.mixtral(
                num_layers=4, moe=dataclasses.replace(builders.mixtral().moe, layer_pattern=(0, 1) * 2)
            ),
            num_gpus=4,
        ),
        job_of(builders.llama8b(num_layers=4), reserved_bytes=50 * GIB),
        job_of(builders.llama8b(num_layers=6), num_gpus=4, capabilities=OWN_ENDS),
    ],
    ids=["dense-8", "dense-4", "mixed-moe-4", "little-memory", "own-ends"],
)
def test_search_equals_trying_everything(job: TrainJob) -> None:
    """The certified objective is the least time over every layout that runs, all splits and block sizes."""
    result = search(job, cluster_of(job))
    certificate = result.certificate
    evaluator = Evaluator(job, cluster_of(job))
    certified_s = float(evaluator.cost.step_time_s(certificate.objective_s))
    visible = cluster_of(job).accelerator.visible_bytes
    runs = everything(job)
    inside = [found for found in runs if (found[1] < 0.75 * visible) is not result.tight]
    assert certified_s == pytest.approx(min(s for s, _, _ in inside), rel=1e-12)
    assert certificate.gap == 0.0
    assert certificate.lower_bound_s <= certificate.objective_s


def test_the_chosen_layout_is_within_the_tie_of_the_best() -> None:
    """The final selection may trade at most the tie width for head-room and fewer changes."""
    job = job_of()
    result = search(job, cluster_of(job))
    evaluator = Evaluator(job, cluster_of(job))
    best_s = float(evaluator.cost.step_time_s(result.certificate.objective_s))
    assert evaluator.step_times_s([result.best])[0] <= best_s * (1 + TIE)


@pytest.mark.parametrize("reserved_gib", [0, 50])
def test_a_budget_answers_early_with_a_bound_that_holds(reserved_gib: int) -> None:
    """The best so far is no faster than the best, the bound no slower; a small budget is not sure."""
    job = job_of(builders.llama8b(num_layers=13), num_gpus=16, reserved_bytes=reserved_gib * GIB)
    exact = search(job, cluster_of(job)).certificate
    gaps = []
    for budget in (1, 2, 5, 20, 10**6):
        found = search(job, cluster_of(job), budget=budget)
        assert found.certificate.lower_bound_s <= exact.objective_s <= found.certificate.objective_s
        gaps.append(found.certificate.gap)
        if found.certificate.gap == 0:
            assert found.certificate.objective_s == exact.objective_s
    assert gaps[0] > 0
    assert gaps[-1] == 0


def test_search_is_deterministic() -> None:
    """Two searches of the same job give the same plan and runner-ups."""
    job = job_of(
        builders.mixtral(
            num_layers=4, moe=dataclasses.replace(builders.mixtral().moe, layer_pattern=(1,) * 4)
        )
    )
    first, second = (search(job, cluster_of(job)) for _ in range(2))
    assert (first.best, first.runner_ups, first.rejections) == (
        second.best,
        second.runner_ups,
        second.rejections,
    )


def test_every_layout_of_the_space_is_legal() -> None:
    """No layout that the enumeration yields breaks any rule."""
    job = job_of(
        builders.mixtral(
            num_layers=4, moe=dataclasses.replace(builders.mixtral().moe, layer_pattern=(1,) * 4)
        )
    )
    space = enumerate_space(job)
    assert len(space) > 500
    broken = [space.layout(i) for i in range(len(space)) if rules.first_code(job, space.layout(i))]
    assert broken == []


@settings(max_examples=15, deadline=None)
@given(
    tp=st.sampled_from([None, 1, 2, 4]),
    pp=st.sampled_from([None, 1, 2, 4]),
    micro_batch=st.sampled_from([None, 1, 2]),
)
def test_pins_are_kept(tp: int | None, pp: int | None, micro_batch: int | None) -> None:
    """Whatever is pinned comes back as pinned, or there is a clear refusal."""
    pins = {k: v for k, v in {"tp": tp, "pp": pp, "micro_batch": micro_batch}.items() if v is not None}
    job = dataclasses.replace(job_of(), pins=pins)
    try:
        best = search(job, cluster_of(job)).best
    except NoPlanError as refusal:
        assert refusal.code == "NEST-P01" and tp == pp == 4
        return
    assert {axis: getattr(best, axis) for axis in pins} == pins


def test_pinning_the_optimum_returns_it() -> None:
    """The degrees of the best layout, pinned, give the same objective."""
    job = job_of()
    free = search(job, cluster_of(job))
    pins = {
        axis: getattr(free.best, axis)
        for axis in ("tp", "cp", "pp", "vpp", "micro_batch", "sequence_parallel")
    }
    pinned = search(dataclasses.replace(job, pins=pins), cluster_of(job))
    assert pinned.best == free.best


def test_more_memory_never_makes_the_optimum_slower() -> None:
    """Freeing reserved memory can only improve the certified objective of what runs."""
    objective = []
    for reserved in (60, 40, 20, 0):
        job = job_of(builders.llama8b(num_layers=6), num_gpus=4, reserved_bytes=reserved * GIB)
        objective.append(min(s for s, _, _ in everything(job)))
    assert objective == sorted(objective, reverse=True)


def test_nothing_legal_names_the_reason() -> None:
    """A pin that no layout can satisfy gives NEST-P01 with the rule's own words and the pin's origin."""
    job = dataclasses.replace(job_of(), pins={"tp": 3}, origins={"tp": "command line"})
    with pytest.raises(NoPlanError) as caught:
        search(job, cluster_of(job))
    assert caught.value.code == "NEST-P01"
    assert "tp=3 (command line)" in str(caught.value)
    assert any(factor.name == "rejected" for factor in caught.value.factors)


def test_nothing_fits_names_the_smallest_need() -> None:
    """A model that is too large gives NEST-P02 with the smallest layout and its need; force runs it."""
    job = job_of(builders.llama70b(), sequence_length=8192)
    with pytest.raises(NoPlanError) as caught:
        search(job, cluster_of(job))
    assert caught.value.code == "NEST-P02"
    assert "79.1 GiB" in str(caught.value)
    assert search(job, cluster_of(job), force=True).forced


def test_paired_ratio_of_a_layout_with_itself_is_one() -> None:
    """Paired comparison cancels every common assumption."""
    job = job_of()
    assert paired_ratio(job, cluster_of(job), job.user_layout, job.user_layout) == (1.0, 1.0)


def test_a_slower_link_never_makes_a_layout_faster() -> None:
    """2:1 leaves never predict a faster step than 1:1 leaves, for the layouts of a search."""
    job = job_of(builders.llama8b(), num_gpus=512, global_batch=512)
    layouts = [
        builders.make_layout(job, tp=tp, pp=pp, sharding="optim") for tp in (1, 2, 8) for pp in (1, 2, 8)
    ]
    fast = Evaluator(job, load_cluster("dgx-h100", num_gpus=512)).step_times_s(layouts)
    slow = Evaluator(job, load_cluster("dgx-h100-2to1", num_gpus=512)).step_times_s(layouts)
    assert all(a <= b for a, b in zip(fast, slow, strict=True))


def test_time_split_adds_up() -> None:
    """The terms of the time split sum to the step time."""
    job = job_of(builders.llama8b(), num_gpus=64, global_batch=256)
    layout = builders.make_layout(job, tp=2, pp=4, vpp=2, cp=2, sequence_parallel=True, sharding="optim")
    layout = dataclasses.replace(
        layout, recompute=Recompute(granularity="full", method="block", num_layers=2)
    )
    prediction = Evaluator(job, cluster_of(job)).predict([layout])[0]
    assert sum(prediction.time_split.values()) == pytest.approx(prediction.step_time_s, rel=1e-9)
    assert prediction.time_split["recompute"] > 0


def test_settings_pin_bound_and_release() -> None:
    """Pin fixes or bounds an axis, free releases a command-line pin or freezes the user's value."""
    job = dataclasses.replace(job_of(), pins={"tp": 2}, origins={"tp": "command line"})
    changed = apply_settings(
        job,
        PlanSettings(pin={"pp": 2, "micro_batch": [1, 2]}, free={"tp": True, "cp": False}, reserved_gib=1.5),
    )
    assert changed.pins == {"pp": 2, "cp": 1}
    assert changed.bounds == {"micro_batch": (1, 2)}
    assert changed.origin("pp") == "setting pin"
    assert changed.reserved_bytes == 3 * GIB // 2


@pytest.mark.parametrize(
    ("settings_", "code", "words"),
    [
        (PlanSettings(pin={"tpp": 2}), "NEST-S01", "Nearest: tp"),
        (PlanSettings(pin={"tp": "two"}), "NEST-S02", "positive integer"),
        (PlanSettings(pin={"tp": True}), "NEST-S02", "positive integer"),
        (PlanSettings(pin={"tp": []}), "NEST-S02", "positive integer"),
        (PlanSettings(pin={"recompute": "some"}), "NEST-S02", "selective"),
        (PlanSettings(pin={"overlap": 1}), "NEST-S02", "own keys"),
    ],
)
def test_wrong_settings_are_refused(settings_: PlanSettings, code: str, words: str) -> None:
    """An unknown axis or a value it cannot take is bad input that names what is possible."""
    with pytest.raises(BadInputError) as caught:
        apply_settings(job_of(), settings_)
    assert caught.value.code == code
    assert words in str(caught.value)


def test_a_checkpoint_that_cannot_reshard_binds_its_axes() -> None:
    """Resuming from a fixed-layout checkpoint keeps tp, pp, vpp, ep, etp and the split (DESIGN section 8)."""
    job = dataclasses.replace(
        job_of(),
        checkpoint=CheckpointState(resuming=True, reshards=False, source="model.resume_from_checkpoint"),
    )
    best = search(apply_settings(job, PlanSettings()), cluster_of(job)).best
    user = job.user_layout
    assert (best.tp, best.pp, best.vpp, best.num_layers_per_chunk) == (
        user.tp,
        user.pp,
        user.vpp,
        user.num_layers_per_chunk,
    )


def test_changes_counts_differing_axes() -> None:
    """Two layouts that differ in tp and micro-batch differ on two axes."""
    layout = job_of().user_layout
    assert changes(layout, dataclasses.replace(layout, tp=4, micro_batch=2)) == 2
