"""What a training step takes in memory, and what the dry run says it would: one markdown table.

    python tests/benchmarks/memory.py [--layers N] [--seq_len N]

For each mesh, one process a rank (gloo, CPU, float32) runs two steps of the script on a Llama with a vocabulary of
32,000 and random weights, and the second is measured. N is the number of ranks, M the bytes of the parameters. A
micro-batch is one sequence for each dp rank, so that without cp and tp each rank has the same tokens in every mesh. Of
the ranks the worst one counts. "none", "selective" and "full" are values of --activation_checkpointing.

    parameters      bytes of a rank's shards; gradients are those there when the optimizer starts
    activations     what torch's CPU allocator has handed out when the loss begins, over what it had before the step,
                    without the weights of embedding and head, which FSDP has gathered until after the loss; in brackets
                    over one process's by cp x tp. Gathered layers are in it: of each a rank may hold one more
    peak            parameters, moments and the highest resident size during a step over the one before it; the same by
                    torch's CPU allocator; and what `--dry_run` prints for this mesh, over the first. The allocator's
                    log, of torch.profiler, misses what gloo's threads free, and is too high where that matters
    logits          the most that the loss adds while the head is frozen, without the gradient of the hidden states,
                    over the bytes of all logits of the rank's tokens in float32, with the whole vocabulary
    loss            the most that it adds otherwise, over the gradient of the head, of which it makes at most two
"""

import argparse
import ctypes
import functools
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from conftest import ALL, CP, DP, ONE, SCRIPT, TP, Mesh, Pool, load_script
from torch.distributed.tensor import DTensor


MESHES = [ONE, TP, DP, CP, Mesh(dp=2, tp=2), ALL]
MODES, MIB = ("none", "selective", "full"), 2**20


def make_config(layers, seq_len):
    widths = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": seq_len}
    return transformers.LlamaConfig(**widths, **heads, bos_token_id=None, eos_token_id=None)


def nbytes(tensors):
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def build(config, sizes, seq_len, mode):
    """Model, optimizer and one micro-batch, as the script makes them; one process alone has no mesh."""
    script = load_script()
    mesh = script.build_mesh("cpu", **sizes._asdict()) if sizes != ONE else None
    options = {"seq_len": seq_len, "activation_checkpointing": mode}
    model = script.build_model(config, mesh, "cpu", torch.float32, **options)
    script.materialize(model, torch.device("cpu"))
    for parameter in model.parameters():
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().normal_(0, 0.02)
    optimizer = script.build_optimizer(model, weight_decay=0.1)
    script.init_optimizer_state(optimizer)
    ids = torch.randint(0, config.vocab_size, (sizes.dp, seq_len + 1), generator=torch.Generator().manual_seed(0))
    batches = script.shard_batch(ids[:, :-1], ids[:, 1:], mesh, 1, torch.device("cpu"))
    return model, optimizer, batches, mesh


def resident_peak(function):
    """By how many bytes more have been resident than before: the kernel's count, all threads and gloo's included."""

    def kib(field):
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))

    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again at what is resident
    before = kib("VmRSS")
    function()
    return (kib("VmHWM") - before) * 1024


def allocator_peaks(function):
    """Of torch's CPU allocator, over what was there before: the peak, what there is when the loss begins, and the peak
    in it over that."""
    script, forward = load_script(), load_script().ChunkedLoss.forward

    def marked(*args):
        with torch.profiler.record_function("the loss"):
            return forward(*args)

    script.ChunkedLoss.forward = staticmethod(marked)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        function()
    script.ChunkedLoss.forward = staticmethod(forward)
    events = profiler.profiler.kineto_results.events()
    begin, end = next((event.start_ns(), event.end_ns()) for event in events if event.name() == "the loss")
    now, peak, at_loss, loss_peak = 0, 0, 0, 0
    for time, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        now += size
        peak, at_loss = max(peak, now), now if time < begin else at_loss
        loss_peak = max(loss_peak, now - at_loss) if begin <= time <= end else loss_peak
    return peak, at_loss, loss_peak


def measure(config, sizes, seq_len, mode):
    """All that is measured of one mesh and mode, as one rank sees it; of the loss only where mode is "none"."""
    libc, script = ctypes.CDLL(None), load_script()
    libc.mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: what is freed goes back to the kernel at once
    model, optimizer, batches, mesh = build(config, sizes, seq_len, mode)
    step = functools.partial(script.train_step, model, optimizer, batches, mesh, 1.0)
    gradients = []
    hook = optimizer.register_step_pre_hook(lambda *_: gradients.append(nbytes(p.grad for p in model.parameters())))
    step()
    hook.remove()
    resident = resident_peak(step)
    peak, at_loss, in_loss = allocator_peaks(step)
    result = {"parameters": nbytes(model.parameters()), "gradients": gradients[0]}
    result["optimizer"] = nbytes(t for state in optimizer.state.values() for t in state.values() if t.ndim)
    held = result["parameters"] + nbytes(t for state in optimizer.state.values() for t in state.values())
    ends = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    whole = sum(p.numel() * 4 for p in ends) // sizes.tp  # the vocabulary divides by tp
    result["activations"] = at_loss - (whole if mesh is not None else 0)  # FSDP copies them on one rank, too
    result |= {"resident": held + resident, "allocator": held + peak}
    if mode == "none":
        tokens = seq_len // sizes.cp
        result["loss"] = in_loss / (ends[1].numel() * 4 / sizes.tp)
        del model, optimizer, step
        model, optimizer, batches, mesh = build(config, sizes, seq_len, mode)
        model.get_output_embeddings().weight.requires_grad_(False)
        optimizer = script.build_optimizer(model, weight_decay=0.1)
        once = functools.partial(script.train_step, model, optimizer, batches, mesh, 1.0)
        own = tokens // sizes.tp * config.hidden_size * 4  # the gradient of the hidden states
        result["logits"] = (allocator_peaks(once)[2] - own) / (tokens * config.vocab_size * 4)
    return result


def predict(folder, sizes, seq_len, mode):
    """The bytes of a rank's peak that the dry run prints."""
    flags = f"--tp_size {sizes.tp} --dp_size {sizes.dp} --cp_size {sizes.cp} --world_size {sizes.ranks}".split()
    flags += f"--seq_len {seq_len} --global_batch_size {sizes.dp} --activation_checkpointing {mode}".split()
    command = [sys.executable, SCRIPT, "--dry_run", "--device", "cpu", "--from_scratch", "--model_name", folder, *flags]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(re.search(r"peak: ([\d.]+) GiB", text)[1]) * 2**30


def measure_mesh(pool, config, folder, sizes, seq_len, one):
    """The cells of one mesh, by the row of the table. `one` keeps what one process has, for the meshes that follow."""
    ranks, cells = sizes.ranks, {}
    for mode in MODES:
        results = pool.run(ranks, measure, config, sizes, seq_len, mode, timeout=900)
        worst = {name: max(result[name] for result in results) for name in results[0]}
        predicted = predict(folder, sizes, seq_len, mode)
        one.setdefault(mode, worst["activations"])
        one.setdefault("M", worst["parameters"])
        if mode == "none":
            for name, copies in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
                share = copies * one["M"] / ranks
                cells[f"{name}, over {copies if copies > 1 else ''}M / N"] = f"{worst[name] / share:.4f}"
            cells["logits in the loss, over all logits (target 0.125)"] = f"{worst['logits']:.3f}"
            cells["loss, over the head's gradient"] = f"{worst['loss']:.2f}"
        share = one[mode] / (sizes.tp * sizes.cp)
        mine, ratio = worst["activations"], predicted / worst["resident"]
        cells[f"{mode}: activations, MiB (over 1 process / (cp tp))"] = f"{mine / MIB:.0f} ({mine / share:.2f})"
        peaks = f"{worst['resident'] / MIB:.0f} ({worst['allocator'] / MIB:.0f}; {ratio:.3f})"
        cells[f"{mode}: peak, MiB (allocator; dry run over it)"] = peaks
    return cells


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6, help="decoder layers; 6 make 50 million parameters")
    parser.add_argument("--seq_len", type=int, default=2048)
    args = parser.parse_args()
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a rank prints goes to stderr; stdout has the table alone
    config, columns, pool, one = make_config(args.layers, args.seq_len), {}, Pool(), {}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        for sizes in MESHES:
            columns[sizes.column] = measure_mesh(pool, config, folder, sizes, args.seq_len, one)
            print(sizes, columns[sizes.column], file=sys.stderr, flush=True)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    model = f"a Llama of {args.layers} layers, {one['M'] / 4e6:.1f} million parameters, M = {one['M'] / MIB:.0f} MiB"
    print(f"{versions}; {model}; micro-batches of 1 x {args.seq_len} / cp\n", file=output)
    print(f"| tp,dp,cp | {' | '.join(columns)} |\n|---{'|---:' * len(columns)}|", file=output)
    for row in next(iter(columns.values())):
        print(f"| {row} | {' | '.join(cells[row] for cells in columns.values())} |", file=output)
    output.close()


if __name__ == "__main__":
    main()
