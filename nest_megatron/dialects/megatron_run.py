"""How a Megatron-LM job runs: version, world size, batches before and beside training, its checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from nest_megatron.dialects.megatron_arguments import MAX_INTEGER, Arguments
from nest_megatron.dialects.megatron_flags import FLAGS, Release, obeyed
from nest_megatron.dialects.placeholders import expand, names_in
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.rules.versions import facts_for
from nest_megatron.specs.job import COMMAND_LINE, CONFIG_FILE, DEFAULT, Capabilities, CheckpointState
from nest_megatron.specs.layout import Order, Sharding
from nest_megatron.specs.model import ModelSpec
from nest_megatron.specs.settings import PlanSettings

#: Assumed when nothing says which megatron-core trains; what Python 3.11 installs.
_DEFAULT_VERSION = "0.16.1"
_GPUS_PER_NODE = 8
_MAX_GPUS = 10_000_000
_MAX_RAMPUP_STAGES = 100_000
_SCHEDULE = re.compile(r"([0-9.]+)([KMBT]?):([0-9]{1,12})", re.ASCII)
_HYBRID_SEGMENTS = (0, 17)
#: Formats that load under another tp, pp, ep; ``fsdp_dtensor`` only under Megatron-FSDP.
_RESHARDING_FORMATS = ("torch_dist", "zarr", "torch_dcp", "fsdp_dtensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronVersion:
    """The megatron-core that runs the job; ``assumption`` is empty when it is known."""

    text: str
    release: Release
    assumption: str = ""


def resolve_version(asked: str | None) -> MegatronVersion:
    """Return the version: the setting, else the installed megatron-core, else 0.16.1.

    Raises:
        BadInputError: not a version, or older than every release whose rules are known.
    """
    text, assumption = asked, ""
    if text is None:
        try:
            text = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            text = _DEFAULT_VERSION
            assumption = (
                f"megatron-core is not installed here and no framework_version is given: {text} is assumed"
            )
    known = facts_for(text).version
    major, minor = known.split(".")
    return MegatronVersion(text=text, release=(int(major), int(minor)), assumption=assumption)


def note_other_release(args: Arguments, version: MegatronVersion, assumptions: list[str]) -> None:
    """Say which given flags this release does not know or does not obey; they are read all the same."""
    strangers = [
        f"{args.key(flag.field)} (from {flag.since[0]}.{flag.since[1]} on)"
        if flag.since > version.release
        else args.key(flag.field)
        for flag in FLAGS.values()
        if args.has(flag.field) and not obeyed(flag, version.release)
    ]
    if strangers:
        assumptions.append(
            f"megatron-core {version.text} does not obey {', '.join(strangers)}: read all the same"
        )


def read_world(
    environment: Mapping[str, object], settings: PlanSettings, *, assumptions: list[str]
) -> tuple[int, int, str]:
    """Return (GPUs, GPUs per node, origin of the former).

    The setting, else ``WORLD_SIZE``, else ``NUM_NODES`` (``SLURM_NNODES``) times ``GPUS_PER_NODE``.

    Raises:
        BadInputError: nothing says the world size, or a count is not a positive integer.
    """
    per_node = _count(environment, "GPUS_PER_NODE") or _count(environment, "LOCAL_WORLD_SIZE")
    nodes = _count(environment, "NUM_NODES") or _count(environment, "SLURM_NNODES")
    asked = settings.num_gpus
    if asked is not None and not 0 < asked <= _MAX_GPUS:
        raise _bad_world(asked, COMMAND_LINE)
    said = _count(environment, "WORLD_SIZE")
    if said is None and nodes is not None and per_node is not None:
        said = nodes * per_node
    if asked is not None and said not in (None, asked):
        assumptions.append(f"num_gpus={asked} replaces the {said} GPUs that the configuration says")
    world = asked if asked is not None else said
    if world is None:
        raise BadInputError(
            "NEST-M11",
            "Megatron-LM's arguments do not say the number of GPUs",
            factors=[Factor("WORLD_SIZE", "absent", DEFAULT)],
            nearest=("--gpus <number>", "WORLD_SIZE=<number> in ENV_VARS or in the environment"),
        )
    if world > _MAX_GPUS:
        raise _bad_world(world, CONFIG_FILE)
    if per_node is None or world % per_node:
        per_node = min(_GPUS_PER_NODE, world)
    return world, per_node, COMMAND_LINE if asked is not None else CONFIG_FILE


def _bad_world(value: int, origin: str) -> BadInputError:
    return BadInputError(
        "NEST-M11",
        "num_gpus must be a positive number of GPUs that some machine has",
        factors=[Factor("num_gpus", value, origin)],
    )


def _count(environment: Mapping[str, object], name: str) -> int | None:
    """Return a positive count; a variable that refers to an unassigned one counts as absent."""
    found = expand(str(environment.get(name, "")), environment).strip()
    if not found or names_in(found):
        return None
    if not (found.isascii() and found.isdecimal()) or len(found) > 8 or int(found) == 0:
        raise BadInputError(
            "NEST-M11", f"{name} must be a positive integer", factors=[Factor(name, found[:40], CONFIG_FILE)]
        )
    return int(found)


def read_batches(args: Arguments, *, assumptions: list[str]) -> tuple[int | None, tuple[int, ...]]:
    """Return (global batch, or None for Megatron-LM's default; batches before it is reached).

    ``--step-batch-size-schedule "0:384 200B:768"`` gives all of them; ``--rampup-batch-size start step
    samples`` (obeyed up to 0.17) those before ``--global-batch-size``.

    Raises:
        BadInputError: another form, or increments that miss the global batch.
    """
    given = args.integer("global_batch_size")
    if args.has("step_batch_size_schedule"):
        sizes = _schedule(args)
        if given is not None and given != sizes[-1]:
            raise BadInputError(
                "NEST-M12",
                "--global-batch-size differs from the last batch of --step-batch-size-schedule",
                factors=[args.factor("global_batch_size"), args.factor("step_batch_size_schedule")],
            )
        return sizes[-1], tuple(dict.fromkeys(sizes[:-1]))
    ramp = args.integers("rampup_batch_size")
    if not ramp:
        return given, ()
    if not obeyed(FLAGS["rampup-batch-size"], args.release):
        assumptions.append("--rampup-batch-size is ignored by megatron-core 0.18 and later")
        return given, ()
    if len(ramp) != 3 or min(ramp[:2]) < 1 or given is None:
        raise args.wrong("rampup_batch_size", "start, increment and samples, beside --global-batch-size")
    start, increment, _ = ramp
    stages, rest = divmod(given - start, increment)
    if rest or not 0 <= stages <= _MAX_RAMPUP_STAGES:
        raise args.wrong("rampup_batch_size", f"such that increments reach the global batch {given}")
    return given, tuple(range(start, given, increment))


def _schedule(args: Arguments) -> tuple[int, ...]:
    text = args.text("step_batch_size_schedule") or ""
    matches = [_SCHEDULE.fullmatch(entry) for entry in text.replace(",", " ").split()]
    sizes = [int(match[3]) for match in matches if match]
    if not sizes or len(sizes) != len(matches) or min(sizes) < 1 or max(sizes) > MAX_INTEGER:
        raise args.wrong("step_batch_size_schedule", 'of the form "0:384 200B:768 400B:1152"')
    return tuple(sizes)


def read_evaluation_batch(args: Arguments, global_batch: int) -> int | None:
    """Return the sequences of one evaluation step, None when ``--eval-iters`` is 0."""
    if args.integer("eval_iters", minimum=0) == 0:
        return None
    return args.integer("eval_global_batch_size") or global_batch


def read_checkpoint(args: Arguments) -> CheckpointState:
    """Return whether the job resumes: ``--load`` names a folder that holds a checkpoint, or one out of sight.

    ``--finetune`` starts a new run from a checkpoint, under any layout that its format allows.
    """
    reshards = args.text("ckpt_format") in _RESHARDING_FORMATS
    raw = str(args.given["load"].raw) if args.has("load") else ""
    folder = expand(raw, args.environment)
    if not folder or names_in(folder):
        return CheckpointState(reshards=reshards)
    path = Path(folder)
    try:
        resumes = (path / "latest_checkpointed_iteration.txt").is_file()
    except (OSError, ValueError):
        resumes = False
    return CheckpointState(resuming=resumes, reshards=reshards, source=f"{args.key('load')} {folder}")


def capabilities(
    args: Arguments, version: MegatronVersion, model: ModelSpec, sharding: Sharding
) -> Capabilities:
    """Return what this release can execute with this model and these kernels.

    Megatron-FSDP and torch FSDP2 stay only where the user already runs them.
    """
    facts = facts_for(version.text)
    engine = args.text("transformer_impl") != "local" and args.text("attention_backend") != "local"
    orders: tuple[Order, ...] = ("tp-cp-ep-dp-pp",)
    if facts.pp_before_dp:
        orders = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
    shardings: tuple[Sharding, ...] = tuple(dict.fromkeys(("none", "optim", sharding)))
    hybrid = bool(model.hybrid_layers)
    # A hybrid model's chunks are the segments of its pattern, which can hold any number of layers (0.17).
    segments = args.release >= _HYBRID_SEGMENTS and args.has("hybrid_layer_pattern")
    return Capabilities(
        virtual_pipeline=model.decoder is None and (segments or not hybrid),
        # pretrain_t5.py does not slice its sequences over cp.
        context_parallel=engine and model.decoder is None,
        expert_parallel=model.moe is not None,
        expert_tensor_parallel=model.moe is not None and facts.expert_tensor_parallel,
        uneven_ends=facts.uneven_ends and not segments,
        account_embedding_and_loss=facts.account_embedding_and_loss and not hybrid,
        layout_string=segments if hybrid else facts.layout_string,
        shardings=shardings,
        unsharded_grad_overlap="as_asked",
        optimizer_instances=facts.optimizer_instances,
        recompute_modules=_modules(facts.recompute_modules, model),
        full_recompute=True,
        orders=orders,
    )


def _modules(known: tuple[str, ...], model: ModelSpec) -> tuple[str, ...]:
    """Return the modules that this model has (transformer_config.py: __post_init__)."""
    moe = model.moe
    needs = {
        "moe_act": moe is not None and moe.grouped_gemm,
        "moe": moe is not None,
        "shared_experts": moe is not None and moe.shared_ffn_hidden_size > 0,
        "mla_up_proj": model.mla is not None,
        "gdn_norm_out": False,
    }
    return tuple(module for module in known if needs.get(module, True))
