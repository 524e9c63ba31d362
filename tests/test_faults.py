"""Real faults: kills, full disks, damaged and hostile checkpoints. What was saved is still there, and is found."""

import collections
import contextlib
import functools
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import DP, FLAGS, ONE, before_call, load_script, make_config, make_model, read_metrics, save


# a checkpoint whose parameters and moments all have the value of its step, so that a mixed one cannot be missed


def small_model(step, layers=1):
    model = make_model(make_config("llama", tied=True, vocab=64, num_hidden_layers=layers))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return model


def filled_optimizer(model, step):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    load_script().init_optimizer_state(optimizer)
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.fill_(step)
    return optimizer


def save_step(folder, step, keep_last=2, sizes=ONE, before=lambda: None):
    model = small_model(step)
    if dist.is_initialized():
        load_script().apply_fsdp(model, dist.init_device_mesh("cpu", (dist.get_world_size(),)), dtype=torch.float32)
    optimizer = filled_optimizer(model, step)
    before()
    return save(folder, model, optimizer, sizes, step, run="run", keep_last=keep_last).result()


def resumed_step(folder):
    """The step that --resume auto finds, after loading it and comparing every value with it."""
    script = load_script()
    found = script.find_checkpoint("auto", Path(folder), 0, True)
    if found is None:
        return None
    path, manifest = found
    model = small_model(-1)
    optimizer = filled_optimizer(model, -1)
    script.load_checkpoint(path, model, optimizer)
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    values = {value for tensor in tensors for value in tensor.unique().tolist()}
    assert values == {manifest["step"]}, f"{path} of step {manifest['step']} is mixed, it has {sorted(values)}"
    return manifest["step"]


# a kill before each call of a save that touches files, on any of two ranks


def kill_at_call(folder, number, calls):
    """SIGKILL this process right before its n-th call that opens, writes out, renames, creates or removes a file."""

    def count(call):
        calls.append(call)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event, args):
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(args[0]).startswith(str(folder)):
            count(event)

    def profile(frame, event, function):
        # what Python's own events leave out; `write` fills a buffer, `flush` and the end of a `with` write it out
        if event == "c_call" and function.__name__ in ("flush", "close", "fsync", "__exit__"):
            owner = getattr(function, "__self__", None)
            if hasattr(owner, "fileno") or getattr(owner, "__name__", "") == "posix":
                count(function.__name__)

    sys.addaudithook(audit)
    sys.setprofile(profile)


def save_and_die(folder, store, rank, victim, number, step, sizes):
    """One rank of a save in which the victim dies before its n-th call. Exits with 0, 1, or 9 where it lives."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
        calls, arm = [], lambda: None
        if rank == victim:
            arm = functools.partial(kill_at_call, folder, number, calls)
        with contextlib.suppress(Exception):  # what gloo raises when the other rank is gone
            save_step(folder, step, sizes=sizes, before=arm)
        sys.setprofile(None)
    if rank == victim:
        Path(f"{store}.count").write_text(json.dumps(calls))
    os._exit(0)


def kill_one(template, folder, victim, number, step):
    """Copy what was saved before, kill the next save; returns the calls that the victim has made if it has lived."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder / "output")
    store = folder / "store"
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            save_and_die(folder / "output", store, rank, victim, number, step, DP)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    count = Path(f"{store}.count")
    assert codes[victim] == (0 if count.exists() else -signal.SIGKILL), codes
    return json.loads(count.read_text()) if count.exists() else None


def sweep(folder, saved_before, victim, every):
    """Kill the save that follows `saved_before` saves at its calls; returns the step that is found after each."""
    dist.destroy_process_group()  # a forked child cannot use its parent's
    folder, found = Path(folder), {}
    (template := folder / "template").mkdir(parents=True)
    for step in range(1, saved_before + 1):
        save_step(template, step, sizes=DP)
    calls = kill_one(template, folder / "whole", victim, 10**9, saved_before + 1)
    moving = ("os.rename", "os.rmdir")  # the kills before and after these are always among those of a short sweep
    numbers = [n for n in range(1, len(calls) + 1) if n % every == 0 or {*calls[max(0, n - 2) : n]} & {*moving}]
    for number in numbers:
        kill_one(template, folder / "killed", victim, number, saved_before + 1)
        output = folder / "killed" / "output"
        found[number] = resumed_step(output)
        # the next save sweeps what the killed one left, and is found
        save_step(output, saved_before + 2)
        step, left = resumed_step(output), [*output.glob(".tmp_*"), *output.glob(".removed_*")]
        assert step == saved_before + 2, f"killed at call {number}: the next save is not found, but step {step}"
        assert not left, f"killed at call {number}: the next save has left {left}"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    return calls, found


@pytest.mark.parametrize("victim", [0, 1], ids=["rank 0", "rank 1"])
@pytest.mark.parametrize("saved_before", [0, 1, 2], ids=["first", "second", "prunes"])
def test_kill_at_every_call(pool, tmp_path, saved_before, victim):
    """A kill between any two calls leaves the last complete checkpoint, or the new one, bit for bit; never a mix."""
    every = 1 if os.environ.get("SWEEP") == "all" else 29
    calls, found = pool.run(1, sweep, str(tmp_path), saved_before, victim, every, timeout=1800)[0]
    print(f"killed at {len(found)} of {len(calls)} calls; steps found: {collections.Counter(found.values())}")
    assert set(found.values()) <= {saved_before or None, saved_before + 1}, f"killed at call: step found {found}"
    assert {"open", "flush", "fsync"} <= set(calls), collections.Counter(calls)


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
    "a manifest with no checksum": (
        "manifest.json",
        lambda p: change_manifest(p, files={".metadata": {"size": 1}}),
        "readable",
    ),
    "a manifest of a negative step": ("manifest.json", lambda p: change_manifest(p, step=-5), "no readable manifest"),
    "a manifest with a path": ("manifest.json", lambda p: change_manifest(p, run="../../a"), "no readable manifest"),
    "a manifest with no files": ("manifest.json", lambda p: change_manifest(p, files={}), "no readable manifest"),
    "a manifest with no entries": (
        "manifest.json",
        lambda p: change_manifest(p, files={".metadata": 5}),
        "no readable",
    ),
    "newer format": ("manifest.json", lambda p: change_manifest(p, format=99), "format 99"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_named_and_skipped(script, tmp_path, capsys, damage):
    file, do, sentence = DAMAGES[damage]
    for step in (1, 2):
        path = save_step(tmp_path, step)
    do(path / file)
    assert resumed_step(tmp_path) == 1
    printed = capsys.readouterr().out
    assert "skipped" in printed and sentence in printed and str(path) in printed, printed
    with pytest.raises(SystemExit) as refusal:
        script.find_checkpoint(str(path), tmp_path, 0, True)
    assert refusal.value.code == 2 and sentence in capsys.readouterr().err


def test_checksums_can_be_turned_off_sizes_cannot(script, tmp_path):
    path = save_step(tmp_path, 1)
    flip(path / "__0_0.distcp")
    assert script.find_checkpoint("auto", tmp_path, 0, False) is not None
    truncate(path / "__0_0.distcp", 10)
    assert script.find_checkpoint("auto", tmp_path, 0, False) is None


def test_another_models_checkpoint_is_refused_by_name(script, tmp_path, capsys):
    """More layers or fewer: a layer of the checkpoint that the model does not have must not be dropped in silence."""
    path = save_step(tmp_path, 1)
    two_layers = small_model(2, layers=2)
    with pytest.raises(SystemExit):
        script.load_checkpoint(path, two_layers)
    assert "of another model, model.layers.1" in capsys.readouterr().err
    path = save(tmp_path, two_layers, filled_optimizer(two_layers, 2), ONE, step=2).result()
    with pytest.raises(SystemExit):
        script.load_checkpoint(path, small_model(0))
    assert "of another model, model.layers.1" in capsys.readouterr().err


def test_a_missing_entry_is_named(script, tmp_path, capsys):
    """The optimizer's state of one parameter lacks; torch speaks of float() and a dict, or resumes without it."""
    model = small_model(1)
    optimizer = filled_optimizer(model, 1)
    state = script.AppState(model, optimizer).state_dict()
    del state["optim"]["state"]["model.norm.weight"]["exp_avg"]
    dcp.save({"app": state}, checkpoint_id=tmp_path, no_dist=True)
    model = small_model(0)
    with pytest.raises(SystemExit):
        script.load_checkpoint(tmp_path, model, filled_optimizer(model, 0))
    assert "app.optim.state.model.norm.weight.exp_avg" in capsys.readouterr().err


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_checkpoints_that_run_code_are_refused(script, tmp_path, capsys):
    """Stock DCP runs both of these; the first shows that the bombs work."""
    path, exploded = save_step(tmp_path / "a", 1), tmp_path / "exploded"
    with (path / ".metadata").open("wb") as file:
        pickle.dump(Bomb(exploded), file)
    with pytest.raises(SystemExit):
        script.load_checkpoint(path, small_model(0))
    assert not exploded.exists() and "has no place in a checkpoint's metadata" in capsys.readouterr().err
    pickle.load((path / ".metadata").open("rb"))
    assert exploded.exists()
    exploded.unlink()

    # a bomb in an entry that is no tensor: the options of the optimizer
    model = small_model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = script.AppState(model, optimizer).state_dict()
    state["optim"]["param_groups"] = Bomb(exploded)
    dcp.save({"app": state}, checkpoint_id=tmp_path / "b", no_dist=True)
    with pytest.raises(SystemExit):
        script.load_checkpoint(tmp_path / "b", model, optimizer)
    assert not exploded.exists() and "cannot be loaded" in capsys.readouterr().err


# an error on one of two ranks in each phase of a save: all end alike, with one sentence, and the step before is found


def raising(*args, **kwargs):
    raise OSError(5, "Input/output error")


PHASES = {
    # where it is raised, and on which rank
    "the directory": (Path, "mkdir", 0),
    "the config": (Path, "write_text", 0),
    "the plan": (dcp.DefaultSavePlanner, "create_local_plan", 1),
    "the global plan": (dcp.DefaultSavePlanner, "create_global_plan", 0),
    "the shards of rank 0": (dcp.FileSystemWriter, "write_data", 0),
    "the shards of rank 1": (dcp.FileSystemWriter, "write_data", 1),
    "the metadata": (dcp.FileSystemWriter, "finish", 0),
    "the names of tied parameters": (load_script(), "add_tied_names", 0),
    "the checksums": (load_script(), "checksum", 1),
    "the manifest": (load_script(), "commit_checkpoint", 0),
    "the flush": (load_script(), "flush", 0),
    "the old one's move": (os, "rename", 0),
}


def raise_in_each_phase(folder):
    """For each phase: exit code and sentence of this rank, and on rank 0 what is left in the directory after."""
    results, rank = {}, dist.get_rank()
    save_step(folder, 1, sizes=DP)
    for phase, (owner, name, victim) in PHASES.items():
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as printed:
            patch.setattr(time, "sleep", lambda seconds: None)  # what lets the rank that prints end first
            if rank == victim:
                patch.setattr(owner, name, raising)
            try:
                save_step(folder, 2, sizes=DP)
                code = 0
            except SystemExit as error:
                code = error.code
        dist.barrier()
        results[phase] = (code, printed.getvalue(), sorted(path.name for path in Path(folder).iterdir()))
    return results


def test_an_error_in_any_phase_ends_all_ranks_alike(pool, tmp_path):
    by_rank = pool.run(2, raise_in_each_phase, str(tmp_path))
    for phase in PHASES:
        (code, sentence, left), (other_code, other_sentence, _) = (results[phase] for results in by_rank)
        assert (code, other_code) == (2, 2), f"{phase}: exit codes {code} and {other_code}"
        expected = f"3D_parallel.py: error: step 2 could not be saved in {tmp_path}: [Errno 5] Input/output error"
        assert (sentence.strip(), other_sentence) == (expected, ""), phase
        assert left == ["checkpoint_tp1_dp2_cp1"], f"{phase} has left {left}"
    assert resumed_step(tmp_path) == 1


# faults that end processes, through main()


def break_second_save(rank, action):
    """On one rank, do something in the middle of the second save, where its shards are written."""
    before_call(dcp.FileSystemWriter, "write_data", 2, action, [rank])


def kill_rank_1():
    break_second_save(1, lambda: os.kill(os.getpid(), signal.SIGKILL))


def term_and_kill_rank_1():
    """As a scheduler does whose patience ends in the middle of the save that its SIGTERM has asked for."""

    def action():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)

    break_second_save(1, action)


def files_may_not_grow():
    break_second_save(0, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))


def rank_1_stops():
    break_second_save(1, lambda: os.kill(os.getpid(), signal.SIGSTOP))


FAULTS = {
    # what happens in the second save: exit codes (None: any but 0), what is said, more flags
    "rank 1 is killed": (kill_rank_1, None, "", []),
    "SIGTERM, then SIGKILL": (term_and_kill_rank_1, None, "", []),
    "no more space for rank 0": (files_may_not_grow, 2, "no space left on the device", []),
    "no more space, async": (files_may_not_grow, 2, "no space left on the device", ["--async_save"]),
    "rank 1 hangs": (rank_1_stops, None, "", []),
    "rank 1 hangs, async": (rank_1_stops, None, "", ["--async_save"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_a_save_keeps_the_older_checkpoint(pool, tmp_path, fault):
    before, code, sentence, more = FAULTS[fault]
    flags = [*FLAGS, "--output_dir", tmp_path, "--num_train_steps", 6, "--save_every", 2, "--timeout", 5]
    launch = pool.launch(2, *flags, *more, before=before, timeout=90)
    output = "\n".join(launch.outputs)
    assert all(launch.codes) if code is None else launch.codes == [code, code], (launch.codes, output)
    assert sentence in output and launch.seconds < 60, output
    assert sentence == "" or ("Traceback" not in output and output.count("error: step 4 could not be saved") == 1), (
        output
    )
    again = pool.launch(1, *flags, "--resume", "auto")
    assert again.codes == [0] and ", step 2" in again.outputs[0], again.outputs[0]
    assert [row["step"] for row in read_metrics(tmp_path)][-4:] == [3, 4, 5, 6]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB, where this machine lets a test mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True)
    if mount.returncode:
        pytest.skip("this machine does not let a test mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_full_and_read_only_disk(small_disk, capsys):
    save_step(small_disk, 1)
    with (small_disk / "filler").open("wb") as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1 << 16))
    with pytest.raises(SystemExit):
        save_step(small_disk, 2)
    assert "step 2 could not be saved" in (printed := capsys.readouterr().err) and "no space left" in printed.lower()
    assert resumed_step(small_disk) == 1 and not list(small_disk.glob(".tmp_*"))
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(SystemExit):
        save_step(small_disk, 2)
    assert "step 2 could not be saved" in (printed := capsys.readouterr().err) and "Read-only" in printed
    assert resumed_step(small_disk) == 1


def slow_down():
    script = load_script()
    original = script.train_step
    script.train_step = lambda *args: (time.sleep(0.5), original(*args))[1]


def test_a_second_run_in_the_same_directory_is_refused(pool, tmp_path):
    flags = [*FLAGS, "--output_dir", tmp_path, "--num_train_steps", 8]
    first = []
    thread = threading.Thread(target=lambda: first.append(pool.launch(1, *flags, before=slow_down)))
    thread.start()
    while not (tmp_path / "metrics.jsonl").exists() and thread.is_alive():
        time.sleep(0.1)
    second = pool.launch(2, *flags)
    assert second.codes == [2, 2] and second.seconds < 30, second.outputs
    assert "another run is writing to it" in "".join(second.outputs) and "Traceback" not in "".join(second.outputs)
    thread.join()
    assert first[0].codes == [0] and (tmp_path / "checkpoint_tp1_dp1_cp1" / "manifest.json").exists(), first
    # the lock has ended with the run
    assert pool.launch(1, *flags, "--resume", "auto").codes == [0]


def rank_1_stops_in_load():
    before_call(load_script().SafeReader, "read_data", 1, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def test_a_hang_in_a_load_ends(pool, tmp_path):
    flags = [*FLAGS, "--output_dir", tmp_path, "--timeout", 5]
    assert pool.launch(1, *flags, "--num_train_steps", 2).codes == [0]
    more = ["--num_train_steps", 4, "--resume", "auto"]
    launch = pool.launch(2, *flags, *more, before=rank_1_stops_in_load, timeout=90)
    assert all(launch.codes) and launch.seconds < 60, (launch.codes, launch.outputs)
    assert pool.launch(1, *flags, *more).codes == [0]


@pytest.mark.parametrize("action", ["raises", "stops"])
def test_fault_on_one_rank_ends_all(pool, tmp_path, action):
    """In the middle of a step, where the ranks of the mesh's own groups wait for each other."""
    flags = [*FLAGS, "--output_dir", tmp_path, "--num_train_steps", 50, "--timeout", 5]
    before = {"raises": rank_1_raises_in_training, "stops": rank_1_stops_in_training}[action]
    launch = pool.launch(2, *flags, before=before, timeout=90)
    assert all(launch.codes) and launch.seconds < 60, (launch.codes, launch.outputs)
    assert action == "stops" or "fault of the test" in launch.outputs[1]


def rank_1_raises_in_training():
    def action():
        raise RuntimeError("fault of the test")

    before_call(load_script(), "forward_loss", 3, action)


def rank_1_stops_in_training():
    before_call(load_script(), "forward_loss", 3, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def test_a_non_finite_loss_ends_the_run_before_it_is_saved(pool, tmp_path):
    flags = [*FLAGS, "--output_dir", tmp_path, "--num_train_steps", 6, "--save_every", 2]
    launch = pool.launch(2, *flags, before=loss_is_nan_at_step_4, timeout=90)
    output = "\n".join(launch.outputs)
    assert launch.codes == [2, 2] and output.count("error: step 4 has loss nan") == 1, output
    assert "Traceback" not in output
    [(path, manifest)] = load_script().list_checkpoints(tmp_path)
    assert manifest["step"] == 2 and len(read_metrics(tmp_path)) == 3, path


def loss_is_nan_at_step_4():
    script = load_script()
    original, calls = script.forward_loss, []

    def forward_loss(model, batch):
        calls.append(1)
        is_bad = len(calls) == 4 and os.environ["RANK"] == "1"
        loss, router_logits = original(model, batch)
        return loss * (float("nan") if is_bad else 1), router_logits

    script.forward_loss = forward_loss


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
