"""Reading one measured run for calibration: the record, and what the model predicts for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nest_megatron.errors import BadInputError, Factor, NestError
from nest_megatron.specs import codec
from nest_megatron.specs.job import TrainJob
from nest_megatron.validation.record_layout import NotComputable
from nest_megatron.validation.records import Built, build
from nest_megatron.validation.replay import predict_built


@dataclass(frozen=True, slots=True)
class Run:
    """One run record with its file and the job that it describes."""

    path: Path
    record: dict[str, Any]
    built: Built

    @property
    def name(self) -> str:
        """The record's id."""
        return str(self.record["id"])


def read_run(path: Path) -> Run:
    """Return the run record in ``path``: one record of the measured schema.

    Raises:
        BadInputError: it is unreadable, lacks a key, or describes a run that cannot be predicted.
    """
    record = codec.parse_json(codec.read_text(path), source=str(path))
    for key, kind in (("id", str), ("family", str), ("model", dict), ("measured", dict)):
        if not isinstance(record.get(key), kind):
            raise BadInputError(
                "NEST-K01", f"{path} is no run record", factors=[Factor(key, "missing or of another type")]
            )
    with _named(path):
        return Run(path, record, build(record))


def predict_run(run: Run, job: TrainJob | None = None) -> dict[str, Any]:
    """Return the prediction entry of ``run`` (``validation.replay``), under another ``job`` if given.

    Raises:
        BadInputError: the run cannot be priced.
    """
    built = run.built if job is None else dataclasses.replace(run.built, job=job)
    with _named(run.path):
        return predict_built(run.record, built)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn the reason why a run cannot be predicted into bad input that names its file."""
    try:
        yield
    except NotComputable as reason:
        raise BadInputError("NEST-K01", f"{path} cannot be predicted: {reason}") from None
    except NestError as error:
        raise BadInputError("NEST-K01", f"{path} cannot be predicted: {error.message}") from None
