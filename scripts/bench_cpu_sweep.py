"""Time six layouts of one small model on this CPU, calibrate with one of them, and predict the others.

What it shows: that plan, training, run record and calibration fit together, and how far a calibrated
prediction is from a measured step on a machine that the model was not made for.  What it does not show:
anything about a GPU.  Two processes share one host, gloo carries the collectives, and a step is hundreds of
short operators.

    python scripts/bench_cpu_sweep.py            # a minute and a half on two busy cores
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from training.app import forked_outcomes

from nest_megatron.calibration.runs import read_run
from nest_megatron.calibration.step import calibrate_step, predicted_s
from nest_megatron.dialects.megatron_lm import config_of
from nest_megatron.pipeline import plan_config
from nest_megatron.specs.plan import Plan
from nest_megatron.specs.settings import PlanSettings
from nest_megatron.validation.metrics import NOISE

#: Two processes, so that each has a core of its own on most hosts, as the prediction assumes.
WORLD = 2
#: A Llama-like model of 4.3 million parameters.
MODEL: dict[str, Any] = {
    "num-layers": 4,
    "hidden-size": 256,
    "ffn-hidden-size": 1024,
    "num-attention-heads": 4,
    "seq-length": 128,
    "max-position-embeddings": 128,
    "padded-vocab-size": 256,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "lr": 0.001,
    "hidden-dropout": 0.0,
    "attention-dropout": 0.0,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True,
    "use-distributed-optimizer": True,
}
#: Pins of the layouts; the first one calibrates.
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp": 1, "pp": 1, "cp": 1},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "sequence_parallel": False},
    {"pp": 2, "vpp": 1},
    {"pp": 2, "vpp": 2},
    {"cp": 2},
)


def main() -> None:
    """Train, calibrate, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=12, help="steps per layout; the first two are not timed")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="nest-sweep-") as folder:
        paths = [_measured(pins, steps, Path(folder)) for pins in LAYOUTS]
        calibrated = calibrate_step(paths[:1], store=Path(folder) / "calibration.json")
        runs = [read_run(path) for path in paths]
        rows = [
            (
                run.built.layout.describe(),
                float(run.record["measured"]["step_time_s"]),
                predicted_s(run),
                predicted_s(run, calibrated.entry),
            )
            for run in runs
        ]
    _print(rows, calibrated.entry.gpu_factor)


def _measured(pins: dict[str, Any], steps: int, folder: Path) -> Path:
    """Plan under ``pins``, train, and return the file of the run record."""
    from training.megatron_flags import settings_of
    from training.record import CPU_ACCELERATOR, run_record

    config = config_of(MODEL | {"train-iters": steps})
    pinned = PlanSettings(
        cluster="cpu-node",
        num_gpus=WORLD,
        pin=pins | {"micro_batch": 2, "recompute": "none"},
        calibration=False,
        dialect="megatron_lm",
    )
    plan: Plan = plan_config(config, settings=pinned)
    for key, value in plan.edits.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    flags = {str(flag): value for flag, value in OmegaConf.to_container(config.MODEL_ARGS).items()}
    settings = settings_of(flags, num_ranks=WORLD, devices=WORLD, name="sweep")
    outcomes = forked_outcomes(settings, plan)
    record = run_record(settings, outcomes, plan, accelerator=CPU_ACCELERATOR, visible_bytes=None)
    path = folder / f"{'-'.join(f'{axis}{value}' for axis, value in pins.items())}.json"
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def _print(rows: list[tuple[str, float, float, float]], factor: float) -> None:
    print(f"calibrated with the first row: step time x {factor:.3f}")
    print(f"{'layout':28s} {'measured ms':>12s} {'predicted ms':>13s} {'calibrated ms':>14s} {'error':>8s}")
    for name, measured, plain, calibrated in rows:
        error = calibrated / measured - 1
        print(f"{name:28s} {1e3 * measured:12.1f} {1e3 * plain:13.1f} {1e3 * calibrated:14.1f} {error:+8.1%}")
    pairs = [(a, b) for a, b in combinations(rows, 2) if abs(a[1] / b[1] - 1) > NOISE]
    right = sum((a[1] < b[1]) == (a[3] < b[3]) for a, b in pairs)
    print(f"order: {right} of {len(pairs)} pairs that differ by more than {NOISE:.0%}")
    fastest, chosen = min(rows, key=lambda row: row[1]), min(rows, key=lambda row: row[3])
    print(f"fastest measured: {fastest[0]}; predicted: {chosen[0]}, {chosen[1] / fastest[1] - 1:+.1%}")
    print("processes of one host over gloo: an exercise of the tool chain, no statement about a GPU")


if __name__ == "__main__":
    main()
