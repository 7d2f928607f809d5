"""Megatron's process groups as sets of ranks: the grid of a layout in its order string.

Dense layers live on the grid tp x cp x dp x pp, experts on etp x ep x edp x pp; both put the leftmost axis of
the order string fastest.  Source: ``megatron/core/parallel_state.py`` (``RankGenerator``,
``initialize_model_parallel``) at core_v0.16.1; research/config_surface.md 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from nest_megatron.errors import Factor, PlannerFault
from nest_megatron.specs.layout import Layout

Groups = tuple[tuple[int, ...], ...]

#: Name of a group -> (which grid, its axes); names as in Megatron's words, joined by an underscore.
GROUP_AXES: Mapping[str, tuple[str, frozenset[str]]] = {
    "tp": ("dense", frozenset({"tp"})),
    "cp": ("dense", frozenset({"cp"})),
    "pp": ("dense", frozenset({"pp"})),
    "dp": ("dense", frozenset({"dp"})),
    "dp_cp": ("dense", frozenset({"dp", "cp"})),
    "tp_cp": ("dense", frozenset({"tp", "cp"})),
    "tp_pp": ("dense", frozenset({"tp", "pp"})),
    "ep": ("expert", frozenset({"ep"})),
    "etp": ("expert", frozenset({"tp"})),
    "edp": ("expert", frozenset({"dp"})),
    "etp_ep": ("expert", frozenset({"tp", "ep"})),
}


def rank_groups(layout: Layout) -> dict[str, Groups]:
    """Return every group of ``GROUP_AXES``: each a tuple of ascending ranks, groups by their first rank.

    Raises:
        PlannerFault: the expert grid has another number of ranks than the dense one.
    """
    dense = {"tp": layout.tp, "cp": layout.cp, "ep": 1, "dp": layout.dp, "pp": layout.pp}
    expert = {"tp": layout.etp, "cp": 1, "ep": layout.ep, "dp": layout.edp, "pp": layout.pp}
    if math.prod(dense.values()) != math.prod(expert.values()):
        raise PlannerFault(
            "NEST-X10",
            "the expert grid does not cover the ranks of the dense one",
            factors=[
                Factor("world", layout.world),
                Factor("etp x ep x edp x pp", math.prod(expert.values())),
            ],
        )
    order = layout.order.split("-")
    grids = {"dense": dense, "expert": expert}
    return {name: _groups(grids[grid], order, axes) for name, (grid, axes) in GROUP_AXES.items()}


def groups_of_rank(layout: Layout, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the group that ``rank`` belongs to, for every name of ``GROUP_AXES``."""
    return {
        name: next(group for group in groups if rank in group) for name, groups in rank_groups(layout).items()
    }


def _groups(sizes: Mapping[str, int], order: list[str], axes: frozenset[str]) -> Groups:
    """Return the sets of ranks that differ on ``axes`` only."""
    # Row-major numbering has the last axis fastest, so the grid is laid out in reverse order.
    slowest_first = order[::-1]
    grid = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in slowest_first])
    outside = [i for i, axis in enumerate(slowest_first) if axis not in axes]
    inside = [i for i, axis in enumerate(slowest_first) if axis in axes]
    members = math.prod(sizes[axis] for axis in axes)
    rows = grid.transpose(outside + inside).reshape(-1, members)
    return tuple(sorted(tuple(sorted(map(int, row))) for row in rows))
