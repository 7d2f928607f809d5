"""The settings of a NeMo configuration that several readers need: precision, optimizer, model class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nest_megatron.dialects.access import ConfigView
from nest_megatron.errors import BadInputError, Factor
from nest_megatron.specs.job import CONFIG_FILE, DEFAULT

Precision = Literal["bf16", "fp16", "fp32"]
OptimizerKind = Literal["plain", "apex", "megatron-core"]

#: NeMo's names, nemo/collections/nlp/parts/utils_funcs.py: torch_dtype_from_precision.
_PRECISIONS: dict[object, Precision] = {
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    16: "fp16",
    "16": "fp16",
    "16-mixed": "fp16",
    32: "fp32",
    "32": "fp32",
    "32-true": "fp32",
}
#: ``optim.name`` of the two distributed optimizers; every other name is a plain one.
_DISTRIBUTED: dict[str, OptimizerKind] = {
    "distributed_fused_adam": "apex",
    "mcore_distributed_optim": "megatron-core",
}
#: Arguments that plain optimizers share with the distributed ones.
_COMMON_KEYS = frozenset({"name", "lr", "weight_decay", "betas", "eps", "sched", "bias_correction"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """How the optimizer holds its state.

    Args:
        kind: ``apex`` and ``megatron-core`` shard over data parallel ranks, ``plain`` does not.
        o2: ``megatron_amp_O2``, half-precision weights with the master copy in the optimizer.
        extra_keys: keys of the section that a plain optimizer would reject.
    """

    name: str
    kind: OptimizerKind
    o2: bool
    extra_keys: tuple[str, ...] = ()

    @property
    def sharded(self) -> bool:
        """Whether states are sharded over the data parallel ranks."""
        return self.kind != "plain"


def read_optimizer(view: ConfigView) -> Optimizer:
    """Return the optimizer settings.

    Raises:
        BadInputError: a value of the wrong type.
    """
    name = view.text("model.optim.name") or "fused_adam"
    section = view.mapping("model.optim") or {}
    return Optimizer(
        name=name,
        kind=_DISTRIBUTED.get(name, "plain"),
        o2=view.flag("model.megatron_amp_O2"),
        extra_keys=tuple(sorted(set(section) - _COMMON_KEYS)),
    )


def read_precision(view: ConfigView) -> Precision:
    """Return the precision; ``model.precision`` wins over ``trainer.precision`` (megatron_base_model.py).

    Raises:
        BadInputError: NeMo does not know the value.
    """
    key = next((k for k in ("model.precision", "trainer.precision") if view.value(k) is not None), None)
    if key is None:
        return "fp32"  # Lightning's default
    found = view.value(key)
    precision = None if isinstance(found, (bool, list, dict, float)) else _PRECISIONS.get(found)
    if precision is None:
        raise BadInputError(
            "NEST-D11",
            "NeMo does not know this precision",
            factors=[Factor(view.full(key), found, CONFIG_FILE if view.has(key) else DEFAULT)],
            nearest=("bf16", "16", "32"),
        )
    return precision


def uses_megatron_core(view: ConfigView) -> bool:
    """Return whether the model is built from megatron-core rather than from NeMo's own layers."""
    return view.flag("model.mcore_gpt")
