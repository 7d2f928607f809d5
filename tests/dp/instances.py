"""Random search problems small enough to try every split and every number of recomputed layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from cython_dp import reference
from cython_dp.columns import (
    NUM_COLUMNS,
    NUM_FEATURES,
    NUM_KINDS,
    NUM_PARAMS,
    RECOMPUTE_BLOCK,
    Column,
    Feature,
)


def compositions(total: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield every tuple of ``parts`` counts of at least ``least`` with that sum."""
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total - least * (parts - 1) + 1):
        for rest in compositions(total - first, parts - 1, least):
            yield (first, *rest)


def prefix_of(kinds: list[int]) -> np.ndarray:
    """Return (NUM_KINDS, L + 1) counts of the layers of each kind before each layer."""
    flags = np.array(kinds) == np.arange(NUM_KINDS)[:, None]
    counts = np.concatenate([np.zeros((NUM_KINDS, 1)), np.cumsum(flags, axis=1)], axis=1)
    return np.ascontiguousarray(counts, dtype=np.int32)


def free_problem(seed: int, candidates: int = 6) -> dict[str, Any]:
    """Return the arrays of a random problem whose candidates leave their split open, or list a few splits."""
    rng = np.random.default_rng(seed)
    num_layers = int(rng.integers(2, 9))
    kinds = rng.integers(0, rng.integers(1, 3), num_layers).tolist()
    nodes = 5
    pp = rng.integers(1, min(4, num_layers) + 1, nodes).astype(np.int32)
    m = (pp * rng.integers(1, 5, nodes)).astype(np.int32) if rng.random() < 0.5 else None
    m = rng.integers(1, 12, nodes).astype(np.int32) if m is None else m
    times = rng.random((nodes, NUM_COLUMNS)) * 1e-3
    times[:, Column.F_FIRST : Column.B_LAST + 1] *= rng.choice([0.1, 1.0, 3.0])
    times[:, Column.P2P] *= rng.choice([0.0, 0.3])
    times[:, Column.BUCKET] = rng.integers(1, 50, nodes)
    times[:, [Column.SYNC_BETA_DENSE, Column.SYNC_BETA_EXPERT]] *= 1e-2
    times[:, [Column.OPTIMIZER_DENSE, Column.OPTIMIZER_EXPERT]] *= 1e-2
    memory = rng.integers(0, 10**6, (nodes, 3, NUM_FEATURES)).astype(np.int64)
    # A recomputed layer keeps its input only, never more than what the layer would have saved.
    least_saved = memory[:, :, Feature.LIVE : Feature.LIVE + NUM_KINDS].min(axis=2)
    memory[:, :, Feature.LIVE_UNITS] = least_saved // 3
    memory[:, :, Feature.UNIT : Feature.UNIT + NUM_KINDS] //= 50
    rows: dict[str, list[int]] = {
        name: []
        for name in (
            "node", "vpp", "group", "mode", "num_recompute", "split_start",
            "free", "choice_first", "choice_count", "floor",
        )
    }  # fmt: skip
    sizes: list[int] = []
    choices: list[int] = []
    for _ in range(candidates):
        node = int(rng.integers(nodes))
        p = int(pp[node])
        v = 2 if p > 1 and m[node] % p == 0 and 2 * p <= num_layers and rng.random() < 0.4 else 1
        free = int(v == 1 and rng.random() < 0.7)
        every = list(compositions(num_layers, p * v, 1))
        count = 1 if free else int(rng.integers(1, 4))
        listed = [every[int(k)] for k in rng.integers(0, len(every), count)]
        mode = int(rng.integers(0, 3))
        rows["node"].append(node)
        rows["vpp"].append(v)
        rows["group"].append(p)
        rows["mode"].append(mode)
        rows["num_recompute"].append(0 if mode == RECOMPUTE_BLOCK else int(rng.integers(1, 3)))
        rows["free"].append(free)
        rows["choice_first"].append(len(choices))
        rows["choice_count"].append(count)
        rows["floor"].append(min(min(split[:p]) for split in listed))
        rows["split_start"].append(len(sizes))
        for split in listed:
            choices.append(len(sizes))
            sizes.extend(split)
    i32 = {name: np.array(values, dtype=np.int32) for name, values in rows.items()}
    return {
        "prefix": prefix_of(kinds),
        "node_pp": pp,
        "node_m": m,
        "node_times": times,
        "node_params": rng.integers(0, 100, (nodes, NUM_PARAMS)).astype(np.int64),
        "node_memory": memory,
        "sizes": np.array(sizes, dtype=np.int32),
        "choices": np.array(choices, dtype=np.int32),
        "least": int(rng.integers(0, 2)),
        **i32,
    }


def solutions(problem: reference.Problem, limit_bytes: int) -> Iterator[tuple[float, float, int]]:
    """Yield (simulated seconds, bound, candidate) of every split and recomputation that fits: brute force."""
    for i in range(len(problem)):
        _, p, _, _, _, mode, asked, _ = problem.shape(i)
        num_layers = problem.prefix.shape[1] - 1
        if problem.free[i]:
            splits = list(compositions(num_layers, p, problem.least))
            counts = range(1, num_layers + 1)
        else:
            choices = range(int(problem.choice_count[i]))
            splits = [reference.search.chosen_sizes(problem, i, choice) for choice in choices]
            counts = range(1, max(map(max, splits)))
        automatic = mode == RECOMPUTE_BLOCK and not asked
        for split, count in itertools.product(splits, counts if automatic else [asked]):
            if automatic and not problem.free[i] and count >= max(split):
                continue
            bound, extra, (peak, _, _) = reference.problem.bound_of(problem, i, split, count)
            if peak <= limit_bytes:
                yield reference.problem.time_of(problem, i, split, count, extra), bound, i


def peaks(problem: reference.Problem) -> list[int]:
    """Return the peaks of the candidates' own splits, ascending: limits between them decide something."""
    return sorted(int(peak) for peak in reference.bounds(problem)[2])


def limit_of(problem: reference.Problem, seed: int) -> int:
    """Return a memory limit that keeps everything, half of it, the smallest, or less than that."""
    ordered = peaks(problem)
    return (3 * ordered[-1], ordered[len(ordered) // 2], ordered[0], ordered[0] * 2 // 3)[seed % 4]


def random_schedule(rng: np.random.Generator) -> tuple:
    """Return the arguments of ``simulate``: uneven chunks, a latency per link, a legal group."""
    p = int(rng.integers(1, 9))
    v = int(rng.integers(1, 4)) if p > 1 else 1
    m = int(rng.integers(p if v > 1 else 1, 24))
    # A short last group must still fill the pipeline (config_surface.md rule 24).
    groups = [size for size in range(p, m + 1) if m % size == 0 or m % size >= p]
    group = int(rng.choice(groups)) if v > 1 else p
    spread, latency = rng.choice([0.0, 0.3, 3.0]), rng.choice([0.0, 0.3, 2.0])
    forward, backward = 1 + spread * rng.random(p * v), 2 + spread * rng.random(p * v)
    return forward, backward, p, v, m, group, latency * rng.random(p)
