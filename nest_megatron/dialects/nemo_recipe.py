"""Precision, optimizer and kernels of a NeMo configuration, resolved to bytes and implementations.

The rules were read from github.com/NVIDIA/NeMo at v1.23.0 and v2.4.0: ``megatron_base_model.py``
(``setup_optimization``, ``configure_optimizers``, ``allreduce_gradients``,
``_validate_and_override_config``),
``megatron_gpt_model.py`` (``setup_mcore_distributed_parallel``, ``get_specs``) and ``distributed_adam.py``.
"""

from __future__ import annotations

from dataclasses import replace

from nest_megatron.dialects.access import ConfigView
from nest_megatron.dialects.nemo_settings import Optimizer, Precision, uses_megatron_core
from nest_megatron.dialects.nemo_versions import NemoVersion
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs.job import CONFIG_FILE, AttentionKernel, Kernels, LossKernel, Recipe
from nest_megatron.specs.layout import Layout

_FP32_BYTES = 4
_HALF_BYTES = 2
#: NeMo's dtype names (nemo/utils/dtype.py) that an optimizer can use, and their bytes.
_DTYPE_BYTES = {
    "fp32": 4,
    "float32": 4,
    "float": 4,
    "fp16": 2,
    "float16": 2,
    "half": 2,
    "bf16": 2,
    "bfloat16": 2,
}


def read_recipe(
    view: ConfigView,
    precision: Precision,
    optimizer: Optimizer,
    layout: Layout,
    *,
    assumptions: list[str],
) -> Recipe:
    """Return bytes per parameter; the name says which rule applied.

    * O2, megatron-core: half weights, gradients in ``grad_sync_dtype`` (fp32 unless given), 12 B optimizer;
    * O2, Apex: the master copy is the bf16 weight plus 16 remainder bits, so 2 + 8 B instead of 4 + 8 B;
    * O2, plain: fp32 gradient accumulation, 12 B optimizer, unsharded;
    * without O2: fp32 weights under autocast, 8 B moments; Apex then holds ``.grad`` beside its own buffer, a
      plain optimizer flattens all gradients into one more buffer while they are reduced.

    Raises:
        BadInputError: NeMo refuses the combination, or a dtype is unknown.
    """
    if optimizer.o2 and optimizer.kind == "plain" and precision != "bf16":
        raise BadInputError(
            "NEST-D13",
            "NeMo trains with megatron_amp_O2 and this optimizer in bf16 only",
            factors=[
                Factor("precision", precision, CONFIG_FILE),
                Factor(view.full("model.optim.name"), optimizer.name, view.origin("model.optim.name")),
            ],
            nearest=(f"{view.full('model.megatron_amp_O2')}=false", "precision bf16"),
        )
    if optimizer.o2 and precision != "fp32":
        recipe = _o2(view, precision, optimizer)
    else:
        recipe = _autocast(view, precision, optimizer, assumptions)
    return _with_fp8(view, replace(recipe, wgrad_fusion=_wgrad_fusion(view, optimizer, layout)))


def _o2(view: ConfigView, precision: Precision, optimizer: Optimizer) -> Recipe:
    reduce_bytes = _dtype_bytes(view, "model.optim.grad_sync_dtype")
    if optimizer.kind == "apex":
        state_bytes = _dtype_bytes(view, "model.optim.dtype") or _FP32_BYTES
        reduce_bytes = reduce_bytes or state_bytes
        optimizer_bytes = 2 * state_bytes + _apex_master_bytes(view, precision, state_bytes)
    else:
        # DistributedDataParallelConfig.grad_reduce_in_fp32 is true for the word fp32 only.
        reduce_bytes = reduce_bytes or _FP32_BYTES
        optimizer_bytes = 12
    if optimizer.kind == "plain":
        reduce_bytes = _FP32_BYTES
    return Recipe(
        name=f"{precision}, O2, {optimizer.name}",
        compute_dtype=precision,
        activation_bytes=_HALF_BYTES,
        weight_bytes=_HALF_BYTES,
        grad_bytes=reduce_bytes,
        grad_reduce_bytes=reduce_bytes,
        param_gather_bytes=_HALF_BYTES,
        optimizer_bytes=optimizer_bytes,
    )


def _apex_master_bytes(view: ConfigView, precision: Precision, state_bytes: int) -> int:
    """Return bytes per parameter of Apex' master copy (``store_params``, ``store_param_remainders``)."""
    if view.flag("model.optim.store_params") or view.flag("model.fp8_params"):
        return state_bytes
    if state_bytes == _HALF_BYTES:
        return 0
    return 2 if precision == "bf16" else state_bytes


def _autocast(view: ConfigView, precision: Precision, optimizer: Optimizer, assumptions: list[str]) -> Recipe:
    half = precision != "fp32"
    reduce_bytes = _FP32_BYTES
    grad_bytes = _FP32_BYTES
    if optimizer.kind == "apex":
        reduce_bytes = _dtype_bytes(view, "model.optim.grad_sync_dtype") or _FP32_BYTES
        grad_bytes = reduce_bytes if optimizer.o2 else _FP32_BYTES + reduce_bytes
    if half:
        assumptions.append(
            "native autocast keeps the residual stream in fp32; activations are priced at 2 bytes per "
            "element, so the memory of this run is a lower estimate (megatron_amp_O2 avoids it)"
        )
    return Recipe(
        name=f"{precision}{', autocast' if half else ''}, {optimizer.name}",
        compute_dtype=precision,
        activation_bytes=_HALF_BYTES if half else _FP32_BYTES,
        weight_bytes=_FP32_BYTES,
        grad_bytes=grad_bytes,
        grad_reduce_bytes=reduce_bytes,
        param_gather_bytes=_FP32_BYTES,
        optimizer_bytes=8,
        step_extra_bytes=0 if optimizer.sharded else _FP32_BYTES,
        cached_weight_bytes=_HALF_BYTES if half else 0,
    )


def _with_fp8(view: ConfigView, recipe: Recipe) -> Recipe:
    """Add fp8 GEMMs: cached row and column copies of the weights, or fp8 weights (memory_model.md 2.2)."""
    if not view.flag("model.fp8"):
        return recipe
    if view.flag("model.fp8_params"):
        return replace(
            recipe,
            name=f"fp8 with fp8 parameters, {recipe.name}",
            compute_dtype="fp8",
            param_gather_bytes=1,
        )
    cached = recipe.cached_weight_bytes + 2
    return replace(recipe, name=f"fp8, {recipe.name}", compute_dtype="fp8", cached_weight_bytes=cached)


def _wgrad_fusion(view: ConfigView, optimizer: Optimizer, layout: Layout) -> bool:
    """Return whether NeMo keeps ``gradient_accumulation_fusion`` (``_validate_and_override_config``)."""
    cleared = not optimizer.sharded and layout.dp > 1 and layout.pp == 1
    return view.flag("model.gradient_accumulation_fusion") and optimizer.o2 and not cleared


def _dtype_bytes(view: ConfigView, key: str) -> int | None:
    found = view.text(key)
    if found is None:
        return None
    size = _DTYPE_BYTES.get(found.strip().lower().removeprefix("torch."))
    if size is None:
        raise BadInputError(
            "NEST-D14",
            f"{view.full(key)} is not a dtype that an optimizer can use",
            factors=[Factor(view.full(key), found, CONFIG_FILE)],
            nearest=("fp32", "bf16"),
        )
    return size


def read_kernels(view: ConfigView, version: NemoVersion) -> Kernels:
    """Return which implementations run.

    megatron-core models use Transformer Engine always in 1.x and when ``transformer_engine`` is set in 2.x;
    NeMo's own layers use it only when set.  Its attention is fused; otherwise ``use_flash_attention`` (own
    layers only) and ``masked_softmax_fusion`` decide.

    Raises:
        BadInputError: a flag is not a boolean.
    """
    core = uses_megatron_core(view)
    engine = view.flag("model.transformer_engine") or (core and not version.at_least(2, 0))
    attention: AttentionKernel = "unfused"
    if engine or (not core and view.flag("model.use_flash_attention")):
        attention = "flash"
    elif view.flag("model.masked_softmax_fusion", True):
        attention = "fused_softmax"
    loss: LossKernel = "vocab_parallel"
    if core and version.at_least(2, 0) and view.flag("model.cross_entropy_loss_fusion"):
        te_loss = view.text("model.cross_entropy_fusion_impl") == "te"
        loss = "te_fused" if te_loss else "native_fused"
    return Kernels(
        attention=attention,
        fused_norm=True,
        fused_residual=view.flag("model.bias_dropout_add_fusion", True),
        fused_activation=view.flag("model.bias_activation_fusion", True),
        loss=loss,
        transformer_engine=engine,
        cuda_graphs=version.at_least(2, 0) and view.flag("model.enable_cuda_graph"),
        # NeMo has no key for the backend: the flex dispatcher sends with DeepEP (TransformerConfig default).
        flex_backend="deepep" if view.text("model.moe_token_dispatcher_type") == "flex" else "",
    )
