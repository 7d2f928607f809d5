"""NeMo-Framework-Launcher: stage files alone and below ``training.``, stages, encoders, round trips."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from nest_megatron import rules
from nest_megatron.dialects import registry
from nest_megatron.dialects.launcher import LauncherDialect
from nest_megatron.dialects.nemo import NemoDialect
from nest_megatron.errors import BadInputError, NothingToPlanError
from nest_megatron.specs.job import COMMAND_LINE, CONFIG_FILE, TrainJob
from nest_megatron.specs.settings import PlanSettings
from tests.unit import nemo_files
from tests.unit.nemo_files import launched, load, stage
from tests.unit.test_dialect_nemo_write import GPUS, apply, layouts, without_derived

DIALECT = LauncherDialect()
LAUNCHED = ("gpt3/175b", "llama/llama3_70b", "mixtral/mixtral_8x7b", "gpt3/mlperf-24n")
PRODUCT = "exp_manager.checkpoint_callback_params.model_parallel_size"


def read(config: DictConfig, *overrides: str, gpus: int | None = None) -> TrainJob:
    """Read with the dialect under test, on the release of the launcher's container."""
    return DIALECT.read(
        config, overrides=overrides, settings=PlanSettings(framework_version="2.0", num_gpus=gpus)
    )


def refusal(config: DictConfig) -> str:
    """Return the code and the sentence with which a configuration is refused, after detection."""
    with pytest.raises(BadInputError) as caught:
        registry.detect(config).read(config, overrides=(), settings=PlanSettings())
    return f"{caught.value.code}: {caught.value.message}"


def test_every_training_file_gives_a_job_or_one_sentence_as_documented(
    shared: Path, repository: Path
) -> None:
    """The outcome table of docs/dialects.md is what reading gives, for all files of ``conf/training``."""
    documented = (repository / "docs" / "dialects.md").read_text(encoding="utf-8")
    assert nemo_files.launcher_table(shared) in documented


def test_a_stage_file_alone_and_composed_is_the_same_job(shared: Path) -> None:
    """Below ``training.`` and as a file of its own, each planned file has one model, world and layout."""
    names = nemo_files.planned_stages(shared)
    assert len(names) >= 45
    for name in names:
        alone, composed = read(stage(shared, name)), read(launched(shared, name))
        for field in ("model", "num_gpus", "user_layout", "recipe", "kernels", "evaluation_batch", "pins"):
            assert getattr(alone, field) == getattr(composed, field), (name, field)


def test_no_other_public_configuration_is_taken_for_the_launchers(shared: Path) -> None:
    """Files of NeMo itself and of every other stack are left to their own dialects."""
    root = shared / "data" / "configs"
    own = root / "nemo-framework-launcher"
    paths = [path for path in root.rglob("*.yaml") if own not in path.parents]
    assert paths
    for path in paths:
        config = OmegaConf.load(path)
        assert not isinstance(config, DictConfig) or not DIALECT.detect(config), path


def test_a_stage_file_resolves_the_name_it_will_be_mounted_under(shared: Path) -> None:
    """``${training.model.encoder_seq_length}`` in a file that has no key ``training`` means its own root."""
    config = stage(shared, "gpt3/5b_64k")
    assert config.model.data._get_node("seq_length")._value() == "${training.model.encoder_seq_length}"
    job = read(config)
    assert job.sequence_length == 65536
    assert not any("seq_length" in text for text in job.assumptions)


def test_a_self_reference_to_an_absent_key_is_named(shared: Path) -> None:
    """A reference below ``training`` that leads nowhere is one sentence with the key, not a guess."""
    config = stage(shared, "gpt3/5b", model__num_layers="${training.model.depth}")
    assert refusal(config).startswith("NEST-D04: model.num_layers cannot be evaluated")


def test_edits_carry_the_prefix_of_the_configuration_they_are_for(shared: Path) -> None:
    """One changed axis edits one key, below ``model`` or ``training.model``; the product follows."""
    OmegaConf.register_new_resolver("multiply", lambda x, y: x * y)
    try:
        for config, prefix in ((stage(shared, "gpt3/5b"), ""), (launched(shared, "gpt3/5b"), "training.")):
            job = read(config)
            layout = replace(job.user_layout, tp=2, etp=2, dp=64, edp=64)
            edits = DIALECT.write(config, job, layout)
            assert edits == {f"{prefix}model.tensor_model_parallel_size": 2}
            root = apply(config, edits)
            if not prefix:
                root = OmegaConf.create({"training": root})
            assert OmegaConf.select(root, f"training.{PRODUCT}") == 2
    finally:
        OmegaConf.clear_resolver("multiply")


def test_the_users_own_layout_needs_no_edit(shared: Path) -> None:
    """Writing back what was read changes nothing, in every planned file of the launcher."""
    for name in nemo_files.planned_stages(shared):
        for config in (stage(shared, name), launched(shared, name)):
            job = read(config)
            assert DIALECT.write(config, job, job.user_layout) == {}, name


@pytest.mark.parametrize("name", LAUNCHED)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_written_layout_is_read_back(shared: Path, name: str, data: st.DataObject) -> None:
    """read(apply(write(layout))) asks for the layout, alone and composed; a second write is empty."""
    config = data.draw(st.sampled_from((stage, launched)))(shared, name)
    job = read(config, gpus=GPUS)
    layout = data.draw(layouts(job))
    edited = apply(config, DIALECT.write(config, job, layout))
    again = read(edited, gpus=GPUS)
    assert without_derived(again.user_layout) == without_derived(layout)
    assert DIALECT.write(edited, again, again.user_layout) == {}


def test_stages_without_training_are_nothing_to_plan(shared: Path) -> None:
    """The launcher's default stages convert a checkpoint: one sentence that names them, and no job."""
    for asked in (["conversion"], ["data_preparation", "evaluation"], [], None):
        with pytest.raises(NothingToPlanError, match="do not train") as caught:
            read(launched(shared, "gpt3/5b", stages=asked))
        assert caught.value.code == NothingToPlanError.CODE
        assert caught.value.factors[0].value == (", ".join(asked or []) or "none")


def test_stages_must_be_names_and_training_must_have_keys(shared: Path) -> None:
    """A word instead of a list, and a training stage without configuration, are refused by key."""
    assert refusal(launched(shared, "gpt3/5b", stages="training")).startswith("NEST-D31: stages")
    config = launched(shared, "gpt3/5b")
    del config["training"]
    assert refusal(config) == "NEST-D32: the training stage has no configuration"


def test_other_stages_and_the_container_are_said(shared: Path) -> None:
    """What is not planned, and where the release of NeMo is written, stand in the assumptions."""
    notes = read(launched(shared, "gpt3/5b", stages=["data_preparation", "training"])).assumptions
    assert any("data_preparation run as configured" in text for text in notes)
    assert any("nvcr.io/nvidia/nemo:24.09" in text for text in notes)
    alone = read(stage(shared, "gpt3/5b")).assumptions
    assert not any("container" in text or "stages" in text for text in alone)


def test_a_ramp_up_is_planned_for_all_nodes_and_said(shared: Path) -> None:
    """The launcher changes the node count during a ramp-up; the plan says that it does not follow."""
    job = read(launched(shared, "gpt3/5b", training__model__rampup_batch_size=[1024, 512, 1000]))
    assert job.rampup_batches == (1024, 1536)
    assert any("ramp-up" in text for text in job.assumptions)


def test_counts_that_the_scheduler_would_start_differently_are_refused(shared: Path) -> None:
    """``run.nodes`` and ``run.ntasks_per_node`` must agree with the trainer's counts."""
    agreed = {"training__run__nodes": 16, "training__run__ntasks_per_node": 8}
    assert read(launched(shared, "gpt3/5b", **agreed)).num_gpus == 128
    for key in ("nodes", "ntasks_per_node"):
        text = refusal(launched(shared, "gpt3/5b", **{f"training__run__{key}": 4}))
        assert text.startswith(f"NEST-D33: training.run.{key} starts another number"), text


def test_command_line_values_pin_and_group_choices_do_not(shared: Path) -> None:
    """``training.model...=`` fixes its axis, ``training=<file>`` fixes none."""
    overrides = ("training=gpt3/175b", "training.model.tensor_model_parallel_size=4", "stages=[training]")
    job = read(launched(shared, "gpt3/175b"), *overrides)
    assert job.pins == {"tp": 4}
    assert (job.origin("tp"), job.origin("pp")) == (COMMAND_LINE, CONFIG_FILE)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("bert/20b", "a BERT encoder (TP4 PP4)"),
        ("t5/11b", "a T5 encoder-decoder (TP4 PP1)"),
        ("mt5/3b", "a T5 encoder-decoder (TP2 PP1)"),
        ("retro/300m", "a RETRO model (TP1 PP1)"),
        ("neva/nemotron4_340b_chat", "a multimodal model (TP8 PP2)"),
        ("imagen/2b_res_64", "an Imagen diffusion model"),
    ],
)
def test_other_models_are_named_with_their_sizes(shared: Path, name: str, sentence: str) -> None:
    """A model that is not GPT is refused by kind, with the parallel sizes it asks for."""
    expected = f"NEST-D20: this configuration trains {sentence}; only decoder-only GPT is planned"
    assert refusal(stage(shared, name)) == refusal(launched(shared, name)) == expected


def test_nemos_own_encoders_are_named_with_their_split(shared: Path) -> None:
    """NeMo's BERT and T5 files are refused alike; a T5 pipeline also names the stage where it splits."""
    bert = load(shared, f"nemo-1.23/{nemo_files.EXAMPLES}/megatron_bert_config.yaml")
    assert NemoDialect().detect(bert)
    assert "a BERT encoder (TP1 PP1)" in refusal(bert)
    sizes = {"model__pipeline_model_parallel_size": 4, "model__pipeline_model_parallel_split_rank": 2}
    t5 = load(shared, f"nemo-1.23/{nemo_files.EXAMPLES}/megatron_t5_config.yaml", **sizes)
    assert "a T5 encoder-decoder (TP1 PP4 split at stage 2)" in refusal(t5)


def test_falcon_is_illegal_as_shipped(shared: Path) -> None:
    """A global batch of 32 on 128 data parallel ranks breaks the batch rules and no other."""
    job = read(launched(shared, "falcon/falcon_7b"))
    assert (job.num_gpus, job.global_batch, job.user_layout.dp) == (128, 32, 128)
    assert {violation.code for violation in rules.check(job, job.user_layout)} == {"NEST-RB02", "NEST-RB04"}


def test_sequence_parallelism_without_tp_is_cleared_as_nemo_does(shared: Path) -> None:
    """mixtral_8x7b asks for sequence parallelism at TP 1: NeMo clears it, so the job is legal."""
    config = launched(shared, "mixtral/mixtral_8x7b")
    assert config.training.model.sequence_parallel is True
    job = read(config)
    assert not job.user_layout.sequence_parallel
    assert rules.check(job, job.user_layout) == ()
    assert any("NeMo clears it" in text for text in job.assumptions)
