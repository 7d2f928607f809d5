"""Concrete nodes of a job: Slurm's topology in its written forms, units, orders of names."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path

import numpy as np
import pytest

from nest_megatron.cluster.allocation import (
    allocate,
    in_order,
    make_concrete,
    natural_order,
    string_order,
)
from nest_megatron.cluster.load import load_cluster
from nest_megatron.cluster.readers.slurm import parse_topologies
from nest_megatron.cluster.slots import slot_tree
from nest_megatron.errors import BadInputError, PlannerFault
from nest_megatron.specs.cluster import Cluster, Unit

TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-4]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[5-8]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=n[9-12]
SwitchName=spine1 Level=1 LinkSpeed=1 Nodes=n[1-8] Switches=leaf[1-2]
SwitchName=spine2 Level=1 LinkSpeed=1 Nodes=n[9-12] Switches=leaf3
SwitchName=core Level=2 LinkSpeed=1 Nodes=n[1-12] Switches=spine[1-2]
"""


def written(folder: Path, text: str) -> str:
    """Return the name of a file with this text."""
    path = folder / "topology"
    path.write_text(text, encoding="utf-8")
    return str(path)


def members(cluster: Cluster, level: str) -> dict[str, tuple[str, ...]]:
    """Return unit name -> nodes of one level."""
    return {unit.name: unit.nodes for unit in cluster.units if unit.level == level}


@pytest.mark.parametrize(
    "name", ["scontrol_show_topology_tree.txt", "slurm_topology_tree.conf", "slurm_topology.yaml"]
)
def test_every_form_of_one_tree_gives_the_same_allocation(shared: Path, name: str) -> None:
    """Eight nodes of three leaves, one leaf with one node only; CPU nodes of the file do not matter."""
    topology = str(shared / "data" / "network" / "samples" / name)
    cluster = allocate(load_cluster("dgx-h100-2to1"), nodelist="gpu[016,001-003,009-012]", topology=topology)
    assert cluster.nodes == tuple(f"gpu{i:03d}" for i in (1, 2, 3, 9, 10, 11, 12, 16))
    assert members(cluster, "leaf") == {
        "leaf1": ("gpu001", "gpu002", "gpu003"),
        "leaf3": ("gpu009", "gpu010", "gpu011", "gpu012"),
        "leaf4": ("gpu016",),
    }
    leaf_of_node = slot_tree(cluster).unit_of_slot[1][::8]
    assert np.unique(leaf_of_node, return_counts=True)[1].tolist() == [3, 4, 1]
    assert not cluster.assumptions


@pytest.mark.parametrize(
    "name", ["scontrol_show_topology_block.txt", "slurm_topology_block.conf", "slurm_topology.yaml"]
)
def test_every_form_of_blocks_names_the_nvlink_domains(shared: Path, name: str) -> None:
    """Blocks are domains where a domain spans nodes; an aggregated block is a unit of the next level."""
    topology = str(shared / "data" / "network" / "samples" / name)
    cluster = allocate(load_cluster("gb200-nvl72"), nodelist="nvl[0030-0036,0001-0018]", topology=topology)
    domains = members(cluster, "nvlink")
    assert {name: len(nodes) for name, nodes in domains.items()} == {"rack01": 18, "rack02": 7}
    (leaf,) = members(cluster, "leaf").values()
    assert set(leaf) == set(cluster.nodes)


def test_blocks_are_leaves_where_a_domain_is_one_node(tmp_path: Path) -> None:
    """On nodes with their own NVLink domain, blocks group nodes like leaf switches do."""
    text = "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2\n"
    cluster = allocate(load_cluster("dgx-h100"), nodelist="n[1-4]", topology=written(tmp_path, text))
    assert members(cluster, "leaf") == {"b1": ("n1", "n2"), "b2": ("n3", "n4")}


def test_an_incomplete_larger_block_leaves_its_blocks_alone() -> None:
    """Slurm aggregates consecutive blocks only when all of them exist; the third block stands alone."""
    text = "".join(f"BlockName=b{i} Nodes=n{i}\n" for i in (1, 2, 3)) + "BlockSizes=1,2\n"
    (topology,) = parse_topologies(text, where="text")
    assert [[group.name for group in tier] for tier in topology.tiers] == [["b1", "b2", "b3"], ["b1+b2"]]


def test_a_tier_without_a_level_is_said(tmp_path: Path) -> None:
    """A cluster of leaves and one spine cannot price two spines apart, and the plan says so."""
    cluster = allocate(load_cluster("dgx-h100"), nodelist="n[1-12]", topology=written(tmp_path, TREE))
    assert list(members(cluster, "leaf")) == ["leaf1", "leaf2", "leaf3"]
    (said,) = cluster.assumptions
    assert "tier 2 splits the nodes into 2 groups" in said
    alone = allocate(load_cluster("dgx-h100"), nodelist="n[1-8]", topology=written(tmp_path, TREE))
    assert not alone.assumptions


def test_upper_tiers_become_upper_levels(tmp_path: Path) -> None:
    """With a level for it, a spine switch is a unit; units stay nested."""
    base = load_cluster("dgx-h100")
    pod = dataclasses.replace(base.levels[1], name="pod", gpus=1024)
    cluster = dataclasses.replace(base, levels=(*base.levels[:2], pod, base.levels[2]))
    found = allocate(cluster, nodelist="n[1-12]", topology=written(tmp_path, TREE))
    assert {name: len(nodes) for name, nodes in members(found, "pod").items()} == {"spine1": 8, "spine2": 4}


def test_a_node_below_several_leaves_is_grouped_with_its_like(tmp_path: Path) -> None:
    """One NIC per rail: nodes below the same set of leaf switches are one unit."""
    text = "".join(f"SwitchName=r{i} Nodes=n[1-2]\n" for i in (1, 2))
    text += "".join(f"SwitchName=s{i} Nodes=n[3-4]\n" for i in (1, 2))
    text += "SwitchName=top Switches=r[1-2],s[1-2]\n"
    cluster = allocate(load_cluster("dgx-h100"), nodelist="n[1-4]", topology=written(tmp_path, text))
    assert members(cluster, "leaf") == {"r1+r2": ("n1", "n2"), "s1+s2": ("n3", "n4")}


def test_prefixes_comments_and_key_case_do_not_matter() -> None:
    """Lines that `srun --label` printed, and the spelling that topology.conf allows."""
    text = "# tree\n0: switchname=a nodes=n1,n2 # two\n0: SWITCHNAME=b Nodes=n3\nSwitchName=t Switches=a,b\n"
    (topology,) = parse_topologies(text, where="text")
    assert [[(g.name, g.nodes) for g in tier] for tier in topology.tiers] == [
        [("a", ("n1", "n2")), ("b", ("n3",))],
        [("t", ("n1", "n2", "n3"))],
    ]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """``-`` reads what `scontrol show topology` is piped into the command."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(TREE))
    cluster = allocate(load_cluster("dgx-h100"), nodelist="n[1-2,5]", topology="-")
    assert {name: len(nodes) for name, nodes in members(cluster, "leaf").items()} == {"leaf1": 2, "leaf2": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no switch and no block"),
        ("No topology information available", "no switch and no block"),
        ("SwitchName=a Nodes=n[1-2", "SLURM_TOPO_LEN"),
        ("SwitchName=a Switches=b\n", "child that is not described"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", "below itself"),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", "described twice"),
        ("BlockName=a Nodes=n1\nBlockSizes=x\n", "block sizes"),
        ("AggregatedBlock=a Nodes=n1\nBlockName=b Nodes=n1\n", "without BlockSize"),
        ("- topology: t\n  ring: {}\n", "rings and tori"),
        ("- topology: t\n  tree: {switches: []}\n", "switches must be a list"),
        ("- topology: t\n  tree: {switches: [{nodes: n1}]}\n", "needs a switch"),
        ("- topology: t\n  tree: {}\n  block: {}\n", "one kind"),
        ("- topology: [t\n", "not readable YAML"),
    ],
)
def test_what_cannot_be_read_is_bad_input(text: str, said: str) -> None:
    """Every defect of a topology is one sentence that says what is wrong."""
    with pytest.raises(BadInputError, match=said):
        parse_topologies(text, where="text")


def test_unknown_nodes_are_named_with_the_nearest(tmp_path: Path) -> None:
    """A node list that the topology does not cover is refused, not guessed."""
    with pytest.raises(BadInputError, match="not known") as caught:
        allocate(load_cluster("dgx-h100"), nodelist="n11,nn12", topology=written(tmp_path, TREE))
    assert caught.value.factors[0].value == "nn12"
    assert caught.value.nearest[0] == "n12"


def test_a_topology_needs_nodes(tmp_path: Path) -> None:
    """A topology file lists the whole site, so the nodes of the job must be said."""
    with pytest.raises(BadInputError, match="needs the nodes of the job"):
        allocate(load_cluster("dgx-h100"), topology=written(tmp_path, TREE))


def test_units_of_the_cluster_file_keep_their_uplink(tmp_path: Path) -> None:
    """A degraded leaf is said in the cluster file; the topology places the other nodes."""
    base = load_cluster("dgx-h100")
    nodes = tuple(f"n{i}" for i in range(1, 13))
    slow = Unit(level="leaf", name="slow", nodes=nodes[4:8], uplink_bytes_per_s=12.5e9)
    site = dataclasses.replace(base, nodes=nodes, num_nodes=12, units=(slow,))
    cluster = allocate(site, nodelist="n[3-6]", topology=written(tmp_path, TREE))
    assert members(cluster, "leaf") == {"slow": ("n5", "n6"), "leaf1": ("n3", "n4")}
    share = slot_tree(cluster).uplink_share[1]
    assert share[slot_tree(cluster).unit_of_slot[1][-1]] == pytest.approx(0.25)


def test_a_node_list_picks_from_the_site_file() -> None:
    """Without a topology the file's own units, named or packed by position, hold the nodes they held."""
    base = load_cluster("dgx-h100")
    leaf = dataclasses.replace(base.levels[1], gpus=16)
    site = dataclasses.replace(
        base, nodes=("b2", "a1", "a2", "b1"), num_nodes=4, levels=(base.levels[0], leaf, base.levels[2])
    )
    cluster = allocate(site, nodelist="a[1-2],b1")
    assert cluster.nodes == ("a1", "a2", "b1")
    assert sorted(members(cluster, "leaf").values()) == [("a1",), ("a2", "b1")]
    with pytest.raises(BadInputError, match="not known"):
        allocate(site, nodelist="a3")


def test_without_a_topology_names_fill_the_units_and_that_is_said() -> None:
    """Names alone say nothing about switches."""
    cluster = allocate(load_cluster("dgx-h100"), nodelist="n[2,10,1]")
    assert cluster.nodes == ("n1", "n2", "n10")
    assert "no topology was given" in cluster.assumptions[0]


def test_spare_nodes_are_said(tmp_path: Path) -> None:
    """A job smaller than its node list takes the first nodes, and a larger one is refused."""
    given = {"nodelist": "n[1-12]", "topology": written(tmp_path, TREE)}
    cluster = allocate(load_cluster("dgx-h100"), num_gpus=48, **given)
    assert cluster.nodes == tuple(f"n{i}" for i in range(1, 7))
    assert any("uses 6 of the 12 listed nodes" in said for said in cluster.assumptions)
    assert {name: len(nodes) for name, nodes in members(cluster, "leaf").items()} == {"leaf1": 4, "leaf2": 2}
    with pytest.raises(BadInputError, match="more than the named nodes hold"):
        allocate(load_cluster("dgx-h100"), num_gpus=128, **given)


def test_a_cluster_without_names_is_left_alone() -> None:
    """No name is invented."""
    cluster = load_cluster("dgx-h100", num_gpus=64)
    assert allocate(cluster) is cluster


def test_domains_of_several_nodes_stay_below_their_switch(tmp_path: Path) -> None:
    """A switch tree does not know NVLink domains: they are packed below each leaf, and that is said."""
    cluster = allocate(load_cluster("gb200-nvl72"), nodelist="n[1-3,5-6]", topology=written(tmp_path, TREE))
    assert members(cluster, "nvlink") == {"leaf1/0": ("n1", "n2", "n3"), "leaf2/0": ("n5", "n6")}
    assert "does not say which nodes share a domain" in cluster.assumptions[0]


def test_orders_of_names() -> None:
    """Slurm orders numbers by value, torchrun's rendezvous the whole name as text (network.md case 1)."""
    names = ["node7", "node66", "node8", "node70"]
    assert natural_order(names) == ("node7", "node8", "node66", "node70")
    assert string_order(names) == ("node66", "node7", "node70", "node8")
    assert natural_order(["r10-n1", "r2-n11", "r2-n2"]) == ("r2-n2", "r2-n11", "r10-n1")


def test_the_order_of_nodes_moves_ranks_and_not_nodes() -> None:
    """Permuting ``nodes`` of a concrete cluster permutes the unit tables the same way."""
    base = load_cluster("dgx-h100")
    leaf = dataclasses.replace(base.levels[1], gpus=16)
    named = dataclasses.replace(
        base, nodes=tuple("abcd"), num_nodes=4, levels=(base.levels[0], leaf, base.levels[2])
    )
    cluster = make_concrete(named)
    assert (
        slot_tree(cluster).unit_of_slot[1][::8].tolist()
        != slot_tree(in_order(cluster, "acbd")).unit_of_slot[1][::8].tolist()
    )
    units = {node: unit.name for unit in cluster.units for node in unit.nodes}
    assert units["a"] == units["b"] != units["c"] == units["d"]
    with pytest.raises(PlannerFault):
        in_order(cluster, "aacd")
