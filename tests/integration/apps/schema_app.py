"""An app whose root configuration is a dataclass: unknown keys are refused and types are checked."""

from dataclasses import dataclass, field
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from task_app import write_down


@dataclass
class Trainer:
    """Devices and precision."""

    devices: int = 8
    num_nodes: int = 1
    precision: str = "bf16"
    limit_val_batches: float = 0.0


@dataclass
class Model:
    """A Llama-like model of eight billion parameters whose layout does not shard anything."""

    mcore_gpt: bool = True
    transformer_engine: bool = True
    megatron_amp_O2: bool = True
    micro_batch_size: int = 1
    global_batch_size: int = 128
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    sequence_parallel: bool = False
    encoder_seq_length: int = 8192
    max_position_embeddings: int = 8192
    num_layers: int = 32
    hidden_size: int = 4096
    ffn_hidden_size: int = 14336
    num_attention_heads: int = 32
    num_query_groups: int = 8
    normalization: str = "rmsnorm"
    bias: bool = False
    activation: str = "fast-swiglu"
    position_embedding_type: str = "rope"
    share_embeddings_and_output_weights: bool = False
    make_vocab_size_divisible_by: int = 128
    override_vocab_size: int = 128256
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    optim: dict[str, Any] = field(default_factory=lambda: {"name": "distributed_fused_adam", "lr": 1.0e-4})


@dataclass
class Root:
    """The whole configuration; there is no place for a key ``nest``."""

    trainer: Trainer = field(default_factory=Trainer)
    model: Model = field(default_factory=Model)


ConfigStore.instance().store(name="schema", node=Root)


@hydra.main(version_base=None, config_path=None, config_name="schema")
def main(config: DictConfig) -> None:
    """Run the task; Hydra looks for configurations beside the module that defines this function."""
    write_down(config)


if __name__ == "__main__":
    main()
