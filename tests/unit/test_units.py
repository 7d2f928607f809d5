from __future__ import annotations

import re
from pathlib import Path

import pytest

from nest_megatron import units

PROGRAM = """\
from nest_megatron import units
from nest_megatron.specs.cluster import Level
GB = units.bytes_per_s_from_gb_per_s
US = units.seconds_from_us
FLOP = units.flops_per_s_from_tflops
Level(name="x", gpus=8, efficiency=1.0, bandwidth_bytes_per_s=GB(50), latency_s=US(5))
Level(name="x", gpus=8, efficiency=1.0, bandwidth_bytes_per_s=50.0, latency_s=US(5))
Level(name="x", gpus=8, efficiency=1.0, bandwidth_bytes_per_s=US(5), latency_s=US(5))
Level(name="x", gpus=8, efficiency=1.0, bandwidth_bytes_per_s=GB(50), latency_s=5.0)
Level(name="x", gpus=8, efficiency=1.0, bandwidth_bytes_per_s=FLOP(1), latency_s=US(5))
"""


def test_units_are_not_mixed_silently(tmp_path: Path) -> None:
    """The type checker takes bytes/s made from GB/s; it refuses bare numbers, times and FLOP/s instead."""
    mypy = pytest.importorskip("mypy.api")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    report, errors, _ = mypy.run(["--strict", str(program)])
    assert not errors
    refused = dict(re.findall(r"program.py:(\d+): error: .*expected \"(\w+)\"", report))
    assert refused == {
        "7": "BytesPerSecond",
        "8": "BytesPerSecond",
        "9": "Seconds",
        "10": "BytesPerSecond",
    }, report


def test_constructors_name_the_unit_they_read() -> None:
    """400 Gb/s, 50 GB/s and 0.05 TB/s are one rate; GB are 1e9 bytes, GiB are 2**30."""
    assert units.bytes_per_s_from_gbit_per_s(400) == units.bytes_per_s_from_gb_per_s(50) == 50e9
    assert units.bytes_per_s_from_tb_per_s(0.05) == pytest.approx(50e9)
    assert units.bytes_from_gib(1) == 2**30
    assert units.seconds_from_us(2.5) == pytest.approx(2.5e-6)
    assert units.flops_per_s_from_tflops(989) == 989e12
