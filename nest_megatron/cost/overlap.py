"""How much of each communication stream hides behind compute, as a nominal share with an interval.

Source of intervals: research/network.md section 5; nominal shares come from the framework profile
(``conf/framework``), because they are facts of a software stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nest_megatron.specs.job import FrameworkProfile, TrainJob
from nest_megatron.specs.layout import Overlap

#: Profile field -> (lowest, highest) hidden share that measurements show while the overlap is on.
INTERVALS: dict[str, tuple[float, float]] = {
    "tp_overlap_share": (0.5, 0.9),
    "dp_overlap_share": (0.8, 1.0),
    "p2p_overlap_share": (0.5, 0.95),
    "ep_overlap_share": (0.37, 0.96),
}


@dataclass(frozen=True, slots=True)
class HiddenShares:
    """Hidden share of each stream under one layout's overlap flags; 0 where the flag is off."""

    tp_forward: float
    tp_backward: float
    dp: float
    p2p: float
    ep: float

    @classmethod
    def of(cls, profile: FrameworkProfile, overlap: Overlap) -> HiddenShares:
        """Return the shares of ``profile`` that ``overlap`` switches on.

        Without userbuffers only the backward pass hides TP communication, where the stack sends the input
        gradient asynchronously (time_model.md section 2, "TP per block and direction").
        """
        tp = profile.tp_overlap_share if overlap.tp_comm else 0.0
        return cls(
            tp_forward=tp,
            tp_backward=max(tp, profile.tp_async_backward_share),
            dp=profile.dp_overlap_share if overlap.grad_reduce else 0.0,
            p2p=profile.p2p_overlap_share if overlap.p2p else 0.0,
            ep=profile.ep_overlap_share if overlap.expert_all_to_all else 0.0,
        )


def interval_ends(job: TrainJob) -> Iterator[TrainJob]:
    """Yield ``job`` with each overlap share at either end of its interval, the others nominal."""
    for name, ends in INTERVALS.items():
        for share in ends:
            changes: dict[str, Any] = {name: share}
            yield dataclasses.replace(job, profile=dataclasses.replace(job.profile, **changes))
