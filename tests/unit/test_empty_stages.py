"""A pipeline stage without layers is written as a layout string: megatron-core has no other form for it."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.dialects.megatron_lm import MegatronLMDialect
from nest_megatron.rules import check, facts_for
from nest_megatron.rules.layers import split_form
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.settings import PlanSettings
from tests.covering import Model

MODEL = Model(layers=7, tied=False, experts=False)


@pytest.fixture
def job() -> TrainJob:
    """Seven layers on four ranks."""
    settings = PlanSettings(num_gpus=4, dialect="megatron_lm", framework_version="0.16.1")
    return MegatronLMDialect().read(MODEL.config("none"), overrides=(), settings=settings)


def staged(job: TrainJob, *layers: int) -> Layout:
    """Return the user's layout with these layers on four stages."""
    return dataclasses.replace(job.user_layout, pp=4, dp=1, edp=1, num_layers_per_chunk=layers)


@pytest.mark.parametrize("layers", [(4, 0, 0, 3), (7, 0, 0, 0), (0, 0, 7, 0)])
def test_an_empty_stage_takes_the_layout_string(job: TrainJob, layers: tuple[int, ...]) -> None:
    """Uneven ends would leave no layers for middle stages, which megatron-core refuses."""
    layout = staged(job, *layers)
    assert split_form(job, layout, facts_for("0.16.1")) == "string"
    assert check(job, layout) == ()
    edits = MegatronLMDialect().write(MODEL.config("none"), job, layout)
    assert "MODEL_ARGS.--pipeline-model-parallel-layout" in edits
    assert not any("pipeline-num-layers" in key for key in edits)


def test_full_stages_keep_the_simpler_form(job: TrainJob) -> None:
    """Two layers on the first stages and one on the last is a matter of ends or slots, not of a string."""
    assert split_form(job, staged(job, 2, 2, 2, 1), facts_for("0.16.1")) != "string"
    assert split_form(job, staged(job, 1, 2, 2, 2), facts_for("0.16.1")) != "string"


def test_without_layout_strings_an_empty_stage_is_illegal(job: TrainJob) -> None:
    """An older release cannot write it, so it is never planned there."""
    old = dataclasses.replace(job, megatron_core_version="0.12.0")
    assert check(old, staged(job, 4, 0, 0, 3))
