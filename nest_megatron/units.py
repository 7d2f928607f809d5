"""The only place where units convert; everywhere else: bytes, seconds, FLOP, bytes/s.

GiB, ms, TFLOP/s and GB/s exist in ``conf/``, in ``report/`` and here.  ``BytesPerSecond``, ``Seconds`` and
``FlopPerSecond`` are distinct types for the type checker: only the constructors below make them, each from a
number in one named unit, and the network levels and accelerators accept nothing else.
"""

from __future__ import annotations

from typing import NewType

BytesPerSecond = NewType("BytesPerSecond", float)
FlopPerSecond = NewType("FlopPerSecond", float)
Seconds = NewType("Seconds", float)

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 10**9
TERA = 10**12
MICRO = 1e-6
MILLI = 1e-3
BITS_PER_BYTE = 8


def bytes_from_gib(gib: float) -> int:
    """Return bytes, rounded to the nearest byte."""
    return round(gib * GIB)


def gib(num_bytes: float) -> float:
    """Return GiB (2**30 bytes)."""
    return num_bytes / GIB


def bytes_per_s_from_gb_per_s(gb_per_s: float) -> BytesPerSecond:
    """Return bytes/s from GB/s, where GB is 1e9 bytes (line rates, bus bandwidths)."""
    return BytesPerSecond(gb_per_s * GB)


def bytes_per_s_from_gbit_per_s(gbit_per_s: float) -> BytesPerSecond:
    """Return bytes/s from Gb/s, where Gb is 1e9 bits (NIC and switch port rates)."""
    return BytesPerSecond(gbit_per_s * GB / BITS_PER_BYTE)


def bytes_per_s_from_tb_per_s(tb_per_s: float) -> BytesPerSecond:
    """Return bytes/s from TB/s, where TB is 1e12 bytes (HBM bandwidths)."""
    return BytesPerSecond(tb_per_s * TERA)


def flops_per_s_from_tflops(tflops: float) -> FlopPerSecond:
    """Return FLOP/s from TFLOP/s."""
    return FlopPerSecond(tflops * TERA)


def seconds_from_us(microseconds: float) -> Seconds:
    """Return seconds from microseconds."""
    return Seconds(microseconds * MICRO)


def milliseconds(seconds: float) -> float:
    """Return milliseconds."""
    return seconds / MILLI


def tflops(flops_per_s: float) -> float:
    """Return TFLOP/s."""
    return flops_per_s / TERA
