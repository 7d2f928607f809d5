"""Settings of the callback, from ``hydra.callbacks.nest`` and the short spelling ``+nest.<key>=value``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs import codec
from nest_megatron.specs.settings import PlanSettings

#: The config group, and the root node that the short spelling creates.
NODE = "nest"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallbackSettings(PlanSettings):
    """What ``auto.yaml`` and ``check.yaml`` hold: the planner's settings and two of the callback's own.

    Args:
        mode: ``auto`` rewrites the configuration, ``check`` only judges it.
        timeout_s: how long a rank waits for the plan that another one makes.
    """

    mode: Literal["auto", "check"] = "auto"
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse a wait that would never end, besides what the planner's part refuses.

        Raises:
            BadInputError: a time-out that is not finite or is negative.
        """
        PlanSettings.__post_init__(self)
        if not math.isfinite(self.timeout_s) or self.timeout_s < 0:
            factors = [Factor("timeout_s", self.timeout_s)]
            raise BadInputError("NEST-I17", "timeout_s is not a number of seconds", factors=factors)

    def planner(self) -> PlanSettings:
        """Return the planner's part, which decides the plan and enters its fingerprint."""
        return PlanSettings(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(PlanSettings)}
        )


def take_settings(given: Mapping[str, Any], config: DictConfig) -> CallbackSettings:
    """Return the settings, and remove the node of the short spelling from ``config``: the task never sees it.

    Args:
        given: the callback's keyword arguments.
        config: the whole composed configuration, with its ``hydra`` node.

    Raises:
        BadInputError: an unknown key, a value of the wrong type, or a root node ``nest`` that the app owns.
    """
    plain = _plain(given)
    for key, value in _take_node(config).items():
        both = isinstance(value, dict) and isinstance(plain.get(key), dict)
        plain[key] = {**plain[key], **value} if both else value
    version = plain.get("framework_version")
    if isinstance(version, (int, float)):
        raise BadInputError(
            "NEST-L10",
            "framework_version is text: as numbers, 2.1 and 2.10 are the same",
            factors=[Factor("framework_version", version)],
            nearest=[f"framework_version={version}.0"],
        )
    return codec.from_plain(CallbackSettings, plain, source="+nest")


def task_overrides(config: DictConfig) -> list[str]:
    """Return the override strings of the task as they were typed: iterating them would resolve ``${...}``."""
    texts = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    assert isinstance(texts, list)
    return [str(text) for text in texts]


def is_setting(override: str) -> bool:
    """Return whether an override string speaks to NEST and not to the task."""
    key = OverridesParser.create().parse_override(override).key_or_group
    return key == NODE or key.startswith(f"{NODE}.")


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: resolved(value) if OmegaConf.is_config(value) else value for key, value in given.items()}


def resolved(node: Any) -> Any:
    """Return a node of settings as plain data.

    Raises:
        BadInputError: an interpolation in it cannot be resolved.
    """
    try:
        return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        reason = " ".join(str(error).split()) or "it refers to itself"
        raise BadInputError("NEST-L13", f"a setting of NEST has no value: {reason}") from None


def _take_node(config: DictConfig) -> dict[str, Any]:
    if NODE not in config:
        return {}
    node = config[NODE]
    keys = {key for text in task_overrides(config) if (key := _setting_key(text))}
    if not isinstance(node, DictConfig) or not set(map(str, node)) <= keys:
        raise BadInputError(
            "NEST-L08",
            "the configuration has a node `nest` of its own",
            factors=[Factor("nest", ", ".join(map(str, node)) if isinstance(node, DictConfig) else node)],
            nearest=["hydra.callbacks.nest.<key>=value for NEST's settings"],
        )
    plain = resolved(node)
    with read_write(config), open_dict(config):
        del config[NODE]
    return {str(key): value for key, value in plain.items()}


def _setting_key(override: str) -> str | None:
    parts = OverridesParser.create().parse_override(override).key_or_group.split(".")
    return parts[1] if parts[0] == NODE and len(parts) > 1 else None
