"""Published Megatron-LM runs and files, and what reading each gives, for tests and the dialect's page."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nest_megatron.dialects.megatron_lm import MegatronLMDialect, config_of
from nest_megatron.errors import BadInputError
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.settings import PlanSettings

DIALECT = MegatronLMDialect()
#: The release whose test cases the public records are.
VERSION = "main"
#: Family of a test case -> the script that its recipe starts.
SCRIPTS = {
    "bert": "pretrain_bert.py",
    "t5": "pretrain_t5.py",
    "hybrid": "pretrain_hybrid.py",
    "nemotron": "pretrain_hybrid.py",
    "mimo": "train.py",
    "multimodal-llava": "pretrain_vlm.py",
}
CASES = "megatron-lm/tests/functional_tests/test_cases"
MIXTRAL = f"{CASES}/mixtral/mixtral_8x22b_tp2pp8ep8vpp1_release/model_config.yaml"
DEEPSEEK = f"{CASES}/mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release/model_config.yaml"
NEMOTRON = f"{CASES}/gpt/gpt3_15b_8t_release/model_config.yaml"
GPT_PP4 = f"{CASES}/gpt/gpt3_7b_tp1_pp4_memory_speed/model_config.yaml"
GPT_TP4 = f"{CASES}/gpt/gpt3_7b_tp4_pp1_memory_speed/model_config.yaml"
ZOO = "megatron-moe-modelzoo/model_configs/benchmarking/Mixtral-8x7B.yaml"
#: File -> GPUs to plan for; the files do not say it.
FILES = {NEMOTRON: 64, GPT_PP4: 8, GPT_TP4: 8, DEEPSEEK: 128, MIXTRAL: 128, ZOO: 64}
#: Values for the model zoo's placeholders.
ZOO_VARIABLES = {
    "TP": 2,
    "PP": 4,
    "LAYERS_PER_VP": 4,
    "EP": 8,
    "CP": 1,
    "MBS": 1,
    "GBS": 256,
    "SEQ_LEN": 4096,
    "MOE_GROUPED_GEMM": "true",
    "MOE_TOKEN_DISPATCHER": "alltoall",
}


@cache
def records(shared: Path) -> tuple[dict[str, Any], ...]:
    """Return the records of Megatron-LM's own test cases."""
    path = shared / "data" / "measured" / "perf.json"
    return tuple(r for r in json.loads(path.read_text(encoding="utf-8")) if r.get("megatron_args"))


def config(record: dict[str, Any]) -> DictConfig:
    """Return one record's arguments as a configuration."""
    arguments = {name: value for name, value in record["megatron_args"].items() if name != "_env"}
    family = record["model"]["name"].partition(":")[0]
    script = SCRIPTS.get(family, "pretrain_gpt.py")
    return config_of(arguments, environment=record["megatron_args"].get("_env"), script=script)


def world(record: dict[str, Any]) -> int:
    """Return the printed GPUs, else the fewest whole nodes of 8 that the layout needs."""
    inner = max(record["tp"] * record["cp"], (record["ep"] or 1) * (record["etp"] or record["tp"]))
    return int(record["num_gpus"] or max(8, record["pp"] * inner))


@cache
def outcomes(shared: Path) -> tuple[tuple[dict[str, Any], TrainJob | BadInputError], ...]:
    """Return each record with the job it reads as, or the refusal."""
    return tuple((record, _job_or_refusal(record)) for record in records(shared))


def _job_or_refusal(record: dict[str, Any]) -> TrainJob | BadInputError:
    try:
        return DIALECT.read(config(record), overrides=(), settings=settings(world(record)))
    except BadInputError as error:
        return error


def settings(num_gpus: int) -> PlanSettings:
    """Return settings with a fixed version, so that nothing depends on what is installed."""
    return PlanSettings(num_gpus=num_gpus, framework_version=VERSION)


def load(shared: Path, name: str) -> DictConfig:
    """Return one public file; the model zoo's placeholders are assigned in it."""
    loaded = OmegaConf.load(shared / "data" / "configs" / name)
    assert isinstance(loaded, DictConfig)
    if name == ZOO:
        loaded.ENV_VARS = {**loaded.ENV_VARS, **ZOO_VARIABLES}
    return loaded


def outcome(shared: Path, name: str) -> str:
    """Return what reading a file gives: layout and recipe, or the code and the sentence."""
    try:
        job = DIALECT.read(load(shared, name), overrides=(), settings=settings(FILES[name]))
    except BadInputError as error:
        return f"{error.code}: {error.message}"
    return f"job on {job.num_gpus} GPUs: {job.user_layout.describe()}; {job.recipe.name}"


def table(shared: Path) -> str:
    """Return the table of docs/dialects-megatron-lm.md."""
    rows = [f"| {name} | {outcome(shared, name)} |" for name in FILES]
    return "\n".join(["| file | outcome |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table(Path(__file__).resolve().parents[3] / "shared"))
