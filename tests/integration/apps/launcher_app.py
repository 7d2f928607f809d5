"""A stand-in for the NeMo launcher's main.py: its resolvers and its loop over stages; submits nothing."""

import hydra
from omegaconf import DictConfig, OmegaConf
from task_app import write_down

OmegaConf.register_new_resolver("divide_ceil", lambda x, y: -(-x // y))
OmegaConf.register_new_resolver("divide_floor", lambda x, y: x // y)


@hydra.main(version_base="1.1", config_path=None, config_name=None)
def main(config: DictConfig) -> None:
    """Start each stage as the launcher does: with the section of its name, interpolations resolved."""
    for stage in config.stages:
        OmegaConf.to_container(config[stage], resolve=True)
    write_down(config)


if __name__ == "__main__":
    main()
