"""Safe reading: interpolations, types, circles, hostile configurations, data files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nest_megatron.dialects.access import ConfigView
from nest_megatron.dialects.nemo import NemoDialect
from nest_megatron.dialects.nemo_layout import AXIS_KEYS
from nest_megatron.dialects.profiles import load_profile, profile_names
from nest_megatron.dialects.vocabulary import assumed_vocab_size, known_vocab_size
from nest_megatron.errors import BadInputError
from nest_megatron.specs.settings import PlanSettings
from tests.unit.nemo_files import GPT_24, MIXTRAL, load


def view(**content: object) -> ConfigView:
    """Return a view of a small configuration."""
    return ConfigView(OmegaConf.create(content))


def test_references_and_arithmetic_are_evaluated() -> None:
    """Absolute, relative and nested interpolations give numbers; text around one gives text."""
    config = view(
        a={"x": 3, "y": "${.x}", "z": "${multiply:${.x},${b.w}}", "up": "${..b.w}"},
        b={"w": 5, "s": "${sum:${.w},-1}", "name": "n${.w}"},
        c="${a}",
        item="${list[1]}",
        list=[7, 8],
    )
    values = [config.value(key) for key in ("a.y", "a.z", "a.up", "b.s", "b.name", "c.z", "item")]
    assert values == [3, 15, 5, 4, "n5", 15, 8]


def test_resolvers_of_the_application_are_used_when_registered() -> None:
    """A resolver that NEST does not know is taken from OmegaConf, and named when it is not there."""
    config = view(n="${nest_test_double:4}")
    with pytest.raises(BadInputError, match="nest_test_double"):
        config.value("n")
    OmegaConf.register_new_resolver("nest_test_double", lambda x: 2 * x)
    try:
        assert config.value("n") == 8
    finally:
        OmegaConf.clear_resolver("nest_test_double")


def test_environment_defaults_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """``oc.env`` reads the environment, or its default, as text (OmegaConf's own rule)."""
    monkeypatch.setenv("NEST_TEST_NODES", "4")
    assert view(a="${oc.env:NEST_TEST_NODES}").value("a") == "4"
    assert view(a="${oc.env:NEST_TEST_ABSENT,7}").value("a") == "7"


@pytest.mark.parametrize(
    "content",
    [
        {"a": "${b}", "b": "${a}"},
        {"a": "${a}"},
        {"a": "${multiply:${a},2}"},
        {"a": "${b.x}", "b": "${c}", "c": "${b}"},
        {"a": "${absent}"},
        {"a": "${multiply:${b},2}", "b": "???"},
        {"a": "${multiply:x,1000000000}"},
        {"a": "${divide_floor:1,0}"},
        {"a": "${divide_floor:1}"},
        {f"a{i}" if i else "a": f"${{a{i + 1}}}" for i in range(500)} | {"a500": 1},
        {f"a{i}" if i else "a": f"${{a{i + 1}}}${{a{i + 1}}}" for i in range(35)} | {"a35": 1},
    ],
)
def test_circles_and_nonsense_are_one_sentence(content: dict[str, object]) -> None:
    """Circles, unknown targets, wrong arguments, long chains and doubling chains end in BadInputError."""
    with pytest.raises(BadInputError, match=r"NEST-D0[45]"):
        view(**content).value("a")


def test_types_are_strict() -> None:
    """Text is not a number, a boolean is not an integer, and bounds hold."""
    config = view(
        text="8", flag=True, negative=-1, huge=2**60, half=0.5, nan=float("nan"), null=None, missing="???"
    )
    for key in ("text", "flag", "negative", "huge", "half"):
        with pytest.raises(BadInputError, match=f"{key} must be"):
            config.integer(key)
    for key in ("text", "negative"):
        with pytest.raises(BadInputError, match=key):
            config.flag(key)
    with pytest.raises(BadInputError, match="nan"):
        config.number("nan")
    assert view(on=1, off=0).flag("on") and not view(on=1, off=0).flag("off", True)
    assert config.integer("null") is None and config.integer("missing") is None
    with pytest.raises(BadInputError, match="NEST-D02"):
        config.required_integer("missing")


NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=8).filter(lambda text: "${" not in text),
    st.sampled_from(
        [
            "???",
            "${model}",
            "${.hidden_size}",
            "${nowhere}",
            "${multiply:${model.optim},2}",
            "${trainer.devices}",
        ]
    ),
    st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(st.sampled_from(["a", "name"]), st.integers(), max_size=2),
)
KEYS = sorted(
    {key for names in AXIS_KEYS.values() for key in names}
    | {
        "model",
        "trainer",
        "exp_manager",
        "model.optim",
        "model.tokenizer",
        "model.tokenizer.library",
        "model.tokenizer.model",
        "model.num_layers",
        "model.hidden_size",
        "model.num_attention_heads",
        "model.num_query_groups",
        "model.num_moe_experts",
        "model.moe_layer_freq",
        "model.moe_router_topk",
        "model.activation",
        "model.normalization",
        "model.encoder_seq_length",
        "model.global_batch_size",
        "model.rampup_batch_size",
        "model.hidden_dropout",
        "model.megatron_amp_O2",
        "model.precision",
        "model.optim.grad_sync_dtype",
        "model.data",
        "trainer.num_nodes",
        "trainer.devices",
        "trainer.precision",
        "trainer.limit_val_batches",
        "exp_manager.explicit_log_dir",
        "name",
    }
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([GPT_24, MIXTRAL]),
    changes=st.dictionaries(st.sampled_from(KEYS), NASTY, min_size=1, max_size=3),
    version=st.sampled_from([None, "1.23", "2.3"]),
)
def test_hostile_values_never_give_a_traceback(
    shared: Path, name: str, changes: dict[str, object], version: str | None
) -> None:
    """Any value at any key gives a job or a BadInputError, and writing back what was read changes nothing."""
    plain = OmegaConf.to_container(load(shared, name), resolve=False)
    for key, value in changes.items():
        node = plain
        *parents, leaf = key.split(".")
        for part in parents:
            node = node[part] if isinstance(node, dict) and isinstance(node.get(part), dict) else {}
        node[leaf] = value
    config = OmegaConf.create(plain)
    dialect = NemoDialect()
    try:
        dialect.detect(config)
        job = dialect.read(config, overrides=(), settings=PlanSettings(framework_version=version))
        edits = dialect.write(config, job, job.user_layout)
    except BadInputError as error:
        assert error.code.startswith("NEST-D")
        return
    assert set(edits) <= {"model.overlap_p2p_comm", "model.batch_p2p_comm"}


def test_every_profile_loads_with_a_source_per_number() -> None:
    """Each shipped profile has its own name, shares in [0, 1] and a source for each number."""
    assert {"nemo", "megatron-core", "megatron-deepspeed"} <= set(profile_names())
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name
        shares = [
            getattr(profile if hasattr(profile, key) else profile.time, key)
            for key in profile.sources
            if key.endswith("_share")
        ]
        assert shares and all(0 <= share <= 1 for share in shares)
        assert profile.device_factor >= 1 and profile.device_fixed_bytes > 2**30
        assert len(profile.sources) >= 10 and all(profile.sources.values())


def test_an_unknown_profile_names_the_nearest() -> None:
    """A typing error in a profile name is answered with the nearest one."""
    with pytest.raises(BadInputError, match="megatron-core"):
        load_profile("megatron_core")


@pytest.mark.parametrize(
    ("library", "name", "size"),
    [
        ("megatron", "GPT2BPETokenizer", 50257),
        ("huggingface", "meta-llama/Meta-Llama-3-70B", 128256),
        ("huggingface", "meta-llama/Meta-Llama-3.1-8B", 128256),
        ("huggingface", "mistralai/Mixtral-8x7B-v0.1", 32000),
        ("huggingface", "mistralai/Mistral-Nemo-Base-2407", 131072),
        ("sentencepiece", "llama_tokenizer.model", 32000),
    ],
)
def test_public_tokenizers_have_their_published_size(library: str, name: str, size: int) -> None:
    """The table gives the vocabulary that the model cards print."""
    assert known_vocab_size(library, name) == size


def test_unknown_tokenizers_are_not_guessed() -> None:
    """An unknown name gives None; what is assumed instead is at least as large as the smallest public one."""
    assert known_vocab_size("huggingface", "acme/unknown") is None
    assert assumed_vocab_size("acme").vocab_size == max(
        assumed_vocab_size(library).vocab_size for library in ("megatron", "sentencepiece", "huggingface")
    )
