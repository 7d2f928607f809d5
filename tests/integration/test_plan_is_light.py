"""Planning runs on a login node: no deep-learning framework is loaded, however large the job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

PROGRAM = """
import json, sys
from nest_megatron.cli import main
code = main(sys.argv[1:])
loaded = {name.split(".")[0] for name in sys.modules}
heavy = sorted(loaded & {"torch", "megatron", "nemo", "transformer_engine"})
print(json.dumps({"code": code, "heavy": heavy}))
"""


def test_planning_gpt3_175b_on_1024_gpus_loads_no_framework(repository: Path, tmp_path: Path) -> None:
    """`nest-megatron plan` on GPT-3 175B and 1,024 A100 leaves torch, megatron and nemo unimported."""
    out = tmp_path / "plan.json"
    config = repository / "scripts" / "conf" / "megatron_gpt3_175b.yaml"
    arguments = [
        "plan",
        "--config",
        str(config),
        "--cluster",
        "dgx-a100-80",
        "--gpus",
        "1024",
        "--json",
        str(out),
    ]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert json.loads(run.stdout.splitlines()[-1]) == {"code": 0, "heavy": []}
    plan = json.loads(out.read_text())
    layout = plan["layout"]
    assert layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"] == 1024
    assert sum(layout["num_layers_per_chunk"]) == 96
