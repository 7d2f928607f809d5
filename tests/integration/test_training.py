"""scripts/train.py trains what ``+nest=auto`` wrote, in forked ranks and under torchrun."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.launch.processes import PER_PROCESS_VARIABLES
from nest_megatron.specs.plan import Plan
from nest_megatron.validation.records import build

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.xdist_group("training")]

TINY = ("--config-name", "megatron_llama_tiny", "+nest=auto", "+nest.cluster=cpu-node")


def run(
    repository: Path, folder: Path, *arguments: str, launcher: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the training app in ``folder``, without any rank of this process."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in PER_PROCESS_VARIABLES and not key.startswith(("NEST_", "SLURM_", "TORCHELASTIC_"))
    }
    clean |= {"NEST_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *launcher, str(repository / "scripts" / "train.py"), *arguments]
    return subprocess.run(
        command, cwd=folder, env=clean, capture_output=True, text=True, timeout=600, check=False
    )


def losses(text: str) -> list[float]:
    """Return the losses that rank 0 printed."""
    return [float(found) for found in re.findall(r"^train: step .*loss ([\d.]+)", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def trained(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Plan, dict[str, Any]]:
    """Four forked ranks with pipeline and tensor parallelism: output, plan and run record."""
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("train")
    pins = ("+nest.pin.tp=2", "+nest.pin.pp=2", "trainer.devices=4", "trainer.max_steps=6")
    ended = run(repository, folder, *TINY, *pins)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (plan,) = folder.glob("cache/*/plan.json")
    (record,) = folder.glob("outputs/*/*/run.json")
    return ended.stdout, Plan.load(plan), json.loads(record.read_text())


def test_forked_ranks_train_the_plan(trained: tuple[str, Plan, dict[str, Any]]) -> None:
    """The report comes first, then the steps; the loss falls and the groups were compared with the plan."""
    text, plan, _ = trained
    assert text.startswith(plan.headline)
    assert (plan.layout.tp, plan.layout.pp, plan.layout.world) == (2, 2, 4)
    assert f"are those of the plan ({plan.layout.describe()})" in text
    found = losses(text)
    assert len(found) == 6
    assert found[-1] < found[0] - 0.5


def test_the_record_describes_the_run(trained: tuple[str, Plan, dict[str, Any]]) -> None:
    """Every degree of the plan, its digest, and a time and memory that were measured."""
    _, plan, record = trained
    layout = plan.layout
    for key in ("tp", "pp", "vpp", "cp", "dp", "ep", "micro_batch", "global_batch"):
        assert record[key] == getattr(layout, key), key
    assert record["plan_digest"] == plan.provenance["plan_digest"]
    assert 0 < record["measured"]["step_time_s"] < 600
    assert record["peak_resident_bytes"] > 2**26
    assert record["visible_bytes"] is record["peak_reserved_bytes"] is None


def test_the_record_is_read_back_as_the_same_job(trained: tuple[str, Plan, dict[str, Any]]) -> None:
    """Calibration and validation rebuild the layout that ran, layer split and overlap included."""
    _, plan, record = trained
    built = build(record)
    assert built.layout == plan.layout
    assert built.cluster.accelerator.name == "cpu-core"
    assert built.job.recipe.compute_dtype == "fp32"


def test_a_run_calibrates_the_next_plan_of_its_configuration(
    repository: Path, tmp_path: Path, trained: tuple[str, Plan, dict[str, Any]]
) -> None:
    """What `calibrate step` learns from the record of a NeMo-style run reaches a plan of the same file."""
    record = tmp_path / "run.json"
    record.write_text(json.dumps(trained[2]))
    environment = {**os.environ, "NEST_CALIBRATION": str(tmp_path / "store.json")}
    command = [sys.executable, "-m", "nest_megatron.cli"]
    config = str(repository / "scripts" / "conf" / "megatron_llama_tiny.yaml")
    told = []
    for arguments in (
        ["calibrate", "step", str(record)],
        ["plan", "--config", config, "--cluster", "cpu-node", "--json", "-", "trainer.devices=4"],
    ):
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    plan = json.loads(told[1])
    assert plan["provenance"]["calibration"].startswith(f"step time from {trained[2]['id']}: x ")


def test_torchrun_ranks_train_the_plan(
    repository: Path, tmp_path: Path, trained: tuple[str, Plan, dict[str, Any]]
) -> None:
    """Two processes of torchrun: one plan, and the loss curve that four forked ranks of another plan give."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    few = ("trainer.devices=2", "trainer.max_steps=2", "+nest.pin.tp=2")
    ended = run(repository, tmp_path, *TINY, *few, launcher=launcher)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert losses(ended.stdout) == pytest.approx(losses(trained[0])[:2], rel=1e-4)


def test_a_gpu_configuration_without_a_launcher_is_printed(repository: Path, tmp_path: Path) -> None:
    """Eight GPUs and one process: planned and shown, not trained, and said so."""
    ended = run(repository, tmp_path, "--config-name", "megatron_llama3_8b")
    assert ended.returncode == 0, ended.stderr
    assert "start them with torchrun or srun" in ended.stderr
    assert ended.stdout.startswith("name: megatron_llama3_8b")
    assert not losses(ended.stdout)


@pytest.mark.parametrize(
    ("arguments", "environment", "code"),
    [
        (("trainer.devices=1", "--config-name", "megatron_llama3_8b"), {}, "NEST-T04"),
        (TINY, {"RANK": "0", "WORLD_SIZE": "4"}, "NEST-T01"),
        ((*TINY[:2], "+model.fp8=true"), {}, "NEST-T01"),
        ((*TINY, "trainer.precision=bf16"), {}, "NEST-A01"),
    ],
    ids=["no CUDA", "another world", "fp8", "bf16 on a CPU"],
)
def test_what_cannot_be_trained_is_refused(
    repository: Path, tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], code: str
) -> None:
    """Bad input ends with a code and without a traceback."""
    ended = run(repository, tmp_path, *arguments, **environment)
    assert ended.returncode in (1, 2)
    assert code in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_stand_in_for_cuda_keeps_away_from_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA is available nothing of torch is replaced."""
    torch = pytest.importorskip("torch")
    from scripts.training import cpu

    names = ("zeros", "empty", "tensor")
    before = [getattr(torch, name) for name in names]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.activate() is False
    assert [getattr(torch, name) for name in names] == before
    assert not hasattr(torch, "_nest_cpu_training")
