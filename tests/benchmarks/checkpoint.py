"""What a checkpoint costs: bytes, memory, traffic and time of the script's saves and loads, as one markdown table.

    python tests/benchmarks/checkpoint.py [--layers N] [--folder FOLDER]
    unshare -n sh -c "ip link set lo up; python tests/benchmarks/checkpoint.py"     # as root: with no other traffic

For each mesh, one process a rank (gloo, CPU) holds its shards of a Llama of 101 million parameters and of AdamW's two
moments, all random. M is the bytes of parameters and moments, a tied parameter counted once; N is the number of ranks.
Of the ranks the worst one counts, and of repetitions the worst one too, except for times (median) and traffic (least).

    written     the size of the files that a rank has written, over M / N
    memory      the highest resident size during a save that is not async, minus the size before it
    moved       what all network interfaces have received during a save, and during a sleep as long
    read        what a rank's system calls have read during a load, over the bytes of its shards; checksums are off
    time        from barrier to barrier; what is read lies in the page cache
    gathered    torch's full state dict on rank 0, torch.save and fsync; torch.load there, broadcast to all ranks
    async       until save_checkpoint returns, over a save that is not async; the first one allocates
    checksums   the time in the checksums over the rest of the same save

After the loads, the sum of all bits over all ranks is compared with the one before the save.
"""

import argparse
import ctypes
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as state_dicts
import transformers
from conftest import ALL, CP, DP, ONE, TP, Mesh, Pool, load_script, make_model, shard_model
from torch.distributed.tensor import DTensor


MESHES = [ONE, TP, DP, CP, ALL]
LOADED_INTO = {ONE: Mesh(tp=4), ALL: ONE, DP: TP}
REPEATS, MIB = 3, 2**20


def local(tensor):
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def build(layers, sizes):
    """Model and optimizer on a mesh, as the script builds them; and their tensors, a tied parameter once.

    Vocabulary and tied embedding are those of SmolLM2-135M, the heads are such that 4 divides them.
    """
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    widths = {"vocab_size": 49152, "hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(**widths, **heads, tie_word_embeddings=True)
    # only rank 0 is asked for weights
    source = make_model(config) if dist.get_rank() == 0 else SimpleNamespace(config=config)
    model, mesh = shard_model(source, sizes)
    optimizer = load_script().build_optimizer(model, weight_decay=0.1)
    load_script().init_optimizer_state(optimizer)
    # with the same numbers on all ranks of tp: some tensors have replicas there
    torch.manual_seed(1 + mesh["fsdp"].get_local_rank())
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    for moment in moments:
        local(moment).uniform_()
    return model, optimizer, [*model.parameters(), *moments]


def fingerprint(tensors):
    """This rank's part of a number that is the same in every mesh: the sum of all bits, read as integers."""
    total = 0
    for tensor in tensors:
        mesh, places = tensor.device_mesh, tensor.placements
        replicas = math.prod(mesh.size(dim) for dim, place in enumerate(places) if place.is_replicate())
        # exact: all ranks together count each tensor as often as there are ranks
        total += local(tensor).view(torch.int32).sum().item() * (dist.get_world_size() // replicas)
    return total


def timed(function):
    """Seconds until it is done on all ranks, and what it returns here."""
    dist.barrier()
    started = time.perf_counter()
    value = function()
    dist.barrier()
    return time.perf_counter() - started, value


def resident_kib(field):
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))


def bytes_read():
    # rchar: all that read() has returned, also from the page cache; a few KiB of it are messages of other ranks
    return int(Path("/proc/self/io").read_text().split()[1])


def bytes_received():
    return sum(int(line.split(":")[1].split()[0]) for line in Path("/proc/net/dev").read_text().splitlines()[2:])


def extra_memory(function):
    """What a function returns, and by how many bytes more have been resident meanwhile than before."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed but is still held would be taken again unseen
    # VmHWM starts again at what is resident; it misses no peak, and counts pages of libraries used for the first time
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_kib("VmRSS")
    value = function()
    return value, (resident_kib("VmHWM") - before) * 1024


def measure_save(save, result):
    """One save: its time, memory, traffic and checksums. Returns the checkpoint's path."""
    script, spent = load_script(), []
    plain = script.checksum

    def checksum(path):
        started = time.perf_counter()
        digest = plain(path)
        spent.append(time.perf_counter() - started)
        return digest

    script.checksum = checksum
    dist.barrier()
    before = bytes_received()
    (seconds, future), memory = extra_memory(lambda: timed(save))
    result["moved"].append(bytes_received() - before)
    dist.barrier()
    before = bytes_received()
    time.sleep(seconds)
    result["idle"].append(bytes_received() - before)
    script.checksum = plain
    for name, value in {"save": seconds, "memory": memory, "checksums": sum(spent)}.items():
        result[name].append(value)
    return future.result()


def gathered_save(file, model, optimizer):
    options = state_dicts.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = state_dicts.get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        # as safe as the script's: the file of the save before stays until this one is on the disk
        with file.with_suffix(".tmp").open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(stream.name, file)


def gathered_load(file, model, optimizer):
    model_state, optimizer_state = {}, {}
    if dist.get_rank() == 0:
        model_state, optimizer_state = torch.load(file, map_location="cpu", weights_only=True)
    options = state_dicts.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    # not set_state_dict: where the model's state is empty it loads the optimizer alone, and rank 0 would wait
    state_dicts.set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    state_dicts.set_model_state_dict(model, model_state, options=options)


def measure_loads(load, repeats, tensors, result, name):
    """Load into emptied shards: the time, and the bytes read over the bytes kept."""
    kept = sum(local(tensor).nbytes for tensor in tensors)
    for _ in range(repeats):
        for tensor in tensors:
            local(tensor).zero_()
        before = bytes_read()
        seconds, _ = timed(load)
        result[f"{name}_ratio"].append((bytes_read() - before) / kept)
        result[name].append(seconds)
    result["fingerprints"].append(fingerprint(tensors))


def measure_readers(path, repeats, model, optimizer, tensors, result):
    """Load a checkpoint by the script, and by torch's reader."""
    script = load_script()

    def stock():
        dcp.load({"app": script.AppState(model, optimizer)}, storage_reader=dcp.FileSystemReader(path))

    measure_loads(lambda: script.load_checkpoint(path, model, optimizer), repeats, tensors, result, "load")
    measure_loads(stock, 1, tensors, result, "stock")


def measure(sizes, layers, folder):
    """All that is measured in one mesh, as one rank sees it."""
    model, optimizer, tensors = build(layers, sizes)
    result, file = defaultdict(list), folder / "gathered.pt"
    about = sizes._asdict() | {"run": "b", "step": 1, "tokens": 0}

    def save(background=None):
        options = {"about": about, "tokenizer": None, "keep_last": 1, "background": background}
        return load_script().save_checkpoint(folder, model, optimizer, **options)

    result["fingerprints"].append(fingerprint(tensors))
    # in turn, so that both meet the same disk and page cache; the first saves meet fresh memory and are not timed
    for _ in range(1 + REPEATS):
        path = measure_save(save, result)
        result["gathered_save"].append(timed(lambda: gathered_save(file, model, optimizer))[0])
    background = load_script().start_background(torch.device("cpu"), 60)
    for _ in range(1 + REPEATS):
        dist.barrier()
        started = time.perf_counter()
        future = save(background)
        result["async"].append(time.perf_counter() - started)
        future.result()
    result["written"].append(sum(part.stat().st_size for part in path.glob(f"__{dist.get_rank()}_*.distcp")))
    measure_readers(path, REPEATS, model, optimizer, tensors, result)
    measure_loads(lambda: gathered_load(file, model, optimizer), REPEATS, tensors, result, "gathered_load")
    return result | {"path": path, "whole": sum(tensor.numel() * tensor.itemsize for tensor in tensors)}


def measure_in_other_mesh(sizes, layers, path):
    result = defaultdict(list)
    measure_readers(path, 1, *build(layers, sizes), result)
    return result


def run(pool, sizes, function, *args):
    """Call it on the ranks of a mesh. Returns the worst rank's value of each repetition, and the sum of all bits."""
    results = pool.run(sizes.ranks, function, sizes, *args, timeout=400)
    bits = {sum(values) // sizes.ranks for values in zip(*(result.pop("fingerprints") for result in results))}
    if len(bits) > 1:
        raise AssertionError(f"mesh {sizes}: a load has not brought back what was saved")
    lists = [name for name, value in results[0].items() if isinstance(value, list)]
    worst = {name: [max(values) for values in zip(*(result[name] for result in results))] for name in lists}
    return results[0] | worst, bits


def measure_mesh(pool, sizes, layers, folder):
    """The cells of one mesh, by the row of the table; and M."""
    result, bits = run(pool, sizes, measure, layers, folder)
    elsewhere = "-"
    if other := LOADED_INTO.get(sizes):
        loaded, loaded_bits = run(pool, other, measure_in_other_mesh, layers, result["path"])
        if loaded_bits != bits:
            raise AssertionError(f"mesh {other} has not loaded what mesh {sizes} saved")
        elsewhere = f"into {other.column}: {loaded['load_ratio'][0]:.3f} ({loaded['stock_ratio'][0]:.3f})"
    share = result["whole"] / sizes.ranks
    limit = 0.05 * share + 32 * MIB
    names = "save load gathered_save gathered_load async".split()
    times = {name: statistics.median(result[name][-REPEATS:]) for name in names}
    checksums = [part / (all - part) for part, all in zip(result["checksums"], result["save"])]
    first, later, read = result["async"][0], times["async"], max(result["load_ratio"])
    # whatever else the machine sends only adds to the traffic: the least is the nearest to the truth
    return result["whole"], {
        "written, over M / N (target 1.02)": f"{result['written'][0] / share:.4f}",
        "memory, MiB (limit 5 % of M / N + 32)": f"{max(result['memory']) / MIB:.1f} ({limit / MIB:.1f})",
        "moved, KiB (in a sleep)": f"{min(result['moved']) / 1024:.0f} ({min(result['idle']) / 1024:.0f})",
        "read, over kept (torch's reader; target 1.05)": f"{read:.3f} ({result['stock_ratio'][0]:.3f})",
        "read, over kept, in another mesh": elsewhere,
        "save, s (gathered)": f"{times['save']:.2f} ({times['gathered_save']:.2f})",
        "load, s (gathered)": f"{times['load']:.2f} ({times['gathered_load']:.2f})",
        "async, s: first, later (over save)": f"{first:.2f}, {later:.2f} ({later / times['save']:.2f})",
        "checksums, over the rest of the save": f"{statistics.median(checksums[-REPEATS:]):.2f}",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=15, help="decoder layers; 15 make 101 million parameters")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: the temporary directory")
    args = parser.parse_args()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a rank prints goes to stderr; stdout has the table alone
    columns, pool = {}, Pool()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for sizes in MESHES:
            place = Path(folder) / str(sizes)
            place.mkdir()
            whole, columns[sizes.column] = measure_mesh(pool, sizes, args.layers, place)
            shutil.rmtree(place)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    model = f"a Llama of {args.layers} layers, {whole / 12e6:.1f} million parameters, M = {whole / MIB:.0f} MiB"
    print(f"{versions}; {model}; {os.cpu_count()} cores\n", file=output)
    print(f"| tp,dp,cp | {' | '.join(columns)} |\n|---{'|---:' * len(columns)}|", file=output)
    for row in columns[MESHES[0].column]:
        print(f"| {row} | {' | '.join(cells[row] for cells in columns.values())} |", file=output)
    output.close()


if __name__ == "__main__":
    main()
