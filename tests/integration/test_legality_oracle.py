from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from importlib.metadata import version

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.transformer.transformer_config import TransformerConfig

from nest_megatron import rules
from nest_megatron.rules.versions import facts_for
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Overlap, Recompute
from tests.builders import EVERYTHING, llama8b, make_job, make_layout, mixtral
from tests.legality_cases import CASES, NEVER_OFFERED, Case
from tests.oracle import ORACLE_CANNOT_SEE, accepted_by_megatron
from tests.random_layouts import random_case

pytestmark = pytest.mark.integration

INSTALLED = version("megatron-core")
LAYOUTS = 250

#: Cases about the release that is installed.
CURRENT = [c for c in CASES if "megatron_core_version" not in c.job and c.rule != "grid.degrees"]

ALL_TO_ALL = Overlap(expert_all_to_all=True)

#: Layouts that show why a rule with both visible and invisible parts is in the table.
BLIND_SPOTS = (
    Case(
        "recompute.method",
        "own",
        {},
        {"recompute": Recompute(granularity="selective", method="uniform", modules=("core_attn",))},
        None,
    ),
    Case("recompute.modules", "own", {}, {"recompute": Recompute(granularity="selective")}, None),
    Case(
        "overlap.expert_all_to_all",
        "own",
        {"model": mixtral()},
        {"ep": 8, "overlap": ALL_TO_ALL, "recompute": Recompute(granularity="selective", modules=("moe",))},
        None,
    ),
    Case(
        "layers.no_empty_chunk",
        "own",
        {"model": llama8b(num_layers=3), "capabilities": replace(EVERYTHING, layout_string=False)},
        {"pp": 4, "num_layers_per_chunk": (0, 1, 1, 1)},
        None,
    ),
)


def current(example: Case) -> tuple[TrainJob, Layout]:
    """The job of a case under the installed release, and its broken layout."""
    job, layout = example.build()
    return replace(job, megatron_core_version=INSTALLED), layout


def test_random_layouts_are_judged_alike() -> None:
    """What we call legal megatron-core accepts; what it accepts and we refuse is listed with the reason."""
    rng = random.Random(20)
    counts: Counter[tuple[bool, bool]] = Counter()
    for _ in range(LAYOUTS):
        job, layout = random_case(rng, INSTALLED)
        broken = {violation.rule for violation in rules.check(job, layout)}
        accepted, objection = accepted_by_megatron(job, layout)
        counts[not broken, accepted] += 1
        if not accepted:
            assert broken, f"{objection}: {layout} of {job.model.name} on {job.num_gpus} GPUs"
        else:
            assert broken <= ORACLE_CANNOT_SEE.keys(), f"{layout} of {job.model.name} on {job.num_gpus} GPUs"
    # Both verdicts occur often enough to mean something.
    assert counts[True, True] > LAYOUTS / 10
    assert counts[False, False] > LAYOUTS / 10
    assert counts[True, False] == 0


@pytest.mark.parametrize(
    "example",
    [c for c in CURRENT if c.rule not in ORACLE_CANNOT_SEE],
    ids=lambda c: c.rule,
)
def test_megatron_refuses_visible_cases(example: Case) -> None:
    """A case of a rule that megatron-core checks is refused by it too."""
    accepted, _ = accepted_by_megatron(*current(example))
    assert not accepted


@pytest.mark.parametrize("example", [c for c in CURRENT if c.repair is not None], ids=lambda c: c.rule)
def test_megatron_accepts_repaired_cases(example: Case) -> None:
    """Every repaired case is accepted."""
    job, _ = current(example)
    assert accepted_by_megatron(job, example.repaired()) == (True, "")


@pytest.mark.parametrize("rule", sorted(ORACLE_CANNOT_SEE))
def test_every_blind_spot_is_real(rule: str) -> None:
    """Each rule in the table has a layout that megatron-core accepts, so no entry hides a defect."""
    examples = [c for c in (*CURRENT, *NEVER_OFFERED, *BLIND_SPOTS) if c.rule == rule]
    for example in examples:
        job, layout = current(example)
        assert rule in {violation.rule for violation in rules.check(job, layout)}
    assert any(accepted_by_megatron(*current(example))[0] for example in examples)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_recompute_modules_of_the_installed_release() -> None:
    """The installed TransformerConfig takes each module of the version table, and refuses an unknown one."""

    def config(module: str) -> TransformerConfig:
        return TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            recompute_granularity="selective",
            recompute_modules=[module],
        )

    for module in facts_for(INSTALLED).recompute_modules:
        if module not in ("moe_act", "mla_up_proj"):  # these two also need a model that has them
            config(module)
    with pytest.raises(AssertionError):
        config("attention")


def test_two_grids_need_one_order() -> None:
    """MoE with PP > 1 in the pp-before-dp order is refused by both unless edp equals dp."""
    job = make_job(model=mixtral(), num_gpus=16, megatron_core_version=INSTALLED)
    folded = make_layout(job, tp=2, pp=2, ep=2, etp=1, sequence_parallel=True, order="tp-cp-ep-pp-dp")
    wide = make_layout(job, tp=2, pp=2, ep=4, etp=1, sequence_parallel=True, order="tp-cp-ep-pp-dp")
    assert accepted_by_megatron(job, folded) == (True, "")
    assert rules.check(job, folded) == ()
    assert not accepted_by_megatron(job, wide)[0]
    assert [v.rule for v in rules.check(job, wide)] == ["grid.order_of_two_grids"]
