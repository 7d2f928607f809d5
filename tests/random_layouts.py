"""Seeded random jobs and layouts around the border of legality."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from nest_megatron.rules.nearest import layer_shapes
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout, Overlap, Recompute
from tests.builders import (
    EVERYTHING,
    deepseek_v2,
    gpt175b,
    llama8b,
    llama70b,
    make_job,
    make_layout,
    mixtral,
)

_MODELS = (
    llama8b(),
    llama70b(),
    gpt175b(),
    mixtral(),
    deepseek_v2(),
    llama8b(name="odd", num_layers=30, num_attention_heads=24, num_query_groups=3, ffn_hidden_size=1536),
    mixtral(name="biased", linear_bias=True, gated_mlp=False),
)
_WORLDS = (8, 12, 16, 24, 32, 48, 64, 128)
_DIALECTS = (
    EVERYTHING,
    EVERYTHING,
    replace(EVERYTHING, layout_string=False),
    replace(EVERYTHING, layout_string=False, uneven_ends=False),
    replace(EVERYTHING, layout_string=False, uneven_ends=False, account_embedding_and_loss=False),
)


def random_case(rng: random.Random, version: str = "0.16.1") -> tuple[TrainJob, Layout]:
    """Return a random job with a plausible layout, changed in up to three axes."""
    job = make_job(
        megatron_core_version=version,
        model=rng.choice(_MODELS),
        num_gpus=rng.choice(_WORLDS),
        global_batch=rng.choice((192, 384, 768, 720)),
        sequence_length=rng.choice((2048, 2048, 4096, 2056)),
        capabilities=rng.choice(_DIALECTS),
        rampup_batches=rng.choice(((), (), (96, 192))),
        evaluation_batch=rng.choice((None, 96)),
    )
    layout = _plausible(job, rng)
    for _ in range(rng.choice((0, 1, 1, 3))):
        layout = _mutated(job, layout, rng)
    return job, layout


def _plausible(job: TrainJob, rng: random.Random) -> Layout:
    """Return a layout whose degrees fit together most of the time."""
    moe = job.model.moe
    tp = _divisor(rng, job.num_gpus, (1, 2, 4, 8))
    pp = _divisor(rng, job.num_gpus // tp, (1, 2, 2, 3, 4, 8))
    cp = _divisor(rng, job.num_gpus // (tp * pp), (1, 1, 2))
    vpp = rng.choice((1, 2, 3)) if pp > 1 else 1
    overlap = Overlap(
        grad_reduce=True,
        param_gather=rng.random() < 0.5,
        p2p=vpp > 1,
        tp_comm=tp > 1 and rng.random() < 0.3,
        expert_all_to_all=False,
    )
    layout = make_layout(
        job,
        tp=tp,
        pp=pp,
        cp=cp,
        vpp=vpp,
        ep=rng.choice((1, 2, 4)) if moe else 1,
        etp=rng.choice((1, tp)),
        sequence_parallel=tp > 1 and (moe is not None or rng.random() < 0.8),
        sharding=rng.choice(("optim", "optim_grads")),
        overlap=overlap,
        micro_batch=rng.choice((1, 1, 2)),
    )
    shapes = layer_shapes(job.model.num_layers, pp, vpp)
    return replace(layout, num_layers_per_chunk=rng.choice(shapes)) if shapes else layout


def _divisor(rng: random.Random, number: int, choices: tuple[int, ...]) -> int:
    return rng.choice([choice for choice in choices if number % choice == 0])


def _mutated(job: TrainJob, layout: Layout, rng: random.Random) -> Layout:
    """Change one axis without regard to the others; dp and edp follow."""
    counts = layout.num_layers_per_chunk or (job.model.num_layers,)
    shifted = (counts[0] + 1, *counts[1:-1], counts[-1] - 1) if len(counts) > 1 else counts
    changes: list[dict[str, Any]] = [
        {"tp": rng.choice((1, 2, 3, 4, 6, 8, 16))},
        {"pp": rng.choice((1, 2, 3, 4, 5, 8))},
        {"vpp": rng.choice((1, 2, 3, 5))},
        {"cp": rng.choice((1, 2, 3, 4))},
        {"ep": rng.choice((1, 2, 3, 8, 16))},
        {"etp": rng.choice((1, 2, 3, 4))},
        {"micro_batch": rng.choice((1, 2, 3, 7))},
        {"sequence_parallel": not layout.sequence_parallel},
        {"order": "tp-cp-ep-pp-dp"},
        {"num_optimizer_instances": rng.choice((2, 3, 4))},
        {"sharding": rng.choice(("none", "optim", "optim_grads_params"))},
        {"num_layers_per_chunk": rng.choice((shifted, counts[:-1], (*counts[:-1], counts[-1] + 1)))},
        {"num_layers_per_chunk": (*counts[:-1], 0)},
        {"recompute": _random_recompute(rng)},
        {"overlap": _flipped(layout.overlap, rng)},
        {"overlap": replace(layout.overlap, expert_all_to_all=True)},
        {"global_batch": layout.global_batch + rng.choice((0, 1))},
    ]
    changed = replace(layout, **rng.choice(changes))
    if rng.random() < 0.05:
        return changed
    return replace(
        changed,
        dp=job.num_gpus // (changed.tp * changed.pp * changed.cp),
        edp=job.num_gpus // (changed.etp * changed.ep * changed.pp),
    )


def _random_recompute(rng: random.Random) -> Recompute:
    return rng.choice(
        (
            Recompute(granularity="full", method="uniform", num_layers=rng.choice((0, 1, 2, 5))),
            Recompute(granularity="full", method="block", num_layers=rng.choice((0, 1, 4))),
            Recompute(granularity="full", num_layers=1),
            Recompute(granularity="selective", modules=("core_attn",), num_layers=rng.choice((0, 1))),
            Recompute(
                granularity="selective", modules=(rng.choice(("moe_act", "mla_up_proj", "attn", "moe")),)
            ),
            Recompute(granularity="selective", method="uniform", modules=("core_attn",)),
            Recompute(granularity="selective"),
        )
    )


def _flipped(overlap: Overlap, rng: random.Random) -> Overlap:
    name = rng.choice(("grad_reduce", "param_gather", "tp_comm", "p2p"))
    return replace(overlap, **{name: not getattr(overlap, name)})
