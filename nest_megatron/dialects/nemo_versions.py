"""NeMo releases with Megatron training on Hydra: which one runs, its megatron-core, and what it can execute.

Everything here was read from the tags v1.23.0 and v2.0.0 to v2.4.0 of github.com/NVIDIA/NeMo
(``megatron_base_model.py``, ``megatron_gpt_model.py``, ``nlp_overrides.py``); research/config_surface.md 1.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

from nest_megatron.dialects.access import ConfigView
from nest_megatron.dialects.nemo_settings import Optimizer, uses_megatron_core
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs.job import Capabilities, UnshardedGradOverlap
from nest_megatron.specs.layout import Order, Sharding

#: First and last release line whose ``nemo.collections.nlp`` trains Megatron GPT from Hydra.
_OLDEST = (1, 20)
_NEWEST = (2, 5)

#: NeMo release line -> megatron-core of its container (Dockerfile and requirements/manifest.json of the tag).
_MEGATRON_CORE: dict[tuple[int, int], str] = {
    (1, 20): "0.5.0",
    (2, 0): "0.9.0",
    (2, 1): "0.10.0",
    (2, 2): "0.11.0",
    (2, 3): "0.12.0",
    (2, 4): "0.13.0",
}

#: Keys that exist only from a release on: their presence dates a configuration.
_FIRST_RELEASE: dict[str, tuple[int, int]] = {
    "model.restore_from_ckpt": (2, 0),
    "model.dist_ckpt_format": (2, 0),
    "model.dist_ckpt_load_on_device": (2, 0),
    "model.dist_ckpt_parallel_save": (2, 0),
    "model.expert_model_parallel_size": (2, 0),
    "model.use_tp_pp_dp_mapping": (2, 0),
    "model.moe_token_dispatcher_type": (2, 0),
    "model.cross_entropy_loss_fusion": (2, 0),
    "model.defer_embedding_wgrad_compute": (2, 0),
    "model.reset_lr": (2, 0),
    "model.skip_train": (2, 1),
    "model.drop_layers": (2, 1),
    "model.account_for_embedding_in_pipeline_split": (2, 2),
    "model.account_for_loss_in_pipeline_split": (2, 2),
    "model.optim.num_distributed_optimizer_instances": (2, 2),
    "model.num_layers_in_first_pipeline_stage": (2, 3),
    "model.num_layers_in_last_pipeline_stage": (2, 3),
    "model.recompute_modules": (2, 3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NemoVersion:
    """The NeMo that runs the job.

    Args:
        text: version as given, installed or inferred.
        release: (major, minor).
        megatron_core: installed beside NeMo, else that of the release's container.
        assumption: sentence for the plan, empty when the version is known.
    """

    text: str
    release: tuple[int, int]
    megatron_core: str
    assumption: str = ""

    def at_least(self, major: int, minor: int) -> bool:
        """Return whether this is that release or a later one."""
        return self.release >= (major, minor)


def resolve_version(view: ConfigView, asked: str | None) -> NemoVersion:
    """Return the version: the setting, else the installed package, else one with the file's keys.

    Raises:
        BadInputError: not a version, or a release without Megatron training on Hydra.
    """
    if asked is not None:
        release = parse_release(asked, origin="framework_version")
        return NemoVersion(text=asked, release=release, megatron_core=_core_of(release))
    installed = _installed("nemo_toolkit")
    if installed is not None:
        release = parse_release(installed, origin="installed nemo_toolkit")
        core = _installed("megatron-core") or _core_of(release)
        return NemoVersion(text=installed, release=release, megatron_core=core)
    return _inferred(view)


def _inferred(view: ConfigView) -> NemoVersion:
    dated = {key: release for key, release in _FIRST_RELEASE.items() if view.has(key)}
    if view.value("model.optim.name") == "mcore_distributed_optim":
        dated["model.optim.name=mcore_distributed_optim"] = (2, 0)
    if not dated:
        release, reason = (1, 23), "no key of a later release is in the configuration"
    else:
        key = max(dated, key=lambda name: dated[name])
        release, reason = dated[key], f"the oldest release with {key}"
    text = f"{release[0]}.{release[1]}"
    return NemoVersion(
        text=text,
        release=release,
        megatron_core=_core_of(release),
        assumption=f"NeMo is not installed here and no framework_version is given: NeMo {text} with "
        f"megatron-core {_core_of(release)} is assumed ({reason})",
    )


def parse_release(text: str, *, origin: str) -> tuple[int, int]:
    """Return (major, minor) of a version text.

    Raises:
        BadInputError: not a version, or a release without Megatron training on Hydra.
    """
    match = re.match(r"^v?(\d{1,4})\.(\d{1,4})", text)
    release = (int(match.group(1)), int(match.group(2))) if match else (0, 0)
    if not _OLDEST <= release <= _NEWEST:
        raise BadInputError(
            "NEST-D10",
            "this NeMo version has no Megatron training on Hydra that could be planned",
            factors=[Factor("version", text, origin)],
            nearest=("1.23", "2.0", "2.4"),
        )
    return release


def _core_of(release: tuple[int, int]) -> str:
    return _MEGATRON_CORE[max(known for known in _MEGATRON_CORE if known <= release)]


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def capabilities(
    view: ConfigView, version: NemoVersion, optimizer: Optimizer, *, transformer_engine: bool
) -> Capabilities:
    """Return what this version can execute with this configuration's model class and optimizer.

    Virtual pipeline: only with O2; an assertion refuses it from 2.4 on.  Expert parallelism: only with O2,
    not with Apex' optimizer, and not in 1.x, which has no reduction over expert data parallel ranks.  Context
    parallelism: only in Transformer Engine's attention of megatron-core models.  Expert TP: no release hands
    it to ``initialize_model_parallel``.  Order: 2.0 and 2.1 pass ``tp-pp-dp``, which is illegal with CP or
    EP, so 2.2 and later offer it.
    """
    core = uses_megatron_core(view)
    orders: tuple[Order, ...] = ("tp-cp-ep-dp-pp",)
    if version.at_least(2, 2):
        orders = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
    return Capabilities(
        virtual_pipeline=optimizer.o2 and not version.at_least(2, 4),
        context_parallel=core and transformer_engine,
        expert_parallel=core and optimizer.o2 and optimizer.kind != "apex" and version.at_least(2, 0),
        expert_tensor_parallel=False,
        uneven_ends=core and version.at_least(2, 3),
        account_embedding_and_loss=core and version.at_least(2, 2),
        layout_string=False,
        shardings=_shardings(view, optimizer),
        unsharded_grad_overlap=plain_grad_overlap(view, optimizer),
        optimizer_instances=optimizer.kind == "megatron-core" and version.at_least(2, 2),
        recompute_modules=recompute_modules(view, version),
        full_recompute=True,
        orders=orders,
    )


def plain_grad_overlap(view: ConfigView, optimizer: Optimizer) -> UnshardedGradOverlap:
    """Return when a plain optimizer's all-reduce overlaps: O2, flat, unfused (``configure_optimizers``)."""
    blocked = view.flag("model.gradient_accumulation_fusion")
    asynchronous = optimizer.o2 and not blocked and view.flag("model.async_grad_allreduce", True)
    return "without_pp_and_sp" if asynchronous else "never"


def recompute_modules(view: ConfigView, version: NemoVersion) -> tuple[str, ...]:
    """Return what ``selective`` recomputes: the core attention, or the modules a 2.3 or later file names.

    Raises:
        BadInputError: ``model.recompute_modules`` is not a list of names.
    """
    found = view.value("model.recompute_modules") if version.at_least(2, 3) else None
    if found is None:
        return ("core_attn",)
    if not isinstance(found, list) or not found or not all(isinstance(name, str) for name in found):
        raise BadInputError("NEST-D03", f"{view.full('model.recompute_modules')} must be a list of names")
    return tuple(found)


def _shardings(view: ConfigView, optimizer: Optimizer) -> tuple[Sharding, ...]:
    """Return the shardings that one edit of ``optim.name`` reaches, at the bytes of the job's recipe.

    NeMo passes every other key of the section to the optimizer's constructor, and an edit cannot delete keys.
    Apex' optimizer holds other bytes per parameter than a plain one (nemo_recipe.py), so it is not left, and
    without O2 it is not entered.
    """
    if optimizer.kind == "plain":
        switchable = optimizer.name in ("fused_adam", "megatron_fused_adam", "adam", "adamw")
        needed = ("lr", "weight_decay", "betas")
        complete = all(view.value(f"model.optim.{key}") is not None for key in needed)
        return ("none", "optim") if switchable and complete and optimizer.o2 else ("none",)
    stays = optimizer.kind == "apex" or optimizer.extra_keys or not optimizer.o2
    return ("optim",) if stays else ("none", "optim")
