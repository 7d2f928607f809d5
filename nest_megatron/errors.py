"""The error tree: what failed, each factor with value and origin, the nearest legal choice, and a code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Exit codes of the command line (DESIGN section 8).
EXIT_OK = 0
EXIT_NO_PLAN = 1
EXIT_BAD_INPUT = 2


@dataclass(frozen=True, slots=True)
class Factor:
    """One quantity an error depends on: its name, its value, and where the value came from."""

    name: str
    value: object
    origin: str = ""

    def __str__(self) -> str:
        where = f" ({self.origin})" if self.origin else ""
        return f"{self.name}={self.value}{where}"


class NestError(Exception):
    """Base of every error that a user can cause or must act on.

    Args:
        code: stable identifier such as ``NEST-C01``; docs/troubleshooting.md lists them.
        message: one sentence saying what failed.
        factors: the quantities involved, each with its origin.
        nearest: legal or known alternatives, nearest first.
    """

    exit_code = EXIT_NO_PLAN

    def __init__(
        self,
        code: str,
        message: str,
        *,
        factors: Iterable[Factor] = (),
        nearest: Iterable[str] = (),
    ) -> None:
        self.code = code
        self.message = message
        self.factors = tuple(factors)
        self.nearest = tuple(nearest)
        super().__init__(self.render())

    def render(self) -> str:
        """Return the whole text: code, sentence, factors, nearest choices."""
        text = f"{self.code}: {self.message}"
        if self.factors:
            text += " [" + ", ".join(str(f) for f in self.factors) + "]"
        if self.nearest:
            text += " Nearest: " + "; ".join(self.nearest) + "."
        return text


class BadInputError(NestError):
    """The input cannot be read: unknown key, wrong type, missing value, unreadable file."""

    exit_code = EXIT_BAD_INPUT


class NothingToPlanError(BadInputError):
    """The input is readable and asks for no training; an intercepted application runs on, unchanged.

    The code identifies it, too: a process that reads a published failure knows no class.
    """

    CODE = "NEST-D30"

    def __init__(self, message: str, *, factors: Iterable[Factor] = (), nearest: Iterable[str] = ()) -> None:
        super().__init__(self.CODE, message, factors=factors, nearest=nearest)


class NoPlanError(NestError):
    """The input is readable, but no layout is both legal and feasible."""


class IllegalLayoutError(NestError):
    """A pinned or user-given layout breaks a rule."""


class PlannerFault(NestError):
    """A defect of ours: an internal invariant does not hold; never train on such a plan."""


def nearest_names(name: str, known: Sequence[str], *, count: int = 3) -> tuple[str, ...]:
    """Return the known names closest to ``name``, best first; empty when none is close."""
    return tuple(difflib.get_close_matches(name, list(known), n=count, cutoff=0.5))
