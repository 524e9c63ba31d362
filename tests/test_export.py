"""A checkpoint of any mesh becomes a folder for from_pretrained, bit for bit and in little memory, or starts a run."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ALL,
    FLAGS,
    ONE,
    Mesh,
    differing,
    load_script,
    make_config,
    make_model,
    read_metrics,
    save,
    shard_model,
)
from transformers import AutoModelForCausalLM, AutoTokenizer


IDS = torch.arange(24).view(1, 24)


def save_in(sizes, folder, config):
    model, _ = shard_model(make_model(config), sizes)
    model.generation_config.temperature = 0.25  # no default; and with it save_pretrained refuses the config
    optimizer = load_script().build_optimizer(model, 0.1)
    return str(save(folder, model, optimizer, sizes, step=3).result())


@pytest.mark.parametrize("sizes", [ONE, ALL, Mesh(dp=3)], ids=str)  # 3 divides no size
@pytest.mark.parametrize("family, tied", [("llama", True), ("qwen3", False)])
def test_exported_folder_is_the_model(pool, script, tmp_path, monkeypatch, sizes, family, tied):
    config = make_config(family, vocab=510 if sizes == ALL else 509, tied=tied)
    path = Path(pool.run(sizes.ranks, save_in, sizes, str(tmp_path), config)[0])
    split = script.split_torch_state_dict_into_shards
    monkeypatch.setattr(script, "split_torch_state_dict_into_shards", lambda s, **_: split(s, max_shard_size="100KB"))
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        script.export_checkpoint(path, folder, dtype)
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        expected = make_model(config).to(dtype)
        assert model.dtype == dtype and model.config.architectures == [type(model).__name__]
        wrong = differing(dict(model.named_parameters()), dict(expected.named_parameters()))
        assert not wrong, f"saved in {sizes}, exported as {dtype}: {wrong}"
        if dtype == torch.float32:  # in the other, `to` has cast the rotary frequencies of the expected model as well
            logits, expected_logits = (m.eval()(input_ids=IDS).logits for m in (model, expected))
            assert torch.equal(logits, expected_logits)
        assert model.generation_config.temperature == 0.25
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 2
        assert ("lm_head.weight" in index["weight_map"]) == (not tied), "a tied weight is in the files twice, or never"
    assert not list(tmp_path.glob(".tmp_*"))


def export_in_little_memory(folder):
    """On one process: the largest growth of anonymous memory during an export, and the bytes of the largest tensor."""
    script, peak, stop = load_script(), [0], threading.Event()
    config = make_config("llama", vocab=2048, hidden_size=512, intermediate_size=2048, num_hidden_layers=16)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    largest, total = max(p.nbytes for p in model.parameters()), sum(p.nbytes for p in model.parameters())
    path = save(folder, model, torch.optim.SGD(model.parameters(), lr=0.1), ONE, step=1).result()
    del model

    def resident():
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024

    def watch():
        while not stop.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.001)

    before = resident()
    thread = threading.Thread(target=watch)
    thread.start()
    script.export_checkpoint(path, Path(folder) / "out", torch.float32)
    stop.set()
    thread.join()
    return peak[0] - before, largest, total


def test_export_holds_a_few_tensors_only(pool, tmp_path):
    grown, largest, total = pool.run(1, export_in_little_memory, str(tmp_path))[0]
    # a file of 16 MiB at a time, its copy while it is written, and what the allocator keeps of those before
    assert total > 200e6 and grown < 4 * largest + 56e6, f"{grown / 1e6:.0f} MB, of a model of {total / 1e6:.0f} MB"


def test_a_failing_export_leaves_nothing(pool, script, tmp_path, monkeypatch, capsys):
    path = Path(pool.run(1, save_in, ONE, str(tmp_path), make_config("llama"))[0])

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script, "save_file", full)
    with pytest.raises(SystemExit):
        script.export_checkpoint(path, tmp_path / "out", torch.float32)
    assert "cannot be exported to" in (printed := capsys.readouterr().err) and "No space left" in printed
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def plain_loss(model, script, tokens, seed):
    """The loss of a model on what step 1 of a run sees, by plain Transformers and torch."""
    sequences = (len(tokens) - 1) // 32
    sequences -= min(sequences // 100, 256)  # held out
    inputs, labels = script.read_sequences(tokens, script.sequences_of_step(sequences, seed, 0, 2), 32)
    with torch.no_grad():
        logits = model.eval()(input_ids=inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


def test_export_by_command_and_runs_that_start_from_weights(pool, script, tmp_path):
    """main(): train on 2 ranks, export, and start new runs from the checkpoint and from the folder, in other meshes."""
    first = tmp_path / "first"
    assert pool.launch(2, *FLAGS, "--num_train_steps", 4, "--tp_size", 2, "--output_dir", first).codes == [0, 0]
    checkpoint, folder = first / "checkpoint_tp2_dp1_cp1", tmp_path / "exported"
    # TP_SIZE is left over in the shell; an export has no mesh
    flags = ["--export_dir", folder, "--resume", "auto", "--output_dir", first, "--export_dtype", "float32"]
    launch = pool.launch(0, *flags, env={"TP_SIZE": "2"})
    assert launch.codes == [0] and f"Transformers folder: {folder}, of {checkpoint}, step 4" in launch.outputs[0]
    model = AutoModelForCausalLM.from_pretrained(folder)
    text = "def café():\n    return  '→ tab\there'\n"
    assert (
        AutoTokenizer.from_pretrained(folder).decode(AutoTokenizer.from_pretrained(folder)(text)["input_ids"]) == text
    )
    expected = plain_loss(model, script, script.prepare_tokens("stdlib", "text", script.byte_tokenizer()), seed=5)
    for name, ranks, source in [("from_dcp", 2, checkpoint), ("from_folder", 0, folder)]:
        more = ["--init_from", source, "--num_train_steps", 2, "--seed", 5, "--output_dir", tmp_path / name]
        launch = pool.launch(ranks, *FLAGS, *more)
        assert not any(launch.codes), launch.outputs
        rows = read_metrics(tmp_path / name)
        assert [row["step"] for row in rows] == [1, 2], "a new run begins at step 0"
        assert rows[0]["loss"] == pytest.approx(expected, rel=1e-5), name
        assert rows[0]["run"] not in (first / "metrics.jsonl").read_text()
    # what is damaged is refused before any weight is read
    with open(checkpoint / "__0_0.distcp", "r+b") as file:
        file.truncate(os.path.getsize(checkpoint / "__0_0.distcp") - 1)
    launch = pool.launch(0, *FLAGS, "--init_from", checkpoint, "--output_dir", tmp_path / "damaged")
    assert launch.codes == [2] and "bytes instead of" in launch.outputs[0], launch.outputs[0]


UNFIT = {
    # a folder that Transformers loads into the tiny model without a word, and what of it would be lost
    "num_hidden_layers": make_config("llama", num_hidden_layers=6, tied=True),
    "model_type": make_config("qwen3", num_hidden_layers=3, tied=True),
    "tie_word_embeddings": make_config("llama", num_hidden_layers=3, tied=False),
}


@pytest.mark.parametrize("key", UNFIT)
def test_weights_of_another_model_are_refused(pool, tmp_path, key):
    UNFIT[key].save_pretrained(tmp_path / "folder")
    launch = pool.launch(0, "--init_from", tmp_path / "folder", "--output_dir", tmp_path / "out", timeout=60)
    assert launch.codes == [2] and launch.seconds < 30, launch.outputs
    assert f"its {key} is" in launch.outputs[0] and "Traceback" not in launch.outputs[0], launch.outputs[0]


def test_a_tokenizer_with_files_in_a_folder_goes_along(script, tmp_path):
    tokenizer, model = script.byte_tokenizer(), make_model(make_config("llama", vocab=320))
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    about = {"tp": 1, "dp": 1, "cp": 1, "run": "r", "step": 1, "tokens": 0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = script.save_checkpoint(tmp_path, model, optimizer, about=about, tokenizer=tokenizer, keep_last=1).result()
    assert any("/" in name for name in script.read_manifest(path)["files"])
    assert script.find_checkpoint("auto", tmp_path, 0, True)[0] == path
    script.export_checkpoint(path, tmp_path / "out", torch.float32)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template


def test_an_export_reads_one_checkpoint_while_a_run_saves_the_next(script, tmp_path, monkeypatch):
    """The run moves the checkpoint aside, and another one into its place, after the first tensor was read."""
    model = make_model(make_config("llama"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = save(tmp_path, model, optimizer, ONE, step=1).result()
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    original, calls = script.read_slice, []

    def read_slice(*args):
        calls.append(1)
        if len(calls) == 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            save(tmp_path, model, optimizer, ONE, step=2).result()
        return original(*args)

    monkeypatch.setattr(script, "read_slice", read_slice)
    script.export_checkpoint(path, tmp_path / "out", torch.float32)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(calls) > 2 and all(torch.equal(a, b) for a, b in zip(exported.parameters(), expected, strict=True))
