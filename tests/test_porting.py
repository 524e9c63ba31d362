"""The README's section "Port it": its lines run on four ranks, with only the functions that it says to copy."""

import ast
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT, SCRIPT, assert_close
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig


SECTION = re.search(r"\n## Port it\n(.*?)\n## ", (ROOT / "README.md").read_text(), re.DOTALL)[1]
PARTS = {title: body for title, body in re.findall(r"### (.*?)\n(.*?)(?=\n### |\Z)", SECTION, re.DOTALL)}
CONFIG = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 8, "num_key_value_heads": 4}


def copied_names(title):
    """What the part says to copy; the part of tp also takes the attention's."""
    names = re.findall(r"`(\w+)`", PARTS[title].split("```")[0])
    return names + (copied_names("Context-parallel attention") if "those of the attention" in PARTS[title] else [])


def defined_names(node):
    """The names that a line at the top level of the script gives a function, a class or a constant."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = [name for target in getattr(node, "targets", []) for name in ast.walk(target)]
    return {name.id for name in targets if isinstance(name, ast.Name)}


def paste(names):
    """The script's imports and these definitions, as a person would paste them, run in an empty namespace."""
    nodes = ast.parse(SCRIPT.read_text()).body
    there = set().union(*(defined_names(node) for node in nodes))
    assert {*names} <= there, f"the script has no {sorted({*names} - there)}"
    pasted = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) or defined_names(node) & {*names}]
    namespace = {"__name__": "pasted"}
    exec(compile(ast.Module(pasted, []), "pasted.py", "exec"), namespace)
    return namespace


def plain_run(config, ids, labels):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    loss = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def run_part(title, folder):
    """Runs on each rank: a part's lines; what is wrong with their loss and gradients against a plain model."""
    os.chdir(folder)
    config = LlamaConfig(**CONFIG)
    ids = torch.randint(0, 512, (2, 33), generator=torch.Generator().manual_seed(1))
    ids, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    loss, grads = plain_run(config, ids, labels)
    namespace = paste(copied_names(title)) | {"config": config, "ids": ids, "labels": labels}
    [lines] = re.findall(r"```python\n(.*?)```", PARTS[title], re.DOTALL)
    torch.manual_seed(0)  # the same weights
    optimizer_step, torch.optim.AdamW.step = torch.optim.AdamW.step, lambda self: None  # so that gradients can be read
    exec(lines, namespace)
    torch.optim.AdamW.step = optimizer_step
    if title == "The mesh":
        assert namespace["tp_rank"] == dist.get_rank() % 2 and namespace["fsdp_size"] == 2
        return
    if title == "Checkpoints":
        assert (Path(folder) / "output" / "checkpoint_tp1_dp4_cp1" / "manifest.json").exists()
        return
    for name, parameter in namespace["model"].named_parameters():
        grad = parameter.grad.full_tensor() if isinstance(parameter, DTensor) else parameter.grad
        if title == "Context-parallel attention":
            dist.all_reduce(grad)
        assert_close(grad, grads[name], 1e-5, f"{title}: the gradient of {name}")
    if title in ("Tensor parallelism", "The loss without all logits"):
        assert_close(namespace["loss"].detach() / labels.numel(), loss.detach(), 1e-5, f"{title}: the loss")


@pytest.mark.parametrize("title", PARTS)
def test_a_part_stands_alone(pool, tmp_path, title):
    assert PARTS[title].count("\n") < 30, "a part is shown in about ten lines"
    pool.run(4, run_part, title, str(tmp_path))


@pytest.mark.parametrize("title", PARTS)
def test_a_part_copies_all_that_it_needs_and_no_flags(title):
    """Also what only an error or an option would call, which the lines of the README do not."""
    nodes, copied = ast.parse(SCRIPT.read_text()).body, {*copied_names(title)}
    defined = set().union(*(defined_names(node) for node in nodes))
    for node in nodes:
        if defined_names(node) & copied:
            used = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} & defined
            assert used <= copied, f"{title}: {defined_names(node)} needs {sorted(used - copied)}"
    assert "Config" not in copied
