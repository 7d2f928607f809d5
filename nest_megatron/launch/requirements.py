"""Which versions are installed, read from metadata alone: importing a framework costs seconds and memory."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from nest_megatron.errors import BadInputError

_DISTRIBUTION = "nest-megatron"
#: Releases that the integration tests run on; others of the required range are only believed to work.
_TESTED = {"hydra-core": ("1.3.2", "1.3.8")}
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*([^;]*)(;.*)?$")
_COMPARE: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": lambda found, wanted: found >= wanted,
    "<": lambda found, wanted: found < wanted,
}


@dataclass(frozen=True, slots=True)
class VersionState:
    """One distribution: whether its version is good, and why."""

    name: str
    status: Literal["ok", "warning", "failed"]
    detail: str


def requirement_states() -> Iterator[VersionState]:
    """Compare what nest-megatron requires with what is installed."""
    try:
        requirements = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield VersionState(_DISTRIBUTION, "failed", "not installed for this interpreter")
        return
    yield VersionState(_DISTRIBUTION, "ok", importlib.metadata.version(_DISTRIBUTION))
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match and not match.group(3):
            yield _required(match.group(1), match.group(2).replace(" ", ""))


def framework_states() -> Iterator[VersionState]:
    """Say which frameworks are here; a machine that only plans needs none of them."""
    from nest_megatron.dialects.nemo_versions import parse_release
    from nest_megatron.rules.versions import facts_for

    yield _known("megatron-core", lambda version: f"rules of {facts_for(version).version}")
    yield _known("nemo-toolkit", lambda version: "rules of {}.{}".format(*parse_release(version, origin="")))
    for name in ("torch", "transformer-engine"):
        yield VersionState(name, "ok", installed(name) or "not installed: enough for planning")


def installed(name: str) -> str | None:
    """Return the installed version, None when there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _required(name: str, wanted: str) -> VersionState:
    found = installed(name)
    if found is None:
        return VersionState(name, "failed", f"not installed; {wanted} is required")
    fits = all(
        _COMPARE[sign](_release(found), _release(limit))
        for sign, limit in re.findall(r"(>=|<)([0-9.]+)", wanted)
    )
    tested = _TESTED.get(name, (found,))
    if fits and found not in tested:
        return VersionState(name, "warning", f"{found} is untested; tested: {', '.join(tested)}")
    return VersionState(name, "ok" if fits else "failed", f"{found} ({wanted} is required)")


def _known(name: str, describe: Callable[[str], str]) -> VersionState:
    """Judge a framework by the table of versions that the rules follow."""
    found = installed(name)
    if found is None:
        return VersionState(name, "ok", "not installed: enough for planning; rules follow framework_version")
    try:
        return VersionState(name, "ok", f"{found}, {describe(found)}")
    except BadInputError as error:
        return VersionState(name, "warning", f"{found}: {error.message}")


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
