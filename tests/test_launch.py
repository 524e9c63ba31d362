"""launch.sh, torchrun and plain python as a user starts them: real processes, and the files that they leave."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT, SCRIPT, read_metrics


LAUNCHER = ROOT / "launch.sh"
FLAGS = ["--num_train_steps", "2", "--wandb_mode", "disabled", "--device", "cpu"]
# what no run may print, good or bad: a destructor's complaint about the process group, or a warning of ours
NOISE = re.compile(r"NOT been destroyed|Traceback|Warning")

# trains as the script does, but rank 1 raises in its second step, when the others wait for it in a collective
BREAKING = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("three_d_parallel", os.environ["SCRIPT"])
script = sys.modules["three_d_parallel"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
read_sequences, calls = script.read_sequences, []
def broken(*args):
    calls.append(args)
    if len(calls) == 2 and os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 breaks in step 2")
    return read_sequences(*args)
script.read_sequences = broken
script.main(sys.argv[1:])
"""


class Result(NamedTuple):
    code: int
    output: str  # stdout and stderr, together
    seconds: float


def start(argv, cwd, timeout=240, **variables):
    """Run a command as a user's shell would, without what this test's own environment says about ranks and meshes."""
    environment = {name: value for name, value in os.environ.items() if not re.fullmatch(r"(TP|DP|CP)_SIZE", name)}
    environment |= {"PYTHON": sys.executable, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | variables
    started = time.monotonic()
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": timeout}
    done = subprocess.run([str(word) for word in argv], cwd=cwd, env=environment, **options)
    return Result(done.returncode, done.stdout, time.monotonic() - started)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """launch.sh on two tp ranks, started from a directory that is not its own."""
    folder = tmp_path_factory.mktemp("launched")
    return folder, start([LAUNCHER, *FLAGS], folder, TP_SIZE="2")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """One process, without a launcher."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, start([sys.executable, SCRIPT, *FLAGS], folder)


def test_launcher_trains_and_saves(launched):
    folder, result = launched
    assert result.code == 0, result.output
    assert not NOISE.search(result.output), result.output
    assert (folder / "output/checkpoint_tp2_dp1_cp1/manifest.json").is_file(), result.output
    rows = read_metrics(folder / "output")
    assert [row["step"] for row in rows] == [1, 2], rows
    for row in rows:
        assert row.keys() >= {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second"}, row
    assert [row["tokens"] for row in rows] == [8 * 256, 2 * 8 * 256], rows
    checkpoint, command = result.output.strip().splitlines()[-2:]
    assert re.fullmatch(r"checkpoint of step 2: output/checkpoint_tp2_dp1_cp1", checkpoint), result.output
    assert command.startswith("go on with: "), result.output


def test_plain_process_is_the_same_run(launched, plain):
    folder, result = plain
    assert result.code == 0, result.output
    assert (folder / "output/checkpoint_tp1_dp1_cp1/manifest.json").is_file(), result.output
    for ours, theirs in zip(read_metrics(folder / "output"), read_metrics(launched[0] / "output"), strict=True):
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), f"{name}: {ours}, on two ranks: {theirs}"


def test_plain_process_prints_no_warning(plain):
    assert not NOISE.search(plain[1].output), plain[1].output


def test_plain_process_leaves_a_transformers_folder(plain):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, result = plain
    assert result.code == 0, result.output
    model, info = AutoModelForCausalLM.from_pretrained(folder / "output/model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    tokenizer = AutoTokenizer.from_pretrained(folder / "output/model")
    text = "def café():\n    return  '→ tab\there'\n"
    ids = tokenizer(text, return_tensors="pt")
    assert tokenizer.decode(ids["input_ids"][0]) == text, ids
    assert model(**ids).logits.shape == (1, len(text.encode()), model.config.vocab_size)


def test_printed_command_goes_on(launched):
    # last of those that read `launched`, because it appends to the same files
    folder, result = launched
    command = result.output.strip().splitlines()[-1].removeprefix("go on with: ")
    assert "--num_train_steps 4" in command, f"not as many steps again: {command}"
    # word for word as printed; the directory of the interpreter is first on the path, as in an activated environment
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    result = start(["bash", "-c", command], folder, PATH=path, PYTHON="python")
    assert result.code == 0, f"{command}\n{result.output}"
    assert not NOISE.search(result.output), result.output
    assert "step 2" in result.output, f"does not say where it begins: {result.output}"
    rows = read_metrics(folder / "output")
    assert [row["step"] for row in rows] == [1, 2, 3, 4], f"{rows}\n{result.output}"
    assert rows[-1]["tokens"] == 4 * 8 * 256, rows
    assert result.output.strip().splitlines()[-2].startswith("checkpoint of step 4: "), result.output


def test_exception_on_one_rank_ends_all(tmp_path):
    (tmp_path / "breaking.py").write_text(BREAKING)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    argv = [*torchrun, tmp_path / "breaking.py", *FLAGS, "--timeout", "20"]
    result = start(argv, tmp_path, SCRIPT=str(SCRIPT))
    assert result.code != 0, result.output
    assert "RuntimeError: rank 1 breaks in step 2" in result.output, result.output
    assert result.seconds < 60, f"{result.seconds:.0f} s\n{result.output}"
    assert not list((tmp_path / "output").glob("checkpoint*")), "a run that broke has left a checkpoint"


def children(pid):
    """The processes that a process has started, by /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(entry.name))
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the ranks in /proc")
def test_a_killed_rank_is_restarted_and_the_run_goes_on(tmp_path):
    """torchrun --max_restarts, a real kill -9: from the last checkpoint on, the same numbers as before it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    flags = ["--seq_len", "32", "--global_batch_size", "2", "--num_train_steps", "60", "--save_every", "4"]
    argv = [*torchrun, "--max_restarts", "2", str(SCRIPT), *flags, "--wandb_mode", "disabled", "--timeout", "60"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    with subprocess.Popen(argv, cwd=tmp_path, **options) as process:
        metrics, started = tmp_path / "output" / "metrics.jsonl", time.monotonic()
        while not (metrics.exists() and metrics.read_text().count("\n") >= 9) and time.monotonic() < started + 120:
            time.sleep(0.05)
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    rows = read_metrics(tmp_path / "output")
    first = next(i for i, (one, two) in enumerate(zip(rows, rows[1:])) if two["step"] <= one["step"]) + 1
    assert rows[first]["step"] > 1 and rows[first]["step"] % 4 == 1, f"did not go on from a checkpoint: {output}"
    assert [row["step"] for row in rows[first:]] == list(range(rows[first]["step"], 61))
    before = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows[:first]}
    again = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows[first:] if row["step"] in before}
    assert again and all(before[step] == numbers for step, numbers in again.items()), (before, again)


def test_launcher_is_valid_bash():
    result = start(["bash", "-n", LAUNCHER], ROOT)
    assert (result.code, result.output) == (0, ""), result.output
    assert os.access(LAUNCHER, os.X_OK), "launch.sh is not executable"


@pytest.mark.parametrize(
    "argv, variables",
    [
        ([], {"TP_SIZE": "two"}),
        ([], {"CP_SIZE": "-1"}),
        (["--dp_size", "1.5"], {}),
        (["--tp_size=x"], {"TP_SIZE": "2"}),
    ],
)
def test_launcher_refuses_a_bad_mesh_size(tmp_path, argv, variables):
    result = start([LAUNCHER, *argv], tmp_path, **variables)
    assert result.code == 2, result.output
    assert re.fullmatch(r"launch.sh: error: mesh size \S+ is not a whole number from 1 up\n", result.output), (
        result.output
    )


# what the launcher would start, told by an interpreter that only prints its arguments and the mesh
COMMAND = """#!/usr/bin/env bash
echo "$@"
echo "TP=$TP_SIZE DP=${DP_SIZE:-unset} CP=$CP_SIZE"
"""


@pytest.mark.parametrize(
    "argv, variables, processes, mesh",
    [
        ("", {}, 1, "TP=1 DP=unset CP=1"),
        ("", {"TP_SIZE": "2", "DP_SIZE": "3", "CP_SIZE": "2"}, 12, "TP=2 DP=3 CP=2"),
        ("--tp_size 4 --cp_size=2", {"TP_SIZE": "2"}, 8, "TP=4 DP=unset CP=2"),
        ("--tp-size 2 --dp-size=2", {}, 4, "TP=2 DP=2 CP=1"),
        ("", {"TP_SIZE": "2", "DP_SIZE": ""}, 2, "TP=2 DP=unset CP=1"),
        ("", {"TP_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4, "TP=2 DP=unset CP=1"),
        ("--device cpu", {"TP_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2, "TP=2 DP=unset CP=1"),
        ("", {"TP_SIZE": "2", "CUDA_VISIBLE_DEVICES": "-1"}, 2, "TP=2 DP=unset CP=1"),
    ],
    ids=["default", "environment", "flags win", "dashes", "empty", "GPUs", "not on GPUs", "GPUs hidden"],
)
def test_launcher_counts_the_processes(tmp_path, argv, variables, processes, mesh):
    interpreter = tmp_path / "python"
    interpreter.write_text(COMMAND)
    interpreter.chmod(0o755)
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHON": str(interpreter)} | variables
    result = start([LAUNCHER, *argv.split()], tmp_path, **environment)
    assert result.code == 0, result.output
    assert f"--nproc_per_node {processes} " in result.output, result.output
    assert result.output.splitlines()[1] == mesh, result.output


def test_launcher_in_a_folder_with_a_space(tmp_path):
    folder = tmp_path / "with space"
    folder.mkdir()
    shutil.copy(LAUNCHER, folder)
    interpreter = folder / "python"
    interpreter.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$LAUNCHED_AS"\n')
    interpreter.chmod(0o755)
    result = start([folder / "launch.sh"], tmp_path, PYTHON=str(interpreter))
    assert result.code == 0, result.output
    # the printed command begins with this: the shell that reads it back must find the launcher
    again = start(["bash", "-c", result.output.strip()], tmp_path, PYTHON=str(interpreter))
    assert again.code == 0, f"{result.output}{again.output}"
