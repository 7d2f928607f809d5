"""The public NeMo configurations and what reading each of them gives, for tests and docs/dialects.md."""

from __future__ import annotations

import copy
import sys
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from nest_megatron.dialects import registry
from nest_megatron.errors import BadInputError
from nest_megatron.specs.settings import PlanSettings

FOLDERS = ("nemo-1.23", "nemo-2.4", "nemo-aligner", "gpu-recipes")
EXAMPLES = "examples/nlp/language_modeling/conf"
RECIPES = "gpu-recipes/src/frameworks/a3mega/nemo-configs"

LAUNCHER = "nemo-framework-launcher/launcher_scripts/conf"

GPT_123 = f"nemo-1.23/{EXAMPLES}/megatron_gpt_config.yaml"
LLAMA_123 = f"nemo-1.23/{EXAMPLES}/megatron_llama_config.yaml"
GPT_24 = f"nemo-2.4/{EXAMPLES}/megatron_gpt_config.yaml"
SFT = "nemo-aligner/examples/nlp/gpt/conf/gpt_sft.yaml"
GPT3_175B = f"{RECIPES}/gpt3-175b-256gpus-fp8.yaml"
LLAMA_70B = f"{RECIPES}/llama3-1-70b-256gpus-bf16.yaml"
MIXTRAL = f"{RECIPES}/mixtral-8x7b-256gpus-bf16.yaml"


def load(shared: Path, name: str, **changes: object) -> DictConfig:
    """Return one configuration, with dotted changes (``__`` stands for a dot)."""
    config = copy.deepcopy(_parsed(shared / "data" / "configs" / name))
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


@cache
def _parsed(path: Path) -> DictConfig:
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    return config


def stage(shared: Path, name: str, **changes: object) -> DictConfig:
    """Return one file of the launcher's ``conf/training``, ``gpt3/175b`` for example, as it stands alone."""
    config = copy.deepcopy(_undefaulted(shared / "data" / "configs" / LAUNCHER / "training" / f"{name}.yaml"))
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


@cache
def _undefaulted(path: Path) -> DictConfig:
    """Return a file without its defaults list, like ``load_config``, which parses twice."""
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    config.pop("defaults", None)
    return config


def launched(shared: Path, name: str, **changes: object) -> DictConfig:
    """Return the launcher's root configuration with the training stage ``name``, as Hydra composes it."""
    config = copy.deepcopy(_undefaulted(shared / "data" / "configs" / LAUNCHER / "config.yaml"))
    config.stages, config.launcher_scripts_path = ["training"], "/launcher_scripts"
    config.training = stage(shared, name)
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def stages(shared: Path) -> list[str]:
    """Return the name of every file of the launcher's ``conf/training``."""
    root = shared / "data" / "configs" / LAUNCHER / "training"
    return [str(path.relative_to(root).with_suffix("")) for path in sorted(root.rglob("*.yaml"))]


def files(shared: Path) -> list[str]:
    """Return every file of the four folders, relative to the folder of configurations."""
    root = shared / "data" / "configs"
    return [
        str(path.relative_to(root)) for folder in FOLDERS for path in sorted((root / folder).rglob("*.yaml"))
    ]


def outcome(shared: Path, name: str) -> str:
    """Return what reading gives: the layout and recipe of a job, or the code and the sentence."""
    return _outcome(load(shared, name))


def _outcome(config: DictConfig) -> str:
    try:
        job = registry.detect(config).read(config, overrides=(), settings=PlanSettings())
    except BadInputError as error:
        return f"{error.code}: {error.message}"
    return f"job on NeMo {job.framework_version}: {job.user_layout.describe()}; {job.recipe.name}"


def table(shared: Path) -> str:
    """Return the table of docs/dialects.md for the dialect ``nemo``."""
    return _table([(name, outcome(shared, name)) for name in files(shared)])


def launcher_table(shared: Path) -> str:
    """Return the table of docs/dialects.md for the dialect ``launcher``, each file as it stands alone."""
    return _table(list(_stage_outcomes(shared)))


def planned_stages(shared: Path) -> list[str]:
    """Return the training files of the launcher that give a job."""
    return [name for name, text in _stage_outcomes(shared) if text.startswith("job ")]


@cache
def _stage_outcomes(shared: Path) -> tuple[tuple[str, str], ...]:
    return tuple((name, _outcome(stage(shared, name))) for name in stages(shared))


def _table(rows: list[tuple[str, str]]) -> str:
    lines = [f"| {name} | {text} |" for name, text in rows]
    return "\n".join(["| file | outcome |", "|---|---|", *lines]) + "\n"


if __name__ == "__main__":
    folder = Path(__file__).resolve().parents[3] / "shared"
    sys.stdout.write(table(folder) + "\n" + launcher_table(folder))
