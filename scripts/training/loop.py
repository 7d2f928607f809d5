"""The training loop of one rank: megatron-core's schedules, gradient reduction and optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from .data import Samples
from .model import DTYPES, build_chunks, transformer_config
from .settings import Settings


@dataclass(frozen=True, slots=True)
class Step:
    """What one step showed.

    Args:
        loss: mean cross-entropy per token over the global batch, of the weights before the step.
        grad_norm: L2 norm of the whole gradient before clipping.
        step_time_s: wall seconds, all devices synchronised.
    """

    index: int
    loss: float
    grad_norm: float
    step_time_s: float


class Trainer:
    """Model, optimizer and data of one rank; process groups exist already."""

    def __init__(self, settings: Settings) -> None:
        """Build everything.

        Raises:
            BadInputError: the layout cannot be built.
        """
        self.settings = settings
        self.config = transformer_config(settings)
        self.chunks = build_chunks(settings, self.config)
        self.samples = Samples(
            settings.data,
            vocab_size=settings.vocab_size,
            sequence_length=settings.sequence_length,
            seed=settings.seed,
        )
        destroy_num_microbatches_calculator()
        init_num_microbatches_calculator(
            torch.distributed.get_rank(), None, settings.global_batch, settings.micro_batch, settings.dp
        )
        ddp = DistributedDataParallelConfig(**settings.ddp)
        self.models = [
            DistributedDataParallel(self.config, ddp, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(self.chunks)
        ]
        dtype = DTYPES[settings.precision]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                **settings.optimizer,
                bf16=settings.precision == "bf16",
                fp16=settings.precision == "fp16",
                params_dtype=dtype,
            ),
            self.models,
            use_gloo_process_groups=False,
        )
        self._connect(ddp)

    def _connect(self, ddp: Any) -> None:
        """Hand megatron-core's schedules the functions of optimizer and data parallelism."""
        config, models = self.config, self.models
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        alone = len(models) == 1
        if ddp.overlap_grad_reduce:
            syncs = [model.no_sync for model in models]
            config.no_sync_func = syncs[0] if alone else syncs
            starts = [model.start_grad_sync for model in models]
            if not alone:
                config.grad_sync_func = starts
        if ddp.overlap_param_gather and not alone:
            config.param_sync_func = [model.start_param_sync for model in models]

    def steps(self) -> Iterator[Step]:
        """Train, one ``Step`` at a time."""
        run = get_forward_backward_func()
        for index in range(self.settings.num_steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for model in self.models:
                model.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = run(
                forward_step_func=self._forward,
                data_iterator=[self._micro_batches(index) for _ in self.models],
                model=self.models,
                num_microbatches=self.settings.num_micro_batches,
                seq_length=self.settings.sequence_length,
                micro_batch_size=self.settings.micro_batch,
                forward_only=False,
            )
            _, grad_norm, _ = self.optimizer.step()
            torch.cuda.synchronize()
            elapsed_s = time.perf_counter() - start
            loss, slowest_s = self._agree(losses, elapsed_s)
            yield Step(index=index, loss=loss, grad_norm=float(grad_norm), step_time_s=slowest_s)

    def _micro_batches(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield this rank's micro-batches; samples are dealt as Megatron deals them."""
        settings, rank = self.settings, parallel_state.get_data_parallel_rank()
        each, dp = settings.micro_batch, settings.dp
        for index in range(settings.num_micro_batches):
            first = step * settings.global_batch + (index * dp + rank) * each
            batch = self.samples.batch(list(range(first, first + each)))
            yield {name: rows.cuda() for name, rows in get_batch_on_this_cp_rank(batch).items()}

    def _forward(self, data: Any, model: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], Any]]:
        batch = next(data)
        output = model(
            input_ids=batch["tokens"],
            position_ids=batch["position_ids"],
            attention_mask=None,
            labels=batch["labels"],
        )
        return output, _mean_loss

    def _agree(self, losses: list[dict[str, torch.Tensor]], elapsed_s: float) -> tuple[float, float]:
        """Return the loss of the global batch and the time of the slowest rank, on every rank."""
        state, device = parallel_state, torch.cuda.current_device()
        total = torch.zeros(2, device=device)
        if state.is_pipeline_last_stage(ignore_virtual=True) and state.get_tensor_model_parallel_rank() == 0:
            total[0] = sum(float(item["loss"]) for item in losses) / len(losses)
            total[1] = 1.0
        slowest = torch.tensor([elapsed_s], device=device)
        torch.distributed.all_reduce(total)
        torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
        return float(total[0] / total[1]), float(slowest[0])


def _mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean over this rank's tokens; every rank and micro-batch has equally many.

    The schedule multiplies by the size of the context parallel group, over which gradients are averaged too.
    """
    loss = output.float().mean()
    return loss / parallel_state.get_context_parallel_world_size(), {"loss": loss.detach()}
