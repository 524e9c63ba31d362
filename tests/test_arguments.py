"""Bad input ends every rank with exit code 2 and one sentence that says what to change; good input is read as meant."""

import functools
import os
import re
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

import families
import pytest
import torch
from conftest import ONE, SCRIPT, load_script, make_config, make_model, make_optimizer, read_metrics, save


ERROR = "3D_parallel.py: error: "


def only_sentence(outputs, where):
    """The one error sentence in the outputs of all ranks."""
    printed = "\n".join(f"--- rank {rank} of {where}:\n{output}" for rank, output in enumerate(outputs))
    assert "Traceback" not in printed, printed
    # a progress bar may have left the cursor in the middle of a line
    lines = [line for output in outputs for line in re.split(r"[\r\n]", output) if line.startswith(ERROR)]
    assert len(lines) == 1, f"{len(lines)} error lines instead of one\n{printed}"
    return lines[0].removeprefix(ERROR)


# ---------------------------------------------------------------------------------------------------------------------
# what the flags alone tell: parse_arguments, in this process
# ---------------------------------------------------------------------------------------------------------------------


class Flags(NamedTuple):
    id: str
    argv: str
    match: str
    ranks: int = 1
    env: dict = {}


BAD_FLAGS = [
    Flags("mesh too small", "--tp_size 1 --dp_size 1", r"needs 1 processes, but there are 2; .*--nproc_per_node 1", 2),
    Flags("mesh too large", "--tp_size 2", r"needs 2 processes, but there is 1; .*--nproc_per_node 2"),
    Flags("mesh not a factor", "--tp_size 3", r"tp_size 3 x dp_size 2 x cp_size 1 needs 6 processes, .* are 8", 8),
    Flags("mesh from the environment", "", r"dp_size 3 .*needs 3 processes, but there are 2", 2, {"DP_SIZE": "3"}),
    Flags("tp zero", "--tp_size 0", r"--tp_size 0 must be at least 1"),
    Flags("dp negative", "--dp_size -2", r"--dp_size -2 must be at least 1", 2),
    Flags("cp zero", "--cp_size=0", r"--cp_size 0 must be at least 1", 2),
    Flags("cp not an integer", "--cp_size 1.5", r"--cp_size\b.* invalid int value: '1.5'"),
    Flags("TP_SIZE zero", "", r"tp_size 0 must be at least 1", 1, {"TP_SIZE": "0"}),
    Flags("DP_SIZE negative", "", r"(?i)dp_size.*-1 (must be at least 1|is not)", 2, {"DP_SIZE": "-1"}),
    Flags("CP_SIZE a word", "", r"(?i)cp_size.*two", 2, {"CP_SIZE": "two"}),
    Flags("TP_SIZE no decimal digit", "", r"(?i)tp_size.*²", 1, {"TP_SIZE": "²"}),
    Flags("unknown flag", "--learning_speed 1", r"unrecognized arguments: --learning_speed"),
    Flags("abbreviated flag", "--tp 1", r"unrecognized arguments: --tp"),
    Flags("word without a flag", "tiny", r"unrecognized arguments: tiny"),
    Flags("flag without a value", "--seq_len", r"--seq_len\b.*expected one argument"),
    Flags("bad choice", "--dtype float16", r"--dtype\b.*'?float16'?.*float32.*bfloat16"),
    Flags("bad device", "--device tpu", r"--device\b.*'?tpu'?.*cuda"),
    Flags("bad truth value", "--from_scratch maybe", r"--from_scratch\b|[Tt]ruthy"),
    Flags("global batch", "--global_batch_size 7", r"batch_size 7 does not divide by dp_size 2; 8 would work", 2),
    Flags("global batch zero", "--global_batch_size 0", r"--global_batch_size 0 must be at least 1"),
    Flags("micro batch", "--micro_batch_size 3", r"--micro_batch_size 3 .* 8 sequences; use 1, 2, 4, 8$"),
    Flags("micro batch of a share", "--micro_batch_size 8", r"--micro_batch_size 8 .* 4 sequences; use 1, 2, 4$", 2),
    Flags("micro batch zero", "--micro_batch_size 0", r"--micro_batch_size 0 must be at least 1"),
    Flags("seq_len under tp", "--tp_size 2 --seq_len 33", r"seq_len 33 .* by 2 .*; 32 or 34 would work", 2),
    Flags("seq_len under cp", "--cp_size 2 --seq_len 30", r"seq_len 30 .* by 4 .*; 28 or 32 would work", 2),
    Flags("seq_len below all", "--cp_size 2 --tp_size 4 --seq_len 3", r"seq_len 3 .* by 8 .*; 8 would work", 8),
    Flags("seq_len zero", "--seq_len 0", r"--seq_len 0 must be at least 1"),
    Flags("a plan on two ranks", "--dry_run", r"--dry_run takes one process, but there are 2; --world_size is for", 2),
    Flags("a world without a plan", "--world_size 8", r"--world_size 8 is for --dry_run"),
    Flags("no steps", "--num_train_steps 0", r"--num_train_steps 0 must be at least 1"),
    Flags("learning rate nan", "--learning_rate nan", r"--learning_rate nan must be at least 0"),
    Flags("learning rate negative", "--learning_rate -1", r"--learning_rate -1.0 must be at least 0"),
    Flags("learning rate infinite", "--learning_rate inf", r"--learning_rate inf must be at least 0"),
    Flags("weight decay negative", "--weight_decay -0.1", r"--weight_decay -0.1 must be at least 0"),
    Flags("warm-up negative", "--warmup_steps -1", r"--warmup_steps -1 must be at least 0"),
    Flags("seed negative", "--seed -1", r"--seed -1 must be at least 0"),
    Flags("clipping to zero", "--max_grad_norm 0", r"--max_grad_norm 0 would erase every gradient; .* turns"),
    Flags("save_every negative", "--save_every -5", r"--save_every -5 must be at least 0"),
    Flags("keep none", "--keep_last 0", r"--keep_last 0 must be at least 1"),
    Flags("two beginnings", "--init_from a --from_scratch", r"--init_from a and --from_scratch exclude each other"),
    Flags("export of nothing", "--export_dir out", r"--export_dir takes one process and a checkpoint: .*--resume"),
    Flags("export on two ranks", "--export_dir out --resume auto", r"--export_dir takes one process", 2),
    Flags("export to a file", f"--export_dir {__file__} --resume auto", r"--export_dir \S+ exists already; give a new"),
    Flags("export dtype", "--export_dtype int8", r"--export_dtype\b.*int8.*bfloat16"),
    Flags("a picture on two ranks", "--plot out", r"--plot takes one process, but there are 2; plain python", 2),
    Flags("two tools", "--plot out --dry_run", r"--plot and --dry_run exclude each other; give one of them"),
    Flags("a plan and an export", "--dry_run --export_dir out --resume auto", r"--export_dir and --dry_run exclude"),
    Flags("no time", "--timeout 0", r"--timeout 0 must be at least 1"),
]


@pytest.fixture
def as_rank(monkeypatch):
    """Sets the environment of one rank, as torchrun would, in this process."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def set_environment(ranks, rank=0, **variables):
        for name in ("TP_SIZE", "DP_SIZE", "CP_SIZE", "TORCHELASTIC_RESTART_COUNT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        if ranks > 1:
            variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_environment


@pytest.mark.parametrize("case", BAD_FLAGS, ids=lambda case: case.id)
def test_bad_flags(script, capsys, as_rank, case):
    outputs = []
    for rank in range(case.ranks):
        as_rank(case.ranks, rank, **case.env)
        with pytest.raises(SystemExit) as ended:
            script.parse_arguments(case.argv.split())
        assert ended.value.code == 2, f"rank {rank} ended with {ended.value.code}"
        outputs.append("".join(capsys.readouterr()))
    sentence = only_sentence(outputs, case.argv)
    assert re.search(case.match, sentence), sentence


def test_defaults(script, as_rank):
    as_rank(1)
    args = script.parse_arguments([])
    assert (args.tp_size, args.dp_size, args.cp_size) == (1, 1, 1)
    assert args.micro_batch_size == args.global_batch_size == 8
    assert (args.model_name, args.learning_rate) == ("tiny", 4e-3)
    assert script.parse_arguments(["--model_name", "folder"]).learning_rate == 5e-5


def test_dp_takes_what_tp_and_cp_leave(script, as_rank):
    as_rank(8)
    args = script.parse_arguments(["--tp_size", "2"])
    assert (args.tp_size, args.dp_size, args.cp_size) == (2, 4, 1)
    assert args.micro_batch_size == 2, "a rank's share of 8 sequences over dp 4"


def test_sizes_from_the_environment(script, as_rank):
    as_rank(8, TP_SIZE="2", CP_SIZE="2", DP_SIZE="")
    args = script.parse_arguments([])
    assert (args.tp_size, args.dp_size, args.cp_size) == (2, 2, 2)


def test_flags_win_over_the_environment(script, as_rank):
    as_rank(8, TP_SIZE="2", DP_SIZE="2", CP_SIZE="2")
    args = script.parse_arguments(["--tp_size", "4", "--cp_size=1"])
    assert (args.tp_size, args.dp_size, args.cp_size) == (4, 2, 1)


def test_help_lists_every_flag(script, capsys, as_rank):
    as_rank(1)
    with pytest.raises(SystemExit) as ended:
        script.parse_arguments(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0, text
    missing = [name for name in script.Config.__dataclass_fields__ if f"--{name}" not in text]
    assert not missing, f"--help does not show {missing}:\n{text}"


@pytest.mark.parametrize("cp, has_documents", [(2, False), (1, True)])
def test_what_depends_on_positions_that_a_rank_does_not_know_is_refused(script, capsys, cp, has_documents):
    from transformers import Gemma3TextConfig, Llama4TextConfig

    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    # by kinds of layers: only one of them has frequencies that depend on the largest position
    ropes = {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    ropes |= {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    more = {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 16}
    configs = {
        "dynamic rotary embeddings beyond 16": Gemma3TextConfig(**sizes, **more, rope_parameters=ropes),
        "scaled by the position from 8 tokens on": Llama4TextConfig(**sizes, num_key_value_heads=1, floor_scale=8),
    }
    for reason, config in configs.items():
        with pytest.raises(SystemExit):
            script.check_attention(config, 32, cp, has_documents)
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "family, changes", [("mistral", {"sliding_window": 16}), ("llama", {"attention_dropout": 0.1})]
)
def test_attention_that_context_parallelism_expresses_is_not_refused(script, capsys, family, changes):
    try:
        script.check_attention(make_config(family, **changes), 32, cp=2)
    except SystemExit:
        pytest.fail(f"refused: {capsys.readouterr().err}")


# ---------------------------------------------------------------------------------------------------------------------
# what takes files, a model or a process group to see: launches of main
# ---------------------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A launch on each of `ranks` (0: a process without a launcher). `{inputs}` is what `write_inputs` fills."""

    id: str
    argv: str
    match: str
    ranks: tuple = (0, 2)
    env: dict = {}


TEXT = "--seq_len 16 --dataset_name {inputs}/short.txt "  # small, for cases that are refused after the data is read
NAME = "checkpoint_tp1_dp1_cp1"
SPLIT = TEXT + "--from_scratch --tp_size 2 --model_name {inputs}/"
BAD_RUNS = [
    # flags once more, through main, where the environment is the launcher's
    Run("flag: mesh", "--tp_size 3", r"needs 3 processes, but there are 2", (2,)),
    Run("flag: TP_SIZE", "", r"(?i)tp_size.*\bx\b", (0, 2), {"TP_SIZE": "x"}),
    Run("flag: unknown", "--seqlen 3", r"unrecognized arguments: --seqlen 3", (2,)),
    # the place for the output, and the checkpoint to go on from
    Run(
        "output is a file",
        "--output_dir {inputs}/short.txt",
        r"--output_dir \S+short.txt cannot be used, .*File exists",
    ),
    Run(
        "output is below a file",
        "--output_dir {inputs}/short.txt/o",
        r"--output_dir \S+/o cannot be used, .*Not a directory",
    ),
    Run("output is read-only", "--output_dir /proc/output", r"--output_dir /proc/output cannot be used"),
    Run("resume: no path", "--resume {inputs}/nowhere", r"\S+/nowhere has no readable manifest.json"),
    Run("resume: no manifest", "--resume {inputs}/gpt2", r"\S+/gpt2 has no readable manifest.json"),
    Run("resume: broken manifest", "--resume {inputs}/broken", r"\S+/broken has no .* manifest.json.*--resume auto"),
    Run(
        "init_from: no path", TEXT + "--init_from {inputs}/nowhere", r"--init_from \S+/nowhere is no checkpoint, and no"
    ),
    Run(
        "init_from: other model",
        TEXT + "--init_from {inputs}/bare",
        r"--init_from \S+/bare is no .*num_hidden_layers is 2",
    ),
    Run("resume: other model", "--resume {inputs}/" + NAME, NAME + r" holds a qwen3, but --model_name tiny is a llama"),
    Run("init_from: no weights", TEXT + "--init_from {inputs}/hollow", r"weights of \S+/hollow cannot be loaded"),
    # config and tokenizer
    Run("model: unknown", "--model_name no/such-model", r"config of --model_name no/such-model cannot be read.*'tiny'"),
    Run("model: no config", "--model_name {inputs}/empty", r"config of --model_name \S+/empty cannot be read"),
    Run("model: broken config", "--model_name {inputs}/broken", r"config of --model_name \S+/broken cannot be read"),
    Run("model: no such type", "--model_name {inputs}/strange", r"config of --model_name \S+ cannot be read.*strange"),
    Run("model: no causal LM", "--model_name {inputs}/t5", r"is a t5, which .* not list as a causal LM"),
    Run("model: vocabulary", "--model_name {inputs}/vocab", r"tokenizer of \S+ has 257 tokens, .* vocab_size 200"),
    Run(
        "positions", TEXT + "--model_name {inputs}/llama --seq_len 256", r"seq_len 256 is longer than the 128 positions"
    ),
    # attention
    Run("convolution, cp", TEXT + "--model_name {inputs}/mamba --cp_size 2", r"mamba has conv.* cp_size 2", (2,)),
    Run(
        "own attention, cp", TEXT + "--model_name {inputs}/bloom --cp_size 2", r"bloom has attention .*cp_size 2", (2,)
    ),
    Run("own attention, tp", TEXT + "--model_name {inputs}/bloom --tp_size 2", r"bloom has attention .*tp_size", (2,)),
    Run("documents", TEXT + "--model_name {inputs}/bloom --document_mask", r"bloom has attention .*--document_mask"),
    Run(
        "end of documents",
        TEXT + "--model_name {inputs}/endless --document_mask",
        r"--document_mask needs a token that only",
    ),
    Run(
        "rope, cp",
        "--model_name {inputs}/rope --cp_size 2",
        r"llama has dynamic rotary .* 128 positions.*cp_size 2",
        (2,),
    ),
    # data
    Run("data: no file", "--dataset_name {inputs}/no.txt", r"--dataset_name \S+/no.txt cannot be read.*: .*no.txt"),
    Run("data: kind of file", "--dataset_name {inputs}/other.kind", r"must end in one of .txt, .jsonl, .json, .csv"),
    Run("data: unknown", "--dataset_name no/such-data", r"--dataset_name no/such-data cannot be read.*'stdlib'"),
    Run("data: two kinds", "--dataset_name {inputs}/mixed", r"it holds .txt and .csv files; keep one kind in a folder"),
    Run("data: empty file", "--dataset_name {inputs}/empty.txt", r"--dataset_name \S+/empty.txt .*it is empty"),
    Run("data: empty texts", "--dataset_name {inputs}/blank.jsonl", r"\S+/blank.jsonl .*(empty|0 tokens|no text)"),
    Run("data: no column", "--dataset_name {inputs}/body.jsonl", r"no column text, but body; see --text_column"),
    Run("data: numbers", "--dataset_name {inputs}/numbers.jsonl", r"--dataset_name \S+/numbers.jsonl cannot be read"),
    Run("data: broken", "--dataset_name {inputs}/broken.jsonl", r"--dataset_name \S+/broken.jsonl cannot be read"),
    Run("data: too short", "--dataset_name {inputs}/short.txt", r"\d+ tokens, too few for one .* --seq_len 256"),
    Run("data: none to hold out", TEXT + "--eval_every 2", r"short.txt has .*\b3 sequences\b.*--eval_every.*100"),
    # weights
    Run("weights: none", TEXT + "--model_name {inputs}/bare", r"weights of .* cannot be loaded.*/bare"),
    Run("weights: one lacks", TEXT + "--model_name {inputs}/lacks", r"lack 1 tensors, model.norm.weight among them"),
    Run("weights: wrong shape", TEXT + "--model_name {inputs}/shape", r"weights of .* cannot be loaded: "),
    Run("weights: cut off", TEXT + "--model_name {inputs}/cut", r"weights of .* cannot be loaded: "),
    # tensor parallel
    Run("tp: heads", SPLIT + "heads", r"3 attention heads.*tp_size 1, 3 would", (2,)),
    Run("tp: kv heads", SPLIT + "kv", r"3 key/value heads.*tp_size 1, 3", (2,)),
    Run("tp: mlp", SPLIT + "mlp", r"97 .*gate_proj.*tp_size 1 would", (2,)),
    Run("tp: no plan", SPLIT + "gpt2", r"gpt2 has no tensor-par.*plan", (2,)),
]
if not torch.cuda.is_available():
    BAD_RUNS.append(Run("no GPU", "--device cuda", r"--device cuda, but this machine has no GPU .*--device cpu"))


def write_inputs(folder, script):
    """Small data files, and model folders that each have one thing wrong."""
    import transformers as t

    def model(name, config, weights=False, tokenizer=True):
        config.save_pretrained(folder / name)
        if tokenizer:
            script.byte_tokenizer().save_pretrained(folder / name)
        if weights:
            t.AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        return folder / name / "model.safetensors"

    for name, content in {
        "short.txt": "to be or not to be\n" * 3,
        "empty.txt": "",
        "blank.jsonl": '{"text": ""}\n{"text": null}\n',
        "body.jsonl": '{"body": "a word"}\n',
        "numbers.jsonl": '{"text": 3}\n',
        "broken.jsonl": '{"text": "a\n',
        "empty/nothing": "",
        "mixed/a.txt": "to be or not to be\n",
        "mixed/b.csv": "text\nto be\n",
        "broken/config.json": '{"model_type": ',
        "broken/manifest.json": "{",
        "other.kind": "to be or not to be\n",
        "strange/config.json": '{"model_type": "strange"}',
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    model("llama", make_config("llama"))
    model("bare", make_config("llama"))
    model("hollow", script.tiny_config())
    model("t5", t.T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2))
    model("vocab", make_config("llama", vocab=200))
    model("mamba", t.MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1, state_size=4))
    model("bloom", t.BloomConfig(vocab_size=300, hidden_size=32, n_layer=1, n_head=2))
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    model("rope", make_config("llama", rope_parameters=rope, max_position_embeddings=512))
    model("endless", make_config("llama"), tokenizer=False)
    endless = script.byte_tokenizer()
    endless.eos_token = None
    endless.save_pretrained(folder / "endless")
    model("gpt2", t.GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=128))
    model("heads", make_config("llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=3))
    model("kv", make_config("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3))
    model("mlp", make_config("llama", intermediate_size=97))

    other = make_model(make_config("qwen3"))
    save(folder, other, make_optimizer(other, 1e-3), ONE, step=1).result()

    lacks = folder / "lacks"
    config = make_config("llama", num_hidden_layers=1)
    model("lacks", config)
    whole = t.AutoModelForCausalLM.from_config(config)
    state = {name: tensor for name, tensor in whole.state_dict().items() if name != "model.norm.weight"}
    whole.save_pretrained(lacks, state_dict=state)
    model("shape", config, weights=True)
    make_config("llama", num_hidden_layers=1, intermediate_size=80).save_pretrained(folder / "shape")
    cut = model("cut", config, weights=True)
    cut.write_bytes(cut.read_bytes()[:-1000])


@pytest.fixture(scope="module")
def inputs(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder, script)
    return folder


def shorten_pauses():
    """Called by each rank: the silent ranks pause so that a launcher does not cut the one that speaks short."""
    time.sleep = functools.partial(lambda sleep, seconds: sleep(min(seconds, 0.05)), time.sleep)


@pytest.mark.parametrize(
    "case, ranks",
    [pytest.param(case, ranks, id=f"{case.id}-{ranks or 'plain'}") for case in BAD_RUNS for ranks in case.ranks],
)
def test_bad_runs(pool, inputs, tmp_path, case, ranks):
    argv = case.argv.format(inputs=inputs).split()
    if "--output_dir" not in argv:
        argv += ["--output_dir", str(tmp_path / "output")]
    environment = {"HF_DATASETS_CACHE": str(inputs / "cache")} | case.env
    launch = pool.launch(ranks, *argv, env=environment, before=shorten_pauses, timeout=60)
    assert launch.codes == [2] * max(1, ranks), f"{launch.codes}\n" + "\n".join(launch.outputs)
    sentence = only_sentence(launch.outputs, case.argv)
    assert re.search(case.match, sentence), sentence
    assert launch.seconds < 30, f"{launch.seconds:.0f} s"


# what only some families have: the plan of a run on more processes, in one, refuses it as the run would
TWO, GPT_NEO, V4 = "--world_size 2 ", families.SPECIAL["gpt_neo"], families.SPECIAL["deepseek_v4"]
BAD_FAMILIES = [
    # a family, what of its config is special, flags, and the sentence
    ("mixtral", {"router_jitter_noise": 0.1}, TWO + "--tp_size 2", r"routers of mixtral have router_jitter_noise"),
    ("inkling_text", {}, TWO + "--tp_size 2", r"inkling_text has no plain embedding and output head to split"),
    ("gemma3", {}, TWO + "--tp_size 2", r"no tensor-parallel rule covers model.vision_tower\S+ of gemma3_text"),
    ("llama", {}, "--world_size 6 --tp_size 2", r"tp_size 2 does not divide 101 rows, so dp x cp 3 must divide 64 col"),
    ("llama", {}, "--world_size 52 --tp_size 52 --seq_len 52", r"52 leaves a rank without any of the 101 tokens of"),
    ("reformer", {"axial_pos_embds": False}, TWO, r"reformer has a backward of its own, .*; one process would work"),
    ("roberta", {}, TWO + "--cp_size 2", r"roberta has positions, .* depend on padding, which cp_size 2 cannot"),
    ("bart", {}, TWO + "--cp_size 2", r"bart has attention to which it does not hand on the attention_mask"),
    ("gpt_neo", GPT_NEO, TWO + "--cp_size 2", r"gpt_neo has attention with a mask of its own \('context_parallel'\)"),
    ("deepseek_v4", V4, TWO + "--cp_size 2", r"deepseek_v4 has attention with other queries or keys than those of"),
    ("doge", {}, TWO + "--cp_size 2", r"doge has a mask that is not only causal, which cp_size 2 cannot express"),
    ("xlstm", {}, TWO + "--cp_size 2", r"xlstm has layers that mix tokens by other means than attention"),
    ("musicgen", {}, "", r"musicgen cannot be planned without data: "),
]


@pytest.mark.parametrize("family, changes, flags, match", BAD_FAMILIES, ids=[f"{c[0]} {c[2]}" for c in BAD_FAMILIES])
def test_families_that_a_mesh_cannot_express(pool, tmp_path, family, changes, flags, match):
    families.shrink(type(families.AutoConfig.for_model(family)), **changes).save_pretrained(tmp_path)
    argv = f"--dry_run --device cpu --from_scratch --model_name {tmp_path} --seq_len 32 {flags}".split()
    launch = pool.launch(0, *argv, timeout=60)
    assert launch.codes == [2], launch
    sentence = only_sentence(launch.outputs, f"{family} {flags}")
    assert re.search(match, sentence), sentence


def have_a_disk_of_its_own_without_locks():
    def acquire(*args, **options):
        raise NotImplementedError

    load_script().filelock.FileLock.acquire = acquire
    if os.environ["RANK"] == "1":
        exists = os.path.exists
        os.path.exists = lambda path: ".probe_" not in str(path) and exists(path)


def test_an_output_directory_that_other_machines_do_not_see_is_refused(pool, tmp_path):
    launch = pool.launch(2, "--output_dir", tmp_path, before=have_a_disk_of_its_own_without_locks)
    assert launch.codes == [2, 2], launch
    assert f"{tmp_path} is on a file system without locks: let no other run write there" in launch.outputs[0], launch
    assert "it is not the same directory on all machines" in only_sentence(launch.outputs, "two machines")


def test_the_printed_command_keeps_flags_and_mesh(script, as_rank, monkeypatch):
    as_rank(2, LOCAL_WORLD_SIZE="2", TP_SIZE="2")
    monkeypatch.delenv("LAUNCHED_AS", raising=False)
    monkeypatch.setattr(script.sys, "argv", ["3D_parallel.py"])
    argv = ["--resume=auto", "--num_train_steps", "7", "--output_dir", "a b", "--tp-size", "2"]
    command = script.resume_command(script.parse_arguments(argv), argv, None, 14)
    assert command == (
        "torchrun --standalone --nproc_per_node 2 3D_parallel.py --tp_size 2 --dp_size 1 --cp_size 1 "
        "--output_dir 'a b' --resume auto --num_train_steps 14"
    )


def test_the_printed_command_names_a_checkpoint_that_lies_elsewhere(script, as_rank, monkeypatch):
    as_rank(1)
    monkeypatch.delenv("LAUNCHED_AS", raising=False)
    args = script.parse_arguments(["--output_dir", "here"])
    for path, resume in [("here/checkpoint_tp1_dp1_cp1", "auto"), ("there/checkpoint_tp1_dp1_cp1", None)]:
        command = script.resume_command(args, ["--output_dir", "here"], script.Path(path), 9)
        assert command.endswith(f"--cp_size 1 --output_dir here --resume {resume or path} --num_train_steps 9"), command


def test_flags_after_a_json_file_win(script, as_rank, tmp_path):
    as_rank(1)
    (tmp_path / "flags.json").write_text('{"seq_len": 64, "num_train_steps": 3, "resume": "never", "plot": null}')
    args = script.parse_arguments([str(tmp_path / "flags.json"), "--resume", "auto", "--seq_len=32"])
    assert (args.seq_len, args.num_train_steps, args.resume) == (32, 3, "auto")
    assert script.parse_arguments(["--dataset_name=text.json", "--seq_len=32"]).dataset_name == "text.json"


@pytest.mark.parametrize("name", ["metrics.jsonl", "flags.json"])
def test_a_log_that_cannot_be_written_is_one_sentence(pool, tmp_path, name):
    (tmp_path / name).mkdir()
    launch = pool.launch(2, "--seq_len", 32, "--num_train_steps", 2, "--output_dir", tmp_path)
    assert launch.codes == [2, 2], launch.outputs
    assert f"--output_dir {tmp_path} cannot be written" in only_sentence(launch.outputs, name)


def test_a_json_file_of_flags_repeats_a_run(pool, tmp_path):
    flags = ["--seq_len", 32, "--num_train_steps", 2, "--micro_batch_size", 2, "--eval_every", 2, "--resume", "auto"]
    assert pool.launch(0, *flags, "--output_dir", tmp_path).codes == [0]
    first = read_metrics(tmp_path)
    file = tmp_path.with_suffix(".json")
    (tmp_path / "flags.json").rename(file)
    shutil.rmtree(tmp_path)
    launch = pool.launch(0, file)
    assert launch.codes == [0], launch.outputs
    assert [row["loss"] for row in read_metrics(tmp_path)] == [row["loss"] for row in first]


@pytest.mark.parametrize("text", ["{", "[1]", '{"no_such_flag": 1}', '{"seq_len": "x"}'])
def test_a_json_file_that_is_none_is_refused(script, tmp_path, capsys, text):
    (tmp_path / "flags.json").write_text(text)
    with pytest.raises(SystemExit) as refusal:
        script.parse_arguments([str(tmp_path / "flags.json")])
    assert refusal.value.code == 2 and "error:" in capsys.readouterr().err


def test_a_version_that_is_too_old_is_said_before_anything_is_imported():
    code = f"import importlib.metadata as m, runpy; m.version = lambda name: '2.10.1'; runpy.run_path({str(SCRIPT)!r})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 1, run
    assert run.stderr == f"{ERROR}torch 2.10.1 will not do, it takes 2.11 or later, below 2.16\n", run


def test_the_help_comes_before_heavy_imports():
    code = f"import atexit, runpy, sys; sys.argv = ['x', '--help']; run = {str(SCRIPT)!r}, None, '__main__'"
    check = f"{code}; atexit.register(lambda: print('torch' in sys.modules)); runpy.run_path(*run)"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "--model_name" in run.stdout and run.stdout.endswith("False\n"), run.stdout[-200:]


def test_a_hub_that_cannot_be_reached_is_said_in_seconds(tmp_path):
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), "--model_name", "no/such", "--output_dir", str(tmp_path / "run")]
    started = time.monotonic()
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert run.returncode == 2 and "127.0.0.1 cannot be reached" in run.stdout, run
    assert only_sentence([run.stderr], "the launch").startswith("the config of --model_name no/such cannot be read")
    assert time.monotonic() - started < 20  # of which the imports take most
