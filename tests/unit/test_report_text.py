"""Text reports: what is said first, what is shown, and what hostile content cannot do."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nest_megatron.cli import main
from nest_megatron.errors import EXIT_NO_PLAN, EXIT_OK, NoPlanError
from nest_megatron.pipeline import Check
from nest_megatron.report import page as fmt
from nest_megatron.report.page import Page
from nest_megatron.report.tables import MAX_STAGE_ROWS, layers_per_chunk, memory_columns, time_terms
from nest_megatron.report.text import NOT_CHECKED, render_check, render_plan
from nest_megatron.specs.layout import Layout, Overlap, Recompute
from nest_megatron.specs.plan import (
    AxisCrossings,
    Candidate,
    Certificate,
    OrderPrice,
    Plan,
    Prediction,
    RankMap,
    StagePrediction,
    UserSide,
)
from nest_megatron.units import GIB

SECTIONS = (
    "What binds",
    "Memory per stage of the plan, GiB",
    "Time per step of the plan",
    "Changed keys",
    "Environment",
    "Rank map",
    "Runner-ups",
    "Search",
    "Assumptions",
    "What this plan does not check",
)


def stage(index: int, *, layers: int = 4, in_flight: int = 1, loss_gib: int = 0) -> StagePrediction:
    """Return a stage whose activations grow with the micro-batches in flight."""
    terms = {
        "weights": 8 * GIB,
        "gradients": 16 * GIB,
        "optimizer": 6 * GIB,
        "activations": 2 * in_flight * GIB,
        "loss": loss_gib * GIB,
        "workspace": GIB,
    }
    return StagePrediction(
        stage=index,
        num_layers=layers,
        allocated_bytes=sum(terms.values()),
        phase="first optimizer step",
        terms_bytes=terms,
        busy_s=0.1,
        in_flight=in_flight,
    )


def prediction(stages: tuple[StagePrediction, ...], **changes: Any) -> Prediction:
    """Return a prediction whose time terms sum to its step."""
    split = {"compute": 8.0, "recompute": 0.0, "bubble": 2.0, "tp": 1.5, "dp": 0.4, "overhead": 0.1}
    worst = max(stages, key=lambda item: item.allocated_bytes)
    values: dict[str, Any] = {
        "step_time_s": 12.0,
        "step_time_band_s": (10.0, 14.0),
        "tokens_per_s_per_gpu": 5123.0,
        "mfu": 0.412,
        "peak_allocated_bytes": worst.allocated_bytes,
        "peak_device_bytes": worst.allocated_bytes + 6 * GIB,
        "visible_bytes": 79 * GIB,
        "feasible": True,
        "band": "TIGHT",
        "worst_stage": worst.stage,
        "worst_phase": worst.phase,
        "stages": stages,
        "time_split": split,
    }
    return Prediction(**(values | changes))


def long_plan(**changes: Any) -> Plan:
    """Return a plan with 16 stages beside a user's layout that cannot be built."""
    stages = tuple(stage(i, in_flight=16 - i, loss_gib=5 * (i == 15)) for i in range(16))
    layout = Layout(
        tp=4,
        pp=16,
        dp=2,
        ep=2,
        edp=4,
        sequence_parallel=True,
        global_batch=128,
        num_layers_per_chunk=(4,) * 16,
        sharding="optim",
    )
    user = Layout(
        tp=8,
        pp=6,
        dp=2,
        etp=8,
        edp=2,
        global_batch=128,
        num_layers_per_chunk=(10, 10, 11, 11, 11, 11),
        recompute=Recompute(granularity="full", method="uniform", num_layers=1),
        overlap=Overlap(grad_reduce=True, param_gather=True),
    )
    violation = {
        "code": "NEST-R01",
        "rule": "grid.world",
        "message": "the world is not a multiple of tp * pp * cp",
        "factors": [{"name": "world", "value": 128, "origin": "trainer.num_nodes"}],
        "nearest": ["pp=4", "pp=8"],
        "source": "megatron/core/parallel_state.py",
    }
    runner_up = dataclasses.replace(layout, pp=8, dp=4, num_layers_per_chunk=(8,) * 8)
    values: dict[str, Any] = {
        "layout": layout,
        "prediction": prediction(stages),
        "certificate": Certificate(
            search_s=0.53,
            configurations=12345,
            evaluated=200,
            pruned={"bound": 12000, "memory": 145},
            lower_bound_s=11.9,
            objective_s=12.0,
            gap=12.0 / 11.9 - 1,
        ),
        "outcome": "repaired",
        "headline": "TIGHT: repaired, 12.0 s per step",
        "ratio": None,
        "rank_map": RankMap(
            order="tp-cp-ep-dp-pp",
            nodes=tuple(f"gpu{node:03d}" for node in range(16)),
            gpus_per_node=8,
            step_time_s=11.4,
            default_step_time_s=12.0,
            bound_s=11.1,
            optimal=False,
            priced=12,
            estimated=3000,
            search_s=0.4,
            prices=(
                OrderPrice(order="tp-cp-ep-dp-pp", nodes="slurm", step_time_s=12.0),
                OrderPrice(order="tp-cp-ep-dp-pp", nodes="map", step_time_s=11.4),
            ),
            crossings=(
                AxisCrossings(
                    axis="pp", size=16, groups=8, mapped={"leaf": 8, "pod": 1}, default={"leaf": 8, "pod": 6}
                ),
            ),
        ),
        "env": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        "edits": {"model.tensor_model_parallel_size": 4, "model.recompute_granularity": None},
        "user": UserSide(layout=user, prediction=None, violations=(violation,)),
        "runner_ups": (Candidate(layout=runner_up, prediction=prediction(stages, step_time_s=12.3)),),
        "rejections": {"NEST-R01 grid.world": 100, "memory: does not fit": 5000},
        "assumptions": ("the cluster is the default one",),
        "provenance": {"model": "gpt", "cluster": "dgx-h100", "num_gpus": 128, "calibration": ""},
    }
    return Plan(**(values | changes))


#: Name of a frozen plan -> the options, beside the example job of docs/cli.md, that it was made with.
REAL_PLANS = {
    "rewritten": ["--cluster", "dgx-h100"],
    "repaired": ["--cluster", "dgx-a100-80-2to1", "--gpus", "32"],
}


@pytest.fixture(params=list(REAL_PLANS))
def real_plan(request: pytest.FixtureRequest, repository: Path, tmp_path: Path) -> tuple[str, Plan]:
    """A plan that the real pipeline made, frozen as JSON so that a better cost model changes no report."""
    path = repository / "tests" / "golden" / f"plan_{request.param}.json"
    if request.config.getoption("--update-golden"):
        freeze(path, repository, tmp_path, REAL_PLANS[request.param], broken=request.param == "repaired")
    return request.param, Plan.load(path)


def freeze(path: Path, repository: Path, folder: Path, options: list[str], *, broken: bool) -> None:
    """Plan the example job; a broken one asks for more tensor parallelism than it has heads."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (repository / "docs" / "cli.md").read_text(), flags=re.DOTALL)
    if broken:
        text = text.replace("tensor_model_parallel_size: 8", "tensor_model_parallel_size: 16")
    job = folder / "job.yaml"
    job.write_text(text, encoding="utf-8")
    assert main(["plan", "--config", str(job), *options, "--json", str(path)]) == EXIT_OK
    plan = Plan.load(path)
    certificate = dataclasses.replace(plan.certificate, search_s=1.0)
    provenance = plan.provenance | {"source": job.name}
    frozen = dataclasses.replace(plan, certificate=certificate, provenance=provenance)
    path.write_text(frozen.to_json(), encoding="utf-8")


def rendered(plan: Plan, *, width: int = 100, encoding: str = "utf-8") -> str:
    """Return the report as a log file of this width and encoding would hold it."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    render_plan(plan, console=Console(file=stream, width=width))
    stream.flush()
    return raw.getvalue().decode(encoding)


def checked(check: Check, *, width: int = 100) -> str:
    """Return the report of a check."""
    console = Console(file=io.StringIO(), width=width)
    render_check(check, console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_the_reports_of_a_real_plan_are_the_golden_ones(
    golden: Callable[[str, str], None], real_plan: tuple[str, Plan]
) -> None:
    """Plans of the real pipeline, one rewritten and one repaired, give the reports in tests/golden."""
    name, plan = real_plan
    assert plan.outcome == name
    golden(f"plan_{name}.txt", rendered(plan))
    legal = not plan.user.violations
    check = Check(user=plan.user, plan=plan, failure=None, exit_code=EXIT_OK if legal else EXIT_NO_PLAN)
    golden(f"check_{name}.txt", checked(check))


def test_a_check_says_illegal_not_fitting_or_legal_first() -> None:
    """The first line of a check is its verdict, and names states that exceed the device alone (C001)."""
    plan = long_plan()
    legal = UserSide(layout=plan.layout, prediction=plan.prediction)
    tight = Check(user=legal, plan=plan, failure=None, exit_code=EXIT_OK)
    assert checked(tight).splitlines()[0].startswith("LEGAL, TIGHT (29 of 82 ")

    def too_small(visible_gib: int) -> str:
        small = prediction(
            (stage(0, in_flight=8),), visible_bytes=visible_gib * GIB, feasible=False, band="OOM"
        )
        user = UserSide(layout=plan.layout, prediction=small)
        failure = NoPlanError("NEST-P02", "no layout fits")
        return checked(Check(user=user, plan=None, failure=failure, exit_code=EXIT_NO_PLAN))

    assert (
        too_small(29).splitlines()[0].startswith("DOES NOT FIT: model states alone need 30.0 GiB of 29.0 GiB")
    )
    text = too_small(40)
    assert text.splitlines()[0].startswith("DOES NOT FIT: stage 0 needs 53.0 GiB")
    assert "NEST-P02: no layout fits" in text

    illegal = Check(user=plan.user, plan=plan, failure=None, exit_code=EXIT_NO_PLAN)
    assert checked(illegal).splitlines()[0] == "ILLEGAL: the world is not a multiple of tp * pp * cp"


@pytest.mark.parametrize(("width", "encoding"), [(80, "ascii"), (120, "utf-8")])
def test_a_long_pipeline_beside_an_illegal_layout(
    golden: Callable[[str, str], None], width: int, encoding: str
) -> None:
    """The report of a 16-stage repair is the golden one, in ASCII at 80 and in UTF-8 at 120 columns."""
    golden(f"plan_long_pipeline_{width}.txt", rendered(long_plan(), width=width, encoding=encoding))


@pytest.mark.parametrize("width", [80, 97, 120, 160])
def test_the_first_line_is_the_headline_and_no_section_is_missing(width: int) -> None:
    """The verdict stands alone on the first line, however long; every section follows; no table overflows."""
    headline = "kept: " + "a long reason " * 20
    lines = rendered(long_plan(headline=headline), width=width).splitlines()
    assert lines[0] == headline
    positions = [lines.index(section) for section in SECTIONS]
    assert positions == sorted(positions)
    assert max(len(line.rstrip()) for line in lines[1:]) <= width


def test_a_log_has_no_colours_and_a_terminal_has() -> None:
    """Escape sequences appear only when somebody watches."""
    assert "\x1b" not in rendered(long_plan())
    stream = io.StringIO()
    render_plan(long_plan(), console=Console(file=stream, width=100, force_terminal=True))
    assert "\x1b[" in stream.getvalue()


def test_the_report_ends_with_what_is_not_checked() -> None:
    """The last section names every limit, and that nothing was executed."""
    tail = rendered(long_plan(), width=160).split("What this plan does not check\n")[1]
    assert [line.strip() for line in tail.splitlines()] == [f"- {item}" for item in NOT_CHECKED]
    assert "nothing was executed here" in tail


def test_changed_axes_are_marked_and_equal_ones_are_not() -> None:
    """A row carries the mark exactly when the plan differs from the user's layout."""
    text = rendered(long_plan(), width=120)
    marked = {line[2:26].strip() for line in text.splitlines() if line.startswith("│") and "●" in line}
    assert "tensor parallel (tp)" in marked
    assert "layers per chunk" in marked
    assert not marked & {"data parallel (dp)", "context parallel (cp)", "rank order", "step time", "MFU"}


def test_a_long_pipeline_shows_first_worst_and_last_stage() -> None:
    """Of many different stages three are shown; the others are counted with the range of their memory."""
    stages = tuple(stage(i, in_flight=20 if i == 5 else 16 - i) for i in range(16))
    lines = rendered(long_plan(prediction=prediction(stages))).splitlines()
    start = lines.index("Memory per stage of the plan, GiB") + 2
    names = [line.split("  ")[0] for line in lines[start : start + 5]]
    assert names == ["0", "… (4)", "5●", "… (9)", "15"]
    low, high = (fmt.gib(stages[i].allocated_bytes) for i in (14, 6))
    assert f"{low}-{high}" in lines[start + 3]


def test_equal_neighbours_share_one_row() -> None:
    """Stages that print the same numbers are joined, so a uniform pipeline is one row."""
    stages = tuple(stage(i, in_flight=3) for i in range(2 * MAX_STAGE_ROWS))
    lines = rendered(long_plan(prediction=prediction(stages))).splitlines()
    row = lines[lines.index("Memory per stage of the plan, GiB") + 2]
    assert row.startswith(f"0-{2 * MAX_STAGE_ROWS - 1}●")


def test_memory_columns_keep_every_byte() -> None:
    """Terms without a column of their own are in the last one, so that a row sums to the allocation."""
    terms = {"weights": 1, "loss": 2, "workspace": 4, "a_new_term": 8}
    columns = memory_columns(terms)
    assert columns["other"] == 12
    assert sum(columns.values()) == sum(terms.values())


def test_time_terms_sum_to_the_step() -> None:
    """What the split does not explain is printed as a remainder, in either direction."""
    stages = (stage(0),)
    for seconds in (11.0, 12.0, 13.0):
        terms = time_terms(prediction(stages, step_time_s=seconds))
        assert sum(terms.values()) == pytest.approx(seconds)
        assert ("not attributed" in terms) == (seconds != 12.0)


def test_states_that_do_not_fit_alone_are_said_to_be_the_cause() -> None:
    """C001: when weights, gradients and optimizer exceed the device, a shorter sequence cannot help."""
    big = prediction((stage(0),), visible_bytes=29 * GIB, feasible=False, band="OOM")
    text = rendered(long_plan(prediction=big), width=160)
    assert "model states alone need 30.0 GiB of 29.0 GiB per GPU" in text
    assert "DOES NOT FIT" in text
    fits = prediction((stage(0),), visible_bytes=31 * GIB)
    assert "model states alone" not in rendered(long_plan(prediction=fits), width=160)


def test_a_sharded_optimizer_without_data_parallelism_is_named() -> None:
    """C016: sharding over one rank saves nothing, and the report says so only then."""
    layout = Layout(sharding="optim")
    assert "saves nothing" in rendered(long_plan(layout=layout), width=160)
    assert "saves nothing" not in rendered(long_plan(layout=dataclasses.replace(layout, dp=2)), width=160)


def test_violations_carry_factors_origin_and_the_nearest_choice() -> None:
    """A person can act on each violation: values, where they came from, and what would be legal."""
    text = rendered(long_plan(), width=160)
    assert "NEST-R01 grid.world: the world is not a multiple of tp * pp * cp" in text
    assert "world = 128 (trainer.num_nodes)" in text
    assert "nearest: pp=4; pp=8" in text


def test_edits_are_printed_as_overrides_that_can_be_pasted() -> None:
    """Changed keys are valid Hydra overrides, null included."""
    text = rendered(long_plan(), width=80)
    assert "\n  ++model.tensor_model_parallel_size=4\n  ++model.recompute_granularity=null\n" in text


HOSTILE = "[bold red]x[/] :smile: [link=http://a]b[/link] \x1b[2J\x07\r\n\u202e\u2028 é 漢"


def test_content_cannot_inject_markup_or_control_characters() -> None:
    """Names from files appear as they are written; escape sequences and reversed text appear escaped."""
    violation = {"code": HOSTILE, "rule": "", "message": HOSTILE}
    hostile = long_plan(
        headline=HOSTILE,
        assumptions=(HOSTILE,),
        rejections={HOSTILE: 1},
        provenance={"model": HOSTILE},
        env={HOSTILE: HOSTILE},
        rank_map=dataclasses.replace(long_plan().rank_map, nodes=(HOSTILE,) * 20),
        user=UserSide(layout=Layout(), prediction=None, violations=(violation,)),
    )
    for encoding in ("utf-8", "ascii", "latin-1"):
        text = rendered(hostile, encoding=encoding, width=160)
        assert text.count("[bold red]x[/] :smile: [link=http://a]b[/link] \\x1b[2J\\x07\\r") >= 5
        assert not set(re.findall(r"[\x00-\x1f\x7f-\x9f\u202e\u2028]", text)) - {"\n"}
        assert ("é" in text) == (encoding == "utf-8")


@given(st.text(), st.sampled_from(["utf-8", "ascii"]))
def test_any_text_can_be_printed(text: str, encoding: str) -> None:
    """No character makes a report fail, lone surrogates included, and none breaks a line."""
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), width=80)
    cleaned = Page(console).clean(text)
    cleaned.encode(encoding)
    assert len(cleaned.splitlines()) <= 1
    assert cleaned.isprintable()


@pytest.mark.parametrize(
    ("counts", "text"),
    [((9, 10, 10, 9), "9, 2 chunks of 10, 9"), ((8,) * 4, "4 chunks of 8"), ((61,), "61"), ((), "-")],
)
def test_layer_counts_keep_their_order(counts: tuple[int, ...], text: str) -> None:
    """Equal neighbours are joined, but the model order stays readable."""
    assert layers_per_chunk(counts) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.345, "12.3 s"), (0.5304, "530 ms"), (0.00123, "1.23 ms"), (123.4, "123 s"), (0.0, "0.000 ms")],
)
def test_durations_have_three_digits_and_a_unit(seconds: float, text: str) -> None:
    """Three significant digits: the prediction does not have more."""
    assert fmt.duration(seconds) == text
