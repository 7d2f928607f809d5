"""A NeMo-1.x-style Hydra app: it prints the configuration that a trainer would receive.

- ``python scripts/train.py``: the configuration as written
- ``python scripts/train.py +nest=auto``: planned first
- ``python scripts/train.py --config-name megatron_gpt3_175b +nest=check``: judged first
"""

from __future__ import annotations

import hydra
from omegaconf import DictConfig, OmegaConf


@hydra.main(version_base="1.3", config_path="conf", config_name="megatron_llama3_70b")
def main(config: DictConfig) -> None:
    """Print what arrives after composition, command line and plan."""
    print(OmegaConf.to_yaml(config))


if __name__ == "__main__":
    main()
