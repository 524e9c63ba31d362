"""What the READMEs say is so: commands, flags, files, and lines of Python."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import ALL, ROOT, differing, make_config, make_model, save


README, OF_TESTS = (ROOT / "README.md").read_text(), (ROOT / "tests" / "README.md").read_text()
FENCES = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def test_two_commands_are_what_is_tested_on_a_new_machine():
    commands = [body.strip() for language, body in FENCES if language == "bash"]
    assert commands[0] == "pip install -r requirements.txt && ./launch.sh"
    assert commands[1] == "pip install -r tests/requirements.txt && pytest"


def test_every_flag_exists(script):
    flags = {field.name for field in dataclasses.fields(script.Config)}
    named = set(re.findall(r"--([a-z_]+)", README)) - {"help", "nproc_per_node", "max_restarts"} - {"nodes", "gpus"}
    assert named and named <= flags, named - flags
    commands = [body for language, body in FENCES if language == "bash"]
    used = {word for body in commands for word in shlex.split(body, comments=True) if word.startswith("--")}
    assert used and {word.removeprefix("--") for word in used} <= flags | {"nodes", "gpus-per-node"}  # sbatch's


@pytest.mark.parametrize("text", [README, OF_TESTS], ids=["README.md", "tests/README.md"])
def test_every_file_exists(text):
    names = set(re.findall(r"\btests/[\w/]+\.(?:py|md)\b", text))
    missing = [name for name in sorted(names) if not (ROOT / name).exists()]
    assert names and not missing, missing


def test_every_file_of_tests_has_its_line():
    files = {f"tests/{path.name}" for path in (ROOT / "tests").glob("test_*.py")}
    lines = set(re.findall(r"^\| `(tests/\w+\.py)` \|", OF_TESTS, re.MULTILINE))
    assert lines == files, lines ^ files
    benchmarks = [path.name for path in (ROOT / "tests" / "benchmarks").glob("*.py") if path.name not in OF_TESTS]
    assert not benchmarks, benchmarks


def run_the_loading_snippet(folder):
    """The README's lines, word for word, in a folder that holds output/checkpoint_tp2_dp2_cp2."""
    import os

    saved = make_model(make_config("llama"), seed=1)
    optimizer = torch.optim.AdamW(saved.parameters(), lr=0.1)
    save(Path(folder) / "output", saved, optimizer, ALL, step=1).result()
    os.chdir(folder)
    [snippet] = [body for language, body in FENCES if language == "python" and "dcp.load" in body]
    exec(snippet, names := {})
    return differing(dict(names["model"].named_parameters()), dict(saved.named_parameters()))


def test_the_loading_snippet_loads(pool, tmp_path):
    assert not pool.run(1, run_the_loading_snippet, str(tmp_path))[0]


@pytest.mark.parametrize("word", ["TP_SIZE=2 DP_SIZE=2 CP_SIZE=2", "HuggingFaceTB/SmolLM2-1.7B", "--seq_len 1024"])
def test_the_reference_job_is_one_command(word):
    [command] = [body for language, body in FENCES if language == "bash" and "TinyStories" in body]
    assert command.count("\n") == 1 and "./launch.sh" in command and word in command
