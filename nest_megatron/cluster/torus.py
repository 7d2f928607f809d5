"""Groups on a torus: the boxes they span, and routed link loads where they span none (network.md 1.5).

Axes are listed fastest first; a slot's coordinates are the digits of its number in the radix of the axes.
Loads are in units of one link in one direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nest_megatron.cluster.slots import Floats, Ints

#: Shorter axes have no link from their end back to their start: a TPU slice below a full cube of 4.
MIN_WRAPPED_AXIS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TorusShape:
    """How concurrent groups inside one torus load its links.

    Args:
        links: link rates per member that an all-gather or reduce-scatter can use, all groups sending.
        pairs: busiest link of an all-to-all over the send buffer of one member.
        message: messages through the busiest link when every member sends to its ring successor.
        hops: most links between two members.
        message_hops: most links between ring neighbours.
    """

    links: float
    pairs: float
    message: float
    hops: int
    message_hops: int


@dataclass(frozen=True, slots=True)
class _Span:
    """The part of one axis that a group covers: ``extent`` members, every ``step``-th position."""

    extent: int
    step: int
    wrapped: bool


def box_shape(axes: tuple[int, ...], size: int, stride: int) -> TorusShape | None:
    """Return the shape of the groups {start + i * stride, i < size}, or None when they are no boxes.

    Rings over the spanned axes run at the same time, so their rates add: 2 links of a wrapped axis, 1 of an
    open one, over the ``step`` groups that share each link (network.md 1.5: T = (n-1)/n * S / (2*b), divided
    by the number of axes, doubled without wrap).  All-to-all with shortest routes: extent/8 of the buffer
    through each link of a wrapped axis, extent/4 through the middle link of an open one.
    """
    spans = _spans(axes, size, stride)
    if spans is None:
        return None
    return TorusShape(
        links=sum((2 if span.wrapped else 1) / span.step for span in spans),
        pairs=max(span.step * _pairs_load(span) for span in spans),
        message=spans[0].step,
        hops=sum(_hops(span) for span in spans),
        message_hops=max(span.step for span in spans),
    )


def _spans(axes: tuple[int, ...], size: int, stride: int) -> list[_Span] | None:
    spans: list[_Span] = []
    left, step = size, stride
    for axis in axes:
        if left == 1:
            break
        if step % axis == 0:  # the group stays at one position of this axis
            step //= axis
            continue
        if axis % step:
            return None
        extent = min(axis // step, left)
        if left % extent or (axis // step) % extent:
            return None
        wrapped = extent * step == axis and axis >= MIN_WRAPPED_AXIS
        spans.append(_Span(extent, step, wrapped))
        left //= extent
        step = 1
    return spans if left == 1 and spans else None


def _pairs_load(span: _Span) -> float:
    extent = span.extent
    if span.wrapped:
        return (extent**2 - extent % 2) / (8 * extent)
    return (extent // 2) * (extent - extent // 2) / extent


def _hops(span: _Span) -> int:
    return (span.extent // 2 if span.wrapped else span.extent - 1) * span.step


def routed_shape(axes: tuple[int, ...], groups: Ints) -> TorusShape:
    """Return the shape of G concurrent groups of slots in ring order, (G, n), by routing every message.

    Messages go axis by axis, the shorter way round; those to another torus are not counted.  The ring uses
    one direction of the links that its hops take: rings over several axes at once need boxes.
    """
    size = groups.shape[1]
    torus = math.prod(axes)
    message, message_hops = _route(axes, *_inside(torus, groups, np.roll(groups, -1, axis=1)), 1.0)
    sources = np.repeat(groups, size, axis=1)
    pairs, hops = _route(axes, *_inside(torus, sources, np.tile(groups, (1, size))), 1 / size)
    return TorusShape(
        links=1 / message if message else math.inf,
        pairs=pairs,
        message=message,
        hops=hops,
        message_hops=message_hops,
    )


def _inside(torus: int, sources: Ints, targets: Ints) -> tuple[Ints, Ints]:
    """Keep the messages whose two ends are in one torus."""
    same = sources // torus == targets // torus
    return sources[same], targets[same]


def _route(axes: tuple[int, ...], sources: Ints, targets: Ints, weight: float) -> tuple[float, int]:
    """Return (load of the busiest link, links of the longest route)."""
    busiest = 0.0
    hops = np.zeros(sources.size, dtype=np.int64)
    inner = 1
    here = sources.copy()
    for axis in axes:
        start, goal = here // inner % axis, targets // inner % axis
        forward, backward = (goal - start) % axis, (start - goal) % axis
        if axis >= MIN_WRAPPED_AXIS:
            # Half way round both directions are as short and take half each.
            share = np.where(forward < backward, 1.0, np.where(forward == backward, 0.5, 0.0))
        else:
            share = (goal > start).astype(np.float64)
            forward, backward = np.maximum(goal - start, 0), np.maximum(start - goal, 0)
        for direction, length, part in ((1, forward, share), (-1, backward, 1 - share)):
            busiest = max(busiest, _busiest(here, inner, axis, direction, length, part * weight))
        hops += np.where(share > 0, forward, backward)
        here += (goal - start) * inner
        inner *= axis
    return busiest, int(hops.max(initial=0))


def _busiest(here: Ints, inner: int, axis: int, direction: int, length: Ints, weight: Floats) -> float:
    """Return the load of the busiest link of one axis and direction."""
    load = np.zeros(int(here.max(initial=0)) + axis * inner)
    row = here - here // inner % axis * inner
    position = here // inner % axis
    for step in range(int(length.max(initial=0))):
        moving = (length > step) & (weight > 0)
        slot = row + (position + direction * step) % axis * inner
        np.add.at(load, slot[moving], weight[moving])
    return float(load.max())


def torus_level(level_gpus: tuple[int, ...], axes: tuple[int, ...]) -> int | None:
    """Return the index of the level whose unit is the torus, or None without axes."""
    return level_gpus.index(math.prod(axes)) if axes else None
