"""megatron.training itself as judge: the command line we write, its ``validate_args``, config and groups.

Needs megatron-core 0.19.2, whose wheel holds ``megatron.training``; ``make env-megatron-0.19`` builds an
environment with it.  ``tests/oracle.py`` asks megatron-core alone, from TransformerConfig on.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import sys
import typing
import warnings
from dataclasses import astuple, dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

from nest_megatron import rules
from nest_megatron.dialects.megatron_lm import read_argv, write_argv
from nest_megatron.errors import BadInputError
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Recompute, Sharding
from nest_megatron.specs.model import MLASpec, ModelSpec, MoESpec
from nest_megatron.specs.settings import PlanSettings
from tests.legality_cases import CASES, Case
from tests.oracle import REFUSALS, built_otherwise, judge_groups
from tests.random_layouts import random_case

VERSION = "0.19.2"

#: Rule -> why the command line of megatron.training 0.19.2 lets pass what the rule refuses.
VALIDATE_ARGS_CANNOT_SEE: dict[str, str] = {
    "batch.interleaved_groups": "checked by the interleaved schedule in the first training step",
    "attention.widths": "checked when the linear layers are built",
    "attention.sequence_over_tensor": "checked when the first embedding is scattered over the tensor ranks",
    "attention.context_parallel": "the attention module is chosen when the model is built",
    "moe.experts_need_sequence_parallel": "a warning at construction; the MoE layer's first forward raises",
    "moe.expert_width": "checked when the expert layers are built",
    "moe.expert_gradients": "nothing checks it: the gradients are silently wrong",
    "sharding.instances_offered": "without a sharded optimizer the number of its instances is not looked at",
    "sharding.gradient_sharding_order": "a rule of Megatron-Bridge",
    "recompute.method": "0 layers are taken; the loop over the layers of a chunk then never ends",
    "recompute.uniform_divides": "the first forward indexes past the last layer of the chunk",
}

#: A layout of a rule that has visible parts too, for the part that is not.
BLIND_SPOTS = (
    Case(
        "recompute.method",
        "own",
        {},
        {"recompute": Recompute(granularity="full", method="uniform")},
        {"recompute": Recompute(granularity="full", method="uniform", num_layers=1)},
    ),
)

#: Judges that are ours: the layout cannot be written, or Megatron reads something else from what we wrote.
OURS = ("writer", "read back")


@dataclass(frozen=True)
class Judgement:
    """Who refused a layout, and its words; nobody when it was accepted."""

    by: str = ""
    objection: str = ""

    @property
    def accepted(self) -> bool:
        """Whether every judge let the layout pass."""
        return not self.by


def judged_by_arguments(job: TrainJob, layout: Layout) -> Judgement:
    """Return what megatron.training says to the command line that asks for ``layout``."""
    _prepare()
    try:
        words = argv_of(job, layout)
    except BadInputError as refusal:
        return Judgement("writer", str(refusal))
    # Single device connections are Megatron's demand of tensor parallel runs, and forbidden to Megatron-FSDP.
    connections = "8" if layout.sharding in ("optim_grads", "optim_grads_params") else "1"
    environment = {"WORLD_SIZE": str(job.num_gpus), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    said = io.StringIO()
    with (
        warnings.catch_warnings(),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", words),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(said),
    ):
        warnings.simplefilter("ignore")
        return _judged(job, layout, said)


def _judged(job: TrainJob, layout: Layout, said: io.StringIO) -> Judgement:
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    step = "parse_args"
    try:
        args = parse_args()
        step = "validate_args"
        validate_args(args)
        step = "TransformerConfig"
        config = core_transformer_config_from_args(args)
        if objection := _read_otherwise(args, config, job, layout):
            return Judgement("read back", objection)
        if objection := built_otherwise(config, job, layout):
            return Judgement(step, objection)
        step = "num_microbatches_calculator"
        _count_micro_batches(job, args)
    except (*REFUSALS, ZeroDivisionError) as refusal:
        return Judgement(step, f"{refusal}" or type(refusal).__name__)
    except SystemExit:
        return Judgement(step, said.getvalue().strip().rpartition("\n")[2])
    objection = judge_groups(
        args.world_size,
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size or 1,
        args.context_parallel_size,
        args.expert_model_parallel_size,
        args.expert_tensor_parallel_size,
        args.num_distributed_optimizer_instances,
        "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )
    return Judgement("initialize_model_parallel", objection) if objection else Judgement()


@cache
def _prepare() -> None:
    """Stand in for the device that ``validate_args`` asks for, and for Python 3.12's ``typing.override``.

    The parser is built once: it reads the source of every configuration class, 0.4 s each time.
    """
    import torch
    import typing_extensions

    if not hasattr(typing, "override"):
        vars(typing)["override"] = typing_extensions.override
    hopper = SimpleNamespace(major=9, minor=0)
    torch.cuda.get_device_properties = lambda device=None: hopper
    torch.cuda.get_device_capability = lambda device=None: (hopper.major, hopper.minor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.training import arguments
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments.add_megatron_arguments = lambda _: parser


def argv_of(job: TrainJob, layout: Layout) -> list[str]:
    """Return the words that ask for ``layout``: those of the model and the run, edited by the dialect.

    Raises:
        BadInputError: this release has no flag for ``layout``.
    """
    flags = _run_flags(job) | _model_flags(job.model, job.sequence_length) | _fsdp_flags(layout.sharding)
    words = ["pretrain_gpt.py"]
    for flag, value in flags.items():
        if value is not None and value is not False:
            words += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
    asked = read_argv(
        words,
        environment={},
        settings=PlanSettings(framework_version=job.megatron_core_version),
        num_gpus=job.num_gpus,
    )
    return write_argv(replace(job, user_layout=asked.user_layout), layout, words)


def _run_flags(job: TrainJob) -> dict[str, Any]:
    stages = [f"{1000 * stage}M:{size}" for stage, size in enumerate((*job.rampup_batches, job.global_batch))]
    return {
        "seq-length": job.sequence_length,
        "micro-batch-size": 1,
        "global-batch-size": None if job.rampup_batches else job.global_batch,
        "step-batch-size-schedule": " ".join(stages) if job.rampup_batches else None,
        "eval-iters": None if job.evaluation_batch else 0,
        "eval-global-batch-size": job.evaluation_batch,
        "train-iters": 1000,
        "bf16": job.recipe.compute_dtype != "fp32",
        "mock-data": True,
        "transformer-impl": None if job.kernels.transformer_engine else "local",
        # Transformer Engine, which fuses this, cannot be installed without a GPU.
        "no-rope-fusion": True,
    }


def _model_flags(model: ModelSpec, sequence_length: int) -> dict[str, Any]:
    grouped = model.num_query_groups != model.num_attention_heads
    return {
        "num-layers": model.num_layers,
        "hidden-size": model.hidden_size,
        "num-attention-heads": model.num_attention_heads,
        "group-query-attention": grouped,
        "num-query-groups": model.num_query_groups if grouped else None,
        "kv-channels": model.kv_channels,
        "ffn-hidden-size": model.ffn_hidden_size,
        "max-position-embeddings": model.max_position_embeddings or sequence_length,
        "position-embedding-type": "learned_absolute" if model.learned_positions else "rope",
        "tokenizer-type": "NullTokenizer",
        "vocab-size": model.vocab_size,
        "make-vocab-size-divisible-by": model.make_vocab_size_divisible_by,
        "swiglu": model.gated_mlp,
        "normalization": "RMSNorm" if model.rms_norm else "LayerNorm",
        "untie-embeddings-and-output-weights": not model.tied_embeddings,
        "disable-bias-linear": not model.linear_bias,
        "add-qkv-bias": model.qkv_bias,
        "qk-layernorm": model.qk_norm,
        "hidden-dropout": model.hidden_dropout,
        "attention-dropout": model.attention_dropout,
        "mtp-num-layers": model.mtp_num_layers or None,
        **({} if model.moe is None else _moe_flags(model.moe)),
        **({} if model.mla is None else _mla_flags(model.mla)),
    }


def _moe_flags(moe: MoESpec) -> dict[str, Any]:
    return {
        "num-experts": moe.num_experts,
        "moe-router-topk": moe.top_k,
        "moe-ffn-hidden-size": moe.ffn_hidden_size,
        "moe-shared-expert-intermediate-size": moe.shared_ffn_hidden_size or None,
        "moe-layer-freq": f"[{','.join(map(str, moe.layer_pattern))}]",
        "moe-expert-capacity-factor": moe.capacity_factor,
        "moe-grouped-gemm": moe.grouped_gemm,
        "moe-token-dispatcher-type": moe.dispatcher,
    }


def _mla_flags(mla: MLASpec) -> dict[str, Any]:
    return {
        "multi-latent-attention": True,
        "q-lora-rank": mla.q_lora_rank or None,
        "kv-lora-rank": mla.kv_lora_rank,
        "qk-head-dim": mla.qk_head_dim,
        "qk-pos-emb-head-dim": mla.qk_rope_head_dim,
        "v-head-dim": mla.v_head_dim,
    }


def _fsdp_flags(sharding: Sharding) -> dict[str, Any]:
    """Return what the user must have asked for: a plan never moves a run to Megatron-FSDP."""
    if sharding in ("none", "optim"):
        return {}
    return {
        "use-megatron-fsdp": True,
        "use-distributed-optimizer": True,
        "data-parallel-sharding-strategy": sharding,
        "ckpt-format": "fsdp_dtensor",
    }


def _count_micro_batches(job: TrainJob, args: Any) -> None:
    """Start the calculator as ``set_global_variables`` does, and take it through every batch size."""
    from megatron.core import num_microbatches_calculator as calculator

    calculator.init_num_microbatches_calculator(
        rank=1,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    try:
        for stage in range(len(job.rampup_batches) + 1):
            calculator.update_num_microbatches(stage * 10**9 // args.seq_length + 1, consistency_check=True)
    finally:
        calculator.destroy_num_microbatches_calculator()


def _read_otherwise(args: Any, config: Any, job: TrainJob, layout: Layout) -> str:
    """Return the first quantity of the layout that Megatron reads otherwise from what we wrote."""
    overlap, recompute = layout.overlap, layout.recompute
    selective = recompute.granularity == "selective"
    pairs: dict[str, tuple[object, object]] = {
        "tp": (args.tensor_model_parallel_size, layout.tp),
        "pp": (args.pipeline_model_parallel_size, layout.pp),
        "vpp": (args.virtual_pipeline_model_parallel_size or 1, layout.vpp),
        "cp": (args.context_parallel_size, layout.cp),
        "ep": (args.expert_model_parallel_size, layout.ep),
        "etp": (args.expert_tensor_parallel_size, layout.etp),
        "dp": (args.data_parallel_size, layout.dp),
        "sequence_parallel": (config.sequence_parallel, layout.sequence_parallel),
        "micro_batch": (args.micro_batch_size, layout.micro_batch),
        "sharding": (_sharding(args), layout.sharding),
        "instances": (args.num_distributed_optimizer_instances, layout.num_optimizer_instances),
        "order": (args.use_tp_pp_dp_mapping, layout.order == "tp-cp-ep-pp-dp"),
        "grad_reduce": (args.overlap_grad_reduce, overlap.grad_reduce),
        "param_gather": (args.overlap_param_gather, overlap.param_gather),
        "tp_comm": (config.tp_comm_overlap, overlap.tp_comm),
        "p2p": (config.overlap_p2p_comm, overlap.p2p),
        "expert_all_to_all": (config.overlap_moe_expert_parallel_comm, overlap.expert_all_to_all),
        "granularity": (config.recompute_granularity or "none", recompute.granularity),
        "method": (config.recompute_method or "none", recompute.method),
        "recompute_num_layers": (config.recompute_num_layers or 0, recompute.num_layers),
    }
    if selective:
        pairs["modules"] = (tuple(config.recompute_modules), recompute.modules)
    if job.model.moe is not None:
        grid = args.expert_tensor_parallel_size * args.expert_model_parallel_size
        pairs["edp"] = (args.world_size // (grid * args.pipeline_model_parallel_size), layout.edp)
    if not job.rampup_batches:
        pairs["global_batch"] = (args.global_batch_size, layout.global_batch)
    for name, (read, wanted) in pairs.items():
        if read != wanted:
            return f"{name} is {read}, the layout says {wanted}"
    return ""


def _sharding(args: Any) -> str:
    if args.use_megatron_fsdp:
        return str(args.data_parallel_sharding_strategy)
    return "optim" if args.use_distributed_optimizer else "none"


def report(layouts: int, seed: int) -> dict[str, list[list[Any]]]:
    """Return [case, rules broken, who refused it, words] of seeded layouts and of the written-down cases."""
    rng = random.Random(seed)
    drawn = [random_case(rng, VERSION) for _ in range(layouts)]
    written = []
    for case in (*CASES, *BLIND_SPOTS):
        job, layout = case.build()
        # Degrees below 1 are no layout; releases and models of their own need another command line.
        if (
            case.rule != "grid.degrees"
            and "megatron_core_version" not in case.job
            and job.model.decoder is None
        ):
            written.append((replace(job, megatron_core_version=VERSION), layout))
    return {
        name: [
            [
                f"{layout} of {job.model.name} on {job.num_gpus} GPUs",
                [violation.rule for violation in rules.check(job, layout)],
                *astuple(judged_by_arguments(job, layout)),
            ]
            for job, layout in cases
        ]
        for name, cases in (("random", drawn), ("cases", written))
    }


def main() -> None:
    """Write the report as one line of JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--layouts", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    sys.stdout.write(json.dumps(report(options.layouts, options.seed)) + "\n")


if __name__ == "__main__":
    main()
