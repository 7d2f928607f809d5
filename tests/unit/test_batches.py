"""A global batch that splits over no data parallel size: what is proposed is legal, and nothing nearer is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nest_megatron.cluster.load import load_cluster
from nest_megatron.dialects.launcher import LauncherDialect
from nest_megatron.errors import NoPlanError
from nest_megatron.planner.batches import batch_shortage
from nest_megatron.planner.freedom import apply_settings
from nest_megatron.planner.search import search
from nest_megatron.planner.space import enumerate_space
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.settings import PlanSettings
from tests.unit.nemo_files import stage

#: mixtral_8x22b as the launcher once shipped it: one sequence per step on 48 nodes (config_surface.md 4.1).
MIXTRAL_8X22B: dict[str, object] = {
    "trainer__num_nodes": 48,
    "model__num_layers": 56,
    "model__hidden_size": 6144,
    "model__ffn_hidden_size": 16384,
    "model__num_attention_heads": 48,
    "model__tensor_model_parallel_size": 8,
    "model__pipeline_model_parallel_size": 2,
    "model__virtual_pipeline_model_parallel_size": None,
    "model__expert_model_parallel_size": 1,
    "model__global_batch_size": 1,
}
SUBJECTS: dict[str, tuple[str, dict[str, object], dict[str, int]]] = {
    "mixtral_8x22b": ("mixtral/mixtral_8x7b", MIXTRAL_8X22B, {}),
    "falcon without model parallelism": ("falcon/falcon_7b", {}, {"pp": 1, "cp": 1}),
    "falcon with an odd batch": ("falcon/falcon_7b", {"model__global_batch_size": 200}, {"pp": 1, "cp": 1}),
}


def read(shared: Path, subject: str) -> TrainJob:
    """Return a job whose batch fits no layout."""
    name, changes, pins = SUBJECTS[subject]
    settings = PlanSettings(framework_version="2.0", pin=pins)
    config = stage(shared, name, **changes)
    return apply_settings(LauncherDialect().read(config, overrides=(), settings=settings), settings)


def legal(job: TrainJob, *, num_gpus: int | None = None, global_batch: int | None = None) -> bool:
    """Whether any layout is legal on another world or with another batch, which evaluation shares."""
    batch = global_batch or job.global_batch
    changed = replace(
        job,
        num_gpus=num_gpus or job.num_gpus,
        global_batch=batch,
        evaluation_batch=job.evaluation_batch and batch,
    )
    return len(enumerate_space(changed)) > 0


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_proposed_world_is_the_largest_that_works(shared: Path, subject: str) -> None:
    """Every larger world of whole nodes has no legal layout either (brute force over all of them)."""
    job = read(shared, subject)
    shortage = batch_shortage(job)
    assert shortage is not None and shortage.num_gpus is not None
    assert legal(job, num_gpus=shortage.num_gpus)
    larger = range(shortage.num_gpus + 8, job.num_gpus + 1, 8)
    assert not any(legal(job, num_gpus=world) for world in larger)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_proposed_batches_are_the_nearest_that_work(shared: Path, subject: str) -> None:
    """No batch between the proposed ones has a legal layout on the job's GPUs."""
    job = read(shared, subject)
    shortage = batch_shortage(job)
    assert shortage is not None and shortage.global_batches
    assert all(legal(job, global_batch=size) for size in shortage.global_batches)
    low = max((size for size in shortage.global_batches if size < job.global_batch), default=0)
    high = min(size for size in shortage.global_batches if size > job.global_batch)
    assert not any(legal(job, global_batch=size) for size in range(low + 1, high))
    assert shortage.smallest_dp <= high


def test_the_refusal_names_batch_ranks_and_ways_out(shared: Path) -> None:
    """The planner's error says that the batch is the reason, that it stays, and what would help."""
    job = read(shared, "falcon without model parallelism")
    with pytest.raises(NoPlanError) as caught:
        search(job, load_cluster("dgx-h100", num_gpus=job.num_gpus))
    assert caught.value.code == "NEST-P01"
    text = caught.value.render()
    assert "a global batch of 32 cannot be split evenly" in text
    assert "128 data parallel ranks" in text and "never changes the batch" in text
    assert {"32 GPUs", "a global batch of 128", "release the pin of pp"} <= set(caught.value.nearest)


def test_another_reason_is_not_blamed_on_the_batch(shared: Path) -> None:
    """Pins that no batch could serve give no advice about batches."""
    settings = PlanSettings(framework_version="2.0", pin={"tp": 8})
    job = LauncherDialect().read(stage(shared, "falcon/falcon_7b"), overrides=(), settings=settings)
    assert batch_shortage(apply_settings(job, settings)) is None
