"""The calibration store: one JSON file with what measured runs taught about machines and software stacks.

``NEST_CALIBRATION`` names the file; without it the user's data folder holds it.  Every plan says which
entries it used, by digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs
from filelock import FileLock

from nest_megatron.errors import BadInputError
from nest_megatron.launch.publish import write_atomically
from nest_megatron.specs import codec
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.scale import StepScale

ENVIRONMENT = "NEST_CALIBRATION"
SCHEMA = 1
_LOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCalibration:
    """Memory of one measured run against its prediction.

    Args:
        allocated_ratio: measured over predicted peak of allocated bytes.
        reserved_ratio: measured reserved over measured allocated bytes.
        run: the run it came from; ``measured_allocated_bytes`` its peak.
    """

    allocated_ratio: float
    reserved_ratio: float
    run: str
    measured_allocated_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCalibration:
    """Step times of measured runs of one model against their predictions.

    Args:
        gpu_factor: factor on GPU time, measured over predicted; of a dense model on the whole step.
        host_factor: factor on the host floor of a mixture-of-experts model, None for a dense one.
        runs: the runs it came from.
        communication_share, bubble_share, log2_micro_batch: their means, see ``specs.scale.StepScale``.
    """

    gpu_factor: float
    host_factor: float | None
    runs: tuple[str, ...]
    communication_share: float
    bubble_share: float
    log2_micro_batch: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """All entries.

    Args:
        memory: ``accelerator / profile`` -> entry.
        step: ``accelerator / profile / precision / model`` -> entry.
    """

    memory: dict[str, MemoryCalibration] = field(default_factory=dict)
    step: dict[str, StepCalibration] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def digest(self) -> str:
        """Short digest of the content, for plans and fingerprints."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """Return the store as JSON text."""
        return json.dumps(codec.to_plain(self), indent=2, sort_keys=True) + "\n"


def store_path() -> Path:
    """Return the file that holds the store."""
    named = os.environ.get(ENVIRONMENT)
    return Path(named) if named else Path(platformdirs.user_data_dir("nest-megatron")) / "calibration.json"


def load_store(path: Path | None = None) -> Store:
    """Return the store, empty when there is no file.

    Raises:
        BadInputError: the file is not readable as a store.
    """
    path = path or store_path()
    if not path.exists():
        return Store()
    plain = codec.parse_json(codec.read_text(path), source=str(path))
    codec.check_schema(plain, SCHEMA, source=str(path))
    return codec.from_plain(Store, plain, source=str(path))


def key_of(job: TrainJob, cluster: Cluster) -> str:
    """Return the memory key of a job on a cluster."""
    return f"{cluster.accelerator.name} / {job.profile.name}"


def step_key_of(job: TrainJob, cluster: Cluster) -> str:
    """Return the step-time key of a job on a cluster.

    The model is part of it: on published runs a scalar from another model on the same machine, stack and
    precision makes predictions worse (docs/validation.md, "Calibration").  The model is told by its shape,
    for its name is spelled differently by every configuration.
    """
    model = job.model
    experts = f", {model.moe.num_experts} experts" if model.moe is not None else ""
    shape = f"{model.num_layers} layers of {model.hidden_size}{experts}, sequence {job.sequence_length}"
    return f"{key_of(job, cluster)} / {job.recipe.compute_dtype} / {shape}"


def remember_memory(key: str, entry: MemoryCalibration, path: Path | None = None) -> Path:
    """Add or replace the memory entry of ``key`` and return the file.

    Raises:
        BadInputError: the store cannot be read or written.
    """
    return _change(path, lambda store: dataclasses.replace(store, memory={**store.memory, key: entry}))


def remember_step(key: str, entry: StepCalibration, path: Path | None = None) -> Path:
    """Add or replace the step-time entry of ``key`` and return the file.

    Raises:
        BadInputError: the store cannot be read or written.
    """
    return _change(path, lambda store: dataclasses.replace(store, step={**store.step, key: entry}))


def _change(path: Path | None, changed: Callable[[Store], Store]) -> Path:
    path = path or store_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S):
            write_atomically(path, changed(load_store(path)).to_json())
    except OSError as error:
        raise BadInputError("NEST-K02", f"cannot write the calibration store {path}: {error}") from None
    return path


def apply(job: TrainJob, cluster: Cluster, store: Store) -> tuple[TrainJob, str]:
    """Return ``job`` with what the store knows about its machine and stack, and a sentence for the plan."""
    said = []
    memory = store.memory.get(key_of(job, cluster))
    if memory is not None:
        job = _with_memory(job, memory)
        said.append(
            f"memory from run {memory.run}: allocated x {memory.allocated_ratio:.3f}, "
            f"reserved / allocated {memory.reserved_ratio:.3f}"
        )
    step = store.step.get(step_key_of(job, cluster))
    if step is not None:
        job = with_step(job, step)
        host = "" if step.host_factor is None else f", host floor x {step.host_factor:.3f}"
        said.append(f"step time from {', '.join(step.runs)}: x {step.gpu_factor:.3f}{host}")
    return job, f"{'; '.join(said)} (store {store.digest})" if said else "none"


def _with_memory(job: TrainJob, entry: MemoryCalibration) -> TrainJob:
    """Device bytes become measured-over-predicted x reserved-over-allocated x predicted + fixed part."""
    factor = entry.allocated_ratio * entry.reserved_ratio
    return dataclasses.replace(job, profile=dataclasses.replace(job.profile, device_factor=factor))


def with_step(job: TrainJob, entry: StepCalibration) -> TrainJob:
    """Return ``job`` with its step times scaled by ``entry``.

    Every second of a step is GPU or host time, so T(gpu x g, host x h) = g T(gpu, host x h / g): the host
    floor changes in the profile, and g is a factor on the whole step.
    """
    scale = StepScale(
        factor=entry.gpu_factor,
        num_runs=len(entry.runs),
        communication_share=entry.communication_share,
        bubble_share=entry.bubble_share,
        log2_micro_batch=entry.log2_micro_batch,
    )
    profile = job.profile
    if entry.host_factor is not None:
        floor_s = profile.host_floor_s * entry.host_factor / entry.gpu_factor
        profile = dataclasses.replace(profile, host_floor_s=floor_s)
    return dataclasses.replace(job, profile=profile, step_scale=scale)
