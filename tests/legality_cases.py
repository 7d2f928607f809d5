"""One layout per rule that breaks it, from public cases where there is one, and the change that repairs it.

Ids like C024 are records of data/cases; "surface" and "mcore" rows are measured facts of megatron-core and
its launchers, written down in research/config_surface.md section 2 and research/mcore_cpu.md section 6.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from nest_megatron.specs.job import Capabilities, Kernels, TrainJob
from nest_megatron.specs.layout import Layout, Overlap, Recompute
from nest_megatron.specs.model import DecoderSpec
from tests.builders import EVERYTHING, deepseek_v2, gpt175b, llama8b, make_job, make_layout, mixtral

NO_STRING = replace(EVERYTHING, layout_string=False)
EVEN_ONLY = replace(NO_STRING, uneven_ends=False, account_embedding_and_loss=False)


@dataclass(frozen=True)
class Case:
    """A layout that breaks ``rule``.

    Args:
        job, layout: arguments of ``make_job`` and ``make_layout``.
        repair: layout arguments that make it legal; None where only another job would.
        also: rules that cannot hold when this one breaks this way.
    """

    rule: str
    origin: str
    job: dict[str, Any]
    layout: dict[str, Any]
    repair: dict[str, Any] | None
    also: frozenset[str] = field(default_factory=frozenset)

    def build(self) -> tuple[TrainJob, Layout]:
        """Return the job and the broken layout, which is also the user's."""
        job = make_job(**self.job)
        layout = make_layout(job, **self.layout)
        return replace(job, user_layout=layout), layout

    def repaired(self) -> Layout:
        """Return the layout after the repair."""
        return make_layout(make_job(**self.job), **self.layout | (self.repair or {}))


def _falcon_7b() -> dict[str, Any]:
    shape = {"num_attention_heads": 71, "num_query_groups": 1, "kv_channels": 64, "ffn_hidden_size": 18176}
    model = llama8b(name="falcon-7b", hidden_size=4544, gated_mlp=False, vocab_size=65024, **shape)
    return {"model": model, "num_gpus": 128, "global_batch": 32, "sequence_length": 2048}


def _mixtral(**job: Any) -> dict[str, Any]:
    return {"model": mixtral(), **job}


def _gpt(**job: Any) -> dict[str, Any]:
    return {"model": gpt175b(), "sequence_length": 2048, **job}


def _llama(layers: int, **job: Any) -> dict[str, Any]:
    return {"model": llama8b(name=f"llama-{layers}-layers", num_layers=layers), **job}


def _recompute(**values: Any) -> dict[str, Any]:
    return {"recompute": Recompute(**values)}


PP_FIRST = {"order": "tp-cp-ep-pp-dp"}

GRID = (
    Case("grid.degrees", "own", {}, {"micro_batch": 0}, {"micro_batch": 1}),
    Case(
        "grid.world",
        "C007: GPT-NeoX-20B trains on 24 GPUs as PP6 x TP4",
        _llama(44, num_gpus=24, global_batch=96),
        {"tp": 4, "pp": 4},
        {"pp": 6},
    ),
    Case(
        "grid.expert_world",
        "C024: DeepSeek-V2 recipe, 128 GPUs, ETP4 x EP32 x PP4 = 512",
        {"model": deepseek_v2(), "num_gpus": 128},
        {"tp": 4, "pp": 4, "ep": 32, "etp": 4, "sequence_parallel": True},
        {"tp": 1, "etp": 1, "sequence_parallel": False},
    ),
    Case(
        "grid.expert_inside_data",
        "core_r0.9.0 parallel_state: data_parallel_size % expert_model_parallel_size",
        _mixtral(num_gpus=8, megatron_core_version="0.9.0"),
        {"cp": 2, "ep": 8},
        {"ep": 4},
    ),
    Case(
        "grid.expert_with_context",
        "core_r0.7.0 parallel_state: expert and context parallelism do not combine",
        _mixtral(num_gpus=16, megatron_core_version="0.7.0"),
        {"cp": 2, "ep": 8},
        {"cp": 1},
    ),
    Case("grid.derived_degrees", "own", {}, {"tp": 2, "dp": 64}, {"dp": 32}),
    Case(
        "grid.order_offered",
        "NeMo 1.23 has no key for the rank order",
        {"capabilities": replace(EVERYTHING, orders=("tp-cp-ep-dp-pp",))},
        PP_FIRST,
        {"order": "tp-cp-ep-dp-pp"},
    ),
    Case(
        "grid.order_of_two_grids",
        "mcore: cp2, pp > 1, pp before dp is refused even for a dense model",
        _gpt(),
        {"tp": 8, "pp": 2, "cp": 2} | PP_FIRST,
        {"cp": 1},
    ),
    Case(
        "grid.order_names_axes",
        "core_r0.10.0 initialize: 'tp-pp-dp'",
        {"megatron_core_version": "0.10.0"},
        {"cp": 2} | PP_FIRST,
        {"cp": 1},
    ),
)

BATCH = (
    Case("batch.same_global_batch", "own", {}, {"global_batch": 512}, {"global_batch": 256}),
    Case("batch.global_batch", "launcher falcon_7b: GBS 32, mbs*DP 128", _falcon_7b(), {}, {"pp": 4}),
    Case("batch.rampup_batches", "own", {"rampup_batches": (32, 64, 128)}, {}, {"tp": 2}),
    Case("batch.evaluation_batch", "own", {"evaluation_batch": 32}, {}, {"pp": 2}),
    Case(
        "batch.interleaved_groups",
        "C041: interleaved schedule with 3 micro-batches and 6 stages",
        _llama(36, num_gpus=12, global_batch=6),
        {"pp": 6, "vpp": 2},
        {"vpp": 1},
    ),
)

LAYERS = (
    Case("layers.interleaving", "surface rule 23", {}, {"vpp": 2}, {"pp": 4}),
    Case(
        "layers.two_stage_interleaving",
        "mcore: pp2 vpp2 without p2p overlap trains with a gradient norm of 367 instead of 1.7",
        {},
        {"pp": 2, "vpp": 2},
        {"overlap": Overlap(p2p=True)},
    ),
    Case(
        "layers.stages",
        "C033: recipes with PP8 and 60 layers",
        _llama(60, capabilities=EVEN_ONLY),
        {"pp": 8},
        {"pp": 4},
        frozenset({"layers.split_can_be_written"}),
    ),
    Case(
        "layers.chunks",
        "C034: VPP 12 copied from a 48-layer sibling breaks a 40-layer model",
        _llama(40, num_gpus=16, capabilities=NO_STRING),
        {"pp": 2, "vpp": 12, "overlap": Overlap(p2p=True)},
        {"vpp": 10},
        frozenset({"layers.split_can_be_written"}),
    ),
    Case(
        "layers.chunk_list",
        "own",
        {},
        {"pp": 2, "num_layers_per_chunk": (32,)},
        {"num_layers_per_chunk": (16, 16)},
    ),
    Case(
        "layers.no_layer_lost",
        "C036: 30 layers with PP4 silently builds 28",
        _llama(30),
        {"pp": 4, "num_layers_per_chunk": (7, 7, 7, 7)},
        {"num_layers_per_chunk": (8, 8, 7, 7)},
    ),
    Case(
        "layers.no_empty_chunk",
        "surface rule 21: empty stages only with a layout string",
        {"capabilities": NO_STRING},
        {"pp": 2, "num_layers_per_chunk": (0, 32)},
        {"num_layers_per_chunk": (16, 16)},
        frozenset({"layers.split_can_be_written"}),
    ),
    Case(
        "layers.split_can_be_written",
        "surface rule 19: only the first and the last stage differ",
        {"capabilities": NO_STRING},
        {"pp": 4, "num_layers_per_chunk": (9, 7, 8, 8)},
        {"num_layers_per_chunk": (9, 8, 8, 7)},
    ),
    Case(
        "layers.encoder_decoder",
        "Megatron-LM's pretrain_t5.py: Pipeline parallelism is not supported for T5",
        {"model": llama8b(decoder=DecoderSpec(num_layers=16, sequence_length=512))},
        {"pp": 2},
        {"pp": 1, "num_layers_per_chunk": (32,)},
    ),
)

ATTENTION = (
    Case(
        "attention.heads",
        "mcore: tp64 with 96 heads",
        _gpt(),
        {"tp": 64},
        {"tp": 32},
        frozenset({"attention.query_groups"}),
    ),
    Case(
        "attention.query_groups",
        "C028: 2 KV groups reject TP > 2 before 0.16",
        {"model": llama8b(num_query_groups=2), "num_gpus": 8, "megatron_core_version": "0.15.0"},
        {"tp": 4},
        {"tp": 2},
    ),
    Case(
        "attention.widths",
        "8h/3 = 10922 without rounding",
        {"model": llama8b(ffn_hidden_size=10922)},
        {"tp": 4},
        {"tp": 2},
    ),
    Case(
        "attention.sequence_parallel_needs_tp",
        "launcher mixtral_8x7b: sequence_parallel at TP 1",
        _mixtral(),
        {"pp": 4, "ep": 8, "vpp": 8, "sequence_parallel": True},
        {"sequence_parallel": False},
    ),
    Case(
        "attention.context_parallel",
        "mcore: only Transformer Engine's attention takes cp > 1",
        {"kernels": Kernels(transformer_engine=False)},
        {"cp": 2},
        {"cp": 1},
    ),
    Case(
        "attention.sequence_over_context",
        "surface: CP 3 is invisible to TransformerConfig",
        {"num_gpus": 24, "global_batch": 240},
        {"cp": 3},
        {"cp": 2},
    ),
    Case(
        "attention.sequence_over_tensor",
        "C050: packed length not a multiple of TP with sequence parallelism",
        {"sequence_length": 4098},
        {"tp": 4, "sequence_parallel": True},
        {"sequence_parallel": False},
    ),
    Case("attention.positions", "surface rule 15", _gpt(sequence_length=4096), {"tp": 8}, None),
    Case(
        "attention.latent_attention", "surface rule 10", {"model": deepseek_v2(num_query_groups=8)}, {}, None
    ),
)

MOE = (
    Case("moe.experts_exist", "surface rule 5: EP without experts", {}, {"ep": 2}, {"ep": 1}),
    Case("moe.experts_divide", "surface: EP 16 with 8 experts", _mixtral(), {"ep": 16}, {"ep": 8}),
    Case(
        "moe.experts_need_sequence_parallel",
        "surface rule 6",
        _mixtral(),
        {"tp": 2, "ep": 8},
        {"sequence_parallel": True},
    ),
    Case(
        "moe.expert_width",
        "surface rule 12",
        _mixtral(num_gpus=48, global_batch=96),
        {"ep": 8, "etp": 3},
        {"etp": 2},
    ),
    Case(
        "moe.expert_bias",
        "surface rule 12",
        {"model": mixtral(linear_bias=True)},
        {"tp": 2, "ep": 8, "sequence_parallel": True},
        {"etp": 1},
    ),
    Case(
        "moe.expert_tensor_parallel",
        "C026: TP4 EP4 ETP1 on 4 GPUs where ETP inherits TP",
        _mixtral(num_gpus=4, capabilities=replace(EVERYTHING, expert_tensor_parallel=False)),
        {"tp": 4, "ep": 4, "etp": 1, "sequence_parallel": True},
        {"ep": 1, "etp": 4},
    ),
    Case(
        "moe.expert_gradients",
        "trained: TP2 EP1 ETP1 gives another gradient norm than one process",
        _mixtral(num_gpus=8),
        {"tp": 2, "ep": 1, "etp": 1, "sequence_parallel": True},
        {"ep": 2},
    ),
)

SHARDING = (
    Case(
        "sharding.sharding_offered",
        "C020: ZeRO-2/3 were not in Megatron-LM in 2024",
        {"megatron_core_version": "0.9.0"},
        {"sharding": "optim_grads"},
        {"sharding": "optim"},
    ),
    Case("sharding.instances_offered", "own", {}, {"num_optimizer_instances": 2}, {"sharding": "optim"}),
    Case(
        "sharding.instances_divide",
        "mcore: 3 optimizer instances with dp 8",
        {"num_gpus": 8},
        {"sharding": "optim", "num_optimizer_instances": 3},
        {"num_optimizer_instances": 2},
    ),
    Case(
        "sharding.gradient_sharding_order",
        "surface rule 30",
        {},
        {"sharding": "optim_grads"} | PP_FIRST,
        {"sharding": "optim"},
    ),
)

RECOMPUTE = (
    Case(
        "recompute.method",
        "mcore: full recomputation without method",
        {},
        _recompute(granularity="full", num_layers=1),
        _recompute(granularity="full", method="uniform", num_layers=1),
    ),
    Case(
        "recompute.modules",
        "surface rule 36: moe_act needs a grouped GEMM",
        {},
        _recompute(granularity="selective", modules=("moe_act",)),
        _recompute(granularity="selective", modules=("core_attn",)),
    ),
    Case(
        "recompute.uniform_divides",
        "transformer_block.py 0.16.1 indexes layer 8 of 8",
        {},
        {"pp": 4} | _recompute(granularity="full", method="uniform", num_layers=5),
        _recompute(granularity="full", method="uniform", num_layers=4),
    ),
)

OVERLAP = (
    Case(
        "overlap.param_gather",
        "surface rule 28",
        {},
        {"overlap": Overlap(grad_reduce=True, param_gather=True)},
        {"sharding": "optim"},
    ),
    Case("overlap.p2p", "surface rule 25", {}, {"pp": 4, "overlap": Overlap(p2p=True)}, {"vpp": 2}),
    Case(
        "overlap.tensor_parallel",
        "surface rule 33",
        {},
        {"tp": 2, "overlap": Overlap(tp_comm=True)},
        {"sequence_parallel": True},
    ),
    Case(
        "overlap.expert_all_to_all",
        "surface rule 34: with p > 1 needs VPP",
        _mixtral(),
        {"pp": 4, "ep": 8, "overlap": Overlap(expert_all_to_all=True)},
        {"vpp": 2},
    ),
)

CASES = (*GRID, *BATCH, *LAYERS, *ATTENTION, *MOE, *SHARDING, *RECOMPUTE, *OVERLAP)

_MINIMAL = Capabilities()
NEVER_OFFERED = (
    Case(
        "layers.interleaving",
        "minimal dialect",
        {"capabilities": replace(_MINIMAL, virtual_pipeline=False)},
        {"pp": 4, "vpp": 2},
        {"vpp": 1},
    ),
    Case(
        "attention.context_parallel",
        "minimal dialect",
        {"capabilities": replace(_MINIMAL, context_parallel=False)},
        {"cp": 2},
        {"cp": 1},
    ),
    Case(
        "moe.experts_exist",
        "minimal dialect",
        _mixtral(capabilities=replace(_MINIMAL, expert_parallel=False)),
        {"ep": 8},
        {"ep": 1},
    ),
    Case(
        "sharding.instances_offered",
        "minimal dialect",
        {"capabilities": _MINIMAL},
        {"sharding": "optim", "num_optimizer_instances": 2},
        {"num_optimizer_instances": 1},
    ),
    Case(
        "sharding.sharding_offered",
        "minimal dialect",
        {"capabilities": _MINIMAL},
        {"sharding": "optim_grads_params"},
        {"sharding": "none"},
    ),
    Case(
        "recompute.method",
        "minimal dialect",
        {"capabilities": replace(_MINIMAL, full_recompute=False)},
        _recompute(granularity="full", method="block", num_layers=1),
        _recompute(),
    ),
    Case(
        "recompute.modules",
        "minimal dialect",
        {"capabilities": _MINIMAL},
        _recompute(granularity="selective", modules=("layernorm",)),
        _recompute(),
    ),
    Case(
        "layers.stages",
        "minimal dialect: 2 stages for 1 layer",
        _llama(1, capabilities=_MINIMAL),
        {"pp": 2},
        {"pp": 1},
        frozenset({"layers.no_empty_chunk", "layers.split_can_be_written"}),
    ),
)
