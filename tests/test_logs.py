"""What a run says of itself: metrics.jsonl and wandb, on rank 0 only, and never in the way of training."""

import json
from importlib.metadata import version

import conftest
import families
import pytest
import torch
from conftest import read_metrics
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM


FLAGS = [*conftest.FLAGS, "--num_train_steps", 3]


@pytest.mark.parametrize("more", [[], ["--document_mask"]], ids=["", "documents"])
def test_metrics_and_evaluation_are_the_same_in_every_mesh(pool, tmp_path, more):
    texts = ["line", "of a text", "line of a text that is longer than a sequence"]  # 4 sequences are held out
    lines = [json.dumps({"text": f"{i} {texts[i % 3]}"}) for i in range(600)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    rows, data = {}, ["--dataset_name", tmp_path / "text.jsonl", "--eval_every", 2, *more]
    for ranks, mesh in [(0, []), (4, ["--tp_size", 2, "--cp_size", 2])]:
        launch = pool.launch(ranks, *FLAGS, *mesh, *data, "--output_dir", tmp_path / str(ranks))
        assert not any(launch.codes), launch.outputs
        rows[ranks] = read_metrics(tmp_path / str(ranks))
    for one, four in zip(rows[0], rows[4]):
        assert {"step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second"} <= one.keys()
        for key in one.keys() - {"tokens_per_second", "tokens_per_second_per_rank", "run", "mesh"}:
            assert four[key] == pytest.approx(one[key], rel=1e-5), f"{key} of step {one['step']}"
    assert [row["tokens"] for row in rows[0]] == [64, 128, 192]
    assert [row["step"] for row in rows[0] if "eval_loss" in row] == [2]


def test_a_new_run_keeps_the_old_metrics_under_another_name(pool, tmp_path):
    for seed in (1, 2):
        assert pool.launch(1, *FLAGS, "--seed", seed, "--output_dir", tmp_path).codes == [0]
    [old] = [path.name for path in tmp_path.glob("metrics_*.jsonl")]
    assert len(read_metrics(tmp_path)) == len(read_metrics(tmp_path, old)) == 3
    assert read_metrics(tmp_path)[0]["loss"] != read_metrics(tmp_path, old)[0]["loss"]


def test_a_line_that_a_full_disk_has_cut_spoils_no_other(script, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "run": "r"}\n{"step')
    with script.open_metrics(tmp_path, "r") as file:
        file.write('{"step": 2, "run": "r"}\n')
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "run": "r"}\n{"step\n{"step": 2, "run": "r"}\n'


def test_a_run_resumed_in_another_runs_directory_does_not_go_on_in_its_metrics(pool, tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        assert pool.launch(1, *FLAGS, "--seed", seed, "--output_dir", tmp_path / name).codes == [0]
    resume = ["--resume", tmp_path / "a" / "checkpoint_tp1_dp1_cp1", "--output_dir", tmp_path / "b"]
    assert pool.launch(1, *FLAGS, *resume, "--num_train_steps", 4).codes == [0]
    assert [row["step"] for row in read_metrics(tmp_path / "b")] == [4]
    assert len(list((tmp_path / "b").glob("metrics_*.jsonl"))) == 1


def test_wandb_runs_offline_where_there_is_no_key(pool, tmp_path):
    env = {"WANDB_MODE": None, "WANDB_API_KEY": None, "NETRC": str(tmp_path / "none"), "HOME": str(tmp_path)}
    launch = pool.launch(2, *FLAGS, "--dp_size", 2, "--output_dir", tmp_path, env=env)
    assert launch.codes == [0, 0], launch.outputs
    [run] = (tmp_path / "wandb").glob("offline-run-*")
    [file] = run.glob("*.wandb")  # rank 0, and no other, writes a run
    history, summary, config = read_wandb(file)
    rows = read_metrics(tmp_path)
    for key in ("loss", "grad_norm", "lr", "tokens"):
        assert [row[key] for row in history] == [row[key] for row in rows], key
    assert summary["best_loss"] == min(row["loss"] for row in rows)
    assert summary["checkpoint"] == str(tmp_path / "checkpoint_tp1_dp2_cp1")
    assert config["seq_len"] == 32 and config["torch"] == version("torch")


def read_wandb(file, with_run=False):
    """History, summary and config of an offline run, and its record: wandb's records, in the log format of LevelDB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, begun, run = file.read_bytes(), 7, b"", None  # 7 bytes of header
    history, summary, config = [], {}, {}
    while position + 7 <= len(data):
        left, length, kind = (
            -position % 2**15,
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        if 0 < left < 7 or kind == 0:  # the rest of a block of 32 KiB is padding
            position += left or 2**15
            continue
        begun = (
            data[position + 7 : position + 7 + length]
            if kind in (1, 2)
            else begun + data[position + 7 : position + 7 + length]
        )
        position += 7 + length
        if kind in (2, 3):  # there is more of it
            continue
        record = Record()
        record.ParseFromString(begun)
        run = record.run if record.run.run_id else run
        named = [
            {i.key or i.nested_key[0]: json.loads(i.value_json) for i in items}
            for items in (record.history.item, record.summary.update, record.run.config.update, record.config.update)
        ]
        history += [named[0]] if named[0] else []
        summary |= named[1]
        config |= named[2] | named[3]
    return (history, summary, config) + ((run,) if with_run else ())


def break_wandb():
    import wandb

    def fail(*args, **kwargs):
        raise RuntimeError("wandb has a bad day")

    wandb.init = fail


def test_a_failing_wandb_never_stops_training(pool, tmp_path):
    env = {"WANDB_MODE": "offline"}
    launch = pool.launch(1, *FLAGS, "--output_dir", tmp_path, env=env, before=break_wandb)
    assert launch.codes == [0] and "wandb is off: wandb has a bad day" in launch.outputs[0], launch.outputs[0]
    assert len(read_metrics(tmp_path)) == 3


def refuse_wandb():
    import sys

    sys.modules["wandb"] = None  # an import of it now raises


def test_wandb_disabled_is_not_imported(pool, tmp_path):
    flags = [*FLAGS, "--output_dir", tmp_path, "--wandb_mode", "disabled"]
    launch = pool.launch(1, *flags, env={"WANDB_MODE": None}, before=refuse_wandb)
    assert launch.codes == [0] and "wandb is off" not in launch.outputs[0], launch.outputs[0]


def test_a_profile_has_the_steps_of_each_rank(pool, tmp_path):
    launch = pool.launch(2, *FLAGS, "--num_train_steps", 6, "--profile", "--output_dir", tmp_path)
    assert launch.codes == [0, 0], launch.outputs
    for rank in range(2):
        events = json.loads((tmp_path / "profile" / f"trace_rank{rank}.json").read_text())["traceEvents"]
        steps = {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep")}
        assert len(steps) == 3 and any("gloo" in event.get("name", "") for event in events), steps


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_flops_per_token_are_what_the_operators_do(script, family):
    """Against torch's counter on the meta device, which knows nothing of causality: half of the attention less."""
    config = families.shrink(type(families.AutoConfig.for_model(family)), tie_word_embeddings=False)
    with torch.device("meta"):
        options = {"attn_implementation": "sdpa", "experts_implementation": "batched_mm"}
        model = AutoModelForCausalLM.from_config(config, **options)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros((2, 64), dtype=torch.int64)).logits.sum().backward()
    attention = 12 * config.num_attention_heads * config.head_dim * 64 * config.num_hidden_layers
    expected = counter.get_total_flops() / 128 - attention / 2
    assert script.flops_per_token(model, 64) == pytest.approx(expected, rel=0.02)
