"""What scripts/train.py does after Hydra: find out which rank this is, train, say so, write a record."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from nest_megatron.errors import BadInputError, Factor
from nest_megatron.launch.processes import process_rank
from nest_megatron.launch.publish import write_atomically
from nest_megatron.specs import codec
from nest_megatron.specs.plan import Plan
from nest_megatron.units import gib

from .settings import Settings, require

if TYPE_CHECKING:
    from .loop import Step
    from .rank import Outcome

#: Seconds that forked ranks may take to train; a CPU run is small.
_LOCAL_TIMEOUT_S = 3600.0
_WORLD_VARIABLES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


@dataclass(frozen=True, slots=True)
class Launched:
    """How a launcher started this process; ``world`` 1 without a launcher."""

    rank: int
    local_rank: int
    world: int

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Launched:
        """Read the variables of torchrun, srun and the MPI launchers.

        Raises:
            BadInputError: a rank that is no number.
        """
        rank = process_rank(environment)
        if rank is None:
            return cls(0, 0, 1)
        world = next((int(environment[name]) for name in _WORLD_VARIABLES if name in environment), 1)
        local = next((int(environment[name]) for name in _LOCAL_RANK_VARIABLES if name in environment), 0)
        return cls(rank, local, world)


def settings_of(config: DictConfig) -> Settings:
    """Return the run that a NeMo-style or Megatron-LM configuration asks for.

    Raises:
        BadInputError: the configuration asks for something this program does not train.
    """
    if "MODEL_ARGS" in config:
        from .megatron_flags import settings_of as from_flags

        world = int(OmegaConf.select(config, "ENV_VARS.WORLD_SIZE") or 1)
        flags = OmegaConf.to_container(config.MODEL_ARGS, resolve=True)
        assert isinstance(flags, dict)
        named = {str(flag): value for flag, value in flags.items()}
        return from_flags(named, num_ranks=world, devices=min(8, world), name="megatron_lm")
    from .nemo_keys import settings_of as from_keys

    return from_keys(config)


def run(config: DictConfig, *, accelerator: str, folder: Path) -> bool:
    """Train what ``config`` asks for, as one rank, as forked ranks, or not at all; return whether it trained.

    Args:
        accelerator: ``cpu`` or ``gpu``; a GPU run of several ranks needs a launcher.
        folder: where rank 0 writes ``run.json``.

    Raises:
        NestError: a rank is not where the plan puts it, or the configuration cannot be trained here.
    """
    settings, launched = settings_of(config), Launched.of()
    if launched.world == 1 and settings.num_ranks > 1 and accelerator != "cpu":
        return False
    require(
        launched.world in (1, settings.num_ranks),
        "the launcher started another number of ranks than the configuration asks for",
        started=launched.world,
        asked=settings.num_ranks,
    )
    plan = plan_of_this_run()
    _prepare(accelerator)
    outcomes = _train(settings, plan, launched, _Printer(settings, plan))
    if launched.rank == 0:
        _finish(settings, plan, outcomes, folder)
    return True


def plan_of_this_run(environment: Mapping[str, str] = os.environ) -> Plan | None:
    """Return the plan that ``NEST_PLAN`` names, None without one.

    Raises:
        BadInputError: the file is unreadable.
    """
    path = environment.get("NEST_PLAN")
    return Plan.from_json(codec.read_text(Path(path)), source=path) if path else None


def _prepare(accelerator: str) -> None:
    """Import torch and make it ready.

    Raises:
        BadInputError: a GPU is asked for and there is none.
    """
    import logging
    import warnings

    # megatron-core says on import which optional packages are absent.
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    import torch

    from . import cpu

    if accelerator != "cpu" and not torch.cuda.is_available():
        raise BadInputError(
            "NEST-T04",
            "no CUDA device is here",
            factors=[Factor("trainer.accelerator", accelerator)],
            nearest=("trainer.accelerator=cpu with a configuration made for it: megatron_llama_tiny",),
        )
    if cpu.activate():
        torch.set_num_threads(1)


def _train(settings: Settings, plan: Plan | None, launched: Launched, say: _Printer) -> Sequence[Outcome]:
    if launched.world != settings.num_ranks:
        return forked_outcomes(settings, plan, say)
    from .rank import train_rank

    first = launched.rank == 0
    with tempfile.TemporaryDirectory(prefix="nest-rank-") as alone:
        outcome = train_rank(
            settings,
            plan,
            rank=launched.rank,
            local_rank=launched.local_rank,
            store="env://" if launched.world > 1 else f"file://{alone}/store",
            on_start=say.started if first else None,
            on_step=say.step if first else None,
        )
    return [outcome]


def forked_outcomes(settings: Settings, plan: Plan | None, say: _Printer | None = None) -> Sequence[Outcome]:
    """Train in forked ranks of this process, on the CPU, and return what each saw.

    Raises:
        NestError: a rank refused the plan, or failed.
    """
    _prepare("cpu")
    from .local import run_ranks
    from .rank import train_rank

    def task(rank: int, store: str) -> Outcome:
        speaks = rank == 0 and say is not None
        return train_rank(
            settings,
            plan,
            rank=rank,
            local_rank=rank,
            store=store,
            on_start=say.started if speaks else None,
            on_step=say.step if speaks else None,
        )

    return run_ranks(task, settings.num_ranks, timeout_s=_LOCAL_TIMEOUT_S)


class _Printer:
    """Says on stdout what the training does; only rank 0 has one that is used."""

    def __init__(self, settings: Settings, plan: Plan | None) -> None:
        self._settings, self._plan, self._start = settings, plan, time.perf_counter()

    def started(self, trainer: Any) -> None:
        """Say what was built, and what was compared with the plan."""
        settings = self._settings
        parameters = sum(p.numel() for chunk in trainer.chunks for p in chunk.parameters())
        checked = "no plan to compare with"
        if self._plan is not None:
            checked = f"nodes, groups and layers are those of the plan ({self._plan.layout.describe()})"
        _say(
            f"{settings.name}: {settings.num_ranks} ranks, {settings.precision}, "
            f"{parameters:,} parameters on rank 0, {settings.num_micro_batches} micro-batches of "
            f"{settings.micro_batch}; {checked}"
        )

    def step(self, step: Step) -> None:
        """Say one step."""
        import torch

        memory = ""
        if torch.cuda.is_available():
            memory = f"  peak {gib(torch.cuda.max_memory_allocated()):.2f} GiB allocated"
        _say(
            f"step {step.index + 1:4d}/{self._settings.num_steps}  loss {step.loss:.4f}  "
            f"grad norm {step.grad_norm:.4f}  {1e3 * step.step_time_s:8.1f} ms{memory}"
        )


def _finish(settings: Settings, plan: Plan | None, outcomes: Sequence[Outcome], folder: Path) -> None:
    import json

    import torch

    from .record import CPU_ACCELERATOR, run_record, step_time_s

    cuda = torch.cuda.is_available()
    record = run_record(
        settings,
        outcomes,
        plan,
        accelerator=torch.cuda.get_device_name() if cuda else CPU_ACCELERATOR,
        visible_bytes=torch.cuda.get_device_properties(0).total_memory if cuda else None,
    )
    path = folder / "run.json"
    write_atomically(path, json.dumps(record, indent=2) + "\n")
    steps = outcomes[0].steps
    _say(
        f"loss {steps[0].loss:.4f} -> {steps[-1].loss:.4f} in {len(steps)} steps, "
        f"{step_time_s(steps):.3f} s per step (median), peak resident "
        f"{gib(max(o.peak_resident_bytes for o in outcomes)):.2f} GiB per process"
    )
    _say(f"record {path}")


def _say(text: str) -> None:
    sys.stdout.write(f"train: {text}\n")
    sys.stdout.flush()
