"""The dry run says what a real step takes, for models of any size, and the loss never has all logits."""

import ctypes
import os
import re
import resource
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import DP, ONE, SCRIPT, TP, load_script
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


SMALL = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "head_dim": 32}
SMALL |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096}
SEQ_LEN, WIDTHS = 2560, [(4096,), (2048,)]  # of logits, one process's and under tp 2
LLAMA = {"8B": (32, 4096, 14336, 32), "70B": (80, 8192, 28672, 64), "405B": (126, 16384, 53248, 128)}
NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
SAME = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
REFUSED = {
    "--world_size 3 --tp_size 7 --dp_size 1": "tp_size 7 x dp_size 1 x cp_size 1 needs 7 processes, but there are 3",
    "--world_size 8 --dp_replicate_size 3": "--dp_replicate_size 3 does not divide dp_size 8; 1, 2, 4, 8 would work",
    "--world_size 6 --tp_size 4": "needs 4 processes, but there are 6; --world_size 4 would work",
}


def write_config(folder, sizes):
    transformers.LlamaConfig(**sizes).save_pretrained(folder)
    return ["--dry_run", "--from_scratch", "--model_name", folder]


def state_bytes(optimizer):
    """Of this rank's parameters, and of what the optimizer keeps for them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = parameters, [tensor for state in optimizer.state.values() for tensor in state.values()]
    return [sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors) for tensors in held]


def print_state_bytes():
    """Before a dry run, which itself prints GiB, to three digits."""
    script, init = load_script(), load_script().init_optimizer_state
    script.init_optimizer_state = lambda optimizer: init(optimizer) or print("state:", *state_bytes(optimizer))


class LargestLogits(TorchDispatchMode):
    """The most elements of a tensor whose last dimension is the vocabulary, or this rank's half of it."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]:
            # the other tensor with such a dimension is the head, transposed
            if tensor.shape[-1:] in WIDTHS and tensor.shape[0] != SMALL["hidden_size"]:
                self.most = max(self.most, tensor.numel())
        return result


def real_step(sizes, activation_checkpointing):
    """One rank: bytes of its state, of the peak by the kernel's count; and the share of all logits in one tensor."""
    script, config = load_script(), transformers.LlamaConfig(**SMALL)
    ctypes.CDLL(None).mallopt(-3, 2**14)  # M_MMAP_THRESHOLD: what is freed goes back to the kernel at once
    mesh = script.build_mesh("cpu", **sizes._asdict()) if sizes != ONE else None
    options = {"seq_len": SEQ_LEN, "activation_checkpointing": activation_checkpointing}
    model = script.build_model(config, mesh, "cpu", torch.float32, **options)
    script.materialize(model, torch.device("cpu"))
    optimizer = script.build_optimizer(model, weight_decay=0.1)
    script.init_optimizer_state(optimizer)
    ids = torch.randint(0, SMALL["vocab_size"], (sizes.dp, SEQ_LEN))
    batches = script.shard_batch(ids, ids, mesh, 1, torch.device("cpu"))
    with LargestLogits() as logits:
        script.train_step(model, optimizer, batches, mesh, 1.0)

    def kib(name):
        return int(re.search(rf"{name}:\s+(\d+)", open("/proc/self/status").read())[1])

    ctypes.CDLL(None).malloc_trim(0)
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again at what is resident
    before = kib("VmRSS")
    script.train_step(model, optimizer, batches, mesh, 1.0)
    grown = (kib("VmHWM") - before) * 1024
    state = state_bytes(optimizer)
    return state, sum(state) + grown, logits.most / (SEQ_LEN // sizes.cp * SMALL["vocab_size"])


@pytest.mark.parametrize("sizes, mode", [(ONE, "none"), (TP, "none"), (DP, "full")], ids=str)
def test_the_dry_run_says_what_a_real_step_takes(pool, tmp_path, sizes, mode):
    ranks = pool.run(sizes.ranks, real_step, sizes, mode)
    flags = f"--tp_size {sizes.tp} --dp_size {sizes.dp} --cp_size {sizes.cp} --world_size {sizes.ranks}".split()
    flags += f"--seq_len {SEQ_LEN} --global_batch_size {sizes.dp} --activation_checkpointing {mode}".split()
    planned = pool.launch(0, *write_config(tmp_path, SMALL), "--device", "cpu", *flags, before=print_state_bytes)
    text = planned.outputs[0]
    assert planned.codes == [0], text
    state, peak, _ = ranks[0]
    assert "state: {} {}\n".format(*state) in text, (state, text)
    said = float(re.search(r"peak: ([\d.]+) GiB", text)[1]) * 2**30
    assert said == pytest.approx(peak, rel=0.1), f"said over real: {said / peak:.3f}"
    shares = [share for *_, share in ranks]
    assert all(0 < share <= 1 / 8 for share in shares), f"of all logits a tensor of the loss has {shares}"


@pytest.mark.parametrize("name", ["8B"] + ["70B", "405B"] * ("ALL_LLAMAS" in os.environ))
def test_the_largest_models_are_planned_in_little_time_and_memory(tmp_path, name):
    flags = "--world_size 512 --tp_size 8 --cp_size 4 --seq_len 131072 --dtype bfloat16".split()
    command = [sys.executable, SCRIPT, *write_config(tmp_path, dict(zip(NAMES, LLAMA[name])) | SAME), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and re.search(r"peak: [\d.]+ GiB, which", result.stdout), result
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 8 * 2**20  # KiB


@pytest.mark.parametrize("flags", REFUSED)
def test_a_plan_that_cannot_be_is_refused_in_one_sentence(pool, tmp_path, flags):
    refused = pool.launch(0, *write_config(tmp_path, SMALL), *flags.split())
    assert refused.codes == [2] and REFUSED[flags] in refused.outputs[0], refused
    assert len(refused.outputs[0].splitlines()) == 1, refused


def test_experts_and_documents_can_be_planned(pool, tmp_path):
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4, output_router_logits=True)
    config.save_pretrained(tmp_path)
    flags = ["--model_name", tmp_path, "--world_size", 4, "--tp_size", 2, "--seq_len", 64, "--document_mask"]
    planned = pool.launch(0, "--dry_run", *flags)
    assert planned.codes == [0] and "GiB, which fits" in planned.outputs[0], planned.outputs
