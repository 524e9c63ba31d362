"""What families do that Llama does not, in every mesh: a part of the sweep, what masks let through, and the guard.

All families are swept by benchmarks/families.py; here are some that stand for the others, and proofs that it can fail.
"""

import functools
import itertools

import families
import pytest
import torch
import torch.nn.functional as F
from conftest import ALL, CP, DP, ONE, TP, Mesh, assert_close, load_script, relative
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from transformers import AttentionInterface, AutoConfig, Phi3Config
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function
from transformers.models.gemma2 import modeling_gemma2


CPU, S, VOCABULARY = torch.device("cpu"), families.SEQ_LEN, families.VOCABULARY
END = families.SIZES["eos_token_id"]  # ends a document


def named(value):
    return getattr(value, "__name__", str(value)).replace(" ", "-")


def make_config(family, **changes):
    return families.shrink(type(AutoConfig.for_model(family)), **changes)


def build(config, sizes, has_documents=False):
    """Runs on each rank: a model on the mesh; in one process there is none, as without torchrun."""
    script, source = load_script(), families.make_model(config)
    script.fail = families.refuse
    mesh = script.build_mesh("cpu", **sizes._asdict()) if sizes != ONE else None
    model = script.build_model(config, mesh, "cpu", torch.float32, seq_len=S, has_documents=has_documents)
    script.materialize(model, CPU)
    script.send_weights(model, lambda: source, "the test", None)
    return model, mesh


def train_families(names, sizes, change):
    """Runs on each rank: what the sweep does, for several families in one process group."""
    results = []
    for family in names:
        try:
            result = families.train_on_mesh(family, sizes, None if results else change)
        except Exception as error:
            raise RuntimeError(f"{family} in {sizes}") from error
        if not isinstance(result, str) and result[2]:  # layers that are wrapped have other names
            result = *result[:2], {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in result[2].items()}
        results.append(result)
    return results


def check_sweep(pool, names, sizes, expected, change=None, truth=families.one_process):
    by_rank = pool.run(sizes.ranks, train_families, names, sizes, change)
    for i, family in enumerate(names):
        verdict, reason = families.compare([results[i] for results in by_rank], truth(family))
        assert verdict in expected.split(" or "), f"{family} in {sizes} is {verdict}: {reason}"
        assert verdict != "refused" or family in reason, f"refused in {sizes}: {reason}"


def cut_packed_matrices(script):
    # gate and up lie in it one after the other, so that each rank gets one of them, whole; all shapes fit
    Phi3Config.base_model_tp_plan |= {"layers.*.mlp.gate_up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}


def take_partial_gradients_as_whole(script):
    def forget(self, *, grad_placements=None):
        places = grad_placements and [whole.get(place, place) for place in grad_placements]
        return to_local(self, grad_placements=places)

    to_local, whole, DTensor.to_local = DTensor.to_local, {Partial(): Replicate()}, forget


def forget_sum_over_tp(script):
    script.sum_over_tp = lambda parameters, tp_mesh: None


def cut_unbalanced(script):
    script.shard_sequence = lambda full, cp_rank, cp_size, dim=1: full.chunk(cp_size, dim)[cp_rank]


def forget_windows(script):
    build_mask = script.build_mask
    script.build_mask = lambda can_see, *args: build_mask(script.causal_mask_function, *args)


def checkpoint_activations(script):
    send_weights = script.send_weights

    def load_and_wrap(model, *args):
        send_weights(model, *args)
        layers = {*script.find_decoder_layers(model)}
        for name, layer in [(name, module) for name, module in model.named_modules() if module in layers]:
            model.set_submodule(name, checkpoint_wrapper(layer))

    script.send_weights = load_and_wrap


SWEPT = [
    ("equal", ALL, "gemma2 mixtral gpt_oss deepseek_v3 llama4_text stablelm gpt_neox", None),
    ("equal", ALL, "llama qwen2 qwen3 mistral phi3 olmo2", None),  # what most people train
    ("equal", DP, "gpt2 opt bloom falcon mamba", None),
    # phi3, whose plan is broken below; packed matrices, a norm over all heads, a table of positions, no norm weights
    ("equal", TP, "phi3 persimmon bitnet opt nanochat diffllama", None),
    ("equal or refused", TP, "gpt2 bloom mamba", None),
    ("equal or refused", CP, "gpt2 bloom mamba", None),
    ("equal", TP, "gemma2 mixtral", checkpoint_activations),
    ("equal", CP, "gemma2 mixtral", checkpoint_activations),
    ("different", TP, "phi3", cut_packed_matrices),  # from here on what is broken is seen
    ("different", TP, "stablelm", take_partial_gradients_as_whole),
    ("different", TP, "qwen3", forget_sum_over_tp),
    ("different", CP, "gemma2", take_partial_gradients_as_whole),
    ("different", CP, "gemma2", cut_unbalanced),
    ("different", CP, "gemma2", forget_windows),
]


@pytest.mark.parametrize("expected, sizes, names, change", SWEPT, ids=named)
def test_the_sweep(pool, expected, sizes, names, change):
    check_sweep(pool, names.split(), sizes, expected, change)


ENDS = 5, 6, 20  # the second document is its end alone, the third covers parts of several shards
CHANGED = 0, 3, 8, 12, 15, 19, 24, 31  # the positions that get another token
ONE_LAYER, CHUNKED = {"num_hidden_layers": 1}, {"layer_types": ["chunked_attention"], "attention_chunk_size": 11}
MASKS = [  # a family, its config, and what a token can see
    ("llama", ONE_LAYER, {}),
    ("llama", ONE_LAYER, {"ends": ENDS}),
    ("mistral", ONE_LAYER | {"sliding_window": 3}, {"window": 3}),  # smaller than any shard
    ("mistral", ONE_LAYER | {"sliding_window": 11}, {"window": 11}),
    ("mistral", ONE_LAYER | {"sliding_window": 11}, {"window": 11, "ends": ENDS}),
    ("gemma2", ONE_LAYER | {"sliding_window": 5, "layer_types": ["sliding_attention"]}, {"window": 5}),
    ("gemma2", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}, {}),
    ("llama4_text", ONE_LAYER | CHUNKED, {"chunk": 11}),
    ("llama4_text", ONE_LAYER | CHUNKED, {"chunk": 11, "ends": ENDS}),
]


def by_hand(position, window=S, chunk=S, ends=()):
    """The positions whose logits depend on the token at this one; windows and chunks count from a document's begin."""
    begin = max([end + 1 for end in ends if end < position], default=0)
    end = min([end for end in ends if end >= position], default=S - 1)
    chunk_end = begin + (position - begin) // chunk * chunk + chunk - 1
    return [*range(position, min(end, position + window - 1, chunk_end) + 1)]


def find_changed_logits(sizes):
    """Runs on each rank. For each mask: the places of this rank's shard in the sequence, and where logits changed."""
    script, results = load_script(), []
    for family, changes, limits in MASKS:
        ends = limits.get("ends", ())
        model, mesh = build(make_config(family, **changes), sizes, has_documents=bool(ends))
        ids = torch.randint(END + 1, VOCABULARY - 1, (S,), generator=torch.Generator().manual_seed(3))
        ids[[*ends]] = END
        rows = ids.repeat(1 + len(CHANGED), 1)  # the first row is left as it is
        rows[range(1, len(rows)), CHANGED] += 1
        inputs = rows, torch.arange(S).expand_as(rows), mesh, len(rows), CPU
        places = script.shard_batch(*inputs)[0]["labels"][0]
        (batch,) = script.shard_batch(*inputs, document_end=END if ends else None)
        if model.attention_function is not None:
            model.attention_function.positions = batch.get("document_positions")
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        with torch.no_grad():
            mask = torch.ones_like(batch["input_ids"])
            logits = model.eval()(**inputs, attention_mask=mask, use_cache=False).logits
        far = (logits[1:] - logits[:1]).abs().amax(dim=-1) / logits.abs().max()
        results.append((places, far))
    return results


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_token_is_seen_from_where_the_mask_says(pool, cp):
    by_rank = pool.run(cp, find_changed_logits, Mesh(cp=cp))
    for i, mask in enumerate(MASKS):
        places, far = (torch.cat([results[i][part] for results in by_rank], dim=-1) for part in (0, 1))
        assert sorted(places.tolist()) == [*range(S)], f"cp {cp}, {mask}: the ranks hold {places.tolist()}"
        for position, row in zip(CHANGED, far[:, places.argsort()]):
            seen, expected = (row > 1e-5).nonzero().flatten().tolist(), by_hand(position, **mask[2])
            values = [f"{position}: {row[position]:.0e}" for position in {*seen} ^ {*expected}]
            assert seen == expected, f"cp {cp}, {mask}: a token at {position} changed {seen}, not {expected}; {values}"


# rows with ends of documents inside of shards, at their borders, and at either end of a row
ROWS = torch.randint(END + 1, VOCABULARY, (4, S + 1), generator=torch.Generator().manual_seed(4))
ROWS[[0, 0, 0, 1, 3, 3, 3, 3], [5, 6, 20, 15, 0, 9, 23, 31]] = END


def train_on_documents(script):
    families.STEPS, families.make_batches = 1, lambda *sizes: [(ROWS[:, :-1], ROWS[:, 1:])]
    script.build_model = functools.partial(script.build_model, has_documents=True)
    script.shard_batch = functools.partial(script.shard_batch, document_end=END)


@functools.cache
def documents_alone(family):
    """The truth: each document goes alone through a plain model, and its end has no label."""
    model, losses = families.make_model(families.make_config(family)), []
    for row in ROWS:
        borders = sorted({0, S, *((row[:-1] == END).nonzero().flatten() + 1).tolist()})
        for begin, end in zip(borders, borders[1:]):
            labels = torch.where(row[begin:end] == END, -100, row[begin + 1 : end + 1])
            logits = model(row[None, begin:end], use_cache=False).logits[0]
            losses.append(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
    loss = sum(losses) / (ROWS[:, :-1] != END).sum()
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return [loss.item()], [torch.stack([grad.double().norm() for grad in grads.values()]).norm().item()], grads


@pytest.mark.parametrize("sizes", [ONE, Mesh(dp=2, cp=2), Mesh(cp=2, tp=2), Mesh(cp=4)], ids=str)
def test_documents_in_a_row_are_as_each_alone(pool, sizes):
    names = ["llama", "mistral", "gemma2", "llama4_text"]  # windows and chunks are of 12 tokens
    names += ["gpt2"] if sizes.tp == 1 else []  # whose positions are learned; tp cannot split it
    check_sweep(pool, names, sizes, "equal", train_on_documents, documents_alone)


def test_layers_that_would_mix_documents_are_refused(pool):
    names = ["mamba", "jamba", "qwen3_next"]  # layers of theirs carry a state on, and no mask stops it
    check_sweep(pool, names, ONE, "equal or refused", train_on_documents, documents_alone)


def test_attention_that_has_a_mask_of_its_own_is_not_taken_for_causal(script):
    attention, states = script.context_parallel_attention(None, S), torch.zeros((1, 2, S, 4))
    causal, cross = nn.Module(), nn.Module()
    cross.is_causal = False
    for module, mask in [(causal, None), (causal, torch.zeros(S, S)), (cross, (script.causal_mask_function, None))]:
        with pytest.raises(ValueError, match="not causal, or has a mask of its own"):
            attention(module, states, states, states, mask)


def test_flex_attention_sees_what_eager_attention_sees(script, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, *args, **kwargs: function)  # there may be no compiler
    generator, flex = torch.Generator().manual_seed(5), AttentionInterface()["flex_attention"]
    module = modeling_gemma2.Gemma2Attention(make_config("gemma2"), 0).eval()
    query, key, value = (torch.randn((2, n, S, 16), generator=generator) for n in (4, 2, 2))
    documents = torch.stack([torch.arange(S), torch.cat([torch.arange(n) for n in (9, 1, S - 10)])])
    masks = [script.causal_mask_function, sliding_window_causal_mask_function(5)]
    masks.append(chunked_causal_mask_function(11, torch.zeros(2, dtype=torch.int64)))
    ranges = [(0, 0, S), (4, 8, 16), (12, 24, 32)]  # first key, first query, last: a whole row, and two chunks of one
    for can_see, positions, (first, begin, end) in itertools.product(masks, [None, documents], ranges):
        tensors, outputs = (query[:, :, begin:end], key[:, :, first:end], value[:, :, first:end]), []
        for forward, dtype in ((flex, None), (modeling_gemma2.eager_attention_forward, torch.float32)):
            mask = script.build_mask(can_see, positions, range(begin, end), range(first, end), CPU, dtype)
            outputs.append(forward(module, *tensors, mask, scaling=0.5, softcap=1.5)[0])
        error, where = (
            relative(*outputs),
            f"mask {masks.index(can_see)}, positions {positions}, queries {begin} to {end}",
        )
        assert error < 1e-5, f"{where}: FlexAttention is off by {error:.1e}"


TOKENS = torch.randint(0, VOCABULARY, (6 * S + 1,), generator=torch.Generator().manual_seed(6))


def evaluate_on_mesh(names, sizes):
    """Runs on each rank: the evaluation loss of each family over six sequences in batches of four."""
    script, losses = load_script(), []
    for model, mesh in (build(make_config(family), sizes) for family in names):
        shard = functools.partial(script.shard_batch, mesh=mesh, micro_batch_size=2, device=CPU)
        losses.append(script.evaluate(model, TOKENS.numpy(), range(6), S, 4, shard, mesh))
    return losses


@pytest.mark.parametrize("sizes", [TP, DP, CP], ids=str)
def test_evaluation_is_the_same_in_every_mesh(pool, sizes):
    names = ["qwen3", "mixtral"]
    for family, *losses in zip(names, *pool.run(2, evaluate_on_mesh, names, sizes)):
        with torch.no_grad():
            logits = families.make_model(make_config(family)).eval()(TOKENS[:-1].view(6, S), use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), TOKENS[1:]).item()
        assert_close(losses, [loss] * 2, 1e-6, f"{family} in {sizes}: losses of the evaluation on both ranks")


def check_first_steps(sizes):
    """Runs on each rank: the check after the first step passes a good model, and refuses three that are broken."""
    script, inputs = load_script(), torch.ones((4, S), dtype=torch.int64)
    model, mesh = build(make_config("llama"), sizes)
    layer, optimizer = model.model.layers[1], torch.optim.SGD(model.parameters())
    script.train_step(model, optimizer, script.shard_batch(inputs, inputs, mesh, 4, CPU), mesh, 1.0)
    script.check_first_step(model, mesh)
    full = layer.input_layernorm.weight.full_tensor().detach()
    for weight in (full, distribute_tensor(full, mesh["cp"], [Replicate()])):
        whole, layer.input_layernorm.weight = layer.input_layernorm.weight, nn.Parameter(weight)
        with pytest.raises(families.Refused, match="model.layers.1.input_layernorm.weight of llama is not cut"):
            script.check_first_step(model, mesh)
        layer.input_layernorm.weight = whole
    if sizes == CP:  # under tp alone each layer sees the whole sequence
        for module in model.modules():
            vars(module).pop("has_called", None)
        layer.self_attn.forward = lambda hidden_states, **kwargs: (hidden_states, None)
        script.train_step(model, optimizer, script.shard_batch(inputs, inputs, mesh, 4, CPU), mesh, 1.0)
        with pytest.raises(families.Refused, match="1 of 2 layers of llama ran"):
            script.check_first_step(model, mesh)


@pytest.mark.parametrize("sizes", [TP, CP], ids=str)
def test_the_first_step_is_checked(pool, sizes):
    pool.run(2, check_first_steps, sizes)


def bypass_context_parallel_attention():
    """As a model would that does not ask Transformers for its attention function."""
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    register = transformers.AttentionInterface.register
    transformers.AttentionInterface.register = lambda key, function: register(key, sdpa_attention_forward)


def test_a_layer_that_sees_only_its_shard_is_refused(pool, tmp_path):
    flags = ["--seq_len", 32, "--num_train_steps", 3, "--cp_size", 2, "--output_dir", tmp_path]
    launch = pool.launch(2, *flags, before=bypass_context_parallel_attention)
    assert launch.codes == [2, 2], launch.outputs
    assert "llama has attention with a mask of its own" in launch.outputs[0] and "cp_size 2" in launch.outputs[0]


# what the table says of families in the meshes of the sweep: tp, dp, cp, all three
KNOWN = {"good": 4 * "equal ", "bad": "different equal refused equal", "worse": 3 * "equal " + "different"}
BOTH = Mesh(cp=2, tp=2)
LOOK_UPS = {  # a sentence, and where it is said; one process is the truth itself, a part of a name is another family
    "": [("good", ALL), ("good", Mesh(tp=4)), ("bad", ONE), ("bad", Mesh(dp=4)), ("worse", BOTH), ("odd", ONE)],
    "python tests/benchmarks/families.py --family {}\n": [("goo", TP), ("odd", DP), ("bad", CP)],
    "off by 3.0e-01": [("bad", TP), ("bad", Mesh(dp=2, tp=2)), ("bad", BOTH), ("bad", ALL), ("worse", ALL)],
}


def test_families_are_looked_up_in_the_table(script, monkeypatch, tmp_path, capsys):
    def check(family, sizes, expected):
        try:
            said = script.check_family(family, sizes._asdict()) or capsys.readouterr().out
        except families.Refused as refusal:
            said = f"refused, {refusal}"
        assert expected.format(family) in said and bool(expected) == bool(said), (family, sizes, said, expected)

    monkeypatch.setattr(script, "fail", families.refuse)
    monkeypatch.setattr(script, "__file__", str(tmp_path / "3D_parallel.py"))
    check("good", TP, "--family good\n")  # without a table nothing is known
    monkeypatch.setattr(families, "TABLE", tmp_path / "tests" / "families.md")
    families.TABLE.parent.mkdir()
    done = {"odd": {"verdicts": {"family": "ValueError: no | small model"}}}
    for name, kinds in KNOWN.items():
        pairs = [(kind, "the loss | is off by 3.0e-01" if kind == "different" else "no") for kind in kinds.split()]
        done[name] = {"verdicts": dict(zip(map(str, families.MESHES), pairs))}
    families.write_table(done, {"torch": "1", "transformers": "2"})
    for expected, (family, sizes) in ((expected, case) for expected, cases in LOOK_UPS.items() for case in cases):
        check(family, sizes, expected)


def test_a_layer_that_cannot_run_twice_is_refused(script, monkeypatch):
    monkeypatch.setattr(script, "fail", families.refuse)
    options = {"seq_len": S, "activation_checkpointing": "full"}
    with pytest.raises(families.Refused, match="xlm cannot run twice"):
        script.build_model(make_config("xlm"), None, "cpu", torch.float32, **options)
