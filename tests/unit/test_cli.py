"""The command line: exit codes, messages, files, and input that nobody should write."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nest_megatron.cli import main
from nest_megatron.errors import EXIT_BAD_INPUT, EXIT_NO_PLAN, EXIT_OK
from nest_megatron.report.text import NOT_CHECKED
from nest_megatron.specs.plan import Plan

CLUSTER = ("--cluster", "dgx-h100")


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of one language in a Markdown page."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="session")
def job_text(repository: Path) -> str:
    """The example job of docs/cli.md."""
    (text,) = blocks(repository / "docs" / "cli.md", "yaml")
    return text


@pytest.fixture
def job(tmp_path: Path, job_text: str) -> Path:
    """The example job as a file."""
    path = tmp_path / "job.yaml"
    path.write_text(job_text, encoding="utf-8")
    return path


def test_help_loads_nothing_heavy_and_lists_what_works() -> None:
    """``--help`` names every command, and imports no library outside the standard one."""
    program = (
        "import sys\n"
        "from nest_megatron.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'megatron', 'nemo', 'numpy', 'omegaconf', 'hydra', 'rich', 'cattrs'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    commands = re.findall(r"^    (\w+)  ", done.stdout, flags=re.MULTILINE)
    assert {"plan", "check", "explain", "doctor"} <= set(commands)
    assert "loaded: []" in done.stdout


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """``--version`` prints the program and its version, and succeeds."""
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert not end.value.code
    assert re.fullmatch(r"nest-megatron \S.*\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frob"],
        ["plan"],
        ["plan", "--config"],
        ["plan", "--config", "x", "--gpus", "0"],
        ["plan", "--config", "x", "--gpus", "eight"],
        ["check", "--config", "x", "--reserved-gib", "-1"],
        ["check", "--config", "x", "--reserved-gib", "nan"],
        ["check", "--config", "x", "--reserved-gib", "inf"],
        ["check", "--config", "x", "--write-config", "y"],
        ["check", "--config", "x", "a=1", "--unknown"],
        ["plan", "--conf", "x"],
        ["explain", "--config", "x"],
        ["explain", "--config", "x", "--why"],
        ["explain", "--config", "x", "--why", "tp=4", "--from", "me"],
    ],
)
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown, missing or impossible options end with the usage on stderr and exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == EXIT_BAD_INPUT
    assert "usage: nest-megatron" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "code", "said"),
    [
        (["model.tensor_parallel_size=4"], "NEST-I13", "model.tensor_model_parallel_size"),
        (["trainer.num_nodes=1,2"], "NEST-I14", "one run"),
        (["model=llama"], "NEST-I14", "section"),
        (["nonsense"], "NEST-I12", "key=value"),
        (["--pin", "tensor=4"], "NEST-I15", "not an axis"),
        (["--pin", "tp"], "NEST-I12", "key=value"),
        (["--pin", "+tp=4"], "NEST-I15", "one value"),
        (["--free", "tp=4"], "NEST-I15", "true or false"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "check"])
def test_a_bad_value_exits_2_with_one_sentence(
    job: Path, command: str, extra: list[str], code: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be used is named on stderr with its code, nothing is printed, and the exit code is 2."""
    assert main([command, "--config", str(job), *extra]) == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {code}: ")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize("text", ["", "a: [1\n", "- 1\n", None])
def test_an_unusable_file_exits_2(
    tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty, broken or absent file is bad input, named by its path."""
    path = tmp_path / "job.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert main(["check", "--config", str(path)]) == EXIT_BAD_INPUT
    assert "job.yaml" in capsys.readouterr().err


def test_a_failure_is_written_as_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--json`` holds the failure record instead of a result, in a file and on standard output alike."""
    target = tmp_path / "plan.json"
    absent = str(tmp_path / "absent.yaml")
    assert main(["plan", "--config", absent, "--json", str(target)]) == EXIT_BAD_INPUT
    record = json.loads(target.read_text(encoding="utf-8"))
    assert record["failed"] is True
    assert record["exit_code"] == EXIT_BAD_INPUT
    assert record["code"] == "NEST-I04"
    assert record["message"] in capsys.readouterr().err
    assert main(["plan", "--config", absent, "--json", "-"]) == EXIT_BAD_INPUT
    assert json.loads(capsys.readouterr().out) == record


def test_control_characters_of_the_input_do_not_reach_the_terminal(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An escape sequence in an override is printed as text."""
    assert main(["plan", "--config", str(job), "\x1b[2Jevil=1"]) == EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "evil" in err


def test_plan_prints_the_report_and_writes_both_files(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON reads back, the headline comes first, and a second plan keeps the written configuration."""
    plan_file, config_file = job.with_name("plan.json"), job.with_name("planned.yaml")
    arguments = ["plan", "--config", str(job), *CLUSTER]
    assert main([*arguments, "--json", str(plan_file), "--write-config", str(config_file)]) == EXIT_OK
    out, err = capsys.readouterr()
    plan = Plan.load(plan_file)
    assert out.splitlines()[0] == plan.headline
    assert out.rstrip().endswith(NOT_CHECKED[-1])
    assert "not attributed" not in out  # the terms of the time split sum to the step
    assert err == ""
    assert main(["plan", "--config", str(config_file), *CLUSTER, "--json", "-"]) == EXIT_OK
    again = Plan.from_json(capsys.readouterr().out)
    assert again.user.layout == plan.layout
    assert again.outcome == "kept"
    assert not list(job.parent.glob(".*"))


def test_json_on_standard_output_moves_the_report_to_standard_error(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``--json -`` standard output is JSON alone, and the report is still shown."""
    assert main(["check", "--config", str(job), *CLUSTER, "--json", "-"]) == EXIT_OK
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["exit_code"] == EXIT_OK
    assert record["user"]["violations"] == []
    assert err.splitlines()[0].startswith("LEGAL")


def test_options_may_stand_between_overrides(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Overrides before and after an option are applied in order: the last value of a key wins."""
    before, after = "trainer.num_nodes=2", "trainer.num_nodes=8"
    assert main(["check", "--config", str(job), before, *CLUSTER, after, "--json", "-"]) == EXIT_OK
    layout = json.loads(capsys.readouterr().out)["user"]["layout"]
    assert layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"] == 64


def test_an_illegal_layout_fails_the_check_and_is_repaired_by_the_plan(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """40 heads do not divide by 16: the check exits 1 and says so; without the pin a plan repairs it."""
    wrong = yaml.safe_load(job.read_text(encoding="utf-8"))
    wrong["model"]["tensor_model_parallel_size"] = 16
    job.write_text(yaml.safe_dump(wrong), encoding="utf-8")
    assert main(["check", "--config", str(job), *CLUSTER]) == EXIT_NO_PLAN
    out = capsys.readouterr().out
    assert out.startswith("ILLEGAL: ")
    assert "nearest: " in out
    assert main(["plan", "--config", str(job), *CLUSTER, "--json", "-"]) == EXIT_OK
    assert Plan.from_json(capsys.readouterr().out).outcome == "repaired"


def test_a_pin_that_leaves_nothing_is_no_plan(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pinned axis without a legal layout exits 1 with the reason, and writes the failure record."""
    target = job.with_name("plan.json")
    arguments = ["plan", "--config", str(job), *CLUSTER, "--pin", "tp=16", "--json", str(target)]
    assert main(arguments) == EXIT_NO_PLAN
    assert capsys.readouterr().err.startswith("error: NEST-")
    assert json.loads(target.read_text(encoding="utf-8"))["exit_code"] == EXIT_NO_PLAN


def test_an_uncomposed_defaults_list_becomes_an_assumption(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that a defaults list would bring are named in the report and in the JSON of both commands."""
    job.write_text("defaults: [_self_, {data: pile}]\n" + job.read_text(encoding="utf-8"), encoding="utf-8")
    for command in ("plan", "check"):
        assert main([command, "--config", str(job), *CLUSTER, "--json", "-"]) == EXIT_OK
        out, err = capsys.readouterr()
        assert any("data=pile" in sentence for sentence in json.loads(out)["assumptions"])
        assert "data=pile" in err


def test_an_unwritable_target_is_bad_input(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result that cannot be written is an error, not a silent success."""
    target = job / "plan.json"
    assert main(["check", "--config", str(job), *CLUSTER, "--json", str(target)]) == EXIT_BAD_INPUT
    assert "NEST-I16" in capsys.readouterr().err


@pytest.mark.parametrize("traceback", [False, True])
def test_an_unexpected_exception_is_a_planner_fault(
    job: Path, traceback: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A defect of ours exits 1, asks for a report, and shows its traceback only when asked."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr("nest_megatron.pipeline.check_config", broken)
    monkeypatch.setenv("NEST_TRACEBACK", "1" if traceback else "0")
    assert main(["check", "--config", str(job)]) == EXIT_NO_PLAN
    err = capsys.readouterr().err
    assert "planner fault: NEST-F00: ZeroDivisionError: injected" in err
    assert "Please report it" in err
    assert ("Traceback" in err) == traceback


def test_a_reader_that_stops_early_is_no_failure(job: Path) -> None:
    """``nest-megatron check ... | head -1`` shows the verdict and keeps the exit code."""
    command = [sys.executable, "-m", "nest_megatron.cli", "check", "--config", str(job), *CLUSTER]
    pipe = f"set -o pipefail; {shlex.join(command)} | head -1"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("LEGAL")
    assert done.stderr == ""
    assert done.returncode == EXIT_OK


def test_the_examples_of_the_page_run(
    job: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of docs/cli.md ends with the exit code that the page promises."""
    monkeypatch.chdir(job.parent)
    lines = [line for block in blocks(repository / "docs" / "cli.md", "bash") for line in block.splitlines()]
    assert len(lines) >= 4
    for line in lines:
        command, _, comment = line.partition("#")
        expected = int(comment.split()[1]) if comment else EXIT_OK
        assert main(shlex.split(command)[1:]) == expected, line
        capsys.readouterr()


def test_explain_answers_with_the_first_word_and_as_json(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer leads the text, and the JSON holds both layouts and the growth of every term."""
    question = [
        "explain",
        "--config",
        str(job),
        *CLUSTER,
        "--from",
        "user",
        "--why",
        "recompute=none",
        "pp=2",
    ]
    assert main([*question, "--json", "-"]) == EXIT_OK
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert record["answer"].upper() == err.split(":")[0]
    assert record["asked"] == ["recompute=none", "pp=2"]
    assert record["layout"]["pp"] == 2
    assert record["reference"]["pp"] == 1
    grown = sum(record["growth_s"].values())
    assert grown == pytest.approx(
        record["prediction"]["step_time_s"] - record["reference_prediction"]["step_time_s"], abs=1e-3
    )


@pytest.mark.parametrize("question", ["tpp=4", "dp=4", "tp=four", "tp=0", "+tp=4", "layers=x", "model.a=1"])
def test_a_question_without_meaning_exits_2(
    job: Path, question: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An axis or value that nobody can ask for is one sentence with a code, before any planning."""
    assert main(["explain", "--config", str(job), *CLUSTER, "--why", question]) == EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: NEST-")


def test_check_repairs_a_layout_that_does_not_fit(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A legal layout that needs too much memory is answered with changes whose layouts fit."""
    unfit = ["model.tensor_model_parallel_size=1", "model.num_layers=80", "model.sequence_parallel=false"]
    assert main(["check", "--config", str(job), *CLUSTER, *unfit, "--json", "-"]) == EXIT_NO_PLAN
    out, err = capsys.readouterr()
    assert "To make your layout fit, change" in err
    assert "What does not help" in err
    repair = json.loads(out)["repair"]
    assert repair["advice"]
    assert all(item["peak_device_bytes"] <= repair["limit_bytes"] for item in repair["advice"])


_SCALARS = ("", "null", "-1", "0", "1.5", "true", "'8'", "1e99", ".nan", "\x1b[2J", "é")
_NASTY = st.sampled_from((*_SCALARS, "[]", "{}", "???", "${model.x}", "${"))


@st.composite
def mutated(draw: st.DrawFn, text: str) -> str:
    """Return the job with a few lines dropped, doubled, given another value, or cut somewhere."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(["drop", "double", "value", "noise"]))
        if kind == "drop" and len(lines) > 1:
            del lines[index]
        elif kind == "double":
            lines.insert(index, lines[index])
        elif kind == "value":
            lines[index] = f"{lines[index].partition(':')[0]}: {draw(_NASTY)}"
        else:
            cut = draw(st.integers(0, len(lines[index])))
            lines[index] = lines[index][:cut] + draw(st.text(max_size=5)) + lines[index][cut:]
    return "\n".join(lines)


def run_hostile(path: Path, text: str, overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Run a check and demand an exit code with a verdict or a sentence, never a fault."""
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    code = main(["check", "--config", str(path), *CLUSTER, *overrides])
    out, err = capsys.readouterr()
    assert code in (EXIT_OK, EXIT_NO_PLAN, EXIT_BAD_INPUT)
    assert "planner fault" not in err, err
    assert "Traceback" not in err
    assert "\x1b" not in out + err
    assert out or err.startswith("error: NEST-")


# One file and one capture serve all examples of a test: each example overwrites and drains them.
_SHARED = [HealthCheck.function_scoped_fixture]
_HOSTILE = settings(max_examples=25, deadline=None, suppress_health_check=_SHARED)


@_HOSTILE
@given(data=st.data())
def test_mutated_files_never_give_a_traceback(
    job: Path, job_text: str, data: st.DataObject, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever happened to the file, the answer is a verdict or a sentence with a code."""
    run_hostile(job, data.draw(mutated(job_text)), [], capsys)


_KEYS = ("model.tensor_model_parallel_size", "model.global_batch_size", "model", "trainer.devices", "x")


@_HOSTILE
@given(
    override=st.one_of(
        st.builds("{}{}={}".format, st.sampled_from(["", "+", "++", "~"]), st.sampled_from(_KEYS), _NASTY),
        st.text(max_size=12).filter(lambda text: not text.startswith("-")),
    )
)
def test_hostile_overrides_never_give_a_traceback(
    job: Path, job_text: str, override: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any string in place of an override is applied, or refused with a sentence."""
    run_hostile(job, job_text, [override], capsys)
