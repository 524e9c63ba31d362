"""Helpers of all tests: the script as a module, small asymmetric models, and a pool of ranks that is started once."""

import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "3D_parallel.py"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def load_script():
    """3D_parallel.py as a module; its name is no Python identifier."""
    if "three_d_parallel" not in sys.modules:
        spec = importlib.util.spec_from_file_location("three_d_parallel", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        sys.modules["three_d_parallel"] = module
        spec.loader.exec_module(module)
    return sys.modules["three_d_parallel"]


load_script()  # here, so that the process from which ranks are forked has it
for _family in "llama qwen2 qwen3 mistral phi3 olmo2".split():
    importlib.import_module(f"transformers.models.{_family}.modeling_{_family}")
importlib.import_module("torch._dynamo")  # DTensor would import it at its first operator, in each rank


def make_config(family, vocab=509, tied=False, **changes):
    """A small config of a family: grouped heads where tp allows it, sizes that differ from each other, no dropout."""
    import transformers as t

    classes = {
        "llama": t.LlamaConfig,
        "qwen2": t.Qwen2Config,
        "qwen3": t.Qwen3Config,
        "mistral": t.MistralConfig,
        "phi3": t.Phi3Config,
        "olmo2": t.Olmo2Config,
    }
    sizes = dict(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    if family in ("phi3", "olmo2"):
        del sizes["head_dim"]
    if family == "phi3":
        sizes["original_max_position_embeddings"] = 128
    config = classes[family](**(sizes | changes))
    return config


def make_model(config, seed=0):
    """A float32 model with sdpa whose every parameter is random: norms that are all ones would hide mistakes."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator) * 0.08
            parameter.copy_(noise + 1 if "norm" in name and parameter.ndim == 1 and "bias" not in name else noise)
    return model


def make_batches(steps, vocab, batch=8, seq_len=32, seed=1):
    """Batches of (inputs, labels). In the first row only the last eighth has labels, the second row has none at all."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(steps):
        ids = torch.randint(0, vocab, (batch, seq_len + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[0, : seq_len * 7 // 8] = -100
        labels[1] = -100
        batches.append((ids[:, :-1].contiguous(), labels))
    return batches


def shard_model(model_or_config, sizes, dtype=torch.float32):
    """Put a plain model's weights (or a config's first ones) on the mesh dp x cp x tp, as the script does.

    Returns model and mesh.
    """
    script = load_script()
    from transformers import AttentionInterface

    dp, cp, tp = sizes
    mesh = script.build_mesh("cpu", dp=dp, cp=cp, tp=tp)
    if cp > 1:
        AttentionInterface.register("context_parallel", script.context_parallel_attention(mesh["cp"]))
    source = None if not isinstance(model_or_config, torch.nn.Module) else model_or_config
    config = source.config if source is not None else model_or_config
    model = script.build_model(
        "given", config, mesh, torch.device("cpu"), dtype=dtype, from_scratch=True, seed=0, load_weights=source is None
    )
    if source is not None:
        script.copy_full_weights(model, source if dist.get_rank() == 0 else None, torch.device("cpu"))
    return model, mesh


def relative(a, b):
    """The largest difference of two tensors or numbers over the largest value."""
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item()


def _rank_main(rank, world_size, store, connection, function, args):
    """One rank: join the process group, run the function, send back what it returns or why it failed."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        result = (True, function(*args))
        dist.destroy_process_group()
    except SystemExit as error:  # how the script refuses
        result = (False, f"exit code {error.code}")
    except BaseException:
        result = (False, traceback.format_exc())
    connection.send_bytes(pickle.dumps(result))  # by value: shared tensors would die with this process
    connection.close()


class Pool:
    """Ranks forked from one process that has everything imported, so that a start costs no more than a fork.

    Each run has processes of its own: DTensor's caches outlive a process group and would mix up the next one's.
    """

    def __init__(self):
        # before Python 3.13 the fork server looks for what it preloads only here, and finds nothing without a word
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["conftest"])
        self.folder = tempfile.TemporaryDirectory()
        self.runs = 0

    def run(self, world_size, function, *args, timeout=240):
        """Call a module-level function on world_size ranks; returns their results by rank, which must pickle."""
        self.runs += 1
        store = f"{self.folder.name}/store{self.runs}"
        ranks = []
        for rank in range(world_size):
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_rank_main, args=(rank, world_size, store, theirs, function, args))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            results, deadline = [], time.monotonic() + timeout
            for rank, (_, connection) in enumerate(ranks):
                if not connection.poll(max(0, deadline - time.monotonic())):
                    raise TimeoutError(f"rank {rank} of {world_size} did not answer in {timeout} s")
                results.append(pickle.loads(connection.recv_bytes()))
        finally:
            for process, connection in ranks:
                connection.close()
                process.kill()
                process.join()
        failed = [f"rank {rank}: {value}" for rank, (ok, value) in enumerate(results) if not ok]
        if failed:
            raise AssertionError("\n".join(failed[:2]))
        return [value for _, value in results]


@pytest.fixture(scope="session")
def pool():
    return Pool()


@pytest.fixture(scope="session")
def script():
    return load_script()
