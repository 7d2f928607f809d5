"""Every legal layout that the dialect can execute, as arrays for the solver.

Axes are bound in the order of ``NODE_AXES`` (a *node*), then vpp, then splits and recompute (a *candidate*).
Verdicts are cached by the axes a rule declares, and the candidates of a node by the axes that later rules
read, so the legality of a split is decided once per (pp, vpp, ...) and not once per layout.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from cython_dp import RECOMPUTE_BLOCK, RECOMPUTE_NONE, RECOMPUTE_UNIFORM
from nest_megatron.planner.domains import BLOCK_AUTO, Domains
from nest_megatron.planner.drafts import Draft, Judge
from nest_megatron.planner.floors import StateFloor
from nest_megatron.planner.splits import Split
from nest_megatron.rules import Rule, facts_for, rules_by_depth
from nest_megatron.rules.base import FIELDS
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Recompute, RecomputeMethod

Int32 = npt.NDArray[np.int32]

NODE_AXES = ("tp", "cp", "pp", "sequence_parallel", "ep", "etp", "micro_batch", "sharding", "order")
CANDIDATE_AXES = ("vpp", "layers", "recompute", "overlap")
#: Axes that decide, with vpp, whether the micro-batches and layers can be dealt to chunks.
_PIPELINE_AXES = frozenset({"tp", "cp", "pp", "micro_batch", "vpp"})
_MODES = {"none": RECOMPUTE_NONE, "uniform": RECOMPUTE_UNIFORM, "block": RECOMPUTE_BLOCK}
_COLUMNS = (
    "vpp",
    "mode",
    "num_recompute",
    "split_start",
    "free",
    "choice_first",
    "choice_count",
    "floor",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Nodes and candidates of one job.

    Attributes:
        nodes: layouts without vpp, split and layer recomputation; a node's recompute is its row's.
        node, vpp, group, mode, num_recompute, split_start, free, choice_first, choice_count, floor: (C,)
        int32,
            see ``cython_dp.reference.Problem``.
        sizes: concatenated layer counts per chunk; ``choices``: where the splits to choose from start in it.
        rejections: rule name -> number of prefixes it cut first; ``too_large``: prefixes whose weights and
            optimizer alone do not fit.
        examples: rule name -> the first message it gave.
    """

    nodes: tuple[Layout, ...]
    node: Int32
    vpp: Int32
    group: Int32
    mode: Int32
    num_recompute: Int32
    split_start: Int32
    free: Int32
    choice_first: Int32
    choice_count: Int32
    floor: Int32
    sizes: Int32
    choices: Int32
    rejections: dict[str, int]
    too_large: int
    examples: dict[str, str]
    domains: Domains

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.node)

    def only(self, nodes: npt.NDArray[np.int64]) -> Space:
        """Return the space of the candidates of some nodes, in the same order."""
        number = np.full(len(self.nodes), -1, dtype=np.int32)
        number[nodes] = np.arange(len(nodes), dtype=np.int32)
        kept = np.flatnonzero(number[self.node] >= 0)
        columns = {name: getattr(self, name)[kept] for name in (*_COLUMNS, "group")}
        return dataclasses.replace(
            self, nodes=tuple(self.nodes[i] for i in nodes), node=number[self.node[kept]], **columns
        )

    def alone(self, i: int) -> Space:
        """Return the space of candidate ``i`` only."""
        columns = {name: getattr(self, name)[i : i + 1] for name in (*_COLUMNS, "group")}
        node = self.nodes[int(self.node[i])]
        return dataclasses.replace(self, nodes=(node,), node=np.zeros(1, dtype=np.int32), **columns)

    def layout(self, i: int, *, sizes: Sequence[int] = (), num_recompute: int = 0) -> Layout:
        """Return the complete layout of candidate ``i``.

        Args:
            sizes: layers per chunk, the candidate's example by default.
            num_recompute: recomputed layers; by default the candidate's own, or one where they are open.
        """
        node = self.nodes[int(self.node[i])]
        vpp, start = int(self.vpp[i]), int(self.split_start[i])
        recompute = node.recompute
        if self.mode[i] != RECOMPUTE_NONE:
            method: RecomputeMethod = "uniform" if self.mode[i] == RECOMPUTE_UNIFORM else "block"
            layers = num_recompute or int(self.num_recompute[i]) or BLOCK_AUTO.num_layers
            recompute = Recompute(granularity="full", method=method, num_layers=layers)
        example = self.sizes[start : start + node.pp * vpp]
        return dataclasses.replace(
            node,
            vpp=vpp,
            num_layers_per_chunk=tuple(int(n) for n in (sizes or example)),
            recompute=recompute,
            overlap=self.domains.overlap(node, vpp=vpp),
        )


class _Splits:
    """The distinct splits of a space, and the lists that candidates choose from."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.choices: list[int] = []
        self._starts: dict[Split, int] = {}
        self._lists: dict[tuple[Split, ...], int] = {}

    def start(self, split: Split) -> int:
        """Return where ``split`` starts in ``sizes``."""
        if split not in self._starts:
            self._starts[split] = len(self.sizes)
            self.sizes.extend(split)
        return self._starts[split]

    def listed(self, splits: tuple[Split, ...]) -> int:
        """Return where the starts of ``splits`` are listed in ``choices``."""
        if splits not in self._lists:
            starts = [self.start(split) for split in splits]
            self._lists[splits] = len(self.choices)
            self.choices.extend(starts)
        return self._lists[splits]


class _Builder:
    """Depth-first enumeration over a draft that is bound in place."""

    def __init__(self, job: TrainJob, state: StateFloor | None, *, wide: bool) -> None:
        self.job, self.state = job, state
        self.domains = Domains(job, wide=wide)
        self.counts: Counter[str] = Counter()
        self.too_large = 0
        self.examples: dict[str, str] = {}
        by_depth = rules_by_depth(NODE_AXES + CANDIDATE_AXES)
        depth = len(NODE_AXES)
        self.node_judges = [self._judge(rules) for rules in by_depth[:depth]]
        # What decides the chunk counts is judged once per grid and micro-batch, not once per node.
        pipeline = [rule for rule in by_depth[depth] if rule.axes <= _PIPELINE_AXES]
        self.pipeline_judge = self._judge(pipeline)
        self.vpp_judge = self._judge(rule for rule in by_depth[depth] if rule not in pipeline)
        later = [rule for rules in by_depth[depth + 1 :] for rule in rules]
        # Splits are many and long: what reads them alone is judged once per list, the rest without them.
        self.split_rules = [rule for rule in later if rule.axes <= {"layers", "pp", "vpp"}]
        self.group_rules = [rule for rule in later if "layers" in rule.axes and rule not in self.split_rules]
        self.late_judge = self._judge(rule for rule in later if "layers" not in rule.axes)
        self.facts = facts_for(job.megatron_core_version)
        self.legal_splits: dict[tuple[int, int, tuple[Split, ...]], tuple[Split, ...]] = {}
        #: Axes that decide which candidates follow a node; the overlap flags follow from some of them.
        read = {axis for rule in later for axis in rule.axes}
        self.block_key = attrgetter(
            *sorted(
                {FIELDS[axis] for axis in read - {"vpp", "layers", "overlap", "recompute"}}
                | {"pp", "ep", "sequence_parallel", "sharding", "recompute"}
            )
        )
        self.blocks: dict[Any, Int32] = {}
        self.chunk_counts: dict[Any, tuple[int, ...]] = {}
        self.pipeline_key = attrgetter("tp", "cp", "pp", "micro_batch")
        self.grid_key = attrgetter("tp", "cp", "pp", "sequence_parallel", "ep", "etp", "micro_batch")
        self.last_counts: tuple[Any, tuple[int, ...]] = (None, ())
        self.splits = _Splits()
        self.draft = Draft(Layout(global_batch=job.global_batch))
        self.constant_domains: dict[str, tuple[Any, ...]] = {
            "micro_batch": self.domains.micro_batch(),
            "ep": self.domains.ep(),
            "order": self.domains.order(),
        }

    def _judge(self, rules: Iterable[Rule]) -> Judge:
        return Judge(self.job, rules, self.counts, self.examples)

    def nodes(self, depth: int = 0) -> Iterator[Draft]:
        """Yield the draft at every legal node, in the lexicographic order of the domains."""
        if depth == len(NODE_AXES):
            yield self.draft
            return
        axis, judge = NODE_AXES[depth], self.node_judges[depth]
        for value in self._domain(axis):
            self._bind(axis, value)
            if not judge.legal(self.draft):
                continue
            if axis == "sharding" and self.state is not None and not self.state.fits(self.draft):
                self.too_large += 1
                continue
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
        if axis == "sharding":
            return self.domains.sharding(draft)
        return self.domains.etp(draft.tp)

    def _bind(self, axis: str, value: Any) -> None:
        """Bind ``axis``, and dp or edp as soon as they follow."""
        draft, world = self.draft, self.job.num_gpus
        if axis == "sharding":
            draft.sharding, draft.num_optimizer_instances = value
            return
        setattr(draft, FIELDS[axis], value)
        if axis == "pp":
            draft.dp = max(1, world // (draft.tp * draft.cp * value))
        elif axis == "etp":
            draft.edp = max(1, world // (value * draft.ep * draft.pp))

    def _chunk_counts(self) -> tuple[int, ...]:
        """Return the vpp values that the draft's micro-batches and layers can be dealt to."""
        draft = self.draft
        grid = self.grid_key(draft)
        # Neighbouring nodes differ in sharding and order only.
        if self.last_counts[0] == grid:
            return self.last_counts[1]
        key = self.pipeline_key(draft)
        if key not in self.chunk_counts:
            legal = []
            for vpp in self.domains.vpp(draft.pp):
                draft.vpp = vpp
                if self.pipeline_judge.legal(draft):
                    legal.append(vpp)
            self.chunk_counts[key] = tuple(legal)
        legal = []
        for vpp in self.chunk_counts[key]:
            draft.vpp = vpp
            if self.vpp_judge.legal(draft):
                legal.append(vpp)
        self.last_counts = grid, tuple(legal)
        return self.last_counts[1]

    def _block(self, chunk_counts: tuple[int, ...]) -> Int32:
        """Return the candidates of the draft, one column per candidate in the order of ``_COLUMNS``."""
        key = self.block_key(self.draft), chunk_counts
        if key not in self.blocks:
            self.blocks[key] = self._build_block(chunk_counts)
        return self.blocks[key]

    def _build_block(self, chunk_counts: tuple[int, ...]) -> Int32:
        draft, row = self.draft, self.draft.recompute
        found: list[tuple[int, ...]] = []
        for vpp in chunk_counts:
            draft.vpp = vpp
            draft.overlap = self.domains.overlap(draft, vpp=vpp)
            for recompute, free, splits in self.domains.variants(row, draft.pp, vpp):
                draft.recompute = recompute
                legal = self._legal_splits(splits) if self.late_judge.legal(draft) else ()
                if not legal:
                    continue
                open_count = recompute is BLOCK_AUTO
                found.append(
                    (
                        vpp,
                        _MODES[recompute.method] if recompute.granularity == "full" else RECOMPUTE_NONE,
                        0 if open_count else max(1, recompute.num_layers),
                        self.splits.start(legal[0]),
                        int(free),
                        self.splits.listed(legal),
                        len(legal),
                        min(min(split[: draft.pp]) for split in legal),
                    )
                )
        draft.recompute, draft.num_layers_per_chunk = row, ()
        return np.array(found, dtype=np.int32).reshape(-1, len(_COLUMNS))

    def _legal_splits(self, splits: tuple[Split, ...]) -> tuple[Split, ...]:
        """Return those that keep every rule with the draft's pp, vpp and recomputation."""
        key = self.draft.pp, self.draft.vpp, splits
        if key not in self.legal_splits:
            self.legal_splits[key] = self._kept(splits, self.split_rules)
        return self._kept(self.legal_splits[key], self.group_rules)

    def _kept(self, splits: tuple[Split, ...], rules: Sequence[Rule]) -> tuple[Split, ...]:
        draft, kept = self.draft, []
        for split in splits:
            draft.num_layers_per_chunk = split
            for rule in rules:
                verdict = rule.function(self.job, draft, self.facts)  # type: ignore[arg-type]
                if verdict is not None:
                    self.counts[rule.name] += 1
                    self.examples.setdefault(rule.name, f"{rule.code}: {verdict.message}")
                    break
            else:
                kept.append(split)
        return splits if len(kept) == len(splits) else tuple(kept)

    def build(self) -> Space:
        """Return the whole space."""
        nodes: list[Layout] = []
        blocks: list[Int32] = []
        rows = self.domains.selective()
        for draft in self.nodes():
            chunk_counts = self._chunk_counts()
            for recompute in rows if chunk_counts else ():
                draft.recompute = recompute
                block = self._block(chunk_counts)
                if len(block):
                    blocks.append(block)
                    draft.vpp, draft.overlap = 1, self.domains.overlap(draft, vpp=2 if draft.pp > 1 else 1)
                    nodes.append(draft.freeze())
            draft.recompute = Recompute()
        return self._assemble(nodes, blocks)

    def _assemble(self, nodes: list[Layout], blocks: list[Int32]) -> Space:
        lengths = np.array([len(block) for block in blocks], dtype=np.int64)
        empty = np.zeros((0, len(_COLUMNS)), dtype=np.int32)
        table = np.concatenate(blocks) if blocks else empty
        columns = {name: np.ascontiguousarray(table[:, k]) for k, name in enumerate(_COLUMNS)}
        return Space(
            nodes=tuple(nodes),
            node=np.repeat(np.arange(len(nodes), dtype=np.int32), lengths),
            group=np.repeat(np.array([node.interleaving_group for node in nodes], dtype=np.int32), lengths),
            sizes=np.array(self.splits.sizes, dtype=np.int32),
            choices=np.array(self.splits.choices, dtype=np.int32),
            rejections=dict(self.counts.most_common()),
            too_large=self.too_large,
            examples=self.examples,
            domains=self.domains,
            **columns,
        )


def enumerate_space(job: TrainJob, *, state: StateFloor | None = None, wide: bool = False) -> Space:
    """Return every legal layout of ``job`` within its domains, in a fixed order.

    Args:
        state: leave out layouts whose states alone do not fit.
        wide: enumerate also the degrees beyond ``domains.MIN_SLICE_TOKENS`` and ``MIN_SLICE_WIDTH``.

    Raises:
        BadInputError: the job's megatron-core version cannot be read.
    """
    return _Builder(job, state, wide=wide).build()
