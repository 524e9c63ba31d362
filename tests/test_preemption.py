"""SIGTERM or SIGUSR1, to any rank and at any time: the step is finished and saved, all exit with 0, the run goes on."""

import json
import os
import signal

import pytest
from conftest import (
    FLAGS,
    SCRIPT,
    assert_close,
    before_call,
    load_script,
    read_metrics,
    running,
    torchrun,
    wait_for_steps,
)


SIX_STEPS = [*FLAGS, "--num_train_steps", 6]


def signal_in(name, call, number, ranks):
    """Some ranks get a signal in the n-th call of one of the script's functions."""
    before_call(load_script(), name, call, lambda: os.kill(os.getpid(), number), ranks)


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
    # which all ranks see in the step after it
    "in an evaluation": (term_rank_1_in_the_evaluation_of_step_3, ["--eval_every", 3], 4),
    "in a save": (term_rank_0_in_the_save_of_step_2, ["--save_every", 2], 3),
    "during an async save": (term_rank_1_in_step_3, ["--save_every", 2, "--async_save"], 3),
    "in the last save": (term_twice_in_the_last_save, ["--save_every", 3], 6),
}


@pytest.fixture(scope="module")
def unbroken(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    assert pool.launch(0, *SIX_STEPS, "--output_dir", folder).codes == [0]
    return [row["loss"] for row in read_metrics(folder)]


@pytest.mark.parametrize("case", CASES)
def test_a_signal_saves_and_ends_with_0(pool, tmp_path, unbroken, case):
    before, more, step = CASES[case]
    flags = [*SIX_STEPS, "--output_dir", tmp_path]
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
    assert_close([row["loss"] for row in rows], unbroken, 1e-5, "losses")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_torchrun_reaches_the_ranks(tmp_path, number):
    """As a scheduler sends it, with a wandb that runs offline: torchrun hands the signal on, and waits for 30 s."""
    before = ["--signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
    argv = torchrun(*before, SCRIPT, *FLAGS, "--num_train_steps", 100000, "--output_dir", tmp_path)
    with running(argv, tmp_path, WANDB_MODE="offline") as process:
        wait_for_steps(process, tmp_path, 4)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    rows = read_metrics(tmp_path)
    manifest = json.loads((tmp_path / "checkpoint_tp1_dp2_cp1" / "manifest.json").read_text())
    assert manifest["step"] == rows[-1]["step"] < 100000, output
    assert f"stopped by a signal, checkpoint of step {manifest['step']}" in output, output
    assert "--resume auto --num_train_steps 100000" in output, output
    assert "exitcode  :" not in output, f"a rank has not ended with 0: {output}"
