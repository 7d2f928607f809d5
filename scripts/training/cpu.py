"""The one place that lets megatron-core 0.16 train without CUDA: names of ``torch.cuda`` answered on the CPU.

megatron-core assumes a GPU in its buffers, streams, random states and a few type comparisons.  ``activate``
replaces those names by equivalents on the CPU; the mathematics stays megatron-core's own.  With a CUDA device
it does nothing.  It changes the process for good, so it belongs to processes that train and to no others.

Replaced: streams, events and synchronisation (a CPU runs in order), random states (the CPU generator), the
device and pinning arguments of tensor factories, ``Tensor.cuda``, ``Module.cuda``, the names that
``Tensor.type`` returns, collectives over parts of unequal length (gloo takes equal ones only), and three gaps
of megatron-core 0.16 without Transformer Engine (``_fill_gaps``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from typing import Any

import torch

_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


def activate() -> bool:
    """Prepare this process for training without CUDA; return whether anything had to be replaced.

    Must run before megatron-core is imported: it compiles functions at import unless told not to.
    """
    if torch.cuda.is_available():
        return False
    if not hasattr(torch, "_nest_cpu_training"):
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        # Loads torch's compiler, which refuses to load once names of torch are replaced.
        importlib.import_module("megatron.core")
        _replace_cuda()
        _replace_tensor_methods()
        for name in _FACTORIES:
            setattr(torch, name, _on_cpu(getattr(torch, name)))
        _replace_uneven_collectives()
        _fill_gaps()
        torch._nest_cpu_training = True
    return True


class _Event:
    """An event of a device that runs in order: always reached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take whatever a CUDA event takes."""

    def record(self, stream: Any = None) -> None:
        """Nothing to record."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work before it is done."""
        return True


class _Stream:
    """The only stream of the CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take whatever a CUDA stream takes."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> _Event:
        """Return an event that is reached."""
        return event or _Event()


def _replace_cuda() -> None:
    cuda: Any = torch.cuda
    stream = _Stream()

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: stream
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.set_device = cuda.set_stream = cuda.synchronize = cuda.empty_cache = nothing
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = nothing


def _replace_tensor_methods() -> None:
    tensor: Any = torch.Tensor
    plain_type = tensor.type

    def type_of(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:  # the optimizer and the gradient clipping compare this text
            return plain_type(self).replace("torch.", "torch.cuda.", 1)
        return plain_type(self, dtype, *args, **kwargs)

    tensor.type = type_of
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda self, stream: None
    module: Any = torch.nn.Module
    module.cuda = lambda self, *args, **kwargs: self


def _on_cpu(factory: Any) -> Any:
    """Return a tensor factory that reads every CUDA device as the CPU and never pins memory."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device") or "").startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _replace_uneven_collectives() -> None:
    distributed: Any = torch.distributed
    gather, scatter = distributed.all_gather, distributed.reduce_scatter

    def all_gather(parts: list[torch.Tensor], part: torch.Tensor, group: Any = None, **kwargs: Any) -> Any:
        lengths = [len(tensor) for tensor in parts]
        if len(set(lengths)) == 1:
            return gather(parts, part, group=group, **kwargs)
        padded = part.new_zeros(max(lengths), *part.shape[1:])
        padded[: len(part)] = part
        rows = [torch.empty_like(padded) for _ in parts]
        gather(rows, padded, group=group)
        for tensor, row, length in zip(parts, rows, lengths, strict=True):
            tensor.copy_(row[:length])
        return None

    def reduce_scatter(
        part: torch.Tensor, parts: list[torch.Tensor], *args: Any, group: Any = None, **kwargs: Any
    ) -> Any:
        if len({len(tensor) for tensor in parts}) == 1:
            return scatter(part, parts, *args, group=group, **kwargs)
        whole = torch.cat(parts)
        distributed.all_reduce(whole, group=group)
        part.copy_(whole.split([len(tensor) for tensor in parts])[group.rank()])
        return None

    distributed.all_gather, distributed.reduce_scatter = all_gather, reduce_scatter


def _fill_gaps() -> None:
    """Route megatron-core's random states to the CPU generator, and fill what it lacks without TE."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    moe: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    if not hasattr(moe, "te_general_gemm"):  # 0.16 names it without importing it; 0.19 does not
        moe.te_general_gemm = None
    moves = moe.maybe_move_tensor_to_cpu

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # The all-to-all takes its splits as numbers; megatron-core converts them on the way from the GPU.
        moved = moves(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    moe.maybe_move_tensor_to_cpu = dispatcher.maybe_move_tensor_to_cpu = move
