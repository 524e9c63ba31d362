"""What a person sees of a run: the start block, the summary, text from the model, the picture; and wandb's extras."""

import json
import re
import sys

import pytest
import torch
from conftest import ALL, CP, DP, TP, load_script, make_model, read_metrics, shard_model
from test_logs import read_wandb


FLAGS = ["--seq_len", 32, "--global_batch_size", 4, "--warmup_steps", 2, "--num_train_steps", 4]


def test_start_and_end_say_every_derived_quantity_once(pool, tmp_path):
    flags = [*FLAGS, "--micro_batch_size", 1, "--tp_size", 2, "--output_dir", tmp_path]
    launch = pool.launch(4, *flags)
    assert not any(launch.codes), launch.outputs
    output, rows = launch.outputs[0], read_metrics(tmp_path)
    for expected in [
        "mesh: dp 2 x cp 1 x tp 2, ranks: 4 on cpu",
        "model: llama, 3 layers, 631,680 parameters",
        "step: 4 x 32 = 128 tokens; of a rank micro-batches: 2 of 1 x 32",
        "256 held out",
        "run: 4 steps, 512 tokens",
        "lr up to 0.004 in 2 steps",
        "weights: tiny, step 0",
        "512 tokens in",
        f"loss {rows[-1]['loss']:.4f}, at best {min(row['loss'] for row in rows):.4f}",
        f"checkpoint of step 4: {tmp_path / 'checkpoint_tp2_dp2_cp1'}",
    ]:
        assert output.count(expected) == 1, f"{expected!r} in {output}"
    assert re.search(r"peak memory of rank 0 \d\.\d\d GiB", output), output
    assert not any("tokens" in other for other in launch.outputs[1:]), "another rank than the first says something"


PROMPT, WRITTEN = "def ", 12


def write_on_mesh(sizes):
    """Runs on each rank: what a model of random weights writes."""
    script = load_script()
    model, mesh = shard_model(make_model(script.tiny_config()), sizes)
    options = {"prompt": PROMPT, "num_tokens": WRITTEN, "seq_len": 32, "seed": 5}
    text = script.generate_text(model, script.byte_tokenizer(), mesh, **options)
    assert model.training
    return text


@pytest.mark.parametrize("sizes", [TP, CP, DP, ALL], ids=str)
def test_text_is_that_of_one_plain_process(pool, script, sizes):
    tokenizer, random = script.byte_tokenizer(), torch.Generator().manual_seed(5)
    model, ids = make_model(script.tiny_config()).eval(), tokenizer(PROMPT)["input_ids"]
    for _ in range(WRITTEN):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1] / 0.7
        noise = -torch.empty(320).exponential_(generator=random).log()
        ids.append((logits + noise)[: len(tokenizer)].argmax().item())
    expected = tokenizer.decode(ids)
    assert len(set(ids)) > 8, "too monotonous to show a mistake"
    assert pool.run(sizes.ranks, write_on_mesh, sizes) == [expected] * sizes.ranks, sizes


def test_text_is_written_at_the_end_of_a_run_of_tiny(pool, tmp_path):
    flags = [*FLAGS, "--num_train_steps", 100, "--output_dir", tmp_path]
    launch = pool.launch(1, *flags)
    assert launch.codes == [0], launch.outputs
    [text] = re.findall(r"---- what it writes now\n(.*?)\n----", launch.outputs[0], re.DOTALL)
    assert text.startswith(PROMPT) and len(text) > len(PROMPT), text


def write_metrics(folder, processes, seed):
    """A metrics.jsonl as processes (first step, last step, mesh) leave it that go on from one another."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    with (folder / "metrics.jsonl").open("w") as file:
        for first, last, mesh in processes:
            for step in range(first, last + 1):
                noise = torch.rand((), generator=generator).item()
                row = {"step": step, "loss": 3 + 2 / step + noise / 9, "grad_norm": 1 + noise, "lr": 1e-3 / step}
                row |= {"tokens_per_second": 1000 * noise, "mesh": mesh, "first_step": first}
                print(json.dumps(row | ({"eval_loss": 3.1} if step % 10 == 0 else {})), file=file)
            file.write('{"step": 9')  # a full disk
            file.write("\n")


def test_a_picture_shows_runs_and_where_they_were_resumed(pool, tmp_path):
    processes = [(1, 30, "tp1_dp1_cp1"), (21, 40, "tp2_dp1_cp1"), (31, 50, "tp2_dp1_cp1"), (36, 44, "tp1_dp2_cp1")]
    write_metrics(tmp_path / "first", processes, 0)
    write_metrics(tmp_path / "second", [(1, 30, "tp1_dp1_cp2")], 1)
    launch = pool.launch(0, "--plot", f"{tmp_path / 'first'},{tmp_path / 'second'}", env={"TP_SIZE": "2"})
    assert launch.codes == [0], launch.outputs
    picture = (tmp_path / "first" / "metrics.svg").read_text()
    assert "</svg>" in picture
    # matplotlib writes each text as a comment over its outlines
    for text in ["loss", "gradient norm", "learning rate", "tokens/s", "step", "tp2_dp1_cp1", "tp1_dp2_cp1"]:
        assert f"<!-- {text} -->" in picture, text
    assert picture.count("<!-- tp2_dp1_cp1 -->") == 1, "a mark where the mesh stayed"
    for text in ["first, tp1_dp1_cp1", "first, held out", "second, tp1_dp1_cp2", "second, held out"]:
        assert picture.count(f"<!-- {tmp_path / text} -->") == 1, text


def test_a_picture_of_metrics_without_meshes_and_of_a_name_like_a_formula(script, tmp_path):
    """Files of an older version, and text that matplotlib would set as mathematics."""
    folder = tmp_path / "dollar$x_$"
    write_metrics(folder, [(1, 12, "tp1_dp1_cp1")], 0)
    lines = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    old = [
        {key: value for key, value in json.loads(line).items() if key not in ("mesh", "first_step")} for line in lines
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in old))
    assert "</svg>" in script.draw_metrics([folder]).read_text()


@pytest.mark.parametrize("case", ["none", "empty", "binary", "no steps", "other", "no place", "no matplotlib"])
def test_a_picture_that_cannot_be_drawn_is_refused(script, tmp_path, monkeypatch, capsys, case):
    sentence = f"--plot {tmp_path} has no metrics.jsonl that can be drawn"
    row = {"step": 1, "loss": 1, "grad_norm": 1, "lr": 1, "tokens_per_second": 1}
    contents = {"empty": b"", "binary": b"\xff\xfe}", "no steps": b'{"a": 1}', "other": b"[{}"}
    if case == "no matplotlib":
        sentence = "--plot needs a package that is not there: pip install matplotlib"
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # an import of it now raises
    elif case == "no place":
        sentence = f"--plot {tmp_path} cannot be written to"
        contents[case] = json.dumps(row).encode()
        (tmp_path / "metrics.svg").mkdir()
    if case in contents:
        (tmp_path / "metrics.jsonl").write_bytes(contents[case])
    with pytest.raises(SystemExit) as refusal:
        script.draw_metrics([tmp_path])
    assert refusal.value.code == 2 and f"error: {sentence}" in capsys.readouterr().err


OFFLINE = {"WANDB_MODE": "offline", "WANDB_API_KEY": None}


def test_wandb_gets_every_step_also_those_that_are_done_again(pool, tmp_path):
    flags = [*FLAGS, "--save_every", 2, "--output_dir", tmp_path]
    assert pool.launch(1, *flags, env=OFFLINE).codes == [0]
    (tmp_path / "checkpoint_tp1_dp1_cp1").rename(tmp_path / "broken")  # so that it goes on from step 2
    assert pool.launch(1, *flags, "--resume", "auto", "--learning_rate", 1e-3, env=OFFLINE).codes == [0]
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
    assert len({path.name.split("-", 3)[-1] for path in runs}) == 1, f"{runs} are of one run"
    steps = [[row["step"] for row in read_wandb(next(run.glob("*.wandb")))[0]] for run in runs]
    assert steps == [[1, 2, 3, 4], [3, 4]]
    assert read_wandb(next(runs[1].glob("*.wandb")))[2]["learning_rate"] == 1e-3


def test_wandb_runs_of_all_ranks_are_in_one_group_with_the_names_that_the_user_sets(pool, tmp_path):
    env = OFFLINE | {"WANDB_PROJECT": "mine", "WANDB_NAME": "good"}
    flags = [*FLAGS, "--dp_size", 2, "--wandb_all_ranks", "--wandb_artifact", "--output_dir", tmp_path]
    launch = pool.launch(2, *flags, env=env)
    assert launch.codes == [0, 0], launch.outputs
    runs = {}
    for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb"):
        history, summary, _, run = read_wandb(path, with_run=True)
        runs[run.display_name] = run, len(history), summary
    assert runs.keys() == {"good", "good-rank1"}
    (first, steps, summary), (second, steps_of_second, _) = runs["good"], runs["good-rank1"]
    assert first.run_group == second.run_group != "" and first.project == second.project == "mine"
    assert steps == 4 and steps_of_second == 0
    assert summary["tokens"] == 512 and summary["tokens_per_second"] > 0
