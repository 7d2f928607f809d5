from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron.cluster.groups import group_shape, shape_of_slots
from nest_megatron.cluster.load import load_accelerator, resize
from nest_megatron.cluster.torus import MIN_WRAPPED_AXIS, box_shape, routed_shape
from nest_megatron.cost.collectives import CollectiveModel
from nest_megatron.specs.cluster import Cluster, Level

GB = 10**9
HOP_S = 1e-6


def tpu(*axes: int, gb_per_s: float = 45.0, outer_gb_per_s: float = 6.25) -> Cluster:
    """Two TPU tori of these axes, joined by a data-centre network."""
    chips = math.prod(axes)
    return Cluster(
        name="tpu",
        accelerator=load_accelerator("tpu-v4"),
        gpus_per_node=4,
        num_nodes=2 * chips // 4,
        levels=(
            Level(
                name="ici", gpus=chips, bandwidth_bytes_per_s=gb_per_s * GB, efficiency=1.0, latency_s=HOP_S
            ),
            Level(
                name="dcn",
                gpus=2 * chips,
                bandwidth_bytes_per_s=outer_gb_per_s * GB,
                efficiency=1.0,
                latency_s=2e-5,
            ),
        ),
        torus=axes,
    )


@pytest.mark.parametrize(
    ("size", "stride", "links"),
    [
        pytest.param(4, 1, 2, id="one wrapped axis: 2*b"),
        pytest.param(16, 1, 4, id="two wrapped axes: twice the rate"),
        pytest.param(64, 1, 6, id="three wrapped axes"),
        pytest.param(4, 4, 2, id="the second axis"),
        pytest.param(16, 4, 4, id="second and third axis"),
        pytest.param(2, 1, 1, id="half an axis: no wrap"),
        pytest.param(8, 1, 3, id="one axis and half of the next"),
        pytest.param(2, 2, 1, id="chips 0 and 2 of a ring of four: two groups share the wrapped axis"),
    ],
)
def test_all_gather_by_the_axis_formula(size: int, stride: int, links: float) -> None:
    """T = (n-1)/n * S / (2*b) per wrapped axis, S / b without wrap (network.md 1.5), TPU v4: 45 GB/s."""
    cluster = tpu(4, 4, 4)
    terms = CollectiveModel(cluster).terms("all_gather", group_shape(cluster, size, stride), GB)
    assert (size - 1) / size / terms.beta_s_per_byte / GB == pytest.approx(links * 45)
    reduce = CollectiveModel(cluster).terms("all_reduce", group_shape(cluster, size, stride), GB)
    assert reduce.beta_s_per_byte == pytest.approx(2 * terms.beta_s_per_byte)


def test_latency_is_half_the_way_round_each_axis() -> None:
    """About 1 us per hop, n/2 hops on a wrapped axis (network.md 1.5); an open line is walked to its end."""
    cluster = tpu(4, 8, 8)
    model = CollectiveModel(cluster)
    for size, stride, hops in ((8, 4, 4), (256, 1, 2 + 4 + 4), (4, 4, 3)):
        terms = model.terms("all_gather", group_shape(cluster, size, stride), GB)
        assert terms.alpha_s == pytest.approx(hops * HOP_S)


def test_all_to_all_is_a_quarter_of_the_gather_on_a_ring() -> None:
    """On a wrapped axis n*s/(8*b) against the gather's n*s/(2*b) (scaling-book; network.md 1.5)."""
    cluster = tpu(4, 8, 8)
    for size, stride in ((4, 1), (8, 4)):
        shape = group_shape(cluster, size, stride)
        pairs, gather = (CollectiveModel(cluster).terms(op, shape, GB) for op in ("all_to_all", "all_gather"))
        assert pairs.beta_s_per_byte == pytest.approx(size / (8 * 45 * GB))
        assert gather.beta_s_per_byte == pytest.approx((size - 1) / size / (2 * 45 * GB))
    # Over a box the longest axis decides: every part crosses each axis once.
    box = CollectiveModel(cluster).terms("all_to_all", group_shape(cluster, 32, 1), GB)
    assert box.beta_s_per_byte == pytest.approx(8 / (8 * 45 * GB))


def test_a_short_axis_is_not_wrapped() -> None:
    """A slice below a full cube of 4 has no link back: half the rate of a wrapped axis."""
    assert MIN_WRAPPED_AXIS == 4
    shape = box_shape((2, 2, 2), 8, 1)
    assert shape is not None
    assert shape.links == 3


def test_ring_over_two_tori_pays_the_outer_network() -> None:
    """64 + 64 chips: the ring is bound by 64 NIC shares or the torus, whichever is slower."""
    cluster = tpu(4, 4, 4)
    for size, stride, gb_per_s in ((128, 1, 6 * 45), (2, 64, 6.25), (8, 16, 2 * 45)):
        terms = CollectiveModel(cluster).terms("all_gather", group_shape(cluster, size, stride), 10**12)
        expected = min(gb_per_s, 6.25 * max(1, size // 2))
        assert (size - 1) / size / terms.beta_s_per_byte / GB == pytest.approx(expected)


def link_loads(axes: tuple[int, ...], messages: list[tuple[int, int, float]]) -> dict[object, float]:
    """Bytes per link and direction, every message walked hop by hop, axis by axis, the shorter way round."""
    loads: dict[object, float] = defaultdict(float)
    for source, target, weight in messages:
        here = list(np.unravel_index(source, axes[::-1]))[::-1]
        goal = list(np.unravel_index(target, axes[::-1]))[::-1]
        for axis, length in enumerate(axes):
            forward = (int(goal[axis]) - int(here[axis])) % length
            if length < MIN_WRAPPED_AXIS:
                ways = (
                    [(1, forward, 1.0)]
                    if goal[axis] > here[axis]
                    else [(-1, (length - forward) % length, 1.0)]
                )
            elif 2 * forward == length:
                ways = [(1, forward, 0.5), (-1, forward, 0.5)]
            else:
                ways = [(1, forward, 1.0)] if 2 * forward < length else [(-1, length - forward, 1.0)]
            for direction, hops, part in ways:
                for hop in range(hops):
                    place = tuple(
                        int(here[axis] + direction * hop) % length if i == axis else int(c)
                        for i, c in enumerate(here)
                    )
                    loads[place, axis, direction] += weight * part
            here[axis] = goal[axis]
    return loads


AXES = st.sampled_from([(4, 4), (8, 4), (4, 2, 4), (5, 4), (2, 2, 4), (6, 6)])


@settings(max_examples=60, deadline=None)
@given(AXES, st.data())
def test_routed_loads_are_those_of_every_message_walked(axes: tuple[int, ...], data: st.DataObject) -> None:
    """Any groups load the busiest link as walking every message of the ring and of all pairs does."""
    chips = math.prod(axes)
    order = data.draw(st.permutations(range(chips)))
    size = data.draw(st.sampled_from([n for n in range(2, chips + 1) if chips % n == 0]))
    groups = [order[i : i + size] for i in range(0, chips, size)]
    shape = routed_shape(axes, np.array(groups))
    ring = [(a, b, 1.0) for g in groups for a, b in zip(g, g[1:] + g[:1], strict=True)]
    pairs = [(a, b, 1 / size) for g in groups for a, b in itertools.permutations(g, 2)]
    assert shape.message == pytest.approx(max(link_loads(axes, ring).values()))
    assert 1 / shape.links == pytest.approx(shape.message)
    assert shape.pairs == pytest.approx(max(link_loads(axes, pairs).values()))


@settings(max_examples=100, deadline=None)
@given(AXES, st.data())
def test_boxes_price_all_to_all_as_routing_does(axes: tuple[int, ...], data: st.DataObject) -> None:
    """For groups that span boxes the closed form of the middle link equals routing every pair."""
    chips = math.prod(axes)
    stride = data.draw(st.sampled_from([n for n in range(1, chips) if chips % n == 0]))
    size = data.draw(
        st.sampled_from([n for n in range(2, chips // stride + 1) if chips % (n * stride) == 0] or [2])
    )
    box = box_shape(axes, size, stride)
    if box is None or chips % (size * stride):
        return
    starts = np.arange(0, chips, size * stride)[:, None] + np.arange(stride)
    routed = routed_shape(axes, starts.reshape(-1, 1) + np.arange(size) * stride)
    assert box.pairs == pytest.approx(routed.pairs)
    assert box.hops == routed.hops
    assert box.links >= routed.links * (1 - 1e-12)  # a ring in rank order uses one direction of its hops


def test_groups_that_are_no_boxes_are_routed() -> None:
    """Three chips in a row of four are priced by the links that their messages really take."""
    cluster = tpu(4, 4, 4)
    shape = shape_of_slots(cluster, [0, 1, 2])
    assert shape.torus is not None
    # 0 -> 1 -> 2, and 2 -> 0 half forward over 3, half back over 1.
    assert shape.torus.message == pytest.approx(1.0)
    corner = shape_of_slots(cluster, [0, 21, 42])
    assert corner.torus is not None
    assert corner.torus.message_hops == 6


def test_larger_cluster_extends_the_slowest_axis() -> None:
    """A torus that is the outermost level grows along its last axis, in whole rings."""
    one = dataclasses.replace(tpu(4, 4, 4), levels=tpu(4, 4, 4).levels[:1], num_nodes=16)
    grown = resize(one, 128)
    assert (grown.torus, grown.levels[-1].gpus) == ((4, 4, 8), 128)
