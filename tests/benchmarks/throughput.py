"""How fast the script trains, against what else one would use and against itself in other meshes: one markdown table.

    pip install accelerate      # for Transformers' Trainer and for FSDP2; the script itself has no use for it
    python tests/benchmarks/throughput.py [--quick]

Contenders of a section train the same Llama from the same weights on the same batches (CPU, float32, AdamW), each in
processes of its own, which wait while another one runs. Their losses have to agree, to 1e-4 in the first step.

    tokens/s    the median over rounds. In a round each contender runs one step, one after another, in turn forwards and
                backwards. Timed is from the word to go until the last rank is done; the first steps are not timed
    time        of the section's first contender over this one's in the same round, the median over rounds: below 1 the
                first is faster
    CPU time    the same of the time that all ranks together spend on a core, which other jobs disturb less. Ranks that
                wait for each other, or cores for data, are not in it
    memory      the highest resident size of the worst rank in one more step, minus that before it, when weights and
                moments are there already. The allocator then returns at once what is freed, and does not reuse it

Trainer   `transformers.Trainer` with fused AdamW; no evaluation, saves or logs
bare      a loop written by hand: model, cross entropy of all logits, clip_grad_norm_, fused AdamW
FSDP2     Accelerator.prepare, .backward and .clip_grad_norm_; its refusal of FSDP on CPUs is overridden
"""

import argparse
import contextlib
import ctypes
import functools
import itertools
import math
import operator
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# before OpenMP is loaded: a thread that spins at a barrier takes the core that the other one needs, if there are other
# jobs, and a step of 2 threads then takes up to 20 times as long
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from conftest import Pool, load_script, make_model


LEARNING_RATE, WEIGHT_DECAY, MAX_NORM, BETAS = 1e-4, 0.1, 1.0, (0.9, 0.95)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192}
SIZES = {
    "50 M": {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6},
    "11 M": {"vocab_size": 32000, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    | {"tie_word_embeddings": True},
    "tiny": {"vocab_size": 4096, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2},
}


class Contender(NamedTuple):
    name: str
    function: str  # of this module
    ranks: int = 1
    threads: int = 1  # of each rank
    mesh: dict | None = None  # None: one process without a process group


class Section(NamedTuple):
    size: str
    batch: tuple  # sequences and tokens of a step, of all ranks together
    rounds: int
    contenders: tuple


def in_mesh(**sizes):
    return Contender(f"script, {next(axis for axis in sizes if sizes[axis] > 1)} 2", "script", 2, 1, sizes)


ONE, TWO = Contender("script", "script"), Contender("script, 1 process of 2 threads", "script", threads=2)
DP, CP, TP = in_mesh(dp=2, cp=1, tp=1), in_mesh(dp=1, cp=2, tp=1), in_mesh(dp=1, cp=1, tp=2)
SECTIONS = [
    Section("50 M", (2, 256), 15, (ONE, Contender("Trainer", "trainer"), Contender("bare", "bare"))),
    Section("50 M", (4, 256), 11, (DP, Contender("FSDP2", "fsdp2", 2))),
    Section("50 M", (4, 256), 9, (TWO, DP, CP, TP)),
    Section("11 M", (1, 8192), 3, (TWO, CP)),
]


def resident_kib(field):
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))


def setup(section, seed=0):
    """The config, a model with its weights, and a few batches of token ids that are used again and again."""
    config = transformers.LlamaConfig(**SIZES[section.size], **HEADS)
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(0, config.vocab_size, section.batch, generator=generator) for _ in range(4)]
    return config, functools.partial(make_model, config), batches


def shifted(ids):
    return F.pad(ids[:, 1:], (0, 1), value=-100)  # as Transformers does it


def adamw(model):
    """The script's groups and options."""
    optimizer = load_script().build_optimizer(model, WEIGHT_DECAY)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    return optimizer


def script(section, mesh, tick):
    module, (config, make, batches) = load_script(), setup(section)
    device, mesh = torch.device("cpu"), module.build_mesh("cpu", **mesh) if mesh else None
    model = module.build_model(config, mesh, "cpu", torch.float32, seq_len=section.batch[1])
    module.materialize(model, device)
    module.send_weights(model, make, "the benchmark", None)
    optimizer = adamw(model)
    for ids in itertools.cycle(batches):
        micro_batches = module.shard_batch(ids, shifted(ids), mesh, section.batch[0], device)
        tick(module.train_step(model, optimizer, micro_batches, mesh, MAX_NORM)[0].item())


def bare(section, mesh, tick):
    _, make, batches = setup(section)
    model = make()
    optimizer = adamw(model)
    for ids in itertools.cycle(batches):
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), shifted(ids).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        tick(loss.item())


def trainer(section, mesh, tick):
    _, make, batches = setup(section)

    class Trainer(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            self.last_loss = super().training_step(*args, **kwargs)
            return self.last_loss

    class Callback(transformers.TrainerCallback):
        def on_step_end(self, *args, **kwargs):  # before it, the gradients are zeroed: all of a step is timed
            tick(here.last_loss.item())

    with tempfile.TemporaryDirectory() as folder:
        quiet = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
        adam = {"optim": "adamw_torch_fused", "learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
        adam |= {"adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "lr_scheduler_type": "constant"}
        data = {"per_device_train_batch_size": section.batch[0], "train_sampling_strategy": "sequential"}
        limits = {"max_steps": 10**6, "max_grad_norm": MAX_NORM, "use_cpu": True}
        options = transformers.TrainingArguments(output_dir=folder, **quiet, **adam, **data, **limits)
        rows = [{"input_ids": row, "labels": row} for ids in batches for row in ids]
        here = Trainer(make(), options, train_dataset=rows, callbacks=[Callback()])
        here.train()


def fsdp2(section, mesh, tick):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    _, make, batches = setup(section)
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **wrap)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # accelerate has FSDP on accelerators only, and would go on with DDP here
    accelerator.state.fsdp_plugin, accelerator.state.distributed_type = plugin, DistributedType.FSDP
    model = make()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for ids in itertools.cycle(batches):
        ids = ids.chunk(dist.get_world_size())[dist.get_rank()]
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), shifted(ids).flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        tick(loss.item())


class Stop(Exception):
    """Leaves a contender, from wherever it calls `tick`."""


def serve(section, contender, rank, store, connection):
    """One rank of a contender: trains as many steps as it is told to, and answers with losses, CPU time and memory."""
    torch.set_num_threads(contender.threads)
    transformers.logging.set_verbosity_error()
    if contender.ranks > 1:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        os.environ.update(zip(names, map(str, (rank, rank, contender.ranks, contender.ranks))))
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=contender.ranks)
    left, losses, cpu, resident = 2, [], 0, 0

    def tick(loss):
        nonlocal left, losses, cpu, resident
        left, losses = left - 1, [*losses, loss]
        if left:
            return
        connection.send((losses, time.process_time() - cpu, resident_kib("VmHWM") - resident))
        (left, with_memory), losses = connection.recv(), []
        if not left:
            raise Stop
        if with_memory:  # give back what was freed, and from now on at once what is of a MiB or more
            ctypes.CDLL(None).malloc_trim(0)
            ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD; else glibc's own holes decide
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
        cpu, resident = time.process_time(), resident_kib("VmRSS")

    with contextlib.suppress(Stop):
        globals()[contender.function](section, contender.mesh, tick)
    os._exit(0)


def start(pool, section, contender, folder):
    """Start the ranks of a contender, which build their model and train two steps. Returns their connections."""
    connections, store = [], f"{folder}/{section.size}{section.batch}{contender.name}"
    for rank in range(contender.ranks):
        ours, theirs = pool.context.Pipe()
        args = (section, contender, rank, store, theirs)
        pool.context.Process(target=serve, args=args, daemon=True).start()
        theirs.close()
        connections.append(ours)
    return connections


def answers(connections):
    """Losses (the mean over ranks), CPU time (the sum) and memory (the worst rank)."""
    losses, seconds, memory = zip(*(connection.recv() for connection in connections))
    return [statistics.mean(values) for values in zip(*losses)], sum(seconds), max(memory)


def run_section(pool, section):
    """The rows of one section."""
    names = [contender.name for contender in section.contenders]
    wall, cpu, losses, memory = ({name: [] for name in names} for _ in range(4))
    with tempfile.TemporaryDirectory() as folder:
        ranks = {contender.name: start(pool, section, contender, folder) for contender in section.contenders}
        for name in names:
            losses[name] += answers(ranks[name])[0]
        for i in range(section.rounds + 1):
            with_memory = i == section.rounds  # not timed: what was given back to the system has to be asked for again
            for name in names[:: -1 if i % 2 else 1]:
                started = time.perf_counter()
                for connection in ranks[name]:
                    connection.send((1, with_memory))
                loss, cpu_seconds, extra = answers(ranks[name])
                seconds = time.perf_counter() - started
                losses[name] += loss
                if with_memory:
                    memory[name] = extra
                else:
                    wall[name].append(seconds)
                    cpu[name].append(cpu_seconds)
        for connection in itertools.chain(*ranks.values()):
            connection.send((0, False))
    first, rows = names[0], []
    for name in names:
        off = [abs(a / b - 1) for a, b in zip(losses[name], losses[first])]
        print(
            f"{name}: losses {losses[name][0]:.6f} ... {losses[name][-1]:.6f}, off {off[0]:.0e}, {max(off):.0e} at most"
        )
        if off[0] > 1e-4 or max(off) > 1e-2:
            raise AssertionError(f"{name} does not compute the losses of {first}: {losses[name]}, {losses[first]}")
        ratios = [statistics.median(map(operator.truediv, taken[first], taken[name])) for taken in (wall, cpu)]
        speed = math.prod(section.batch) / statistics.median(wall[name])
        cells = [f"{speed:.0f}", *(f"{ratio:.3f}" for ratio in ratios), f"{memory[name] / 1024:.0f}"]
        rows.append([section.size, "{} x {}".format(*section.batch), name, *cells])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds, to see that it works")
    parser.add_argument("--sections", type=int, nargs="+", default=range(len(SECTIONS)), help="which, from 0 on")
    parser.add_argument("--rounds", type=int, help="of each section, instead of its own number")
    args = parser.parse_args()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a rank prints goes to stderr; stdout has the table alone
    pool = Pool()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    print(f"{versions}; {os.cpu_count()} cores\n", file=output)
    columns = ["model", "batch", "contender", "tokens/s", "time", "CPU time", "memory, MiB"]
    print(f"| {' | '.join(columns)} |\n|---|---|---{'|---:' * 4}|", file=output, flush=True)
    for section in (SECTIONS[i] for i in args.sections):
        if args.quick:
            section = section._replace(size="tiny", rounds=3, batch=(section.batch[0], min(512, section.batch[1])))
        for row in run_section(pool, section._replace(rounds=args.rounds or section.rounds)):
            print(f"| {' | '.join(row)} |", file=output, flush=True)
    output.close()


if __name__ == "__main__":
    main()
