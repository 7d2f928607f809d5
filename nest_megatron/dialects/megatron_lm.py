"""The dialect ``megatron_lm``: command lines, scripts and YAML files of NVIDIA/Megatron-LM.

Three forms: a mapping of flags (``MODEL_ARGS`` and ``ENV_VARS``, as in Megatron-LM's test cases and
Megatron-MoE-ModelZoo), a ``--yaml-cfg`` file, and a command line or shell script, which becomes the first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nest_megatron.dialects import megatron_yaml
from nest_megatron.dialects.base import routing_imbalance
from nest_megatron.dialects.megatron_arguments import Arguments, Given, flag_of
from nest_megatron.dialects.megatron_argv import edit_argv, split_argv
from nest_megatron.dialects.megatron_flags import Release
from nest_megatron.dialects.megatron_layout import AXIS_FIELDS, read_layout, read_sharding
from nest_megatron.dialects.megatron_model import read_model, read_sequence_length
from nest_megatron.dialects.megatron_notes import add_notes
from nest_megatron.dialects.megatron_recipe import read_kernels, read_recipe
from nest_megatron.dialects.megatron_refusals import refuse_unplanned
from nest_megatron.dialects.megatron_run import (
    MegatronVersion,
    capabilities,
    note_other_release,
    read_batches,
    read_checkpoint,
    read_evaluation_batch,
    read_world,
    resolve_version,
)
from nest_megatron.dialects.megatron_script import ENV_VARS, MODEL_ARGS, NOTES, SCRIPT
from nest_megatron.dialects.megatron_write import as_flags, layout_edits
from nest_megatron.dialects.nemo import overridden_keys
from nest_megatron.dialects.profiles import load_profile, load_yaml
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.rules.base import FIELDS
from nest_megatron.specs.job import COMMAND_LINE, CONFIG_FILE, DEFAULT, DERIVED, TrainJob
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.settings import PlanSettings

#: Name in messages and plans -> the fields that decide it, besides the layout axes.
_JOB_FIELDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("global_batch", ("global_batch_size", "step_batch_size_schedule")),
    ("rampup_batches", ("rampup_batch_size", "step_batch_size_schedule")),
    ("evaluation_batch", ("eval_global_batch_size", "eval_iters")),
    ("sequence_length", ("seq_length", "encoder_seq_length")),
    ("num_layers", ("num_layers", "encoder_num_layers")),
    ("hidden_size", ("hidden_size",)),
    ("ffn_hidden_size", ("ffn_hidden_size",)),
    ("num_attention_heads", ("num_attention_heads",)),
    ("num_query_groups", ("num_query_groups",)),
    ("num_experts", ("num_experts",)),
    ("vocab_size", ("padded_vocab_size", "vocab_size", "tokenizer_type")),
    ("recipe", ("bf16", "fp16", "fp8", "optimizer")),
    ("transformer_engine", ("transformer_impl",)),
)


class MegatronLMDialect:
    """Reads and writes Megatron-LM's arguments."""

    name = "megatron_lm"

    def detect(self, config: DictConfig) -> bool:
        """Return whether ``config`` has flags under ``MODEL_ARGS``, or a ``--yaml-cfg`` file's sections."""
        plain = _plain(config)
        flags = plain.get(MODEL_ARGS)
        if isinstance(flags, Mapping):
            return any(str(name).startswith("--") for name in flags)
        return megatron_yaml.is_yaml_cfg(plain)

    def read(self, config: DictConfig, *, overrides: Sequence[str], settings: PlanSettings) -> TrainJob:
        """Return the job that ``config`` describes; placeholders are resolved from it and the environment.

        Raises:
            BadInputError: a value is missing or has no meaning, or the run is recognised and not planned.
        """
        version = resolve_version(settings.framework_version)
        args = _arguments(config, version.release, overridden=overridden_keys(overrides))
        notes = _plain(config).get(NOTES)
        return read_arguments(args, version, settings, notes=notes if isinstance(notes, list) else ())

    def write(self, config: DictConfig, job: TrainJob, layout: Layout) -> dict[str, Any]:
        """Return the minimal edits, dotted key -> value; None removes a flag.

        Raises:
            BadInputError: this release has no flag for ``layout``.
        """
        args = _arguments(config, resolve_version(job.megatron_core_version).release)
        edits = layout_edits(args, job, layout)
        if MODEL_ARGS in config:
            return {f"{MODEL_ARGS}.{flag}": value for flag, value in as_flags(edits).items()}
        return {args.key(name): value for name, value in edits.items()}


def config_of(
    arguments: Mapping[str, Any], *, environment: Mapping[str, Any] | None = None, script: str = ""
) -> DictConfig:
    """Return flags and variables as a configuration of this dialect.

    Args:
        arguments: flag, with or without dashes -> value; true stands for a switch.
        script: training script; tells BERT, T5 and GPT apart, whose flags are the same.
    """
    flags = {f"--{str(name).lstrip('-')}": value for name, value in arguments.items()}
    return OmegaConf.create({MODEL_ARGS: flags, ENV_VARS: dict(environment or {}), SCRIPT: script})


def read_argv(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    settings: PlanSettings,
    num_gpus: int | None = None,
) -> TrainJob:
    """Return the job that a command line starts.

    Args:
        argv: words from the launcher, the script or the first flag on.
        environment: variables for placeholders, ``WORLD_SIZE`` among them.
        num_gpus: world size; the setting of that name wins.

    Raises:
        BadInputError: as ``MegatronLMDialect.read``, or the words cannot be taken apart.
    """
    line = split_argv(argv)
    version = resolve_version(settings.framework_version)
    variables = {"WORLD_SIZE": num_gpus, **line.launcher, **environment}
    if num_gpus is not None:
        variables["WORLD_SIZE"] = num_gpus
    variables = {name: value for name, value in variables.items() if value is not None}
    args = _from_flags(line.arguments, "", variables, line.script, version.release)
    notes = tuple(f"{word} is not set: read as empty" for word in line.unset)
    return read_arguments(args, version, settings, notes=notes)


def write_argv(
    job: TrainJob, layout: Layout, argv: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> list[str]:
    """Return the words of a command line that asks for ``layout``; all other words stay as they are.

    Raises:
        BadInputError: this release has no flag for ``layout``.
    """
    line = split_argv(argv)
    release = resolve_version(job.megatron_core_version).release
    args = _from_flags(line.arguments, "", environment or {}, line.script, release)
    return edit_argv(line, as_flags(layout_edits(args, job, layout)))


def read_arguments(
    args: Arguments, version: MegatronVersion, settings: PlanSettings, *, notes: Sequence[str] = ()
) -> TrainJob:
    """Return the job of arguments that are already gathered.

    Raises:
        BadInputError: a value is missing or has no meaning, or the run is recognised and not planned.
    """
    refuse_unplanned(args)
    assumptions = [version.assumption] if version.assumption else []
    assumptions += map(str, notes)
    num_gpus, gpus_per_node, world_origin = read_world(args.environment, settings, assumptions=assumptions)
    model = read_model(args, assumptions=assumptions)
    batch, rampup = read_batches(args, assumptions=assumptions)
    layout = read_layout(args, model, num_gpus=num_gpus, global_batch=batch, assumptions=assumptions)
    recipe = read_recipe(args, assumptions=assumptions)
    kernels = read_kernels(args, assumptions=assumptions)
    balanced = args.flag("moe_router_force_load_balancing")
    imbalance = routing_imbalance(model, assumptions, forced_balance=balanced)
    add_notes(args, model, layout, kernels, assumptions)
    note_other_release(args, version, assumptions)
    return TrainJob(
        name=model.name,
        dialect=MegatronLMDialect.name,
        framework="megatron-lm",
        framework_version=version.text,
        megatron_core_version=version.text,
        model=model,
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        global_batch=layout.global_batch,
        sequence_length=read_sequence_length(args),
        recipe=recipe,
        kernels=kernels,
        user_layout=layout,
        profile=load_profile("megatron-core"),
        capabilities=capabilities(args, version, model, read_sharding(args)),
        rampup_batches=rampup,
        evaluation_batch=read_evaluation_batch(args, layout.global_batch),
        origins=_origins(args, world_origin),
        pins=_pins(args, layout),
        checkpoint=read_checkpoint(args),
        expert_imbalance=imbalance,
        assumptions=tuple(assumptions),
    )


def _origins(args: Arguments, world_origin: str) -> dict[str, str]:
    rank = (COMMAND_LINE, CONFIG_FILE, DEFAULT)
    origins = {
        name: min((args.origin(field) for field in fields), key=rank.index)
        for name, fields in (*AXIS_FIELDS.items(), *_JOB_FIELDS)
    }
    if origins["global_batch"] == DEFAULT:
        origins["global_batch"] = DERIVED
    return origins | {"num_gpus": world_origin, "dp": DERIVED, "edp": DERIVED}


def _pins(args: Arguments, layout: Layout) -> dict[str, Any]:
    """Return the axes whose fields this tool's command line sets, at the value Megatron-LM would run."""
    pins = {
        axis: getattr(layout, FIELDS[axis])
        for axis, fields in AXIS_FIELDS.items()
        if any(args.is_overridden(field) for field in fields)
    }
    if layout.tp == 1:
        pins.pop("sequence_parallel", None)  # cleared at TP 1, so nothing was fixed
    return pins


def _arguments(
    config: DictConfig, release: Release, *, overridden: frozenset[str] = frozenset()
) -> Arguments:
    plain = _plain(config)
    assigned = plain.get(ENV_VARS)
    variables: dict[str, object] = dict(os.environ)
    if isinstance(assigned, Mapping):
        variables |= {str(name): value for name, value in assigned.items() if value is not None}
    script = Path(str(plain.get(SCRIPT) or "")).name
    flags = plain.get(MODEL_ARGS)
    if isinstance(flags, Mapping):
        return _from_flags(flags, f"{MODEL_ARGS}.", variables, script, release, overridden=overridden)
    return Arguments(
        given=megatron_yaml.fields_of(plain),
        environment=variables,
        script=script,
        release=release,
        overridden=overridden,
        spelling=megatron_yaml.spelling(),
    )


def _from_flags(
    flags: Mapping[str, Any],
    prefix: str,
    variables: Mapping[str, object],
    script: str,
    release: Release,
    *,
    overridden: frozenset[str] = frozenset(),
) -> Arguments:
    """Return arguments of a flag -> value mapping; a ``--yaml-cfg`` among them is read instead of them."""
    given: dict[str, Given] = {}
    for name, value in flags.items():
        entry = flag_of(str(name))
        if entry is not None and value is not None:
            given[entry.field] = Given(value, f"{prefix}{name}")
    args = Arguments(
        given=given, environment=variables, script=script, release=release, overridden=overridden
    )
    path = args.text("yaml_cfg")
    if path is None:
        return args
    plain = load_yaml(Path(path))
    if not isinstance(plain, Mapping) or not megatron_yaml.is_yaml_cfg(plain):
        raise BadInputError(
            "NEST-M15",
            f"{path} has not the sections of a --yaml-cfg file",
            factors=[Factor("sections", f"{megatron_yaml.MODEL}, {megatron_yaml.PARALLEL}", path)],
        )
    return Arguments(
        given=megatron_yaml.fields_of(plain),
        environment=variables,
        script=script,
        release=release,
        spelling=megatron_yaml.spelling(),
    )


def _plain(config: DictConfig) -> dict[str, Any]:
    try:
        plain = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    except (OmegaConfBaseException, RecursionError, ValueError) as error:
        raise BadInputError("NEST-D01", f"the configuration cannot be read: {error}") from None
    return {str(name): value for name, value in plain.items()} if isinstance(plain, dict) else {}
