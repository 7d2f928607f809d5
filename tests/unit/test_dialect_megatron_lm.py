"""Reading Megatron-LM: published test cases against their records, files, defaults, refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.dialects import registry
from nest_megatron.dialects.megatron_lm import config_of
from nest_megatron.dialects.megatron_model import list_expression
from nest_megatron.errors import BadInputError
from nest_megatron.specs.job import TrainJob
from tests.unit import megatron_cases as cases

GPT = {
    "num-layers": 24,
    "hidden-size": 1024,
    "num-attention-heads": 16,
    "seq-length": 2048,
    "max-position-embeddings": 4096,
    "micro-batch-size": 2,
    "bf16": True,
}


def read(
    *, gpus: int = 8, script: str = "pretrain_gpt.py", env: dict[str, str] | None = None, **args: Any
) -> TrainJob:
    """Return the job of a small GPT with changed flags (``_`` stands for ``-``, None removes a flag)."""
    changes = {name.replace("_", "-"): value for name, value in args.items()}
    flags = {name: value for name, value in {**GPT, **changes}.items() if value is not None}
    config = config_of(flags, environment=env, script=script)
    return cases.DIALECT.read(config, overrides=(), settings=cases.settings(gpus))


def test_published_cases_read_as_their_records_say(shared: Path) -> None:
    """Every public case but the multimodal ones reads, and each degree and shape equals its record's."""
    refused: Counter[str] = Counter()
    wrong = []
    for record, job in cases.outcomes(shared):
        if isinstance(job, BadInputError):
            assert job.code == "NEST-M13"
            refused[record["model"]["name"].partition(":")[0]] += 1
            continue
        layout, printed = job.user_layout, record["model"]
        found = {
            "tp": (layout.tp, record["tp"]),
            "pp": (layout.pp, record["pp"]),
            "vpp": (layout.vpp, record["vpp"]),
            "cp": (layout.cp, record["cp"]),
            "ep": (layout.ep, record["ep"]),
            "etp": (layout.etp, record["etp"]),
            "dp": (layout.dp, record["dp"]),
            "micro_batch": (layout.micro_batch, record["micro_batch"]),
            "global_batch": (layout.global_batch, record["global_batch"]),
            "sequence_parallel": (layout.sequence_parallel, record["sp"] and layout.tp > 1),
            "sequence": (job.sequence_length, record["seq_len"]),
            "layers": (job.model.num_layers, printed["layers"]),
            "hidden": (job.model.hidden_size, printed["hidden"]),
            "heads": (job.model.num_attention_heads, printed["heads"]),
            "kv_heads": (job.model.num_query_groups, printed["kv_heads"]),
            "ffn": (job.model.ffn_hidden_size, printed["ffn"]),
        }
        if job.model.moe is not None:
            found["experts"] = (job.model.moe.num_experts, printed["experts"])
            found["topk"] = (job.model.moe.top_k, printed["topk"])
            found["moe_ffn"] = (job.model.moe.ffn_hidden_size, printed["moe_ffn"])
        wrong += [
            (record["id"], name, *pair)
            for name, pair in found.items()
            if None not in pair and pair[0] != pair[1]
        ]
    assert wrong == []
    assert set(refused) == {"mimo", "multimodal-llava"}
    assert len(cases.records(shared)) - sum(refused.values()) >= 240


def test_published_cases_hold_every_layer(shared: Path) -> None:
    """The chunks of a read case hold its layers, but where the record lost the flags that place them."""
    lost = set()
    for record, job in cases.outcomes(shared):
        if isinstance(job, TrainJob) and sum(job.user_layout.num_layers_per_chunk) != job.model.num_layers:
            lost.add(record["model"]["name"])
    # These cases pass --account-for-embedding/loss-in-pipeline-split, which the records do not repeat.
    assert all("account_for_embedding_loss_in_pipeline_split" in name for name in lost)


@pytest.mark.parametrize("name", cases.FILES)
def test_public_files_are_detected_and_read(shared: Path, name: str) -> None:
    """Each public file is recognised by the registry and gives the row of the dialect's page."""
    assert registry.detect(cases.load(shared, name)).name == "megatron_lm"
    page = Path(__file__).resolve().parents[2] / "docs" / "dialects-megatron-lm.md"
    assert f"| {name} | {cases.outcome(shared, name)} |" in page.read_text(encoding="utf-8")


def test_a_layout_string_places_the_layers(shared: Path) -> None:
    """DeepSeek's proxy: eight v-major chunks of a layout string, embedding and loss at the ends."""
    job = cases.DIALECT.read(cases.load(shared, cases.DEEPSEEK), overrides=(), settings=cases.settings(128))
    assert (job.user_layout.vpp, job.user_layout.num_layers_per_chunk) == (2, (2, 2, 2, 2, 2, 2, 1, 1))
    assert job.model.moe is not None and job.model.moe.layer_pattern == (0,) * 3 + (1,) * 11
    assert job.model.mla is not None and job.model.mla.q_lora_rank == 1536
    assert job.model.mtp_num_layers == 1


def test_an_unassigned_placeholder_is_named(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model zoo file names the first variable that is missing; the environment counts."""
    config = cases.load(shared, cases.ZOO)
    for name in ("TP", "CP"):
        del config.ENV_VARS[name]
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TP", "4")
    with pytest.raises(BadInputError) as caught:
        cases.DIALECT.read(config, overrides=(), settings=cases.settings(64))
    assert caught.value.code == "NEST-M01" and "CP" in caught.value.message
    config.ENV_VARS.CP = 2
    layout = cases.DIALECT.read(config, overrides=(), settings=cases.settings(64)).user_layout
    assert (layout.tp, layout.cp) == (4, 2)


def test_an_override_of_a_variable_pins_its_axis(shared: Path) -> None:
    """``++ENV_VARS.TP=2`` on the command line fixes tp, because the flag's value is that variable."""
    config = cases.load(shared, cases.ZOO)
    job = cases.DIALECT.read(config, overrides=("++ENV_VARS.TP=2",), settings=cases.settings(64))
    assert job.pins == {"tp": 2}
    assert job.origin("tp") == "command line"


def test_defaults_are_those_of_the_command_line() -> None:
    """Without flags: 0.1 dropout, learned positions, tied GPT-2 vocabulary, 4h FFN, batch mbs x dp."""
    job = read()
    model = job.model
    assert (model.hidden_dropout, model.attention_dropout) == (0.1, 0.1)
    assert model.learned_positions and model.tied_embeddings and model.linear_bias and not model.rms_norm
    assert (model.ffn_hidden_size, model.vocab_size, model.max_position_embeddings) == (4096, 50257, 4096)
    assert job.global_batch == 2 * 8 and job.origin("global_batch") == "derived"
    assert job.user_layout.sharding == "none" and job.user_layout.etp == 1


@pytest.mark.parametrize(
    ("flags", "field", "wanted"),
    [
        ({"swiglu": True}, "ffn_hidden_size", 2688),
        ({"quick_geglu": True}, "ffn_hidden_size", 4096),
        ({"num_query_groups": 4}, "num_query_groups", 16),
        ({"num_query_groups": 4, "group_query_attention": True}, "num_query_groups", 4),
        ({"position_embedding_type": "rope"}, "learned_positions", False),
        ({"padded_vocab_size": 51200}, "make_vocab_size_divisible_by", 1),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 131073}, "vocab_size", 131073),
        (
            {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "${X}/tokenizer.model"},
            "vocab_size",
            32000,
        ),
        ({"disable_bias_linear": True}, "linear_bias", False),
        ({"untie_embeddings_and_output_weights": True}, "tied_embeddings", False),
        ({"kv_channels": 128}, "kv_channels", 128),
    ],
)
def test_model_flags(flags: dict[str, Any], field: str, wanted: object) -> None:
    """Each model flag does what Megatron-LM's validate_args makes of it."""
    assert getattr(read(**flags).model, field) == wanted


def test_null_tokenizer_adds_an_entry_before_018() -> None:
    """megatron-core up to 0.17 counts the end-of-document token on top of --vocab-size."""
    config = config_of(
        {**GPT, "tokenizer-type": "NullTokenizer", "vocab-size": 131072}, script="pretrain_gpt.py"
    )
    settings = cases.PlanSettings(num_gpus=8, framework_version="0.16.1")
    assert cases.DIALECT.read(config, overrides=(), settings=settings).model.vocab_size == 131073


def test_latent_attention_defaults_are_the_command_lines() -> None:
    """--multi-latent-attention alone: no query compression and a KV rank of 32, unlike the dataclass."""
    mla = read(multi_latent_attention=True).model.mla
    assert mla is not None
    assert (mla.q_lora_rank, mla.kv_lora_rank, mla.qk_head_dim, mla.qk_rope_head_dim) == (0, 32, 128, 64)


@pytest.mark.parametrize(
    ("flags", "bytes_per_parameter"),
    [
        ({}, (2, 4, 12, 0)),
        ({"grad_reduce_in_bf16": True}, (2, 2, 12, 4)),
        ({"bf16": None, "fp16": True}, (2, 2, 12, 4)),
        ({"bf16": None}, (4, 4, 8, 0)),
        ({"use_precision_aware_optimizer": True}, (2, 4, 10, 0)),
        (
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
            (2, 4, 6, 0),
        ),
        ({"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}, (2, 2, 10, 0)),
        ({"optimizer": "sgd"}, (2, 4, 8, 0)),
        ({"optimizer": "muon"}, (2, 4, 8, 0)),
    ],
)
def test_bytes_per_parameter(flags: dict[str, Any], bytes_per_parameter: tuple[int, ...]) -> None:
    """Weights, gradients, optimizer and step copies follow memory_model.md 2.2 and config_surface.md 5.1."""
    recipe = read(**flags).recipe
    found = (recipe.weight_bytes, recipe.grad_bytes, recipe.optimizer_bytes, recipe.step_extra_bytes)
    assert found == bytes_per_parameter


def test_kernels_follow_backend_and_implementation() -> None:
    """Attention: fused unless told otherwise, local or unfused materialises scores; loss by its two flags."""
    assert read(attention_backend="fused").kernels.attention == "cudnn"
    assert read(attention_backend="unfused").kernels.attention == "fused_softmax"
    local = read(transformer_impl="local", no_masked_softmax_fusion=True).kernels
    assert (local.attention, local.transformer_engine) == ("unfused", False)
    switches = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}
    assert read(env=switches).kernels.attention == "fused_softmax"
    assert read(cross_entropy_loss_fusion=True).kernels.loss == "native_fused"
    assert read(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te").kernels.loss == "te_fused"
    assert read(no_gradient_accumulation_fusion=True).recipe.wgrad_fusion is False
    assert read(env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}).kernels.large_cublas_workspace


@pytest.mark.parametrize(
    ("flags", "sharding"),
    [
        ({"use_distributed_optimizer": True}, "optim"),
        ({"use_megatron_fsdp": True}, "optim_grads_params"),
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}, "optim_grads"),
        ({"data_parallel_sharding_strategy": "optim_grads_params"}, "none"),
        ({"use_torch_fsdp2": True}, "optim_grads_params"),
    ],
)
def test_sharding(flags: dict[str, Any], sharding: str) -> None:
    """The strategy flag counts under Megatron-FSDP only, whose default is full sharding from 0.18 on."""
    assert read(**flags).user_layout.sharding == sharding


@pytest.mark.parametrize(
    ("flags", "vpp", "chunks"),
    [
        ({"num_layers_per_virtual_pipeline_stage": 3}, 2, (3,) * 8),
        ({"num_virtual_stages_per_pipeline_rank": 2}, 2, (3,) * 8),
        ({"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 5}, 1, (3, 8, 8, 5)),
        (
            {
                "num_layers": 30,
                "num_virtual_stages_per_pipeline_rank": 2,
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            2,
            (3, 4, 4, 4, 4, 4, 4, 3),
        ),
        ({"pipeline_model_parallel_layout": "Et*5|(t*6|)*2t*7L"}, 1, (5, 6, 6, 7)),
    ],
)
def test_pipeline_forms(flags: dict[str, Any], vpp: int, chunks: tuple[int, ...]) -> None:
    """Every way to place layers gives the chunks that megatron-core builds."""
    layout = read(pipeline_model_parallel_size=4, **flags).user_layout
    assert (layout.vpp, layout.num_layers_per_chunk) == (vpp, chunks)


def test_batches_before_the_last() -> None:
    """A step schedule gives every batch; the older ramp-up flag is obeyed up to 0.17 only."""
    schedule = read(step_batch_size_schedule="0:384 200B:768 400B:1152")
    assert (schedule.global_batch, schedule.rampup_batches) == (1152, (384, 768))
    flags = {**GPT, "global-batch-size": 64, "rampup-batch-size": "[16 16 1000]"}
    old = cases.PlanSettings(num_gpus=8, framework_version="0.15.0")
    job = cases.DIALECT.read(config_of(flags), overrides=(), settings=old)
    assert job.rampup_batches == (16, 32, 48)
    assert read(global_batch_size=64, rampup_batch_size="[16 16 1000]").rampup_batches == ()


def test_a_hybrid_pattern_gives_layers_and_chunks() -> None:
    """One letter per layer, | between chunks: kinds, depth, vpp and Mamba widths come from the pattern."""
    job = read(
        num_layers=None,
        hybrid_layer_pattern="M-M-|M*-|M-|M*",
        pipeline_model_parallel_size=2,
        script="pretrain_hybrid.py",
    )
    assert job.model.hybrid_layers[:4] == ("mamba", "mlp", "mamba", "mlp")
    assert (job.model.num_layers, job.user_layout.vpp) == (11, 2)
    assert job.user_layout.num_layers_per_chunk == (4, 3, 2, 2)
    assert job.model.mamba is not None and job.model.mamba.num_heads == 2 * 1024 // 64


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"script": "pretrain_vlm.py"}, "vision-language"),
        ({"model_provider": "llava_vlm"}, "multimodal"),
        ({"hybrid_attention_ratio": 0.1}, "hybrid"),
        ({"heterogeneous_layers_config_path": "x.json"}, "differ"),
        ({"experimental_attention_variant": "dsa"}, "experimental attention"),
        ({"tensor_parallel_num_weight_shards": 2}, "weight sharding"),
        ({"script": "run_text_generation_server.py"}, "no training script"),
        ({"skip_train": True}, "only evaluates"),
    ],
)
def test_other_runs_are_named_and_refused(flags: dict[str, Any], word: str) -> None:
    """A run that is not planned gives one sentence that names it."""
    with pytest.raises(BadInputError) as caught:
        read(**flags)
    assert caught.value.code == "NEST-M13" and word in caught.value.message


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ({"num_layers": None}, "NEST-M02"),
        ({"num_layers": "many"}, "NEST-M03"),
        ({"num_layers": 10**9}, "NEST-M03"),
        ({"hidden_dropout": "nan"}, "NEST-M03"),
        ({"bf16": "perhaps"}, "NEST-M03"),
        ({"tensor_model_parallel": 2}, "NEST-M04"),
        ({"micro_batch_sizes": 2}, "NEST-M04"),
        ({"hidden_size": 1000, "num_attention_heads": 48}, "NEST-M08"),
        ({"fp16": True}, "NEST-M09"),
        ({"num_virtual_stages_per_pipeline_rank": 2, "num_layers_per_virtual_pipeline_stage": 2}, "NEST-M10"),
        ({"pipeline_model_parallel_layout": "Et|tL"}, "NEST-M03"),
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "t|t"}, "NEST-M20"),
        ({"step_batch_size_schedule": "soon"}, "NEST-M03"),
        ({"moe_layer_freq": "__import__('os')", "num_experts": 8}, "NEST-M03"),
        ({"transformer_impl": "mine"}, "NEST-M03"),
        ({"tokenizer_type": "NullTokenizer"}, "NEST-M02"),
    ],
)
def test_bad_values_are_named(flags: dict[str, Any], code: str) -> None:
    """A missing, misspelt or meaningless value gives its code, never a traceback."""
    flags = {"pipeline_model_parallel_size": 3, **flags} if "layout" in str(flags) else flags
    with pytest.raises(BadInputError) as caught:
        read(**flags)
    assert caught.value.code == code


def test_the_world_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --gpus and WORLD_SIZE there is one sentence; NUM_NODES times GPUS_PER_NODE is enough."""
    for name in ("WORLD_SIZE", "NUM_NODES", "GPUS_PER_NODE", "SLURM_NNODES", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    open_world = cases.PlanSettings(framework_version=cases.VERSION)
    with pytest.raises(BadInputError) as caught:
        cases.DIALECT.read(config_of(GPT), overrides=(), settings=open_world)
    assert caught.value.code == "NEST-M11"
    config = config_of(GPT, environment={"NUM_NODES": 4, "GPUS_PER_NODE": 4})
    job = cases.DIALECT.read(config, overrides=(), settings=open_world)
    assert (job.num_gpus, job.gpus_per_node) == (16, 4)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("([0]*3+[1]*2)", [0, 0, 0, 1, 1]),
        ("[1,0]*2", [1, 0, 1, 0]),
        ("2", 2),
        ("[0]*99999999", None),
        ("[1]+1", None),
        ("f(1)", None),
        ("(" * 500, None),
    ],
)
def test_list_expressions(text: str, value: object) -> None:
    """Lists, sums and products are evaluated without eval; everything else is no expression."""
    assert list_expression(text) == value
