"""What measured steps taught about the step time of one machine, stack, precision and model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScale:
    """A factor on every step time of a job, learned from runs of the same model on the same machine.

    It multiplies all layouts alike, so it changes no order between them; the host floor of a
    mixture-of-experts model is scaled in the job's framework profile instead, which may.

    Args:
        factor: measured over predicted step time.
        num_runs: runs behind it.
        communication_share, bubble_share: their mean shares of exposed communication and of the pipeline
            bubble in the predicted step.
        log2_micro_batch: their mean log2 of the micro-batch.
    """

    factor: float
    num_runs: int
    communication_share: float
    bubble_share: float
    log2_micro_batch: float
