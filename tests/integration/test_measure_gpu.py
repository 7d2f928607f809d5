"""scripts/measure_gpu.py, reduced on a CPU: every part runs, and what it writes can be read back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nest_megatron.validation.records import build

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def measure(repository: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the script on the tiny Llama."""
    config = repository / "scripts" / "conf" / "megatron_llama_tiny.yaml"
    command = [sys.executable, str(repository / "scripts" / "measure_gpu.py"), str(config)]
    return subprocess.run(
        [*command, "--out", str(folder), *options], capture_output=True, text=True, timeout=600, check=False
    )


def test_the_reduced_run_writes_rates_and_records(repository: Path, tmp_path: Path) -> None:
    """Shapes are the job's, rates are positive, and each Megatron step left a record of its layer count."""
    pytest.importorskip("megatron.core")
    ended = measure(repository, tmp_path, "--reduced")
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "device.json").read_text())
    assert found["reduced"] is True
    assert found["skipped"] == []
    rows = [(row["operator"], row["n"], row["k"]) for row in found["gemm"]]
    assert ("mlp_down", 96, 256 // 8) in rows, "hidden 96, an eighth of the FFN width 256"
    assert all(row["seconds"] > 0 and row["flops_per_s"] > 0 for row in found["gemm"])
    assert {row["operator"] for row in found["memory_bound"]} == {"norm", "residual", "adam"}
    assert [row["pass"] for row in found["attention"]] == ["forward", "backward"]
    assert found["all_gather"] == [], "one process has nobody to gather from"
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("runs/*/run.json"))]
    assert [build(record).job.model.num_layers for record in records] == [1, 2]


def test_without_a_gpu_only_the_reduced_run_is_possible(repository: Path, tmp_path: Path) -> None:
    """The full run says what is missing and writes nothing."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    ended = measure(repository, tmp_path)
    assert ended.returncode == 2
    assert "no CUDA device" in ended.stderr
    assert not list(tmp_path.iterdir())
