"""How a run gets its weights: drawn from the seed, read from a folder into the shards, or converted by Transformers."""

import json
import math
from pathlib import Path

import families
import pytest
import torch
from conftest import DP, ONE, Mesh, differing, load_script, make_config, make_model, whole
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config


SEVERAL = [DP, Mesh(cp=2, tp=2), Mesh(dp=3)]


def build(config, sizes):
    script = load_script()
    mesh = script.build_mesh("cpu", **sizes._asdict()) if sizes != ONE else None
    model = script.build_model(config, mesh, "cpu", torch.float32, seq_len=24)
    script.materialize(model, torch.device("cpu"))
    return model


def full_state(model):
    """A plain state dict of what the ranks hold together."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def draw(config, sizes, seed):
    model = build(config, sizes)
    script = load_script()
    script.send_weights(model, lambda: script.draw_full_model(config, seed), "the seed", None)
    return full_state(model)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "apertus"])
def test_drawn_weights_are_those_of_transformers_in_every_mesh(pool, family):
    # some parameters of apertus are set by their constructor alone
    if family == "gpt2":  # whose projections have a deviation of their own
        config = GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=509, n_positions=64)
    else:
        config = families.shrink(type(families.AutoConfig.for_model(family)), num_hidden_layers=3)
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    for sizes in [ONE, *SEVERAL] if family != "gpt2" else [ONE, DP]:  # which tp cannot split
        wrong = differing(pool.run(sizes.ranks, draw, config, sizes, 3)[0], plain)
        assert not wrong, f"{family} in {sizes}: {wrong}"
    assert not torch.equal(draw(config, ONE, seed=4)["lm_head.weight"], plain["lm_head.weight"])


def read(config, sizes, folder):
    """Runs on each rank: whether it was read straight, the full state, and how many values this rank has read."""
    script, values = load_script(), []
    model, reader = build(config, sizes), script.dcp.HuggingFaceStorageReader
    read_one = reader._process_read_request
    reader._process_read_request = lambda self, file, item, planner: (
        values.append(math.prod(item.lengths)),
        read_one(self, file, item, planner),
    )
    try:
        is_read = script.read_safetensors(model, Path(folder))
    finally:
        reader._process_read_request = read_one
    if not is_read:
        script.send_weights(model, lambda: script.read_full_model(str(folder), config), "the test", None)
    return is_read, full_state(model), sum(values)


@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_reads_its_shards_from_the_folder(pool, tmp_path, tied):
    config = make_config("llama", vocab=510, tied=tied)
    model = make_model(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="100KB" if tied else "10GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == tied
    total = sum(parameter.numel() for parameter in model.parameters())
    expected = {name: tensor.float() for name, tensor in model.state_dict().items()}
    for sizes in [ONE, *SEVERAL]:
        ranks = pool.run(sizes.ranks, read, config, sizes, tmp_path)
        for rank, (is_read, state, _) in enumerate(ranks):
            assert is_read, f"rank {rank} of {sizes} has left it to Transformers"
            assert {tensor.dtype for tensor in state.values()} == {torch.float32}, sizes
            wrong = differing(state, expected)
            assert not wrong, f"rank {rank} of {sizes}: {wrong}"
        values = sum(count for _, _, count in ranks)
        # what tp does not cut, norms here, each tp rank reads
        assert total <= values <= 1.1 * total, f"{values} of {total} values in {sizes}"


def rename(folder):
    state = load_file(folder / "model.safetensors")
    save_file({f"transformer.{name}": tensor for name, tensor in state.items()}, folder / "model.safetensors")


def add_scales(folder):  # as quantized weights have them, whose values mean nothing without
    state = load_file(folder / "model.safetensors")
    save_file(state | {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}, folder / "model.safetensors")


def add_copy(folder):  # as some repositories have them, in another format
    save_file({"tok_embeddings.weight": torch.ones(3)}, folder / "consolidated.safetensors")


@pytest.mark.parametrize(
    "change", [rename, add_scales, add_copy, None], ids=lambda c: getattr(c, "__name__", "experts")
)
def test_what_needs_a_conversion_is_left_to_transformers(pool, tmp_path, change):
    if change is None:  # the file has each expert by itself
        config = families.shrink(type(families.AutoConfig.for_model("mixtral")))
    else:
        config = make_config("llama")
    model = make_model(config)
    model.save_pretrained(tmp_path)
    if change is not None:
        change(tmp_path)
    if change is rename:
        assert not read_only(config, tmp_path)
        return
    for is_read, state, _ in pool.run(2, read, config, DP, tmp_path):
        assert not is_read
        wrong = differing(state, model.state_dict())
        assert not wrong, wrong


def untie(folder):
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = 2 * state["model.embed_tokens.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(pool, tmp_path):
    config = make_config("llama", vocab=512, tied=True)
    make_model(config).save_pretrained(tmp_path / "model")
    load_script().byte_tokenizer().save_pretrained(tmp_path / "model")
    untie(tmp_path / "model")
    flags = ["--seq_len", 32, "--num_train_steps", 1, "--output_dir", tmp_path / "run"]
    launch = pool.launch(2, *flags, "--model_name", tmp_path / "model")
    assert launch.codes == [2, 2] and "lm_head.weight differs from model.embed_tokens" in launch.outputs[0], launch


def read_only(config, folder):
    return load_script().read_safetensors(build(config, ONE), folder)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_damaged_folder_is_one_sentence(pool, tmp_path, sharded):
    folder, output = tmp_path / "model", tmp_path / "run"
    config = make_config("llama", vocab=512)
    make_model(config).save_pretrained(folder, max_shard_size="100KB" if sharded else "10GB")
    load_script().byte_tokenizer().save_pretrained(folder)
    flags = ["--seq_len", 32, "--num_train_steps", 1, "--output_dir", output, "--model_name", folder]
    if sharded:  # a file that the index names is not there
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        (folder / sorted(index["weight_map"].values())[0]).unlink()
    else:
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(100_000)
    launch = pool.launch(2, *flags)
    assert launch.codes == [2, 2] and launch.outputs[0].count("error:") == 1, launch.outputs
    assert "Traceback" not in "".join(launch.outputs) and str(folder) in launch.outputs[0], launch.outputs[0]
