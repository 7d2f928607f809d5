"""Folds of leave-one-out checks, and the summary of their errors."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scripts.step_time.problem import MeasuredRow

#: Families that share a source stay together: leaving one out leaves all of them out.
TOGETHER = {
    "nemodocs": "nemodocs+launcher",
    "launcher": "nemodocs+launcher",
    "sc21": "sc21+actrecomp+mlm",
    "actrecomp": "sc21+actrecomp+mlm",
    "mlm": "sc21+actrecomp+mlm",
    "titan": "torch/jax others",
    "fmsfsdp": "torch/jax others",
    "automodel": "torch/jax others",
    "jaxtoolbox": "torch/jax others",
}
MODELS = (
    "deepseek",
    "grok",
    "kimi",
    "gpt.?oss",
    "qwen3.*235",
    "qwen3.*30",
    "mixtral",
    "llama.?4",
    "moonlight",
)


def fold_names(rows: Sequence[MeasuredRow], by: str, keep: set[str] | None) -> list[str]:
    """Return the fold of every row; "" for rows that are never left out."""
    return ["" if keep is not None and row.record["id"] not in keep else _fold(row, by) for row in rows]


def _fold(row: MeasuredRow, by: str) -> str:
    record = row.record
    if by == "family":
        return TOGETHER.get(record["family"], record["family"])
    if by == "release":
        flags = record.get("recipe_flags") or {}
        return str(flags.get("rel") or record.get("framework"))
    name = str(record["model"].get("name") or "").lower()
    return next((pattern for pattern in MODELS if re.search(pattern, name)), "others")


def summarise(log_errors: npt.NDArray[np.float64]) -> str:
    """Return count, MAPE, median, 90 % quantile and bias of relative errors, in percent."""
    relative = 100 * np.expm1(log_errors)
    size = np.abs(relative)
    return (
        f"n={len(size):4d} MAPE={size.mean():6.2f} median={np.median(size):6.2f} "
        f"p90={np.quantile(size, 0.9):6.1f} bias={relative.mean():+6.1f}"
    )
