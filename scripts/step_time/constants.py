"""The constants that are fitted: where each one lives, its prior, how it is read, replaced and written."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nest_megatron.dialects.profiles import CONF, load_profile, step_constants
from nest_megatron.specs.cluster import Accelerator, Cluster
from nest_megatron.specs.job import FrameworkProfile, TrainJob

#: Accelerators of one generation share fitted efficiencies; a file may hold a fixed multiple: the power
#: limit of B300 and GB300 is 1,400 W against 1,200 W of GB200.
_FACTOR_OF_FILE = {"b300-sxm-288gb": 1.18, "gb300-288gb": 1.18}
_BOOSTED = ("gemm_efficiency", "attention_efficiency")
_SCALE = {"_us": 1e-6, "_ms": 1e-3}


@dataclass(frozen=True, slots=True)
class Constant:
    """One fitted constant.

    Args:
        name: ``time.<constant>``, ``profile.<quantity>`` or ``<generation>.<quantity>``, as in conf/.
        centre, sigma: of the log-normal prior; ``ceiling``: it stays below that.
        profiles: of ``profile.``, the files that share it.
    """

    name: str
    centre: float
    sigma: float
    ceiling: float = np.inf
    profiles: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Key in the data file."""
        return self.name.split(".", 1)[1]

    @property
    def scope(self) -> str:
        """``time``, ``profile`` or an accelerator generation."""
        return self.name.split(".", 1)[0]


def load_constants() -> list[Constant]:
    """Return the constants of ``conf/validation/step_time_fit.yaml``."""
    entries = _priors()["constants"]
    return [Constant(**{**entry, "profiles": tuple(entry.get("profiles", ()))}) for entry in entries]


def load_exclusion() -> dict[str, str]:
    """Return the pattern of the records that are scored and not fitted, and the field it is matched on."""
    exclusion: dict[str, str] = _priors()["not_fitted"]
    return exclusion


def _priors() -> dict[str, Any]:
    priors: dict[str, Any] = yaml.safe_load((CONF / "validation" / "step_time_fit.yaml").read_text())
    return priors


def current_value(constant: Constant) -> float:
    """Return the value in conf/ now, in the unit of its key."""
    if constant.scope == "time":
        return _in_file_unit(constant.key, _read(step_constants()[0], constant.key))
    if constant.scope == "profile":
        return _in_file_unit(constant.key, _read(load_profile(constant.profiles[0]), constant.key))
    return _quantity(_files(constant.scope)[0], constant.key)


def replaced(
    job: TrainJob, cluster: Cluster, constants: Sequence[Constant], values: Sequence[float]
) -> tuple[TrainJob, Cluster]:
    """Return job and cluster with ``values``, each in the unit of its key."""
    profile, time = job.profile, {}
    changes: dict[str, Any] = {}
    accelerator = cluster.accelerator
    for constant, value in zip(constants, values, strict=True):
        if constant.scope == "time":
            time[_field(constant.key)] = value * _unit(constant.key)
        elif constant.scope == "profile":
            if profile.name in constant.profiles:
                changes[_field(constant.key)] = value * _unit(constant.key)
        elif constant.scope == accelerator.generation:
            accelerator = _with_quantity(accelerator, constant.key, value)
    new_time = dataclasses.replace(profile.time, **time)
    new_profile: FrameworkProfile = dataclasses.replace(profile, time=new_time, **changes)
    return dataclasses.replace(job, profile=new_profile), dataclasses.replace(
        cluster, accelerator=accelerator
    )


def write_constants(constants: Sequence[Constant], values: Sequence[float]) -> None:
    """Write ``values`` into the data files of conf/, with their provenance."""
    for constant, value in zip(constants, values, strict=True):
        if constant.scope == "time":
            _write(CONF / "framework" / "common.yaml", constant.key, value)
        elif constant.scope == "profile":
            for name in constant.profiles:
                _write(CONF / "framework" / f"{name}.yaml", constant.key, value)
        else:
            for path in _files(constant.scope):
                for key in _tied(constant.key):
                    _write(path, key, value * _boost(path.stem, key))


_SOURCE = "fitted on published steps: scripts/fit_step_time.py, prior in conf/validation/step_time_fit.yaml"


def _write(path: Path, key: str, value: float) -> None:
    """Replace value and source of ``key`` in both layouts of a quantity: one line, or an indented block."""
    text = path.read_text()
    new = f"{value:.4g}"
    inline = re.compile(rf'^({key}: +\{{value: )[^,]+(, source: )"[^"]*"', re.MULTILINE)
    block = re.compile(rf"^({key}:\n  value: )\S+(\n  source: ).*$", re.MULTILINE)
    text, inlined = inline.subn(rf'\g<1>{new}\g<2>"{_SOURCE}"', text)
    text, blocks = block.subn(rf'\g<1>{new}\g<2>"{_SOURCE}"', text)
    if not inlined and not blocks:
        return  # the file does not give this quantity: its base or default holds
    path.write_text(text)


def _files(generation: str) -> list[Path]:
    """Return the accelerator files of one generation, plain ones first."""
    paths = sorted((CONF / "accelerator").glob("*.yaml"))
    found = [path for path in paths if yaml.safe_load(path.read_text())["generation"] == generation]
    return sorted(found, key=lambda path: (path.stem in _FACTOR_OF_FILE, path.stem))


def _quantity(path: Path, key: str) -> float:
    return float(yaml.safe_load(path.read_text())[key]["value"])


def _tied(key: str) -> tuple[str, ...]:
    """Return the keys that follow ``key``: fp16 runs on the tensor cores of bf16."""
    return (key, key.replace("bf16", "fp16")) if key.endswith("_bf16") else (key,)


def _boost(stem: str, key: str) -> float:
    fp4 = key.endswith("_fp4")  # the fp4 peak of these devices has the higher power limit in it
    return _FACTOR_OF_FILE.get(stem, 1.0) if key.startswith(_BOOSTED) and not fp4 else 1.0


def _with_quantity(accelerator: Accelerator, key: str, value: float) -> Accelerator:
    value *= _boost(accelerator.name, key)
    if key.startswith("gemm_efficiency_"):
        names = [name.removeprefix("gemm_efficiency_") for name in _tied(key)]
        known = {name: value for name in names if name in accelerator.gemm_efficiency}
        return dataclasses.replace(accelerator, gemm_efficiency=accelerator.gemm_efficiency | known)
    changes: dict[str, Any] = {_field(key): value * _unit(key)}
    return dataclasses.replace(accelerator, **changes)


def _field(key: str) -> str:
    for suffix in _SCALE:
        if key.endswith(suffix):
            return key.removesuffix(suffix) + "_s"
    return key


def _unit(key: str) -> float:
    return next((scale for suffix, scale in _SCALE.items() if key.endswith(suffix)), 1.0)


def _in_file_unit(key: str, value: float) -> float:
    return value / _unit(key)


def _read(holder: object, key: str) -> float:
    return float(getattr(holder, _field(key)))
