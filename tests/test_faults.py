"""Real faults: kills, full disks, damaged and hostile checkpoints. What was saved is still there, and is found."""

import json
import os
import pickle
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import load_script, make_config, make_model


CPU = torch.device("cpu")
SIZES = {"tp": 1, "dp": 1, "cp": 1}
FLAGS = ["--seq_len", 32, "--global_batch_size", 2, "--warmup_steps", 2]


# one process saves a checkpoint whose parameters all have the value of its step


def small_model(step=0):
    model = make_model(make_config("llama", num_hidden_layers=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return model


def save_step(script, folder, step, run="run", keep_last=2):
    model = small_model(step)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"run": run, "step": step, "tokens": 0}
    options = {"sizes": SIZES, "train_state": state, "tokenizer": None, "keep_last": keep_last, "device": CPU}
    return script.save_checkpoint(Path(folder), model, optimizer, **options)


def resumed_step(script, folder):
    """The step that --resume auto finds, after loading it and comparing every parameter with it."""
    found = script.find_checkpoint("auto", Path(folder), 0, True)
    if found is None:
        return None
    path, manifest = found
    model = small_model(-1)
    script.load_checkpoint(path, model, torch.optim.AdamW(model.parameters(), lr=0.1))
    assert all((parameter == manifest["step"]).all() for parameter in model.parameters()), f"{path} is mixed"
    return manifest["step"]


def kill_at_operation(folder, number):
    """SIGKILL this process right before the n-th call that opens, renames, creates or removes something in folder."""
    seen = 0

    def hook(event, args):
        nonlocal seen
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir"):
            if any(isinstance(arg, (str, os.PathLike)) and str(arg).startswith(folder) for arg in args):
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def sweep(folder, saved_before, every):
    """Kill the save that follows `saved_before` saves at each of its file operations; returns the steps found after."""
    script, found = load_script(), {}
    number = 1
    while True:
        target = f"{folder}/{saved_before}_{number}"
        for step in range(1, saved_before + 1):
            save_step(script, target, step)
        child = os.fork()
        if child == 0:
            kill_at_operation(target, number)
            save_step(script, target, saved_before + 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        found[number] = resumed_step(script, target)
        if os.waitstatus_to_exitcode(status) == 0:
            return found
        # the next save sweeps what the killed one left, and is found
        save_step(script, target, saved_before + 2)
        assert resumed_step(script, target) == saved_before + 2
        assert not list(Path(target).glob(".tmp_*")) and not list(Path(target).glob(".removed_*"))
        shutil.rmtree(target)
        number += every


@pytest.mark.parametrize("saved_before", [0, 1, 2, 3], ids=["first", "second", "third", "prunes"])
def test_kill_at_every_file_operation(pool, tmp_path, saved_before):
    """A kill between any two calls leaves the last complete checkpoint, or the new one, bit for bit; never a mix."""
    every = 1 if os.environ.get("SWEEP") == "all" else 4
    found = pool.run(1, sweep_alone, str(tmp_path), saved_before, every)[0]
    allowed = {saved_before or None, saved_before + 1}
    assert set(found.values()) <= allowed, f"killed at operation: step found {found}"
    assert len(found) > 30 // every and found[max(found)] == saved_before + 1, found


def sweep_alone(folder, saved_before, every):
    torch.distributed.destroy_process_group()  # a forked child cannot use its parent's
    try:
        return sweep(folder, saved_before, every)
    finally:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)


# damage to the newest checkpoint: it is named and skipped, an older one is taken; asked for by path it is refused


def truncate(path, size):
    with path.open("r+b") as file:
        file.truncate(size)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_manifest(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGES = {
    "truncated by one byte": ("__0_0.distcp", lambda p: truncate(p, p.stat().st_size - 1), "bytes instead of"),
    "truncated by half": ("__0_0.distcp", lambda p: truncate(p, p.stat().st_size // 2), "bytes instead of"),
    "empty": ("__0_0.distcp", lambda p: truncate(p, 0), "has 0 bytes instead of"),
    "one bit flipped": ("__0_0.distcp", flip, "checksum differs"),
    "missing": ("__0_0.distcp", lambda p: p.unlink(), "is missing"),
    "metadata missing": (".metadata", lambda p: p.unlink(), "is missing"),
    "metadata flipped": (".metadata", flip, "checksum differs"),
    "no manifest": ("manifest.json", lambda p: p.unlink(), "no readable manifest"),
    "half a manifest": ("manifest.json", lambda p: truncate(p, 100), "no readable manifest"),
    "newer format": ("manifest.json", lambda p: change_manifest(p, format=99), "format 99"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_named_and_skipped(script, tmp_path, capsys, damage):
    file, do, sentence = DAMAGES[damage]
    for step in (1, 2):
        path = save_step(script, tmp_path, step)
    do(path / file)
    assert resumed_step(script, tmp_path) == 1
    printed = capsys.readouterr().out
    assert "skipped" in printed and sentence in printed and str(path) in printed, printed
    with pytest.raises(SystemExit) as refusal:
        script.find_checkpoint(str(path), tmp_path, 0, True)
    assert refusal.value.code == 2 and sentence in capsys.readouterr().err


def test_checksums_can_be_turned_off_sizes_cannot(script, tmp_path):
    path = save_step(script, tmp_path, 1)
    flip(path / "__0_0.distcp")
    assert script.find_checkpoint("auto", tmp_path, 0, False) is not None
    truncate(path / "__0_0.distcp", 10)
    assert script.find_checkpoint("auto", tmp_path, 0, False) is None


def test_another_models_checkpoint_is_refused_by_name(script, tmp_path, capsys):
    """More layers or fewer: a layer of the checkpoint that the model does not have must not be dropped in silence."""
    path = save_step(script, tmp_path, 1)
    two_layers = make_model(make_config("llama", num_hidden_layers=2))
    with pytest.raises(SystemExit):
        script.load_checkpoint(path, two_layers)
    assert "of another model: model.layers.1" in capsys.readouterr().err
    optimizer = torch.optim.AdamW(two_layers.parameters())
    state = {"run": "run", "step": 2, "tokens": 0}
    options = {"sizes": SIZES, "train_state": state, "tokenizer": None, "keep_last": 2, "device": CPU}
    path = script.save_checkpoint(tmp_path, two_layers, optimizer, **options)
    with pytest.raises(SystemExit):
        script.load_checkpoint(path, small_model())
    assert "of another model: model.layers.1" in capsys.readouterr().err


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_checkpoints_that_run_code_are_refused(script, tmp_path, capsys):
    """Stock DCP runs both of these; the first shows that the bombs work."""
    path, exploded = save_step(script, tmp_path / "a", 1), tmp_path / "exploded"
    with (path / ".metadata").open("wb") as file:
        pickle.dump(Bomb(exploded), file)
    with pytest.raises(SystemExit):
        script.load_checkpoint(path, small_model())
    assert not exploded.exists() and "has no place in a checkpoint's metadata" in capsys.readouterr().err
    pickle.load((path / ".metadata").open("rb"))
    assert exploded.exists()
    exploded.unlink()

    # a bomb in an entry that is no tensor: the options of the optimizer
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = script.AppState(model, optimizer).state_dict()
    state["optim"]["param_groups"] = Bomb(exploded)
    dcp.save({"app": state}, checkpoint_id=tmp_path / "b", no_dist=True)
    with pytest.raises(SystemExit):
        script.load_checkpoint(tmp_path / "b", model, optimizer)
    assert not exploded.exists() and "could not be loaded" in capsys.readouterr().err


# several ranks, through main()


def break_second_save(rank, action):
    """On one rank, do something in the middle of the second save, where its shards are written."""
    writer = dcp.FileSystemWriter
    original, calls = writer.write_data, []

    def write_data(self, plan, planner):
        calls.append(1)
        if len(calls) == 2 and os.environ["RANK"] == str(rank):
            action()
        return original(self, plan, planner)

    writer.write_data = write_data


def kill_rank_1():
    break_second_save(1, lambda: os.kill(os.getpid(), signal.SIGKILL))


def rank_1_raises():
    def action():
        raise OSError(5, "Input/output error")

    break_second_save(1, action)


def files_may_not_grow():
    break_second_save(0, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))


def rank_1_stops():
    break_second_save(1, lambda: os.kill(os.getpid(), signal.SIGSTOP))


FAULTS = {
    # what happens in the second save: exit codes (None: any but 0), what is said
    "rank 1 is killed": (kill_rank_1, None, ""),
    "rank 1 raises": (rank_1_raises, 2, "error: step 4 could not be saved: "),
    "no more space for rank 0": (files_may_not_grow, 2, "error: step 4 could not be saved: "),
    "rank 1 hangs": (rank_1_stops, None, ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_a_save_keeps_the_older_checkpoint(pool, tmp_path, fault):
    before, code, sentence = FAULTS[fault]
    flags = [*FLAGS, "--output_dir", tmp_path, "--num_train_steps", 6, "--save_every", 2, "--timeout", 6]
    launch = pool.launch(2, *flags, before=before, timeout=90)
    output = "\n".join(launch.outputs)
    assert all(launch.codes) if code is None else launch.codes == [code, code], (launch.codes, output)
    assert sentence in output and launch.seconds < 60, output
    assert sentence == "" or "Traceback" not in output, output
    again = pool.launch(1, *flags, "--resume", "auto")
    assert again.codes == [0] and ", step 2" in again.outputs[0], again.outputs[0]
    rows = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-4:] == [3, 4, 5, 6]


@pytest.mark.parametrize("action", ["raises", "stops"])
def test_fault_on_one_rank_ends_all(pool, tmp_path, action):
    """In the middle of a step, where the ranks of the mesh's own groups wait for each other."""
    flags = [*FLAGS, "--output_dir", tmp_path, "--num_train_steps", 50, "--timeout", 6]
    before = {"raises": rank_1_raises_in_training, "stops": rank_1_stops_in_training}[action]
    launch = pool.launch(2, *flags, before=before, timeout=90)
    assert all(launch.codes) and launch.seconds < 60, (launch.codes, launch.outputs)
    assert action == "stops" or "fault of the test" in launch.outputs[1]


def break_third_loss(action):
    script = load_script()
    original, calls = script.cross_entropy_sum, []

    def cross_entropy_sum(logits, labels):
        calls.append(1)
        if len(calls) == 3 and os.environ["RANK"] == "1":
            action()
        return original(logits, labels)

    script.cross_entropy_sum = cross_entropy_sum


def rank_1_raises_in_training():
    def action():
        raise RuntimeError("fault of the test")

    break_third_loss(action)


def rank_1_stops_in_training():
    break_third_loss(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def test_non_finite_loss_stops_before_the_weights_are_touched(pool, tmp_path):
    flags = [*FLAGS, "--output_dir", tmp_path, "--num_train_steps", 6, "--save_every", 2]
    launch = pool.launch(2, *flags, before=loss_is_nan_at_step_4, timeout=90)
    output = "\n".join(launch.outputs)
    assert launch.codes == [2, 2] and output.count("error: step 4 has loss nan") == 1, output
    assert "Traceback" not in output


def loss_is_nan_at_step_4():
    script = load_script()
    original, calls = script.cross_entropy_sum, []

    def cross_entropy_sum(logits, labels):
        calls.append(1)
        is_bad = len(calls) == 4 and os.environ["RANK"] == "1"
        return original(logits, labels) * (float("nan") if is_bad else 1)

    script.cross_entropy_sum = cross_entropy_sum


def test_elastic_restart_goes_on_from_its_own_run_only(pool, tmp_path):
    """After a restart by torchrun the run resumes; what another run has left in the directory does not count."""
    flags = [*FLAGS, "--output_dir", tmp_path, "--save_every", 2]
    assert pool.launch(1, *flags, "--num_train_steps", 6).codes == [0]
    time.sleep(1)  # runs are named by the second
    restart = {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert pool.launch(1, *flags, "--num_train_steps", 6, before=kill_before_first_save).codes == [-9]
    launch = pool.launch(1, *flags, "--num_train_steps", 4, env=restart)
    assert launch.codes == [0] and "starts at step 0" in launch.outputs[0], launch.outputs[0]
    launch = pool.launch(1, *flags, "--num_train_steps", 6, env=restart)
    assert launch.codes == [0] and ", step 4" in launch.outputs[0], launch.outputs[0]
    kept = sorted(path.name for path in tmp_path.glob("checkpoint_*"))
    assert len(kept) == 4, kept  # two of each run


def kill_before_first_save():
    script = load_script()
    script.save_checkpoint = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
