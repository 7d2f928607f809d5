"""Ranks verify node, groups and layers against the plan."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest

from nest_megatron.cluster.rank_groups import groups_of_rank
from nest_megatron.errors import NestError
from nest_megatron.launch.verify import verify_chunks, verify_groups, verify_node
from nest_megatron.specs.plan import Plan


@pytest.fixture
def plan(repository: Path) -> Plan:
    """A plan for 16 ranks on two named nodes, whose map is not Slurm's order."""
    made = Plan.load(repository / "tests" / "golden" / "plan_repaired.json")
    per_node = made.layout.world // 2
    placed = dataclasses.replace(made.rank_map, nodes=("gpu10", "gpu9"), gpus_per_node=per_node)
    return dataclasses.replace(made, rank_map=placed)


def test_a_rank_may_be_on_the_node_of_the_map(plan: Plan) -> None:
    """With a host file, only the map's node is right."""
    last = plan.layout.world - 1
    for rank, node in ((0, "gpu10"), (last, "gpu9")):
        verify_node(plan, rank, {"SLURMD_NODENAME": node, "SLURM_HOSTFILE": "hostfile.ranks"})


def test_with_a_host_file_slurms_own_order_is_refused(plan: Plan) -> None:
    """The host file asks for the map; another node means that it had no effect."""
    with pytest.raises(NestError, match="NEST-L20") as caught:
        verify_node(plan, 0, {"SLURMD_NODENAME": "gpu9", "SLURM_HOSTFILE": "hostfile.ranks"})
    assert {factor.value for factor in caught.value.factors} == {"gpu9", "gpu10"}


def test_without_a_host_file_slurms_own_order_is_fine(plan: Plan) -> None:
    """The plan's predicted time is that of Slurm's order: n9 before n10; a third node is refused."""
    verify_node(plan, 0, {"SLURMD_NODENAME": "gpu9"})
    verify_node(plan, 0, {"SLURMD_NODENAME": "gpu10.example.org"})
    with pytest.raises(NestError, match="NEST-L20"):
        verify_node(plan, 0, {"SLURMD_NODENAME": "gpu11"})


def test_the_host_name_stands_in_for_slurm(plan: Plan) -> None:
    """Outside Slurm the host name counts, without its domain."""
    with pytest.raises(NestError, match="host name"):
        verify_node(plan, 0, {})
    placed = dataclasses.replace(plan.rank_map, nodes=(socket.gethostname(),) * 2)
    verify_node(dataclasses.replace(plan, rank_map=placed), 0, {})


def test_a_plan_without_node_names_binds_no_rank(plan: Plan) -> None:
    """Only the number of the rank is checked then."""
    free = dataclasses.replace(plan, rank_map=dataclasses.replace(plan.rank_map, nodes=()))
    verify_node(free, 0, {"SLURMD_NODENAME": "anywhere"})
    with pytest.raises(NestError, match="NEST-L21"):
        verify_node(free, plan.layout.world, {})


def test_groups_are_compared_as_sets(plan: Plan) -> None:
    """The right groups pass in any order of ranks; one wrong member is named with its group."""
    seen = groups_of_rank(plan.layout, 3)
    verify_groups(plan, 3, {name: ranks[::-1] for name, ranks in seen.items()})
    wrong = seen | {"dp": (*seen["dp"][:-1], seen["dp"][-1] + 1)}
    with pytest.raises(NestError, match="another dp group") as caught:
        verify_groups(plan, 3, wrong)
    assert caught.value.code == "NEST-L22"


def test_layers_are_compared_per_pipeline_rank(plan: Plan) -> None:
    """A rank that holds one layer less than planned is refused."""
    for stage in range(plan.layout.pp):
        layers = plan.layout.num_layers_per_chunk[stage :: plan.layout.pp]
        verify_chunks(plan, stage, layers)
        with pytest.raises(NestError, match="NEST-L23"):
            verify_chunks(plan, stage, (layers[0] - 1, *layers[1:]))
