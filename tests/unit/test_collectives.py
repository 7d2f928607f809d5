from __future__ import annotations

import dataclasses
import json
import math
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron.cluster.groups import GroupShape, group_shape, shape_of_groups, shape_of_slots
from nest_megatron.cluster.load import load_accelerator, load_cluster, shipped_clusters
from nest_megatron.cost.collectives import CollectiveModel, CollectiveTerms
from nest_megatron.cost.lines import CollectiveOp
from nest_megatron.errors import BadInputError, PlannerFault
from nest_megatron.specs.cluster import Cluster, Level, Unit
from nest_megatron.validation.tuner import ring_simple_differences, tuner_cluster

GIB = 1024**3
OPS: tuple[CollectiveOp, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")


def machine(
    *levels: tuple[int, float],
    num_gpus: int,
    latency_us: float = 0.0,
    domain_latency_us: float = 2.7,
    **more: object,
) -> Cluster:
    """An H100 cluster with levels of (gpus, usable GB/s per GPU)."""
    return Cluster(
        name="test",
        accelerator=load_accelerator("h100-sxm-80gb"),
        gpus_per_node=8,
        num_nodes=num_gpus // 8,
        levels=tuple(
            Level(
                name=f"level{i}",
                gpus=gpus,
                bandwidth_bytes_per_s=rate * 1e9,
                efficiency=1.0,
                latency_s=(latency_us if i else domain_latency_us) * 1e-6,
            )
            for i, (gpus, rate) in enumerate(levels)
        ),
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def worked() -> Cluster:
    """The machine of network.md 1.4: B0 366, b1 48, four nodes per leaf, leaf uplink 2:1, 16 nodes."""
    return machine((8, 366), (32, 48), (128, 24), num_gpus=128)


def busbw(cluster: Cluster, group: GroupShape) -> float:
    """Bus bandwidth of a large all-gather in GB/s, nccl-tests' definition."""
    terms = CollectiveModel(cluster).terms("all_gather", group, 64 * GIB)
    return (group.size - 1) / group.size / terms.beta_s_per_byte / 1e9


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        pytest.param(128, 1, 366, id="128 ranks, leaf-contiguous"),
        pytest.param(16, 8, 48, id="TP 8, eight DP groups of 16, 4 per leaf"),
        pytest.param(4, 32, 24, id="one DP member per leaf"),
        pytest.param(32, 4, 96, id="TP 4, DP stride 4"),
        pytest.param(64, 2, 192, id="TP 2, DP stride 2"),
    ],
)
def test_worked_ring_cases(worked: Cluster, size: int, stride: int, expected: float) -> None:
    """Rings of concurrent groups get min(B0, p*b1, k2*b2), table of network.md 1.4."""
    assert busbw(worked, group_shape(worked, size, stride)) == pytest.approx(expected)


def test_nodes_dealt_round_robin_over_leaves(worked: Cluster) -> None:
    """A ring that leaves each leaf four times gets 768 / 4 = 192 GB/s (network.md 1.4)."""
    nodes = [leaf * 4 + place for place in range(4) for leaf in range(4)]
    group = shape_of_slots(worked, [node * 8 + gpu for node in nodes for gpu in range(8)])
    assert group.runs[1] == 4
    assert busbw(worked, group) == pytest.approx(192)


@pytest.mark.parametrize(
    ("size", "bytes_per_ns"),
    [
        pytest.param(32, 64, id="EP 32 in one leaf: s*(24/32)/48"),
        pytest.param(64, 48, id="EP 64 over two leaves: leaf-bound, s*(32/64)/24"),
        pytest.param(8, 347.7 * 8 / 7, id="EP 8 in a node: s*(7/8)/(0.95*366)"),
    ],
)
def test_worked_all_to_all_cases(worked: Cluster, size: int, bytes_per_ns: float) -> None:
    """All-to-all pays the slowest level it crosses, table of network.md 1.4."""
    terms = CollectiveModel(worked).terms("all_to_all", group_shape(worked, size, 1), GIB)
    assert 1e-9 / terms.beta_s_per_byte == pytest.approx(bytes_per_ns, rel=1e-4)


def test_nccl_tuner_ring_points(shared: Path) -> None:
    """Bandwidth and latency of every ring point that NCCL reports for itself on H100 are met within 1 %."""
    differences = ring_simple_differences(shared / "data/network/collectives.json")
    assert len(differences) == 40
    assert max(abs(d.bandwidth) for d in differences) <= 0.01
    assert max(abs(d.latency) for d in differences) <= 0.01


@pytest.mark.parametrize("algo", ["Ring", "Tree"])
@pytest.mark.parametrize("proto", ["LL", "LL128"])
def test_nccl_tuner_latencies_of_the_other_protocols(shared: Path, algo: str, proto: str) -> None:
    """LL and LL128 latencies of ring and tree, 1 to 8 ranks per node and 2 to 32 nodes, are NCCL's own."""
    data = json.loads((shared / "data/network/collectives.json").read_text())
    cluster = tuner_cluster()
    model = CollectiveModel(cluster)
    points = [
        p for p in data["nccl_tuning_model_points"]["points"] if (p["algo"], p["proto"]) == (algo, proto)
    ]
    assert len(points) >= 20
    for point in points:
        group = group_shape(cluster, point["ranks_per_node"] * point["nodes"], 8 // point["ranks_per_node"])
        op: CollectiveOp = "all_reduce" if point["collective"] == "all_reduce" else "all_gather"
        terms = model.by_algorithm(op, group, GIB)[f"{algo.lower()}/{proto}"]
        assert terms.alpha_s == pytest.approx(point["latency_us"] * 1e-6, rel=0.01)


@pytest.mark.parametrize(
    ("name", "size", "op", "measured", "tolerance"),
    [
        pytest.param("dgx-h200", 8, "all_reduce", 480.0, 0.03, id="H200, NVLS"),
        pytest.param("dgx-h200", 4, "all_reduce", 363.3, 0.03, id="H200, four GPUs stay at the ring"),
        pytest.param("dgx-h200", 8, "all_gather", 361.4, 0.03, id="H200, no NVLS for all-gather"),
        pytest.param("dgx-b200", 8, "all_reduce", 838.0, 0.03, id="B200, NVLS"),
        pytest.param("dgx-b200", 5, "all_reduce", 677.8, 0.03, id="B200, five GPUs stay at the ring"),
        pytest.param("gb200-nvl72", 72, "all_reduce", 839.2, 0.03, id="GB200 rack"),
        pytest.param("dgx-a100-80", 32, "all_reduce", 191.1, 0.03, id="DGX A100, 4 nodes"),
        pytest.param("dgx-h100", 96, "all_reduce", 386.6, 0.03, id="H100, 12 nodes, tree over domains"),
        pytest.param("dgx-b200", 32, "all_reduce", 381.8, 0.03, id="B200, 4 nodes, tree over domains"),
        pytest.param("mi300x", 2, "all_reduce", 47.7, 0.03, id="MI300X pair"),
        pytest.param("mi300x", 8, "all_reduce", 312.9, 0.03, id="MI300X, eight"),
    ],
)
def test_shipped_clusters_meet_published_bus_bandwidth(
    name: str, size: int, op: CollectiveOp, measured: float, tolerance: float
) -> None:
    """Asymptotic bus bandwidth of shipped clusters agrees with nccl-tests logs (network.md 1.2, 1.5)."""
    cluster = load_cluster(name)
    terms = CollectiveModel(cluster).terms(op, shape_of_slots(cluster, range(size)), 64 * GIB)
    rounds = 2 if op == "all_reduce" else 1
    assert rounds * (size - 1) / size / terms.beta_s_per_byte / 1e9 == pytest.approx(measured, rel=tolerance)


def test_point_to_point_pays_the_slowest_hop() -> None:
    """A pair in a node rides NVLink, one across nodes its NIC, one across leaves the uplink share."""
    cluster = machine((8, 366), (32, 48), (128, 24), num_gpus=128)
    model = CollectiveModel(cluster)
    for stride, rate in ((4, 366), (8, 48), (32, 24)):
        terms = model.terms("p2p", group_shape(cluster, 2, stride), GIB)
        assert 1e-9 / terms.beta_s_per_byte == pytest.approx(rate)
    # Four stages per leaf: only one of four ranks uses the uplink, so the NIC is the limit, not 24.
    assert 1e-9 / model.terms("p2p", group_shape(cluster, 16, 8), GIB).beta_s_per_byte == pytest.approx(48)


def test_fewer_nics_than_gpus() -> None:
    """4 NICs of 48 for 8 GPUs: alone a group uses the NICs its members reach, together NICs*line/GPUs each.

    Arithmetic of network.md 1.4.  GPUs 2i and 2i+1 share NIC i.
    """
    cluster = machine((8, 366), (128, 24), num_gpus=128, nics_per_node=4)
    nodes = range(0, 128, 8)
    even = [node + gpu for node in nodes for gpu in (0, 2, 4, 6)]
    odd = [slot + 1 for slot in even]
    assert busbw(cluster, shape_of_slots(cluster, even)) == pytest.approx(4 * 48)
    assert busbw(cluster, shape_of_groups(cluster, [even, odd])) == pytest.approx(4 * 24)
    # Two members on one NIC have that NIC only; a ring of every GPU has all of them: 8 * 24.
    pair = [node + gpu for node in nodes for gpu in (0, 1)]
    assert busbw(cluster, shape_of_slots(cluster, pair)) == pytest.approx(48)
    assert busbw(cluster, group_shape(cluster, 128, 1)) == pytest.approx(192)


def test_point_to_point_on_shared_nics() -> None:
    """One message has a whole NIC of 48, two neighbours' messages share it; one NIC per GPU is 24 each."""
    cluster = machine((8, 366), (128, 24), num_gpus=128, nics_per_node=4)
    rates = {
        name: 1e-9 / CollectiveModel(machine_).terms("p2p", group, GIB).beta_s_per_byte
        for name, machine_, group in (
            ("alone", cluster, shape_of_slots(cluster, [0, 8])),
            ("neighbours", cluster, shape_of_groups(cluster, [[0, 8], [1, 9]])),
            ("other NIC", cluster, shape_of_groups(cluster, [[0, 8], [2, 10]])),
            ("all", cluster, group_shape(cluster, 2, 8)),
        )
    }
    assert rates == pytest.approx({"alone": 48, "neighbours": 24, "other NIC": 48, "all": 24})


def test_rails_split_a_leaf() -> None:
    """A strided group stays on its rail: alone it has an eighth of a leaf's uplink, without rails all of it.

    4 nodes of 8 per leaf at 6 GB/s per GPU: one rail of a leaf carries 24 GB/s, the whole leaf 192.
    """
    rails = machine((8, 366), (32, 48), (128, 6), num_gpus=128)
    plain = dataclasses.replace(rails, rails=False)
    alone = [node * 8 for node in range(16)]
    assert busbw(rails, shape_of_slots(rails, alone)) == pytest.approx(24)
    assert busbw(plain, shape_of_slots(plain, alone)) == pytest.approx(48)  # its NIC is the limit
    # All eight groups together load all rails alike: 4 members * 6 in both.
    assert [busbw(c, group_shape(c, 16, 8)) for c in (rails, plain)] == pytest.approx([24, 24])


def test_all_to_all_crosses_rails_without_pxn() -> None:
    """EP 32 in a 2:1 leaf: with PXN s*(24/32)/48 = s/64; without it 28 of 32 parts climb: s*(28/32)/24."""
    cluster = machine((8, 366), (32, 48), (128, 24), num_gpus=128)
    off = dataclasses.replace(cluster, pxn=False)
    no_rails = dataclasses.replace(off, rails=False)

    def gb_per_s(one: Cluster) -> float:
        terms = CollectiveModel(one).terms("all_to_all", group_shape(one, 32, 1), GIB)
        return 1e-9 / terms.beta_s_per_byte

    assert [gb_per_s(c) for c in (cluster, off, no_rails)] == pytest.approx([64, 24 * 32 / 28, 64])
    # A message from GPU 4 to GPU 0 of the next node changes rails, one from GPU 0 to GPU 0 does not.
    rate = {
        slots: 1e-9 / CollectiveModel(off).terms("p2p", shape_of_slots(off, slots), GIB).beta_s_per_byte
        for slots in ((0, 8), (4, 8))
    }
    assert rate == pytest.approx(
        {(0, 8): 48, (4, 8): 48}
    )  # alone: four nodes' share of a rail, 96, is above 48
    strided = group_shape(dataclasses.replace(off, levels=off.levels), 8, 4)
    assert strided.loads.message[1] == pytest.approx(1.0)  # rails 4 to 7 of all four nodes climb
    assert group_shape(cluster, 8, 4).loads.message[1] == 0.0


def test_bus_bandwidth_table_is_linear_between_points() -> None:
    """Between measured group sizes the domain rate is interpolated, outside the table it is its end."""
    cluster = machine((8, 400), (16, 48), num_gpus=16, busbw_by_group_size_bytes_per_s={4: 100e9, 6: 200e9})
    rates = [busbw(cluster, shape_of_slots(cluster, range(size))) for size in (2, 4, 5, 6, 8)]
    assert rates == pytest.approx([100, 100, 150, 200, 200])


def test_degraded_uplink_slows_a_ring() -> None:
    """Half the uplink of one leaf halves every ring that is bound there (network.md 1.4, slow member)."""
    nodes = tuple(f"n{i}" for i in range(16))
    slow = Unit(level="level1", name="slow", nodes=nodes[4:8], uplink_bytes_per_s=12e9)
    cluster = machine((8, 366), (32, 48), (128, 24), num_gpus=128, nodes=nodes)
    degraded = dataclasses.replace(cluster, units=(slow,))
    rates = [busbw(c, group_shape(c, 4, 32)) for c in (cluster, degraded)]
    assert rates == pytest.approx([24, 12])
    # Four members per leaf: 4 * 12 is still the NIC's 48.
    assert busbw(degraded, group_shape(degraded, 16, 8)) == pytest.approx(48)


def test_tier_efficiency_scales_a_tier() -> None:
    """Static ECMP at 0.6 instead of packet spray at 0.95 slows a leaf-bound ring by 0.6/0.95 (1.5)."""
    spray, ecmp = (
        dataclasses.replace(
            machine((8, 366), (32, 48), (128, 25), num_gpus=128),
            levels=(
                *machine((8, 366), (32, 48), (128, 25), num_gpus=128).levels[:2],
                Level(name="level2", gpus=128, bandwidth_bytes_per_s=25e9, efficiency=share, latency_s=0.0),
            ),
        )
        for share in (0.95, 0.6)
    )
    assert busbw(spray, group_shape(spray, 4, 32)) == pytest.approx(0.95 * 25)
    assert busbw(ecmp, group_shape(ecmp, 4, 32)) == pytest.approx(0.6 * 25)


def test_tensor_groups_that_straddle_a_rack() -> None:
    """TP 16 on racks of 72: the group that lies 8 + 8 pays its 8 NICs, 8 * 48 = 384; TP 8 stays inside.

    That is why the published guide uses 64 of the 72 GPUs (network.md 1.4).
    """
    cluster = machine((72, 682), (144, 48), num_gpus=144)
    assert busbw(cluster, group_shape(cluster, 16, 1)) == pytest.approx(384)
    assert busbw(cluster, group_shape(cluster, 8, 1)) == pytest.approx(682)
    # TP 10 straddles 2 + 8: the two members' NICs are the limit.
    assert busbw(cluster, group_shape(cluster, 10, 1)) == pytest.approx(2 * 48)
    whole = machine((64, 682), (128, 48), num_gpus=128)
    assert busbw(whole, group_shape(whole, 16, 1)) == pytest.approx(682)


def test_time_of_terms() -> None:
    """T = alpha + beta + 0.75 * sqrt(alpha * beta), network.md 1.6."""
    assert CollectiveTerms(1.0, 2.0).time_s(2.0) == pytest.approx(1 + 4 + 0.75 * 2)


@pytest.mark.parametrize("op", OPS)
def test_group_of_one_is_free(op: CollectiveOp) -> None:
    """Nothing is sent inside a group of one."""
    cluster = load_cluster("dgx-h100", num_gpus=64)
    assert CollectiveModel(cluster).time_s(op, GIB, group_shape(cluster, 1, 1)) == 0.0


@cache
def shipped(name: str) -> Cluster:
    """A shipped cluster at 1,024 GPUs."""
    return load_cluster(name, num_gpus=1024)


GROUPS = st.tuples(st.integers(1, 8), st.integers(0, 8)).filter(lambda pair: sum(pair) <= 10)
NAMES = st.sampled_from(shipped_clusters())


@settings(max_examples=150, deadline=None)
@given(NAMES, GROUPS, st.sampled_from(OPS), st.integers(0, 2**36), st.integers(0, 2**36))
def test_more_bytes_are_never_faster(
    name: str, group: tuple[int, int], op: CollectiveOp, one: int, other: int
) -> None:
    """The time of the fastest algorithm does not fall with the size, over all buckets and protocols."""
    cluster = shipped(name)
    model = CollectiveModel(cluster)
    shape = group_shape(cluster, 2 ** group[0], 2 ** group[1])
    times = [model.time_s(op, size, shape) for size in sorted((one, other))]
    assert times[0] <= times[1] * (1 + 1e-12)


@settings(max_examples=150, deadline=None)
@given(NAMES, GROUPS, st.sampled_from(OPS), st.integers(0, 34), st.integers(0, 2), st.floats(1.0, 20.0))
def test_more_bandwidth_is_never_slower(
    name: str, group: tuple[int, int], op: CollectiveOp, exponent: int, level: int, factor: float
) -> None:
    """Raising the line rate of any level does not raise the time of any group."""
    cluster = shipped(name)
    level %= len(cluster.levels)
    faster_level = dataclasses.replace(
        cluster.levels[level], bandwidth_bytes_per_s=cluster.levels[level].bandwidth_bytes_per_s * factor
    )
    faster = dataclasses.replace(
        cluster, levels=(*cluster.levels[:level], faster_level, *cluster.levels[level + 1 :])
    )
    shape = group_shape(cluster, 2 ** group[0], 2 ** group[1])
    before, after = (CollectiveModel(c).time_s(op, 2.0**exponent, shape) for c in (cluster, faster))
    assert after <= before * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(NAMES, GROUPS, st.sampled_from(OPS), st.floats(0, 2**34))
def test_terms_are_the_fastest_algorithm_at_that_size(
    name: str, group: tuple[int, int], op: CollectiveOp, num_bytes: float
) -> None:
    """No algorithm in the report beats the chosen terms, and the chosen terms are one of them."""
    cluster = shipped(name)
    model = CollectiveModel(cluster)
    shape = group_shape(cluster, 2 ** group[0], 2 ** group[1])
    every = [terms.time_s(num_bytes) for terms in model.by_algorithm(op, shape, num_bytes).values()]
    assert math.isclose(model.time_s(op, num_bytes, shape), min(every), rel_tol=1e-9)


def test_two_to_one_leaf_is_free_for_rings_with_two_members_per_leaf() -> None:
    """2:1 costs a DP ring nothing at several members per leaf but doubles it at one (network.md 0.2)."""
    full, half = (load_cluster(name, num_gpus=2048) for name in ("dgx-h100", "dgx-h100-2to1"))
    many, one = ((256, 8), (8, 256))

    def beta(cluster: Cluster, size: int, stride: int) -> float:
        return (
            CollectiveModel(cluster)
            .terms("all_gather", group_shape(cluster, size, stride), GIB)
            .beta_s_per_byte
        )

    assert beta(half, *many) == pytest.approx(beta(full, *many))
    assert beta(half, *one) == pytest.approx(2 * beta(full, *one))


def test_domain_bandwidth_is_no_limit_without_a_hop_inside() -> None:
    """A ring of one rank per node does not pay the bandwidth inside the node (network.md 1.4)."""
    cluster = machine((8, 20), (16, 48), num_gpus=16)
    assert busbw(cluster, group_shape(cluster, 2, 8)) == pytest.approx(48)


def test_simple_pays_the_fabric_latency_twice() -> None:
    """One network hop adds the fabric latency once for LL and twice, data and flush, for Simple (1.3)."""
    near, far = (machine((8, 366), (16, 48), num_gpus=16, latency_us=us) for us in (0, 10))
    group = group_shape(near, 2, 8)
    before, after = (CollectiveModel(c).by_algorithm("all_gather", group, GIB) for c in (near, far))
    added = {name: after[name].alpha_s - before[name].alpha_s for name in ("ring/LL", "ring/Simple")}
    assert added == pytest.approx({"ring/LL": 10e-6, "ring/Simple": 20e-6})


def test_tree_does_not_jump_at_powers_of_two() -> None:
    """The tree's bandwidth factor by size is continuous, so one more byte never saves time."""
    model = CollectiveModel(shipped("dgx-h100"))
    group = group_shape(shipped("dgx-h100"), 512, 1)
    for exponent in range(8, 34):
        below, above = 2**exponent - 1, 2**exponent
        for name in ("tree/LL", "tree/LL128", "tree/Simple"):
            times = [
                model.by_algorithm("all_reduce", group, size)[name].time_s(size) for size in (below, above)
            ]
            assert times[0] <= times[1] <= times[0] * 1.02


def test_unknown_generation_is_named() -> None:
    """An accelerator without communication constants is refused with the known generations."""
    cluster = load_cluster("dgx-h100")
    strange = dataclasses.replace(cluster.accelerator, generation="abacus")
    with pytest.raises(BadInputError, match="abacus"):
        CollectiveModel(dataclasses.replace(cluster, accelerator=strange))


def test_negative_size_is_a_fault() -> None:
    """A negative message is a defect of the caller."""
    cluster = load_cluster("dgx-h100")
    with pytest.raises(PlannerFault):
        CollectiveModel(cluster).time_s("all_reduce", -1, group_shape(cluster, 8, 1))
