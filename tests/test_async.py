"""Asynchronous saves: the values are those at the call, one save is in flight, errors end the run, the end waits."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import (
    FLAGS,
    Mesh,
    load_script,
    make_batches,
    make_config,
    make_model,
    make_optimizer,
    read_metrics,
    relative,
    save,
    shard_model,
    whole,
)


SIX_STEPS = [*FLAGS, "--num_train_steps", 6]


def hold_up_the_writing(seconds=0.5):
    writer = dcp.FileSystemWriter.write_data
    dcp.FileSystemWriter.write_data = lambda self, plan, planner: (time.sleep(seconds), writer(self, plan, planner))[1]


def full_copy(model, optimizer):
    """All values, copied by plain clones: of the parameters, the moments and Adam's step."""
    tensors = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    return [whole(tensor) for tensor in tensors]


def change_right_after_the_call(sizes, folder):
    """Three saves, each followed at once by optimizer steps while the writing thread is held up."""
    script = load_script()
    hold_up_the_writing(0.3)
    model, mesh = shard_model(make_model(make_config("llama", tied=True, vocab=512)), sizes)
    optimizer = make_optimizer(model, 0.01)
    script.init_optimizer_state(optimizer)
    [(inputs, labels)] = make_batches(1, 512)
    batches = script.shard_batch(inputs, labels, mesh, inputs.shape[0] // sizes.dp, torch.device("cpu"))
    background, saving, expected = load_script().start_background(torch.device("cpu"), 60), None, []
    for step in range(3):
        expected.append(full_copy(model, optimizer))
        if saving is not None:
            saving.result()
        saving = save(folder, model, optimizer, sizes, step, background=background)
        was_done = saving.done()
        script.train_step(model, optimizer, batches, mesh, 1.0)
        script.train_step(model, optimizer, batches, mesh, 1.0)
        assert not was_done, "that was no asynchronous save"
    saving.result()
    found = {manifest["step"]: path for path, manifest in script.list_checkpoints(Path(folder))}
    for step, values in enumerate(expected):
        script.load_checkpoint(found[step], model, optimizer)
        pairs = zip(full_copy(model, optimizer), values, strict=True)
        errors = [f"{relative(a, b):.1e}" for a, b in pairs if not torch.equal(a, b)]
        assert not errors, f"step {step} has other values in {len(errors)} of {len(values)} tensors, off by {errors}"
        steps = {state["step"].item() for state in optimizer.state.values()}
        assert steps == {2 * step}, f"Adam has done {steps} steps instead of {2 * step}"
    size = dist.get_world_size(background[2])
    assert size == dist.get_world_size() and background[2] is not dist.group.WORLD, f"a group of {size} ranks"


def test_values_are_those_at_the_call(pool, tmp_path):
    pool.run(4, change_right_after_the_call, Mesh(cp=2, tp=2), str(tmp_path))


def test_a_run_with_asynchronous_saves_is_the_same_run(pool, tmp_path):
    """Saved at each step, on a slow disk: the same numbers, and the last two steps are there when the run ends."""
    flags = [*SIX_STEPS, "--save_every", 1, "--dp_size", 2]
    for name, more, before in [("sync", [], None), ("async", ["--async_save"], hold_up_the_writing)]:
        launch = pool.launch(2, *flags, *more, "--output_dir", tmp_path / name, before=before, timeout=60)
        assert launch.codes == [0, 0], launch.outputs
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    rows = [[[row[key] for key in keys] for row in read_metrics(tmp_path / name)] for name in ("sync", "async")]
    assert rows[0] == rows[1]
    for name in ("sync", "async"):
        kept = load_script().list_checkpoints(tmp_path / name)
        assert [(path.name, manifest["step"]) for path, manifest in kept] == [
            ("checkpoint_tp1_dp2_cp1", 6),
            ("checkpoint_tp1_dp2_cp1_step5", 5),
        ]
        assert all(load_script().check_files(path, manifest, True) is None for path, manifest in kept)


def break_the_save_of_step_2():
    writer = dcp.FileSystemWriter.write_data

    def write_data(self, plan, planner):
        if os.environ["RANK"] == "1":
            raise OSError(5, "Input/output error")
        return writer(self, plan, planner)

    dcp.FileSystemWriter.write_data = write_data
    script = load_script()
    train_step = script.train_step
    script.train_step = lambda *args: (time.sleep(0.3), train_step(*args))[1]


def test_an_error_ends_the_run_at_the_next_step(pool, tmp_path):
    flags = [*SIX_STEPS, "--output_dir", tmp_path, "--save_every", 2, "--dp_size", 2, "--async_save"]
    launch = pool.launch(2, *flags, before=break_the_save_of_step_2, timeout=60)
    output = "\n".join(launch.outputs)
    assert launch.codes == [2, 2] and "Traceback" not in output, output
    assert output.count("error: step 2 could not be saved in") == 1 and "Input/output error" in output, output
    assert 3 <= read_metrics(tmp_path)[-1]["step"] <= 4, "the run went on although its checkpoint was lost"
    assert not list(tmp_path.glob("checkpoint*")) and not list(tmp_path.glob(".tmp_*"))
