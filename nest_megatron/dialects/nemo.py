"""The dialect ``nemo``: Hydra configurations of NeMo 1.20 to 2.5 and NeMo-Aligner (Megatron GPT models)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from nest_megatron.dialects.access import ConfigView
from nest_megatron.dialects.base import routing_imbalance
from nest_megatron.dialects.nemo_layout import AXIS_FIELDS, AXIS_KEYS, EP, SP, read_layout
from nest_megatron.dialects.nemo_model import read_model, read_sequence_length
from nest_megatron.dialects.nemo_recipe import read_kernels, read_recipe
from nest_megatron.dialects.nemo_refusals import refuse_unplanned
from nest_megatron.dialects.nemo_run import (
    read_checkpoint,
    read_evaluation_batch,
    read_origins,
    read_rampup,
    read_world,
)
from nest_megatron.dialects.nemo_settings import (
    Optimizer,
    read_optimizer,
    read_precision,
    uses_megatron_core,
)
from nest_megatron.dialects.nemo_versions import NemoVersion, capabilities, resolve_version
from nest_megatron.dialects.nemo_write import layout_edits
from nest_megatron.dialects.overrides import parse_override
from nest_megatron.dialects.profiles import load_profile
from nest_megatron.specs.job import DERIVED, Capabilities, TrainJob
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.settings import PlanSettings

#: Keys of which a NeMo model section has at least one.
_MODEL_MARKS = frozenset({"tensor_model_parallel_size", "megatron_amp_O2", "mcore_gpt", "encoder_seq_length"})
#: Top-level keys of NeMo's validation and inference configurations.
_INFERENCE_MARKS = frozenset({"gpt_model_file", "tensor_model_parallel_size"})

#: Name in messages and plans -> the keys that decide it, besides the layout axes.
_FIELD_KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("global_batch", ("model.global_batch_size",)),
    ("rampup_batches", ("model.rampup_batch_size",)),
    ("evaluation_batch", ("trainer.limit_val_batches",)),
    ("sequence_length", ("model.encoder_seq_length",)),
    ("gpus_per_node", ("trainer.devices",)),
    ("num_layers", ("model.num_layers",)),
    ("hidden_size", ("model.hidden_size",)),
    ("ffn_hidden_size", ("model.ffn_hidden_size",)),
    ("num_attention_heads", ("model.num_attention_heads",)),
    ("num_query_groups", ("model.num_query_groups",)),
    ("num_experts", ("model.num_moe_experts",)),
    ("vocab_size", ("model.override_vocab_size", "model.tokenizer.type", "model.tokenizer.model")),
    ("recipe", ("trainer.precision", "model.precision", "model.megatron_amp_O2", "model.optim.name")),
)


class NemoDialect:
    """Reads and writes NeMo's own Hydra configurations."""

    def __init__(self, *, name: str = "nemo", prefix: str = "", mount: str = "") -> None:
        """Create the dialect.

        Args:
            name: what ``registry.by_name`` knows it as.
            prefix: dotted path below which the configuration lies, with its trailing dot; the NeMo launcher
                keeps the same keys below ``training.``.
            mount: name by which the configuration's own interpolations call its root.
        """
        self.name = name
        self.prefix = prefix
        self.mount = mount

    def view(self, config: DictConfig, overrides: Sequence[str] = ()) -> ConfigView:
        """Return the view of ``config`` that this dialect reads.

        Raises:
            BadInputError: the configuration, or an override, cannot be read.
        """
        return ConfigView(config, prefix=self.prefix, mount=self.mount, overridden=overridden_keys(overrides))

    def detect(self, config: DictConfig) -> bool:
        """Return whether ``config`` has NeMo's ``trainer`` and ``model`` sections, or serves a GPT model."""
        view = self.view(config)
        trainer = _section(view, "trainer")
        if trainer is None or "strategy" in trainer:
            return False  # NeMo 2.x recipes put the parallel sizes into trainer.strategy
        model = _section(view, "model")
        if model is not None:
            return bool(_MODEL_MARKS & set(model))
        return any(view.has(key) for key in _INFERENCE_MARKS)

    def read(self, config: DictConfig, *, overrides: Sequence[str], settings: PlanSettings) -> TrainJob:
        """Return the job that ``config`` describes; see ``Dialect.read``.

        Args:
            config: composed configuration; it is not changed and foreign interpolations are not resolved.
            overrides: command-line strings already applied to it.
            settings: ``framework_version`` and ``num_gpus`` are used here.

        Raises:
            BadInputError: a value is missing or has no meaning, or the job is of a kind that is not planned.
        """
        view = self.view(config, overrides)
        refuse_unplanned(view)
        return _Reader(view, settings).job(self.name)

    def write(self, config: DictConfig, job: TrainJob, layout: Layout) -> dict[str, Any]:
        """Return the minimal edits; see ``Dialect.write``.

        Args:
            config: the configuration that ``job`` was read from.
            job: gives the user's layout and what this version can execute.
            layout: what ``config`` must ask for.

        Raises:
            BadInputError: this version cannot express ``layout``.
        """
        return layout_edits(self.view(config), job, layout)


def overridden_keys(overrides: Sequence[str]) -> frozenset[str]:
    """Return every dotted key that the command line sets to a value; deletions set none.

    A mapping given as a value sets its leaves.  A group choice names a group, never a value key, so it
    matches none of the keys that are looked up here.
    """
    keys: set[str] = set()
    for text in overrides:
        override = parse_override(text)
        if not override.is_delete():
            keys.update(_leaves(override.key_or_group, override.value()))
    return frozenset(keys)


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    else:
        yield key


def _section(view: ConfigView, key: str) -> Mapping[str, Any] | None:
    """Return a section; None when the key is absent or is not a section."""
    found = view.value(key) if view.has(key) else None
    return found if isinstance(found, dict) else None


class _Reader:
    """Reads one configuration; assumptions gather in the order in which they are made."""

    def __init__(self, view: ConfigView, settings: PlanSettings) -> None:
        self._view = view
        self._settings = settings
        self._assumptions: list[str] = []

    def job(self, dialect: str) -> TrainJob:
        """Return the whole job."""
        view, assumptions = self._view, self._assumptions
        version = resolve_version(view, self._settings.framework_version)
        if version.assumption:
            assumptions.append(version.assumption)
        optimizer = read_optimizer(view)
        num_gpus, gpus_per_node, world_origin = read_world(view, self._settings, assumptions=assumptions)
        model = read_model(view, assumptions=assumptions)
        global_batch = view.required_integer("model.global_batch_size")
        layout = read_layout(
            view,
            version,
            optimizer,
            num_gpus=num_gpus,
            num_layers=model.num_layers,
            global_batch=global_batch,
        )
        kernels = read_kernels(view, version)
        able = capabilities(view, version, optimizer, transformer_engine=kernels.transformer_engine)
        self._note_ignored(version, optimizer, layout)
        return TrainJob(
            name=model.name,
            dialect=dialect,
            framework="nemo",
            framework_version=version.text,
            megatron_core_version=version.megatron_core,
            model=model,
            num_gpus=num_gpus,
            gpus_per_node=gpus_per_node,
            global_batch=global_batch,
            sequence_length=read_sequence_length(view, assumptions=assumptions),
            recipe=read_recipe(view, read_precision(view), optimizer, layout, assumptions=assumptions),
            kernels=kernels,
            user_layout=layout,
            profile=load_profile("nemo"),
            capabilities=able,
            rampup_batches=read_rampup(view, global_batch),
            evaluation_batch=read_evaluation_batch(view, global_batch),
            origins=self._origins(world_origin),
            pins=self._pins(layout),
            checkpoint=read_checkpoint(view, optimizer),
            expert_imbalance=routing_imbalance(model, assumptions),
            assumptions=tuple(assumptions),
            not_planned=self._not_planned(optimizer, able),
        )

    def _origins(self, world_origin: str) -> dict[str, str]:
        origins = read_origins(self._view, (*AXIS_KEYS.items(), *_FIELD_KEYS))
        return origins | {"num_gpus": world_origin, "dp": DERIVED, "edp": DERIVED, "etp": DERIVED}

    def _pins(self, layout: Layout) -> dict[str, Any]:
        """Return the axes whose keys the command line sets, at the value NeMo would run."""
        pins = {
            axis: getattr(layout, AXIS_FIELDS.get(axis, axis))
            for axis, keys in AXIS_KEYS.items()
            if any(self._view.is_overridden(key) for key in keys)
        }
        if self._view.flag(SP) and not layout.sequence_parallel:
            pins.pop("sequence_parallel", None)  # cleared by NeMo at TP 1, so nothing was fixed
        return pins

    def _note_ignored(self, version: NemoVersion, optimizer: Optimizer, layout: Layout) -> None:
        """State what the configuration says and this version does not do."""
        view, notes = self._view, self._assumptions
        if view.flag(SP) and layout.tp == 1:
            notes.append("sequence_parallel is set at TP 1: NeMo clears it, and so does this plan")
        if not uses_megatron_core(view):
            notes.append("mcore_gpt is off: NeMo's own layers are priced like those of megatron-core")
        if layout.vpp > 1 and version.at_least(2, 4):
            notes.append(f"NeMo {version.text} refuses virtual pipeline sizes in this model class")
        uneven = [key for key in AXIS_KEYS["layers"] if view.value(key) not in (None, False)]
        if uneven and not version.at_least(2, 2):
            notes.append(f"NeMo {version.text} ignores {', '.join(view.full(key) for key in uneven)}")
        if layout.ep > 1 and optimizer.kind == "apex":
            notes.append(f"NeMo refuses {view.full(EP)}={layout.ep} with distributed_fused_adam from 2.0 on")
        if view.value("model.mcore_customization_config.parallel_attention"):
            notes.append("attention and MLP run in parallel in each layer: priced as if they ran in turn")
        for key in ("model.restore_from_path", "model.restore_from_ckpt"):
            if view.value(key) is not None:
                notes.append(f"the checkpoint of {view.full(key)} is assumed to have the shapes given here")

    def _not_planned(self, optimizer: Optimizer, able: Capabilities) -> dict[str, str]:
        reasons = {"etp": "NeMo has no key for it: experts are split over TP like every other layer"}
        if not optimizer.o2 or "optim" not in able.shardings:
            reasons["overlap"] = "only a distributed optimizer with megatron_amp_O2 has overlap keys"
        # Zero is how shipped files spell off.
        partial = [
            key
            for key in (
                "model.num_micro_batches_with_partial_activation_checkpoints",
                "model.activations_checkpoint_layers_per_pipeline",
            )
            if self._view.value(key)
        ]
        if partial:
            reasons["recompute"] = f"partial recomputation is set: {', '.join(partial)}"
        return reasons
