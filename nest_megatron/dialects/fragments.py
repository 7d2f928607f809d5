"""Files that configure one component: recognised, so that their refusal says what they are."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

#: GEMMs of a layer, each forward or by gradient, as Transformer Engine's user buffers name them.
_OVERLAP_GEMMS = frozenset(
    f"{gemm}_{phase}" for gemm in ("qkv", "proj", "fc1", "fc2") for phase in ("fprop", "dgrad", "wgrad")
)


def fragment(config: DictConfig) -> str | None:
    """Return what a file without a training job configures, None when it may be a whole configuration."""
    plain = OmegaConf.to_container(config, resolve=False)
    if not isinstance(plain, dict) or not plain:
        return None
    if set(plain) <= _OVERLAP_GEMMS:
        return "the overlap of tensor parallel communication (ub_tp_comm_overlap_cfg)"
    target = plain.get("_target_")
    if isinstance(target, str):
        return f"one component, {target.rpartition('.')[2]}"
    return None
