"""What is trained, with which software, under which freedoms: the output of a dialect's reader."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from nest_megatron.specs.constants import StepConstants
from nest_megatron.specs.layout import Layout, Order, Sharding
from nest_megatron.specs.model import ModelSpec
from nest_megatron.specs.scale import StepScale

#: ``flash`` and ``flash1`` are flash-attn 2 and 1, ``cudnn`` the fused attention of Transformer Engine.
AttentionKernel = Literal["flash", "flash1", "cudnn", "fused_softmax", "unfused"]
LossKernel = Literal["vocab_parallel", "native_fused", "te_fused"]
#: Backend of the flex dispatcher, which sends one copy per destination domain; "" is plain all-to-all.
FlexBackend = Literal["", "deepep", "hybridep"]
UnshardedGradOverlap = Literal["never", "without_pp_and_sp", "as_asked"]

#: Where a value came from; messages and plans print these words.
COMMAND_LINE = "command line"
CONFIG_FILE = "config file"
DEFAULT = "default"
DERIVED = "derived"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Precision and optimizer, resolved to bytes (research/memory_model.md 2.2).

    Args:
        compute_dtype: dtype of the GEMMs: ``bf16``, ``fp16``, ``fp32`` or ``fp8``.
        activation_bytes: bytes of one stored activation element.
        weight_bytes: bytes per parameter of the weights the forward pass reads.
        grad_bytes: bytes per parameter of the persistent gradient buffer.
        grad_reduce_bytes: bytes per parameter on the wire of the gradient reduction.
        param_gather_bytes: bytes per parameter on the wire of the parameter all-gather.
        optimizer_bytes: bytes per parameter of master weights and moments, before sharding.
        step_extra_bytes: bytes per parameter that live only during the optimizer step.
        cached_weight_bytes: bytes per layer weight of low-precision copies kept between micro-batches.
        end_optimizer_bytes: replicated optimizer bytes per parameter of embedding and head, where an
            optimizer treats them differently; None means like the layers.
        wgrad_fusion: weight gradients accumulate inside the GEMM epilogue.
    """

    name: str
    compute_dtype: str
    activation_bytes: int
    weight_bytes: int
    grad_bytes: int
    grad_reduce_bytes: int
    param_gather_bytes: int
    optimizer_bytes: int
    step_extra_bytes: int = 0
    cached_weight_bytes: int = 0
    end_optimizer_bytes: int | None = None
    wgrad_fusion: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which implementations run, as far as the configuration says.

    Args:
        cuda_graphs: one graph covers the whole iteration, so the host never limits.
        cuda_graph_modules: parts of a layer inside graphs of Transformer Engine (``attn``, ``moe_router``,
            ``moe_preprocess``); the rest is launched by the host.
        flex_backend: what sends tokens to their experts under the flex dispatcher.
        fused_experts: activation and quantisation run inside the grouped GEMMs.
        fp8_attention, fp8_output_layer: these run in fp8 too, where the recipe computes in fp8 or fp4.
        large_cublas_workspace: ``CUBLAS_WORKSPACE_CONFIG`` asks for the large one on any GPU.
        deferred_embedding_wgrad: the output layer keeps logits of two micro-batches.
        offloaded_modules: Megatron's ``offload_modules``: their activations wait in host memory.
        dataloader_mask: first and last stage hold a byte mask of sequence squared.
    """

    attention: AttentionKernel = "flash"
    fused_norm: bool = True
    fused_residual: bool = True
    fused_activation: bool = True
    loss: LossKernel = "vocab_parallel"
    transformer_engine: bool = True
    cuda_graphs: bool = False
    cuda_graph_modules: tuple[str, ...] = ()
    flex_backend: FlexBackend = ""
    fused_experts: bool = False
    fp8_attention: bool = False
    fp8_output_layer: bool = False
    large_cublas_workspace: bool = False
    deferred_embedding_wgrad: bool = False
    dataloader_mask: bool = False
    offloaded_modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkProfile:
    """Facts of a software stack, from ``conf/framework/<name>.yaml``; formulas know no framework names.

    Args:
        device_factor, device_fixed_bytes: factor * allocated + fixed (memory_model.md section 3).
        tp_overlap_share ... p2p_overlap_share: hidden share of each stream when its overlap flag is on
            (network.md section 5).
        host_floor_s: host time of one dense block's forward pass (time_model.md section 3).
        moe_host_factor: the same for an MoE block, as a multiple.
        step_overhead_s: fixed time per step.
        time: the constants of the step-time formulas.
        scatters_pipeline_messages: without sequence parallelism a pipeline message is scattered over tp and
            gathered on arrival (1), or sent whole (0).
        shard_broadcast_s: the optimizer broadcasts parameters rank by rank: seconds per rank of a shard
            group that leaves the NVLink domain.
        pipeline_buffers: stage-boundary tensors that a pipelined rank holds at its peak.
        keeps_stage_outputs: every in-flight chunk also keeps its output (1) or not (0).
        caches_dummy_wgrads: one dummy gradient per weight shape stays allocated (1) or not (0).
        loss_bytes_per_logit: peak bytes per logit; 0 means by loss kernel.  ``gathers_logits``: on the whole
            vocabulary (1) instead of a tp shard (0).
        unfused_norm_saved_bytes, rotary_saved_bytes: extra saved bytes per element of hidden states.
        score_saved_bytes: saved per unfused attention score; 0 means by dropout.
        score_transient_bytes: alive per unfused score while its backward runs.
        boundary_transients: hidden-state tensors alive in one layer's backward.
        fixed_workspace_bytes: workspaces; 0 means cuBLAS and Transformer Engine by generation.
        selective_kept_share: share of activations that op-level selective recomputation keeps.
        unsharded_weight_units, unsharded_grad_units: layers held unsharded by fully sharded data parallelism.
        unsharded_with_pipeline: with a pipeline, fully sharded weights and gradients stay gathered (1) or
        not.
        small_world_gpus, device_fixed_small_bytes: the fixed part up to that many GPUs, where it is smaller.
        sources: quantity -> where its value comes from.
    """

    name: str
    device_factor: float
    device_fixed_bytes: int
    tp_overlap_share: float
    tp_async_backward_share: float
    dp_overlap_share: float
    p2p_overlap_share: float
    ep_overlap_share: float
    host_floor_s: float
    moe_host_factor: float
    step_overhead_s: float
    time: StepConstants
    scatters_pipeline_messages: int = 0
    shard_broadcast_s: float = 0.0
    pipeline_buffers: int = 4
    keeps_stage_outputs: int = 0
    caches_dummy_wgrads: int = 1
    loss_bytes_per_logit: float = 0.0
    gathers_logits: int = 0
    unfused_norm_saved_bytes: int = 0
    rotary_saved_bytes: int = 0
    score_saved_bytes: int = 0
    score_transient_bytes: int = 4
    boundary_transients: int = 2
    fixed_workspace_bytes: int = 0
    selective_kept_share: float = 1.0
    unsharded_weight_units: int = 2
    unsharded_grad_units: int = 1
    unsharded_with_pipeline: int = 0
    small_world_gpus: int = 0
    device_fixed_small_bytes: int = 0
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What this dialect and version can execute; the planner offers nothing else.

    Args:
        uneven_ends: first and last pipeline stage may hold another number of layers than the middle ones.
        account_embedding_and_loss: embedding and loss may each take one layer's slot.
        layout_string: any layer count per chunk (``pipeline_model_parallel_layout``).
        shardings: sharding values with a key in this dialect.
        unsharded_grad_overlap: when gradient reduction overlaps without a sharded optimizer.
    """

    virtual_pipeline: bool = True
    context_parallel: bool = True
    expert_parallel: bool = True
    expert_tensor_parallel: bool = False
    uneven_ends: bool = False
    account_embedding_and_loss: bool = False
    layout_string: bool = False
    shardings: tuple[Sharding, ...] = ("none", "optim")
    unsharded_grad_overlap: UnshardedGradOverlap = "as_asked"
    optimizer_instances: bool = False
    recompute_modules: tuple[str, ...] = ("core_attn",)
    full_recompute: bool = True
    orders: tuple[Order, ...] = ("tp-cp-ep-dp-pp",)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """Whether the job resumes, and what the checkpoint binds (DESIGN section 8).

    Args:
        resuming: a checkpoint is loaded at start.
        reshards: its format can be loaded under another tp, pp, ep.
        source: the key or path that says so.
    """

    resuming: bool = False
    reshards: bool = True
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One training job, framework-neutral.

    Args:
        num_gpus: world size.
        global_batch: sequences per optimizer step; ``rampup_batches`` are the sizes before it is reached.
        evaluation_batch: sequences per evaluation step, None when evaluation is off.
        user_layout: the layout the configuration asks for, legal or not.
        origins: axis or field -> where its value came from.
        pins: axis -> the one value the user fixed; ``bounds``: axis -> values the user allows.
        megatron_core_version: decides the version table of ``rules/versions.py``.
        step_scale: what measured steps of this model on this machine taught, None without calibration.
        assumptions: sentences for the plan, one per value the configuration does not give.
        not_planned: axes the dialect never edits in this job, with the reason.
    """

    name: str
    dialect: str
    framework: str
    framework_version: str
    megatron_core_version: str
    model: ModelSpec
    num_gpus: int
    gpus_per_node: int
    global_batch: int
    sequence_length: int
    recipe: Recipe
    kernels: Kernels
    user_layout: Layout
    profile: FrameworkProfile
    capabilities: Capabilities
    rampup_batches: tuple[int, ...] = ()
    evaluation_batch: int | None = None
    origins: dict[str, str] = field(default_factory=dict)
    pins: dict[str, Any] = field(default_factory=dict)
    bounds: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    checkpoint: CheckpointState = field(default_factory=CheckpointState)
    reserved_bytes: int = 0
    expert_imbalance: float = 1.0
    step_scale: StepScale | None = None
    assumptions: tuple[str, ...] = ()
    not_planned: dict[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        """Return where ``name`` came from."""
        return self.origins.get(name, DEFAULT)
