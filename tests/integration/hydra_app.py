"""Runs the apps of tests/integration/apps as processes, and reads back what their tasks received."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nest_megatron.launch.processes import PER_PROCESS_VARIABLES
from nest_megatron.specs.plan import Plan

APPS = Path(__file__).resolve().parent / "apps"
#: An example configuration of this repository, as arguments of an app.
LLAMA = ("--config-path", "{scripts}", "--config-name", "megatron_llama3_8b")


@dataclass
class Ended:
    """A finished process, and what its task received; None when the task never ran."""

    code: int
    out: str
    err: str
    received: dict[str, Any] | None

    @property
    def text(self) -> str:
        """Everything it printed."""
        return self.out + self.err


@dataclass
class App:
    """Starts one of the apps in a folder of its own, without any rank or NEST variable of this process."""

    folder: Path
    scripts: Path
    python: str = sys.executable
    name: str = "task_app.py"

    def start(
        self, *arguments: str, tag: str = "", environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start the app and return at once; ``tag`` keeps the outputs of parallel processes apart."""
        clean = {
            key: value
            for key, value in os.environ.items()
            if key not in PER_PROCESS_VARIABLES and not key.startswith(("NEST_", "SLURM_", "TORCHELASTIC_"))
        }
        clean |= {"NEST_CACHE": str(self.folder / "cache"), "TASK_OUTPUT": str(self._output(tag))}
        command = [
            self.python,
            str(APPS / self.name),
            *(text.replace("{scripts}", str(self.scripts)) for text in arguments),
        ]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=clean | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, process: subprocess.Popen[str], tag: str = "") -> Ended:
        """Wait for a started process."""
        out, err = process.communicate(timeout=300)
        output = self._output(tag)
        received = json.loads(output.read_text()) if output.exists() else None
        output.unlink(missing_ok=True)
        return Ended(process.returncode, out, err, received)

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Ended:
        """Run the app to its end."""
        return self.finish(self.start(*arguments, environment=environment))

    def run_many(self, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> list[Ended]:
        """Start one process per environment at once, and wait for all."""
        started = [
            self.start(*arguments, tag=str(number), environment=environment)
            for number, environment in enumerate(environments)
        ]
        return [self.finish(process, str(number)) for number, process in enumerate(started)]

    def _output(self, tag: str) -> Path:
        return self.folder / f"received{tag}.json"


def plan_of(ended: Ended) -> Plan:
    """The plan that the task's own environment names."""
    assert ended.code == 0, ended.text
    assert ended.received is not None, ended.text
    return Plan.load(Path(ended.received["environment"]["NEST_PLAN"]))


def assert_applied(ended: Ended, plan: Plan) -> None:
    """The task received exactly the edits; everything else about it is in other tests."""
    assert ended.received is not None
    config = OmegaConf.create(ended.received["config"])
    for key, value in plan.edits.items():
        found = OmegaConf.select(config, key)
        assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value, key
