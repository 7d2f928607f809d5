"""An app whose environment cannot import numpy: the planner meets an exception it does not expect."""

import sys

import hydra
from omegaconf import DictConfig
from task_app import write_down

sys.modules["numpy"] = None


@hydra.main(version_base=None, config_path=None, config_name=None)
def main(config: DictConfig) -> None:
    """Run the task; Hydra looks for configurations beside the module that defines this function."""
    write_down(config)


if __name__ == "__main__":
    main()
