"""The first line of a plan and its notes on the choice, in words."""

from __future__ import annotations

from nest_megatron.planner.search import SearchResult
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.plan import Outcome, Prediction, RankMap, UserSide
from nest_megatron.specs.settings import PlanSettings

#: The best plan must beat the user's by this share at both ends of every overlap interval (DESIGN section 7).
MINIMUM_GAIN = 0.03


def map_gain(placed: RankMap) -> str:
    """Return what the host files add to a headline that prices the scheduler's order."""
    return f"; the rank map saves another {placed.gain:.1%} of the step" if placed.gain > 0 else ""


def measured(settings: PlanSettings, cluster: Cluster) -> str:
    """Return what the times of a robust plan's headline are."""
    if settings.robust is None:
        return ""
    words = {"worst": "in the worst", "cvar": "in the slowest fifth (CVaR)"}[settings.robust]
    return f", {words} of {len(cluster.scenarios)} scenarios"


def plan_headline(
    outcome: Outcome,
    ratio: tuple[float, float] | None,
    prediction: Prediction,
    user: UserSide,
    result: SearchResult,
) -> str:
    """Return the first line of a plan: what was done, and how it compares with the user's layout.

    Args:
        ratio: lowest and highest time(plan) / time(user) under the same assumptions, where both are known.
    """
    text = {
        "kept": "Your layout is kept",
        "rewritten": "Rewritten to your pins"
        if ratio and ratio[1] > 1 - MINIMUM_GAIN
        else "Rewritten to a faster layout",
        "repaired": "Repaired: your layout "
        + ("is illegal" if user.violations else "does not fit in memory"),
    }[outcome]
    if outcome == "kept" and ratio is not None and ratio != (1.0, 1.0):
        text += f": the fastest found takes {_span(ratio)} of its time, not surely {MINIMUM_GAIN:.0%} less"
    elif outcome == "kept":
        text += ": the search found nothing faster"
    elif outcome == "rewritten" and ratio is not None:
        text += f": {_span(ratio)} of your step time"
    if result.forced:
        return f"FORCED, does not fit in memory. {text}"
    if prediction.band == "TIGHT":
        return f"TIGHT on memory, out-of-memory is possible. {text}"
    return text


def _span(ratio: tuple[float, float]) -> str:
    low, high = (f"{share:.1%}" for share in ratio)
    return low if low == high else f"{low} to {high}"


def selection_notes(result: SearchResult, settings: PlanSettings) -> tuple[str, ...]:
    """Return how the plan was chosen among near ties, as assumptions of the plan."""
    notes = ["among layouts within 3 % of the fastest, more memory head-room wins, then fewer changes"]
    if settings.robust is not None:
        notes = ["the layout of least measure over the scenarios is taken, near ties are not weighed"]
    if result.tight:
        notes.append("no layout within the safe memory band comes within 10 % of the chosen one")
    return tuple(notes)
