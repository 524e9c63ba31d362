"""SIGTERM or SIGUSR1, to any rank and at any time: the step is finished and saved, all exit with 0, the run goes on."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import SCRIPT, load_script, read_metrics, relative


FLAGS = ["--seq_len", 32, "--global_batch_size", 2, "--warmup_steps", 2, "--num_train_steps", 6]


def signal_in(name, call, number, ranks):
    """Some ranks get a signal in the n-th call of one of the script's functions."""
    script = load_script()
    original, calls = getattr(script, name), []

    def function(*args, **kwargs):
        calls.append(1)
        if len(calls) == call and int(os.environ.get("RANK", 0)) in ranks:
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(script, name, function)


def term_rank_1_in_step_3():
    signal_in("forward_loss", 3, signal.SIGTERM, [1])


def usr1_all_in_step_3():
    signal_in("forward_loss", 3, signal.SIGUSR1, [0, 1])


def term_rank_1_in_the_evaluation_of_step_3():
    signal_in("evaluate", 1, signal.SIGTERM, [1])


def term_rank_0_in_the_save_of_step_2():
    signal_in("add_tied_names", 1, signal.SIGTERM, [0])


def term_twice_in_the_last_save():
    signal_in("AppState", 2, signal.SIGTERM, [0, 1])
    signal_in("commit_checkpoint", 2, signal.SIGTERM, [0])


CASES = {
    # who gets what and when; more flags; the step that is saved last
    "one rank, in a step": (term_rank_1_in_step_3, [], 3),
    "all ranks, SIGUSR1": (usr1_all_in_step_3, [], 3),
    "in an evaluation": (
        term_rank_1_in_the_evaluation_of_step_3,
        ["--eval_every", 3],
        4,
    ),  # which all ranks see in the step after it
    "in a save": (term_rank_0_in_the_save_of_step_2, ["--save_every", 2], 3),
    "during an async save": (term_rank_1_in_step_3, ["--save_every", 2, "--async_save"], 3),
    "in the last save": (term_twice_in_the_last_save, ["--save_every", 3], 6),
}


@pytest.fixture(scope="module")
def unbroken(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    assert pool.launch(0, *FLAGS, "--output_dir", folder).codes == [0]
    return [row["loss"] for row in read_metrics(folder)]


@pytest.mark.parametrize("case", CASES)
def test_a_signal_saves_and_ends_with_0(pool, tmp_path, unbroken, case):
    before, more, step = CASES[case]
    flags = [*FLAGS, "--output_dir", tmp_path]
    launch = pool.launch(2, *flags, "--tp_size", 2, *more, before=before, timeout=60)
    output = "\n".join(launch.outputs)
    assert launch.codes == [0, 0] and "Traceback" not in output, output
    checkpoint = tmp_path / "checkpoint_tp2_dp1_cp1"
    assert json.loads((checkpoint / "manifest.json").read_text())["step"] == step, output
    assert f"checkpoint of step {step}: {checkpoint}" in launch.outputs[0], launch.outputs[0]
    assert ("stopped by a signal" in output) == (step < 6), output
    assert f"--resume auto --num_train_steps {6 if step < 6 else 12}" in launch.outputs[0]
    again = pool.launch(0, *flags, "--resume", "auto")
    assert again.codes == [0], again.outputs
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6], "a step was done twice, or not at all"
    assert relative([row["loss"] for row in rows], unbroken) < 1e-5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_torchrun_reaches_the_ranks(tmp_path, number):
    """As a scheduler sends it, with a wandb that runs offline: torchrun hands the signal on, and waits for 30 s."""
    flags = [
        "--seq_len",
        "32",
        "--global_batch_size",
        "2",
        "--num_train_steps",
        "100000",
        "--output_dir",
        str(tmp_path),
    ]
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT), *flags]
    argv[3:3] = ["--signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    with subprocess.Popen(argv, **options) as process:
        metrics, started = tmp_path / "metrics.jsonl", time.monotonic()
        while not (metrics.exists() and metrics.read_text().count("\n") > 3) and time.monotonic() < started + 120:
            time.sleep(0.1)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    rows = read_metrics(tmp_path)
    manifest = json.loads((tmp_path / "checkpoint_tp1_dp2_cp1" / "manifest.json").read_text())
    assert manifest["step"] == rows[-1]["step"] < 100000, output
    assert f"stopped by a signal, checkpoint of step {manifest['step']}" in output, output
    assert "--resume auto --num_train_steps 100000" in output, output
    assert "exitcode  :" not in output, f"a rank has not ended with 0: {output}"
