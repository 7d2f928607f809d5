"""Configuration files to one DictConfig: a YAML document, or a script that starts Megatron-LM."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nest_megatron.dialects.megatron_script import looks_like_script, read_script
from nest_megatron.errors import BadInputError
from nest_megatron.specs import codec

_YAML_SUFFIXES = (".yaml", ".yml")

#: Far more than any training configuration has; a few lines of aliases of aliases stand for billions.
MAX_VALUES = 1_000_000


def load_config(path: Path | str) -> tuple[DictConfig, tuple[str, ...]]:
    """Return the configuration in ``path`` without its defaults list, and the assumptions that this makes.

    A YAML file is read as it is: nothing is composed and no interpolation is resolved.  A shell script
    becomes the flags of the training command that it runs, with the variables of this process.

    Raises:
        BadInputError: the file is absent, not UTF-8, neither YAML nor a script of Megatron-LM, empty, or not
            a mapping.
    """
    path = Path(path)
    text = codec.read_text(path)
    if path.suffix not in _YAML_SUFFIXES and looks_like_script(text):
        return OmegaConf.create(read_script(text, environment=os.environ, source=str(path))), ()
    config = _parse(text, source=str(path))
    if "defaults" not in config:
        return config, ()
    entries = _defaults_entries(OmegaConf.to_container(config, resolve=False))
    if entries is None:
        return config, ()
    del config["defaults"]
    unseen = [text for text in map(_unseen, entries) if text]
    if not unseen:
        return config, ()
    return config, (
        f"the defaults list of {path.name} is not composed here: values that {', '.join(unseen)} would bring "
        "are not seen (the composed file, .hydra/config.yaml of a run, has them)",
    )


def _parse(text: str, *, source: str) -> DictConfig:
    """Parse one YAML document with OmegaConf's own loader, which refuses duplicate keys and Python tags."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None and _num_values(root) > MAX_VALUES:
            raise _broken(source, f"its aliases stand for more than {MAX_VALUES} values")
        config = OmegaConf.load(io.StringIO(text))
    except RecursionError:
        raise _broken(source, "it is nested too deeply") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, AttributeError, OSError) as error:
        raise _broken(source, " ".join(str(error).split()) or type(error).__name__) from None
    # OmegaConf makes a mapping of a lone word, too, so the document itself decides.
    if not isinstance(root, yaml.MappingNode) or not isinstance(config, DictConfig) or not config:
        held = {"ScalarNode": "one value", "SequenceNode": "a list"}.get(type(root).__name__, "no keys")
        raise BadInputError("NEST-I11", f"{source} holds {held} instead of the keys of a configuration")
    return config


def _num_values(root: yaml.Node) -> int:
    """Return the number of values when every alias is written out, as OmegaConf does.

    More than ``MAX_VALUES`` for a document that contains itself.
    """
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = MAX_VALUES  # what counts while its own content is counted
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            children = (child for part in parts for child in (part if isinstance(part, tuple) else (part,)))
            sizes[id(node)] = 1 + sum(map(size, children))
        return sizes[id(node)]

    return size(root)


def _broken(source: str, reason: str) -> BadInputError:
    return BadInputError("NEST-I10", f"{source} is not a usable YAML file: {reason}")


def _defaults_entries(plain: Any) -> list[Any] | None:
    """Return the entries of Hydra's defaults list; None when ``defaults`` is an ordinary key."""
    defaults = plain["defaults"]
    if isinstance(defaults, str):
        return [defaults]
    return defaults if isinstance(defaults, list) else None


def _unseen(entry: Any) -> str:
    """Return how to name an entry whose values are missing here; empty when it brings none to the task.

    The forms are those of Hydra's defaults list (hydra.cc, "The Defaults List"): ``_self_``, ``name``,
    ``group: option``, each with the optional words ``optional`` and ``override``.
    """
    if isinstance(entry, dict) and len(entry) == 1:
        group, option = next(iter(entry.items()))
    else:
        group, option = entry, ""
    words = str(group).split()
    name = words[-1] if words else ""
    if name in ("", "_self_") or "optional" in words[:-1] or option is None or name.startswith("hydra/"):
        return ""
    return f"{name}={option}" if option != "" else name
