"""Named subsets of the records: classes of rows by id, and the sweeps that no layout model can predict."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nest_megatron.errors import BadInputError
from nest_megatron.specs import codec

#: Key of the list of sweep names; every other list holds record ids.
UNPREDICTABLE = "unpredictable_sweeps"

Subsets = Mapping[str, frozenset[str]]


def load_subsets(path: Path) -> dict[str, frozenset[str]]:
    """Return name -> record ids or sweep names; texts in the file (a readme) are passed over.

    Raises:
        BadInputError: unreadable, not JSON, or a list of something else than texts.
    """
    try:
        plain: Any = json.loads(codec.read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadInputError("NEST-V04", f"{path} is not JSON: {error}") from None
    if not isinstance(plain, dict):
        raise BadInputError("NEST-V04", f"{path} holds no object of named lists")
    found: dict[str, frozenset[str]] = {}
    for name, members in plain.items():
        if isinstance(members, str):
            continue
        if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
            raise BadInputError("NEST-V04", f"{path}: {name!r} is no list of record ids or sweep names")
        found[name] = frozenset(members)
    return found


def classes_of(records: Sequence[Mapping[str, Any]], subsets: Subsets) -> dict[str, frozenset[str]]:
    """Return class -> ids of the records in it; the records of no class are the class ``other``."""
    ids = {str(record["id"]) for record in records}
    found = {name: members & ids for name, members in subsets.items() if name != UNPREDICTABLE}
    if found:
        found["other"] = frozenset(ids.difference(*found.values()))
    return {name: members for name, members in found.items() if members}
