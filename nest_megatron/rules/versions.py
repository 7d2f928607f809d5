"""What each megatron-core version can do: the only place where versions differ.

Read from the release branches ``core_r0.5.0`` to ``core_r0.19.0`` and ``main`` (package version 0.20) of
NVIDIA/Megatron-LM; the file that shows a fact is named beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from nest_megatron.errors import BadInputError, Factor

_Release = tuple[int, int]

OLDEST: _Release = (0, 5)
NEWEST: _Release = (0, 20)

#: Fact -> (first release that has it, the file that shows it).
_SINCE: dict[str, tuple[_Release, str]] = {
    "pp_before_dp": ((0, 7), "training/initialize.py: use_tp_pp_dp_mapping"),
    "two_stage_interleaving": ((0, 8), "core/parallel_state.py: initialize_model_parallel"),
    "expert_with_context": ((0, 8), "core/parallel_state.py: initialize_model_parallel"),
    "uneven_ends": ((0, 9), "core/transformer/transformer_config.py: first_pipeline_num_layers"),
    "expert_folding": ((0, 10), "core/parallel_state.py: expert_decoder_rank_generator"),
    "expert_tensor_parallel": ((0, 10), "core/model_parallel_config.py: expert_tensor_parallel_size"),
    "optimizer_instances": ((0, 10), "core/parallel_state.py: num_distributed_optimizer_instances"),
    "interleaving_groups": ((0, 10), "core/model_parallel_config.py: microbatch_group_size_per_vp_stage"),
    "account_embedding_and_loss": ((0, 11), "core/transformer/transformer_config.py: account_for_*"),
    "pp_order_names_all_axes": ((0, 11), "training/initialize.py: 'tp-cp-ep-pp-dp', before 'tp-pp-dp'"),
    "gradient_sharding": ((0, 12), "core/distributed: use_custom_fsdp, from 0.14 use_megatron_fsdp"),
    "layout_string": ((0, 13), "core/transformer/pipeline_parallel_layer_layout.py"),
    "expert_all_to_all_overlap": ((0, 14), "core/model_parallel_config.py: overlap_moe_expert_parallel_comm"),
    "moe_bias_needs_etp_one": ((0, 15), "core/transformer/transformer_config.py: __post_init__"),
    "kv_replication": ((0, 16), "core/transformer/transformer_config.py: num_query_groups divides tp"),
}

#: Release -> values of ``recompute_modules`` it adds (core/transformer/transformer_config.py).
_RECOMPUTE_MODULES: dict[_Release, tuple[str, ...]] = {
    OLDEST: ("core_attn",),
    (0, 12): ("moe_act", "layernorm", "mla_up_proj", "mlp", "moe"),
    (0, 14): ("shared_experts",),
    (0, 19): ("gdn_norm_out",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFacts:
    """Facts of one megatron-core release.

    Args:
        pp_before_dp: the rank order that puts pp before dp can be chosen.
        two_stage_interleaving: interleaving on two pipeline stages is possible (with p2p overlap).
        expert_with_context: ep > 1 and cp > 1 combine.
        expert_folding: the expert grid is etp x ep x edp x pp over the world; before, ep divides dp.
        interleaving_groups: micro-batches per chunk can be grouped by another number than pp.
        pp_order_names_all_axes: the pp-before-dp order knows cp and ep.
        gradient_sharding: gradients and parameters can be sharded over data parallel ranks (ZeRO-2, ZeRO-3).
        moe_bias_needs_etp_one: biases in experts need etp = 1.
        kv_replication: tp may be a multiple of the KV heads; before, it divides them.
        recompute_modules: modules that selective recomputation knows.
    """

    version: str
    pp_before_dp: bool
    two_stage_interleaving: bool
    expert_with_context: bool
    uneven_ends: bool
    expert_folding: bool
    expert_tensor_parallel: bool
    optimizer_instances: bool
    interleaving_groups: bool
    account_embedding_and_loss: bool
    pp_order_names_all_axes: bool
    gradient_sharding: bool
    layout_string: bool
    expert_all_to_all_overlap: bool
    moe_bias_needs_etp_one: bool
    kv_replication: bool
    recompute_modules: tuple[str, ...]


@cache
def facts_for(version: str) -> VersionFacts:
    """Return the facts of the newest known release that is not newer than ``version``.

    Accepts package versions (``0.16.1``, ``0.17.0rc0``), branch and tag names (``core_r0.16.0``, ``v0.9``)
    and ``main``.

    Raises:
        BadInputError: no version can be read, or it is older than every known release.
    """
    release = NEWEST if version.strip().lower() == "main" else _parse(version)
    if release < OLDEST:
        raise BadInputError(
            "NEST-RV02",
            f"megatron-core {version} is older than any release whose rules are known",
            factors=[Factor("megatron_core_version", version)],
            nearest=[_name(OLDEST)],
        )
    known = min(release, NEWEST)
    modules = tuple(m for since, added in _RECOMPUTE_MODULES.items() if since <= known for m in added)
    return VersionFacts(
        version=_name(known),
        recompute_modules=modules,
        **{fact: known >= since for fact, (since, _) in _SINCE.items()},
    )


def _parse(version: str) -> _Release:
    """Return (major, minor) of a version, tag or branch name."""
    match = re.match(r"(?:core_)?[rv]?(\d+)\.(\d+)(?![0-9])", version.strip())
    if match is None:
        raise BadInputError(
            "NEST-RV01",
            "megatron_core_version is not a version",
            factors=[Factor("megatron_core_version", version)],
            nearest=[_name((0, 16)), "main"],
        )
    return int(match[1]), int(match[2])


def _name(release: _Release) -> str:
    return f"{release[0]}.{release[1]}"


def first_release(fact: str) -> str:
    """Return the first release that has ``fact``, for messages."""
    return _name(_SINCE[fact][0])
