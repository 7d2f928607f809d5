"""How a NeMo job runs: world size, batches before and beside training, the checkpoint it starts from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nest_megatron.dialects.access import ConfigView
from nest_megatron.dialects.nemo_settings import Optimizer, uses_megatron_core
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs.job import COMMAND_LINE, CONFIG_FILE, DEFAULT, DERIVED, CheckpointState
from nest_megatron.specs.settings import PlanSettings

_GPUS_PER_NODE = 8
_MAX_GPUS = 10_000_000
_MAX_RAMPUP_STAGES = 100_000


def read_world(view: ConfigView, settings: PlanSettings, *, assumptions: list[str]) -> tuple[int, int, str]:
    """Return (GPUs, GPUs per node, origin of the former).

    ``trainer.num_nodes`` times ``trainer.devices``; Lightning's default is one node.

    Raises:
        BadInputError: a count that is not a positive integer.
    """
    if settings.num_gpus is not None and not 0 < settings.num_gpus <= _MAX_GPUS:
        raise BadInputError(
            "NEST-D15",
            "num_gpus must be a positive number of GPUs",
            factors=[Factor("num_gpus", settings.num_gpus, COMMAND_LINE)],
        )
    num_nodes = _count(view, "trainer.num_nodes")
    devices = _devices(view)
    if settings.num_gpus is not None:
        return _asked_world(view, settings.num_gpus, num_nodes, devices, assumptions)
    if devices is None:
        devices = _GPUS_PER_NODE
        assumptions.append(f"trainer.devices does not give a number: {devices} GPUs per node are assumed")
    if num_nodes is None:
        assumptions.append(
            f"{view.full('trainer.num_nodes')} is not given: one node, Lightning's default, is assumed "
            "(num_gpus states the world size)"
        )
        return devices, devices, DEFAULT
    on_command_line = any(view.is_overridden(f"trainer.{key}") for key in ("num_nodes", "devices"))
    if num_nodes * devices > _MAX_GPUS:
        raise BadInputError(
            "NEST-D15",
            "no machine has that many GPUs",
            factors=[Factor("num_nodes", num_nodes, CONFIG_FILE), Factor("devices", devices, CONFIG_FILE)],
        )
    return num_nodes * devices, devices, COMMAND_LINE if on_command_line else CONFIG_FILE


def _asked_world(
    view: ConfigView, asked: int, num_nodes: int | None, devices: int | None, assumptions: list[str]
) -> tuple[int, int, str]:
    if num_nodes is not None and devices is not None and num_nodes * devices != asked:
        assumptions.append(
            f"num_gpus={asked} replaces {view.full('trainer.num_nodes')}={num_nodes} times "
            f"{view.full('trainer.devices')}={devices}; those keys are not edited"
        )
    per_node = devices if devices is not None and devices > 1 and asked % devices == 0 else None
    return asked, per_node or min(_GPUS_PER_NODE, asked), COMMAND_LINE


def _count(view: ConfigView, key: str) -> int | None:
    """Return a positive count; Lightning and environment resolvers also give it as text."""
    found = view.value(key)
    if isinstance(found, str) and found.strip().isdecimal() and len(found) < 9:
        return int(found) or None
    return view.integer(key, maximum=_MAX_GPUS)


def _devices(view: ConfigView) -> int | None:
    """Return GPUs per node; None for -1 and ``auto``, which mean all of them; a list names them."""
    found = view.value("trainer.devices")
    if found in (-1, "-1", "auto"):
        return None
    if isinstance(found, list) and found:
        return len(found)
    if isinstance(found, str) and "," in found:
        return len([part for part in found.split(",") if part.strip()])
    return _count(view, "trainer.devices")


def read_rampup(view: ConfigView, global_batch: int) -> tuple[int, ...]:
    """Return the global batches before ``global_batch`` is reached, from [start, increment, samples].

    Raises:
        BadInputError: another form, or increments that miss the global batch (Megatron refuses them).
    """
    key = "model.rampup_batch_size"
    found = view.integers(key)
    if found is None:
        return ()
    factors = [
        Factor(view.full(key), list(found), view.origin(key)),
        Factor("global_batch_size", global_batch),
    ]
    if len(found) != 3 or found[0] <= 0 or found[1] <= 0 or found[2] < 0:
        raise BadInputError(
            "NEST-D16", f"{view.full(key)} must be [start, increment, samples], all positive", factors=factors
        )
    start, increment, _ = found
    if (
        start > global_batch
        or (global_batch - start) % increment
        or ((global_batch - start) // increment > _MAX_RAMPUP_STAGES)
    ):
        raise BadInputError(
            "NEST-D16", "the ramp-up does not reach the global batch in whole increments", factors=factors
        )
    return tuple(range(start, global_batch, increment))


def read_evaluation_batch(view: ConfigView, global_batch: int) -> int | None:
    """Return the sequences of one validation step, None when ``limit_val_batches`` is 0.

    Raises:
        BadInputError: a value of the wrong type.
    """
    limit = view.number("trainer.limit_val_batches")
    if limit is None:
        limit = view.number("trainer.sft.limit_val_batches")
    if limit == 0:
        return None
    return view.integer("model.data.validation_ds.global_batch_size") or global_batch


def read_checkpoint(view: ConfigView, optimizer: Optimizer) -> CheckpointState:
    """Return whether training starts from a checkpoint, and whether that may be loaded under another layout.

    megatron-core models write distributed checkpoints, which reshard; with megatron-core's optimizer only in
    the fully parallel format (``dist_ckpt_parallel_dist_opt``, true by default).

    Raises:
        BadInputError: a value of the wrong type.
    """
    reshards = uses_megatron_core(view) and (
        optimizer.kind != "megatron-core" or view.flag("model.dist_ckpt_parallel_dist_opt", True)
    )
    for key in (
        "model.restore_from_ckpt",
        "model.resume_from_checkpoint",
        "exp_manager.resume_from_checkpoint",
        "model.restore_from_path",
    ):
        path = view.text(key)
        if path:
            return CheckpointState(resuming=True, reshards=reshards, source=f"{view.full(key)}={path}")
    folder = _resume_folder(view)
    if folder is not None and _has_checkpoint(folder):
        return CheckpointState(resuming=True, reshards=reshards, source=str(folder))
    return CheckpointState(reshards=reshards)


def _resume_folder(view: ConfigView) -> Path | None:
    """Return where exp_manager looks for a last checkpoint, None when it does not or it is unknown."""
    if not view.flag("exp_manager.resume_if_exists"):
        return None
    try:
        dirpath = view.text("exp_manager.checkpoint_callback_params.dirpath")
        explicit = view.text("exp_manager.explicit_log_dir")
        base = view.text("exp_manager.exp_dir") or "nemo_experiments"
        name = view.text("exp_manager.name") or "default"
    except BadInputError:
        return None  # the folder depends on the running application, so no checkpoint can be seen from here
    if dirpath:
        return None if "://" in dirpath else Path(dirpath)
    return Path(explicit or Path(base) / name) / "checkpoints"


def _has_checkpoint(folder: Path) -> bool:
    """Return whether the folder holds a last or end checkpoint (exp_manager.check_resume)."""
    patterns = ("*last", "*end", "*last.ckpt", "*end.ckpt", "*/*last.ckpt", "*/*end.ckpt")
    try:
        return any(next(folder.glob(pattern), None) is not None for pattern in patterns)
    except (OSError, ValueError):
        return False


def read_origins(view: ConfigView, keys: Sequence[tuple[str, Sequence[str]]]) -> dict[str, str]:
    """Return name -> origin, the strongest over the keys that decide the name."""
    rank = (COMMAND_LINE, CONFIG_FILE, DEFAULT)
    origins = {
        name: min((view.origin(key) for key in names), key=rank.index, default=DERIVED)
        for name, names in keys
    }
    return origins
