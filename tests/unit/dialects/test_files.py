"""Loading one YAML file: what is accepted, what is refused, and what could not be seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nest_megatron.dialects.files import load_config
from nest_megatron.errors import BadInputError


def load(folder: Path, text: str) -> tuple[object, tuple[str, ...]]:
    """Write a file and load it."""
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    config, assumptions = load_config(path)
    return OmegaConf.to_container(config, resolve=False), assumptions


def test_interpolations_and_missing_values_are_kept_unresolved(tmp_path: Path) -> None:
    """The file is read as it is: ``${...}`` of unknown resolvers and ``???`` stay."""
    plain, assumptions = load(tmp_path, "a: ${multiply:2,3}\nb: ???\nc: ${a}\n")
    assert plain == {"a": "${multiply:2,3}", "b": "???", "c": "${a}"}
    assert assumptions == ()


@pytest.mark.parametrize(
    "defaults",
    [
        "[_self_]",
        "[]",
        "[_self_, {optional tp_overlap@model.ub_tp_comm_overlap_cfg: null}]",
        "[{optional model: small}]",
        "[{override hydra/launcher: submitit}, _self_]",
        "[{data: null}]",
    ],
)
def test_a_defaults_list_that_brings_nothing_is_dropped_silently(tmp_path: Path, defaults: str) -> None:
    """Self, optional, hydra and empty entries bring no value of the task, so nothing is assumed."""
    plain, assumptions = load(tmp_path, f"defaults: {defaults}\na: 1\n")
    assert (plain, assumptions) == ({"a": 1}, ())


@pytest.mark.parametrize(
    ("defaults", "named"),
    [
        ("[_self_, {model: llama}, base]", ("model=llama", "base")),
        ("base.yaml", ("base.yaml",)),
        ("[{override /model: llama}]", ("/model=llama",)),
    ],
)
def test_a_defaults_list_with_values_is_named_as_an_assumption(
    tmp_path: Path, defaults: str, named: tuple[str, ...]
) -> None:
    """Values that a composition would bring are not seen, and the sentence says which entries bring them."""
    _, assumptions = load(tmp_path, f"defaults: {defaults}\na: 1\n")
    assert len(assumptions) == 1
    assert all(name in assumptions[0] for name in named)


def test_defaults_that_are_a_section_stay(tmp_path: Path) -> None:
    """A mapping named ``defaults`` is an ordinary key of the user's configuration."""
    assert load(tmp_path, "defaults: {lr: 1}\n") == ({"defaults": {"lr": 1}}, ())


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "NEST-I11"),
        ("# only a comment\n", "NEST-I11"),
        ("- 1\n- 2\n", "NEST-I11"),
        ("just words\n", "NEST-I11"),
        ("{}", "NEST-I11"),
        ("a: [1\n", "NEST-I10"),
        ("a: 1\na: 2\n", "NEST-I10"),
        ("a: ${\n", "NEST-I10"),
        ("a: !!python/object:os.system {}\n", "NEST-I10"),
        ("a: 1\n---\nb: 2\n", "NEST-I10"),
        ("a: &x [*x]\n", "NEST-I10"),
        ("a: 2001-99-99\n? [1]\n: 2\n", "NEST-I10"),
        ("a: " + "[" * 3000 + "]" * 3000, "NEST-I10"),
    ],
)
def test_a_file_that_is_no_configuration_is_bad_input(tmp_path: Path, text: str, code: str) -> None:
    """Empty, broken, duplicate, cyclic, hostile and bottomless YAML is refused with the file's name."""
    with pytest.raises(BadInputError) as caught:
        load(tmp_path, text)
    assert caught.value.code == code
    assert "job.yaml" in caught.value.message


def test_a_file_that_cannot_be_read_is_bad_input(tmp_path: Path) -> None:
    """An absent file, a folder and bytes that are not UTF-8 give a sentence, not a traceback."""
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: \xff\xfe\n")
    for path in (tmp_path / "absent.yaml", tmp_path, binary):
        with pytest.raises(BadInputError, match="cannot read"):
            load_config(path)


def test_the_files_of_a_real_launcher_load(shared: Path) -> None:
    """Every configuration of the NeMo 1 examples loads, or is refused as bad input."""
    files = sorted((shared / "data" / "configs" / "nemo-1.23").rglob("*.yaml"))
    assert files
    for path in files:
        config, _ = load_config(path)
        assert "defaults" not in config
