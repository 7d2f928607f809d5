"""Trains a NeMo-style configuration with megatron-core: what ``+nest=auto`` wrote is what runs.

- ``python scripts/train.py --config-name megatron_llama_tiny +nest=auto +nest.cluster=cpu-node``: plan, then
  train on the CPU; the eight ranks are forked from this process
- ``torchrun --nproc-per-node 8 scripts/train.py +nest=auto``, or srun: one process per GPU
- ``python scripts/train.py +nest=auto``: a configuration for more GPUs than this process has is planned and
  printed, not trained
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from training.app import run

from nest_megatron.errors import NestError
from nest_megatron.launch.faults import leave


@hydra.main(version_base="1.3", config_path="conf", config_name="megatron_llama3_70b")
def main(config: DictConfig) -> None:
    """Train, or print what arrives after composition, command line and plan."""
    start = time.perf_counter()
    accelerator = str(OmegaConf.select(config, "trainer.accelerator") or "gpu")
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        trained = run(config, accelerator=accelerator, folder=folder)
    except NestError as error:
        leave(error.render(), error.exit_code)
    if trained:
        print(f"train: {time.perf_counter() - start:.1f} s wall, imports included")
        return
    print(OmegaConf.to_yaml(config))
    print("train: more ranks than this process; start them with torchrun or srun to train", file=sys.stderr)


if __name__ == "__main__":
    main()
