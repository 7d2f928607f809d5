"""Overrides on a loaded configuration, against what Hydra itself composes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.errors import HydraException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nest_megatron.dialects.overrides import apply_overrides
from nest_megatron.errors import BadInputError

CONFIG = """
trainer: {devices: 8, num_nodes: 2}
model:
  tensor_model_parallel_size: 4
  layers: [1, 2]
  chunks: null
  seq: ???
  tokens: ${trainer.devices}
  optim: {name: adam, lr: 1.0e-4}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that real Hydra can compose from."""
    folder = tmp_path_factory.mktemp("hydra")
    (folder / "job.yaml").write_text(CONFIG, encoding="utf-8")
    return folder


def compose(folder: Path, overrides: list[str]) -> Any:
    """Return what Hydra makes of the overrides; None when it refuses."""
    with hydra.initialize_config_dir(str(folder), version_base=None):
        try:
            return OmegaConf.to_container(hydra.compose("job", overrides=overrides), resolve=False)
        except HydraException:
            return None


def ours(overrides: list[str]) -> Any:
    """Return what we make of the overrides; None when we refuse."""
    try:
        return OmegaConf.to_container(apply_overrides(OmegaConf.create(CONFIG), overrides), resolve=False)
    except BadInputError:
        return None


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.tensor_model_parallel_size=8", "trainer.num_nodes=4"],
        ["trainer.num_nodes=4", "trainer.num_nodes=8"],
        ["+model.moe.num_experts=8", "model.moe.num_experts=16"],
        ["++model.seq=4096", "~model.layers"],
        ["+model.seq=4096"],
        ["+model.chunks=2"],
        ["~model.optim.name=adam"],
        ["model.layers=[3,4,5]", "model.layers.0=9"],
        ["model.optim={lr:2.0}", "+model.optim={betas:[0.9,0.95]}"],
        ["model.tokens=${trainer.num_nodes}"],
        ["model.optim.name='a b'", "model.optim.lr=1e-5", "model.chunks=true"],
        ["model.optim=null"],
    ],
)
def test_accepted_overrides_give_what_hydra_composes(folder: Path, overrides: list[str]) -> None:
    """An accepted override leaves the same configuration as the real Hydra, types included."""
    expected = compose(folder, overrides)
    assert expected is not None
    assert ours(overrides) == expected


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("model.tensor_model_parallel=8", "NEST-I13"),
        ("~model.absent", "NEST-I13"),
        ("+trainer.devices=4", "NEST-I14"),
        ("~trainer.devices=4", "NEST-I14"),
        ("trainer.devices=1,2", "NEST-I14"),
        ("trainer@x=y", "NEST-I14"),
        ("trainer/devices=y", "NEST-I14"),
        ("model.layers.9=1", "NEST-I14"),
        ("trainer.devices", "NEST-I12"),
        ("trainer.devices=int(four)", "NEST-I12"),
        ("", "NEST-I12"),
        ("=1", "NEST-I12"),
        ("trainer..devices=1", "NEST-I12"),
    ],
)
def test_a_refused_override_is_no_single_run_of_hydra_either(folder: Path, override: str, code: str) -> None:
    """What is refused here names its reason by code, and Hydra composes no single run from it either."""
    with pytest.raises(BadInputError) as caught:
        apply_overrides(OmegaConf.create(CONFIG), [override])
    assert caught.value.code == code
    if override not in ("", "=1"):  # Hydra's compose drops an empty string and accepts an empty key
        assert compose(folder, [override]) is None


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    """A misspelt key is answered with the key that was meant, and with how to add a new one."""
    for key in ("model.tensor_model_paralel_size", "tensor_model_parallel_size"):
        with pytest.raises(BadInputError) as caught:
            apply_overrides(OmegaConf.create(CONFIG), [f"{key}=8"])
        assert caught.value.nearest[0] == "model.tensor_model_parallel_size"
        assert caught.value.nearest[-1] == f"+{key}=8 adds it"


def test_a_group_choice_is_refused_instead_of_replacing_the_section() -> None:
    """``model=llama`` on one file would silently throw the model away, so it is refused."""
    with pytest.raises(BadInputError, match="whole section"):
        apply_overrides(OmegaConf.create(CONFIG), ["model=llama"])


def test_the_input_is_left_alone() -> None:
    """The caller's configuration keeps its values and its flags."""
    config = OmegaConf.create(CONFIG)
    result = apply_overrides(config, ["trainer.devices=4"])
    assert (config.trainer.devices, result.trainer.devices) == (8, 4)
    assert not OmegaConf.is_struct(config)
    assert not OmegaConf.is_struct(result)


_SIGNS = ("", "+", "++", "~")
_KEYS = ("trainer.devices", "model.layers", "model.chunks", "model.seq", "model.new", "model.optim.new.x")
_VALUES = ("1", "null", "abc", "[1,2]", "{a:1}", "1.5", "true", "'1'", "${trainer.devices}", "")
_PARTS = st.tuples(st.sampled_from(_SIGNS), st.sampled_from(_KEYS), st.sampled_from(_VALUES))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_PARTS, max_size=3))
def test_any_mix_of_overrides_agrees_with_hydra(folder: Path, parts: list[tuple[str, str, str]]) -> None:
    """Every mix of set, add, force and delete gives Hydra's result, or both refuse."""
    overrides = [f"{sign}{key}" if sign == "~" else f"{sign}{key}={value}" for sign, key, value in parts]
    expected, got = compose(folder, overrides), ours(overrides)
    if expected is None and got is not None:
        # The documented difference: Hydra cannot delete a key whose value is null or missing.
        assert any(text.startswith("~") for text in overrides)
    elif got is None and expected is not None:
        # The documented difference: a scalar over a mapping is a group choice here.
        assert any(value == "{a:1}" for _, _, value in parts)
    else:
        assert got == expected
