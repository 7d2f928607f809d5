"""Command lines and shell scripts that start Megatron-LM."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nest_megatron import cli
from nest_megatron.dialects import registry
from nest_megatron.dialects.files import load_config
from nest_megatron.dialects.megatron_argv import edit_argv, split_argv
from nest_megatron.dialects.megatron_flags import FLAGS, default_of
from nest_megatron.dialects.megatron_lm import read_argv
from nest_megatron.dialects.megatron_script import looks_like_script, read_script
from nest_megatron.errors import BadInputError
from tests.unit import megatron_cases as cases

SCRIPT = r"""#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=8
# Trains a 7B model: comments with "quotes and (parentheses) stay comments
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=4
WORLD=$(($GPUS_PER_NODE*$NNODES))
TP=${TP:-2}
LAYOUT="Et*7|(t*8|)*2t*9L"
CHECKPOINT=$1

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # per node
    --nnodes $NNODES
)
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096 --num-attention-heads 32
    --seq-length 4096
    --max-position-embeddings 4096
    --swiglu --bf16
)
if [ -n "${USE_SP}" ] &&
   [ "$TP" -gt 1 ]; then
    MODEL_ARGS+=(--sequence-parallel)
elif [ "$TP" == 8 ]
then
    MODEL_ARGS+=( --disable-bias-linear )
else
    MODEL_ARGS+=(--untie-embeddings-and-output-weights)
fi
[[ $NNODES -ge 4 ]] && MODEL_ARGS+=(--overlap-grad-reduce)
options=" \
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size 4 \
    --micro-batch-size 1 --global-batch-size ${GBS-256} "
options+=" --use-distributed-optimizer"
mkdir -p $CHECKPOINT
for f in a b; do echo $f; done
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL_ARGS[@]} $options ${EXTRA_ARGS} \
    --pipeline-model-parallel-layout "$LAYOUT" \
    --load $CHECKPOINT --data-path $DATA 2>&1 | tee log.txt
"""


def script_flags(environment: dict[str, str], text: str = SCRIPT) -> dict[str, Any]:
    """Return the flags of a script under an environment."""
    flags = read_script(text, environment=environment, source="run.sh")["MODEL_ARGS"]
    assert isinstance(flags, dict)
    return flags


def test_a_script_gives_the_flags_that_bash_would_pass() -> None:
    """Arrays, += , defaults, arithmetic, tests, quoted | and continuation lines: as in bash."""
    found = read_script(SCRIPT, environment={}, source="run.sh")
    flags = found["MODEL_ARGS"]
    assert flags["--tensor-model-parallel-size"] == "2"
    assert flags["--global-batch-size"] == "256"
    assert flags["--pipeline-model-parallel-layout"] == "Et*7|(t*8|)*2t*9L"
    assert flags["--untie-embeddings-and-output-weights"] is True
    assert flags["--overlap-grad-reduce"] is True and flags["--use-distributed-optimizer"] is True
    assert "--sequence-parallel" not in flags and "--disable-bias-linear" not in flags
    assert flags["--load"] == "$1" and flags["--data-path"] == "$DATA"
    assert found["TRAINING_SCRIPT_PATH"] == "pretrain_gpt.py"
    assert found["ENV_VARS"] == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NUM_NODES": "4", "GPUS_PER_NODE": "8"}
    assert found["NOTES"] == ["${EXTRA_ARGS} is not set: read as empty"]


def test_the_environment_decides_defaults_and_branches() -> None:
    """A variable that exists before the script wins over its default, and chooses the branch."""
    flags = script_flags({"TP": "4", "USE_SP": "1", "EXTRA_ARGS": "--qk-layernorm --kv-channels 64"})
    assert flags["--tensor-model-parallel-size"] == "4"
    assert flags["--sequence-parallel"] is True and flags["--qk-layernorm"] is True
    assert flags["--kv-channels"] == "64"
    assert "--disable-bias-linear" in script_flags({"TP": "8"})


def test_a_quoted_command_is_opened() -> None:
    """``srun bash -c "${cmd}"`` runs the command that the variable holds."""
    text = """
    ARGS="--num-layers 8 --hidden-size 512 --num-attention-heads 8 --bf16"
    cmd="python -u ${ROOT}/pretrain_gpt.py ${ARGS} --micro-batch-size 4"
    srun -N 2 --gpus-per-node=4 bash -c "${cmd}"
    """
    found = read_script(text, environment={}, source="x")
    assert found["MODEL_ARGS"]["--micro-batch-size"] == "4"
    assert found["ENV_VARS"] == {"NUM_NODES": "2", "GPUS_PER_NODE": "4"}


def test_blocks_that_are_not_run_are_said() -> None:
    """A loop or a test that hangs on a command leaves its flags out and says so."""
    text = SCRIPT.replace('if [ -n "${USE_SP}" ]', 'if [ -f "$CHECKPOINT" ] || [ -n "${USE_SP}" ]')
    found = read_script(text, environment={}, source="run.sh")
    assert any("if block" in note for note in found["NOTES"])
    assert "--untie-embeddings-and-output-weights" not in found["MODEL_ARGS"]


def test_a_script_without_training_is_refused() -> None:
    """A script whose Python program takes none of Megatron-LM's flags is no input."""
    with pytest.raises(BadInputError) as caught:
        read_script("python preprocess.py --input a", environment={}, source="x.sh")
    assert caught.value.code == "NEST-M07"


def test_the_command_line_reads_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``nest-megatron plan --config pretrain.sh`` plans on the GPUs that the script says, or on --gpus."""
    for name in ("TP", "GBS", "GPUS_PER_NODE", "USE_SP", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "pretrain.sh"
    path.write_text(SCRIPT, encoding="utf-8")
    config, _ = load_config(path)
    assert registry.detect(config).name == "megatron_lm"
    code = cli.main(["plan", "--config", str(path), "--cluster", "dgx-h100", "--framework-version", "0.16.1"])
    assert code == 0
    assert "32" in capsys.readouterr().out
    assert cli.main(["check", "--config", str(path), "--gpus", "64", "--cluster", "dgx-h100"]) in (0, 1)


def test_a_yaml_that_names_a_program_stays_yaml(shared: Path) -> None:
    """Files that end in .yaml are never taken for scripts."""
    config, _ = load_config(shared / "data" / "configs" / cases.MIXTRAL)
    assert "MODEL_ARGS" in config


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--num-layers"], "NEST-M06"),
        (["stray", "--num-layers", "8"], "NEST-M05"),
        (["--bf16", "true"], "NEST-M05"),
        (["--num-layers", "8", "9"], "NEST-M05"),
        (["--num-layer", "8"], "NEST-M04"),
        (["--tensor-parallel-size", "8"], "NEST-M04"),
        ([3], "NEST-M05"),
    ],
)
def test_bad_words_are_named(argv: list[Any], code: str) -> None:
    """What argparse would refuse is refused, with a code."""
    with pytest.raises(BadInputError) as caught:
        split_argv(argv)
    assert caught.value.code == code


def test_num_gpus_and_environment_reach_a_command_line() -> None:
    """``read_argv`` takes the world from its argument, and placeholders from the environment given."""
    words = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --bf16"
    argv = [*words.split(), "--micro-batch-size", "${MBS}"]
    options = cases.PlanSettings(framework_version=cases.VERSION)
    job = read_argv(argv, environment={"MBS": "4"}, settings=options, num_gpus=16)
    assert (job.num_gpus, job.user_layout.micro_batch) == (16, 4)


flag_names = st.sampled_from(sorted(FLAGS))
words = st.text(alphabet="abc019./", min_size=1, max_size=5)


@given(st.lists(st.tuples(flag_names, words), max_size=20, unique_by=lambda pair: pair[0]))
@settings(deadline=None, max_examples=100)
def test_a_command_line_without_edits_is_unchanged(pairs: list[tuple[str, str]]) -> None:
    """Taking words apart and putting them together again gives the same words."""
    argv = ["python", "pretrain_gpt.py"]
    for name, value in pairs:
        argv += [f"--{name}"] if FLAGS[name].kind in ("on", "off") else [f"--{name}", value]
    assert edit_argv(split_argv(argv), {}) == argv


@given(st.text(alphabet="$(){}[]'\"\\\n =;|&#-abTP1+", max_size=80))
@settings(deadline=None, max_examples=300)
def test_no_script_text_breaks_the_reader(text: str) -> None:
    """Any text is read or refused with a code; nothing hangs and nothing is executed."""
    command = "\npython pretrain_gpt.py --num-layers 1 --hidden-size 2 --bf16\n"
    try:
        read_script(text + command, environment={}, source="x")
    except BadInputError:
        return


def test_real_scripts_are_told_from_other_text() -> None:
    """Only text that runs a program with several of Megatron-LM's flags counts as a script."""
    assert looks_like_script(SCRIPT)
    assert not looks_like_script("trainer:\n  num_nodes: 2\n")
    assert not looks_like_script("see pretrain_gpt.py")


def test_flag_table_agrees_with_megatron_core() -> None:
    """A flag that is also a dataclass field has its default, but where the command line has another."""
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    differs = {
        "multi_latent_attention",
        "q_lora_rank",
        "kv_lora_rank",
        "attention_backend",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "gradient_accumulation_fusion",
        "overlap_p2p_comm",
        "num_query_groups",
        "normalization",
        "num_layers",
        "hidden_size",
        "num_attention_heads",
    }
    theirs = {field.name: field.default for field in dataclasses.fields(config.MLATransformerConfig)}
    ours = {flag.field: default_of(flag.field, (0, 16)) for flag in FLAGS.values()}
    both = {name for name in ours.keys() & theirs.keys() if theirs[name] is not dataclasses.MISSING}
    assert len(both) > 60
    assert {name for name in both if ours[name] != theirs[name]} == differs


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    "environment",
    [{}, {"TP": "4", "USE_SP": "1", "EXTRA_ARGS": "--qk-layernorm"}, {"TP": "8"}, {"TP": "8", "USE_SP": "x"}],
)
def test_bash_passes_the_same_words(environment: dict[str, str], tmp_path: Path) -> None:
    """Run by bash itself with a torchrun that prints its words, the script passes exactly those we read."""
    program = tmp_path / "torchrun"
    program.write_text('#!/bin/sh\nfor word; do echo "$word"; done > words.txt\n', encoding="utf-8")
    program.chmod(0o755)
    (tmp_path / "run.sh").write_text(SCRIPT, encoding="utf-8")
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "DATA": "/data", **environment}
    subprocess.run(["bash", "run.sh", "ckpt"], cwd=tmp_path, env=variables, check=True, capture_output=True)
    passed = split_argv((tmp_path / "words.txt").read_text(encoding="utf-8").splitlines())
    ours = script_flags({"DATA": "/data", "1": "ckpt", **environment})
    assert passed.arguments == ours
