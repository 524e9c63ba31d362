"""What a training step communicates, by mesh axis, beside what it has to: calls and bytes, as one markdown table.

    python tests/benchmarks/communication.py [--world 8] [--dtype bfloat16]

Real ranks (gloo, CPU) train a Llama for three steps, of which the last is counted: calls and bytes by the
script's Meter (those of the whole tensor, before it is scattered or after it is gathered), and calls once more by
torch's profiler, as gloo runs them. The formula:

    fsdp     parameters of a tp rank in the compute dtype, gathered twice for the layers (once for forward and once for
             backward) and once for both ends of the model; gradients in float32, scattered once
    replicas the scattered gradients, once a step (HSDP)
    tp       in a layer four gathers and four reduce-scatters of (B, S/cp, H), at both ends one of each
    tp small three numbers a token for the loss, and the gradients of what tp does not cut, once
    cp       in a layer one gather and one reduce-scatter of keys and values, (B, S, 2 x kv heads/tp x head size)
    all      token count; then loss, norm and stop flag: two small ones a step

Where a target is given, measured over formula must be at most 1.05. The exit code is 1 if one is missed.
"""

import argparse
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from conftest import ALL, CP, DP, TP, Mesh, Pool, load_script, make_batches, make_model, make_optimizer, shard_model


MESHES = [(TP, 1), (DP, 1), (CP, 1), (ALL, 1), (Mesh(dp=4, tp=2), 2)]  # and copies of the model, dp_replicate
SIZES = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
SEQ_LEN, BATCH, MICRO_BATCHES, TARGET = 512, 8, 2, 1.05


def count(sizes, replicas, dtype):
    """Runs on each rank: {axis: {kind: (calls, bytes)}} of one step, and the calls that gloo has run."""
    script = load_script()
    config = transformers.LlamaConfig(**SIZES, **HEADS, max_position_embeddings=SEQ_LEN, tie_word_embeddings=False)
    model, mesh = shard_model(make_model(config), sizes, dtype=dtype, dp_replicate=replicas, seq_len=SEQ_LEN)
    optimizer, device = make_optimizer(model, 1e-3), torch.device("cpu")
    steps = []
    for inputs, labels in make_batches(3, SIZES["vocab_size"], batch=BATCH, seq_len=SEQ_LEN):
        batches = script.shard_batch(inputs, labels, mesh, BATCH // sizes.dp // MICRO_BATCHES, device)
        with torch.profiler.profile() as profiler, script.Meter([]) as meter:
            script.train_step(model, optimizer, batches, mesh, 1.0)
        calls = sum(event.count for event in profiler.key_averages() if event.key.startswith("gloo:"))
        steps.append((meter.collectives, calls))
    collectives, calls = steps[-1]
    groups = {torch.distributed.group.WORLD.group_name: ["all"]}  # axes may share one
    for axis in (*mesh.mesh_dim_names, "fsdp"):
        groups.setdefault(mesh[axis].get_group().group_name, []).append(axis)
    by_axis = {}
    for (group, operator), (number, size) in collectives.items():
        axis = " ".join(groups[group])
        kind = "gather" if "gather" in operator else "scatter" if "scatter" in operator else "reduce"
        before = by_axis.setdefault(axis, {}).get(kind, (0, 0))
        by_axis[axis][kind] = (before[0] + number, before[1] + size)
    return by_axis, calls


def formula(sizes, replicas, dtype):
    """The same of what a step has to move, computed from sizes alone."""
    dp, cp, tp = sizes
    layers, hidden, width, vocab = (
        SIZES[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads, head = HEADS["num_attention_heads"], HEADS["num_key_value_heads"], HEADS["head_dim"]
    item, tokens = dtype.itemsize, BATCH // dp // MICRO_BATCHES * SEQ_LEN // cp
    layer = (hidden * head * (2 * heads + 2 * kv_heads) + 3 * hidden * width) // tp + 2 * hidden
    ends = 2 * vocab * hidden // tp + hidden
    uncut, m, shards = (2 * layers + 1) * hidden, MICRO_BATCHES, dp * cp // replicas
    needed = {"all": {"reduce": (2, 32)}}
    if dp * cp > 1:
        gathers = (m * (2 * layers + 1), m * (2 * layers * layer + ends) * item)
        needed["fsdp"] = {"gather": gathers, "scatter": (m * (layers + 1), m * (layers * layer + ends) * 4)}
    if replicas > 1:
        needed["dp_replicate"] = {"reduce": (layers + 1, (layers * layer + ends) * 4 // shards)}
    if tp > 1:
        blocks = (m * (4 * layers + 2), m * (4 * layers + 2) * tokens * hidden * item)
        needed["tp"] = {"gather": blocks, "scatter": blocks}
        needed["tp"]["reduce"] = (
            m * 2 + 1,
            m * tokens * 3 * 4 + uncut // shards * 4,
        )  # chunks of the loss are as one likes
    if cp > 1:
        keys_and_values = (m * layers, m * layers * tokens * cp * 2 * kv_heads // tp * head * item)
        needed["cp"] = {"gather": keys_and_values, "scatter": keys_and_values}
    return needed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--world", type=int, default=8, help="leave out meshes of more ranks")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    args = parser.parse_args()
    dtype, pool, missed = getattr(torch, args.dtype), Pool(), []
    print(
        "| tp,dp,cp (copies) | axis | calls (formula) | MiB (formula) | bytes over formula |\n|---|---|---:|---:|---:|"
    )
    for sizes, replicas in MESHES:
        if sizes.ranks > args.world:
            continue
        by_axis, calls = pool.run(sizes.ranks, count, sizes, replicas, dtype)[0]
        counted = sum(number for kinds in by_axis.values() for number, _ in kinds.values())
        assert counted == calls, f"the Meter has {counted} collectives, gloo {calls}"
        needed = formula(sizes, replicas, dtype)
        for axis, kinds in sorted(by_axis.items()):
            for kind, (number, size) in sorted(kinds.items()):
                parts = [needed[name][kind] for name in axis.split() if kind in needed.get(name, {})]
                expected_calls, expected = sum(part[0] for part in parts), sum(part[1] for part in parts)
                ratio = size / expected if expected else float("inf")
                missed += [(str(sizes), axis, kind)] if ratio > TARGET else []
                name = sizes.column + f" ({replicas})" * (replicas > 1)
                sizes_in_mib = f"{size / 2**20:.4f} ({expected / 2**20:.4f})"
                print(f"| {name} | {axis} {kind} | {number} ({expected_calls}) | {sizes_in_mib} | {ratio:.4f} |")
    print(f"more than {TARGET} times the formula: {missed or 'nothing'}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
