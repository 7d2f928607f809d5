"""What a plan depends on, as digests: a plan is only read back by a job with the same fingerprint."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from nest_megatron.calibration.store import load_store
from nest_megatron.launch.processes import PER_PROCESS_VARIABLES
from nest_megatron.specs import codec
from nest_megatron.specs.settings import PlanSettings

#: Installed software that changes a plan: rule tables follow it, solvers run on it.
_DISTRIBUTIONS = ("numpy", "omegaconf", "megatron-core", "nemo-toolkit", "transformer-engine")
_PACKAGES = ("nest_megatron", "cython_dp")
_ENVIRONMENT_RESOLVER = re.compile(r"oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One digest per input of the planner; keeping them apart lets a refusal name what changed."""

    parts: dict[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 over all parts, as hex."""
        return _digest(json.dumps(self.parts, sort_keys=True))

    def differing(self, other: Mapping[str, str]) -> list[str]:
        """Return the names of the parts that differ from ``other``."""
        return [name for name in self.parts if self.parts[name] != other.get(name)]


def fingerprint_of(
    config: DictConfig, *, overrides: Sequence[str], settings: PlanSettings, mode: str
) -> Fingerprint:
    """Return the fingerprint of one planning run.

    Args:
        config: the task configuration; it is not resolved, so resolvers an app registers later do no harm.
        overrides: the task's override strings.
        settings: the planner's settings.
        mode: ``auto`` or ``check``: their records never meet.
    """
    unresolved = OmegaConf.to_yaml(config, resolve=False)
    settings_text = json.dumps(codec.to_plain(settings), sort_keys=True)
    return Fingerprint(
        {
            "mode": mode,
            "configuration": _digest(unresolved),
            "overrides": _digest(json.dumps(list(overrides))),
            "settings": _digest(settings_text),
            "cluster file": _file_digest(settings.cluster),
            "topology file": _file_digest(settings.topology),
            "environment": _environment_digest(unresolved + settings_text),
            "calibration": load_store().digest if settings.calibration else "off",
            "versions": _versions_digest(),
            "code": code_digest(),
        }
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _file_digest(name: str | None) -> str:
    """Digest the content, not the path: ranks may mount the same file elsewhere.

    Shipped clusters are covered by ``code``; an unreadable file is the pipeline's error to report.
    """
    path = Path(name) if name else None
    if path is None or not path.is_file():
        return "none"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _environment_digest(text: str) -> str:
    """Digest the variables that ``${oc.env:...}`` reads, except those that differ between ranks."""
    names = sorted(set(_ENVIRONMENT_RESOLVER.findall(text)) - PER_PROCESS_VARIABLES)
    return _digest(json.dumps({name: os.environ.get(name) for name in names}))


def _versions_digest() -> str:
    found = {dist.metadata["Name"]: dist.version for dist in _installed()}
    return _digest(json.dumps(found, sort_keys=True))


def _installed() -> list[importlib.metadata.Distribution]:
    installed = []
    for name in _DISTRIBUTIONS:
        try:
            installed.append(importlib.metadata.distribution(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


@functools.lru_cache(maxsize=1)
def code_digest() -> str:
    """Return a digest of the planner's sources, compiled solver and shipped data.

    A version string stays the same while a checkout is edited; contents do not, and they are equal on all
    nodes, unlike modification times.
    """
    total = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent.parent
    for package in _PACKAGES:
        # conf/ is a symbolic link in a checkout and a folder in a wheel: follow it.
        for folder, _, names in sorted(os.walk(root / package, followlinks=True)):
            for path in (Path(folder, name) for name in sorted(names)):
                if path.suffix in {".py", ".yaml", ".so"}:
                    total.update(f"{path.relative_to(root)}\0".encode())
                    total.update(path.read_bytes())
    return total.hexdigest()
