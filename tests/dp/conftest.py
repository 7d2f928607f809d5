"""Both implementations of the solver, and random problems small enough for the slow one."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable

import numpy as np
import pytest

from cython_dp import reference
from cython_dp.columns import NUM_COLUMNS, NUM_FEATURES, NUM_PARAMS


def _compiled() -> types.SimpleNamespace:
    schedule = importlib.import_module("cython_dp.schedule")
    problem = importlib.import_module("cython_dp.problem")
    search = importlib.import_module("cython_dp.search")
    return types.SimpleNamespace(
        simulate=schedule.simulate,
        cycle_period=schedule.cycle_period,
        pipeline_bound=schedule.pipeline_bound,
        in_flight=schedule.in_flight,
        Problem=problem.Problem,
        bounds=problem.bounds,
        smallest_block=problem.smallest_block,
        step_time=problem.step_time,
        quick_bounds=search.quick_bounds,
        best_first=search.best_first,
    )


@pytest.fixture(params=["compiled", "reference"])
def solver(request: pytest.FixtureRequest) -> object:
    """The compiled solver, then its slow twin: every test runs on both."""
    return _compiled() if request.param == "compiled" else reference


@pytest.fixture(scope="session")
def compiled() -> object:
    """The compiled solver."""
    return _compiled()


def random_problem(seed: int, candidates: int = 40) -> dict[str, np.ndarray]:
    """Return the arrays of a random, legal search problem with up to four kinds of layers."""
    rng = np.random.default_rng(seed)
    num_layers = int(rng.integers(1, 13))
    kinds = rng.integers(0, rng.integers(1, reference.NUM_KINDS + 1), num_layers)
    flags = kinds == np.arange(reference.NUM_KINDS)[:, None]
    prefix = np.concatenate([np.zeros((reference.NUM_KINDS, 1)), np.cumsum(flags, axis=1)], axis=1)
    nodes = 12
    pp = rng.integers(1, min(4, num_layers) + 1, nodes).astype(np.int32)
    m = rng.integers(1, 9, nodes).astype(np.int32)
    times = rng.random((nodes, NUM_COLUMNS)) * 1e-3
    times[:, reference.Column.BUCKET] = rng.integers(1, 50, nodes)
    times[:, reference.Column.P2P] *= rng.integers(0, 2, nodes)
    node, vpp, group, mode, num_recompute, start, sizes = [], [], [], [], [], [], []
    for _ in range(candidates):
        index = int(rng.integers(nodes))
        p = int(pp[index])
        v = 1 if p == 1 or m[index] % p else int(rng.integers(1, 4))
        if p * v > num_layers:
            v = 1
        cuts = np.sort(rng.choice(np.arange(1, num_layers), p * v - 1, replace=False)) if p * v > 1 else []
        layers = np.diff(np.concatenate([[0], cuts, [num_layers]])).astype(int)
        node.append(index)
        vpp.append(v)
        group.append(p)
        mode.append(int(rng.integers(0, 3)))
        num_recompute.append(int(rng.integers(1, 4)))
        start.append(len(sizes))
        sizes.extend(layers.tolist())
    i32: Callable[[list[int]], np.ndarray] = lambda values: np.asarray(values, dtype=np.int32)  # noqa: E731
    return {
        "prefix": np.ascontiguousarray(prefix, dtype=np.int32),
        "node_pp": pp,
        "node_m": m,
        "node_times": times,
        "node_params": rng.integers(0, 100, (nodes, NUM_PARAMS)).astype(np.int64),
        "node_memory": rng.integers(0, 10**9, (nodes, 3, NUM_FEATURES)).astype(np.int64),
        "node": i32(node),
        "vpp": i32(vpp),
        "group": i32(group),
        "mode": i32(mode),
        "num_recompute": i32(num_recompute),
        "split_start": i32(start),
        "sizes": i32(sizes),
    }
