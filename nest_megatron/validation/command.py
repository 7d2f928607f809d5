"""``nest-megatron validate``: replay published runs and print how far the predictions are off."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nest_megatron.calibration.store import apply, load_store
from nest_megatron.dialects.profiles import CONF
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs import codec
from nest_megatron.validation.render import render
from nest_megatron.validation.replay import replay
from nest_megatron.validation.scores import score
from nest_megatron.validation.subsets import load_subsets

#: Published runs that ship with the package.
SHIPPED = CONF / "validation" / "public_records.json"


def run(arguments: argparse.Namespace, *, write: Callable[[str, str], None]) -> str:
    """Return the tables for the chosen records, after writing the predictions if asked.

    Args:
        write: writes a text to a file whole or not at all.

    Raises:
        BadInputError: the file is no list of records, or nothing is left of it.
    """
    subsets = load_subsets(Path(arguments.subsets)) if arguments.subsets else {}
    records = [
        record for record in load_records(Path(arguments.records or SHIPPED)) if _chosen(record, arguments)
    ]
    if not records:
        raise BadInputError(
            "NEST-V03",
            "no record is left to validate",
            factors=[Factor("records", str(arguments.records)), Factor("family", arguments.family)],
        )
    calibrate = None
    if arguments.calibrated:
        store = load_store()
        calibrate = lambda job, cluster: apply(job, cluster, store)[0]  # noqa: E731
    predictions = replay(records, calibrate=calibrate)
    if arguments.json:
        write(arguments.json, json.dumps({"records": predictions}, indent=1) + "\n")
    return render(score(records, predictions, subsets=subsets), sweeps=arguments.sweeps)


def _chosen(record: dict[str, Any], arguments: argparse.Namespace) -> bool:
    if record["id"] in arguments.exclude.split(","):
        return False
    if arguments.where and record.get(arguments.where) is None:
        return False
    return not arguments.family or record["family"] in arguments.family


def load_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file.

    Raises:
        BadInputError: unreadable, not JSON, or not a list of objects with id, family, model and measured.
    """
    try:
        records = json.loads(codec.read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInputError("NEST-V01", f"{path} is not JSON: {error}") from None
    if not isinstance(records, list):
        raise BadInputError("NEST-V01", f"{path} holds no list of records")
    for number, record in enumerate(records):
        lacking = [
            key
            for key, kind in (("id", str), ("family", str), ("model", dict), ("measured", dict))
            if not isinstance(record, dict) or not isinstance(record.get(key), kind)
        ]
        if lacking:
            raise BadInputError(
                "NEST-V01",
                f"{path}: record number {number} is not of the measured schema",
                factors=[Factor("missing or wrong", ", ".join(lacking))],
            )
    return records
