"""Precision, optimizer and kernels of a Megatron-LM run, resolved to bytes and implementations.

Rules of ``megatron/training/arguments.py: validate_args``, ``core/optimizer/optimizer_config.py`` and
research/memory_model.md 2.2.
"""

from __future__ import annotations

from dataclasses import replace

from nest_megatron.dialects.megatron_arguments import Arguments
from nest_megatron.dialects.megatron_t5 import trains_t5
from nest_megatron.errors import BadInputError
from nest_megatron.specs.job import AttentionKernel, FlexBackend, Kernels, LossKernel, Recipe

_FP32_BYTES = 4
_HALF_BYTES = 2
#: Names of the optimizer's dtype flags (choices of arguments.py).
_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_MUON = ("muon", "dist_muon")
_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
_IMPLEMENTATIONS = ("local", "transformer_engine", "inference_optimized")


def read_recipe(args: Arguments, *, assumptions: list[str]) -> Recipe:
    """Return bytes per parameter; the name says which rule applied.

    * bf16: 2 B weights; 4 B gradients, because ``validate_args`` forces fp32 accumulation, 2 B with
      ``--grad-reduce-in-bf16`` (then 4 B more while the optimizer steps); 12 B optimizer;
    * fp16: 2 B weights and gradients, 12 B optimizer, 4 B more while the optimizer steps;
    * neither: 4 B weights and gradients, 8 B optimizer;
    * fp8: 2 B of cached copies per layer weight, or fp8 weights with ``--fp8-param-gather``.

    Raises:
        BadInputError: Megatron-LM refuses the combination, or a dtype is unknown.
    """
    bf16, fp16 = args.flag("bf16"), args.flag("fp16")
    if bf16 and fp16:
        raise BadInputError(
            "NEST-M09",
            "--bf16 and --fp16 exclude each other",
            factors=[args.factor("bf16"), args.factor("fp16")],
        )
    if not bf16 and not fp16:
        recipe = _full_precision(args)
    else:
        recipe = _half_precision(args, "bf16" if bf16 else "fp16")
    recipe = _with_optimizer(args, recipe, assumptions)
    return _with_low_precision(args, replace(recipe, wgrad_fusion=_wgrad_fusion(args)), assumptions)


def _full_precision(args: Arguments) -> Recipe:
    return Recipe(
        name="fp32",
        compute_dtype="fp32",
        activation_bytes=_FP32_BYTES,
        weight_bytes=_FP32_BYTES,
        grad_bytes=_FP32_BYTES,
        grad_reduce_bytes=_FP32_BYTES,
        param_gather_bytes=_FP32_BYTES,
        optimizer_bytes=8,
    )


def _half_precision(args: Arguments, dtype: str) -> Recipe:
    fp32_gradients = args.flag("accumulate_allreduce_grads_in_fp32")
    if dtype == "bf16":
        # validate_args: bf16 needs fp32 accumulation, unless reduction in bf16 or bf16 main gradients.
        fp32_gradients = fp32_gradients or _dtype(args, "main_grads_dtype") == _FP32_BYTES
        fp32_gradients = fp32_gradients and not args.flag("grad_reduce_in_bf16")
    gradients = _FP32_BYTES if fp32_gradients else _HALF_BYTES
    decoupled = args.flag("use_precision_aware_optimizer") and _dtype(args, "main_grads_dtype") == gradients
    return Recipe(
        name=f"{dtype}, {'fp32' if fp32_gradients else dtype} gradients",
        compute_dtype=dtype,
        activation_bytes=_HALF_BYTES,
        weight_bytes=_HALF_BYTES,
        grad_bytes=gradients,
        grad_reduce_bytes=gradients,
        param_gather_bytes=_HALF_BYTES,
        optimizer_bytes=12,
        # fp16 and bf16 gradients are copied to fp32 for the step (distrib_optimizer.py, optimizer.py).
        step_extra_bytes=0 if fp32_gradients or decoupled else _FP32_BYTES,
    )


def _with_optimizer(args: Arguments, recipe: Recipe, assumptions: list[str]) -> Recipe:
    """Return the recipe with the optimizer's own state: moments, and the master copy under half precision."""
    kind = args.text("optimizer") or "adam"
    half = recipe.weight_bytes == _HALF_BYTES
    if args.flag("use_precision_aware_optimizer"):
        state = _precision_aware_bytes(args, recipe)
        return replace(recipe, name=f"{recipe.name}, precision-aware {kind}", optimizer_bytes=state)
    if kind == "sgd":
        momentum = _FP32_BYTES if args.number("sgd_momentum") else 0
        return replace(
            recipe, name=f"{recipe.name}, sgd", optimizer_bytes=momentum + (_FP32_BYTES if half else 0)
        )
    if kind in _MUON:
        # One moment for matrices, Adam's two for embedding and head (memory_model.md 2.2, Muon).
        return replace(
            recipe,
            name=f"{recipe.name}, {kind}",
            optimizer_bytes=recipe.optimizer_bytes - _FP32_BYTES,
            end_optimizer_bytes=recipe.optimizer_bytes,
        )
    if kind != "adam":
        assumptions.append(f"{args.key('optimizer')} {kind}: its state is priced like Adam's")
    return replace(recipe, name=f"{recipe.name}, {kind}")


def _precision_aware_bytes(args: Arguments, recipe: Recipe) -> int:
    """Return moments plus master copy; a bf16 weight and 16 remainder bits make the fp32 master copy.

    Source: ``core/optimizer/optimizer_config.py: store_param_remainders``; research/config_surface.md 5.1.
    """
    master = _dtype(args, "main_params_dtype")
    delayed = not args.has("fp8") or args.text("fp8_recipe") == "delayed"
    if master == _FP32_BYTES and args.flag("bf16") and delayed:
        master = _HALF_BYTES
    if recipe.weight_bytes == _FP32_BYTES:
        master = 0
    return master + _dtype(args, "exp_avg_dtype") + _dtype(args, "exp_avg_sq_dtype")


def _with_low_precision(args: Arguments, recipe: Recipe, assumptions: list[str]) -> Recipe:
    if args.has("fp4"):
        assumptions.append(f"{args.key('fp4')}: fp4 GEMMs and weights are priced like fp8")
    if not args.has("fp8") and not args.has("fp4"):
        return recipe
    if recipe.activation_bytes == _FP32_BYTES:
        # fp8 GEMM inputs beside fp32 outputs: 1.5 times the 16-bit activations (memory_model.md section 1).
        recipe = replace(recipe, activation_bytes=3)
    if args.flag("fp8_param_gather"):
        # A row and a column copy of one byte each.
        return replace(
            recipe,
            name=f"fp8 with fp8 parameters, {recipe.name}",
            compute_dtype="fp8",
            weight_bytes=_HALF_BYTES,
            param_gather_bytes=1,
        )
    cached = recipe.cached_weight_bytes + 2
    return replace(recipe, name=f"fp8, {recipe.name}", compute_dtype="fp8", cached_weight_bytes=cached)


def _wgrad_fusion(args: Arguments) -> bool:
    """Return whether weight gradients accumulate in the GEMM: on by default, and never under torch FSDP2."""
    return args.flag("gradient_accumulation_fusion") and not args.flag("use_torch_fsdp2")


def _dtype(args: Arguments, name: str) -> int:
    found = args.choice(name, tuple(_DTYPE_BYTES))
    return _DTYPE_BYTES[found or "fp32"]


def read_kernels(args: Arguments, *, assumptions: list[str]) -> Kernels:
    """Return which implementations run.

    Transformer Engine unless ``--transformer-impl local`` (or attention backend and spec ``local``).  Its
    attention is FlashAttention or cuDNN's unless ``--attention-backend unfused`` or the environment switches
    both off; the local attention materialises the scores, with one softmax kernel unless
    ``--no-masked-softmax-fusion``.

    Raises:
        BadInputError: a name that Megatron-LM does not know.
    """
    backend = args.choice("attention_backend", _BACKENDS) or "auto"
    local = args.choice("transformer_impl", _IMPLEMENTATIONS) == "local" or backend == "local"
    engine = not local
    loss: LossKernel = "vocab_parallel"
    if args.flag("cross_entropy_loss_fusion"):
        fused_by = args.choice("cross_entropy_fusion_impl", ("native", "te"))
        loss = "te_fused" if fused_by == "te" else "native_fused"
    gated = args.flag("swiglu")
    graphs = _graphed_modules(args, assumptions)
    return Kernels(
        attention=_attention(args, backend, engine=engine),
        fused_norm=True,
        fused_residual=args.flag("bias_dropout_fusion"),
        fused_activation=args.flag("bias_swiglu_fusion" if gated else "bias_gelu_fusion"),
        loss=loss,
        transformer_engine=engine,
        cuda_graphs=graphs == (),
        cuda_graph_modules=graphs or (),
        flex_backend=read_flex_backend(args),
        fused_experts=args.flag("use_transformer_engine_op_fuser") and args.flag("moe_grouped_gemm"),
        fp8_attention=args.flag("fp8_dot_product_attention"),
        large_cublas_workspace="4096" in str(args.environment.get("CUBLAS_WORKSPACE_CONFIG", "")),
        deferred_embedding_wgrad=args.flag("defer_embedding_wgrad_compute"),
        dataloader_mask=args.flag("create_attention_mask_in_dataloader")
        and not args.flag("mock_data")
        and not trains_t5(args),
        offloaded_modules=(args.texts("offload_modules") or ())
        if args.flag("fine_grained_activation_offloading")
        else (),
    )


def _attention(args: Arguments, backend: str, *, engine: bool) -> AttentionKernel:
    unfused: AttentionKernel = "fused_softmax" if args.flag("masked_softmax_fusion") else "unfused"
    if not engine:
        return unfused
    if backend == "auto":
        # Transformer Engine's own switches; an explicit backend sets them (initialize.py).
        names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN")
        no_flash, no_cudnn = (str(args.environment.get(name)) == "0" for name in names)
        if no_flash:
            return unfused if no_cudnn else "cudnn"
        return "flash"
    chosen: dict[str, AttentionKernel] = {"flash": "flash", "fused": "cudnn"}
    return chosen.get(backend, unfused)


#: Scopes that leave nothing of a layer to the host.
_WHOLE_LAYER = ("full", "full_iteration")


def _graphed_modules(args: Arguments, assumptions: list[str]) -> tuple[str, ...] | None:
    """Return the modules inside CUDA graphs: () is the whole layer or iteration, None no graph at all.

    ``cuda_graph_scope`` lists modules; without it, or with ``full``, a graph covers the layer
    (TransformerConfig, megatron-core 0.16).
    """
    graphs = args.flag("enable_cuda_graph") or args.flag("external_cuda_graph")
    implementation = args.text("cuda_graph_impl")
    if not graphs and implementation in (None, "none"):
        return None
    assumptions.append("CUDA graphs: the buffers that captured graphs hold are not priced")
    scope = args.texts("cuda_graph_scope") or ()
    return () if set(scope) & set(_WHOLE_LAYER) else tuple(scope)


def read_flex_backend(args: Arguments) -> FlexBackend:
    """Return what the flex dispatcher sends tokens with; "" under another dispatcher.

    Raises:
        BadInputError: a backend that Megatron-LM does not know.
    """
    if args.text("moe_token_dispatcher_type") != "flex":
        return ""
    backend: FlexBackend = args.choice("moe_flex_dispatcher_backend", ("deepep", "hybridep")) or "deepep"  # type: ignore[assignment]
    return backend
