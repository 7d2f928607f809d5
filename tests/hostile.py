"""Hostile inputs of every kind, and what must hold: a sentence with a code, and nothing half-written."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from nest_megatron.cli import main
from nest_megatron.errors import BadInputError
from nest_megatron.launch import planfile
from nest_megatron.launch.faults import errors_as_exit
from nest_megatron.launch.fingerprint import Fingerprint
from nest_megatron.launch.hydra import NestCallback
from nest_megatron.launch.publish import read_failure
from nest_megatron.pipeline import plan_config
from nest_megatron.specs.layout import AXES
from nest_megatron.specs.plan import Plan
from nest_megatron.specs.settings import PlanSettings
from tests.hostile_mutators import NUMBERS, PLAUSIBLE, TEXTS, TYPES, mutate

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLES = REPOSITORY / "scripts" / "conf"
CLUSTERS = REPOSITORY / "conf" / "cluster"
SHARED = REPOSITORY.parent / "shared" / "data" / "configs"
KINDS = ("config", "cluster", "plan", "settings", "override", "option")
TIME_LIMIT_S = 60

#: A job that plans quickly.
JOB = """
trainer: {devices: 8, num_nodes: 1, precision: bf16}
model:
  micro_batch_size: 1
  global_batch_size: 16
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  num_layers: 4
  hidden_size: 1024
  ffn_hidden_size: 4096
  num_attention_heads: 8
  encoder_seq_length: 1024
  max_position_embeddings: 1024
"""
#: First words of a check that exits 1.
_VERDICTS = ("ILLEGAL: ", "DOES NOT FIT: ", "NOT EVALUATED: ")
_FINGERPRINT = Fingerprint({"configuration": "0"})


@dataclass(frozen=True)
class Hostile:
    """One input: a file's content, or strings of the command line."""

    kind: str
    mutation: str
    content: bytes = b""
    texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What happened; ``problem`` is empty when it is what must happen."""

    outcome: str
    problem: str = ""


class TooSlow(BaseException):
    """An input took longer than ``TIME_LIMIT_S``; no handler of the program catches it."""


def hostile_input(seed: int, kind: str | None = None) -> Hostile:
    """Return the input of one seed."""
    rng = random.Random(seed)
    kind = kind or KINDS[seed % len(KINDS)]
    if kind in _TEXTS:
        return Hostile(kind, "strings", texts=_some(rng, _TEXTS[kind]))
    data, dump = _base(rng, kind)
    mutation, content = mutate(rng, data, dump=dump)
    return Hostile(kind, mutation, content)


def judge(hostile: Hostile) -> Verdict:
    """Run one input in an empty folder, within the time limit."""
    with tempfile.TemporaryDirectory() as folder, _in_folder(Path(folder)), _time_limit():
        try:
            return _JUDGES[hostile.kind](hostile, Path(folder))
        except TooSlow:
            return Verdict("fault", f"longer than {TIME_LIMIT_S} s")
        except Exception as error:
            return Verdict("fault", f"traceback: {type(error).__name__}: {error}"[:300])


def _base(rng: random.Random, kind: str) -> tuple[bytes, Callable[[object], str]]:
    if kind == "plan":
        return _good_plan().to_json().encode(), lambda tree: json.dumps(tree, indent=2)
    files = _files(kind)
    data = rng.choice(files).read_bytes() if files and rng.random() < 0.7 else _own(kind)
    return data, lambda tree: yaml.safe_dump(tree, sort_keys=False)


def _own(kind: str) -> bytes:
    return JOB.encode() if kind == "config" else (CLUSTERS / "dgx-h100.yaml").read_bytes()


@cache
def _files(kind: str) -> tuple[Path, ...]:
    """The real files of a kind; those of the shared folder only where it is."""
    if kind == "cluster":
        return tuple(sorted(CLUSTERS.glob("*.yaml")))
    found = sorted(EXAMPLES.glob("*.yaml"))
    for version in ("nemo-1.23", "nemo-2.4"):
        found += sorted((SHARED / version).glob("examples/nlp/language_modeling/conf/megatron_*.yaml"))[:12]
    return tuple(found)


@cache
def _good_plan() -> Plan:
    config = OmegaConf.create(JOB)
    return planfile.seal(plan_config(config, settings=PlanSettings(pin={"tp": 4})), _FINGERPRINT)


_SYNTAX = ("'", '"', "[", "{a:", "1,2", "[1,2]", "[2,4]", "range(1,4)", "\\", "dgx-h100", "nemo", "2.0.0")


def _value(rng: random.Random) -> str:
    values = rng.choice((TEXTS, TYPES, NUMBERS, PLAUSIBLE, PLAUSIBLE, _SYNTAX))
    text = str(rng.choice(values))
    return text[:2000]


def _some(rng: random.Random, forms: tuple[str, ...]) -> tuple[str, ...]:
    texts = (
        rng.choice(forms).format(axis=rng.choice((*AXES, "tpp")), value=_value(rng))
        for _ in range(rng.randint(1, 2))
    )
    return tuple(text.replace("\0", "") for text in texts)


_KEYS = (
    "model",
    "model.num_layers",
    "model.tensor_model_parallel_size",
    "trainer.devices",
    "model.a.b",
    "x",
    "",
)
_SETTINGS = (
    *(f"+nest.{key}={{value}}" for key in PlanSettings.__dataclass_fields__),
    "+nest.pin.{axis}={value}",
    "+nest.free.{axis}={value}",
    "+nest.timeout_s={value}",
    "+nest.mode={value}",
    "+nest={value}",
    "++hydra.callbacks.nest.cluster={value}",
    "model.tensor_model_parallel_size={value}",
)
_OVERRIDES = (
    *(f"{sign}{key}={{value}}" for sign in ("", "+", "++", "~") for key in _KEYS),
    "{value}",
    "~{value}",
)
_OPTIONS = (
    "--pin={axis}={value}",
    "--free={axis}={value}",
    "--gpus={value}",
    "--reserved-gib={value}",
    "--cluster={value}",
    "--dialect={value}",
    "--framework-version={value}",
    "--{value}",
)
_TEXTS = {"settings": _SETTINGS, "override": _OVERRIDES, "option": _OPTIONS}


@dataclass(frozen=True)
class _Ran:
    code: int
    out: str
    err: str


def _ran(program: Callable[[], int | None]) -> _Ran:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = program()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return _Ran(code or 0, out.getvalue(), err.getvalue())


def _said(ran: _Ran) -> Verdict:
    """The rule for every program: code 0 to 2, a sentence with a code, no traceback, no escapes."""
    text = ran.out + ran.err
    problem = ""
    if ran.code not in (0, 1, 2):
        problem = f"exit code {ran.code}"
    elif "Traceback" in text or "planner fault" in text:
        problem = "fault: " + ran.err.strip()[:400]
    elif ran.code and not ("NEST-" in ran.err or ": error: " in ran.err or ran.out.startswith(_VERDICTS)):
        problem = f"no sentence: {ran.err[:300]!r}"
    elif "\x1b" in text:
        problem = "an escape sequence reaches the terminal"
    return Verdict("fault" if problem else f"exit {ran.code}", problem)


def _and_files(ran: _Ran, folder: Path, before: set[Path]) -> Verdict:
    """Beside the rule: whole files or none, and nothing left over."""
    verdict = _said(ran)
    record, written = folder / "plan.json", folder / "planned.yaml"
    left = {path for path in folder.rglob("*") if path.is_file()} - before - {record, written}
    problem = verdict.problem
    if not problem and left:
        problem = f"left over: {sorted(path.name for path in left)}"
    if not problem and written.exists() is not (ran.code == 0):
        problem = f"exit {ran.code}, but the configuration is {'there' if written.exists() else 'absent'}"
    if not problem and record.exists():
        problem = _record_problem(record.read_text(encoding="utf-8"), ran.code)
    return Verdict("fault" if problem else verdict.outcome, problem)


def _record_problem(text: str, code: int) -> str:
    try:
        failure = read_failure(text, source="plan.json")
        if failure is None:
            Plan.from_json(text)
    except BadInputError as error:
        return f"plan.json is not whole: {error}"
    expected = 0 if failure is None else failure.exit_code
    return "" if expected == code else f"plan.json says {expected}, the process {code}"


def _plan_command(folder: Path, job: bytes, *more: str) -> Verdict:
    """Plan and write both files, then ask for the verdict alone: two ways through the rooms."""
    path = folder / "job.yaml"
    path.write_bytes(job)
    argv = ["plan", "--config", str(path), "--json", "plan.json", "--write-config", "planned.yaml", *more]
    before = {found for found in folder.rglob("*") if found.is_file()}
    planned = _and_files(_ran(lambda: main(argv)), folder, before)
    checked = _said(_ran(lambda: main(["check", "--config", str(path), *more])))
    return (
        Verdict("fault", f"check: {checked.problem}") if checked.problem and not planned.problem else planned
    )


def _judge_config(hostile: Hostile, folder: Path) -> Verdict:
    return _plan_command(folder, hostile.content, "--cluster", "dgx-h100")


def _judge_cluster(hostile: Hostile, folder: Path) -> Verdict:
    (folder / "cluster.yaml").write_bytes(hostile.content)
    return _plan_command(folder, JOB.encode(), "--cluster", "cluster.yaml")


def _judge_strings(hostile: Hostile, folder: Path) -> Verdict:
    return _plan_command(folder, JOB.encode(), *hostile.texts)


def _judge_plan(hostile: Hostile, folder: Path) -> Verdict:
    """Read the file as NEST_PLAN, then find it in the cache: refused there, replaced here."""
    good, path = _good_plan(), folder / "plan.json"
    path.write_bytes(hostile.content)
    found: list[Plan] = []

    def read() -> None:
        with errors_as_exit(folder):
            found.append(planfile.read_given(path, _FINGERPRINT))

    verdict = _said(_ran(read))
    if found and found != [good]:
        return Verdict("fault", "a changed plan was accepted")
    made = planfile.plan_once(path, lambda: good, fingerprint=_FINGERPRINT, rank=None, timeout_s=1.0).value
    if not verdict.problem and (made != good or Plan.load(path) != good):
        return Verdict("fault", "the cached file was not replaced by the plan")
    return verdict


def _judge_settings(hostile: Hostile, folder: Path) -> Verdict:
    """Compose with Hydra as an app does, then call the callback as Hydra does."""
    (folder / "job.yaml").write_text(JOB)
    try:
        with initialize_config_dir(str(folder), version_base=None):
            config = compose("job", ["+nest=auto", *hostile.texts], return_hydra_config=True)
    except Exception:  # whatever Hydra raises: our code has not run yet
        return Verdict("refused by Hydra")
    given = OmegaConf.to_container(config.hydra.callbacks.nest, resolve=False)
    assert isinstance(given, dict)
    callback = NestCallback(**{str(key): value for key, value in given.items() if key != "_target_"})
    return _said(_ran(lambda: callback.on_run_start(config)))


_JUDGES: dict[str, Callable[[Hostile, Path], Verdict]] = {
    "config": _judge_config,
    "cluster": _judge_cluster,
    "plan": _judge_plan,
    "settings": _judge_settings,
    "override": _judge_strings,
    "option": _judge_strings,
}


@contextlib.contextmanager
def _in_folder(folder: Path) -> Iterator[None]:
    """Work in ``folder`` with a cache of its own; no variable that a run sets stays behind."""
    environment, here = dict(os.environ), Path.cwd()
    os.chdir(folder)
    for name in ("NEST_PLAN", "NEST_MODE", "RANK", "SLURM_PROCID"):
        os.environ.pop(name, None)
    os.environ["NEST_CACHE"] = str(folder / "cache")
    try:
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooSlow

    previous = signal.signal(signal.SIGALRM, stop)
    # Again and again: raised inside a destructor, it would only be reported.
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


if __name__ == "__main__":
    for number in map(int, sys.argv[1:]):
        sys.stdout.write(
            f"{number}: {(one := hostile_input(number)).kind}, {one.mutation}, {one.texts}: {judge(one)}\n"
        )
