"""``nest-megatron replan``: what a change does to a running plan, and what cannot be asked."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nest_megatron import rules
from nest_megatron.cli import main
from nest_megatron.cluster.changes import Changes, degrade, read_changes
from nest_megatron.cluster.load import load_cluster, resize
from nest_megatron.errors import EXIT_BAD_INPUT, EXIT_NO_PLAN, EXIT_OK, BadInputError, NoPlanError
from nest_megatron.launch.hostfile import NODES_NAME, RANKS_NAME
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.planner.freedom import CHECKPOINT_AXES
from nest_megatron.planner.replan import Site, bound_by_checkpoint, replan
from nest_megatron.planner.search import search
from nest_megatron.rules.base import FIELDS
from nest_megatron.specs.cluster import Cluster
from nest_megatron.specs.job import CheckpointState, TrainJob
from nest_megatron.specs.layout import Layout
from nest_megatron.specs.plan import Plan
from tests import builders

#: Two leaves of four nodes, and a spine slow enough that a degraded leaf matters.
CLUSTER = """\
base: dgx-h100
levels:
  - {name: nvlink, gpus: 8, bandwidth_GB_per_s_per_gpu: 450, efficiency: 0.813, latency_us: 2.7}
  - {name: leaf, gpus: 32, bandwidth_GB_per_s_per_gpu: 50, efficiency: 0.96, latency_us: 3.0}
  - {name: spine, gpus: 1024, bandwidth_GB_per_s_per_gpu: 25, efficiency: 0.95, latency_us: 4.0}
"""
TOPOLOGY = "SwitchName=east Nodes=n[1-4]\nSwitchName=west Nodes=n[5-8]\nSwitchName=top Switches=east,west\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """The plan of Llama 3 8B on eight named nodes below two leaves, made once."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "cluster.yaml").write_text(CLUSTER)
    (folder / "topology").write_text(TOPOLOGY)
    return plan_of(folder, repository, "--nodelist", "n[1-8]", "--topology", str(folder / "topology"))


@pytest.fixture
def planned(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the plan, in a folder of its own."""
    monkeypatch.setenv("COLUMNS", "160")
    return Path(shutil.copy(made, tmp_path))


def plan_of(folder: Path, repository: Path, *options: str, nodes: int = 8) -> Path:
    """Plan the shipped Llama 3 8B and return the plan's file."""
    out = folder / "plan.json"
    config = repository / "scripts" / "conf" / "megatron_llama3_8b.yaml"
    cluster = ["--cluster", str(folder / "cluster.yaml"), *options]
    command = ["plan", "--config", str(config), *cluster, "--json", str(out), f"trainer.num_nodes={nodes}"]
    assert main(command) == EXIT_OK
    return out


def again(planned: Path, *options: str, name: str = "new.json") -> Plan:
    """Replan and return the new plan."""
    out = planned.with_name(name)
    assert main(["replan", "--plan", str(planned), "--json", str(out), *options]) == EXIT_OK
    return Plan.load(out)


def test_without_a_change_nothing_changes(planned: Path) -> None:
    """The same cluster gives the same layout, time, map and edits."""
    old, new = Plan.load(planned), again(planned)
    assert new.outcome == "kept"
    assert new.layout == old.layout
    assert new.prediction == old.prediction
    assert new.rank_map.nodes == old.rank_map.nodes
    assert new.edits == old.edits


def test_a_lost_node_leaves_a_legal_plan_without_it(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new layout runs on fewer nodes, the host files lie beside the plan, the size is said."""
    old = Plan.load(planned)
    new = again(planned, "--changed", "lost=n3")
    text = capsys.readouterr().out
    assert new.layout.world < old.layout.world
    assert "n3" not in new.rank_map.nodes
    assert len(new.rank_map.nodes) * 8 == new.layout.world
    assert planned.with_name(NODES_NAME).read_text().split() == list(new.rank_map.nodes)
    assert len(planned.with_name(RANKS_NAME).read_text().split()) == new.layout.world
    assert f"start the job on {new.layout.world}" in text
    assert "lost: n3" in text


def test_a_spare_node_takes_the_place_of_a_lost_one(planned: Path) -> None:
    """With another node list of the same length the layout stays and the map names the new node."""
    new = again(planned, "--changed", "nodes=n[1-2,4-9]", f"topology={_wider(planned)}")
    assert new.layout == Plan.load(planned).layout
    assert set(new.rank_map.nodes) == {f"n{i}" for i in (1, 2, 4, 5, 6, 7, 8, 9)}


def _wider(planned: Path) -> Path:
    path = planned.with_name("wider")
    path.write_text(TOPOLOGY.replace("n[5-8]", "n[5-9]"))
    return path


def test_changes_add_up(planned: Path) -> None:
    """A second replan starts from the first one's nodes and degraded links."""
    again(planned, "--changed", "lost=n3", "degraded=west:0.5", name="first.json")
    request = Plan.load(planned.with_name("first.json")).provenance["request"]
    assert request["degraded"] == [["west", 0.5]]
    second = again(planned.with_name("first.json"), "--changed", "lost=n5", name="second.json")
    assert not {"n3", "n5"} & set(second.rank_map.nodes)
    assert "degraded: west at 0.5 of its bandwidth" in second.assumptions


def test_a_requeue_recomputes_the_map_only(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --keep-layout nothing is searched, and what cannot be kept is refused with the broken rule."""
    old = Plan.load(planned)
    kept = again(planned, "--keep-layout", "--changed", "degraded=east:0.1")
    assert kept.layout == old.layout
    assert kept.certificate.configurations == 1
    assert kept.prediction.step_time_s > old.prediction.step_time_s
    command = ["replan", "--plan", str(planned), "--keep-layout", "--changed", "gpus=56"]
    assert main(command) == EXIT_NO_PLAN
    assert "NEST-P03" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--changed", "lost=n33"], "NEST-R02", "n33 is lost and was not a node of the job"),
        (["--changed", "lost=n[1-8]"], "NEST-R02", "every node is lost"),
        (["--changed", "lost=1"], "NEST-R02", "say which ones"),
        (["--changed", "degraded=wets:0.5"], "NEST-R03", "Nearest: west"),
        (["--changed", "degraded=west:0"], "NEST-R01", "degraded=NAME:FACTOR"),
        (["--changed", "degraded=west"], "NEST-R01", "degraded=NAME:FACTOR"),
        (["--changed", "lsot=n1"], "NEST-R01", "Nearest: lost=NODES"),
        (["--changed", "gpus=-8"], "NEST-R01", "gpus=N"),
        (["--changed", "gpus=8", "gpus=16"], "NEST-R01", "given twice"),
        (["--changed", "gpus=128"], "NEST-C06", "more than the named nodes hold"),
        (["--changed", "cluster=dgx-h1000"], "NEST-C01", "dgx-h100"),
        (["--config", "absent.yaml"], "NEST-", "absent.yaml"),
    ],
)
def test_what_cannot_be_used_is_bad_input(
    planned: Path, options: list[str], code: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2, one sentence, the nearest choice; the target says so too and no host file is written."""
    out = planned.with_name("out") / "new.json"
    assert main(["replan", "--plan", str(planned), "--json", str(out), *options]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert code in error
    assert said in error
    assert json.loads(out.read_text())["failed"] is True
    assert [path.name for path in out.parent.iterdir()] == ["new.json"]


def test_another_jobs_configuration_is_refused(
    planned: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration must be the plan's: model, batch, sequence, recipe."""
    other = repository / "scripts" / "conf" / "megatron_gpt3_175b.yaml"
    assert main(["replan", "--plan", str(planned), "--config", str(other)]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert "NEST-R05" in error
    assert "num_layers=96" in error


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda plain: plain["provenance"].pop("request"), "NEST-R04"),
        (lambda plain: plain["provenance"].update(source="gone.yaml"), "NEST-R04"),
        (lambda plain: plain["provenance"]["request"]["settings"].update(clustre="x"), "NEST-I02"),
        (lambda plain: plain.pop("layout"), "NEST-I02"),
        (lambda plain: plain.update(schema=9), "NEST-I03"),
    ],
)
def test_a_plan_that_cannot_be_asked_again_is_bad_input(
    planned: Path, change: Any, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan without its request, its configuration or its form is refused by name."""
    plain = json.loads(planned.read_text())
    change(plain)
    planned.write_text(json.dumps(plain))
    assert main(["replan", "--plan", str(planned)]) == EXIT_BAD_INPUT
    assert code in capsys.readouterr().err


def test_nodes_without_names_are_lost_by_number(tmp_path: Path, repository: Path) -> None:
    """A cluster of a known size only loses a number of nodes, twice in a row."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    planned = plan_of(tmp_path, repository)
    first = again(planned, "--changed", "lost=1", name="first.json")
    assert first.layout.world <= 56
    second = again(planned.with_name("first.json"), "--changed", "lost=3", name="second.json")
    assert second.layout.world <= 32


# --- the planner's part, without files ---

OLD: dict[str, Any] = {"tp": 2, "pp": 2, "sharding": "optim", "sequence_parallel": True}


def small(**fields: Any) -> TrainJob:
    """Return Llama with 8 layers on 32 GPUs, batch 48."""
    model = builders.llama8b(num_layers=8)
    return builders.make_job(
        OLD, **{"model": model, "num_gpus": 32, "global_batch": 48, "sequence_length": 2048} | fields
    )


def sites(job: TrainJob, cluster: Cluster, old: Layout) -> Any:
    """Return number of GPUs -> site."""
    return lambda n: Site(bound_by_checkpoint(dataclasses.replace(job, num_gpus=n), old), resize(cluster, n))


@pytest.mark.parametrize("reshards", [True, False])
def test_the_checkpoint_binds_unless_it_reshards(reshards: bool) -> None:
    """Axes of a format that does not reshard stay; a free one may take what is faster."""
    job = small(checkpoint=CheckpointState(reshards=reshards))
    old = dataclasses.replace(job.user_layout, micro_batch=1)
    slow = builders.make_layout(job, tp=8, pp=4, micro_batch=1, sharding="optim", sequence_parallel=True)
    cluster = load_cluster("dgx-h100", num_gpus=32)
    found = replan(sites(job, cluster, slow), [32], slow, minimum_gain=0.03)
    assert found.best is not None
    same = [getattr(found.best, FIELDS[axis]) == getattr(slow, FIELDS[axis]) for axis in CHECKPOINT_AXES]
    assert all(same) is not reshards
    assert old.world == 32


@pytest.mark.parametrize("left", [1.0, 0.002], ids=["healthy", "one-node-is-fastest"])
def test_every_world_is_weighed(left: float) -> None:
    """The result is the fastest over all worlds, searched one by one, and the old layout's if none gains."""
    job, cluster = small(), load_cluster("dgx-h100", num_gpus=32)
    # Legal on 32 GPUs only: nothing of it can be carried to a smaller world.
    old = builders.make_layout(job, tp=8, pp=4, micro_batch=1, sharding="optim", sequence_parallel=True)
    site_of = sites(job, degrade(cluster, [("leaf", left)]), old)
    found = replan(site_of, [24, 16, 8], old, minimum_gain=0.03)
    times = {}
    for n in (24, 16, 8):
        site = site_of(n)
        try:
            layout = search(site.job, site.cluster).best
        except NoPlanError:
            continue
        times[n] = Evaluator(site.job, site.cluster).step_times_s([layout])[0]
    assert found.outcome == "repaired"
    assert found.site.job.num_gpus == min(times, key=lambda n: times[n]) == (8 if left < 1 else 24)
    assert rules.check(found.site.job, found.layout) == ()
    for world in found.worlds:
        assert world.step_time_s == times.get(world.num_gpus) or "slower" in world.reason


@pytest.mark.parametrize("minimum_gain", [0.0, 0.03, 0.9])
def test_hysteresis_keeps_what_does_not_surely_lose(minimum_gain: float) -> None:
    """A new layout is taken exactly when it saves the stated share at its worst end."""
    job, cluster = small(), load_cluster("dgx-h100", num_gpus=32)
    old = builders.make_layout(job, tp=8, pp=1, micro_batch=1, sharding="optim", sequence_parallel=True)
    found = replan(sites(job, cluster, old), [32], old, minimum_gain=minimum_gain)
    assert found.ratio is not None
    gains = found.ratio[1] <= 1 - minimum_gain
    assert found.ratio[0] < 1
    assert found.outcome == ("rewritten" if gains else "kept")
    assert found.layout == (found.best if gains else old)
    assert gains is (minimum_gain < 0.9)


def test_degrading_a_unit_scales_its_own_uplink(tmp_path: Path) -> None:
    """Units, single nodes and whole levels take the factor; two in a row multiply."""
    (tmp_path / "named.yaml").write_text(
        CLUSTER + "nodes: n[1-8]\nunits:\n  - {level: leaf, name: west, nodes: 'n[5-8]', "
        "uplink_GB_per_s_per_gpu: 20}\n"
    )
    cluster = load_cluster(tmp_path / "named.yaml")
    west = degrade(cluster, [("west", 0.5), ("west", 0.5)]).units
    assert [unit.uplink_bytes_per_s for unit in west] == [20e9 / 4]
    (_, node) = degrade(cluster, [("n2", 0.5)]).units
    assert (node.level, node.nodes, node.uplink_bytes_per_s) == ("nvlink", ("n2",), 25e9)
    spine = degrade(cluster, [("spine", 0.5)]).levels[-1]
    assert spine.bandwidth_bytes_per_s == 12.5e9
    with pytest.raises(BadInputError, match="NEST-R03"):
        degrade(cluster, [("east", 0.5)])


def test_changes_are_read_in_any_order() -> None:
    """Kinds that may repeat add up."""
    found = read_changes(["lost=a[1-2]", "degraded=leaf:0:0.5", "lost=b", "degraded=x:0.25", "gpus=16"])
    assert found == Changes(lost=("a1", "a2", "b"), num_gpus=16, degraded=(("leaf:0", 0.5), ("x", 0.25)))
