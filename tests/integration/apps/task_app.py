"""A plain Hydra app, in the way of NeMo's examples: it writes down what its task received."""

import json
import math
import os
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

# NeMo registers its resolvers when it is imported, before Hydra composes.
OmegaConf.register_new_resolver("multiply", lambda *numbers: math.prod(numbers))
OmegaConf.register_new_resolver("sum", lambda *numbers: sum(numbers))


def write_down(config: DictConfig) -> None:
    """Write the received configuration as JSON to the file named by TASK_OUTPUT; %t is Slurm's rank."""
    keys = os.environ.get("TASK_RESOLVE", "").split()
    received = {
        "config": OmegaConf.to_container(config, resolve=False),
        "resolved": {key: OmegaConf.select(config, key) for key in keys},
        "struct": OmegaConf.is_struct(config),
        "environment": dict(os.environ),
    }
    output = os.environ["TASK_OUTPUT"].replace("%t", os.environ.get("SLURM_PROCID", "0"))
    Path(output).write_text(json.dumps(received), encoding="utf-8")


@hydra.main(version_base=None, config_path=None, config_name=None)
def main(config: DictConfig) -> None:
    """Run the task; Hydra looks for configurations beside the module that defines this function."""
    write_down(config)


if __name__ == "__main__":
    main()
