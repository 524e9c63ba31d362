"""Helpers of all tests: the script as a module, the meshes, small asymmetric models, ranks, and real processes."""

import contextlib
import importlib.util
import json
import math
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist


ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "3D_parallel.py"
FLAGS = ["--seq_len", 32, "--global_batch_size", 2, "--warmup_steps", 2]  # of a run whose steps take no time
sys.path.append(str(ROOT / "tests" / "benchmarks"))  # for families.py, whose models some tests take
# before anything imports transformers, which looks at it once
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")


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
for _name in ("torch._dynamo", "datasets"):  # they would be imported late, in each rank
    importlib.import_module(_name)


class Mesh(NamedTuple):
    """The sizes of a mesh, in the order of its axes."""

    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def ranks(self):
        return math.prod(self)

    def __str__(self):
        return f"dp{self.dp}-cp{self.cp}-tp{self.tp}"

    @property
    def column(self):
        """Its name in tables, where the sizes have the order of a checkpoint's name."""
        return f"{self.tp},{self.dp},{self.cp}"


ONE, DP, CP, TP, ALL = Mesh(), Mesh(dp=2), Mesh(cp=2), Mesh(tp=2), Mesh(2, 2, 2)
MESHES = [  # all that there are of 1, 2, 4 and 8 ranks
    Mesh(dp, cp, ranks // (dp * cp))
    for ranks in (1, 2, 4, 8)
    for dp in (1, 2, 4, 8)
    for cp in (1, 2, 4, 8)
    if ranks % (dp * cp) == 0
]


def make_config(family, vocab=509, tied=False, **changes):
    """A small config of a family: grouped heads where tp allows it, sizes that differ from each other, no dropout."""
    import transformers as t

    classes = {"llama": t.LlamaConfig, "qwen3": t.Qwen3Config, "mistral": t.MistralConfig}
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
        pad_token_id=vocab * 3 // 5,  # its row of the embedding gets no gradient, and lies in the middle of a shard
    )
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


def shard_model(source, sizes, dtype=torch.float32, dp_replicate=1, **options):
    """Put a plain model's weights on a mesh, or on none where sizes is None. Returns model and mesh."""
    script = load_script()
    mesh = None if sizes is None else script.build_mesh("cpu", **sizes._asdict(), dp_replicate=dp_replicate)
    model = script.build_model(source.config, mesh, "cpu", dtype, **{"seq_len": 32, **options})
    script.materialize(model, torch.device("cpu"))
    script.send_weights(model, lambda: source, "the test", None)
    return model, mesh


def save(folder, model, optimizer, sizes, step, run="r", keep_last=100, background=None):
    """Save as the script does in such a mesh; returns the Future of the path."""
    about = sizes._asdict() | {"run": run, "step": step, "tokens": 0}
    options = {"about": about, "tokenizer": None, "keep_last": keep_last, "background": background}
    return load_script().save_checkpoint(Path(folder), model, optimizer, **options)


def make_optimizer(model, learning_rate, weight_decay=0.1):
    """The script's optimizer with a constant rate, as no schedule sets one here."""
    optimizer = load_script().build_optimizer(model, weight_decay)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    return optimizer


class RecordingSGD(torch.optim.SGD):
    """SGD that keeps the gradients of its first step. Adam would hide a constant factor in all gradients."""

    def step(self, closure=None):
        if not hasattr(self, "first_grads"):
            self.first_grads = [None if p.grad is None else p.grad.clone() for p in self.param_groups[0]["params"]]
        return super().step(closure)


def read_metrics(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def relative(a, b):
    """The largest difference of two tensors or numbers over the largest value."""
    a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item()


def assert_close(actual, expected, tolerance, what):
    """Fails with what it is, where, and how far off: a rank's asserts are not rewritten, and print nothing else."""
    shapes = [tuple(torch.as_tensor(values).shape) for values in (actual, expected)]
    assert shapes[0] == shapes[1], f"{what}: shape {shapes[0]} instead of {shapes[1]}"
    error = relative(actual, expected)
    numbers = "" if isinstance(actual, torch.Tensor) else f": {actual} instead of {expected}"
    assert error < tolerance, f"{what}: off by {error:.1e} relative, allowed is {tolerance:.0e}{numbers}"


def differing(state, expected):
    """The names whose tensors are not bit-equal, and how far off they are; both sides must have the same names."""
    assert state.keys() == expected.keys(), f"only on one side: {sorted(state.keys() ^ expected.keys())}"
    names = [name for name in expected if not torch.equal(state[name], expected[name])]
    return {name: f"off by {relative(state[name], expected[name]):.1e} relative" for name in names}


def whole(tensor):
    """A plain copy of a tensor, gathered if it is cut."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def before_call(owner, name, number, action, ranks=(1,)):
    """Do something on some ranks right before the n-th call of a function, or of a method of a class."""
    original, calls = getattr(owner, name), []

    def function(*args, **kwargs):
        calls.append(1)
        if len(calls) == number and int(os.environ.get("RANK", 0)) in ranks:
            action()
        return original(*args, **kwargs)

    setattr(owner, name, function)


def _rank_main(rank, world_size, store, connection, task):
    """One rank: join the process group, run the function, send back what it returns or why it failed."""
    function, args = pickle.loads(task)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        result = (True, function(*args))
        dist.destroy_process_group()
    except SystemExit as error:  # how the script refuses
        result = (False, f"exit code {error.code}")
    except BaseException:
        result = (False, traceback.format_exc())
    connection.send_bytes(pickle.dumps(result))
    connection.close()


def _script_main(environment, argv, output, before):
    """One rank of a launch of the script, as torchrun would start it, with its output in a file."""
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    torch.set_num_threads(1)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    code = 0
    try:
        if before is not None:
            before()
        sys.argv = [str(SCRIPT), *argv]
        load_script().main(argv)
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


class Launch(NamedTuple):
    codes: list  # exit code of each rank; negative: the signal that ended it
    outputs: list  # stdout and stderr of each rank, together
    seconds: float


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
        task = pickle.dumps((function, args))  # by value: each shared tensor would take a file descriptor
        ranks = []
        for rank in range(world_size):
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_rank_main, args=(rank, world_size, store, theirs, task))
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

    def launch(self, world_size, *argv, env=None, before=None, timeout=240):
        """Run the script's main on world_size ranks (0: one process without a launcher), as torchrun would.

        `before` is a module-level function that each rank calls first, to break something. Like torchrun, it ends the
        other ranks 3 s after one has failed. Returns a Launch.
        """
        self.runs += 1
        started, ranks = time.monotonic(), []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        for rank in range(max(1, world_size)):
            output = f"{self.folder.name}/output{self.runs}_{rank}"
            environment = {"WANDB_MODE": "disabled"} | (env or {})
            if world_size:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
                environment |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_PORT": port}
            args = (environment, [str(word) for word in argv], output, before)
            process = self.context.Process(target=_script_main, args=args)
            process.start()
            ranks.append((process, output))
        deadline = started + timeout
        while any(process.is_alive() for process, _ in ranks) and time.monotonic() < deadline:
            if any(process.exitcode for process, _ in ranks):
                deadline = min(deadline, time.monotonic() + 3)
            time.sleep(0.05)
        for process, _ in ranks:
            process.kill()
            process.join()
        outputs = [Path(output).read_text() if Path(output).exists() else "" for _, output in ranks]
        return Launch([process.exitcode for process, _ in ranks], outputs, time.monotonic() - started)


# the variables that launch.sh reads, and Slurm's, in a job of which these tests may run
LAUNCHES = re.compile(r"(TP|DP|CP)_SIZE|NNODES|NODE_RANK|MAX_RESTARTS|LAUNCH_ID|(MASTER|RDZV|PET|SLURM)_\w+")


def children(pid):
    """The processes that a process has started, by /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(entry.name))
    return sorted(found)


def kill_all(process):
    """Kill a launcher and its ranks at once, as when a machine is lost."""
    if process.poll() is None:
        for pid in (process.pid, *children(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def running(argv, cwd, **variables):
    """A command as a user's shell would start it, without what this test's own environment says about ranks and meshes.

    Yields the Popen, stdout and stderr in one pipe of text. What still runs at the end is killed, ranks included.
    """
    environment = {name: value for name, value in os.environ.items() if not LAUNCHES.fullmatch(name)}
    environment |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | variables
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": cwd, "env": environment}
    process = subprocess.Popen([str(word) for word in argv], **options)
    try:
        yield process
    finally:
        kill_all(process)
        process.stdout.close()


def torchrun(*argv):
    """The command that starts two ranks of a file, or of what other options of torchrun come before one."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *argv]


def wait_for_steps(process, folder, steps, timeout=120):
    """Until a run that goes on in the background has logged so many steps."""
    metrics, ended = Path(folder) / "metrics.jsonl", time.monotonic() + timeout
    while not (metrics.exists() and metrics.read_text().count("\n") >= steps):
        if process.poll() is not None or time.monotonic() > ended:
            kill_all(process)
            raise AssertionError(f"no {steps} steps in {folder}, but:\n{process.communicate()[0]}")
        time.sleep(0.02)


@pytest.fixture(scope="session")
def pool():
    return Pool()


@pytest.fixture(scope="session")
def script():
    return load_script()
