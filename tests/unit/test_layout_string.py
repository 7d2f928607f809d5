"""Layout strings: written text reads back, megatron-core reads the same, hostile text is refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron.dialects.layout_string import Segment, parse, write
from nest_megatron.errors import BadInputError

#: Layouts of megatron-core's documentation and of Megatron-LM's test cases.
PUBLISHED = (
    "Et*2|(tt|)*5t|tmL",
    "Et*12|(t*12|)*6t*12L",
    "Et*3|(tt|)*29,m|L",
    "E|(tt|)*2,(t|)*4,mL",
    "Et*7|t*7mL",
    "Et*3|(tt|)*6L",
    "Et*3|(tt|)*6mL",
    "Et|(tt|)*6mL",
    "Ettt|(tt|)*29,m|L",
    "EttL",
    "E|t|L",
    "Et||t|L",
)
HOSTILE = (
    "",
    "tt",
    "E",
    "L",
    "EL|",
    "|EtL",
    "EtL|t",
    "EtLL",
    "EEtL",
    "EmtL",
    "Em|mL",
    "Etx|L",
    "Et*|L",
    "Et**2|L",
    "E(t|L",
    "E(t|)*L",
    "E((t)*2)*2L",
    "E()*3L",
    "Et*99999999999999999999L",
    "E(tttttttttt)*999999999L",
    "Et*-1L",
    "Et*٣L",
    "E" + "t" * 300_000 + "L",
    "E t|L",
    "${LAYOUT}",
)

counts = st.lists(st.integers(0, 30), min_size=1, max_size=64)


@given(counts.map(tuple), st.integers(0, 3))
@settings(deadline=None)
def test_a_written_layout_reads_back(chunks: tuple[int, ...], mtp: int) -> None:
    """Whatever chunks are written, reading the text gives them again, with the ends at the ends."""
    segments = parse(write(chunks, mtp))
    assert tuple(segment.num_layers for segment in segments) == chunks
    assert [segment.mtp for segment in segments] == [0] * (len(chunks) - 1) + [mtp]
    assert (segments[0].embedding, segments[-1].loss) == (True, True)


@given(st.integers(1, 30), st.integers(3, 500))
@settings(deadline=None)
def test_equal_chunks_make_a_short_text(layers: int, chunks: int) -> None:
    """The text of an even pipeline does not grow with its number of chunks."""
    assert len(write((layers,) * chunks)) <= len(write((layers,) * 4)) + 2


def test_segments_of_a_published_layout() -> None:
    """DeepSeek-V3's proxy of Megatron-LM has eight chunks, its prediction layer on the last."""
    assert parse("Et*2|(tt|)*5t|tmL") == (
        Segment(2, embedding=True),
        *[Segment(2)] * 5,
        Segment(1),
        Segment(1, 1, loss=True),
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_refused(text: str) -> None:
    """Text that is no layout gives one sentence with a code, at once, and never a traceback."""
    with pytest.raises(BadInputError) as caught:
        parse(text)
    assert caught.value.code == "NEST-M20"


@given(st.text(alphabet="EtmL|()*,0123456789 -", max_size=40))
@settings(deadline=None, max_examples=300)
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text over the layout alphabet raises anything but a refusal."""
    try:
        segments = parse(text)
    except BadInputError:
        return
    assert segments[0].embedding and segments[-1].loss


@pytest.mark.parametrize("chunks", [(), (1, -1)])
def test_chunks_that_cannot_be_written(chunks: tuple[int, ...]) -> None:
    """No chunk, and a negative count, are refused."""
    with pytest.raises(BadInputError):
        write(chunks)


def test_agreement_with_megatron_core() -> None:
    """megatron-core reads the same layers per chunk from published and from 300 seeded random texts."""
    layer_layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    rng = random.Random(8)
    texts = [*PUBLISHED]
    for _ in range(300):
        parts = [
            rng.choice(["t", "tt", f"t*{rng.randint(1, 9)}", f"({'t' * rng.randint(0, 3)}|)*3", "|", ","])
            for _ in range(rng.randint(0, 8))
        ]
        texts.append(f"E{''.join(parts)}{rng.choice(['', 'm', 'm*2', '|m'])}L")
        chunks = tuple(rng.randint(0, 5) for _ in range(rng.randint(1, 12)))
        texts.append(write(chunks, rng.randint(0, 2)))
    for text in texts:
        theirs = layer_layout.PipelineParallelLayerLayout.parse_str_to_list(text)
        names = [[layer.name for layer in segment] for segment in theirs]
        ours = parse(text)
        assert [segment.num_layers for segment in ours] == [row.count("decoder") for row in names], text
        assert [segment.mtp for segment in ours] == [row.count("mtp") for row in names], text
        built = layer_layout.PipelineParallelLayerLayout(text, len(ours))
        built.validate_layer_layout(sum(s.num_layers for s in ours), sum(s.mtp for s in ours))


@given(st.text(alphabet="EtmL|()*23", max_size=14))
@settings(deadline=None, max_examples=200)
def test_what_we_read_megatron_core_reads_the_same(text: str) -> None:
    """On any text that both accept, both find the same layers; we accept nothing that it refuses."""
    layer_layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    try:
        ours = parse(text)
    except BadInputError:
        return
    theirs = layer_layout.PipelineParallelLayerLayout.parse_str_to_list(text)
    assert [s.num_layers for s in ours] == [[x.name for x in row].count("decoder") for row in theirs]
