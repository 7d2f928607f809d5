"""Writing layouts into NeMo configurations: round trips, minimal edits, version limits."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from nest_megatron.dialects.nemo import NemoDialect
from nest_megatron.dialects.nemo_layout import accounted_layers, uneven_layers
from nest_megatron.errors import BadInputError
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Overlap, Recompute
from nest_megatron.specs.settings import PlanSettings
from tests.unit.nemo_files import GPT3_175B, GPT_24, GPT_123, LLAMA_70B, MIXTRAL, SFT, load

GPUS = 256
DIALECT = NemoDialect()
SFT_SHAPES = {
    "model__num_layers": 32,
    "model__hidden_size": 4096,
    "model__num_attention_heads": 32,
    "model__mcore_gpt": True,
    "model__megatron_amp_O2": True,
}
#: File, version and changes: each release's way to write, both optimizers, a plain one, and references.
SUBJECTS: tuple[tuple[str, str, dict[str, object]], ...] = (
    (GPT3_175B, "1.23", {}),
    (LLAMA_70B, "2.2", {}),
    (LLAMA_70B, "2.3", {"model__virtual_pipeline_model_parallel_size": None}),
    (MIXTRAL, "2.0", {}),
    (MIXTRAL, "2.3", {"model__num_layers": 38, "model__pipeline_model_parallel_size": 1}),
    (GPT_24, "2.4", {"model__num_layers": 30, "model__transformer_engine": True}),
    (GPT_123, "1.23", {"model__num_layers": 24}),
    (SFT, "2.0", SFT_SHAPES),
)
DEGREES = (1, 2, 4, 8)


def read(config: DictConfig, version: str) -> TrainJob:
    """Read with a fixed world, so that only the layout keys differ."""
    return DIALECT.read(config, overrides=(), settings=PlanSettings(framework_version=version, num_gpus=GPUS))


def apply(config: DictConfig, edits: dict[str, object]) -> DictConfig:
    """Return a copy of the configuration with the edits, as the Hydra callback makes them."""
    result = copy.deepcopy(config)
    for key, value in edits.items():
        OmegaConf.update(result, key, value, force_add=True)
    return result


def splits(job: TrainJob, pp: int, vpp: int) -> list[tuple[int, ...]]:
    """Return the layer splits that this job's release can express."""
    num_layers, able = job.model.num_layers, job.capabilities
    found = []
    if num_layers % (pp * vpp) == 0:
        found.append((num_layers // (pp * vpp),) * (pp * vpp))
    if able.account_embedding_and_loss and pp > 1 and (num_layers + 2) % (pp * vpp) == 0:
        found.append(accounted_layers(pp=pp, vpp=vpp, num_layers=num_layers))
    if able.uneven_ends and pp > 1:
        for first in (vpp, 2 * vpp, 3 * vpp):
            for last in (None, vpp, 4 * vpp):
                chunks = uneven_layers(pp=pp, vpp=vpp, num_layers=num_layers, first=first, last=last)
                stages = pp - 1 if last is None else pp - 2
                if (pp > 2 or last is None) and sum(chunks) == num_layers and min(chunks) > 0 and stages > 0:
                    found.append(chunks)
    return found


@st.composite
def layouts(draw: st.DrawFn, job: TrainJob) -> Layout:
    """Draw a layout that the job's release can express."""
    able = job.capabilities
    tp = draw(st.sampled_from(DEGREES))
    cp = draw(st.sampled_from(DEGREES[:3] if able.context_parallel else (1,)))
    vpps = (1, 2, 3, 4) if able.virtual_pipeline else (1,)
    pipelines = [(p, v) for p in DEGREES for v in vpps if (p > 1 or v == 1) and splits(job, p, v)]
    pp, vpp = draw(st.sampled_from(pipelines))
    ep = draw(st.sampled_from(DEGREES if able.expert_parallel and job.model.moe else (1,)))
    sharding = draw(st.sampled_from(able.shardings))
    sequence_parallel = tp > 1 and draw(st.booleans())
    o2_sharded = sharding == "optim" and "overlap" not in job.not_planned
    grad = o2_sharded and draw(st.booleans())
    recompute = draw(
        st.sampled_from(
            [
                Recompute(),
                Recompute(granularity="selective", modules=able.recompute_modules),
                Recompute(granularity="full", method="uniform", num_layers=1),
                Recompute(granularity="full", method="block", num_layers=2),
            ]
        )
    )
    instances = draw(st.sampled_from((1, 2))) if able.optimizer_instances and sharding == "optim" else 1
    return Layout(
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=tp,
        dp=max(1, GPUS // (tp * pp * cp)),
        edp=max(1, GPUS // (tp * pp * ep)),
        sequence_parallel=sequence_parallel,
        micro_batch=draw(st.sampled_from(DEGREES)),
        global_batch=job.global_batch,
        num_layers_per_chunk=draw(st.sampled_from(splits(job, pp, vpp))),
        sharding=sharding,
        num_optimizer_instances=instances,
        recompute=recompute,
        overlap=Overlap(
            grad_reduce=grad,
            param_gather=grad and draw(st.booleans()),
            tp_comm=sequence_parallel and draw(st.booleans()),
            p2p=vpp > 1 and draw(st.booleans()),
        ),
        order=draw(st.sampled_from(able.orders)),
    )


def without_derived(layout: Layout) -> Layout:
    """Blank what a plain optimizer derives from the other axes: whether its all-reduce is asynchronous."""
    if layout.sharding == "optim":
        return layout
    return replace(layout, overlap=replace(layout.overlap, grad_reduce=False))


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: f"{Path(s[0]).stem}-{s[1]}")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_written_layout_is_read_back(
    shared: Path, subject: tuple[str, str, dict[str, object]], data: st.DataObject
) -> None:
    """read(apply(write(layout))) asks for the layout; a second write has nothing left to do."""
    name, version, changes = subject
    config = load(shared, name, **changes)
    job = read(config, version)
    layout = data.draw(layouts(job))
    edited = apply(config, DIALECT.write(config, job, layout))
    again = read(edited, version)
    assert without_derived(again.user_layout) == without_derived(layout)
    assert DIALECT.write(edited, again, again.user_layout) == {}


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda s: f"{Path(s[0]).stem}-{s[1]}")
def test_the_users_own_layout_needs_no_edit(
    shared: Path, subject: tuple[str, str, dict[str, object]]
) -> None:
    """Writing back what was read changes nothing, so a kept plan leaves the configuration alone."""
    name, version, changes = subject
    config = load(shared, name, **changes)
    job = read(config, version)
    assert DIALECT.write(config, job, job.user_layout) == {}


def test_only_the_changed_axis_is_edited_and_interpolations_follow(shared: Path) -> None:
    """Changing TP edits one key; model_parallel_size stays an interpolation and gives the new product."""
    config = load(shared, GPT_24)
    job = read(config, "2.2")
    layout = replace(job.user_layout, tp=4, etp=4, dp=64, edp=64)
    edits = DIALECT.write(config, job, layout)
    assert edits == {"model.tensor_model_parallel_size": 4}
    OmegaConf.register_new_resolver("multiply", lambda x, y: x * y)
    try:
        assert apply(config, edits).exp_manager.checkpoint_callback_params.model_parallel_size == 4
    finally:
        OmegaConf.clear_resolver("multiply")


def test_a_stale_literal_product_is_edited(shared: Path) -> None:
    """The Mixtral recipe writes model_parallel_size: 4 by hand; it follows TP times PP."""
    config = load(shared, MIXTRAL)
    job = read(config, "2.2")
    edits = DIALECT.write(config, job, replace(job.user_layout, tp=2, etp=2, dp=32, edp=4))
    assert edits["exp_manager.checkpoint_callback_params.model_parallel_size"] == 8


def test_a_reference_is_edited_at_its_source(shared: Path) -> None:
    """NeMo-Aligner's micro-batch is edited in data.train_ds, so that validation follows."""
    config = load(shared, SFT, **SFT_SHAPES)
    job = read(config, "2.0")
    edits = DIALECT.write(config, job, replace(job.user_layout, micro_batch=2))
    assert edits == {"model.data.train_ds.micro_batch_size": 2}
    assert apply(config, edits).model.data.validation_ds.micro_batch_size == 2


def test_keys_that_share_a_value_are_parted_when_their_targets_differ(shared: Path) -> None:
    """PP given as a reference to TP becomes a literal when only TP changes."""
    config = load(shared, GPT_24, model__pipeline_model_parallel_size="${.tensor_model_parallel_size}")
    job = read(config, "2.2")
    edits = DIALECT.write(config, job, replace(job.user_layout, tp=4, etp=4, dp=64, edp=64))
    assert edits == {"model.tensor_model_parallel_size": 4, "model.pipeline_model_parallel_size": 1}


def test_turning_vpp_off_writes_null_and_settles_the_p2p_flags(shared: Path) -> None:
    """Without virtual stages the send and receive flags go back to batched, not overlapped."""
    config = load(shared, GPT3_175B)
    job = read(config, "1.23")
    layout = replace(
        job.user_layout,
        vpp=1,
        num_layers_per_chunk=(12,) * 8,
        overlap=replace(job.user_layout.overlap, p2p=False),
    )
    assert DIALECT.write(config, job, layout) == {
        "model.virtual_pipeline_model_parallel_size": None,
        "model.overlap_p2p_comm": False,
        "model.batch_p2p_comm": True,
    }


def test_a_plain_optimizer_becomes_the_releases_distributed_one(shared: Path) -> None:
    """Sharding the optimizer writes Apex' name before 2.0 and megatron-core's from 2.0 on."""
    expected = {"1.23": "distributed_fused_adam", "2.0": "mcore_distributed_optim"}
    for version, name in expected.items():
        config = load(shared, GPT_24)
        job = read(config, version)
        edits = DIALECT.write(config, job, replace(job.user_layout, sharding="optim"))
        assert edits["model.optim.name"] == name


@pytest.mark.parametrize(
    ("version", "change", "named"),
    [
        ("2.4", {"vpp": 2, "num_layers_per_chunk": (10,) * 8}, "vpp"),
        ("1.23", {"num_layers_per_chunk": (18, 21, 21, 20), "vpp": 1}, "num_layers_per_chunk"),
        ("2.3", {"num_layers_per_chunk": (18, 22, 20, 20), "vpp": 1}, "num_layers_per_chunk"),
        ("2.3", {"etp": 1}, "etp"),
        ("2.0", {"order": "tp-cp-ep-pp-dp"}, "order"),
        ("1.23", {"num_optimizer_instances": 2}, "num_optimizer_instances"),
        ("2.3", {"sharding": "optim_grads"}, "sharding"),
        ("2.3", {"global_batch": 4096}, "global_batch"),
        ("2.3", {"overlap": Overlap(expert_all_to_all=True)}, "expert_all_to_all"),
    ],
)
def test_what_a_release_cannot_express_is_refused(
    shared: Path, version: str, change: dict[str, object], named: str
) -> None:
    """A layout without keys in this release is bad input that names the axis, never a partial edit."""
    config = load(shared, LLAMA_70B, model__virtual_pipeline_model_parallel_size=None)
    job = read(config, version)
    with pytest.raises(BadInputError, match=named):
        DIALECT.write(config, job, replace(job.user_layout, **change))
