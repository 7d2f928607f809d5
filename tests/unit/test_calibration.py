"""Calibration from one measured run: what is learned, where it is kept, and that every plan says so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nest_megatron.calibration.memory import calibrate_memory
from nest_megatron.calibration.store import (
    MemoryCalibration,
    Store,
    apply,
    key_of,
    load_store,
    remember_memory,
)
from nest_megatron.cli import main
from nest_megatron.cluster.load import load_cluster
from nest_megatron.errors import BadInputError
from nest_megatron.pipeline import plan_config
from nest_megatron.specs.settings import PlanSettings
from nest_megatron.units import GIB
from tests.builders import make_job
from tests.published_runs import PUBLIC_B200

#: The public SimuMax run by its memory: 66.55 GiB allocated.
RUN = PUBLIC_B200 | {
    "measured": {"peak_mem_gb": 66.55, "mem_scope": "max allocated over ranks"},
    "peak_reserved_bytes": round(70.88 * GIB),
}


def write(folder: Path, record: dict[str, object]) -> Path:
    """Return a file with one run record."""
    path = folder / "run.json"
    path.write_text(json.dumps(record))
    return path


def test_one_run_is_learned_and_stored(store: Path, tmp_path: Path) -> None:
    """The ratio of reserved to allocated memory is the run's, and the allocated peak was right within 3 %."""
    learned = calibrate_memory(write(tmp_path, RUN))
    assert learned.entry.reserved_ratio == pytest.approx(70.88 / 66.55)
    assert abs(learned.entry.allocated_ratio - 1) < 0.03
    assert load_store().memory == {learned.key: learned.entry}


def test_calibrated_device_memory_reproduces_the_run(store: Path, tmp_path: Path) -> None:
    """With the entry, factor x predicted equals what the run reserved."""
    learned = calibrate_memory(write(tmp_path, RUN))
    job = make_job()
    cluster = load_cluster("dgx-b200", num_gpus=64)
    job = dataclasses.replace(job, profile=dataclasses.replace(job.profile, name="megatron-core"))
    assert key_of(job, cluster) == learned.key
    calibrated, said = apply(job, cluster, load_store())
    reserved = calibrated.profile.device_factor * learned.predicted_allocated_bytes
    assert reserved == pytest.approx(70.88 * GIB, rel=1e-6)
    assert "public-b200" in said


def test_plans_say_which_calibration_they_used(store: Path, repository: Path) -> None:
    """A stored entry is named in the plan of its machine and stack, not in others, and can be ignored."""
    entry = MemoryCalibration(
        allocated_ratio=1.02, reserved_ratio=1.05, run="run-7", measured_allocated_bytes=10 * GIB
    )
    remember_memory("h100-sxm-80gb / nemo", entry)
    config = OmegaConf.load(repository / "scripts" / "conf" / "megatron_llama3_8b.yaml")

    def calibration(**changes: object) -> str:
        settings = PlanSettings(**{"cluster": "dgx-h100", **changes})
        return str(plan_config(config, settings=settings).provenance["calibration"])

    assert "run-7" in calibration()
    assert calibration(cluster="dgx-a100-80") == "none"
    assert calibration(calibration=False) == "off"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peak_reserved_bytes": None}, "peak_reserved_bytes"),
        ({"peak_reserved_bytes": 5}, "not below"),
        ({"measured": {}}, "no measured peak"),
        ({"seq_len": None}, "seq_len is not printed"),
        ({"accelerator": "abacus"}, "abacus"),
        ({"framework": "unheard of"}, "unheard of"),
    ],
)
def test_a_useless_run_is_refused(store: Path, tmp_path: Path, change: dict[str, object], words: str) -> None:
    """A record without the figures, or that cannot be predicted, is bad input and leaves the store alone."""
    with pytest.raises(BadInputError, match=words):
        calibrate_memory(write(tmp_path, RUN | change))
    assert not store.exists()


def test_a_broken_store_is_reported(store: Path, tmp_path: Path) -> None:
    """A store that is not ours stops planning with its path, instead of being ignored."""
    store.write_text('{"schema": 1, "memory": {"x": {"allocated_ratio": "a"}}}')
    with pytest.raises(BadInputError, match=str(store)):
        load_store()


def test_the_store_round_trips(store: Path) -> None:
    """Writing and reading a store gives it back, and its digest changes with its content."""
    entry = MemoryCalibration(allocated_ratio=1.0, reserved_ratio=1.1, run="a", measured_allocated_bytes=1)
    remember_memory("x / y", entry)
    assert load_store() == Store(memory={"x / y": entry})
    assert load_store().digest != Store(memory={}).digest


def test_the_command_prints_and_stores(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`nest-megatron calibrate memory RUN.json` exits 0 and says where the entry went; bad input exits 2."""
    assert main(["calibrate", "memory", str(write(tmp_path, RUN))]) == 0
    assert str(store) in capsys.readouterr().out
    assert main(["calibrate", "memory", str(tmp_path / "absent.json")]) == 2
