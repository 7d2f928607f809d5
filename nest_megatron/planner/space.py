"""Every legal layout that the dialect can execute, as arrays for the solver.

Axes are bound in the order of ``NODE_AXES`` (a *node*), then vpp, then split and recompute (a *candidate*).
Verdicts are cached by the axes a rule declares, so the legality of a split is decided once per (pp, vpp, ...)
and not once per layout.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cython_dp import RECOMPUTE_BLOCK, RECOMPUTE_NONE, RECOMPUTE_UNIFORM
from nest_megatron.planner.domains import Domains
from nest_megatron.rules import Rule, facts_for, rules_by_depth
from nest_megatron.rules.base import FIELDS
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Recompute, RecomputeMethod

Int32 = npt.NDArray[np.int32]

NODE_AXES = ("tp", "cp", "pp", "sequence_parallel", "ep", "etp", "micro_batch", "sharding", "order")
CANDIDATE_AXES = ("vpp", "layers", "recompute", "overlap")
_MODES = {"none": RECOMPUTE_NONE, "uniform": RECOMPUTE_UNIFORM, "block": RECOMPUTE_BLOCK}


@dataclasses.dataclass(frozen=True, slots=True)
class Variants:
    """What may follow one (node, vpp): parallel arrays of split, recompute mode and layer count."""

    vpp: int
    split_start: Int32
    mode: Int32
    num_recompute: Int32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Nodes and candidates of one job.

    Attributes:
        nodes: layouts without vpp, split and layer recomputation; a node's recompute is its row's.
        node, vpp, group, mode, num_recompute, split_start: (C,) int32, see ``cython_dp.reference.Problem``.
        sizes: concatenated layer counts per chunk.
        rejections: rule name -> number of prefixes it cut first.
        examples: rule name -> the first message it gave.
    """

    nodes: tuple[Layout, ...]
    node: Int32
    vpp: Int32
    group: Int32
    mode: Int32
    num_recompute: Int32
    split_start: Int32
    sizes: Int32
    rejections: dict[str, int]
    examples: dict[str, str]
    domains: Domains

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.node)

    def layout(self, i: int) -> Layout:
        """Return the complete layout of candidate ``i``."""
        node = self.nodes[int(self.node[i])]
        vpp, start = int(self.vpp[i]), int(self.split_start[i])
        recompute = node.recompute
        if self.mode[i] != RECOMPUTE_NONE:
            method: RecomputeMethod = "uniform" if self.mode[i] == RECOMPUTE_UNIFORM else "block"
            recompute = Recompute(granularity="full", method=method, num_layers=int(self.num_recompute[i]))
        return dataclasses.replace(
            node,
            vpp=vpp,
            num_layers_per_chunk=tuple(int(n) for n in self.sizes[start : start + node.pp * vpp]),
            recompute=recompute,
            overlap=self.domains.overlap(node, vpp=vpp),
        )

    def with_blocks(self, *counts: Int32) -> Space:
        """Return the space with every automatic block replaced by the given layer counts (0 drops it).

        Args:
            counts: (C,) layers per chunk for candidates in block mode, one array per memory limit.
        """
        block = self.mode == RECOMPUTE_BLOCK
        index = [np.flatnonzero(~block)]
        layers = [self.num_recompute[index[0]]]
        seen: list[Int32] = []
        for count in counts:
            fresh = block & (count > 0)
            for earlier in seen:
                fresh &= count != earlier
            index.append(np.flatnonzero(fresh))
            layers.append(count[index[-1]])
            seen.append(count)
        chosen = np.concatenate(index)
        return dataclasses.replace(
            self,
            node=self.node[chosen],
            vpp=self.vpp[chosen],
            group=self.group[chosen],
            mode=self.mode[chosen],
            num_recompute=np.concatenate(layers).astype(np.int32),
            split_start=self.split_start[chosen],
        )


class _Draft:
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


class _Judge:
    """Applies some rules in order, caching each verdict by the values of the axes the rule declares."""

    def __init__(
        self, job: TrainJob, rules: Iterable[Rule], counts: Counter[str], examples: dict[str, str]
    ) -> None:
        self.job = job
        self.facts = facts_for(job.megatron_core_version)
        self.counts, self.examples = counts, examples
        self.rules: list[tuple[Rule, Callable[[Any], Any], dict[Any, str | None]]] = []
        for rule in rules:
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


class _Builder:
    """Depth-first enumeration over a draft that is bound in place."""

    def __init__(self, job: TrainJob) -> None:
        self.job = job
        self.domains = Domains(job)
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        by_depth = rules_by_depth(NODE_AXES + CANDIDATE_AXES)
        depth = len(NODE_AXES)
        self.node_judges = [self._judge(rules) for rules in by_depth[:depth]]
        # A chunk count that no split can serve is dropped once per pp, not once per node.
        pipeline = [rule for rule in by_depth[depth] if rule.axes <= {"pp", "vpp"}]
        self.pipeline_judge = self._judge(pipeline)
        self.vpp_judge = self._judge(rule for rule in by_depth[depth] if rule not in pipeline)
        later = [rule for rules in by_depth[depth + 1 :] for rule in rules]
        self.late_judge = self._judge(later)
        #: Axes that decide which splits and recompute choices are legal, besides those themselves.
        read = {axis for rule in later for axis in rule.axes} - {"layers", "recompute", "overlap"}
        self.variant_key = attrgetter(
            *sorted({FIELDS[axis] for axis in read} | {"pp", "vpp", "recompute", "overlap"})
        )
        self.variants_cache: dict[Any, Variants | None] = {}
        self.chunk_counts: dict[int, tuple[int, ...]] = {}
        self.sizes: list[int] = []
        self.split_at: dict[tuple[int, ...], int] = {}
        self.draft = _Draft(Layout(global_batch=job.global_batch))
        self.constant_domains: dict[str, tuple[Any, ...]] = {
            "micro_batch": self.domains.micro_batch(),
            "ep": self.domains.ep(),
            "sharding": self.domains.sharding(),
            "order": self.domains.order(),
        }

    def _judge(self, rules: Iterable[Rule]) -> _Judge:
        return _Judge(self.job, rules, self.counts, self.examples)

    def nodes(self, depth: int = 0) -> Iterator[_Draft]:
        """Yield the draft at every legal node, in the lexicographic order of the domains."""
        if depth == len(NODE_AXES):
            yield self.draft
            return
        axis, judge = NODE_AXES[depth], self.node_judges[depth]
        for value in self._domain(axis):
            self._bind(axis, value)
            if judge.legal(self.draft):
                yield from self.nodes(depth + 1)

    def _domain(self, axis: str) -> tuple[Any, ...]:
        if axis in self.constant_domains:
            return self.constant_domains[axis]
        draft = self.draft
        if axis == "tp":
            return self.domains.tp()
        if axis == "cp":
            return self.domains.cp(draft.tp)
        if axis == "pp":
            return self.domains.pp(draft.tp, draft.cp)
        if axis == "sequence_parallel":
            return self.domains.sequence_parallel(draft.tp)
        return self.domains.etp(draft.tp)

    def _bind(self, axis: str, value: Any) -> None:
        """Bind ``axis``, and dp or edp as soon as they follow."""
        draft, world = self.draft, self.job.num_gpus
        setattr(draft, FIELDS[axis], value)
        if axis == "pp":
            draft.dp = max(1, world // (draft.tp * draft.cp * value))
        elif axis == "etp":
            draft.edp = max(1, world // (value * draft.ep * draft.pp))

    def _chunk_counts(self) -> tuple[int, ...]:
        """Return the vpp values that some split of the layers over the draft's pp can serve."""
        pp = self.draft.pp
        if pp not in self.chunk_counts:
            legal = []
            for vpp in self.domains.vpp(pp):
                self.draft.vpp = vpp
                if self.pipeline_judge.legal(self.draft):
                    legal.append(vpp)
            self.chunk_counts[pp] = tuple(legal)
        return self.chunk_counts[pp]

    def variants(self, vpp: int) -> Variants | None:
        """Return the legal splits and recompute choices of the draft with ``vpp``, None without any."""
        draft = self.draft
        draft.vpp = vpp
        if not self.vpp_judge.legal(draft):
            return None
        draft.overlap = self.domains.overlap(draft, vpp=vpp)
        key = self.variant_key(draft)
        if key not in self.variants_cache:
            self.variants_cache[key] = self._build_variants()
        return self.variants_cache[key]

    def _build_variants(self) -> Variants | None:
        draft, row = self.draft, self.draft.recompute
        starts, modes, counts = [], [], []
        for sizes in self.domains.splits(draft.pp, draft.vpp):
            draft.num_layers_per_chunk = sizes
            for recompute in self.domains.recompute(row, sizes):
                draft.recompute = recompute
                if not self.late_judge.legal(draft):
                    continue
                if sizes not in self.split_at:
                    self.split_at[sizes] = len(self.sizes)
                    self.sizes.extend(sizes)
                starts.append(self.split_at[sizes])
                modes.append(_MODES[recompute.method] if recompute.granularity == "full" else RECOMPUTE_NONE)
                counts.append(max(1, recompute.num_layers))
        draft.recompute, draft.num_layers_per_chunk = row, ()
        if not starts:
            return None
        i32 = np.int32
        return Variants(draft.vpp, np.array(starts, i32), np.array(modes, i32), np.array(counts, i32))

    def build(self) -> Space:
        """Return the whole space."""
        nodes: list[Layout] = []
        parts: list[tuple[int, int, Variants]] = []
        rows = self.domains.selective()
        for draft in self.nodes():
            for recompute in rows:
                draft.recompute = recompute
                found = [
                    variants for vpp in self._chunk_counts() if (variants := self.variants(vpp)) is not None
                ]
                if found:
                    parts.extend((len(nodes), draft.pp, variants) for variants in found)
                    draft.vpp, draft.overlap = 1, self.domains.overlap(draft, vpp=2 if draft.pp > 1 else 1)
                    nodes.append(draft.freeze())
            draft.recompute = Recompute()
        return self._assemble(nodes, parts)

    def _assemble(self, nodes: list[Layout], parts: list[tuple[int, int, Variants]]) -> Space:
        lengths = np.array([len(v.mode) for _, _, v in parts], dtype=np.int64)

        def spread(values: list[int]) -> Int32:
            return np.repeat(np.array(values, dtype=np.int32), lengths)

        def join(name: str) -> Int32:
            arrays = [getattr(v, name) for _, _, v in parts]
            return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32)

        return Space(
            nodes=tuple(nodes),
            node=spread([index for index, _, _ in parts]),
            vpp=spread([v.vpp for _, _, v in parts]),
            group=spread([pp for _, pp, _ in parts]),
            mode=join("mode"),
            num_recompute=join("num_recompute"),
            split_start=join("split_start"),
            sizes=np.array(self.sizes, dtype=np.int32),
            rejections=dict(self.counts.most_common()),
            examples=self.examples,
            domains=self.domains,
        )


def enumerate_space(job: TrainJob) -> Space:
    """Return every legal layout of ``job`` within its domains, in a fixed order.

    Raises:
        BadInputError: the job's megatron-core version cannot be read.
    """
    return _Builder(job).build()
