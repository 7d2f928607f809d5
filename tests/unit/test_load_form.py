from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron.cluster.crossings import double_tree
from nest_megatron.cluster.groups import group_shape, shape_of_groups, worst_shape
from nest_megatron.cluster.load import load_accelerator, load_cluster
from nest_megatron.cluster.slots import slot_tree
from nest_megatron.cost.collectives import CollectiveModel
from nest_megatron.cost.lines import CollectiveOp
from nest_megatron.cost.load_form import Algorithm, LoadForm, Traffic
from nest_megatron.errors import PlannerFault
from nest_megatron.specs.cluster import Cluster, Level, Unit

GIB = 1024**3
MIB = 1024**2

#: LL128 sends 120 of 128 bytes of a line; at large sizes NCCL corrects the tree's Simple rate, not LL128's.
LL128_SHARE = 120 / 128

#: op, algorithm, the closed form's name for it
CASES: list[tuple[CollectiveOp, Algorithm, str]] = [
    ("all_reduce", "ring", "ring/Simple"),
    ("all_reduce", "tree", "tree/LL128"),
    ("all_reduce", "nvls", "nvls"),
    ("all_gather", "ring", "ring/Simple"),
    ("reduce_scatter", "ring", "ring/Simple"),
    ("all_to_all", "pairs", "pairs/Simple"),
    ("p2p", "pairs", "pair/Simple"),
]


def machine(
    levels: tuple[tuple[int, float], ...], num_gpus: int, gpus_per_node: int = 8, **more: object
) -> Cluster:
    """An H100 cluster with levels of (gpus, usable GB/s per GPU)."""
    return Cluster(
        name="test",
        accelerator=load_accelerator("h100-sxm-80gb"),
        gpus_per_node=gpus_per_node,
        num_nodes=num_gpus // gpus_per_node,
        levels=tuple(
            Level(
                name=f"level{i}", gpus=gpus, bandwidth_bytes_per_s=rate * 1e9, efficiency=1.0, latency_s=1e-6
            )
            for i, (gpus, rate) in enumerate(levels)
        ),
        nvls=True,
        **more,  # type: ignore[arg-type]
    )


def tiling(size: int, stride: int, num_gpus: int) -> np.ndarray:
    """All groups {start + offset + i * stride} of a contiguous order, (G, n)."""
    starts = np.arange(num_gpus // (size * stride)) * size * stride
    first = (starts[:, None] + np.arange(stride)).ravel()
    return first[:, None] + np.arange(size) * stride


#: fan-outs of symmetric trees; a node is the first entry unless it says otherwise
TREES = st.sampled_from(
    [
        ((8, 4, 4), 8),
        ((8, 32, 4), 8),
        ((8, 2, 3, 2), 8),
        ((4, 8, 2), 4),
        ((6, 3, 2), 6),
        ((72, 4), 4),
        ((2, 4, 4, 2), 8),
        ((64,), 8),
        ((1, 8, 4), 8),
        ((8, 3), 8),
    ]
)
RATES = st.lists(st.sampled_from([3.0, 6.25, 12.5, 24.0, 48.0, 96.0, 366.0]), min_size=4, max_size=4)


@st.composite
def symmetric(draw: st.DrawFn) -> tuple[Cluster, int, int]:
    """A tree of full units, and a size and stride at which every group lies alike."""
    fan_outs, gpus_per_node = draw(TREES)
    gpus = np.cumprod(fan_outs)
    num_gpus = int(gpus[-1])
    rates = draw(RATES)
    more = {
        "nics_per_node": draw(st.sampled_from([None, gpus_per_node, gpus_per_node // 2, 1])),
        "rails": draw(st.booleans()),
    }
    cluster = machine(
        tuple(zip((int(n) for n in gpus), rates, strict=False)), num_gpus, gpus_per_node, **more
    )
    divisors = [n for n in range(1, num_gpus + 1) if num_gpus % n == 0]
    boundaries = [*(int(n) for n in gpus[:-1]), gpus_per_node]

    def aligned(length: int) -> bool:
        return all(length % n == 0 or n % length == 0 for n in boundaries)

    stride = draw(st.sampled_from([n for n in divisors if aligned(n)]))
    size = draw(
        st.sampled_from([n for n in divisors if num_gpus % (n * stride) == 0 and aligned(n * stride)])
    )
    return cluster, size, stride


@settings(max_examples=150, deadline=None)
@given(symmetric(), st.sampled_from(CASES))
def test_load_form_equals_closed_form_on_symmetric_cases(
    case: tuple[Cluster, int, int], what: tuple[CollectiveOp, Algorithm, str]
) -> None:
    """Counting every port gives the closed form of network.md 1.2 within 1e-9, for every op and algorithm."""
    cluster, size, stride = case
    op, algorithm, name = what
    shape = group_shape(cluster, size, stride)
    lines = CollectiveModel(cluster).by_algorithm(op, shape, 64 * GIB)
    terms = next((terms for line, terms in lines.items() if line.startswith(name)), None)
    if terms is None:
        return  # no tree in one domain, no NVLS for a few members, nothing for one member
    traffic = Traffic(op, 64 * GIB, tiling(size, stride, cluster.num_gpus), algorithm)
    share = LL128_SHARE if name == "tree/LL128" else 1.0
    assert LoadForm(cluster).phase_s([traffic]) == pytest.approx(
        terms.beta_s_per_byte * 64 * GIB * share, rel=1e-9
    )


@settings(max_examples=150, deadline=None)
@given(symmetric())
def test_counted_loads_equal_closed_loads(case: tuple[Cluster, int, int]) -> None:
    """The shape of all groups counted slot by slot is the one of the closed form."""
    cluster, size, stride = case
    closed = group_shape(cluster, size, stride)
    counted = shape_of_groups(cluster, tiling(size, stride, cluster.num_gpus).tolist())
    assert (closed.members, closed.runs, closed.hops) == (counted.members, counted.runs, counted.hops)
    for pattern in ("ring", "tree", "pairs", "message"):
        assert closed.loads.of(pattern) == pytest.approx(counted.loads.of(pattern), rel=1e-9), pattern


# -- irregular allocations: against edges enumerated one by one --------------------------------------------


def senders(group: list[int], units: list[int], domains: list[int], op: str) -> list[tuple[int, float]]:
    """What each slot of one group sends out of its unit for one byte, every edge walked."""
    size = len(group)
    ring = list(zip(group, group[1:] + group[:1], strict=True))
    mates = {slot: [other for other in group if units[other] == units[slot]] for slot in group}
    match op:
        case "p2p":
            return [(a, 1.0) for a, b in ring if units[a] != units[b]]
        case "all_to_all":
            return [(slot, (size - len(mates[slot])) / size) for slot in group]
        case "all_gather":  # a ring leaves its unit through all of the members in turn
            edges = [(a, (size - 1) / size) for a, b in ring if units[a] != units[b]]
        case _:  # both trees run over the domains in the order of their first ranks
            first = list(dict.fromkeys(domains[slot] for slot in group))
            slot_in = {domain: next(s for s in group if domains[s] == domain) for domain in first}
            ends = [(slot_in[first[a]], slot_in[first[b]]) for a, b in double_tree(len(first)).tolist()]
            edges = [(end, 0.5) for a, b in ends if units[a] != units[b] for end in (a, b)]
    return [(mate, part / len(mates[slot])) for slot, part in edges for mate in mates[slot]]


def by_hand_s(cluster: Cluster, groups: list[list[int]], unit_of: list[list[int]], op: str) -> float:
    """Busiest uplink in seconds for one byte; one NIC per GPU, no rails."""
    busiest = 0.0
    for level, units in enumerate(unit_of):
        port_bytes: dict[int, float] = defaultdict(float)
        for group in groups:
            for slot, part in senders(group, units, unit_of[0], op):
                port_bytes[slot if level == 0 else units[slot]] += part
        for port, num_bytes in port_bytes.items():
            gpus = 1 if level == 0 else units.count(port)
            busiest = max(busiest, num_bytes / gpus / cluster.levels[level + 1].usable_bytes_per_s)
    return busiest


@st.composite
def fragmented(draw: st.DrawFn) -> tuple[Cluster, list[list[int]]]:
    """Nodes of 4 GPUs on leaves of uneven size, a rank order of whole nodes, and groups of one axis."""
    leaves = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4).filter(lambda n: sum(n) % 2 == 0))
    num_nodes = sum(leaves)
    names = tuple(f"n{i}" for i in range(num_nodes))
    ends = np.cumsum(leaves)
    units = tuple(
        Unit(level="level1", name=f"leaf{i}", nodes=names[end - count : end])
        for i, (count, end) in enumerate(zip(leaves, ends, strict=True))
    )
    cluster = machine(
        ((4, 366.0), (64, 48.0), (1024, 12.0)), num_nodes * 4, 4, nodes=names, units=units, rails=False
    )
    order = draw(st.permutations(range(num_nodes)))
    slot_of_rank = np.array([node * 4 + gpu for node in order for gpu in range(4)])
    stride = draw(st.sampled_from([1, 2, 4, 8]))
    sizes = [n for n in range(2, num_nodes * 4 + 1) if num_nodes * 4 % (n * stride) == 0]
    if not sizes:
        stride, sizes = 1, [2]
    groups = tiling(draw(st.sampled_from(sizes)), stride, num_nodes * 4)
    return cluster, slot_of_rank[groups].tolist()


@settings(max_examples=150, deadline=None)
@given(fragmented(), st.sampled_from(["all_gather", "all_to_all", "p2p", "all_reduce"]))
def test_counting_equals_walking_every_edge(case: tuple[Cluster, list[list[int]]], op: CollectiveOp) -> None:
    """On uneven leaves and shuffled nodes the port loads are those of the edges counted one by one."""
    cluster, groups = case
    tree = slot_tree(cluster)
    unit_of = [[int(unit) for unit in units] for units in tree.unit_of_slot]
    expected = by_hand_s(cluster, groups, unit_of, op)
    shape = shape_of_groups(cluster, groups)
    pattern = {"all_gather": "ring", "all_to_all": "pairs", "p2p": "message", "all_reduce": "tree"}[op]
    factor = (shape.size - 1) / shape.size if op == "all_gather" else 1.0
    rates = [level.usable_bytes_per_s for level in cluster.levels[1:]]
    loads = shape.loads.of(pattern)  # type: ignore[arg-type]
    assert factor * max(load / rate for load, rate in zip(loads, rates, strict=True)) == pytest.approx(
        expected
    )
    algorithm: Algorithm = {"all_to_all": "pairs", "all_reduce": "tree"}.get(op, "ring")  # type: ignore[assignment]
    phase = LoadForm(cluster).phase_s([Traffic(op, 1.0, np.array(groups), algorithm)])
    assert phase >= expected * (1 - 1e-12)


@settings(max_examples=150, deadline=None)
@given(fragmented())
def test_ring_loads_lie_between_the_best_and_the_worst_group(case: tuple[Cluster, list[list[int]]]) -> None:
    """At each unit sum(x)/sum(k) is between the least and the greatest x/k: the mediant inequality.

    So the load form is never below the busiest unit's best group, and never above the worst group anywhere,
    which is what a closed form of one group would charge.
    """
    cluster, groups = case
    shape = shape_of_groups(cluster, groups)
    for level, units in enumerate(slot_tree(cluster).unit_of_slot):
        ratios: dict[int, list[float]] = defaultdict(list)
        for group in groups:
            inside = Counter(int(units[slot]) for slot in group)
            left = Counter(
                int(units[a])
                for a, b in zip(group, group[1:] + group[:1], strict=True)
                if units[a] != units[b]
            )
            for unit, members in inside.items():
                ratios[unit].append(left[unit] / members)
        lowest = max(min(every) for every in ratios.values())
        highest = max(max(every) for every in ratios.values())
        assert lowest * (1 - 1e-12) <= shape.loads.ring[level] <= highest * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(fragmented(), st.floats(0.05, 1.0), st.sampled_from(CASES), st.integers(0, 3))
def test_a_degraded_uplink_is_never_faster(
    case: tuple[Cluster, list[list[int]]],
    share: float,
    what: tuple[CollectiveOp, Algorithm, str],
    which: int,
) -> None:
    """Lowering one leaf's uplink lowers no price, in the load form and in the price of the planner."""
    cluster, groups = case
    units = list(cluster.units)
    slow = units[which % len(units)]
    units[which % len(units)] = dataclasses.replace(slow, uplink_bytes_per_s=12e9 * share)
    degraded = dataclasses.replace(cluster, units=tuple(units))
    traffic = Traffic(what[0], GIB, np.array(groups), what[1])
    if traffic.algorithm != "nvls":
        assert LoadForm(degraded).phase_s([traffic]) >= LoadForm(cluster).phase_s([traffic]) * (1 - 1e-12)
    before, after = (
        CollectiveModel(c).time_s(what[0], GIB, shape_of_groups(c, groups)) for c in (cluster, degraded)
    )
    assert after >= before * (1 - 1e-12)


@settings(max_examples=60, deadline=None)
@given(fragmented(), st.integers(0, 2), st.floats(1.0, 20.0), st.sampled_from(CASES), st.integers(0, 2**34))
def test_a_faster_level_is_never_slower(
    case: tuple[Cluster, list[list[int]]],
    level: int,
    factor: float,
    what: tuple[CollectiveOp, Algorithm, str],
    num_bytes: int,
) -> None:
    """Raising any line rate raises no price of groups that lie irregularly, shapes measured anew."""
    cluster, groups = case
    rate = cluster.levels[level].bandwidth_bytes_per_s * factor
    levels = list(cluster.levels)
    levels[level] = dataclasses.replace(levels[level], bandwidth_bytes_per_s=rate)
    faster = dataclasses.replace(cluster, levels=tuple(levels))
    before, after = (
        CollectiveModel(c).time_s(what[0], num_bytes, shape_of_groups(c, groups)) for c in (cluster, faster)
    )
    assert after <= before * (1 + 1e-12)


# -- worked numbers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worked() -> Cluster:
    """The machine of network.md 1.4: B0 366, b1 48, four nodes per leaf, leaf uplink 2:1, 16 nodes."""
    return machine(((8, 366.0), (32, 48.0), (128, 24.0)), 128)


@pytest.mark.parametrize(
    ("size", "stride", "op", "gb_per_s"),
    [
        pytest.param(128, 1, "all_gather", 366, id="128 ranks, leaf-contiguous"),
        pytest.param(16, 8, "all_gather", 48, id="TP 8, eight DP groups of 16, 4 per leaf"),
        pytest.param(4, 32, "all_gather", 24, id="one DP member per leaf"),
        pytest.param(32, 4, "all_gather", 96, id="TP 4, DP stride 4"),
        pytest.param(64, 2, "all_gather", 192, id="TP 2, DP stride 2"),
        pytest.param(32, 1, "all_to_all", 64, id="EP 32 in one leaf: s/64"),
        pytest.param(64, 1, "all_to_all", 48, id="EP 64 over two leaves: s/48"),
        pytest.param(8, 1, "all_to_all", 366 * 0.95 * 8 / 7, id="EP 8 in a node: s*(7/8)/(0.95*366)"),
    ],
)
def test_worked_cases_of_the_load_form(
    worked: Cluster, size: int, stride: int, op: CollectiveOp, gb_per_s: float
) -> None:
    """The table of network.md 1.4, counted port by port."""
    algorithm: Algorithm = "pairs" if op == "all_to_all" else "ring"
    seconds = LoadForm(worked).phase_s([Traffic(op, GIB, tiling(size, stride, 128), algorithm)])
    factor = 1 if op == "all_to_all" else (size - 1) / size
    assert factor * GIB / seconds / 1e9 == pytest.approx(gb_per_s)


def test_worked_case_of_nodes_dealt_round_robin(worked: Cluster) -> None:
    """128 ranks whose nodes are dealt over the leaves leave each leaf 4 times: 768 / 4 = 192 (1.4)."""
    nodes = [leaf * 4 + place for place in range(4) for leaf in range(4)]
    group = np.array([[node * 8 + gpu for node in nodes for gpu in range(8)]])
    form = LoadForm(worked)
    seconds = form.phase_s([Traffic("all_gather", GIB, group, "ring")])
    assert 127 / 128 * GIB / seconds / 1e9 == pytest.approx(192)
    busiest = form.busiest([Traffic("all_gather", GIB, group, "ring")])
    assert (busiest.level, busiest.outward) == ("level1", True)


def test_a_leaf_pays_for_what_all_groups_send_not_for_its_loneliest_member() -> None:
    """Leaves of 3 and 5 nodes, TP 8, PP 2, DP 4: the leaf of 5 sends one ring edge from five nodes.

    Group A lies 3 + 1, group B wholly in the second leaf.  Leaf 1 sends one edge per 3 members, leaf 2 one
    per 5.  A closed form of the worst group alone would charge leaf 2 one edge per member.
    """
    names = tuple(f"n{i}" for i in range(8))
    units = (
        Unit(level="level1", name="a", nodes=names[:3]),
        Unit(level="level1", name="b", nodes=names[3:]),
    )
    cluster = machine(((8, 366.0), (64, 48.0), (128, 6.0)), 64, nodes=names, units=units)
    shape = group_shape(cluster, 4, 8)
    assert shape.members == (1, 1, 4)
    assert shape.loads.ring == pytest.approx((1.0, 1 / 3))
    terms = CollectiveModel(cluster).terms("all_gather", shape, 64 * GIB)
    assert 3 / 4 / terms.beta_s_per_byte / 1e9 == pytest.approx(3 * 6.0)


def test_two_axes_that_share_a_tier_add_up(worked: Cluster) -> None:
    """DP rings and expert all-to-all together take each port as long as one after the other (section 5)."""
    form = LoadForm(worked)
    rings = Traffic("reduce_scatter", GIB, tiling(16, 8, 128), "ring")
    pairs = Traffic("all_to_all", GIB, tiling(64, 1, 128), "pairs")
    nic_s = (15 / 16 * GIB + 56 / 64 * GIB) / 48e9
    assert form.phase_s([rings, pairs]) == pytest.approx(nic_s)
    assert form.phase_s([rings]) == pytest.approx(15 / 16 * GIB / 48e9)


def test_max_min_share_of_a_group_that_is_partly_alone() -> None:
    """Two rings share a leaf's uplink, a third one has its own: each gets its max-min fair rate."""
    names = tuple(f"n{i}" for i in range(6))
    units = tuple(
        Unit(level="level1", name=name, nodes=nodes)
        for name, nodes in (("a", names[:2]), ("b", names[2:4]), ("c", names[4:5]), ("d", names[5:]))
    )
    cluster = machine(((1, 366.0), (4, 48.0), (16, 10.0)), 6, 1, nodes=names, units=units, rails=False)
    groups = np.array([[0, 2], [1, 3], [4, 5]])
    times = LoadForm(cluster).fair_times_s([Traffic("all_gather", GIB, groups, "ring")])[0]
    # Leaf a holds 2 GPUs: 20 GB/s for two rings; leaf c holds one: 10 GB/s for one ring.
    assert (GIB / 2 / times / 1e9).tolist() == pytest.approx([10, 10, 10])
    only_two = LoadForm(cluster).fair_times_s([Traffic("all_gather", GIB, groups[[0, 2]], "ring")])[0]
    assert (GIB / 2 / only_two / 1e9).tolist() == pytest.approx([20, 10])


@settings(max_examples=60, deadline=None)
@given(fragmented())
def test_the_slowest_fair_group_ends_with_the_phase(case: tuple[Cluster, list[list[int]]]) -> None:
    """With equal sizes the groups of the busiest port get the lowest max-min rate: the bound is reached."""
    cluster, groups = case
    form = LoadForm(cluster)
    traffic = [Traffic("all_gather", GIB, np.array(groups), "ring")]
    assert float(form.fair_times_s(traffic)[0].max()) == pytest.approx(form.phase_s(traffic), rel=1e-9)


@pytest.mark.parametrize("num_nodes", range(2, 40))
def test_double_tree_is_two_spanning_trees(num_nodes: int) -> None:
    """Both trees span all domains, none has two children in both, and the edges of one are at most 4."""
    edges = double_tree(num_nodes)
    halves = np.split(edges, 2)
    for tree in halves:
        assert sorted(
            tree[:, 0].tolist() + [root for root in range(num_nodes) if root not in tree[:, 0]]
        ) == list(range(num_nodes))
        reached, frontier = set(), {root for root in range(num_nodes) if root not in tree[:, 0]}
        assert len(frontier) == 1
        while frontier:
            reached |= frontier
            frontier = {int(c) for c, p in tree if int(p) in frontier} - reached
        assert reached == set(range(num_nodes))
    degrees = np.bincount(edges.ravel())
    assert degrees.max() == min(num_nodes, 4)  # network.md 1.2: S per NIC for two domains, 2 S from four on
    inner = [{int(p) for p, count in Counter(t[:, 1].tolist()).items() if count == 2} for t in halves]
    assert not inner[0] & inner[1]


def test_shapes_of_a_rank_order(worked: Cluster) -> None:
    """One tree serves every rank order: physical slots of the groups of ranks."""
    tree = slot_tree(worked)
    dealt = np.array(
        [(leaf * 4 + place) * 8 + gpu for place in range(4) for leaf in range(4) for gpu in range(8)]
    )
    groups = tiling(16, 8, 128)
    assert worst_shape(tree, groups).loads.ring == (1.0, 0.25)
    assert worst_shape(tree, dealt[groups]).loads.ring == (1.0, 1.0)


def test_torus_is_refused() -> None:
    """Link loads of a torus are counted elsewhere; the load form of a level tree says so."""
    with pytest.raises(PlannerFault, match="torus"):
        LoadForm(dataclasses.replace(load_cluster("dgx-h100", num_gpus=8), torus=(8,)))
