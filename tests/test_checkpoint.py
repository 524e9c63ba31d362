"""A checkpoint of any mesh opens in any mesh: bit for bit, with stock DCP too, and training goes on as if unbroken."""

import functools
import io
import json
import math
import shutil
from pathlib import Path

import pytest
import reference
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from conftest import (
    ALL,
    DP,
    FLAGS,
    ONE,
    TP,
    Mesh,
    assert_close,
    differing,
    load_script,
    make_batches,
    make_config,
    make_model,
    make_optimizer,
    read_metrics,
    save,
    shard_model,
    whole,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.utils import _create_file_view


BOTH = Mesh(cp=2, tp=2)
SEVEN = [ONE, ALL, Mesh(dp=4), Mesh(tp=4), Mesh(cp=4), BOTH, Mesh(dp=2, cp=4)]  # from each into each
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM, STEPS, TOLERANCE = 1e-2, 0.1, 1.0, 8, 1e-5
CONFIG = {"family": "llama", "vocab": 509, "tied": False, "num_hidden_layers": 1}  # 509 is a prime: no tp divides it
CPU = torch.device("cpu")


def build(sizes, **config):
    """Model, optimizer, mesh; the learning rate is constant, so that the plain process needs no schedule."""
    model, mesh = shard_model(make_model(make_config(**(CONFIG | config))), sizes)
    return model, make_optimizer(model, LEARNING_RATE, WEIGHT_DECAY), mesh


def train(model, optimizer, mesh, first, last):
    """Steps first to last (from 0, last excluded) of the one sequence of batches; returns losses and norms."""
    script, results = load_script(), []
    for inputs, labels in make_batches(STEPS, CONFIG["vocab"])[first:last]:
        dp = mesh["dp"].size()
        micro_batches = script.shard_batch(inputs, labels, mesh, inputs.shape[0] // dp, CPU)
        results.append(tuple(script.train_step(model, optimizer, micro_batches, mesh, MAX_NORM).tolist()[:2]))
    return results


def full_state(model, optimizer):
    """Every parameter and every optimizer tensor, gathered, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for parameter, entries in optimizer.state.items():
        state |= {f"optim.state.{names[id(parameter)]}.{key}": value for key, value in entries.items()}
    return {key: whole(tensor) for key, tensor in state.items()}


def save_after_4_steps(sizes, folder):
    model, optimizer, mesh = build(sizes)
    results = train(model, optimizer, mesh, 0, 4)
    save(folder, model, optimizer, sizes, step=4).result()
    state = full_state(model, optimizer)
    return results, state if dist.get_rank() == 0 else None


def load_each(sizes, folders, expected_states, trained):
    """In one mesh: load the checkpoint of each folder, compare bit for bit; from those in `trained` go on to step 8."""
    script, results = load_script(), []
    for folder, expected in zip(folders, expected_states):
        model, optimizer, mesh = build(sizes)
        path, _ = script.find_checkpoint("auto", Path(folder), 0, True)
        script.load_checkpoint(path, model, optimizer)
        wrong = differing(full_state(model, optimizer), expected) if expected else {}
        results.append((wrong, train(model, optimizer, mesh, 4, STEPS) if folder in trained else None))
    return results


@functools.cache
def unbroken():
    batches = make_batches(STEPS, CONFIG["vocab"])
    options = {"learning_rate": LEARNING_RATE, "max_grad_norm": MAX_NORM, "weight_decay": WEIGHT_DECAY}
    losses, norms, _ = reference.train(make_model(make_config(**CONFIG)), batches, optimizer="adamw", **options)
    return losses, norms


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """For each mesh: the folder with its checkpoint of step 4, and the gathered state at the save."""
    result = {}
    for sizes in SEVEN:
        folder = tmp_path_factory.mktemp(str(sizes))
        results, state = pool.run(sizes.ranks, save_after_4_steps, sizes, str(folder))[0]
        for numbers, expected, what in zip(zip(*results), unbroken(), ("losses", "norms")):
            assert_close(numbers, expected[:4], TOLERANCE, f"{what} of steps 1 to 4 in {sizes}")
        result[sizes] = (folder, state)
    return result


def checkpoint_of(folder):
    [path] = Path(folder).glob("checkpoint_*")
    return path


@pytest.mark.parametrize("sizes", SEVEN, ids=lambda sizes: f"into-{sizes}")
def test_every_mesh_into_every_mesh(pool, saved, sizes):
    folders, states = zip(*[(str(folder), state) for folder, state in saved.values()])
    # on 8 ranks a step takes most of a second, so there only some of the seven sources go on
    trained = folders[: {1: 7, 2: 7, 4: 4, 8: 3}[sizes.ranks]]
    by_source = zip(saved, pool.run(sizes.ranks, load_each, sizes, folders, states, trained)[0])
    for source, (wrong, results) in by_source:
        assert not wrong, f"{source} loaded into {sizes}: not bit-equal after the load: {wrong}"
        for numbers, expected, what in zip(zip(*(results or ())), unbroken(), ("losses", "norms")):
            assert_close(numbers, expected[4:], TOLERANCE, f"{source} loaded into {sizes}: {what} of steps 5 to 8")


@pytest.mark.parametrize("sizes", SEVEN, ids=str)
def test_stock_dcp_reads_it_in_one_process(saved, sizes):
    """With no code of the script: each tensor, read whole into plain memory, is what was gathered at the save."""
    folder, state = saved[sizes]
    wrong = differing(read_with_stock_dcp(checkpoint_of(folder), state), state)
    assert not wrong, f"saved in {sizes}: {wrong}"


def read_with_stock_dcp(path, state):
    """Tensors of these names and sizes, read by one process into plain memory."""
    target = {f"app.{key}": torch.full_like(value, math.nan) for key, value in state.items()}
    dcp.load(target, checkpoint_id=path, no_dist=True)
    return {key.removeprefix("app."): value for key, value in target.items()}


class SpecAppState(Stateful):
    """The class of the project's contract (spec/dcp_save.txt), as a user would paste it."""

    def __init__(self, model, optimizer=None):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model_state_dict, optimizer_state_dict = get_state_dict(self.model, self.optimizer)
        return {"model": model_state_dict, "optim": optimizer_state_dict}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def load_with_the_contract(sizes, path, expected):
    model, optimizer, _ = build(sizes)
    dcp.load(state_dict={"app": SpecAppState(model, optimizer)}, checkpoint_id=path)
    return differing(full_state(model, optimizer), expected)


def save_with_the_contract(sizes, path):
    model, optimizer, mesh = build(sizes)
    train(model, optimizer, mesh, 0, 2)
    dcp.save(state_dict={"app": SpecAppState(model, optimizer)}, checkpoint_id=path)
    expected = full_state(model, optimizer)
    model, optimizer, _ = build(sizes)
    load_script().load_checkpoint(Path(path), model, optimizer)
    return differing(full_state(model, optimizer), expected)


def test_the_contracts_snippets_read_and_write_it(pool, saved, tmp_path):
    folder, state = saved[ALL]
    for sizes in [Mesh(dp=2, tp=2), ONE]:
        wrong = pool.run(sizes.ranks, load_with_the_contract, sizes, str(checkpoint_of(folder)), state)[0]
        assert not wrong, f"loaded into {sizes}: {wrong}"
    wrong = pool.run(TP.ranks, save_with_the_contract, TP, str(tmp_path / "theirs"))[0]
    assert not wrong, f"saved in {TP}: {wrong}"


def test_same_mesh_goes_on_bit_equal_with_dropout(pool, script, tmp_path):
    """Through main(): an unbroken run, and one that was resumed twice; the masks of a step depend on nothing before."""
    make_config("llama", vocab=320, num_hidden_layers=1, attention_dropout=0.1).save_pretrained(tmp_path / "model")
    script.byte_tokenizer().save_pretrained(tmp_path / "model")
    flags = ["--model_name", tmp_path / "model", "--from_scratch", "--tp_size", 2, "--dp_size", 2, "--seq_len", 32]
    flags += ["--global_batch_size", 4, "--num_train_steps", 6, "--warmup_steps", 2, "--learning_rate", 0.01]
    flags += ["--save_every", 2, "--resume", "auto"]
    for name, before in [("whole", None), ("parts", stop_after_step_2), ("parts", stop_after_step_4), ("parts", None)]:
        launch = pool.launch(4, *flags, "--output_dir", tmp_path / name, before=before)
        assert any(launch.codes) == (before is not None), launch.outputs
    expected, rows = [read_metrics(tmp_path / name) for name in ("whole", "parts")]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row, other in zip(rows, expected):
        for key in ("loss", "grad_norm"):
            assert row[key] == other[key], f"{key} of step {row['step']}: {row[key]}, unbroken: {other[key]}"


def test_options_of_the_optimizer_stay_as_the_caller_has_set_them(script, tmp_path):
    model = make_model(make_config(**CONFIG))
    path = save(tmp_path, model, make_optimizer(model, LEARNING_RATE, 0.1), ONE, step=1).result()
    optimizer = make_optimizer(model, 0.5, 0.3)
    script.load_checkpoint(path, model, optimizer)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.3), (0.5, 0.0)]


def saves_change_nothing(sizes, folder):
    model, optimizer, mesh = build(sizes)
    expected = train(model, optimizer, mesh, 0, 4)
    expected_state = full_state(model, optimizer)
    model, optimizer, mesh = build(sizes)
    results = []
    for step in range(4):
        save(folder, model, optimizer, sizes, step=step).result()
        results += train(model, optimizer, mesh, step, step + 1)
    assert results == expected, f"losses and norms with saves: {results}, without: {expected}"
    return differing(full_state(model, optimizer), expected_state)


def run_and_compare(pool, sizes, function, folder):
    """Call it on the ranks of a mesh; it returns what is not bit-equal there."""
    for rank, wrong in enumerate(pool.run(sizes.ranks, function, sizes, str(folder))):
        assert not wrong, f"rank {rank} of {sizes}: {wrong}"


def test_saving_at_step_0_and_at_each_step_changes_nothing(pool, tmp_path):
    run_and_compare(pool, TP, saves_change_nothing, tmp_path)


def frozen_unused_and_tied(sizes, folder):
    """A tied model with a frozen layer norm and a parameter that no loss reaches."""
    script = load_script()

    def make():
        model, _, mesh = build(sizes, tied=True, vocab=512)
        model.model.norm.weight.requires_grad_(False)
        return model, make_optimizer(model, LEARNING_RATE, WEIGHT_DECAY), mesh

    model, optimizer, mesh = make()
    assert model.lm_head.weight is model.model.embed_tokens.weight, "sharding has broken the tie"
    train(model, optimizer, mesh, 0, 2)
    unused = next(p for p in model.parameters() if p.requires_grad)
    optimizer.state[unused] = {k: torch.zeros_like(v) for k, v in optimizer.state[unused].items()}
    path = save(folder, model, optimizer, sizes, step=2).result()
    expected = full_state(model, optimizer)
    expected_losses = train(model, optimizer, mesh, 2, 4)
    model, optimizer, mesh = make()
    script.load_checkpoint(path, model, optimizer)
    assert model.lm_head.weight is model.model.embed_tokens.weight, "loading has broken the tie"
    wrong = differing(full_state(model, optimizer), expected)
    losses = train(model, optimizer, mesh, 2, 4)
    assert losses == expected_losses, f"losses and norms after the load: {losses}, before: {expected_losses}"
    frozen = [key for key in expected if key.startswith("optim") and "model.norm.weight" in key]
    assert not frozen, f"the optimizer has a state of what is frozen: {frozen}"
    # a model alone comes out of the same checkpoint, with no optimizer at hand
    loaded, optimizer, _ = make()
    script.load_checkpoint(path, loaded, optimizer)
    other, _ = shard_model(make_model(make_config(**(CONFIG | {"vocab": 512, "tied": True})), seed=3), sizes)
    script.load_checkpoint(path, other)
    return wrong | differing(full_parameters(other), full_parameters(loaded))


def full_parameters(model):
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def test_frozen_unused_and_tied_parameters(pool, tmp_path):
    run_and_compare(pool, BOTH, frozen_unused_and_tied, tmp_path)


def tied_weights_are_written_once(sizes, folder):
    """Bytes in the files against bytes of the state; and every name, that of the tied head too, read by stock DCP."""
    model, optimizer, mesh = build(sizes, tied=True, vocab=512)
    train(model, optimizer, mesh, 0, 1)
    path = save(folder, model, optimizer, sizes, step=1).result()
    expected, names = full_state(model, optimizer), model.state_dict().keys()
    expected["model.lm_head.weight"] = expected["model.model.embed_tokens.weight"]
    assert "lm_head.weight" in names, f"the model does not name its tied head: {[*names]}"
    if dist.get_rank() == 0:  # which alone reads
        metadata = dcp.FileSystemReader(path).read_metadata()
        path_of_head = metadata.planner_data["app.model.lm_head.weight"]
        assert path_of_head == ("app", "model", "lm_head.weight"), f"the head is at {path_of_head}"
        places = {(place.relative_path, place.offset): place.length for place in metadata.storage_data.values()}
        stored, written = sum(places.values()), sum(file.stat().st_size for file in path.glob("*.distcp"))
        assert stored == written, f"{written} bytes in the files, of which {stored} belong to an entry"
        return differing(read_with_stock_dcp(path, expected), expected)


def test_tied_weights_are_written_once_and_found_by_both_names(pool, tmp_path):
    run_and_compare(pool, BOTH, tied_weights_are_written_once, tmp_path)


def wrapped_layers(sizes, folder):
    """Layers that are compiled or checkpoint their activations have the keys and the values of plain ones."""
    script, config, mesh = load_script(), make_config(**CONFIG), load_script().build_mesh("cpu", **sizes._asdict())
    plain, optimizer, _ = build(sizes)
    plain_path = save(f"{folder}/plain", plain, optimizer, sizes, step=1).result()
    model = script.build_model(config, mesh, "cpu", torch.float32, seq_len=32)
    script.materialize(model, CPU)
    script.send_weights(model, lambda: make_model(config), "the test", None)
    layers = model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    layers[0].compile(backend="eager")
    optimizer = make_optimizer(model, LEARNING_RATE, WEIGHT_DECAY)
    path = save(f"{folder}/wrapped", model, optimizer, sizes, step=1).result()
    keys = [dcp.FileSystemReader(p).read_metadata().state_dict_metadata.keys() for p in (plain_path, path)]
    assert keys[0] == keys[1], f"only plain layers, or only wrapped ones, have {sorted(keys[0] ^ keys[1])}"
    assert not any("_orig_mod" in key or "wrapped" in key for key in keys[0]), f"names of wrappers: {[*keys[0]]}"
    train(model, optimizer, mesh, 0, 2)
    script.load_checkpoint(plain_path, model, optimizer)
    values = zip(full_parameters(plain).items(), full_parameters(model).values(), strict=True)
    return [name for (name, value), loaded in values if not torch.equal(value, loaded)]


def test_compiled_and_activation_checkpointed_layers(pool, tmp_path):
    run_and_compare(pool, TP, wrapped_layers, tmp_path)


def save_with_gradients_before_the_first_step(sizes, folder):
    """After a backward and before any step torch's own utilities leave the optimizer's part empty without a word."""
    script = load_script()
    model, optimizer, _ = build(sizes)
    model(input_ids=torch.arange(32).view(1, 32), use_cache=False).logits.sum().backward()
    path = save(folder, model, optimizer, sizes, step=0).result()
    expected = full_state(model, optimizer)
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for name, _ in model.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert f"app.optim.state.{name}.{key}" in saved, f"the checkpoint has no {key} of {name}"
            assert not expected[f"optim.state.{name}.{key}"].any(), "the save has done a step"
    script.load_checkpoint(path, model, optimizer)
    return differing(full_state(model, optimizer), expected)


def test_a_save_with_gradients_at_hand_has_the_whole_optimizer(pool, tmp_path):
    run_and_compare(pool, DP, save_with_gradients_before_the_first_step, tmp_path)


class CountingFile(io.BufferedReader):
    """A file that adds up the bytes that are read into memory."""

    total = 0

    def readinto(self, buffer):
        CountingFile.total += len(buffer)
        return super().readinto(buffer)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "view", "transposed", "three dimensions", "scalar"])
def test_a_slice_is_read_and_no_more(script, tmp_path, monkeypatch, kind):
    tensor = {
        "float32": torch.randn(300, 500),
        "bfloat16": torch.randn(300, 500).bfloat16(),
        "view": torch.randn(600, 500)[100:400],
        "transposed": torch.randn(500, 300).t(),
        "three dimensions": torch.randn(30, 20, 10),
        "scalar": torch.tensor(3.5),
    }[kind]
    with (tmp_path / "file").open("wb") as file:
        file.write(b"something before it")
        torch.save(tensor, file)
    length = (tmp_path / "file").stat().st_size - 19
    slices = [
        ((0, 300), (0, 500)),
        ((17, 40), (0, 500)),
        ((0, 300), (100, 250)),
        ((5, 2), (3, 400)),
        ((9, 0), (0, 500)),
    ]
    if tensor.ndim == 3:
        slices = [((3, 4), (0, 20), (0, 10)), ((0, 30), (5, 5), (2, 3))]
    for ranges in slices if tensor.ndim else [()]:
        offsets, lengths = (torch.Size(numbers) for numbers in (zip(*ranges) if ranges else ((), ())))
        with CountingFile(io.FileIO(tmp_path / "file")) as file:
            entry = _create_file_view(file, 19, length)
            CountingFile.total = 0
            part = script.read_slice(file, 19, entry, offsets, lengths)
        expected = tensor[tuple(slice(first, first + count) for first, count in ranges)]
        assert part.dtype == tensor.dtype and torch.equal(part, expected), ranges
        if kind in ("float32", "bfloat16", "view"):
            assert CountingFile.total - expected.nbytes < 8192, f"{CountingFile.total} bytes read for {expected.nbytes}"


def names_after_saves(sizes, folder):
    model, optimizer, _ = build(sizes)
    steps = []
    for step, run in [(1, "a"), (2, "a"), (3, "a"), (1, "b"), (2, "b"), (3, "b"), (2, "b")]:
        save(folder, model, optimizer, sizes, step, run=run, keep_last=2).result()
        steps.append(sorted(path.name for path in Path(folder).iterdir()))
    return steps


def kept_steps(folder):
    found = load_script().list_checkpoints(Path(folder))
    return sorted((manifest["run"], manifest["step"]) for _, manifest in found)


def test_names_pruning_and_other_runs(pool, tmp_path):
    """The newest has the plain name, older ones of its run are pruned, those of another run are only moved aside."""
    name = "checkpoint_tp1_dp1_cp1"
    after = pool.run(1, names_after_saves, ONE, str(tmp_path))[0]
    assert after[0] == [name]
    assert after[1] == [name, f"{name}_step1"]
    assert after[2] == [name, f"{name}_step2"]
    assert after[3] == [name, f"{name}_step2", f"{name}_step3"]
    # run a has a step 2 under the name that b's would have; both stay, and a's is as good as it was
    assert after[4] == [name, f"{name}_step1", f"{name}_step2", f"{name}_step3"]
    assert len(after[5]) == 4 and {name, f"{name}_step2", f"{name}_step3"} < set(after[5])
    # b has gone back to step 2, as after a damaged step 3: what was saved last is kept, however low its step
    assert len(after[6]) == 4 and {name, f"{name}_step2", f"{name}_step3"} < set(after[6])
    assert kept_steps(tmp_path) == [("a", 2), ("a", 3), ("b", 2), ("b", 3)]
    assert load_script().list_checkpoints(tmp_path)[0][1]["step"] == 2


def save_while_the_clock_goes_back(sizes, folder):
    model, optimizer, _ = build(sizes)
    path = save(folder, model, optimizer, sizes, step=4, keep_last=1).result()
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"saved": manifest["saved"] + 3600}))
    shutil.copytree(path, path.with_name(f"{path.name}_best"))  # somebody's own copy
    for step in (6, 8):
        save(folder, model, optimizer, sizes, step, keep_last=1).result()


def test_the_newest_is_what_was_saved_last_also_when_the_clock_goes_back(pool, tmp_path):
    pool.run(1, save_while_the_clock_goes_back, ONE, str(tmp_path))
    kept = [(path.name, manifest["step"]) for path, manifest in load_script().list_checkpoints(tmp_path)]
    assert kept == [("checkpoint_tp1_dp1_cp1", 8), ("checkpoint_tp1_dp1_cp1_best", 4)]


def test_whole_runs_resume_in_another_mesh(pool, tmp_path):
    """Through main(): 8 ranks with two copies, then 2, then plain python, against one unbroken plain run."""
    flags = ["--seq_len", 32, "--global_batch_size", 4, "--warmup_steps", 3, "--num_train_steps", 6]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert pool.launch(0, *flags, "--output_dir", whole).codes == [0]
    flags += ["--output_dir", parts, "--save_every", 2]
    stop = ["--num_train_steps", 6]
    mesh = ["--tp_size", 2, "--cp_size", 2, "--dp_replicate_size", 2, "--activation_checkpointing", "full"]
    launch = pool.launch(8, *flags, *stop, *mesh, before=stop_after_step_2)
    assert all(launch.codes), launch.outputs  # 7, or another rank's word that one is gone
    assert (parts / "checkpoint_tp2_dp2_cp2").is_dir(), launch.outputs
    launch = pool.launch(2, *flags, *stop, "--resume", "auto", "--tp_size", 2, before=stop_after_step_4)
    assert all(launch.codes), launch.outputs
    launch = pool.launch(0, *flags, *stop, "--resume", "auto")
    assert launch.codes == [0], launch.outputs
    assert "other data" not in launch.outputs[0]
    expected, rows = read_metrics(whole), read_metrics(parts)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert_close([row[key] for row in rows], [row[key] for row in expected], TOLERANCE, key)


def stop_after_save(step):
    """End the process right after the save of a step, as a machine that goes away would."""
    script = load_script()
    original = script.save_checkpoint

    def save_and_stop(*args, **kwargs):
        original(*args, **kwargs).result()
        if kwargs["about"]["step"] == step:
            raise SystemExit(7)

    script.save_checkpoint = save_and_stop


def stop_after_step_2():
    stop_after_save(2)


def stop_after_step_4():
    stop_after_save(4)


def test_options_follow_the_flags_on_resume(pool, tmp_path):
    """Another learning rate, weight decay and length on resume: as if the run had had them all along."""
    flags = [*FLAGS, "--output_dir", tmp_path]
    assert pool.launch(0, *flags, "--num_train_steps", 3).codes == [0]
    changed = ["--num_train_steps", 6, "--learning_rate", 0.01, "--resume", "auto"]
    assert pool.launch(0, *flags, *changed).codes == [0]
    more = ["--num_train_steps", 7, "--resume", "auto", "--global_batch_size", 4]
    launch = pool.launch(0, *flags, *more)
    assert launch.codes == [0] and "other data than an unbroken run: global_batch_size changed" in launch.outputs[0]
    rates = [row["lr"] for row in read_metrics(tmp_path)]
    assert rates[3:6] == [load_script().learning_rate_of_step(step, 0.01, 2, 6) for step in (3, 4, 5)]
