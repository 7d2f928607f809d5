"""A layout while its axes are being bound, and the rules that judge it, their verdicts kept."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from nest_megatron.rules import Rule, facts_for
from nest_megatron.rules.base import FIELDS
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout


class Draft:
    """A mutable stand-in for Layout while axes are being bound; rules only read attributes."""

    __slots__ = tuple(field.name for field in dataclasses.fields(Layout))
    interleaving_group = Layout.interleaving_group  # derived there from fields that are here too

    def __init__(self, layout: Layout) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(layout, name))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def freeze(self) -> Layout:
        """Return the layout drafted so far."""
        return Layout(**{name: getattr(self, name) for name in self.__slots__})


class Judge:
    """Applies some rules in order, caching each verdict by the values of the axes the rule declares."""

    def __init__(
        self, job: TrainJob, rules: Iterable[Rule], counts: Counter[str], examples: dict[str, str]
    ) -> None:
        self.job = job
        self.facts = facts_for(job.megatron_core_version)
        self.counts, self.examples = counts, examples
        self.read = tuple(rules)
        self.rules: list[tuple[Rule, Callable[[Any], Any], dict[Any, str | None]]] = []
        for rule in self.read:
            fields = sorted(FIELDS[axis] for axis in rule.axes)
            key = attrgetter(*fields) if fields else _no_key
            self.rules.append((rule, key, {}))

    def legal(self, draft: Any) -> bool:
        """Return whether ``draft`` keeps the rules, counting the first one it breaks."""
        for rule, key_of, verdicts in self.rules:
            key = key_of(draft)
            broken = verdicts.get(key, _UNKNOWN)
            if broken is _UNKNOWN:
                verdict = rule.function(self.job, draft, self.facts)
                broken = verdicts[key] = None if verdict is None else verdict.message
            if broken is not None:
                self.counts[rule.name] += 1
                self.examples.setdefault(rule.name, f"{rule.code}: {broken}")
                return False
        return True


def _no_key(_: Any) -> None:
    return None


_UNKNOWN: Any = object()
