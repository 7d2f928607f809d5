from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nest_megatron import rules
from nest_megatron.rules.nearest import alternatives, depth
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Overlap, Recompute
from tests.builders import llama8b, make_job, make_layout, mixtral
from tests.legality_cases import CASES, EVEN_ONLY, NEVER_OFFERED, NO_STRING, Case

ALL_CASES = (*CASES, *NEVER_OFFERED)


def broken(job: TrainJob, layout: Layout) -> set[str]:
    """Names of the rules a layout breaks."""
    return {violation.rule for violation in rules.check(job, layout)}


def case(rule: str) -> Case:
    """The first case of a rule."""
    return next(c for c in CASES if c.rule == rule)


def nearest(rule: str, job: TrainJob, layout: Layout) -> tuple[str, ...]:
    """What the violation of one rule proposes."""
    return next(v.nearest for v in rules.check(job, layout) if v.rule == rule)


def test_every_rule_has_a_case() -> None:
    """No rule exists without a layout that breaks it."""
    assert {c.rule for c in CASES} == {rule.name for rule in rules.RULES}


@pytest.mark.parametrize("example", ALL_CASES, ids=lambda c: f"{c.rule}: {c.origin}")
def test_case_breaks_its_rule_only(example: Case) -> None:
    """The layout of a case breaks its rule, and nothing that does not follow from it."""
    assert broken(*example.build()) == {example.rule} | example.also


@pytest.mark.parametrize(
    "example", [c for c in ALL_CASES if c.repair is not None], ids=lambda c: f"{c.rule}: {c.origin}"
)
def test_repaired_case_is_legal(example: Case) -> None:
    """The documented repair makes the layout legal."""
    job, _ = example.build()
    assert broken(job, example.repaired()) == set()


def test_expert_grid_error_names_each_factor_and_its_origin() -> None:
    """C024: the DeepSeek-V2 recipe's error names each factor, where it is from, and three ways out."""
    job, layout = case("grid.expert_world").build()
    job = replace(job, origins={"etp": "inherited from tp", "ep": "recipe", "num_gpus": "Slurm"})
    (violation,) = rules.check(job, layout)
    factors = {f.name: (f.value, f.origin) for f in violation.factors}
    assert factors == {
        "num_gpus": (128, "Slurm"),
        "etp": (4, "inherited from tp"),
        "ep": (32, "recipe"),
        "pp": (4, "default"),
    }
    assert set(violation.nearest) == {"pp=1", "ep=8", "etp=1"}
    assert "512" in violation.message


def test_expert_grid_on_fewer_gpus() -> None:
    """C027: GLM-4.7-30B-A3B scaled from 16 to 8 GPUs is told to halve EP, as the project's fix did."""
    job = make_job(model=mixtral(), num_gpus=8)
    layout = make_layout(job, tp=2, pp=2, ep=8, etp=1, sequence_parallel=True)
    assert "ep=4" in nearest("grid.expert_world", job, layout)


def test_sixty_layers_on_eight_stages() -> None:
    """C033: 60 layers on PP8 are legal as 4+8*7 with uneven ends, and such a split is proposed."""
    job = make_job(model=llama8b(num_layers=60), capabilities=NO_STRING)
    assert broken(job, make_layout(job, pp=8, num_layers_per_chunk=(4, *(8,) * 7))) == set()
    assert "layers=6+8*6+6" in nearest("layers.split_can_be_written", job, make_layout(job, pp=8))


def test_virtual_stages_of_forty_layers() -> None:
    """C034: the nearest legal VPP for 40 layers on PP2 is 10, as the recipe was fixed."""
    assert nearest("layers.chunks", *case("layers.chunks").build())[0] == "vpp=10"


def test_two_layers_per_virtual_stage_lose_eight_layers() -> None:
    """C038: 40 layers, PP8 and 2 layers per virtual stage would drop 8 layers without an error."""
    job = make_job(model=llama8b(num_layers=40))
    layout = make_layout(job, pp=8, vpp=2, num_layers_per_chunk=(2,) * 16)
    (violation,) = rules.check(job, layout)
    assert violation.rule == "layers.no_layer_lost"
    assert "32 layers, the model has 40" in violation.message


def test_forty_layers_on_sixteen_stages_forbid_interleaving() -> None:
    """C039: GPT-3 13B on PP16 needs uneven ends, and then two chunks per stage cannot be filled."""
    job = make_job(model=llama8b(num_layers=40), num_gpus=16, capabilities=NO_STRING)
    ends = (6, *(2,) * 14, 6)
    assert broken(job, make_layout(job, pp=16, num_layers_per_chunk=ends)) == set()
    assert "layers.stages" not in broken(job, make_layout(job, pp=16))
    assert broken(replace(job, capabilities=EVEN_ONLY), make_layout(job, pp=16)) >= {"layers.stages"}
    twice = make_layout(job, pp=16, vpp=3, num_layers_per_chunk=(1,) * 48)
    assert "layers.chunks" in broken(job, twice)


def test_embedding_and_loss_take_a_layer() -> None:
    """Llama 3.1 405B: 126 layers on PP8 x VPP8 are legal when embedding and loss count, 128 slots in all."""
    job = make_job(model=llama8b(num_layers=126), capabilities=replace(NO_STRING, uneven_ends=False))
    split = (1, *(2,) * 62, 1)
    assert broken(job, make_layout(job, pp=8, vpp=8, num_layers_per_chunk=split)) == set()
    assert broken(
        replace(job, capabilities=EVEN_ONLY), make_layout(job, pp=8, vpp=8, num_layers_per_chunk=split)
    ) == {"layers.stages", "layers.chunks", "layers.split_can_be_written"}


def test_dense_tensor_parallelism_needs_no_sequence_parallelism() -> None:
    """C045: Llama-3-8B on TP2 without sequence parallelism is legal; the rule is for experts only."""
    job = make_job()
    assert broken(job, make_layout(job, tp=2)) == set()


def test_expert_and_context_parallelism_combine() -> None:
    """C046: EP and CP fold into separate grids."""
    job = make_job(model=mixtral(), num_gpus=16)
    assert broken(job, make_layout(job, cp=2, ep=8)) == set()


def test_kv_heads_are_copied_from_0_16_on() -> None:
    """C028: 2 KV heads on TP4 are illegal in megatron-core 0.15 and legal in 0.16."""
    job, layout = case("attention.query_groups").build()
    assert broken(job, layout) == {"attention.query_groups"}
    assert broken(replace(job, megatron_core_version="0.16.0"), layout) == set()


def test_falcon_global_batch_is_repaired_by_model_parallelism() -> None:
    """The launcher's falcon_7b feeds 128 GPUs with 32 sequences; PP4 repairs it, TP cannot (71 heads)."""
    proposals = nearest("batch.global_batch", *case("batch.global_batch").build())
    assert "pp=4" in proposals
    assert not any(text.startswith("tp=") for text in proposals)


def test_rampup_is_checked_at_its_smallest_stage() -> None:
    """A ramp-up that starts below micro_batch * dp is illegal although the final batch divides."""
    job = make_job(rampup_batches=(64, 128), global_batch=256)
    assert broken(job, make_layout(job)) == set()
    assert broken(replace(job, rampup_batches=(32, 64, 128)), make_layout(job)) == {"batch.rampup_batches"}


@pytest.mark.parametrize("batch", ["rampup_batches", "evaluation_batch"])
def test_interleaving_holds_at_every_batch_size(batch: str) -> None:
    """With VPP each batch size gives a multiple of PP micro-batches, not only the final one."""
    job = make_job(**{batch: (16, 256) if batch == "rampup_batches" else 16})
    layout = make_layout(job, tp=2, pp=4, vpp=2)
    assert broken(job, layout) == {"batch.interleaved_groups"}
    assert broken(job, replace(layout, vpp=1, num_layers_per_chunk=(8,) * 4)) == set()


def test_two_stage_interleaving_by_version() -> None:
    """PP2 with VPP is legal with p2p overlap from 0.8 on and never before."""
    job = make_job(megatron_core_version="0.8.0")
    layout = make_layout(job, pp=2, vpp=2, overlap=Overlap(p2p=True))
    assert broken(job, layout) == set()
    assert broken(replace(job, megatron_core_version="0.7.0"), layout) == {"layers.two_stage_interleaving"}


def test_all_to_all_overlap_lists() -> None:
    """Each requirement of the expert all-to-all overlap is refused in its own words."""
    job = make_job(model=mixtral())
    legal = make_layout(job, pp=4, vpp=2, ep=8, overlap=Overlap(expert_all_to_all=True))
    assert broken(job, legal) == set()
    full = Recompute(granularity="full", method="block", num_layers=1)
    moe = Recompute(granularity="selective", modules=("moe",))
    slow = replace(job, recipe=replace(job.recipe, compute_dtype="fp32"))
    model = mixtral()
    assert model.moe is not None
    gathered = replace(job, model=replace(model, moe=replace(model.moe, dispatcher="allgather")))
    messages = {
        rules.check(j, x)[0].message
        for j, x in (
            (job, replace(legal, ep=1, edp=16)),
            (job, replace(legal, recompute=full)),
            (job, replace(legal, recompute=moe)),
            (slow, legal),
            (gathered, legal),
            (replace(job, megatron_core_version="0.13.0"), legal),
        )
    }
    assert len(messages) == 6
    assert all(message.startswith("overlapping the expert all-to-all needs") for message in messages)


def test_a_nonsense_degree_is_the_only_violation() -> None:
    """A degree of 0 or less is reported alone, without a traceback from the rules that divide by it."""
    job = make_job()
    for axis in ("tp", "pp", "cp", "ep", "etp", "micro_batch", "vpp"):
        for value in (0, -2):
            assert broken(job, replace(make_layout(job), **{axis: value})) == {"grid.degrees"}


def test_violations_render_and_serialise() -> None:
    """Every violation has a sentence with its code, and JSON data without loss of its parts."""
    for example in ALL_CASES:
        for violation in rules.check(*example.build()):
            assert violation.render().startswith(f"{violation.code}: {violation.message}")
            plain = json.loads(json.dumps(violation.to_dict()))
            assert plain["code"] == violation.code
            assert [f["name"] for f in plain["factors"]] == [f.name for f in violation.factors]
            assert plain["nearest"] == list(violation.nearest)


@pytest.mark.parametrize("example", ALL_CASES, ids=lambda c: f"{c.rule}: {c.origin}")
def test_nearest_choices_repair_the_rule(example: Case) -> None:
    """Each proposed change repairs its rule and breaks none of the same or lower depth."""
    job, layout = example.build()
    before = broken(job, layout)
    by_name = {rule.name: rule for rule in rules.RULES}
    for violation in rules.check(job, layout):
        rule = by_name[violation.rule]
        options = {text: x for axis in rule.axes for text, _, x in alternatives(job, layout, axis)}
        for text in violation.nearest:
            if text.startswith("dp="):
                continue
            after = broken(job, options[text])
            assert rule.name not in after
            assert all(depth(by_name[name]) > depth(rule) for name in after - before), text


def test_nearest_prefers_changes_that_break_nothing_else() -> None:
    """Where one change alone gives a legal layout, the first proposal is such a change."""
    for example in CASES:
        job, layout = example.build()
        (violation, *others) = rules.check(job, layout)
        by_name = {rule.name: rule for rule in rules.RULES}
        options = {
            text: x for axis in by_name[violation.rule].axes for text, _, x in alternatives(job, layout, axis)
        }
        if others or not violation.nearest or violation.nearest[0] not in options:
            continue
        if any(not broken(job, x) for x in options.values()):
            assert broken(job, options[violation.nearest[0]]) == set(), example.rule


def test_interleaving_groups_of_their_own() -> None:
    """Groups other than pp: at least pp, at most m, the last one full or not below pp; from 0.10 on."""
    job = make_job()
    for pp, group in ((4, 4), (4, 5), (4, 6), (4, 3), (2, 5)):
        for count in range(1, 17):
            layout = make_layout(job, pp=pp, vpp=2, overlap=Overlap(p2p=True), micro_batch_group=group)
            batch = layout.dp * layout.micro_batch * count
            changed = replace(job, global_batch=batch, evaluation_batch=None, rampup_batches=())
            groups = [min(group, count - start) for start in range(0, count, group)]
            legal = group >= pp and count >= group and min(groups) >= pp
            assert (broken(changed, replace(layout, global_batch=batch)) == set()) == legal
            older = broken(replace(changed, megatron_core_version="0.9"), replace(layout, global_batch=batch))
            assert ("batch.interleaved_groups" not in older) == (legal and group == pp)
