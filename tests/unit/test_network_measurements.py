"""Predicted collective times against public logs: a regression test with the bands of network.md 1.6."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from nest_megatron.errors import BadInputError
from nest_megatron.validation import network
from nest_megatron.validation.network import BANDS, Point, compare, error_band, systems


@pytest.fixture(scope="module")
def points(shared: Path) -> list[Point]:
    """Every priced record."""
    return compare(shared / "data/network/collectives.json")


def test_the_points_are_those_of_the_page(points: list[Point]) -> None:
    """580 sound NCCL points: 171 below 1 MiB, 174 up to 64 MiB, 235 above (network.md 1.6)."""
    counts = dict.fromkeys(BANDS, 0)
    for point in points:
        counts[point.size_class] += point.in_bands
    assert counts == {"< 1 MiB": 171, "1-64 MiB": 174, ">= 64 MiB": 235}
    assert not {p.log for p in points} & {"alps-gh200-2n-ar-noplugin", "mscclpp-ndmv4", "iss-nccl-1453"}


@pytest.mark.parametrize("size_class", BANDS)
def test_errors_stay_inside_the_bands(points: list[Point], size_class: str) -> None:
    """Median and p90 of |log error|, before and after one calibration point, by size class."""
    chosen = [p for p in points if p.in_bands and p.size_class == size_class]
    limit = BANDS[size_class]
    before = error_band(p.log_error for p in chosen)
    after = error_band(p.calibrated_log_error for p in chosen)
    assert before is not None
    assert after is not None
    assert before.median <= limit.median
    assert before.p90 <= limit.p90
    assert after.median <= limit.calibrated_median


def test_points_outside_the_bands_are_no_worse(points: list[Point]) -> None:
    """Sweeps of the switch, all-to-all and MI300X, which 1.6 left out, agree as well above 64 MiB."""
    others = [p for p in points if not p.in_bands]
    assert {p.op for p in others} >= {"all_to_all", "all_gather", "all_reduce"}
    band = error_band(p.log_error for p in others if p.size_class == ">= 64 MiB")
    assert band is not None
    assert band.median <= BANDS[">= 64 MiB"].median


def test_calibration_meets_the_largest_message(points: list[Point]) -> None:
    """The largest message of each log is not scored after calibration, every other one is."""
    largest = {}
    for point in points:
        key = (point.log, point.op, point.num_ranks)
        largest[key] = max(largest.get(key, 0), point.num_bytes)
    for point in points:
        if point.num_bytes < largest[point.log, point.op, point.num_ranks]:
            assert point.calibrated_s is not None
    assert sum(p.calibrated_s is None for p in points) == len(largest)


def test_error_band_counts_what_is_known() -> None:
    """Median and the value below which nine tenths lie, of absolute values; nothing of nothing."""
    band = error_band([0.1, -0.2, None, 0.3])
    assert band is not None
    assert (band.count, band.median, band.p90) == (3, 0.2, 0.3)
    assert error_band([None]) is None
    point = Point(
        log="x",
        base="dgx-h100",
        op="p2p",
        num_ranks=2,
        num_bytes=64 * 1024**2,
        measured_s=1.0,
        predicted_s=math.e,
        calibrated_s=None,
        in_bands=True,
    )
    assert (point.size_class, point.log_error) == (">= 64 MiB", pytest.approx(1.0))
    assert dataclasses.replace(point, num_bytes=64 * 1024**2 - 1).size_class == "1-64 MiB"


def test_systems_hold_whole_domains() -> None:
    """Every machine builds at the sizes of its logs, with its own NIC and domain."""
    known = systems()
    rack = known["cw-gb200-1440r"].cluster(1440)
    assert (rack.num_gpus, rack.levels[0].gpus, rack.num_nodes) == (1440, 72, 360)
    single = known["gcp-h200-2r-1nic-ar"].cluster(2)
    assert (single.num_gpus, single.gpus_per_node, single.levels[1].bandwidth_bytes_per_s) == (2, 1, 50e9)


def test_an_unknown_fabric_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose fabric has no latency names the known ones."""
    text = "fabric_latency_us: {roce: {value: 6, source: x}}\nothers: []\nsystems:\n  - " + str(
        {
            "logs": ["a"],
            "base": "dgx-h100",
            "domain_gpus": 8,
            "nic_GB_per_s_per_gpu": 50,
            "fabric": "token ring",
            "source": "x",
        }
    )
    monkeypatch.setattr(network, "shipped_text", lambda kind, name: text)
    with pytest.raises(BadInputError, match="roce"):
        systems()
