"""The calibration store: one JSON file, one entry per accelerator and software stack.

``NEST_CALIBRATION`` names the file; without it the user's data folder holds it.  Every plan says which entry
it used, by digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock

from nest_megatron.errors import BadInputError
from nest_megatron.launch.publish import write_atomically
from nest_megatron.specs import codec
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import TrainJob

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
class Store:
    """All entries; the key is ``accelerator / profile``."""

    memory: dict[str, MemoryCalibration]
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
        return Store(memory={})
    plain = codec.parse_json(codec.read_text(path), source=str(path))
    codec.check_schema(plain, SCHEMA, source=str(path))
    return codec.from_plain(Store, plain, source=str(path))


def key_of(job: TrainJob, cluster: Cluster) -> str:
    """Return the store key of a job on a cluster."""
    return f"{cluster.accelerator.name} / {job.profile.name}"


def remember_memory(key: str, entry: MemoryCalibration, path: Path | None = None) -> Path:
    """Add or replace the memory entry of ``key`` and return the file.

    Raises:
        BadInputError: the store cannot be read or written.
    """
    path = path or store_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S):
            store = load_store(path)
            store = dataclasses.replace(store, memory={**store.memory, key: entry})
            write_atomically(path, store.to_json())
    except OSError as error:
        raise BadInputError("NEST-K02", f"cannot write the calibration store {path}: {error}") from None
    return path


def apply(job: TrainJob, cluster: Cluster, store: Store) -> tuple[TrainJob, str]:
    """Return ``job`` with what the store knows about its machine and stack, and a sentence for the plan.

    Device bytes become measured-over-predicted x reserved-over-allocated x predicted + fixed part.
    """
    entry = store.memory.get(key_of(job, cluster))
    if entry is None:
        return job, "none"
    factor = entry.allocated_ratio * entry.reserved_ratio
    profile = dataclasses.replace(job.profile, device_factor=factor)
    said = (
        f"memory from run {entry.run}: allocated x {entry.allocated_ratio:.3f}, "
        f"reserved / allocated {entry.reserved_ratio:.3f} (store {store.digest})"
    )
    return dataclasses.replace(job, profile=profile), said
