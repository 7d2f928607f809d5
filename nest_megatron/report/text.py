"""Text reports for terminals and logs: what was decided, why, and what nobody checked.

Everything printed here was computed before; this module only chooses words, units and order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from nest_megatron.launch.overrides import override_strings
from nest_megatron.report import page as fmt
from nest_megatron.report import tables
from nest_megatron.report.page import Page
from nest_megatron.report.rankmap import render_rank_map
from nest_megatron.report.repair import render_repair
from nest_megatron.report.robust import render_robust
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.plan import Candidate, Certificate, Plan, Prediction

if TYPE_CHECKING:
    from nest_megatron.pipeline import Check

#: Printed at the end of every report, whatever the plan says.
NOT_CHECKED: tuple[str, ...] = (
    "real kernels and the real GPU: all times and bytes are predicted, nothing was executed here",
    "network contention by other jobs, failing links, throttled or slow GPUs",
    "host stalls: data loading, Python, checkpoint writes, host memory",
    "framework defects and regressions, hangs, versions other than the one named above",
    "convergence and numerics: a layout changes the order of sums, and dropout masks follow the ranks",
    "experts that receive much more than the assumed share of tokens",
)

#: Parts of the provenance that other commands read.
_NOT_SHOWN = ("request", "replan")


def render_plan(plan: Plan, *, console: Console) -> None:
    """Print a plan: verdict first, then layouts side by side, memory, time, and the limits of the search."""
    page = Page(console)
    page.verbatim(plan.headline, "bold")
    render_provenance(page, plan.provenance)
    page.line()
    page.show(tables.layout_panel(page, plan.user, _as_candidate(plan)))
    _ratio(page, plan)
    _notes(page, plan.layout, plan.prediction)
    _memory(page, plan.prediction, "Memory per stage of the plan, GiB")
    _time(page, plan.prediction, plan.user.prediction, "Time per step of the plan")
    render_violations(page, plan.user.violations)
    _lines(page, "Changed keys", override_strings(plan.edits), "none")
    _lines(page, "Environment", [f"{name}={value}" for name, value in plan.env.items()], "nothing to set")
    render_rank_map(page, plan.rank_map)
    if plan.robust is not None:
        render_robust(page, plan.robust)
    _alternatives(page, plan)
    _assumptions(page, plan.assumptions)
    render_not_checked(page)


def render_check(check: Check, *, console: Console, assumptions: Sequence[str] = ()) -> None:
    """Print the verdict on the user's own layout: legality, memory, time, and the ratio to the best plan.

    ``assumptions`` are sentences from before the pipeline, for example about the file; they are printed with
    the plan's own.
    """
    page = Page(console)
    user, plan = check.user, check.plan
    page.verbatim(check_verdict(check), "bold")
    render_provenance(page, plan.provenance if plan else {})
    render_violations(page, user.violations)
    page.line()
    page.show(tables.layout_panel(page, user, _as_candidate(plan) if plan else None))
    if plan is not None:
        _ratio(page, plan)
    if user.prediction is not None:
        _notes(page, user.layout, user.prediction)
        _memory(page, user.prediction, "Memory per stage of your layout, GiB")
        _time(page, user.prediction, None, "Time per step of your layout")
    if check.repair is not None:
        render_repair(page, check.repair, "To make your layout fit, change")
    if plan is not None:
        edits = override_strings(plan.edits)
        _lines(page, "To use the plan, change", edits, "nothing: the plan is your layout")
        _alternatives(page, plan)
    if check.failure is not None:
        page.section("No better layout can be named")
        page.bullets([check.failure.render()])
    _assumptions(page, dict.fromkeys((*assumptions, *(plan.assumptions if plan else ()))))
    render_not_checked(page)


def check_verdict(check: Check) -> str:
    """Return the first line of a check: illegal, does not fit, or legal with its risk label."""
    user = check.user
    if user.violations:
        first, rest = user.violations[0], len(user.violations) - 1
        more = f" (and {rest} more)" if rest else ""
        return f"ILLEGAL: {first['message']}{more}"
    prediction = user.prediction
    if prediction is None:
        return f"NOT EVALUATED: {check.failure.message if check.failure else 'no prediction for this layout'}"
    if not prediction.feasible:
        floor = _state_floor(prediction)
        if floor:
            return f"DOES NOT FIT: {floor}"
        return (
            f"DOES NOT FIT: stage {prediction.worst_stage} needs {fmt.gib(prediction.peak_device_bytes)} GiB "
            f"on the device in {prediction.worst_phase}, {fmt.gib(prediction.visible_bytes)} GiB are visible"
        )
    return f"LEGAL, {tables.memory_verdict(prediction)}; step {fmt.duration(prediction.step_time_s)}"


def _as_candidate(plan: Plan) -> Candidate:
    return Candidate(layout=plan.layout, prediction=plan.prediction)


def render_provenance(page: Page, provenance: Mapping[str, Any]) -> None:
    """Print where everything came from, in one line."""
    shown = {key: value for key, value in provenance.items() if value and key not in _NOT_SHOWN}
    known = [f"{key.replace('_', ' ')}: {value}" for key, value in shown.items()]
    if known:
        page.line("; ".join(known), "dim")


def _ratio(page: Page, plan: Plan) -> None:
    """Print the paired ratio; both ends come from the same assumptions for both layouts."""
    if plan.ratio is None:
        page.line("Your layout has no predicted time, so there is no ratio.")
        return
    low, high = sorted(plan.ratio)
    span = f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f} to {high:.3f}"
    page.line(f"Best layout found / your layout, step time under the same assumptions: {span}")


def _notes(page: Page, layout: Layout, prediction: Prediction) -> None:
    """Print what binds, and the two facts about memory that are most often misjudged."""
    page.section("What binds")
    notes = [_memory_binding(prediction), _time_binding(prediction)]
    notes.extend(filter(None, [_state_floor(prediction)]))
    if layout.sharding == "optim" and layout.dp * layout.cp == 1:
        notes.append("the sharded optimizer saves nothing here: data parallel x context parallel = 1")
    page.bullets(notes)


def _state_floor(prediction: Prediction) -> str:
    """Return the sentence for states that exceed the device on their own; empty when they do not."""
    floor_bytes = max(
        sum(stage.terms_bytes.get(term, 0) for term in tables.STATE_TERMS) for stage in prediction.stages
    )
    if floor_bytes <= prediction.visible_bytes:
        return ""
    return (
        f"model states alone need {fmt.gib(floor_bytes)} GiB of {fmt.gib(prediction.visible_bytes)} GiB "
        "per GPU: neither a shorter sequence nor a smaller micro-batch can help"
    )


def _memory_binding(prediction: Prediction) -> str:
    text = (
        f"memory: {tables.memory_verdict(prediction)}; stage {prediction.worst_stage} "
        f"in {prediction.worst_phase}"
    )
    worst = next(stage for stage in prediction.stages if stage.stage == prediction.worst_stage)
    term, num_bytes = max(worst.terms_bytes.items(), key=lambda item: item[1])
    total_bytes = worst.allocated_bytes
    return (
        f"{text}, where the largest term is {term}: {fmt.gib(num_bytes)} of {fmt.gib(total_bytes)} GiB "
        f"({fmt.percent(num_bytes / total_bytes)})"
    )


def _time_binding(prediction: Prediction) -> str:
    terms = sorted(tables.time_terms(prediction).items(), key=lambda item: -item[1])
    if not terms:
        return "time: no split"
    named = [f"{term} {fmt.percent(seconds / prediction.step_time_s)}" for term, seconds in terms[:2]]
    return f"time: {', then '.join(named)}"


def _memory(page: Page, prediction: Prediction, title: str) -> None:
    page.section(title)
    page.show(tables.stage_table(page, prediction))
    page.line(f"{page.mark} worst; {tables.stage_phases(prediction)}", "dim")


def _time(page: Page, prediction: Prediction, other: Prediction | None, title: str) -> None:
    page.section(title)
    page.show(tables.time_table(page, prediction, other))


def render_violations(
    page: Page, violations: Sequence[Mapping[str, Any]], title: str = "Your layout is illegal"
) -> None:
    """Print every broken rule with its factors, nearest choices and source; nothing without any."""
    if not violations:
        return
    page.section(title)
    for violation in violations:
        page.bullets([f"{violation['code']} {violation['rule']}: {violation['message']}"], "red")
        for factor in violation.get("factors", ()):
            origin = f" ({factor['origin']})" if factor.get("origin") else ""
            page.line(f"      {factor['name']} = {factor['value']}{origin}")
        nearest = [str(item) for item in violation.get("nearest", ())]
        if nearest:
            page.line(f"      nearest: {'; '.join(nearest)}")
        if violation.get("source"):
            page.line(f"      rule from: {violation['source']}", "dim")


def _lines(page: Page, title: str, lines: Sequence[str], when_empty: str) -> None:
    page.section(title)
    for line in lines or (when_empty,):
        page.verbatim(f"  {line}")


def _alternatives(page: Page, plan: Plan) -> None:
    page.section("Runner-ups")
    if plan.runner_ups:
        step_time_s = plan.prediction.step_time_s
        page.show(tables.runner_up_table(page, plan.runner_ups, step_time_s))
        if any(candidate.prediction.step_time_s < step_time_s for candidate in plan.runner_ups):
            page.line("below 1: faster, by less than what head-room and fewer changes are worth", "dim")
    else:
        page.line("  none: no other layout is legal and fits")
    if plan.rejections:
        page.section("Rejected candidates")
        page.show(tables.rejection_table(page, plan.rejections))
    page.section("Search")
    page.bullets([certificate_sentence(plan.certificate)])


def certificate_sentence(certificate: Certificate) -> str:
    """Return what was searched and how far from the optimum of that space the objective can be."""
    pruned = [f"{fmt.count(number)} by {why}" for why, number in certificate.pruned.items() if number]
    proof = (
        "nothing in this space is faster under nominal assumptions"
        if certificate.gap <= 0
        else f"any better one is at most {fmt.percent(certificate.gap)} faster"
    )
    parts = [
        f"{fmt.count(certificate.configurations)} configurations in {fmt.duration(certificate.search_s)}",
        f"{fmt.count(certificate.evaluated)} simulated",
        *([f"pruned: {', '.join(pruned)}"] if pruned else []),
        f"shortest step {fmt.duration(certificate.objective_s)}",
        f"proven bound {fmt.duration(certificate.lower_bound_s)}: {proof}",
    ]
    return "; ".join(parts)


def _assumptions(page: Page, assumptions: Sequence[str] | Mapping[str, Any]) -> None:
    page.section("Assumptions")
    page.bullets(list(assumptions) or ["none"])


def render_not_checked(page: Page) -> None:
    """Print what no report vouches for."""
    page.section("What this plan does not check")
    page.bullets(NOT_CHECKED)
