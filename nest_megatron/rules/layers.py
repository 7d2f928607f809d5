"""The pipeline: interleaving, and which layer counts per chunk can be written without losing a layer."""

from __future__ import annotations

from typing import Literal

from nest_megatron.errors import Factor
from nest_megatron.rules.base import Broken, asked, derived, given, rule, version
from nest_megatron.rules.versions import VersionFacts
from nest_megatron.specs.job import TrainJob
from nest_megatron.specs.layout import Layout

#: How a framework is told the layer counts: nothing to say; embedding or loss each take a layer's slot;
#: first and last stage given; a full layout string.
SplitForm = Literal["even", "account", "ends", "string"]

_BLOCK = "megatron/core/transformer/transformer_block.py: get_num_layers_to_build"


def split_form(job: TrainJob, layout: Layout, facts: VersionFacts) -> SplitForm | None:
    """Return the simplest form that writes the layer counts of ``layout``, None when there is none.

    The counts must have length pp * vpp (chunk j runs on pipeline rank j % pp).

    Source: megatron-core transformer_block.py get_num_layers_to_build: ``account`` builds one layer less in
    the first or last chunk, ``ends`` gives every chunk of a stage one count, and the middle stages the same.
    """
    counts, can = layout.num_layers_per_chunk, job.capabilities
    middle = counts[1] if len(counts) > 2 else max(counts)
    if _is_account(counts, middle):
        if counts[0] == middle == counts[-1]:
            return "even"
        if can.account_embedding_and_loss and facts.account_embedding_and_loss:
            return "account"
    if can.uneven_ends and facts.uneven_ends and _is_ends(counts, layout.pp):
        return "ends"
    return "string" if can.layout_string and facts.layout_string else None


def _is_account(counts: tuple[int, ...], middle: int) -> bool:
    """Return whether all chunks hold ``middle`` layers, the first and the last possibly one less."""
    last = len(counts) - 1
    for j in range(1, last):
        if counts[j] != middle:
            return False
    return middle - 1 <= counts[0] <= middle and middle - 1 <= counts[last] <= middle


def _is_ends(counts: tuple[int, ...], pp: int) -> bool:
    """Return whether only the first and the last stage differ, each with equal chunks and none empty."""
    for j in range(len(counts)):
        stage = j % pp
        like = counts[1] if 0 < stage < pp - 1 else counts[stage]
        if counts[j] != like:
            return False
    # megatron-core reads zero layers of an end as "not given", and refuses middle stages without any.
    return pp > 1 and min(counts) > 0


@rule("NEST-RL01", "pp", "vpp", source="megatron/core/parallel_state.py: initialize_model_parallel")
def interleaving(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Interleaving needs a pipeline and a dialect that has it."""
    if layout.vpp == 1:
        return None
    if not job.capabilities.virtual_pipeline:
        return Broken(f"{job.dialect} cannot interleave a pipeline", asked(job, layout, "vpp"))
    if layout.pp > 1:
        return None
    return Broken("interleaving (vpp > 1) needs pp > 1", asked(job, layout, "vpp", "pp"))


@rule(
    "NEST-RL02",
    "pp",
    "vpp",
    "overlap",
    source="megatron/training/arguments.py: validate_args; megatron-core itself trains silently wrong",
)
def two_stage_interleaving(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Interleaving on two stages needs p2p overlap: both neighbours are the same rank."""
    if layout.pp != 2 or layout.vpp == 1 or (layout.overlap.p2p and facts.two_stage_interleaving):
        return None
    cure = "without p2p overlap" if facts.two_stage_interleaving else "in this version"
    return Broken(
        f"interleaving on pp = 2 {cure} mixes up the messages of the two stages",
        (
            version(facts),
            *asked(job, layout, "pp", "vpp"),
            Factor("overlap.p2p", layout.overlap.p2p, asked(job, layout, "overlap")[0].origin),
        ),
    )


@rule("NEST-RL03", "pp", source=f"{_BLOCK}; older releases drop the remainder silently")
def stages(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The layers can be dealt to pp stages in a form the dialect can write, none lost."""
    num_layers = job.model.num_layers
    if num_layers % layout.pp == 0 or _splits(job, facts, layout.pp, 1):
        return None
    return Broken(
        f"{num_layers} layers cannot be dealt to {layout.pp} pipeline stages",
        (given(job, "num_layers", num_layers), *asked(job, layout, "pp"), *_forms(job, facts)),
    )


@rule("NEST-RL04", "pp", "vpp", source=_BLOCK)
def chunks(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The layers can be dealt to pp * vpp chunks in a form the dialect can write, none lost."""
    num_layers = job.model.num_layers
    if layout.vpp == 1 or num_layers % (layout.pp * layout.vpp) == 0:
        return None
    if _splits(job, facts, layout.pp, layout.vpp):
        return None
    return Broken(
        f"{num_layers} layers cannot be dealt to {layout.pp} stages of {layout.vpp} chunks",
        (given(job, "num_layers", num_layers), *asked(job, layout, "pp", "vpp"), *_forms(job, facts)),
    )


def _splits(job: TrainJob, facts: VersionFacts, pp: int, vpp: int) -> bool:
    """Return whether some uneven form deals the layers to ``pp * vpp`` chunks of at least one layer."""
    num_layers, can, pieces = job.model.num_layers, job.capabilities, pp * vpp
    if can.layout_string and facts.layout_string:
        return True
    if num_layers < pieces:
        return False
    if can.uneven_ends and facts.uneven_ends and num_layers % vpp == 0:
        return True
    account = can.account_embedding_and_loss and facts.account_embedding_and_loss
    return account and ((num_layers + 1) % pieces == 0 or (num_layers + 2) % pieces == 0)


def _forms(job: TrainJob, facts: VersionFacts) -> tuple[Factor, ...]:
    """Return the version, and the forms that write uneven layer counts in this dialect."""
    forms = [
        name
        for name in ("uneven_ends", "account_embedding_and_loss", "layout_string")
        if getattr(job.capabilities, name) and getattr(facts, name)
    ]
    return version(facts), Factor("uneven layer splits", "+".join(forms) or "none", job.dialect)


@rule("NEST-RL05", "pp", "vpp", "layers", source="own: one layer count per chunk")
def chunk_list(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """There is one layer count per chunk."""
    if len(layout.num_layers_per_chunk) == layout.pp * layout.vpp:
        return None
    return Broken(
        f"{len(layout.num_layers_per_chunk)} layer counts for pp*vpp = {layout.pp * layout.vpp} chunks",
        asked(job, layout, "layers", "pp", "vpp"),
    )


@rule("NEST-RL06", "layers", source="own: several releases build fewer layers without an error")
def no_layer_lost(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The chunks hold every layer of the model exactly once."""
    total = sum(layout.num_layers_per_chunk)
    if total == job.model.num_layers:
        return None
    return Broken(
        f"the chunks hold {total} layers, the model has {job.model.num_layers}",
        (given(job, "num_layers", job.model.num_layers), *asked(job, layout, "layers")),
    )


@rule("NEST-RL07", "layers", source=f"{_BLOCK}; empty chunks only in pipeline_model_parallel_layout")
def no_empty_chunk(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """Every chunk holds a layer; only a layout string can leave one empty."""
    least = 0 if job.capabilities.layout_string and facts.layout_string else 1
    for count in layout.num_layers_per_chunk:
        if count < least:
            return Broken(
                f"a chunk holds {count} layers, the least is {least}",
                (*asked(job, layout, "layers"), *_forms(job, facts)),
            )
    return None


@rule("NEST-RL08", "pp", "vpp", "layers", source=f"{_BLOCK}; transformer_config.py: __post_init__")
def split_can_be_written(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """The layer counts have a form that this dialect and version can write."""
    counts = layout.num_layers_per_chunk
    if len(counts) != layout.pp * layout.vpp or split_form(job, layout, facts) is not None:
        return None
    return Broken(
        "this split of the layers cannot be written in this dialect and version",
        (*asked(job, layout, "layers", "pp", "vpp"), *_forms(job, facts)),
    )


@rule("NEST-RL09", "pp", source="pretrain_t5.py: Pipeline parallelism is not supported for T5")
def encoder_decoder(job: TrainJob, layout: Layout, facts: VersionFacts) -> Broken | None:
    """An encoder-decoder model trains without a pipeline."""
    decoder = job.model.decoder
    if decoder is None or layout.pp == 1:
        return None
    return Broken(
        "an encoder-decoder model (T5) is planned without a pipeline only, as Megatron-LM trains it",
        (derived("decoder layers", decoder.num_layers), *asked(job, layout, "pp")),
    )
