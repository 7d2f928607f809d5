"""Fit the constants of the step-time model on measured records, and report how they generalise.

    python -m scripts.fit_step_time RECORDS.json fit [--write]      fitted values, error before and after
    python -m scripts.fit_step_time RECORDS.json leave-out family   every family predicted without itself
    python -m scripts.fit_step_time RECORDS.json leave-out release|model [--subset SUBSETS.json:moe]
    python -m scripts.fit_step_time RECORDS.json ablate             what each term is worth

Gauss-Newton on log(predicted / measured) with Huber weights, a log-normal prior on every constant
(``conf/validation/step_time_fit.yaml``: centre from counting or an independent table, width sigma), and the
deviations inside layout sweeps counted once more, since order matters there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from scripts.step_time.ablation import ablate
from scripts.step_time.constants import Constant, load_constants, write_constants
from scripts.step_time.folds import fold_names, summarise
from scripts.step_time.problem import Problem, measured_rows

ITERATIONS = 6


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", type=Path)
    parser.add_argument("command", choices=("fit", "leave-out", "ablate"))
    parser.add_argument("by", nargs="?", default="family", choices=("family", "release", "model"))
    parser.add_argument("--subset", help="FILE:NAME, keep these records only")
    parser.add_argument("--out", type=Path, help="file of the left-out predictions, for the scoring script")
    parser.add_argument("--write", action="store_true", help="write fitted values into conf/")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    options = parser.parse_args()
    rows = measured_rows(json.loads(options.records.read_text()))
    constants = load_constants()
    problem = Problem(rows, constants)
    if options.command == "fit":
        _fit(problem, constants, options)
    elif options.command == "leave-out":
        _leave_out(problem, options)
    else:
        ablate(rows)


def _fit(problem: Problem, constants: list[Constant], options: argparse.Namespace) -> None:
    start = problem.current()
    print("before:", summarise(problem.errors(start)))
    best = problem.fit(start, iterations=options.iterations)
    print("after: ", summarise(problem.errors(best)))
    for constant, before, after in zip(constants, np.exp(start), np.exp(best), strict=True):
        print(f"  {constant.name:44s} centre {constant.centre:8.4g} before {before:8.4g} fitted {after:8.4g}")
    if options.write:
        write_constants(constants, np.exp(best))


def _leave_out(problem: Problem, options: argparse.Namespace) -> None:
    keep = None
    if options.subset:
        path, name = options.subset.rsplit(":", 1)
        keep = set(json.loads(Path(path).read_text())[name])
    folds = fold_names(problem.rows, options.by, keep)
    start = problem.current()
    slope = problem.jacobian(start, problem.errors(start))
    every = np.full(len(problem.rows), np.nan)
    for name in sorted(set(folds) - {""}):
        left_out = np.array([fold == name for fold in folds])
        best = problem.fit_without(left_out, start, slope)
        every[left_out] = problem.errors(best, only=left_out)
        print(f"  {name:34s} {summarise(every[left_out])}")
        sys.stdout.flush()
    print("all:", summarise(every[np.isfinite(every)]))
    if options.out:
        options.out.write_text(json.dumps(problem.predictions(every), indent=1))


if __name__ == "__main__":
    main()
