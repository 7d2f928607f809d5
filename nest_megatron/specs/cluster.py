"""The machine: accelerator, nodes, and the ordered levels of its network, in SI units."""

from __future__ import annotations

from dataclasses import dataclass, field

from nest_megatron.units import BytesPerSecond, FlopPerSecond, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device type; numbers with sources live in ``conf/accelerator/``.

    Args:
        generation: ``volta``, ``ampere``, ``hopper``, ``blackwell``, ``cdna3``, ``tpu`` ...
        peak_flops_per_s: dense peak by compute dtype (``bf16``, ``fp16``, ``fp8``, ``fp32``).
        visible_bytes: memory the runtime reports as total, not the marketing size.
        num_sms: streaming multiprocessors (or compute units) that take part in tile waves.
        gemm_efficiency: sustained share of peak of large GEMMs, by dtype.
        attention_efficiency_forward, attention_efficiency_backward: share of bf16 peak of fused attention.
        memory_efficiency: sustained share of ``hbm_bytes_per_s``.
        wave_overhead_s: fixed time of one tile wave; ``kernel_gap_s``: gap between dependent kernels.
    """

    name: str
    generation: str
    peak_flops_per_s: dict[str, FlopPerSecond]
    visible_bytes: int
    hbm_bytes_per_s: BytesPerSecond
    num_sms: int
    gemm_efficiency: dict[str, float]
    attention_efficiency_forward: float
    attention_efficiency_backward: float
    memory_efficiency: float
    wave_overhead_s: Seconds
    kernel_gap_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the network, inner to outer; level 0 is the NVLink (or equivalent) domain.

    Args:
        gpus: GPUs inside one unit of this level.
        bandwidth_bytes_per_s: per GPU, one direction, line rate with all GPUs active, for traffic that leaves
            a unit of the level below and stays inside one unit of this level.
        efficiency: usable share of the line rate.
        latency_s: at level 0 the latency of one hop inside the domain, which replaces NCCL's constant; above,
            the fabric's own latency, added to NCCL's network hop (research/network.md 1.3).
    """

    name: str
    gpus: int
    bandwidth_bytes_per_s: BytesPerSecond
    efficiency: float
    latency_s: Seconds

    @property
    def usable_bytes_per_s(self) -> BytesPerSecond:
        """Line rate times efficiency."""
        return BytesPerSecond(self.bandwidth_bytes_per_s * self.efficiency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A named unit of one level: its nodes, and its own uplink when it differs from the level's.

    Args:
        uplink_bytes_per_s: per GPU, toward the level above; None means the level's own value.
    """

    level: str
    name: str
    nodes: tuple[str, ...]
    uplink_bytes_per_s: BytesPerSecond | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster as the planner sees it.

    Args:
        nodes: real node names, or empty when only their number is known.
        levels: inner to outer; the last level holds every GPU.
        units: named units, degraded or uneven ones; empty for a symmetric tree.
        nics_per_node: None means one NIC per GPU; with fewer NICs than GPUs, neighbours share one.
        rails: NIC i of every node is on leaf switch i of its unit (rail-optimised cabling).
        pxn: traffic to another rail takes NVLink to the GPU of that rail first (NCCL's default); without it
            such traffic climbs one level.
        torus: axes, fastest first, whose product is the GPUs of one level; that level's bandwidth is then the
            rate of one link in one direction (network.md 1.5).
        nvls: switch-side reduction inside level 0.
        busbw_by_group_size_bytes_per_s: measured level-0 bus bandwidth by number of members.
        scenarios: level name -> bandwidth factor, one mapping per scenario of robust planning.
        assumptions: sentences for the plan, for example that a default cluster was used.
        source: file or built-in name this came from.
    """

    name: str
    accelerator: Accelerator
    gpus_per_node: int
    num_nodes: int
    levels: tuple[Level, ...]
    nodes: tuple[str, ...] = ()
    units: tuple[Unit, ...] = ()
    nics_per_node: int | None = None
    rails: bool = True
    pxn: bool = True
    nvls: bool = False
    torus: tuple[int, ...] = ()
    busbw_by_group_size_bytes_per_s: dict[int, float] = field(default_factory=dict)
    scenarios: tuple[dict[str, float], ...] = ()
    assumptions: tuple[str, ...] = ()
    source: str = ""

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.gpus_per_node * self.num_nodes
