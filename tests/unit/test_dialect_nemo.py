"""Reading NeMo configurations: outcomes of public files, values, origins, pins, versions, recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from nest_megatron.dialects import registry
from nest_megatron.dialects.nemo import NemoDialect
from nest_megatron.errors import BadInputError
from nest_megatron.specs.job import COMMAND_LINE, CONFIG_FILE, DEFAULT, TrainJob
from nest_megatron.specs.layout import Recompute
from nest_megatron.specs.settings import PlanSettings
from tests.unit import nemo_files
from tests.unit.nemo_files import GPT3_175B, GPT_24, GPT_123, LLAMA_70B, LLAMA_123, MIXTRAL, SFT, load

SHAPES = {
    "model__num_layers": 32,
    "model__hidden_size": 4096,
    "model__num_attention_heads": 32,
    "model__ffn_hidden_size": 11008,
    "model__mcore_gpt": True,
    "model__megatron_amp_O2": True,
}


def read(
    config: DictConfig,
    *overrides: str,
    version: str | None = None,
    gpus: int | None = None,
    prefix: str = "",
) -> TrainJob:
    """Read with the dialect under test."""
    settings = PlanSettings(framework_version=version, num_gpus=gpus)
    return NemoDialect(prefix=prefix).read(config, overrides=overrides, settings=settings)


def test_every_public_file_gives_a_job_or_one_sentence_as_documented(shared: Path, repository: Path) -> None:
    """The outcome table of docs/dialects.md is what reading gives, file by file."""
    documented = (repository / "docs" / "dialects.md").read_text(encoding="utf-8")
    assert nemo_files.table(shared) in documented


@pytest.mark.parametrize(
    "folder", ["flagscale", "megatron-bridge", "megatron-lm", "nemo-rl", "primus", "verl"]
)
def test_configurations_of_other_stacks_are_not_taken_for_nemo(shared: Path, folder: str) -> None:
    """No file of another stack is detected as ``nemo``."""
    paths = sorted((shared / "data" / "configs" / folder).rglob("*.yaml"))
    assert paths
    for path in paths:
        config = OmegaConf.load(path)
        assert not isinstance(config, DictConfig) or not NemoDialect().detect(config), path.name


def test_reading_changes_nothing_and_needs_no_resolver(shared: Path) -> None:
    """A read-only struct configuration is read without a change and without registering ``multiply``."""
    config = load(shared, GPT3_175B)
    before = OmegaConf.to_yaml(config)
    OmegaConf.set_readonly(config, True)
    OmegaConf.set_struct(config, True)
    job = read(config)
    assert job.model.ffn_hidden_size == 4 * job.model.hidden_size == 49152
    assert OmegaConf.to_yaml(config) == before
    assert not OmegaConf.has_resolver("multiply")
    assert not OmegaConf.has_resolver("sum")


def test_gpt3_175b_has_the_published_parameter_count(shared: Path) -> None:
    """The shapes of the 175B recipe give 174.6e9 parameters, the number in the GPT-3 paper's table 2.1."""
    model = read(load(shared, GPT3_175B)).model
    h, layers = model.hidden_size, model.num_layers
    params = layers * 12 * h * h + model.vocab_size * h + model.max_position_embeddings * h
    assert params == pytest.approx(174.6e9, rel=0.002)


def test_llama_shapes_survive_reading(shared: Path) -> None:
    """GQA, SwiGLU, RMSNorm, rotary positions, untied embeddings and no bias are all seen."""
    model = read(load(shared, LLAMA_70B)).model
    assert (model.num_query_groups, model.kv_channels, model.ffn_hidden_size) == (8, 128, 28672)
    assert model.gated_mlp and model.rms_norm
    assert not (model.learned_positions or model.tied_embeddings or model.linear_bias)
    assert model.hidden_dropout == 0.0


def test_mixtral_experts_survive_reading(shared: Path) -> None:
    """Expert count, top-k, capacity and dispatcher come from the file; every layer is MoE."""
    moe = read(load(shared, MIXTRAL)).model.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.capacity_factor, moe.dispatcher) == (8, 2, 1.0, "alltoall")
    assert moe.grouped_gemm and moe.layer_pattern == (1,) * 32


def test_world_is_nodes_times_devices(shared: Path) -> None:
    """num_nodes x devices gives the world, and each source of it is named."""
    job = read(load(shared, GPT3_175B, trainer__num_nodes=32))
    assert (job.num_gpus, job.gpus_per_node, job.user_layout.dp) == (256, 8, 8)
    assert job.origins["num_gpus"] == CONFIG_FILE


def test_missing_node_count_is_lightnings_default_and_said(shared: Path) -> None:
    """Without num_nodes one node is assumed in words; num_gpus replaces it."""
    job = read(load(shared, GPT3_175B))
    assert (job.num_gpus, job.origins["num_gpus"]) == (8, DEFAULT)
    assert any("num_nodes" in text for text in job.assumptions)
    asked = read(load(shared, GPT3_175B), gpus=256)
    assert (asked.num_gpus, asked.gpus_per_node, asked.origins["num_gpus"]) == (256, 8, COMMAND_LINE)


@pytest.mark.parametrize(("devices", "per_node"), [("4", 4), ("0,1,2", 3), ([0, 1], 2), (-1, 8), ("auto", 8)])
def test_every_form_of_devices_is_understood(shared: Path, devices: object, per_node: int) -> None:
    """Lightning's text, list and all-GPUs forms of ``devices`` give a count."""
    assert read(load(shared, GPT_24, trainer__devices=devices)).gpus_per_node == per_node


def test_command_line_values_are_pins_and_group_choices_are_not(shared: Path) -> None:
    """A value override pins its axis; a group choice, a deletion and a non-layout key pin nothing."""
    config = load(shared, GPT3_175B, model__tensor_model_parallel_size=8, model__micro_batch_size=2)
    job = read(
        config,
        "model.tensor_model_parallel_size=8",
        "++model.micro_batch_size=2",
        "model=gpt3_175b",
        "~model.sharp",
        "trainer.max_steps=5",
    )
    assert job.pins == {"tp": 8, "micro_batch": 2}
    assert (job.origins["tp"], job.origins["pp"], job.origins["ep"]) == (COMMAND_LINE, CONFIG_FILE, DEFAULT)


def test_null_and_mapping_overrides_pin_too(shared: Path) -> None:
    """``vpp=null`` fixes no interleaving, and a mapping value fixes its leaves."""
    config = load(shared, GPT3_175B, model__virtual_pipeline_model_parallel_size=None)
    job = read(
        config, "model.virtual_pipeline_model_parallel_size=null", "+model.optim={overlap_grad_sync:true}"
    )
    assert job.pins["vpp"] == 1
    assert job.pins["overlap"] == job.user_layout.overlap


def test_overriding_the_source_of_a_reference_pins_the_axis(shared: Path) -> None:
    """NeMo-Aligner keeps the micro-batch in data.train_ds; setting it there is a pin."""
    config = load(shared, SFT, **SHAPES, model__data__train_ds__micro_batch_size=4)
    job = read(config, "model.data.train_ds.micro_batch_size=4", gpus=8)
    assert job.pins == {"micro_batch": 4}
    assert (job.user_layout.micro_batch, job.global_batch) == (4, 128)


def test_sequence_parallelism_is_cleared_at_tp_1_as_nemo_does(shared: Path) -> None:
    """SP and TP overlap at TP 1 are read as off, said, and not pinned."""
    config = load(shared, GPT_24, model__sequence_parallel=True, model__ub_tp_comm_overlap=True)
    job = read(config, "model.sequence_parallel=true")
    assert not job.user_layout.sequence_parallel and not job.user_layout.overlap.tp_comm
    assert "sequence_parallel" not in job.pins
    assert any("clears" in text for text in job.assumptions)


@pytest.mark.parametrize(
    ("name", "version", "core"),
    [
        (GPT_123, "1.23", "0.5.0"),
        (GPT_24, "2.1", "0.10.0"),
        (MIXTRAL, "2.0", "0.9.0"),
        (LLAMA_70B, "1.23", "0.5.0"),
    ],
)
def test_version_is_inferred_from_the_keys_and_said(shared: Path, name: str, version: str, core: str) -> None:
    """Without an installed NeMo the oldest release that has all the file's keys is assumed in words."""
    job = read(load(shared, name))
    assert (job.framework_version, job.megatron_core_version) == (version, core)
    assert f"NeMo {version}" in job.assumptions[0]


def test_the_version_setting_wins(shared: Path) -> None:
    """framework_version decides and makes no assumption."""
    job = read(load(shared, LLAMA_70B, trainer__num_nodes=8), version="2.3.1")
    assert (job.framework_version, job.megatron_core_version, job.assumptions) == ("2.3.1", "0.12.0", ())


@pytest.mark.parametrize("version", ["1.0", "2.6.2", "3.0", "latest"])
def test_releases_without_hydra_training_are_refused(shared: Path, version: str) -> None:
    """A release outside 1.20 .. 2.5, or no version at all, is one clear error."""
    with pytest.raises(BadInputError, match="NEST-D10"):
        read(load(shared, LLAMA_70B), version=version)


def test_capabilities_follow_the_release(shared: Path) -> None:
    """Uneven ends, counted embeddings, order and instances appear with their release; VPP goes at 2.4."""
    by_version = {
        v: read(load(shared, MIXTRAL), version=v).capabilities for v in ("1.23", "2.0", "2.2", "2.3", "2.4")
    }
    assert [c.uneven_ends for c in by_version.values()] == [False, False, False, True, True]
    assert [c.account_embedding_and_loss for c in by_version.values()] == [False, False, True, True, True]
    assert [len(c.orders) for c in by_version.values()] == [1, 1, 2, 2, 2]
    assert [c.optimizer_instances for c in by_version.values()] == [False, False, True, True, True]
    assert [c.virtual_pipeline for c in by_version.values()] == [True, True, True, True, False]
    assert [c.expert_parallel for c in by_version.values()] == [False, True, True, True, True]
    assert not any(c.layout_string or c.expert_tensor_parallel for c in by_version.values())


def test_without_o2_neither_vpp_nor_experts_are_offered(shared: Path) -> None:
    """NeMo refuses virtual stages and expert parallelism without megatron_amp_O2."""
    able = read(load(shared, MIXTRAL, model__megatron_amp_O2=False), version="2.2").capabilities
    assert not able.virtual_pipeline and not able.expert_parallel


def test_layer_keys_are_read_by_the_releases_that_know_them(shared: Path) -> None:
    """First and last keys shape the chunks in 2.3 and are ignored, in words, in 1.23."""
    changes = {
        "model__virtual_pipeline_model_parallel_size": None,
        "model__num_layers_in_first_pipeline_stage": 18,
        "model__num_layers_in_last_pipeline_stage": 20,
    }
    config = load(shared, LLAMA_70B, **changes)
    assert read(config, version="2.3", gpus=64).user_layout.num_layers_per_chunk == (18, 21, 21, 20)
    old = read(config, version="1.23", gpus=64)
    assert old.user_layout.num_layers_per_chunk == (20, 20, 20, 20)
    assert any("ignores" in text for text in old.assumptions)


def test_an_indivisible_split_stays_visible(shared: Path) -> None:
    """Layers that do not divide give a sum below the layer count, so that the rules can see it."""
    job = read(load(shared, LLAMA_70B, model__num_layers=81), gpus=64)
    assert sum(job.user_layout.num_layers_per_chunk) == 80


def test_counted_embedding_and_loss_take_one_slot_each(shared: Path) -> None:
    """126 layers on 8 stages of 2 chunks are 7, 8 x 14, 7 with both account flags (the 405B layout)."""
    config = load(
        shared,
        LLAMA_70B,
        model__num_layers=126,
        model__pipeline_model_parallel_size=8,
        model__virtual_pipeline_model_parallel_size=2,
        model__account_for_embedding_in_pipeline_split=True,
        model__account_for_loss_in_pipeline_split=True,
    )
    assert read(config, gpus=64).user_layout.num_layers_per_chunk == (7, *(8,) * 14, 7)


@pytest.mark.parametrize(
    ("changes", "weight", "grad", "optimizer"),
    [
        ({}, 2, 4, 10),  # Apex: bf16 weights, fp32 gradients, 16 remainder bits and two moments
        ({"model__optim__grad_sync_dtype": "bf16"}, 2, 2, 10),
        ({"model__optim__name": "mcore_distributed_optim"}, 2, 4, 12),
        (
            {"model__optim__name": "mcore_distributed_optim", "model__optim__grad_sync_dtype": "bf16"},
            2,
            2,
            12,
        ),
        ({"model__optim__name": "fused_adam"}, 2, 4, 12),
        ({"model__optim__name": "fused_adam", "model__megatron_amp_O2": False}, 4, 4, 8),
        ({"model__megatron_amp_O2": False}, 4, 8, 8),
        (
            {"model__optim__name": "fused_adam", "model__megatron_amp_O2": False, "trainer__precision": 32},
            4,
            4,
            8,
        ),
        ({"model__optim__dtype": "bf16"}, 2, 2, 4),
        ({"trainer__precision": 16}, 2, 4, 12),
    ],
)
def test_recipe_bytes_follow_nemos_rules(
    shared: Path, changes: dict[str, object], weight: int, grad: int, optimizer: int
) -> None:
    """Weights, gradients and optimizer bytes per parameter follow precision, O2 and the optimizer's name."""
    recipe = read(load(shared, LLAMA_70B, **changes)).recipe
    assert (recipe.weight_bytes, recipe.grad_bytes, recipe.optimizer_bytes) == (weight, grad, optimizer)


def test_fp8_adds_cached_copies_and_fp8_parameters_do_not(shared: Path) -> None:
    """fp8 GEMMs keep two bytes of cached weights; fp8 parameters gather one byte instead."""
    cached = read(load(shared, GPT3_175B)).recipe
    assert (cached.compute_dtype, cached.cached_weight_bytes, cached.param_gather_bytes) == ("fp8", 2, 2)
    own = read(load(shared, GPT3_175B, model__fp8_params=True)).recipe
    assert (own.cached_weight_bytes, own.param_gather_bytes, own.optimizer_bytes) == (0, 1, 12)


def test_wgrad_fusion_is_cleared_where_nemo_clears_it(shared: Path) -> None:
    """Gradient accumulation fusion needs O2, and a distributed optimizer or a pipeline when DP > 1."""
    on = {"model__gradient_accumulation_fusion": True, "trainer__devices": 8}
    assert not read(load(shared, GPT_24, **on)).recipe.wgrad_fusion
    assert read(load(shared, GPT_24, **on, model__pipeline_model_parallel_size=2)).recipe.wgrad_fusion
    assert read(load(shared, GPT_24, **on, model__optim__name="mcore_distributed_optim")).recipe.wgrad_fusion
    off = load(shared, GPT_24, **on, model__megatron_amp_O2=False, model__pipeline_model_parallel_size=2)
    assert not read(off).recipe.wgrad_fusion


def test_half_precision_o2_with_a_plain_optimizer_is_refused(shared: Path) -> None:
    """fp16 with O2 and fused_adam raises in NeMo; the reader says so first."""
    with pytest.raises(BadInputError, match="NEST-D13"):
        read(load(shared, GPT_24, trainer__precision=16))


def test_attention_kernel_follows_release_and_flags(shared: Path) -> None:
    """megatron-core uses Transformer Engine always in 1.23, by flag in 2.x; own layers have a flag."""
    assert read(load(shared, LLAMA_123)).kernels.attention == "flash"
    assert read(load(shared, GPT_24)).kernels.attention == "fused_softmax"
    assert read(load(shared, GPT_24, model__transformer_engine=True)).kernels.attention == "flash"
    assert read(load(shared, GPT_123, model__use_flash_attention=True)).kernels.attention == "flash"
    assert read(load(shared, GPT_123, model__masked_softmax_fusion=False)).kernels.attention == "unfused"


def test_rampup_stages_are_all_listed(shared: Path) -> None:
    """[32, 32, n] on a global batch of 128 passes 32, 64 and 96."""
    job = read(load(shared, GPT_24, model__global_batch_size=128, model__rampup_batch_size=[32, 32, 1000]))
    assert job.rampup_batches == (32, 64, 96)


@pytest.mark.parametrize("stages", [[32, 32], [32, 0, 5], [100, 32, 5], [256, 32, 5], "32,32,5", [1, "a", 3]])
def test_rampups_that_megatron_refuses_are_named(shared: Path, stages: object) -> None:
    """A ramp-up that is malformed or misses the global batch is bad input."""
    with pytest.raises(BadInputError, match="rampup_batch_size"):
        read(load(shared, GPT_24, model__global_batch_size=128, model__rampup_batch_size=stages))


def test_evaluation_batch_follows_limit_val_batches(shared: Path) -> None:
    """Validation runs at the global batch unless limit_val_batches is zero."""
    assert read(load(shared, GPT_24)).evaluation_batch == 8
    assert read(load(shared, GPT_24, trainer__limit_val_batches=0)).evaluation_batch is None


def test_selective_and_full_recompute_are_read(shared: Path) -> None:
    """Selective recomputes the core attention; full keeps method and count."""
    selective = load(shared, GPT_24, model__activations_checkpoint_granularity="selective")
    assert read(selective).user_layout.recompute == Recompute(granularity="selective", modules=("core_attn",))
    full = load(
        shared,
        GPT_24,
        model__activations_checkpoint_granularity="full",
        model__activations_checkpoint_method="block",
        model__activations_checkpoint_num_layers=3,
    )
    expected = Recompute(granularity="full", method="block", num_layers=3)
    assert read(full).user_layout.recompute == expected


def test_a_checkpoint_in_the_log_folder_means_resuming(shared: Path, tmp_path: Path) -> None:
    """resume_if_exists resumes when exp_manager's folder holds a last checkpoint, and not before."""
    config = load(shared, GPT_24, exp_manager__explicit_log_dir=str(tmp_path))
    assert not read(config).checkpoint.resuming
    (tmp_path / "checkpoints" / "megatron_gpt--step=10-last").mkdir(parents=True)
    state = read(config).checkpoint
    assert state.resuming and state.reshards and state.source.startswith(str(tmp_path))


def test_own_layers_and_unsharded_formats_do_not_reshard(shared: Path) -> None:
    """Only distributed checkpoints in a reshardable format may change the layout."""
    path = {"model__resume_from_checkpoint": "last.ckpt"}
    assert read(load(shared, MIXTRAL, **path)).checkpoint.reshards
    assert not read(
        load(shared, MIXTRAL, **path, model__dist_ckpt_parallel_dist_opt=False)
    ).checkpoint.reshards
    assert not read(load(shared, GPT_123, **path)).checkpoint.reshards


def test_unknown_tokenizers_are_assumed_in_words_and_override_wins(shared: Path) -> None:
    """An unknown tokenizer gives a stated size; override_vocab_size is used without padding."""
    job = read(load(shared, LLAMA_123))
    assert job.model.vocab_size == 32000 and any("vocabulary" in text for text in job.assumptions)
    override = read(load(shared, LLAMA_123, model__override_vocab_size=256000)).model
    assert override.padded_vocab_size(8) == 256000


def test_the_same_reader_serves_a_prefix(shared: Path) -> None:
    """A launcher file below ``training.`` gives the same job as at the root, and edits carry the prefix."""
    plain = load(shared, LLAMA_70B)
    below = OmegaConf.create({"training": OmegaConf.to_container(plain, resolve=False)})
    del below.training.exp_manager.checkpoint_callback_params
    dialect = NemoDialect(prefix="training.")
    assert dialect.detect(below) and not NemoDialect().detect(below)
    job = read(below, "training.model.tensor_model_parallel_size=4", gpus=64, prefix="training.")
    assert job.user_layout == read(plain, gpus=64).user_layout
    assert job.pins == {"tp": 4}
    wanted = read(load(shared, LLAMA_70B, model__micro_batch_size=2), gpus=64).user_layout
    assert dialect.write(below, job, wanted) == {"training.model.micro_batch_size": 2}


def test_detection_errors_say_what_was_looked_for() -> None:
    """An unknown configuration and an unknown name are one sentence with the known dialects."""
    with pytest.raises(BadInputError, match="trainer and model"):
        registry.detect(OmegaConf.create({"policy": {"x": 1}}))
    with pytest.raises(BadInputError, match="nemo"):
        registry.by_name("nemmo")
    assert registry.by_name("nemo").name == "nemo"


def test_a_tokenizer_in_an_unknown_folder_is_known_by_its_file_name(shared: Path) -> None:
    """The folder of ``tokenizer.model`` may be unset; the file name alone decides the vocabulary."""
    config = load(
        shared, LLAMA_123, data_dir="???", model__tokenizer__model="${data_dir}/llama_tokenizer.model"
    )
    job = read(config)
    assert job.model.vocab_size == 32000
    assert not any("vocabulary" in text for text in job.assumptions)
