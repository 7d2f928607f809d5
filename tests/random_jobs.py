"""Seeded random NeMo-style jobs, and everything that must hold of the plan each one gets."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nest_megatron import rules
from nest_megatron.cluster.load import shipped_clusters
from nest_megatron.dialects import registry
from nest_megatron.errors import BadInputError, NoPlanError
from nest_megatron.pipeline import plan_config
from nest_megatron.specs.plan import Plan
from nest_megatron.specs.settings import PlanSettings

CLUSTERS = tuple(name for name in shipped_clusters() if not name.startswith(("paper", "cpu")))


@dataclass(frozen=True)
class RandomJob:
    """One job: its configuration, overrides already applied to it, and settings."""

    config: DictConfig
    overrides: tuple[str, ...]
    settings: PlanSettings


@dataclass(frozen=True)
class Verdict:
    """What happened: ``kind`` is an outcome or an error code, ``problem`` is empty when all is well."""

    kind: str
    problem: str


def random_job(rng: random.Random) -> RandomJob:
    """Return a job whose own layout may be illegal or too large, as users' are."""
    heads = rng.choice([8, 12, 16, 20, 32, 40, 48, 64])
    num_layers = rng.choice([4, 6, 8, 12, 16, 22, 24, 30, 32, 40, 48, 61, 64, 80, 96])
    devices = rng.choice([4, 8])
    version = rng.choice(["1.23.0", "2.2.0", "2.4.0"])
    model: dict[str, Any] = {
        "mcore_gpt": True,
        "micro_batch_size": rng.choice([1, 2, 4]),
        "global_batch_size": rng.choice([8, 16, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048]),
        "tensor_model_parallel_size": rng.choice([1, 1, 2, 4, 8]),
        "pipeline_model_parallel_size": rng.choice([1, 1, 2, 4, 5, 8]),
        "virtual_pipeline_model_parallel_size": rng.choice([None, None, None, 2, 4]),
        "encoder_seq_length": rng.choice([512, 1024, 2048, 4096, 8192]),
        "num_layers": num_layers,
        "hidden_size": heads * 128,
        "ffn_hidden_size": heads * 128 * 4 if rng.random() < 0.5 else heads * 352,
        "num_attention_heads": heads,
        "num_query_groups": rng.choice([None, None, 1, 2, 4, 8]),
        "activation": rng.choice(["gelu", "fast-swiglu"]),
        "normalization": rng.choice(["layernorm", "rmsnorm"]),
        "bias": rng.random() < 0.5,
        "hidden_dropout": rng.choice([0.0, 0.1]),
        "attention_dropout": rng.choice([0.0, 0.1]),
        "position_embedding_type": rng.choice(["rope", "learned_absolute"]),
        "share_embeddings_and_output_weights": rng.random() < 0.5,
        "override_vocab_size": rng.choice([32000, 50257, 128256]),
        "megatron_amp_O2": True,
        "transformer_engine": rng.random() < 0.8,
        "sequence_parallel": rng.random() < 0.5,
        "overlap_p2p_comm": rng.random() < 0.5,
        "batch_p2p_comm": False,
        "activations_checkpoint_granularity": rng.choice([None, None, "selective", "full"]),
        "optim": {
            "name": rng.choice(["mcore_distributed_optim", "distributed_fused_adam", "megatron_fused_adam"])
        },
        "data": {"data_prefix": []},
    }
    model["max_position_embeddings"] = model["encoder_seq_length"]
    if model["num_query_groups"] and heads % model["num_query_groups"]:
        model["num_query_groups"] = None
    if model["activations_checkpoint_granularity"] == "full":
        model |= {"activations_checkpoint_method": "uniform", "activations_checkpoint_num_layers": 1}
    if rng.random() < 0.3:
        model |= {"num_moe_experts": rng.choice([4, 8, 16]), "moe_router_topk": 2, "moe_grouped_gemm": True}
        model |= {"moe_token_dispatcher_type": "alltoall", "bias": False}
        model["expert_model_parallel_size"] = rng.choice([1, 2, 4])
    if rng.random() < 0.15:
        model["rampup_batch_size"] = [model["global_batch_size"] // 2, model["global_batch_size"] // 2, 1000]
    trainer = {
        "num_nodes": rng.choice([1, 1, 2, 3, 4, 5, 8, 12, 16, 32]),
        "devices": devices,
        "precision": "bf16",
        "limit_val_batches": rng.choice([0, 50]),
    }
    overrides: tuple[str, ...] = ()
    if rng.random() < 0.25:
        overrides = (f"model.tensor_model_parallel_size={model['tensor_model_parallel_size']}",)
    cluster = rng.choice(CLUSTERS)
    config = OmegaConf.create({"trainer": trainer, "model": model, "exp_manager": {}})
    return RandomJob(config, overrides, PlanSettings(cluster=cluster, framework_version=version))


def judge(job: RandomJob, *, with_megatron: bool = True) -> Verdict:
    """Plan ``job`` and check every invariant of its plan or of its refusal."""
    try:
        plan = plan_config(
            OmegaConf.create(OmegaConf.to_container(job.config)),
            overrides=job.overrides,
            settings=job.settings,
            source="random job",
        )
    except NoPlanError as error:
        reasons = [factor for factor in error.factors if factor.name in ("rejected", "smallest layout")]
        return Verdict(error.code, "" if reasons else f"no reason in: {error}")
    except BadInputError as error:
        return Verdict(error.code, "" if error.factors else f"no factor in: {error}")
    return Verdict(plan.outcome, problem_of(job, plan, with_megatron=with_megatron))


def problem_of(job: RandomJob, plan: Plan, *, with_megatron: bool) -> str:
    """Return the first invariant that ``plan`` breaks, or nothing."""
    dialect = registry.by_name("nemo")
    read = dialect.read(job.config, overrides=job.overrides, settings=job.settings)
    layout = plan.layout
    if sum(layout.num_layers_per_chunk) != read.model.num_layers:
        return f"layers are lost: {layout.num_layers_per_chunk}"
    if layout.world != read.num_gpus:
        return f"world is {layout.world}, not {read.num_gpus}"
    broken = rules.check(read, layout)
    if broken:
        return broken[0].render()
    if not plan.prediction.feasible:
        return f"does not fit: {plan.prediction.peak_device_bytes} of {plan.prediction.visible_bytes}"
    for override in job.overrides:
        if layout.tp != int(override.split("=")[1]):
            return f"the pin {override} became tp={layout.tp}"
    if Plan.from_json(plan.to_json()) != plan:
        return "plan.json does not round-trip"
    written = OmegaConf.create(OmegaConf.to_container(job.config))
    for key, value in plan.edits.items():
        OmegaConf.update(written, key, value, force_add=True)
    again = dialect.read(written, overrides=(), settings=job.settings).user_layout
    if again != layout:
        return f"the written configuration asks for {again}, not {layout}"
    if with_megatron:
        from tests.oracle import accepted_by_megatron

        accepted, words = accepted_by_megatron(read, layout)
        if not accepted:
            return f"megatron-core refuses {layout.describe()}: {words}"
    return ""
