"""Writing layouts into Megatron-LM: round trips over published runs, minimal edits, release limits."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from nest_megatron.dialects.megatron_lm import config_of, read_argv, write_argv
from nest_megatron.dialects.nemo_layout import accounted_layers, uneven_layers
from nest_megatron.errors import BadInputError
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Overlap, Recompute
from tests.unit import megatron_cases as cases

COMMAND = (
    "torchrun --nproc_per_node 8 --nnodes=8 pretrain_gpt.py --num-layers 48 --hidden-size 4096 "
    "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --bf16 "
    "--tensor-model-parallel-size=4 --pipeline-model-parallel-size 2 --sequence-parallel "
    "--num-layers-per-virtual-pipeline-stage 6 --micro-batch-size 2 --global-batch-size 512 "
    "--use-distributed-optimizer --overlap-grad-reduce --lr 1e-4 --data-path /data/x"
)
ARGV = COMMAND.split()


def apply(config: DictConfig, edits: dict[str, Any]) -> DictConfig:
    """Return a copy of the configuration with the edits, as a plan is applied."""
    result = copy.deepcopy(config)
    for key, value in edits.items():
        OmegaConf.update(result, key, value, merge=False, force_add=True)
    return result


def split(job: TrainJob, pp: int, vpp: int, rng: random.Random) -> tuple[int, ...] | None:
    """Return layers per chunk in one of the forms the job's release can write."""
    num_layers, able = job.model.num_layers, job.capabilities
    forms = []
    if num_layers % (pp * vpp) == 0:
        forms.append((num_layers // (pp * vpp),) * (pp * vpp))
    if able.account_embedding_and_loss and pp > 1 and (num_layers + 2) % (pp * vpp) == 0:
        forms.append(accounted_layers(pp=pp, vpp=vpp, num_layers=num_layers))
    if able.uneven_ends and pp > 1:
        forms.append(uneven_layers(pp=pp, vpp=vpp, num_layers=num_layers, first=vpp, last=None))
    if able.layout_string:
        cuts = sorted(rng.randint(0, num_layers) for _ in range(pp * vpp - 1))
        forms.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True)))
    forms = [form for form in forms if sum(form) == num_layers and min(form) >= 0]
    return rng.choice(forms) if forms else None


def random_layout(job: TrainJob, rng: random.Random) -> Layout | None:
    """Return a layout that the job's release has flags for, legal or not."""
    able, moe = job.capabilities, job.model.moe
    tp, pp, cp = (rng.choice((1, 2, 4)) for _ in range(3))
    vpp = rng.choice((1, 2, 3)) if pp > 1 and able.virtual_pipeline else 1
    chunks = split(job, pp, vpp, rng)
    if chunks is None:
        return None
    ep = rng.choice((1, 2, 4)) if moe else 1
    etp = rng.choice((1, tp)) if moe else tp
    sp = tp > 1 and rng.random() < 0.5
    sharding = rng.choice(able.shardings)
    reduce = rng.random() < 0.5
    recompute = rng.choice(
        (
            Recompute(),
            Recompute(granularity="full", method="block", num_layers=2),
            Recompute(granularity="full", method="uniform", num_layers=1),
            Recompute(granularity="selective", modules=able.recompute_modules[:2]),
            Recompute(granularity="selective", modules=("core_attn",)),
        )
    )
    return Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp if able.context_parallel else 1,
        ep=ep,
        etp=etp,
        dp=max(1, job.num_gpus // (tp * pp * (cp if able.context_parallel else 1))),
        edp=max(1, job.num_gpus // (etp * pp * ep)),
        sequence_parallel=sp,
        micro_batch=rng.choice((1, 2, 4)),
        global_batch=job.global_batch,
        num_layers_per_chunk=chunks,
        sharding=sharding,
        num_optimizer_instances=rng.choice((1, 2)) if sharding != "none" else 1,
        recompute=recompute,
        overlap=Overlap(
            grad_reduce=reduce,
            param_gather=reduce and sharding != "none",
            tp_comm=sp and rng.random() < 0.5,
            p2p=vpp > 1 and rng.random() < 0.7,
            expert_all_to_all=ep > 1 and rng.random() < 0.5,
        ),
        order=rng.choice(able.orders),
    )


def round_trips(config: DictConfig, job: TrainJob, seed: int, *, times: int) -> int:
    """Write seeded layouts and read each back; return how many were written."""
    rng, written = random.Random(seed), 0
    for _ in range(times):
        layout = random_layout(job, rng)
        if layout is None:
            continue
        edits = cases.DIALECT.write(config, job, layout)
        again = cases.DIALECT.read(apply(config, edits), overrides=(), settings=cases.settings(job.num_gpus))
        assert again.user_layout == layout, edits
        assert replace(again.model, name="") == replace(job.model, name="")
        assert again.global_batch == job.global_batch and again.recipe == job.recipe
        written += 1
    return written


@pytest.mark.parametrize("name", cases.FILES)
def test_round_trip_over_public_files(shared: Path, name: str) -> None:
    """Any layout written into a public file reads back, model, batch and recipe unchanged."""
    config = cases.load(shared, name)
    job = cases.DIALECT.read(config, overrides=(), settings=cases.settings(cases.FILES[name]))
    assert round_trips(config, job, seed=len(name), times=8) >= 7


def test_round_trip_over_published_cases(shared: Path) -> None:
    """The same over 40 distinct published argument sets: dense, MoE, hybrid, BERT, FSDP, layout strings."""
    distinct: dict[str, tuple[DictConfig, TrainJob]] = {}
    for record, job in cases.outcomes(shared):
        if isinstance(job, TrainJob) and sum(job.user_layout.num_layers_per_chunk) == job.model.num_layers:
            distinct.setdefault(record["model"]["name"], (cases.config(record), job))
    names = sorted(distinct)
    chosen = random.Random(40).sample(names, 40)
    assert sum(round_trips(*distinct[name], seed=i, times=1) for i, name in enumerate(chosen)) >= 36


def test_the_users_own_layout_needs_no_edit(shared: Path) -> None:
    """Writing what a run already asks for changes nothing, however it says it."""
    seen = set()
    for record, job in cases.outcomes(shared):
        name = record["model"]["name"]
        if isinstance(job, TrainJob) and name not in seen:
            seen.add(name)
            assert cases.DIALECT.write(cases.config(record), job, job.user_layout) == {}, record["id"]


def job_of(argv: list[str]) -> TrainJob:
    """Return the job of a command line on its own 64 GPUs."""
    return read_argv(argv, environment={}, settings=cases.PlanSettings(framework_version=cases.VERSION))


def test_a_command_line_is_rewritten_in_place() -> None:
    """Changed flags keep their place and spelling, removed ones vanish, new ones are appended."""
    job = job_of(ARGV)
    assert (job.num_gpus, job.user_layout.vpp) == (64, 4)
    layout = replace(
        job.user_layout,
        tp=2,
        etp=2,
        pp=1,
        vpp=1,
        dp=32,
        edp=32,
        micro_batch=1,
        num_layers_per_chunk=(48,),
        overlap=replace(job.user_layout.overlap, param_gather=True, p2p=False),
    )
    argv = write_argv(job, layout, ARGV)
    assert job_of(argv).user_layout == layout
    expected = COMMAND
    for old, new in (
        ("--tensor-model-parallel-size=4", "--tensor-model-parallel-size=2"),
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 1"),
        ("--num-layers-per-virtual-pipeline-stage 6 --micro-batch-size 2", "--micro-batch-size 1"),
    ):
        expected = expected.replace(old, new)
    assert " ".join(argv) == f"{expected} --overlap-param-gather"


def test_the_default_batch_is_pinned_by_a_plan() -> None:
    """Without --global-batch-size it follows micro-batch and dp, so a plan that changes them writes it."""
    argv = [word for word in ARGV if word not in ("--global-batch-size", "512")]
    job = job_of(argv)
    assert job.global_batch == 2 * 8
    layout = replace(job.user_layout, micro_batch=1)
    assert "--global-batch-size 16" in " ".join(write_argv(job, layout, argv))


def test_flags_tuned_for_the_old_layout_go_with_it() -> None:
    """Hierarchical context groups and tuned overlap files do not survive the sizes they are made for."""
    tuned = (
        "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "
        "--tp-comm-overlap --tp-comm-overlap-cfg tuned.yaml "
        "--microbatch-group-size-per-virtual-pipeline-stage 3"
    )
    argv = [*ARGV, *tuned.split()]
    job = job_of(argv)
    assert job.user_layout.micro_batch_group == 3
    layout = replace(job.user_layout, cp=2, dp=4, edp=8, micro_batch=1, micro_batch_group=0)
    text = " ".join(write_argv(job, layout, argv))
    for flag in ("hierarchical", "cp-comm-type", "tuned.yaml", "microbatch-group-size"):
        assert flag not in text
    assert "--tp-comm-overlap" in text


def test_fsdp_is_left_with_all_its_flags() -> None:
    """Leaving Megatron-FSDP removes its flags and its checkpoint format."""
    flags = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --ckpt-format fsdp_dtensor"
    argv = [*ARGV, *flags.split()]
    job = job_of(argv)
    assert job.user_layout.sharding == "optim_grads"
    text = " ".join(write_argv(job, replace(job.user_layout, sharding="optim"), argv))
    assert text == COMMAND


def test_old_releases_refuse_what_they_have_no_flag_for() -> None:
    """A split that needs a layout string, and expert TP of its own, are refused before 0.13 and 0.10."""
    flags = {"num-layers": 24, "hidden-size": 1024, "num-attention-heads": 16, "seq-length": 1024}
    config = config_of({**flags, "micro-batch-size": 1, "num-experts": 8, "global-batch-size": 64})
    for version, change in (
        ("0.12.0", {"pp": 4, "num_layers_per_chunk": (7, 5, 7, 5)}),
        ("0.9.0", {"tp": 2, "etp": 1}),
        ("0.9.0", {"num_optimizer_instances": 2, "sharding": "optim"}),
    ):
        settings = cases.PlanSettings(num_gpus=8, framework_version=version)
        job = cases.DIALECT.read(config, overrides=(), settings=settings)
        with pytest.raises(BadInputError) as caught:
            cases.DIALECT.write(config, job, replace(job.user_layout, **change))
        assert caught.value.code == "NEST-M14"


def test_yaml_cfg_files_round_trip(tmp_path: Path) -> None:
    """A --yaml-cfg file reads through its two sections, by itself and named on a command line."""
    plain = {
        "language_model": {
            "num_layers": 24,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_query_groups": 4,
            "activation_func": "swiglu",
            "add_bias_linear": False,
            "recompute_granularity": None,
        },
        "model_parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True},
        "micro_batch_size": 2,
        "global_batch_size": 64,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "position_embedding_type": "rope",
        "use_distributed_optimizer": True,
        "num_layers_per_virtual_pipeline_stage": None,
    }
    config = OmegaConf.create(plain)
    assert cases.DIALECT.detect(config)
    job = cases.DIALECT.read(config, overrides=(), settings=cases.settings(16))
    model = job.model
    assert (model.ffn_hidden_size, model.num_query_groups, model.gated_mlp) == (2688, 4, True)
    assert not model.linear_bias and not model.learned_positions
    layout = replace(
        job.user_layout,
        tp=4,
        etp=4,
        dp=4,
        edp=4,
        recompute=Recompute(granularity="selective", modules=("core_attn",)),
    )
    edits = cases.DIALECT.write(config, job, layout)
    assert edits == {
        "model_parallel.tensor_model_parallel_size": 4,
        "language_model.recompute_granularity": "selective",
    }
    again = cases.DIALECT.read(apply(config, edits), overrides=(), settings=cases.settings(16))
    assert again.user_layout == layout
    path = tmp_path / "run.yaml"
    OmegaConf.save(config, path)
    named = read_argv(
        ["pretrain_gpt.py", "--yaml-cfg", str(path)], environment={}, settings=cases.settings(16)
    )
    assert named.user_layout == job.user_layout
