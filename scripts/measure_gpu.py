"""Measure one machine: operator rates at the shapes of a job, link rates, peak memory of Megatron steps.

    python scripts/measure_gpu.py scripts/conf/megatron_llama3_8b.yaml --out measured
    torchrun --nproc-per-node 8 scripts/measure_gpu.py CONFIG --out measured      # all-gather rates, too

It writes ``measured/device.json``: seconds, rates and efficiencies with their shapes, and the values of a
``conf/accelerator`` file that follow from them; and ``measured/runs/*.json``: one run record per step of one
and two Megatron layers, which ``nest-megatron calibrate memory`` reads.  Operators need torch only, the
records megatron-core.  A few minutes on one GPU.  Not executed here on a GPU; ``--reduced`` runs everything
small on a CPU, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nest_megatron.cluster.load import load_accelerator, shipped_accelerators
from nest_megatron.dialects import registry
from nest_megatron.errors import NestError
from nest_megatron.graph.layer_graph import Operator
from nest_megatron.graph.templates import layer_graph
from nest_megatron.launch.faults import leave
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import BlockChoice
from nest_megatron.specs.settings import PlanSettings

SCHEMA = 1
#: Bytes of one all-gather result, from latency to bandwidth.
GATHER_BYTES = tuple(2**exponent for exponent in range(16, 31, 2))
#: Edits of the Megatron steps whose memory is measured: name -> NeMo keys.
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro_batch_2": {"model.micro_batch_size": 2, "model.global_batch_size": 2},
    "selective": {"model.activations_checkpoint_granularity": "selective"},
    "full": {
        "model.activations_checkpoint_granularity": "full",
        "model.activations_checkpoint_method": "uniform",
        "model.activations_checkpoint_num_layers": 1,
    },
}
LAYERS = (1, 2)
#: Keys of a one-rank step of a few layers.
_SINGLE: dict[str, Any] = {
    "trainer.devices": 1,
    "trainer.num_nodes": 1,
    "trainer.max_steps": 4,
    "model.tensor_model_parallel_size": 1,
    "model.pipeline_model_parallel_size": 1,
    "model.virtual_pipeline_model_parallel_size": None,
    "model.context_parallel_size": 1,
    "model.sequence_parallel": False,
    "model.micro_batch_size": 1,
    "model.global_batch_size": 1,
    "model.ub_tp_comm_overlap": False,
    "model.data.data_impl": "mock",
}
#: What makes every measurement small enough for a CPU.
_REDUCED_ROWS, _REDUCED_ELEMENTS, _REDUCED_REPEATS = 64, 2**16, 2


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """The device under test, and how long to measure on it."""

    torch: Any
    name: str
    kind: str
    dtype: Any
    reduced: bool

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of one call, after a warm-up, each timed between synchronisations."""
        repeats = _REDUCED_REPEATS if self.reduced else 20
        for _ in range(3):
            work()
        taken = []
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    def wait(self) -> None:
        """Wait until the device has nothing to do."""
        if self.kind == "cuda":
            self.torch.cuda.synchronize()

    def random(self, *shape: int, grad: bool = False) -> Any:
        """Return a random tensor of the job's dtype on the device."""
        return self.torch.randn(*shape, device=self.kind, dtype=self.dtype, requires_grad=grad)

    def rows(self, count: int) -> int:
        """Return the rows that are measured instead of ``count``."""
        return min(count, _REDUCED_ROWS) if self.reduced else count


def read_job(path: Path) -> tuple[DictConfig, TrainJob]:
    """Return a configuration and the job it describes.

    Raises:
        BadInputError: the configuration cannot be read.
    """
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    dialect = registry.detect(config)
    return config, dialect.read(config, overrides=(), settings=PlanSettings())


def gemms(device: Device, operators: list[Operator]) -> Iterator[dict[str, Any]]:
    """Yield forward, input-gradient and weight-gradient GEMMs of every linear operator."""
    seen: set[tuple[int, int, int]] = set()
    for operator in operators:
        m, n, k = device.rows(operator.m), operator.n, operator.k
        for shape in ((m, n, k), (m, k, n), (n, k, m)):
            if shape in seen:
                continue
            seen.add(shape)
            left, right = device.random(shape[0], shape[2]), device.random(shape[2], shape[1])
            taken = device.seconds(lambda a=left, b=right: a @ b)
            yield {
                "operator": operator.name,
                "m": shape[0],
                "n": shape[1],
                "k": shape[2],
                "seconds": taken,
                "flops_per_s": 2 * shape[0] * shape[1] * shape[2] / taken,
            }


def attention(device: Device, job: TrainJob, choice: BlockChoice) -> Iterator[dict[str, Any]]:
    """Yield causal attention, forward and backward, with torch's own kernel."""
    model = job.model
    heads, length = model.num_attention_heads // choice.tp, device.rows(job.sequence_length)
    shape = (choice.micro_batch, heads, length, model.kv_channels)
    query, key, value = (device.random(*shape, grad=True) for _ in range(3))
    attend = device.torch.nn.functional.scaled_dot_product_attention

    def forward() -> Any:
        return attend(query, key, value, is_causal=True)

    def both() -> None:
        forward().sum().backward()

    # Half of the score matrix is masked; multiply and add count two.
    flops = 2 * 2 * choice.micro_batch * heads * length * length * model.kv_channels / 2
    forward_s = device.seconds(forward)
    backward_s = device.seconds(both) - forward_s
    for name, taken, work in (("forward", forward_s, flops), ("backward", backward_s, 2.5 * flops)):
        yield {"pass": name, "shape": list(shape), "seconds": taken, "flops_per_s": work / taken}


def memory_bound(device: Device, job: TrainJob, choice: BlockChoice) -> Iterator[dict[str, Any]]:
    """Yield a norm, a residual addition, and one Adam step: bytes that must move over the time they take."""
    torch, hidden = device.torch, job.model.hidden_size
    tokens = device.rows(choice.micro_batch * job.sequence_length)
    rows = device.random(tokens, hidden)
    norm = torch.nn.RMSNorm if job.model.rms_norm else torch.nn.LayerNorm
    layer = norm(hidden, device=device.kind, dtype=device.dtype)
    element = rows.element_size()
    for name, work, moved in (
        ("norm", lambda: layer(rows), 2 * rows.numel() * element),
        ("residual", lambda: rows + rows, 3 * rows.numel() * element),
    ):
        taken = device.seconds(work)
        yield {"operator": name, "bytes": moved, "seconds": taken, "bytes_per_s": moved / taken}
    elements = _REDUCED_ELEMENTS if device.reduced else 2**28
    weight = torch.zeros(elements, device=device.kind, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    adam = torch.optim.AdamW([weight], lr=1e-3, fused=device.kind == "cuda")
    taken = device.seconds(adam.step)
    moved = 7 * 4 * elements  # read gradient, weight, two moments; write weight, two moments; fp32
    yield {"operator": "adam", "bytes": moved, "seconds": taken, "bytes_per_s": moved / taken}


def all_gathers(device: Device) -> Iterator[dict[str, Any]]:
    """Yield all-gather times over all ranks that torchrun started; nothing in a single process."""
    distributed = device.torch.distributed
    if not distributed.is_initialized():
        return
    size = distributed.get_world_size()
    for num_bytes in GATHER_BYTES[: 4 if device.reduced else None]:
        part = device.torch.zeros(num_bytes // size, device=device.kind, dtype=device.torch.uint8)
        whole = device.torch.zeros(num_bytes // size * size, device=device.kind, dtype=device.torch.uint8)
        taken = device.seconds(lambda a=whole, b=part: distributed.all_gather_into_tensor(a, b))
        yield {
            "ranks": size,
            "bytes": whole.numel(),
            "seconds": taken,
            "busbw_bytes_per_s": whole.numel() * (size - 1) / size / taken,
        }


def efficiencies(device: Device, found: dict[str, list[dict[str, Any]]], dtype: str) -> dict[str, Any]:
    """Return values for a conf/accelerator file: measured rates over the peaks of the shipped file that fits.

    The GEMM share is that of the largest shape; for a device without a shipped file only rates are given.
    """
    largest = max(found["gemm"], key=lambda row: row["m"] * row["n"] * row["k"])
    fastest = max(row["bytes_per_s"] for row in found["memory_bound"])
    name = next(
        (n for n in shipped_accelerators() if n.split("-", 1)[0].upper() in device.name.upper()), None
    )
    result: dict[str, Any] = {
        "accelerator": name,
        "largest_gemm_flops_per_s": largest["flops_per_s"],
        "bytes_per_s": fastest,
    }
    if name is None:
        return result
    shipped = load_accelerator(name)
    peak = shipped.peak_flops_per_s.get(dtype)
    if peak:
        result[f"gemm_efficiency_{dtype}"] = largest["flops_per_s"] / peak
        for row in found["attention"]:
            result[f"attention_efficiency_{row['pass']}"] = row["flops_per_s"] / peak
    result["memory_efficiency"] = fastest / shipped.hbm_bytes_per_s
    return result


def megatron_records(config: DictConfig, device: Device, folder: Path) -> list[str]:
    """Train one and two layers under every feature and write a run record each; return what was skipped."""
    if importlib.util.find_spec("megatron") is None:
        return ["megatron-core is not installed: no memory of Megatron steps"]
    from training import app
    from training.nemo_keys import settings_of

    skipped = []
    for name, edits in list(FEATURES.items())[: 1 if device.reduced else None]:
        for layers in LAYERS:
            edited = OmegaConf.create(OmegaConf.to_container(config))
            assert isinstance(edited, DictConfig)
            for key, value in (_SINGLE | edits | {"model.num_layers": layers}).items():
                OmegaConf.update(edited, key, value, force_add=True)
            edited.name = f"{config.get('name', 'job')}_{layers}_layers_{name}"
            try:
                settings = settings_of(edited)
                target = folder / "runs" / edited.name
                app.run(edited, accelerator="cpu" if device.kind == "cpu" else "gpu", folder=target)
            except NestError as error:
                skipped.append(f"{edited.name}: {error.render()}")
            except device.torch.OutOfMemoryError:
                skipped.append(f"{settings.name}: out of memory")
    return skipped


def start(reduced: bool, dtype: str) -> Device:
    """Return the device of this process; ranks of torchrun join one process group.

    Raises:
        SystemExit: no CUDA device, and the reduced run was not asked for.
    """
    import os

    import torch

    cuda = torch.cuda.is_available()
    if not cuda and not reduced:
        leave("no CUDA device is here; --reduced runs on a CPU, to test this script", 2)
    kind = "cuda" if cuda else "cpu"
    if "WORLD_SIZE" in os.environ:
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
    name = torch.cuda.get_device_name() if cuda else "CPU"
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16, "fp32": torch.float32}
    return Device(torch, name, kind, torch.float32 if reduced and not cuda else dtypes[dtype], reduced)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("config", type=Path, help="configuration of the job whose shapes are measured")
    parser.add_argument("--out", type=Path, default=Path("measured"), help="folder of the results")
    parser.add_argument("--reduced", action="store_true", help="everything small; also on a CPU")
    arguments = parser.parse_args()
    try:
        config, job = read_job(arguments.config)
    except NestError as error:
        leave(error.render(), error.exit_code)
    dtype = job.recipe.compute_dtype
    device = start(arguments.reduced, dtype)
    choice = BlockChoice.of(job.user_layout)
    graph = layer_graph(job, choice)
    linear = [
        op for block in (*graph.blocks.values(), graph.head) for op in block.operators if op.kind == "gemm"
    ]
    found = {
        "gemm": list(gemms(device, linear)),
        "attention": list(attention(device, job, choice)),
        "memory_bound": list(memory_bound(device, job, choice)),
        "all_gather": list(all_gathers(device)),
    }
    distributed = device.torch.distributed
    first = not distributed.is_initialized() or distributed.get_rank() == 0
    several = distributed.is_initialized() and distributed.get_world_size() > 1
    skipped = ["run without torchrun for the memory of Megatron steps"] if several else []
    if first:
        if not several:
            skipped = megatron_records(config, device, arguments.out)
        result = {
            "schema": SCHEMA,
            "device": device.name,
            "torch": device.torch.__version__,
            "cuda": device.torch.version.cuda,
            "job": job.name,
            "dtype": dtype,
            "reduced": device.reduced,
            "visible_bytes": device.torch.cuda.get_device_properties(0).total_memory
            if device.kind == "cuda"
            else None,
            **found,
            "accelerator_values": efficiencies(device, found, dtype),
            "skipped": skipped,
        }
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / "device.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"{len(found['gemm'])} GEMM shapes, {len(found['all_gather'])} all-gather sizes: {path}")
        for reason in skipped:
            print(f"skipped: {reason}", file=sys.stderr)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
