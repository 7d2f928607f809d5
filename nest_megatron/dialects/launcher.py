"""The dialect ``launcher``: NeMo-Framework-Launcher, composed (keys below ``training.``) or one stage file.

The launcher's ``main.py`` is a Hydra app that writes one resolved file per stage and submits NeMo's own
script with it; a plan therefore acts on ``training.*`` before that file is written.  Its facts were read from
github.com/NVIDIA/NeMo-Framework-Launcher: ``launcher_scripts/main.py``, ``nemo_launcher/core/stages.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nest_megatron.dialects.access import ConfigView
from nest_megatron.dialects.nemo import NemoDialect, overridden_keys
from nest_megatron.errors import BadInputError, Factor, NothingToPlanError
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.settings import PlanSettings

#: The stage that is planned, and the section that holds it.
STAGE = "training"
#: Keys of the launcher's root configuration; other applications have ``stages``, too.
_ROOT_MARKS = frozenset({"cluster_type", "launcher_scripts_path", "base_results_dir"})
#: What Slurm starts instead of the trainer's own counts (``_make_cluster_parameters``).
_RUN_COUNTS = (("run.nodes", "trainer.num_nodes"), ("run.ntasks_per_node", "trainer.devices"))


class LauncherDialect:
    """Reads and writes the training stage of NeMo-Framework-Launcher with NeMo's own reader."""

    name = "launcher"

    def __init__(self) -> None:
        """Create the dialect."""
        self._composed = NemoDialect(name=self.name, prefix=f"{STAGE}.")
        self._alone = NemoDialect(name=self.name, mount=STAGE)

    def detect(self, config: DictConfig) -> bool:
        """Return whether ``config`` is the launcher's root, or a file of ``conf/training``."""
        return _is_root(config) or _is_stage_file(config)

    def read(self, config: DictConfig, *, overrides: Sequence[str], settings: PlanSettings) -> TrainJob:
        """Return the job of the training stage; see ``Dialect.read``.

        Args:
            config: composed configuration, or one file of ``conf/training``; it is not changed.
            overrides: command-line strings already applied to it.
            settings: as in the dialect ``nemo``.

        Raises:
            NothingToPlanError: the stages that are asked for do not train.
            BadInputError: a value is missing or has no meaning, or the job is of a kind that is not planned.
        """
        nemo = self._nemo(config)
        notes = _stage_notes(config, overrides) if nemo is self._composed else ()
        view = nemo.view(config, overrides)
        _check_counts(view)
        job = nemo.read(config, overrides=overrides, settings=settings)
        if job.rampup_batches:
            notes += (
                "during the ramp-up the launcher lowers trainer.num_nodes from job to job: the layout is "
                "planned for the full number of nodes only",
            )
        return dataclasses.replace(job, assumptions=(*job.assumptions, *notes))

    def write(self, config: DictConfig, job: TrainJob, layout: Layout) -> dict[str, Any]:
        """Return the minimal edits; see ``Dialect.write``.

        Args:
            config: the configuration that ``job`` was read from.
            job: gives the user's layout and what this version can execute.
            layout: what ``config`` must ask for.

        Raises:
            BadInputError: this version cannot express ``layout``.
        """
        return self._nemo(config).write(config, job, layout)

    def _nemo(self, config: DictConfig) -> NemoDialect:
        return self._composed if _is_root(config) else self._alone


def _is_root(config: DictConfig) -> bool:
    return "stages" in config and bool(_ROOT_MARKS & set(config))


def _is_stage_file(config: DictConfig) -> bool:
    """Return whether a trainer's file refers to itself as ``${training...}``, as only a mounted one can."""
    plain = OmegaConf.to_container(config, resolve=False)
    if not isinstance(plain, dict) or STAGE in plain or "trainer" not in plain or "run" not in plain:
        return False
    return any(f"${{{STAGE}." in text for text in _texts(plain))


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, (dict, list)):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _texts(child)


def _stage_notes(config: DictConfig, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return what is said about the stages besides training, and about the container.

    Raises:
        NothingToPlanError: there is no training stage.
        BadInputError: ``stages`` is no list of names, or the training stage has no configuration.
    """
    view = ConfigView(config, overridden=overridden_keys(overrides))
    stages = view.value("stages")
    names = [] if stages is None else stages
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadInputError(
            "NEST-D31",
            "stages must be a list of names",
            factors=[Factor("stages", stages, view.origin("stages"))],
        )
    if STAGE not in names:
        raise NothingToPlanError(
            "the launcher's stages do not train: nothing is planned and nothing is changed",
            factors=[Factor("stages", ", ".join(names) or "none", view.origin("stages"))],
            nearest=(f"stages=[{STAGE}]",),
        )
    if view.mapping(STAGE) is None:
        raise BadInputError(
            "NEST-D32",
            "the training stage has no configuration",
            factors=[Factor(STAGE, view.value(STAGE), view.origin(STAGE))],
            nearest=(f"{STAGE}=gpt3/5b",),
        )
    others = [name for name in names if name != STAGE]
    notes = ["the launcher's keys below training. are planned and edited, no others"]
    if others:
        notes.append(f"the stages {', '.join(others)} run as configured: only training is planned")
    container = view.value("container")
    if isinstance(container, str):
        notes.append(f"the job runs NeMo of {container}; framework_version states that release")
    return tuple(notes)


def _check_counts(view: ConfigView) -> None:
    """Refuse node and task counts of ``run`` that differ from the trainer's: Lightning refuses such a job.

    Source: ``nemo_launcher/core/stages.py: _make_cluster_parameters``; Lightning compares its own counts with
    Slurm's (``SLURMEnvironment.validate_settings``).

    Raises:
        BadInputError: they differ.
    """
    for asked, known in _RUN_COUNTS:
        found = view.integer(asked)
        if found is None or found == view.value(known):
            continue
        raise BadInputError(
            "NEST-D33",
            f"{view.full(asked)} starts another number than {view.full(known)} expects",
            factors=[Factor(view.full(key), view.value(key), view.origin(key)) for key in (asked, known)],
            nearest=(f"{view.full(asked)}=null",),
        )
