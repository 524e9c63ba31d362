"""Sweeps all causal-LM families of Transformers: is a small model of each the same in every mesh, or refused by name?

    python tests/benchmarks/families.py                    # all of them; under an hour on 2 cores
    python tests/benchmarks/families.py --family mixtral   # one or more of them, printed, the table is left alone

Each family trains 3 SGD steps in one plain process with the model's own attention and loss, which is the truth, and in
the meshes of MESHES. Losses and gradient norms of all steps and every full gradient of the first step are
compared. What was swept is kept in a file, so that a sweep that was stopped goes on; tests/families.md is the table.
"""

import argparse
import contextlib
import functools
import json
import logging
import math
import re
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests, for its helpers

import reference
import torch
import transformers
from conftest import ALL, CP, DP, ROOT, TP, Mesh, Pool, RecordingSGD, load_script, make_batches, relative
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


TABLE = ROOT / "tests" / "families.md"
MESHES = [TP, DP, CP, ALL]
LEARNING_RATE = 0.01
TOLERANCE, STEPS, SEQ_LEN, BATCH, VOCABULARY = 1e-5, 3, 32, 4, 101  # 101 is a prime: no tp divides it
EQUAL, ROUNDED, REFUSED, DIFFERENT, CRASHED = "equal", "equal but for rounding", "refused", "different", "crashed"

# a small, asymmetric model: whichever of these names a config has. The window ends within a shard
SIZES = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "embed_dim"], 64),
    **dict.fromkeys(["intermediate_size", "n_inner", "d_ff", "ffn_dim", "decoder_ffn_dim", "dff"], 96),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], 128),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **{"vocab_size": VOCABULARY, "pad_token_id": 60, "bos_token_id": 1, "eos_token_id": 2},
    **{"num_key_value_heads": 2, "head_dim": 16, "d_kv": 16, "sliding_window": 12, "attention_chunk_size": 12},
    **{"moe_intermediate_size": 48, "shared_expert_intermediate_size": 40, "num_experts_per_tok": 2, "moe_k": 2},
    **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
    **{"output_router_logits": True, "router_aux_loss_coef": 0.1, "use_sliding_window": True, "max_window_layers": 1},
    **{
        "is_decoder": True,
        "image_size": 28,
        "patch_size": 14,
        "hidden_dropout_prob": 0.0,
        "position_bias_num_buckets": 16,
    },
    **{"rotary_dim": 8, "chunk_size": 8, "mamba_chunk_size": 8, "mamba_d_state": 16},
}
PER_LAYER = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
ROPE_BY_KIND = {"full_attention": ROPE, "sliding_attention": ROPE}
# what a family needs besides, because its own values would not fit together
SPECIAL = {
    "cpmant": {"dim_model": 64, "dim_ff": 96, "dim_head": 16, "position_bias_max_distance": 64, "init_std": 0.02},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "longcat_flash": {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 48, "zero_expert_num": 2, "moe_topk": 2},
    "kimi_linear": {"num_experts_per_token": 2},
    "reformer": {"axial_pos_embds": False},
    **dict.fromkeys(["flint", "deepseek_v4"], {"output_router_logits": False}),
    "bailing_hybrid": {"num_experts": 8, "n_group": 2},
    # the bias of their output head is split by tp
    **dict.fromkeys(["codegen", "ernie4_5", "ernie4_5_moe", "gptj", "phi", "phimoe"], {"vocab_size": 102}),
    "cohere_compass_text": {"rope_parameters": ROPE_BY_KIND},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 12},
    "diffllama": {"head_dim": 4},  # as many as heads: its vectors of that size are no numbers of heads
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "zaya": {"num_experts_per_tok": 1},
}


def shrink(config_class, depth=0, **special):
    """A small config of this class; its parts (the text, the vision of a family that reads both) are shrunk, too."""
    default = config_class()
    known = default.to_dict()
    sizes = {
        name: value for name, value in SIZES.items() if name in known and not isinstance(known[name], (list, dict))
    }
    if "qk_rope_head_dim" in known:  # the keys of latent attention (MLA) are not grouped
        sizes |= {name: value for name, value in (("num_key_value_heads", 4), ("head_dim", 8)) if name in known}
    for name, value in vars(default).items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            sizes[name] = 0.0  # ranks would draw other numbers than one process
        elif isinstance(value, transformers.PreTrainedConfig) and name.endswith("_config") and depth < 2:
            sizes[name] = shrink(type(value), depth + 1).to_dict()
    kinds = known.get("layer_types")
    if isinstance(kinds, list) and len(set(kinds)) > 1 and "layer_types" not in special:
        # a layer of each kind
        with contextlib.suppress(Exception):
            kinds = list(dict.fromkeys(kinds))
            return config_class(**(sizes | {"layer_types": kinds, "num_hidden_layers": len(kinds)} | special))
    return config_class(**(sizes | special))


def make_config(family):
    config = shrink(type(AutoConfig.for_model(family)), **SPECIAL.get(family, {}))
    config.use_cache = False
    return config


def make_model(config):
    """A float32 model with its own attention, in training mode, none of whose parameters is all zeros or ones."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


HEADER = """# Families

Made by `python tests/benchmarks/families.py` with torch {torch} and transformers {transformers}, on CPU. A small
model of each family trains 3 SGD steps in one plain process and in four meshes. *Equal*: losses, gradient norms and
every full gradient agree to 1e-5. *Equal but for rounding*: they do not, but one process with the rows of its batches
in another order, and eager attention, is as far from itself. *Refused* is followed by what the script says, *not
built* by what stood in the way of a small model that trains in one process. A window, a chunk or groups of heads that
a family has are in effect, and so is the auxiliary loss of its routers; dropout and the noise of routers are off.
With dp = 1 there are two micro-batches.

"""
RULE = "|---|---|---|---|---|"


class Refused(Exception):
    """What the script says instead of ending the process."""


def refuse(sentence):
    raise Refused(sentence)


def train_on_mesh(family, sizes, change=None):
    """Runs on each rank: losses, norms, and the full gradients of the first step by name; or why it was refused."""
    script, cpu = load_script(), torch.device("cpu")
    script.fail = refuse
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    if change is not None:
        change(script)
    source = make_model(make_config(family))
    try:
        mesh = script.build_mesh("cpu", **sizes._asdict())
        model = script.build_model(make_config(family), mesh, "cpu", torch.float32, seq_len=SEQ_LEN)
        script.materialize(model, cpu)
        script.send_weights(model, lambda: source, family, None)
        optimizer = RecordingSGD(model.parameters(), lr=LEARNING_RATE)
        losses, norms = [], []
        for step, (inputs, labels) in enumerate(make_batches(STEPS, VOCABULARY, BATCH, SEQ_LEN)):
            micro_batches = script.shard_batch(inputs, labels, mesh, 2, cpu)  # so with dp = 1 there are two
            loss, norm, _ = script.train_step(model, optimizer, micro_batches, mesh, 1e9).tolist()
            if not math.isfinite(loss + norm):
                return [loss], [norm], {}
            if step == 0:
                script.check_first_step(model, mesh)
            losses.append(loss)
            norms.append(norm)
    except Refused as refusal:
        return str(refusal)
    named = zip([name for name, _ in model.named_parameters()], optimizer.first_grads)
    grads = {name: grad.full_tensor() for name, grad in named if grad is not None}
    return losses, norms, grads if torch.distributed.get_rank() == 0 else None


@functools.cache
def one_process(family):
    torch.set_num_threads(2)
    batches = make_batches(STEPS, VOCABULARY, BATCH, SEQ_LEN)
    return reference.train(make_model(make_config(family)), batches, learning_rate=LEARNING_RATE, max_grad_norm=1e9)


def largest_error(run, truth):
    """Of losses, gradient norms and gradients that a run and the truth have: the relative error and the name."""
    (losses, norms, grads), (true_losses, true_norms, true_grads) = run, truth
    errors = {"loss": relative(losses, true_losses), "gradient norm": relative(norms, true_norms)}
    largest = max(grad.abs().max().item() for grad in true_grads.values())
    for name in grads.keys() | true_grads.keys():
        grad, true = (side.get(name, torch.zeros(())).double() for side in (grads, true_grads))
        # some gradients are zero but for rounding, such as those of the biases of keys
        errors[f"gradient of {name}"] = (grad - true).abs().max().item() / max(true.abs().max().item(), 1e-2 * largest)
    return max((error if math.isfinite(error) else math.inf, name) for name, error in errors.items())


def compare(by_rank, truth):
    """The verdict on what the ranks of a mesh have returned, and its reason."""
    if isinstance(by_rank[0], str):
        return REFUSED, by_rank[0]
    if any(result[:2] != by_rank[0][:2] for result in by_rank):
        return DIFFERENT, "ranks have other losses than rank 0"
    error, name = largest_error(by_rank[0], truth)
    return EQUAL if error < TOLERANCE else DIFFERENT, f"{name} is off by {error:.1e}"


def rounding(family, truth):
    """How far off one process is from itself with the rows of its batches in another order, and eager attention."""
    model = make_model(make_config(family))
    with contextlib.suppress(Exception):  # some families have but one attention
        model.set_attn_implementation("eager")
    batches = [(inputs.flip(0), labels.flip(0)) for inputs, labels in make_batches(STEPS, VOCABULARY, BATCH, SEQ_LEN)]
    return largest_error(reference.train(model, batches, learning_rate=LEARNING_RATE, max_grad_norm=1e9), truth)[0]


def sweep(family, pool, meshes=MESHES, change=None, is_verbose=False):
    """The verdict for each mesh, by its name; and under "family" why there is none, if a small model cannot be made."""
    try:
        truth = one_process(family)
        if not all(map(math.isfinite, truth[0] + truth[1])):
            raise ValueError("one process computes no finite loss")
    except Exception as error:
        return {"family": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    verdicts = {}
    for sizes in meshes:
        try:
            by_rank = pool.run(sizes.ranks, train_on_mesh, family, sizes, change, timeout=300)
            verdicts[str(sizes)] = compare(by_rank, truth)
            if verdicts[str(sizes)][0] == DIFFERENT and not isinstance(by_rank[0], str):
                error, limit = largest_error(by_rank[0], truth)[0], rounding(family, truth)
                if error < min(3 * limit, 1e-3):
                    verdicts[str(sizes)] = ROUNDED, f"off by {error:.0e}, one process from itself by {limit:.0e}"
        except (AssertionError, TimeoutError) as error:
            if is_verbose:
                print(error)
            verdicts[str(sizes)] = CRASHED, str(error).strip().splitlines()[-1][:300]
    return verdicts


def write_table(done, versions):
    """tests/families.md: what became of each family in each mesh."""
    counts = {mesh: [] for mesh in map(str, MESHES)}
    lines = []
    for name, entry in sorted(done.items()):
        verdicts = entry["verdicts"]
        if "family" in verdicts:
            lines.append(f"| {name} | not built: {tidy(verdicts['family'])} | | | |")
            continue
        for mesh in counts:
            counts[mesh].append(verdicts[mesh][0])
        cells = [kind if kind == EQUAL else f"{kind}: {tidy(reason)}" for kind, reason in map(verdicts.get, counts)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    kinds = (EQUAL, ROUNDED, REFUSED, DIFFERENT, CRASHED)
    summary = [f"| {kind} | {' | '.join(str(column.count(kind)) for column in counts.values())} |" for kind in kinds]
    title = "| | " + " | ".join(f"tp {mesh.tp}, dp {mesh.dp}, cp {mesh.cp}" for mesh in MESHES) + " |"
    TABLE.write_text(HEADER.format(**versions) + "\n".join([title, RULE, *summary, "", title, RULE, *lines]) + "\n")


def tidy(reason):
    return re.sub(r"[\s|]+", " ", reason).strip()[:160]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="*", help="only these, as config.json calls them (model_type)")
    parser.add_argument("--mesh", type=json.loads, nargs="*", help="only these: [dp,cp,tp], such as [1,1,2] for tp 2")
    results = Path(tempfile.gettempdir()) / "families.jsonl"
    parser.add_argument("--results", type=Path, default=results, help="what a sweep that was stopped goes on from")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    pool, results = Pool(), args.results
    versions = {package: version(package) for package in ("torch", "transformers")}
    meshes, done = [Mesh(*mesh) for mesh in args.mesh or MESHES], {}
    if not args.family and results.exists():
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        done = {line["name"]: line for line in lines if line["versions"] == versions}
    for family in args.family or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if family in done:
            continue
        started = time.perf_counter()
        verdicts = sweep(family, pool, meshes, is_verbose=bool(args.family))
        one_process.cache_clear()
        entry = {"name": family, "versions": versions, "verdicts": verdicts}
        for mesh, verdict in verdicts.items():
            print(f"{family:20} {mesh:11} {verdict if mesh == 'family' else ': '.join(verdict)}", flush=True)
        print(f"{family:20} {time.perf_counter() - started:.1f} s", flush=True)
        if not args.family:
            done[family] = entry
            with results.open("a") as file:
                print(json.dumps(entry), file=file)
    if not args.family:
        write_table(done, versions)


if __name__ == "__main__":
    main()
