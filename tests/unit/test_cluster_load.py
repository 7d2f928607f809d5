from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron.cluster.hosts import expand_hosts
from nest_megatron.cluster.load import (
    DEFAULT_CLUSTER,
    load_accelerator,
    load_cluster,
    shipped_accelerators,
    shipped_clusters,
)
from nest_megatron.errors import BadInputError
from nest_megatron.specs.cluster import Cluster

GOOD = """\
accelerator: h100-sxm-80gb
gpus_per_node: 8
num_nodes: 8
levels:
  - {name: nvlink, gpus: 8, bandwidth_GB_per_s_per_gpu: 450, efficiency: 0.81, latency_us: 2.7}
  - {name: leaf, gpus: 32, bandwidth_GB_per_s_per_gpu: 50, efficiency: 0.96, latency_us: 5}
  - {name: spine, gpus: 64, bandwidth_GB_per_s_per_gpu: 25, efficiency: 0.95, latency_us: 8}
"""
NAMED = GOOD.replace("num_nodes: 8", "nodes: ['gpu[001-004]', 'gpu[007,009-011]']")


def load(tmp_path: Path, text: str, *, num_gpus: int | None = None) -> Cluster:
    """Load ``text`` as a cluster file."""
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(path, num_gpus=num_gpus)


@pytest.mark.parametrize("name", shipped_clusters())
def test_every_shipped_cluster_loads_at_every_size(name: str) -> None:
    """From one node to 16,384 GPUs the number of GPUs is exact and the outermost level holds them all."""
    for exponent in range(3, 15):
        cluster = load_cluster(name, num_gpus=2**exponent)
        assert cluster.num_gpus == 2**exponent
        assert cluster.levels[-1].gpus >= cluster.num_gpus
        assert cluster.name == name


@pytest.mark.parametrize("name", [name for name in shipped_clusters() if name.endswith("-2to1")])
def test_two_to_one_files_differ_from_their_base_in_the_outermost_rate_only(name: str) -> None:
    """``<name>-2to1`` is the same machine with half the bandwidth above the leaves."""
    half, full = load_cluster(name), load_cluster(name.removesuffix("-2to1"))
    assert half.levels[:-1] == full.levels[:-1]
    assert 2 * half.levels[-1].bandwidth_bytes_per_s == full.levels[-1].bandwidth_bytes_per_s
    for field in ("accelerator", "gpus_per_node", "num_nodes", "nvls", "busbw_by_group_size_bytes_per_s"):
        assert getattr(half, field) == getattr(full, field)


def test_paper_clusters_keep_the_capacity_of_a_subtree() -> None:
    """A node of 8 and a rack of 32 reach the published 100 / 400 and 12.5 / 50 GB/s (nest_paper.md 2.1)."""
    for name, capacities in (("paper-tpuv4-fat-tree", (100, 400)), ("paper-h100-spine-leaf", (12.5, 50))):
        node, rack, core = load_cluster(name).levels
        assert (node.gpus, rack.gpus) == (8, 32)
        assert node.bandwidth_bytes_per_s == 900e9
        assert rack.bandwidth_bytes_per_s * node.gpus == capacities[0] * 1e9
        assert core.bandwidth_bytes_per_s * rack.gpus == capacities[1] * 1e9


@pytest.mark.parametrize("name", shipped_accelerators())
def test_every_accelerator_is_complete(name: str) -> None:
    """Peaks and efficiencies name the same dtypes, and a peak in FLOP/s is not one in TFLOP/s."""
    accelerator = load_accelerator(name)
    assert set(accelerator.peak_flops_per_s) == set(accelerator.gemm_efficiency)
    assert accelerator.peak_flops_per_s
    core = accelerator.generation == "cpu"
    slowest = 1e10 if core else 1e13
    assert all(
        slowest < peak < 1e16 or dtype == "fp4" for dtype, peak in accelerator.peak_flops_per_s.items()
    )
    assert accelerator.peak_flops_per_s.get("fp4", 0) < 3e16
    assert (1e9 if core else 1e11) < accelerator.hbm_bytes_per_s < 1e13
    assert 2**33 < accelerator.visible_bytes < 2**39
    assert accelerator.peak_flops_per_s.get("fp8", 0) != accelerator.peak_flops_per_s.get("bf16")


def test_accelerators_agree_with_the_data_sheet_table(shared: Path) -> None:
    """Peak, memory and HBM rate are those of accelerators.json, the rates of the fit where it names them."""
    table = json.loads((shared / "data/network/accelerators.json").read_text())["accelerators"]
    rows = {row["name"].lower().replace("sxm2", "sxm"): row for row in table}
    compared = 0
    for name in shipped_accelerators():
        stem = name.rpartition("-")[0]
        row = rows.get(name) or rows.get(stem)
        if row is None:
            continue
        compared += 1
        accelerator = load_accelerator(name)
        peak = row.get("bf16_dense_used_in_fit") or row["bf16_dense"] or row["fp16_dense"]
        dtype = "bf16" if row["bf16_dense"] else "fp16"
        assert accelerator.peak_flops_per_s[dtype] == peak * 1e12
        assert accelerator.hbm_bytes_per_s == (row.get("hbm_tbs_used_in_fit") or row["hbm_tbs"]) * 1e12
        assert accelerator.visible_bytes == round(row["visible_gib"] * 2**30)
    assert compared >= 12


def test_default_cluster_is_stated() -> None:
    """Without a name the default loads, and the first assumption says which."""
    cluster = load_cluster(None)
    assert cluster.name == DEFAULT_CLUSTER
    assert DEFAULT_CLUSTER in cluster.assumptions[0]
    assert load_cluster(DEFAULT_CLUSTER).assumptions == ()


def test_file_is_read_in_si_units(tmp_path: Path) -> None:
    """GB/s become bytes/s and microseconds seconds; the example of the cluster-file format loads."""
    cluster = load(tmp_path, GOOD)
    leaf = cluster.levels[1]
    assert (cluster.name, cluster.num_gpus) == ("mine", 64)
    assert (leaf.bandwidth_bytes_per_s, leaf.latency_s) == (50e9, pytest.approx(5e-6))
    assert leaf.usable_bytes_per_s == pytest.approx(48e9)
    assert (cluster.rails, cluster.nvls, cluster.nics_per_node) == (True, False, None)


def test_options_are_read(tmp_path: Path) -> None:
    """Every optional key reaches its field, in SI units."""
    cluster = load(
        tmp_path,
        NAMED
        + "nics_per_node: 4\nrails: false\npxn: false\nnvls: true\ntorus: [4, 4, 4]\n"
        + "busbw_by_group_size: {8: 313, 2: 47.7}\nscenarios: [{leaf: 0.5}, {spine: 0.25, leaf: 1}]\n"
        + "units:\n  - {level: leaf, name: a, nodes: 'gpu[001-003]', uplink_GB_per_s_per_gpu: 12.5}\n",
    )
    assert cluster.nodes == ("gpu001", "gpu002", "gpu003", "gpu004", "gpu007", "gpu009", "gpu010", "gpu011")
    assert (cluster.nics_per_node, cluster.rails, cluster.pxn) == (4, False, False)
    assert (cluster.nvls, cluster.torus) == (True, (4, 4, 4))
    assert cluster.busbw_by_group_size_bytes_per_s == {2: 47.7e9, 8: 313e9}
    assert cluster.scenarios == ({"leaf": 0.5}, {"spine": 0.25, "leaf": 1.0})
    assert cluster.units[0].nodes == ("gpu001", "gpu002", "gpu003")
    assert cluster.units[0].uplink_bytes_per_s == 12.5e9
    assert cluster.assumptions == ()


def test_base_is_replaced_key_by_key(tmp_path: Path) -> None:
    """A file with a base keeps what it does not say, and may name nodes instead of their number."""
    cluster = load(tmp_path, "base: dgx-h200\nnodes: 'n[0-3]'\n")
    assert cluster.accelerator.name == "h200-sxm-141gb"
    assert (cluster.num_nodes, cluster.levels) == (4, load_cluster("dgx-h200").levels)


def test_fewer_gpus_than_one_node() -> None:
    """Three GPUs are one node of three, and that is stated."""
    cluster = load_cluster("dgx-h100", num_gpus=3)
    assert (cluster.num_nodes, cluster.gpus_per_node) == (1, 3)
    assert "3 GPUs" in cluster.assumptions[0]


def test_more_gpus_than_the_outermost_level(tmp_path: Path) -> None:
    """The outermost level grows to whole units of the level below, and that is stated."""
    cluster = load(tmp_path, GOOD, num_gpus=72)
    assert (cluster.num_gpus, cluster.levels[-1].gpus) == (72, 96)
    assert "spine" in cluster.assumptions[0]


def test_named_nodes_shrink_but_are_not_invented(tmp_path: Path) -> None:
    """With real names a smaller job keeps the first nodes and their units; a larger one is refused."""
    text = NAMED + "units: [{level: leaf, name: a, nodes: 'gpu[002,011]'}]\n"
    cluster = load(tmp_path, text.replace("gpu[002,011]", "gpu[002,003]"), num_gpus=16)
    assert cluster.nodes == ("gpu001", "gpu002")
    assert cluster.units[0].nodes == ("gpu002",)
    with pytest.raises(BadInputError, match="num_gpus=128"):
        load(tmp_path, NAMED, num_gpus=128)


@pytest.mark.parametrize("num_gpus", [12, 0, -8, 10**12, True, 8.0])
def test_impossible_sizes(num_gpus: int) -> None:
    """Sizes that are no whole number of nodes are refused with both neighbours, nonsense with the range."""
    with pytest.raises(BadInputError, match="num_gpus") as error:
        load_cluster("dgx-h100", num_gpus=num_gpus)
    assert error.value.nearest == (("8", "16") if num_gpus == 12 else ())


def test_unknown_names_offer_the_nearest() -> None:
    """A misspelled cluster or accelerator is answered with the close ones."""
    with pytest.raises(BadInputError) as cluster:
        load_cluster("dgx-h10")
    assert "dgx-h100" in cluster.value.nearest
    with pytest.raises(BadInputError) as accelerator:
        load_accelerator("h100")
    assert "h100-sxm-80gb" in accelerator.value.nearest


HOSTILE = [
    pytest.param("", "mapping", id="empty"),
    pytest.param("- 1\n- 2\n", "mapping", id="list"),
    pytest.param("42", "mapping", id="number"),
    pytest.param("{a: [", "YAML", id="cut off"),
    pytest.param("a: b: c", "YAML", id="two colons"),
    pytest.param("\tx: 1", "YAML", id="tab"),
    pytest.param("x: !!python/object/apply:os.system [ls]", "YAML", id="code"),
    pytest.param("x: 2026-13-45", "YAML", id="impossible date"),
    pytest.param("x: " + "9" * 5000, "YAML", id="endless number"),
    pytest.param("x: " + "[" * 3000, "YAML", id="deep nesting"),
    pytest.param("? [1, 2]\n: 3", "YAML", id="list as key"),
    pytest.param("1: 2", "no text", id="number as key"),
    pytest.param("x: \x00", "YAML", id="NUL byte"),
    pytest.param(GOOD + "gpus_per_node: 4\n", "gpus_per_node", id="key twice"),
    pytest.param(GOOD + "nodez: [a]\n", "nodez", id="unknown key"),
    pytest.param(GOOD.replace("gpus_per_node: 8\n", ""), "gpus_per_node", id="missing key"),
    pytest.param(GOOD.replace("num_nodes: 8\n", ""), "num_nodes", id="no nodes"),
    pytest.param(GOOD + "nodes: [a]\n", "num_nodes", id="nodes twice"),
    pytest.param(GOOD.replace("num_nodes: 8", "num_nodes: 0"), "num_nodes", id="no node"),
    pytest.param(GOOD.replace("num_nodes: 8", "num_nodes: yes"), "num_nodes", id="bool for a number"),
    pytest.param(GOOD.replace("num_nodes: 8", "num_nodes: 1.5"), "num_nodes", id="half a node"),
    pytest.param(GOOD.replace("num_nodes: 8", f"num_nodes: {10**30}"), "num_nodes", id="huge"),
    pytest.param(GOOD.replace("num_nodes: 8", "num_nodes: 9"), "spine.gpus", id="more GPUs than the levels"),
    pytest.param(GOOD.replace("h100-sxm-80gb", "h100-sxm"), "h100-sxm", id="unknown accelerator"),
    pytest.param(GOOD.replace("h100-sxm-80gb", "[1]"), "accelerator", id="accelerator no text"),
    pytest.param(
        GOOD.replace("h100-sxm-80gb", "../cluster/dgx-h100"), "accelerator", id="path as accelerator"
    ),
    pytest.param(
        GOOD.replace("gpus_per_node: 8", "gpus_per_node: 6"), "gpus_per_node", id="node cuts domain"
    ),
    pytest.param(GOOD.partition("levels:")[0] + "levels: []\n", "levels", id="no level"),
    pytest.param(GOOD.partition("levels:")[0] + "levels: {a: 1}\n", "levels", id="levels no list"),
    pytest.param(GOOD.partition("levels:")[0] + "levels: [1]\n", "levels", id="level no mapping"),
    pytest.param(GOOD.replace("gpus: 32", "gpus: 8"), "gpus", id="level not larger"),
    pytest.param(GOOD.replace("gpus: 32", "gpus: 20"), "gpus", id="level no multiple"),
    pytest.param(GOOD.replace("name: leaf", "name: spine"), "name", id="level name twice"),
    pytest.param(GOOD.replace(": 450", ": .nan"), "bandwidth_GB_per_s_per_gpu", id="NaN"),
    pytest.param(GOOD.replace(": 450", ": .inf"), "bandwidth_GB_per_s_per_gpu", id="infinite"),
    pytest.param(GOOD.replace(": 450", ": -450"), "bandwidth_GB_per_s_per_gpu", id="negative"),
    pytest.param(GOOD.replace(": 450", ": 0"), "bandwidth_GB_per_s_per_gpu", id="zero"),
    pytest.param(GOOD.replace(": 450", ": '450'"), "bandwidth_GB_per_s_per_gpu", id="text for a number"),
    pytest.param(GOOD.replace(": 450", ": 450GB"), "bandwidth_GB_per_s_per_gpu", id="unit in the value"),
    pytest.param(
        GOOD.replace("bandwidth_GB_per_s_per_gpu: 450", "bandwidth: 450"), "bandwidth", id="old key"
    ),
    pytest.param(GOOD.replace("0.81", "1.2"), "efficiency", id="efficiency above one"),
    pytest.param(GOOD.replace("latency_us: 5", "latency_us: -1"), "latency_us", id="negative latency"),
    pytest.param(GOOD + "nics_per_node: 0\n", "nics_per_node", id="no NIC"),
    pytest.param(GOOD + "nvls: 1\n", "nvls", id="number for a flag"),
    pytest.param(GOOD + "torus: [4, 4]\n", "torus", id="torus of no level"),
    pytest.param(GOOD + "torus: [a]\n", "torus", id="torus of text"),
    pytest.param(GOOD + "busbw_by_group_size: {1: 3}\n", "busbw_by_group_size", id="table of one member"),
    pytest.param(GOOD + "busbw_by_group_size: {2: .nan}\n", "busbw_by_group_size", id="NaN in the table"),
    pytest.param(GOOD + "busbw_by_group_size: [2]\n", "busbw_by_group_size", id="table no mapping"),
    pytest.param(GOOD + "scenarios: [{leef: 0.5}]\n", "leef", id="scenario of no level"),
    pytest.param(GOOD + "scenarios: [{leaf: 0}]\n", "leaf", id="scenario without bandwidth"),
    pytest.param(GOOD + "units: []\n", "nodes", id="units without names"),
    pytest.param(NAMED + "units: [{level: leef, name: a, nodes: [gpu001]}]\n", "leef", id="unit of no level"),
    pytest.param(NAMED + "units: [{level: leaf, name: a, nodes: [gpu01]}]\n", "gpu01", id="unknown node"),
    pytest.param(NAMED + "units: [{level: leaf, name: a}]\n", "nodes", id="unit without nodes"),
    pytest.param(
        NAMED + "units: [{level: leaf, name: a, nodes: [gpu001]}, {level: leaf, name: b, nodes: [gpu001]}]\n",
        "gpu001",
        id="node in two units",
    ),
    pytest.param(
        NAMED + "units: [{level: spine, name: a, nodes: [gpu001], uplink_GB_per_s_per_gpu: 1}]\n",
        "uplink_GB_per_s_per_gpu",
        id="uplink of the top",
    ),
    pytest.param(NAMED.replace("[001-004]", "[001-004"), "nodes", id="bracket open"),
    pytest.param(NAMED.replace("[001-004]", "[004-001]"), "nodes", id="range backwards"),
    pytest.param(NAMED.replace("[001-004]", "[1-999999999]"), "nodes", id="a billion hosts"),
    pytest.param(NAMED.replace("[001-004]", "[001-007]"), "gpu007", id="host twice"),
    pytest.param(NAMED.replace("'gpu[001-004]'", "17"), "nodes", id="host no text"),
    pytest.param("base: dgx-h10\n", "dgx-h10", id="unknown base"),
    pytest.param("base: dgx-h100-2to1\n", "base", id="base with a base"),
    pytest.param("base: [dgx-h100]\n", "base", id="base no text"),
]


@pytest.mark.parametrize(("text", "key"), HOSTILE)
def test_hostile_files_name_the_offending_key(tmp_path: Path, text: str, key: str) -> None:
    """Broken files end in one BadInputError that names what is wrong, in a text of bounded length."""
    with pytest.raises(BadInputError) as error:
        load(tmp_path, text)
    assert key in str(error.value)
    assert len(str(error.value)) < 2000
    assert error.value.exit_code == 2


def test_unreadable_files(tmp_path: Path) -> None:
    """A folder, a missing file, bytes that are not UTF-8 and a NUL in the name are bad input."""
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for source in (tmp_path, tmp_path / "none.yaml", binary, "a\x00b", "", str(tmp_path / "none")):
        with pytest.raises(BadInputError):
            load_cluster(source)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_value_at_any_key_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Replacing any value by junk gives a cluster or a BadInputError, never another exception."""
    plain = yaml.safe_load(
        NAMED + "units: [{level: leaf, name: a, nodes: [gpu001]}]\ntorus: [64]\nnvls: true\n"
    )
    junk = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    )
    target = data.draw(st.sampled_from([plain, *plain["levels"], *plain["units"]]))
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(junk)
    path = tmp_path_factory.getbasetemp() / "junk.yaml"
    path.write_text(yaml.safe_dump(plain, allow_unicode=True), encoding="utf-8")
    try:
        assert isinstance(load_cluster(path), Cluster)
    except BadInputError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("expression", "hosts"),
    [
        ("gpu[001-003,009]", ("gpu001", "gpu002", "gpu003", "gpu009")),
        ("gpu[9-11]", ("gpu9", "gpu10", "gpu11")),
        ("r[1-2]n[01-02]", ("r1n01", "r1n02", "r2n01", "r2n02")),
        ("a, b[1],c.example.org", ("a", "b1", "c.example.org")),
        (["n2", "n10", "n1"], ("n2", "n10", "n1")),
    ],
)
def test_slurm_brackets(expression: object, hosts: tuple[str, ...]) -> None:
    """Brackets expand as Slurm's hostlist does: padding kept, last bracket fastest, file order kept."""
    assert expand_hosts(expression, where="test") == hosts
