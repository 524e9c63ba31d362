"""launch.sh, torchrun and plain python as a user starts them: real processes, and the files that they leave."""

import os
import re
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT, SCRIPT, assert_close, children, kill_all, read_metrics, running, torchrun, wait_for_steps


LAUNCHER = ROOT / "launch.sh"
FLAGS = ["--num_train_steps", "2", "--wandb_mode", "disabled", "--device", "cpu"]
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
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
    """Run a command to its end."""
    started = time.monotonic()
    with running(argv, cwd, **variables) as process:
        output, _ = process.communicate(timeout=timeout)
    return Result(process.returncode, output, time.monotonic() - started)


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
    argv = torchrun(tmp_path / "breaking.py", *FLAGS, "--timeout", "20")
    result = start(argv, tmp_path, SCRIPT=str(SCRIPT))
    assert result.code != 0, result.output
    assert "RuntimeError: rank 1 breaks in step 2" in result.output, result.output
    assert result.seconds < 60, f"{result.seconds:.0f} s\n{result.output}"
    assert not list((tmp_path / "output").glob("checkpoint*")), "a run that broke has left a checkpoint"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the ranks in /proc")
def test_a_killed_rank_is_restarted_and_the_run_goes_on(tmp_path):
    """torchrun --max_restarts, a real kill -9: from the last checkpoint on, the same numbers as before it."""
    flags = ["--seq_len", 32, "--global_batch_size", 2, "--num_train_steps", 60, "--save_every", 4]
    argv = torchrun("--max_restarts", 2, SCRIPT, *flags, "--wandb_mode", "disabled", "--timeout", 60)
    with running(argv, tmp_path) as process:
        wait_for_steps(process, tmp_path / "output", 9)
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


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


ALONE = {"PET_LOCAL_ADDR": "127.0.0.1"}  # an option of torchrun: the name of this machine may not lead back to it


def test_two_machines_are_one_run(tmp_path, plain):
    """Two launches that meet at MASTER_ADDR, with one of two tp ranks each: the numbers of one process."""
    meet = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TP_SIZE": "2", "DP_SIZE": "1"}
    starts = [running([LAUNCHER, *FLAGS], tmp_path, NODE_RANK=str(rank), **meet, **ALONE) for rank in range(2)]
    with starts[0] as first, starts[1] as second:
        both = [first, second]
        outputs = [process.communicate(timeout=240)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert not any(NOISE.search(output) for output in outputs), outputs
    assert (tmp_path / "output/checkpoint_tp2_dp1_cp1/manifest.json").is_file(), outputs
    assert f"NNODES=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT={meet['MASTER_PORT']}" in outputs[0], outputs[0]
    for ours, theirs in zip(read_metrics(tmp_path / "output"), read_metrics(plain[0] / "output"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5), f"{ours}, in one process: {theirs}"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the ranks in /proc")
def test_a_lost_machine_leaves_the_same_run_on_those_that_stay(pool, tmp_path):
    """Elastic, NNODES=1:2: one of two machines is killed, the other goes on from the last checkpoint with dp 1."""
    flags = ["--seq_len", 32, "--global_batch_size", 2, "--num_train_steps", 40, "--save_every", 4, "--device", "cpu"]
    meet = {"NNODES": "1:2", "RDZV_ENDPOINT": f"127.0.0.1:{free_port()}", "WANDB_MODE": "disabled"} | ALONE
    # seconds until a machine counts as lost, and until those that are there start without it, instead of 15 and 30
    conf = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=3,is_host="
    starts = [running([LAUNCHER, *flags], tmp_path, **meet, PET_RDZV_CONF=f"{conf}{is_host}") for is_host in (1, 0)]
    with starts[0] as stays, starts[1] as lost:
        wait_for_steps(stays, tmp_path / "output", 9)
        kill_all(lost)
        output, _ = stays.communicate(timeout=180)
    assert stays.returncode == 0, output
    rows = read_metrics(tmp_path / "output")
    ranks = [round(row["tokens_per_second"] / row["tokens_per_second_per_rank"]) for row in rows]
    first = ranks.index(1)
    assert first >= 9 and set(ranks[:first]) == {2} and set(ranks[first:]) == {1}, f"{ranks}\n{output}"
    assert rows[first]["step"] > 1 and rows[first]["step"] % 4 == 1, f"did not go on from a checkpoint: {output}"
    assert [row["step"] for row in rows[first:]] == list(range(rows[first]["step"], 41))
    assert len({row["run"] for row in rows}) == 1, "not one run"
    assert pool.launch(0, *flags, "--output_dir", tmp_path / "unbroken").codes == [0]
    unbroken = {row["step"]: row["loss"] for row in read_metrics(tmp_path / "unbroken")}
    assert_close([row["loss"] for row in rows], [unbroken[row["step"]] for row in rows], 1e-5, "losses")


def test_ranks_that_are_started_again_know_their_launch(pool, tmp_path):
    """When a machine comes, torchrun starts all ranks anew and counts no restart: LAUNCH_ID says that they go on."""
    flags = ["--seq_len", 32, "--global_batch_size", 2, "--output_dir", tmp_path, "--num_train_steps"]
    first = pool.launch(1, *flags, 2, env={"LAUNCH_ID": "a"})
    more = pool.launch(2, *flags, 4, before=is_the_machine_of_rank_0_new)
    other = pool.launch(1, *flags, 2, env={"LAUNCH_ID": "c", "TORCHELASTIC_RESTART_COUNT": "1"})
    for launch, begin in (first, "tiny, step 0"), (more, "checkpoint_tp1_dp1_cp1, step 2"), (other, "tiny, step 0"):
        assert set(launch.codes) == {0} and f"weights: {begin}" in launch.outputs[0].replace(f"{tmp_path}/", ""), launch


def is_the_machine_of_rank_0_new():
    os.environ["LAUNCH_ID"] = "b" if os.environ["RANK"] == "0" else "a"


# what the launcher would start, told by an interpreter that only prints its arguments and the mesh
COMMAND = """
echo "$@"
echo "TP=$TP_SIZE DP=${DP_SIZE:-unset} CP=$CP_SIZE"
"""


def program(path, body):
    path.write_text(f"#!/usr/bin/env bash\n{body}")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    "argv, variables, processes, mesh",
    [
        ("", {}, 1, "TP=1 DP=unset CP=1"),
        ("", {"TP_SIZE": "2", "DP_SIZE": "3", "CP_SIZE": "2"}, 12, "TP=2 DP=3 CP=2"),
        ("--tp_size 4 --cp_size=2", {"TP_SIZE": "2"}, 8, "TP=4 DP=unset CP=2"),
        ("--tp-size 2 --dp-size=2", {}, 4, "TP=2 DP=2 CP=1"),
        ("flags.json --cp_size 3", {"TP_SIZE": "4"}, 12, "TP=2 DP=2 CP=3"),
        ("", {"TP_SIZE": "2", "DP_SIZE": ""}, 2, "TP=2 DP=unset CP=1"),
        ("", {"TP_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4, "TP=2 DP=unset CP=1"),
        ("--device cpu", {"TP_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2, "TP=2 DP=unset CP=1"),
        ("", {"TP_SIZE": "2", "CUDA_VISIBLE_DEVICES": "-1"}, 2, "TP=2 DP=unset CP=1"),
    ],
    ids=["default", "environment", "flags win", "dashes", "file", "empty", "GPUs", "not on GPUs", "GPUs hidden"],
)
def test_launcher_counts_the_processes(tmp_path, argv, variables, processes, mesh):
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHON": program(tmp_path / "python", COMMAND)} | variables
    (tmp_path / "flags.json").write_text('{\n "tp_size": 2,\n "dp_size": 2,\n "cp_size": 1,\n "seq_len": 32\n}')
    result = start([LAUNCHER, *argv.split()], tmp_path, **environment)
    assert result.code == 0, result.output
    assert result.output.startswith(f"launch.sh: {processes} process"), result.output
    assert f"--nproc_per_node {processes} " in result.output, result.output
    assert result.output.splitlines()[2] == mesh, result.output


ELASTIC = {"NNODES": "1:4", "RDZV_ENDPOINT": "node0:29400"}
STATIC = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
STEP = {"SLURM_JOB_ID": "123", "SLURM_STEP_ID": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[7-8]"}
STEP |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "gpu[6-8]"}


@pytest.mark.parametrize(
    "variables, command",
    [
        ({"MAX_RESTARTS": "2"}, r"--standalone --max_restarts 2 --nproc_per_node 1 "),
        (
            STATIC | {"TP_SIZE": "4", "DP_SIZE": "2"},
            r"--nnodes 2 --node_rank 1 --master_addr node0 --master_port 29500 --max_restarts 0 --nproc_per_node 4 ",
        ),
        (
            ELASTIC | {"CUDA_VISIBLE_DEVICES": "0,1", "TP_SIZE": "2", "RDZV_ID": "mine"},
            r"--nnodes 1:4 --rdzv_backend c10d --rdzv_endpoint node0:29400 --rdzv_id mine --max_restarts 3 "
            r"--nproc_per_node 2 .*\nTP=2 DP=unset CP=1\n",
        ),
        (STEP, r"--nnodes 2 --node_rank 1 --master_addr gpu7 --master_port 15127 "),
        (STEP | {"NNODES": "1:2"}, r"--nnodes 1:2 --rdzv_backend c10d --rdzv_endpoint gpu7:15127 --rdzv_id 123 "),
        (STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, r"--standalone "),
        (STEP | {"SLURM_STEP_NUM_TASKS": "16"}, r"error: 16 tasks on 2 machines; srun --ntasks-per-node 1 would work"),
        ({"NNODES": "two"}, r"error: NNODES=two is neither a number of machines nor LEAST:MOST"),
        ({"NNODES": "1:4"}, r"error: NNODES=1:4 needs RDZV_ENDPOINT"),
        ({"NNODES": "2"}, r"error: NNODES=2 needs NODE_RANK and MASTER_ADDR"),
        (ELASTIC | {"DP_SIZE": "2"}, r"error: .*decide dp; leave DP_SIZE out"),
        (STATIC | {"DP_SIZE": "3"}, r"error: NNODES=2 does not divide tp x dp x cp"),
    ],
)
def test_launcher_on_several_machines(tmp_path, variables, command):
    program(tmp_path / "scontrol", '[[ "$*" == "show hostnames gpu[7-8]" ]] && printf "%s\\n" gpu7 gpu8')
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHON": program(tmp_path / "python", COMMAND)} | variables
    result = start([LAUNCHER], tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", **environment)
    assert result.code == (2 if "error" in command else 0) and re.search(command, result.output), result.output


def test_a_batch_job_starts_one_launcher_a_machine(tmp_path):
    """sbatch runs a copy of launch.sh, which becomes srun, which starts the real one; each has the same LAUNCH_ID."""
    program(tmp_path / "scontrol", f'[[ $2 == job ]] && echo "   Command={LAUNCHER} --seq_len 32" || echo gpu7')
    body = """echo "srun $@"; while [[ $1 == --* ]]; do shift; done
    export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_NNODES=2
    for node in 0 1; do SLURM_NODEID=$node "$@"; done"""
    program(tmp_path / "srun", body)
    shutil.copy(LAUNCHER, tmp_path / "slurm_script")
    environment = {"PYTHON": program(tmp_path / "python", COMMAND + 'echo "$LAUNCH_ID $LAUNCHED_AS"')}
    environment |= {"SLURM_JOB_ID": "123", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "8", "DP_SIZE": "4"}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    result = start(["bash", tmp_path / "slurm_script", "--seq_len", "32"], tmp_path, **environment)
    srun, *lines = result.output.splitlines()
    assert result.code == 0 and srun.startswith("srun --nodes=2 --ntasks=2 ") and "--cpus-per-task=8" in srun, srun
    for rank in range(2):
        started, command, mesh, again = lines[4 * rank : 4 * rank + 4]
        assert started == "launch.sh: 2 processes on this machine, on its CPU", result.output
        assert f"--node_rank {rank} --master_addr gpu7 --master_port 15123 " in command, result.output
        assert command.endswith(f"--nproc_per_node 2 --signals_to_handle {SIGNALS} {SCRIPT} --seq_len 32"), command
        assert mesh == "TP=1 DP=4 CP=1" and again.startswith("slurm-123 ") and "sbatch --nodes=2 " in again, again


def test_launcher_explains_itself(tmp_path):
    result = start([LAUNCHER, "--help"], tmp_path)
    assert result.code == 0 and "set -" not in result.output and "SBATCH" not in result.output, result.output
    for name in ("TP_SIZE", "NNODES", "NODE_RANK", "MASTER_ADDR", "RDZV_ENDPOINT", "MAX_RESTARTS", "sbatch", "PYTHON"):
        assert name in result.output, name


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_has_nothing_to_say():
    result = start(["shellcheck", LAUNCHER], ROOT)
    assert (result.code, result.output) == (0, ""), result.output


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
