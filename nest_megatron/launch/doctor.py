"""Proves what planning needs in this very environment: the plug-in, the solver, the data, the cache folder.

Hydra takes ``+nest=auto`` as an ordinary value where the plug-in is absent, and trains unplanned; so a batch
script asks here first.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import filelock

from nest_megatron.errors import EXIT_NO_PLAN, EXIT_OK, NestError
from nest_megatron.launch import planfile
from nest_megatron.launch.publish import write_atomically
from nest_megatron.launch.requirements import framework_states, requirement_states

Status = Literal["ok", "warning", "failed"]

_LOCK_TIMEOUT_S = 30
#: Exit code of the child process that could take a lock which this process holds.
_LOCK_BROKEN = 3
_LOCK_PROBE = """
import sys, filelock
try:
    filelock.FileLock(sys.argv[1]).acquire(blocking=False)
except filelock.Timeout:
    sys.exit(0)
sys.exit({broken})
"""

#: A job of the nemo dialect that fits everywhere.
_SMALL_JOB: dict[str, Any] = {
    "trainer": {"devices": 2, "num_nodes": 1, "precision": "bf16"},
    "model": {
        "num_layers": 4,
        "hidden_size": 512,
        "ffn_hidden_size": 2048,
        "num_attention_heads": 8,
        "encoder_seq_length": 512,
        "max_position_embeddings": 512,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "tokenizer": {"library": "megatron", "type": "GPT2BPETokenizer"},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check: what was looked at, whether it is good, and what was found."""

    subject: str
    status: Status
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All findings, and the interpreter they hold for."""

    python: str
    host: str
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The findings that forbid a run."""
        return tuple(finding for finding in self.findings if finding.status == "failed")

    @property
    def exit_code(self) -> int:
        """0 when a run can be planned here, else 1."""
        return EXIT_NO_PLAN if self.failed else EXIT_OK


def examine() -> Examination:
    """Run every check; none of them imports torch, and none leaves a file behind."""
    findings = (
        *_versions(),
        _checked("hydra plug-in", _plugin),
        _checked("compiled solver", _solver),
        _checked("shipped data", _data),
        _checked("small plan", _plan),
        _checked("cache folder", _cache_folder),
        _checked("file locks", _locks),
    )
    return Examination(python=sys.executable, host=socket.gethostname(), findings=findings)


class _Wrong(Exception):
    """A check found something that forbids a run; the text says what and how to repair it."""


def _checked(subject: str, check: Callable[[], str]) -> Finding:
    """Run one check; whatever it raises is a finding: a broken environment fails in any way it likes."""
    try:
        return Finding(subject=subject, status="ok", detail=check())
    except (_Wrong, NestError) as error:
        return Finding(subject=subject, status="failed", detail=str(error))
    except Exception as error:
        reason = " ".join(str(error).split())
        return Finding(subject=subject, status="failed", detail=f"{type(error).__name__}: {reason}")


def _versions() -> Iterator[Finding]:
    yield Finding(subject="python", status="ok", detail=f"{platform.python_version()} at {sys.executable}")
    for states in (requirement_states(), framework_states()):
        for state in states:
            yield Finding(subject=state.name, status=state.status, detail=state.detail)


def _plugin() -> str:
    """Compose both group options with this environment's Hydra, as an app would."""
    from hydra import compose, initialize
    from hydra.core.plugins import Plugins
    from hydra.plugins.launcher import Launcher
    from hydra.utils import get_class

    with initialize(version_base=None, config_path=None):
        for option in ("auto", "check"):
            config = compose(overrides=[f"+nest={option}"], return_hydra_config=True)
            if "nest" in config or "nest" not in config.hydra.callbacks:
                raise _Wrong(
                    "Hydra takes +nest=auto as an ordinary value: the plug-in is not found; install "
                    f"nest-megatron for this interpreter ({sys.executable} -m pip install nest-megatron)"
                )
            get_class(config.hydra.callbacks.nest._target_)
        (source,) = (x for x in config.hydra.runtime.config_sources if x.provider == "nest-megatron")
    launchers = {kind.__name__ for kind in Plugins.instance().discover(Launcher)}
    if "NestLauncher" not in launchers:
        raise _Wrong("Hydra does not find the launcher for sweeps: reinstall nest-megatron")
    file = importlib.import_module("hydra_plugins.nest_megatron.search_path").__file__
    return f"group nest = auto, check; provider {source.provider}, {source.schema}://{source.path}; {file}"


def _solver() -> str:
    """Solve one small problem with the compiled solver and with its slow twin."""
    import numpy as np

    import cython_dp
    from cython_dp import reference

    compiled = importlib.import_module("cython_dp.search")
    problems = importlib.import_module("cython_dp.problem")
    arrays = _small_problem()
    problem, twin = problems.Problem(**arrays), reference.Problem(**arrays)
    slow = reference.bounds(twin)
    limit_bytes = int(slow[2].max())
    pairs: list[tuple[Any, Any]] = [
        *zip(problems.bounds(problem), slow, strict=True),
        # Not a number where a bound proved a candidate not worth simulating: equal there, too.
        (
            compiled.best_first(problem, limit_bytes).time_s,
            reference.best_first(twin, limit_bytes).time_s,
        ),
    ]
    if not all(np.array_equal(left, right, equal_nan=True) for left, right in pairs):
        raise _Wrong("the compiled solver and its slow twin differ; build it again with `pip install -e .`")
    used = "" if cython_dp.IMPLEMENTATION == "cython" else "; NEST_DP_IMPL selects the slow twin"
    return f"equal to its slow twin on {len(twin)} candidates; {compiled.__file__}{used}"


def _small_problem() -> dict[str, Any]:
    """Return a search over two nodes (one and two pipeline stages) and four candidates of six layers."""
    import numpy as np

    import cython_dp as dp

    rng = np.random.default_rng(0)
    prefix = np.zeros((dp.NUM_KINDS, 7), dtype=np.int32)
    prefix[0] = np.arange(7)
    times = rng.random((2, dp.NUM_COLUMNS)) * 1e-3
    times[:, dp.Column.BUCKET] = 4

    def whole(values: Any) -> Any:
        return np.asarray(values, dtype=np.int32)

    return {
        "prefix": prefix,
        "node_pp": whole([1, 2]),
        "node_m": whole([4, 4]),
        "node_times": times,
        "node_params": rng.integers(0, 100, (2, dp.NUM_PARAMS)).astype(np.int64),
        "node_memory": rng.integers(0, 10**9, (2, 3, dp.NUM_FEATURES)).astype(np.int64),
        "node": whole([0, 1, 1, 1]),
        "vpp": whole([1, 1, 1, 2]),
        "group": whole([1, 2, 2, 2]),
        "mode": whole([dp.RECOMPUTE_NONE, dp.RECOMPUTE_NONE, dp.RECOMPUTE_BLOCK, dp.RECOMPUTE_UNIFORM]),
        "num_recompute": whole([1, 1, 1, 1]),
        "split_start": whole([0, 1, 3, 5]),
        "sizes": whole([6, 3, 3, 2, 4, 2, 1, 2, 1]),
    }


def _data() -> str:
    """Load every accelerator, cluster and profile that is shipped."""
    from nest_megatron.cluster.load import (
        load_accelerator,
        load_cluster,
        shipped_accelerators,
        shipped_clusters,
    )
    from nest_megatron.dialects.profiles import load_profile, profile_names

    loaders: dict[str, tuple[tuple[str, ...], Callable[[str], object]]] = {
        "accelerators": (shipped_accelerators(), load_accelerator),
        "clusters": (shipped_clusters(), load_cluster),
        "framework profiles": (profile_names(), load_profile),
    }
    for kind, (names, load) in loaders.items():
        if not names:
            raise _Wrong(f"no {kind} are shipped: the installation is incomplete")
        for name in names:
            load(name)
    return ", ".join(f"{len(names)} {kind}" for kind, (names, _) in loaders.items())


def _plan() -> str:
    """Plan a small job from end to end, which reads the tables of networks and tokenizers, too."""
    from omegaconf import OmegaConf

    from nest_megatron.pipeline import plan_config

    plan = plan_config(OmegaConf.create(_SMALL_JOB), source="doctor")
    return f"{plan.layout.world} GPUs, {plan.certificate.configurations} layouts compared"


def _cache_folder() -> str:
    root = planfile.cache_root()
    with _probe_folder(root) as folder:
        write_atomically(Path(folder) / "probe.json", "{}")
    return f"{root} is writable; the ranks of a job need the same folder on all nodes (NEST_CACHE)"


def _locks() -> str:
    """Hold a lock here, and see that another process cannot take it."""
    with _probe_folder(planfile.cache_root()) as folder:
        path = Path(folder) / "probe.lock"
        program = _LOCK_PROBE.format(broken=_LOCK_BROKEN)
        with filelock.FileLock(path, timeout=0):
            child = subprocess.run(
                [sys.executable, "-c", program, str(path)],
                capture_output=True,
                text=True,
                timeout=_LOCK_TIMEOUT_S,
                check=False,
            )
    if child.returncode == _LOCK_BROKEN:
        raise _Wrong(f"two processes hold one lock in {planfile.cache_root()}: set NEST_CACHE elsewhere")
    if child.returncode != 0:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise _Wrong(f"a second process cannot try the lock: {last}")
    return "a second process waits for the lock of the first"


def _probe_folder(root: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a folder in ``root`` that vanishes with its content."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=root, prefix=".doctor-")
    except OSError as error:
        raise _Wrong(f"{root} cannot be written ({error.strerror}): set NEST_CACHE") from None
