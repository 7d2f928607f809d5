"""Memory: error of the printed peaks, out-of-memory verdicts, frequency of out of memory per risk band."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from nest_megatron.validation.metrics import DEVICE_FAMILIES, Errors, Row, measured_peak_bytes


@dataclass(frozen=True, slots=True)
class Confusion:
    """Out-of-memory outcomes: first the measured, then the predicted one."""

    oom_oom: int = 0
    oom_fits: int = 0
    ran_oom: int = 0
    ran_fits: int = 0

    @property
    def accuracy(self) -> float:
        """Share of right verdicts, percent."""
        right = self.oom_oom + self.ran_fits
        return 100 * right / (right + self.oom_fits + self.ran_oom)


@dataclass(frozen=True, slots=True)
class MemoryTable:
    """Peaks and verdicts.

    Args:
        families: family -> error of the peak: allocated bytes, or device bytes where nvidia-smi was printed.
        oom: family -> verdicts; ``risk``: risk band -> rows with a known outcome, and how many ran out.
        missing: family -> rows with a measured peak and no prediction.
    """

    families: dict[str, Errors]
    oom: dict[str, Confusion]
    risk: dict[str, tuple[int, int]]
    missing: dict[str, int]


def memory_table(rows: Sequence[Row]) -> MemoryTable:
    """Return the table of ``rows``."""
    families: dict[str, list[float]] = defaultdict(list)
    missing: dict[str, int] = defaultdict(int)
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    risk: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for record, prediction in rows:
        family, peak, ran_out = record["family"], measured_peak_bytes(record), record["measured"].get("oom")
        if peak and not ran_out:
            key = "peak_device_bytes" if family in DEVICE_FAMILIES else "peak_allocated_bytes"
            if prediction.get(key):
                families[family].append(prediction[key] / peak - 1)
            else:
                missing[family] += 1
        fits = prediction.get("feasible")
        if ran_out is not None and fits is not None:
            counts[family][(0 if ran_out else 2) + int(fits)] += 1
            band = risk[str(prediction.get("band"))]
            band[0] += 1
            band[1] += int(ran_out)
    return MemoryTable(
        families={family: Errors.of(errors) for family, errors in sorted(families.items())},
        oom={family: Confusion(*values) for family, values in sorted(counts.items())},
        risk={name: (total, out) for name, (total, out) in sorted(risk.items())},
        missing=dict(missing),
    )
