"""Every run of Megatron-LM's own test cases that the dialect reads is legal by our rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nest_megatron import rules
from nest_megatron.specs.job import TrainJob
from tests.unit import megatron_cases as cases

#: Test case -> the only rule it may break, and why the run was possible all the same.
KNOWN = {
    "gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split": (
        "NEST-RL06",
        "the records lost --account-for-embedding/loss-in-pipeline-split, which place the layers",
    ),
}


def jobs(shared: Path) -> list[tuple[dict, TrainJob]]:
    """Return the records that read, with their jobs."""
    return [(record, job) for record, job in cases.outcomes(shared) if isinstance(job, TrainJob)]


def known(name: str) -> str | None:
    """Return the rule that the named test case may break."""
    return next((rule for case, (rule, _) in KNOWN.items() if case in name), None)


def test_published_runs_are_legal(shared: Path) -> None:
    """A run that Megatron-LM's developers executed breaks no rule, but where its record lost a flag."""
    found = jobs(shared)
    assert len(found) >= 250
    wrong, excused = [], set()
    for record, job in found:
        name = record["model"]["name"]
        codes = {violation.code for violation in rules.check(job, job.user_layout)}
        if codes == {known(name)}:
            excused.add(known(name))
        elif codes:
            wrong.append((record["id"], name, codes))
    assert wrong == []
    assert excused == {rule for rule, _ in KNOWN.values()}


@pytest.mark.parametrize("group", [3, 4, 6])
def test_published_groups_need_their_size(shared: Path, group: int) -> None:
    """The runs with groups of five micro-batches are illegal with groups that do not fit theirs."""
    tuned = [job for _, job in jobs(shared) if job.user_layout.micro_batch_group]
    assert {job.user_layout.micro_batch_group for job in tuned} == {5}
    for job in tuned:
        layout = replace(job.user_layout, micro_batch_group=group)
        fits = group == 6 and layout.num_micro_batches == 10
        assert (rules.check(job, layout) == ()) == fits


def test_expert_groups_count_without_experts(shared: Path) -> None:
    """The dense runs with pp before dp are legal through --expert-tensor-parallel-size 4 only."""
    found = [
        job for record, job in jobs(shared) if "etp4" in record["model"]["name"] and job.model.moe is None
    ]
    swapped = [job for job in found if job.user_layout.order != "tp-cp-ep-dp-pp"]
    assert len(swapped) == 8
    for job in swapped:
        layout = replace(job.user_layout, etp=2, edp=2)
        assert {v.code for v in rules.check(job, layout)} == {"NEST-RG08"}
