"""Which rank sees which tokens: each token of a step exactly once, in an order that seed and step alone decide."""

import json

import datasets
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import ALL, load_script


CPU = torch.device("cpu")


def test_each_epoch_has_each_sequence_once(script):
    """Over three epochs that no step boundary meets; another seed is another order, the same arguments the same one."""
    steps = [script.sequences_of_step(10, 3, step, 4) for step in range(8)]
    order = [index for step in steps for index in step]
    for epoch in range(3):
        assert sorted(order[epoch * 10 : epoch * 10 + 10]) == list(range(10))
    assert order[:10] != order[10:20]
    assert [script.sequences_of_step(10, 3, step, 4) for step in range(8)] == steps
    assert script.sequences_of_step(10, 4, 0, 4) != steps[0]


def test_labels_are_the_next_tokens(script):
    tokens = np.arange(100, 141, dtype=np.uint16)
    inputs, labels = script.read_sequences(tokens, [3, 0], 10)
    assert inputs[0].tolist() == list(range(130, 140)) and labels[0].tolist() == list(range(131, 141))
    assert inputs[1].tolist() == list(range(100, 110)) and torch.equal(labels, inputs + 1)


def batches_of_rank(sizes, micro_batch_size):
    script = load_script()
    mesh = script.build_mesh("cpu", **sizes._asdict())
    inputs = torch.arange(8 * 16).view(8, 16)
    micro_batches = script.shard_batch(inputs, inputs + 1, mesh, micro_batch_size, CPU)
    place = tuple(mesh.get_local_rank(axis) for axis in ("dp", "cp", "tp"))
    return place, [{key: tensor.tolist() for key, tensor in batch.items()} for batch in micro_batches]


def test_every_token_is_on_one_dp_and_cp_rank_and_on_all_tp_ranks(pool):
    by_place = dict(pool.run(8, batches_of_rank, ALL, 2))
    seen = []
    for (dp, cp, tp), batches in by_place.items():
        assert batches == by_place[(dp, cp, 0)], "tp ranks must have the same tokens"
        assert len(batches) == 2 and all(len(batch["input_ids"]) == 2 for batch in batches)
        for batch in batches:
            ids, labels = torch.tensor(batch["input_ids"]), torch.tensor(batch["labels"])
            assert torch.equal(labels, ids + 1), "labels must be cut as the inputs are, and shifted before"
            assert torch.equal(torch.tensor(batch["position_ids"]), ids % 16), "a token must keep its position"
            # rank 0 of cp = 2 has chunks 0 and 3, rank 1 has chunks 1 and 2
            assert set((ids % 16 // 4).flatten().tolist()) == ({0, 3} if cp == 0 else {1, 2})
            order = [[0, 3], [1, 2]][cp]  # in which they are put together again
            assert (ids % 16 // 4).tolist() == [[chunk for chunk in order for _ in range(4)]] * 2
            seen += ids.flatten().tolist() if tp == 0 else []
    assert sorted(seen) == list(range(8 * 16))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_text_file_comes_back_byte_for_byte(script, cache, tmp_path):
    text = "".join(f"line {i} with ünïcode\n" + "\n" * (i % 3) for i in range(2500))  # more than two batches of lines
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    tokens = script.prepare_tokens(str(tmp_path / "a.txt"), "text", script.byte_tokenizer())
    assert script.byte_tokenizer().decode(tokens.tolist()) == text


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_documents_end_with_the_end_token(script, cache, tmp_path, kind):
    texts, path = ["one", "", "two words", "three"], tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    else:
        datasets.Dataset.from_dict({"body": texts}).to_parquet(str(path))
    tokenizer = script.byte_tokenizer()
    tokens = script.prepare_tokens(str(path), "body", tokenizer)
    end = tokenizer.eos_token
    assert tokenizer.decode(tokens.tolist()) == f"one{end}two words{end}three{end}"


def tokenize_on_rank(path, cache):
    script, calls = load_script(), []
    datasets.config.HF_DATASETS_CACHE = cache
    original = script.read_documents
    script.read_documents = lambda *args, **options: calls.append(dist.get_rank()) or original(*args, **options)
    tokens = [script.prepare_tokens(path, "text", script.byte_tokenizer()).tolist() for _ in range(2)]
    return len(calls), tokens[0] == tokens[1], len(tokens[0])


def test_one_rank_of_a_machine_tokenizes(pool, tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    results = pool.run(4, tokenize_on_rank, str(tmp_path / "a.txt"), str(tmp_path / "cache"))
    assert results == [(2, True, 500)] + [(0, True, 500)] * 3
    assert len(list((tmp_path / "cache" / "3d_parallel").iterdir())) == 1, "the second call must find the first's file"


def test_folders_splits_and_csv(script, cache, tmp_path):
    tokenizer = script.byte_tokenizer()

    def read(name, column="text", **options):
        return tokenizer.decode(script.prepare_tokens(str(tmp_path / name), column, tokenizer, **options))

    (tmp_path / "texts" / "b").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "texts" / "b" / "c.txt").write_text("three\n")
    assert read("texts") == "one\n\ntwo\nthree\n"
    (tmp_path / "table.csv").write_text('id,body\n1,"a, b"\n2,c\n')
    assert read("table.csv", "body") == "a, b<|endoftext|>c<|endoftext|>"
    (tmp_path / "rows").mkdir()
    for split in ("train", "test"):
        (tmp_path / "rows" / f"{split}.jsonl").write_text(json.dumps({"text": f"of {split}"}) + "\n")
    assert read("rows") == "of train<|endoftext|>" and read("rows", split="test") == "of test<|endoftext|>"
