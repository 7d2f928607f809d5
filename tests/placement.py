"""Random allocations, and optima of rank placement that do not use the planner's search.

Three truths: every permutation of nodes, every assignment of ranks to GPUs, and a mixed-integer program on
loads (HiGHS).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import highspy
import numpy as np
import numpy.typing as npt

from nest_megatron.cluster.allocation import allocate, in_order, natural_order
from nest_megatron.cluster.groups import GroupShape, worst_shape
from nest_megatron.cluster.load import load_cluster
from nest_megatron.cluster.slots import slot_tree
from nest_megatron.planner.arrangements import place_tree
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.planner.placement import LoadEstimate, axis_groups, constructed, improved
from nest_megatron.specs.cluster import Cluster, Unit
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.model import ModelSpec, MoESpec
from tests.builders import gpt175b, llama8b, llama70b, make_job, make_layout, mixtral

Ints = npt.NDArray[np.int64]


def small_tree(rng: random.Random, *, nodes: int, per_node: int, depth: int = 1) -> Cluster:
    """A random tree: uneven leaves, perhaps pods of leaves, some slow uplinks of leaves and nodes."""
    base = load_cluster("dgx-h100")
    names = [f"n{i}" for i in range(1, nodes + 1)]
    node_level = dataclasses.replace(base.levels[0], gpus=per_node)
    tiers = [
        dataclasses.replace(base.levels[1], name=f"tier{i}", gpus=per_node * 2 ** (i + 1))
        for i in range(depth)
    ]
    rate = base.levels[1].bandwidth_bytes_per_s
    top = dataclasses.replace(
        base.levels[2], gpus=per_node * 1024, bandwidth_bytes_per_s=rate * rng.choice((0.125, 0.25, 0.5))
    )
    units: list[Unit] = []
    blocks = [[name] for name in rng.sample(names, nodes)]
    for tier in tiers:
        groups: list[list[str]] = [[] for _ in range(rng.randint(2, max(2, len(blocks) - 1)))]
        for i, block in enumerate(blocks):
            groups[i if i < len(groups) else rng.randrange(len(groups))] += block
        blocks = [group for group in groups if group]
        above = tiers[tiers.index(tier) + 1] if tier is not tiers[-1] else top
        for i, group in enumerate(blocks):
            slow = above.bandwidth_bytes_per_s * rng.choice((0.25, 0.5)) if rng.random() < 0.25 else None
            units.append(
                Unit(level=tier.name, name=f"{tier.name}-{i}", nodes=tuple(group), uplink_bytes_per_s=slow)
            )
    if rng.random() < 0.3:
        units.append(
            Unit(level=node_level.name, name="weak", nodes=(rng.choice(names),), uplink_bytes_per_s=rate / 2)
        )
    return dataclasses.replace(
        base,
        gpus_per_node=per_node,
        num_nodes=nodes,
        levels=(node_level, *tiers, top),
        nodes=natural_order(names),
        units=tuple(units),
    )


def small_model() -> ModelSpec:
    """Twelve layers of Llama 3 8B."""
    return llama8b(num_layers=12)


def small_layout(rng: random.Random, world: int) -> tuple[TrainJob, Layout]:
    """A random layout of a small model on ``world`` GPUs; sequences are short, so communication counts."""
    moe = rng.random() < 0.3
    tp = rng.choice([t for t in (1, 1, 2) if world % t == 0])
    cp = 1 if moe else rng.choice([c for c in (1, 1, 2) if world % (tp * c) == 0])
    pp = rng.choice([p for p in (1, 2, 4, 3) if world % (tp * cp * p) == 0])
    experts = MoESpec(num_experts=8, top_k=2, ffn_hidden_size=14336, layer_pattern=(1,) * 12)
    model = mixtral(num_layers=12, moe=experts) if moe else small_model()
    job = make_job(model=model, num_gpus=world, global_batch=world * 4, sequence_length=1024)
    degrees: dict[str, int] = {"tp": tp, "cp": cp, "pp": pp}
    if moe:
        degrees |= {"ep": rng.choice([e for e in (1, 2, 4, 8) if world // pp % e == 0]), "etp": 1}
    sharding = rng.choice(["none", "optim"])
    order = rng.choice(job.capabilities.orders)
    return job, make_layout(job, **degrees, sharding=sharding, sequence_parallel=tp > 1, order=order)


def best_node_order_s(job: TrainJob, cluster: Cluster, layout: Layout) -> float:
    """Return the least step time over all permutations of the nodes, each priced as its own cluster."""
    return min(
        Evaluator(job, in_order(cluster, order)).step_times_s([layout])[0]
        for order in itertools.permutations(cluster.nodes)
    )


def best_slot_map_s(job: TrainJob, cluster: Cluster, layout: Layout) -> float:
    """Return the least step time over all assignments of ranks to GPUs; GPUs of a node are alike."""
    tree = slot_tree(cluster)
    evaluator = Evaluator(job, cluster)
    evaluator.step_times_s([layout])
    asked = [group for group in evaluator.cost.pricer.groups if group[0] > 1]
    members = {group: axis_groups(tree, *group, pairs=False).members for group in asked}
    best, prices = float("inf"), dict[tuple[GroupShape, ...], float]()
    for slot_of_rank in _assignments(cluster.num_nodes, cluster.gpus_per_node):
        shapes = tuple(worst_shape(tree, slot_of_rank[ranks]) for ranks in members.values())
        if shapes not in prices:
            priced = Evaluator(job, cluster)
            priced.cost.pricer.assume(dict(zip(asked, shapes, strict=True)))
            prices[shapes] = priced.step_times_s([layout])[0]
        best = min(best, prices[shapes])
    return best


def _assignments(num_nodes: int, per_node: int) -> list[Ints]:
    """Return the slot of every rank for each way to deal ranks to nodes."""
    found: list[list[int]] = [[]]
    for _ in range(num_nodes * per_node):
        found = [
            [*dealt, node] for dealt in found for node in range(num_nodes) if dealt.count(node) < per_node
        ]
    maps = []
    for dealt in found:
        used = [0] * num_nodes
        slots = []
        for node in dealt:
            slots.append(node * per_node + used[node])
            used[node] += 1
        maps.append(np.array(slots, dtype=np.int64))
    return maps


def least_load(groups: Sequence[tuple[float, Ints]], sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the least weighted load of placing positions into units, by a mixed-integer program.

    Minimise the sum over axes of weight * max_u(seconds_u * groups that touch u and leave it).  A group that
    reenters a unit would load it twice; the program does not count that, so it is a lower bound.

    Args:
        groups: (weight, positions of each group (G, n)) by axis.
        sizes: positions that each unit holds; ``seconds``: of one group that leaves the unit.
    """
    positions, units = sum(sizes), len(sizes)
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    at = [[model.addBinary() for _ in range(units)] for _ in range(positions)]
    for position in range(positions):
        model.addConstr(sum(at[position]) == 1)
    for unit, size in enumerate(sizes):
        model.addConstr(sum(at[position][unit] for position in range(positions)) == size)
    total = 0.0
    for weight, rows in groups:
        busiest = model.addVariable(lb=0.0)
        total = total + weight * busiest
        leaving = []
        for row in rows.tolist():
            touches = [model.addVariable(lb=0.0, ub=1.0) for _ in range(units)]
            whole = [model.addVariable(lb=0.0, ub=1.0) for _ in range(units)]
            for unit in range(units):
                for position in row:
                    model.addConstr(touches[unit] - at[position][unit] >= 0)
                    model.addConstr(at[position][unit] - whole[unit] >= 0)
            leaving.append([t - w for t, w in zip(touches, whole, strict=True)])
        for unit in range(units):
            load = sum(row[unit] for row in leaving)
            model.addConstr(busiest - seconds[unit] * load >= 0)
    model.minimize(total)
    assert model.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(model.getObjectiveValue())


def placement_gap(seed: int, *, nodes: Sequence[int]) -> tuple[float, float]:
    """Return the weighted load of the best order that the search for large allocations finds, and the least.

    Two axes of random size and weight on a random tree of uneven leaves, whole nodes only.
    """
    rng = random.Random(seed)
    count = rng.choice(nodes)
    random_tree = small_tree(rng, nodes=count, per_node=8)
    leaves = tuple(unit for unit in random_tree.units if unit.name != "weak")
    tree = slot_tree(dataclasses.replace(random_tree, units=leaves))
    inner = rng.choice([size for size in range(2, count) if count % size == 0])
    keys = [(inner, 8), (count // inner, 8 * inner)]
    axes = {key: axis_groups(tree, *key, pairs=False) for key in keys}
    leaf_of_node = tree.unit_of_slot[1][::8]
    units, sizes = np.unique(leaf_of_node, return_counts=True)
    seconds = 1.0 / (sizes * tree.uplink_share[1][units])
    weights = {key: rng.choice((0.2, 1.0, 3.0)) for key in keys}

    def load(key: tuple[int, int], order: Ints) -> float:
        leaf = leaf_of_node[order][axes[key].positions]
        leaving = leaf != np.roll(leaf, -1, axis=1)
        return float(max(((leaf == u) & leaving).sum() * s for u, s in zip(units, seconds, strict=True)))

    identity = np.arange(count)
    estimate = LoadEstimate(tree, axes, {key: weights[key] * load(key, identity) for key in keys})
    orders = [identity, *constructed(place_tree(tree), list(axes.values()), per_node=8, seed=0)]
    start = min(orders, key=estimate)
    orders.append(improved(start, estimate, seed=0)[0])
    ours = min(sum(weights[key] * load(key, order) for key in keys) for order in orders)
    least = least_load(
        [(weights[key], axes[key].positions) for key in keys], sizes.tolist(), seconds.tolist()
    )
    return ours, least


def fragmented(seed: int) -> tuple[TrainJob, Cluster, Layout]:
    """A job on a random part of a busy site: leaves of 16 or 32 nodes, some of them slow, 2:1 or 4:1 above.

    The site's names run across the leaves in half of the cases, as after years of repairs.
    """
    rng = random.Random(seed)
    jobs = [
        (llama8b(), 16, 256, {"tp": rng.choice((1, 2, 4)), "pp": rng.choice((1, 2))}),
        (
            llama70b(),
            32,
            512,
            {"tp": rng.choice((4, 8)), "pp": rng.choice((2, 4, 8)), "cp": rng.choice((1, 2))},
        ),
        (mixtral(), 32, 512, {"tp": 2, "pp": rng.choice((2, 4)), "ep": rng.choice((4, 8)), "etp": 1}),
        (gpt175b(), 64, 768, {"tp": 8, "pp": rng.choice((4, 8, 16))}),
        (gpt175b(), 128, 1536, {"tp": 8, "pp": 8}),
    ]
    model, nodes, batch, degrees = jobs[rng.randrange(len(jobs))]
    job = make_job(
        degrees | {"sharding": "optim", "sequence_parallel": True} if degrees["tp"] > 1 else degrees,
        model=model,
        num_gpus=nodes * 8,
        global_batch=batch,
        sequence_length=2048 if model.name.startswith("gpt") else 4096,
    )
    base = load_cluster("dgx-h100-2to1")
    per_leaf = rng.choice((16, 32))
    leaves = max(4, 2 * nodes // per_leaf)
    names = [f"gpu{i}" for i in range(1, per_leaf * leaves + 1)]
    placed = rng.sample(names, len(names)) if rng.random() < 0.5 else names
    top = dataclasses.replace(
        base.levels[2], bandwidth_bytes_per_s=base.levels[1].bandwidth_bytes_per_s / rng.choice((2, 4))
    )
    units = []
    for i in range(leaves):
        slow = top.bandwidth_bytes_per_s * 0.75 if rng.random() < 0.15 else None
        inside = tuple(placed[i * per_leaf : (i + 1) * per_leaf])
        units.append(Unit(level="leaf", name=f"leaf{i}", nodes=inside, uplink_bytes_per_s=slow))
    site = dataclasses.replace(
        base, levels=(*base.levels[:2], top), nodes=tuple(names), num_nodes=len(names), units=tuple(units)
    )
    # What is free lies in runs of neighbours, as schedulers leave it behind.
    free: list[str] = []
    starts = list(range(0, len(names), 4))
    rng.shuffle(starts)
    for start in starts:
        free += names[start : start + rng.randint(1, 4)]
    free += [name for name in names if name not in free]
    return job, allocate(site, nodelist=",".join(free[:nodes])), job.user_layout
