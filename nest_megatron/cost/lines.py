"""One algorithm of one collective as a straight line: a latency and a transfer time that grows with bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]


@dataclass(frozen=True, slots=True)
class Line:
    """One algorithm and protocol in one size bucket: beta(S) = ``intercept_s`` + ``slope_s_per_byte`` * S."""

    name: str
    alpha_s: float
    slope_s_per_byte: float
    intercept_s: float = 0.0

    def beta_s(self, num_bytes: float) -> float:
        """Return the transfer time of ``num_bytes``."""
        return self.intercept_s + self.slope_s_per_byte * num_bytes
