"""Calibration from measured steps: what is learned, what keeps the order of layouts, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nest_megatron.calibration.runs import Run, read_run
from nest_megatron.calibration.step import calibrate_step, fit_step, predicted_s
from nest_megatron.calibration.store import StepCalibration, apply, load_store, remember_step, step_key_of
from nest_megatron.cli import main
from nest_megatron.errors import BadInputError
from nest_megatron.pipeline import plan_config
from nest_megatron.planner.evaluate import Evaluator
from nest_megatron.specs.settings import PlanSettings
from tests.published_runs import PUBLIC_B200

#: The public SimuMax run by its step time.
DENSE: dict[str, Any] = PUBLIC_B200 | {"measured": {"step_time_s": 0.843}}

#: Qwen3-30B-A3B on 64 H100 over EFA (public AWS runs), micro-batches 1 and 4.
EXPERTS: dict[str, Any] = {
    "id": "experts-1",
    "family": "awsmoe",
    "accelerator": "H100-80GB-SXM",
    "num_gpus": 64,
    "gpus_per_node": 8,
    "framework": "Megatron-Bridge 0.4.2 / MCore 0.17.1 / NeMo 26.04.01",
    "precision": "bf16",
    "model": {
        "name": "Qwen3-30B-A3B",
        "layers": 48,
        "hidden": 2048,
        "heads": 32,
        "kv_heads": 4,
        "ffn": 6144,
        "vocab": 151936,
        "experts": 128,
        "topk": 8,
        "moe_ffn": 768,
    },
    "seq_len": 4096,
    "global_batch": 256,
    "micro_batch": 1,
    "tp": 8,
    "pp": 4,
    "vpp": 1,
    "dp": 2,
    "cp": 1,
    "ep": 16,
    "etp": 1,
    "sp": True,
    "recompute": {"mode": "none"},
    "notes": "",
    "measured": {"step_time_s": 27.89},
}


pytestmark = pytest.mark.usefixtures("store")


def write(folder: Path, record: dict[str, Any], **changes: Any) -> Path:
    """Return a file with one run record; ``step_time_s`` is what it measured."""
    seconds = changes.pop("step_time_s", None)
    record = record | changes
    if seconds is not None:
        record["measured"] = {"step_time_s": seconds}
    path = folder / f"{record['id']}.json"
    path.write_text(json.dumps(record))
    return path


def entry_of(*, gpu_factor: float, host_factor: float | None) -> StepCalibration:
    """A store entry with these factors, of a run without communication and bubble."""
    return StepCalibration(
        gpu_factor=gpu_factor,
        host_factor=host_factor,
        runs=("run-7",),
        communication_share=0.0,
        bubble_share=0.0,
        log2_micro_batch=0.0,
    )


def test_one_run_gives_one_factor(tmp_path: Path, store: Path) -> None:
    """The factor is measured over predicted, it is stored, and the run is then predicted exactly."""
    path = write(tmp_path, DENSE)
    expected = 0.843 / predicted_s(read_run(path))
    learned = calibrate_step([path])
    assert learned.entry.gpu_factor == pytest.approx(expected)
    assert learned.entry.host_factor is None
    assert learned.before["public-b200"] == pytest.approx(1 / expected - 1)
    assert learned.after["public-b200"] == pytest.approx(0.0, abs=1e-12)
    assert load_store().step == {learned.key: learned.entry}


def test_more_runs_give_the_median_and_an_honest_error(tmp_path: Path) -> None:
    """Of three runs the middle factor is taken, and each run is also judged by the other two."""
    prediction = predicted_s(read_run(write(tmp_path, DENSE)))
    paths = [
        write(tmp_path, DENSE, id=f"run-{factor}", step_time_s=factor * prediction)
        for factor in (1.1, 1.2, 1.6)
    ]
    learned = calibrate_step(paths)
    assert learned.entry.gpu_factor == pytest.approx(1.2)
    assert learned.left_out == {
        "run-1.1": pytest.approx(1.4 / 1.1 - 1),
        "run-1.2": pytest.approx(1.35 / 1.2 - 1),
        "run-1.6": pytest.approx(1.15 / 1.6 - 1),
    }


def layouts_of(run: Run) -> list[Any]:
    """The run's layout under other micro-batches and recomputations."""
    layout, found = run.built.layout, []
    for batch in (1, 2, 4):
        for granularity in ("none", "selective", "full"):
            recompute = dataclasses.replace(layout.recompute, granularity=granularity)
            if granularity == "full":
                recompute = dataclasses.replace(recompute, method="uniform", num_layers=1)
            found.append(dataclasses.replace(layout, micro_batch=batch, recompute=recompute))
    return found


def test_a_dense_factor_scales_every_layout_alike(tmp_path: Path) -> None:
    """Every second of every layout grows by the one factor, so no order between layouts can change."""
    run = read_run(write(tmp_path, DENSE))
    learned = calibrate_step([run.path])
    job, said = apply(run.built.job, run.built.cluster, load_store())
    plain, scaled = Evaluator(run.built.job, run.built.cluster), Evaluator(job, run.built.cluster)
    factor, layouts = learned.entry.gpu_factor, layouts_of(run)
    assert scaled.step_times_s(layouts) == pytest.approx([factor * t for t in plain.step_times_s(layouts)])
    for before, after in zip(plain.predict(layouts), scaled.predict(layouts), strict=True):
        assert after.step_time_s == pytest.approx(factor * before.step_time_s)
        assert after.time_split == pytest.approx({k: factor * s for k, s in before.time_split.items()})
        assert after.stages[0].busy_s == pytest.approx(factor * before.stages[0].busy_s)
        assert after.tokens_per_s_per_gpu == pytest.approx(before.tokens_per_s_per_gpu / factor)
        assert after.peak_device_bytes == before.peak_device_bytes
    assert "public-b200" in said and load_store().digest in said


def test_a_factor_is_of_one_model(tmp_path: Path) -> None:
    """Another depth, sequence, precision or accelerator is another key, and is not scaled."""
    run = read_run(write(tmp_path, DENSE))
    calibrate_step([run.path])
    deeper = DENSE | {"model": DENSE["model"] | {"layers": 16}}
    for change in (deeper, DENSE | {"seq_len": 8192}, DENSE | {"accelerator": "H100-80GB-SXM"}):
        other = read_run(write(tmp_path, change))
        job, said = apply(other.built.job, other.built.cluster, load_store())
        assert (job, said) == (other.built.job, "none")


def test_a_calibrated_band_is_narrower(tmp_path: Path) -> None:
    """Bands shrink for the calibrated layout, and grow again with the distance to the run."""
    run = read_run(write(tmp_path, DENSE))
    calibrate_step([run.path])
    job, _ = apply(run.built.job, run.built.cluster, load_store())
    layout = run.built.layout
    far = dataclasses.replace(layout, micro_batch=4)

    def width(job: Any, layout: Any) -> float:
        prediction = Evaluator(job, run.built.cluster).predict([layout])[0]
        low, high = prediction.step_time_band_s
        assert low < prediction.step_time_s < high
        return (high - low) / prediction.step_time_s

    assert width(job, layout) < width(run.built.job, layout)
    assert width(job, layout) < width(job, far)


def test_two_runs_give_gpu_time_and_host_floor(tmp_path: Path) -> None:
    """Steps made with GPU time x 1.3 and host floor x 2 give these two factors back."""
    truth = entry_of(gpu_factor=1.3, host_factor=2.0)
    paths = []
    for batch in (1, 4):
        run = read_run(write(tmp_path, EXPERTS, id=f"experts-{batch}", micro_batch=batch))
        paths.append(
            write(tmp_path, EXPERTS, id=run.name, micro_batch=batch, step_time_s=predicted_s(run, truth))
        )
    learned = calibrate_step(paths)
    assert learned.entry.gpu_factor == pytest.approx(1.3, rel=1e-3)
    assert learned.entry.host_factor == pytest.approx(2.0, rel=1e-3)
    assert all(abs(error) < 1e-3 for error in learned.after.values())


def test_a_floor_that_never_binds_is_scaled_with_gpu_time(tmp_path: Path) -> None:
    """Under whole-iteration graphs no floor explains a difference between the runs; the text says so."""
    flags = {"features": {"cuda_graph": "full"}}
    runs = []
    for batch, factor in ((1, 1.2), (4, 1.3)):
        run = read_run(write(tmp_path, EXPERTS | flags, id=f"experts-{batch}", micro_batch=batch))
        seconds = factor * predicted_s(run)
        runs.append(write(tmp_path, EXPERTS | flags, id=run.name, micro_batch=batch, step_time_s=seconds))
    learned = calibrate_step(runs)
    assert learned.entry.host_factor == learned.entry.gpu_factor == pytest.approx((1.2 * 1.3) ** 0.5)
    assert "limits none" in learned.render()


def test_an_expert_band_waits_for_both_scalars(tmp_path: Path) -> None:
    """Uncalibrated, an MoE band reaches 20 % below and above; with two runs it is narrower."""
    paths = [
        write(tmp_path, EXPERTS),
        write(tmp_path, EXPERTS, id="experts-4", micro_batch=4, step_time_s=8.6),
    ]
    run = read_run(paths[0])
    plain = Evaluator(run.built.job, run.built.cluster).predict([run.built.layout])[0]
    low, high = plain.step_time_band_s
    assert low <= 0.8 * plain.step_time_s + 1e-9 and high >= 1.2 * plain.step_time_s
    calibrate_step(paths)
    job, _ = apply(run.built.job, run.built.cluster, load_store())
    scaled = Evaluator(job, run.built.cluster).predict([run.built.layout])[0]
    assert scaled.step_time_band_s[1] / scaled.step_time_s < high / plain.step_time_s
    assert scaled.step_time_s == pytest.approx(27.89, rel=1e-3)


def test_one_micro_batch_does_not_calibrate_experts(tmp_path: Path, store: Path) -> None:
    """A single MoE run cannot tell host from GPU: refused with what to run, and nothing is stored."""
    with pytest.raises(BadInputError, match="micro-batches") as refused:
        calibrate_step([write(tmp_path, EXPERTS)])
    assert refused.value.nearest == ("one run at micro-batch 1 and one at 4",)
    assert not store.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"measured": {}}, "no measured step time"),
        ({"measured": {"step_time_s": -1.0}}, "no measured step time"),
        ({"measured": "fast"}, "no run record"),
        ({"seq_len": None}, "seq_len is not printed"),
        ({"framework": "unheard of"}, "unheard of"),
    ],
)
def test_a_useless_run_is_refused(tmp_path: Path, store: Path, change: dict[str, Any], words: str) -> None:
    """A record without a time, or that cannot be predicted, is bad input and leaves the store alone."""
    with pytest.raises(BadInputError, match=words):
        calibrate_step([write(tmp_path, DENSE | change)])
    assert not store.exists()


def test_runs_of_two_kinds_are_refused(tmp_path: Path) -> None:
    """Runs that differ in machine or share an id are named, not averaged."""
    here = write(tmp_path, DENSE)
    there = write(tmp_path, DENSE, id="elsewhere", accelerator="H100-80GB-SXM")
    with pytest.raises(BadInputError, match="one by one"):
        calibrate_step([here, there])
    with pytest.raises(BadInputError, match="same id"):
        calibrate_step([here, here])


def test_plans_use_the_factor_and_keep_their_layout(repository: Path) -> None:
    """A plan of the calibrated model is the same layout with a scaled step, and names the run."""
    config = OmegaConf.load(repository / "scripts" / "conf" / "megatron_llama3_8b.yaml")
    settings = PlanSettings(cluster="dgx-h100")
    plain = plan_config(config, settings=settings)
    entry = entry_of(gpu_factor=1.25, host_factor=None)
    keys = (
        f"h100-sxm-80gb / nemo / bf16 / {config.model.num_layers} layers of {config.model.hidden_size}, "
        f"sequence {config.model.encoder_seq_length}"
    )
    remember_step(keys, entry)
    plan = plan_config(config, settings=settings)
    assert plan.layout == plain.layout
    assert plan.prediction.step_time_s == pytest.approx(1.25 * plain.prediction.step_time_s)
    assert "run-7" in plan.provenance["calibration"]
    unused = plan_config(config, settings=dataclasses.replace(settings, calibration=False))
    assert unused.prediction.step_time_s == plain.prediction.step_time_s


def test_validate_ignores_the_store_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`validate` prints the same tables with and without a store, others under `--calibrated`."""
    records = tmp_path / "records.json"
    records.write_text(json.dumps([DENSE]))
    printed = []
    assert main(["validate", "--records", str(records)]) == 0
    printed.append(capsys.readouterr().out)
    calibrate_step([write(tmp_path, DENSE)])
    for option in ([], ["--calibrated"]):
        assert main(["validate", "--records", str(records), *option]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    assert "MAPE=  0.00" in printed[2]


def test_the_command_prints_before_and_after(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`nest-megatron calibrate step RUN.json` exits 0 with both errors and the store; bad input exits 2."""
    path = write(tmp_path, DENSE)
    assert main(["calibrate", "step", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "before" in printed and "0.0% after" in printed and str(store) in printed
    assert main(["calibrate", "step", str(tmp_path / "absent.json")]) == 2
    assert main(["calibrate", "memory", str(path), str(path)]) == 2
    assert "NEST-K04" in capsys.readouterr().err


def test_a_store_without_steps_is_read(store: Path) -> None:
    """A store that holds memory only is one with no steps."""
    store.write_text('{"schema": 1, "memory": {}}')
    assert load_store().step == {}


def test_the_key_is_machine_stack_precision_and_shape(tmp_path: Path) -> None:
    """The key reads as what it is."""
    run = read_run(write(tmp_path, EXPERTS))
    assert step_key_of(run.built.job, run.built.cluster) == (
        "h100-sxm-80gb / megatron-core / bf16 / 48 layers of 2048, 128 experts, sequence 4096"
    )
    assert fit_step([read_run(write(tmp_path, DENSE))]).runs == ("public-b200",)
