"""Every mesh computes what one plain process computes: losses, gradient norms, and each full gradient, to 1e-5."""

import functools
from typing import NamedTuple

import pytest
import reference
import torch
import transformers
from conftest import (
    ALL,
    CP,
    DP,
    MESHES,
    ONE,
    TP,
    Mesh,
    RecordingSGD,
    assert_close,
    load_script,
    make_batches,
    make_config,
    make_model,
    make_optimizer,
    relative,
    shard_model,
)
from torch._dynamo.utils import counters


LEARNING_RATE, TOLERANCE = 0.05, 1e-5


class Case(NamedTuple):
    family: str
    vocab: int  # 509 is a prime: no tp divides it
    tied: bool
    kv_heads: int
    steps: int
    micro_batch: int  # sequences of a rank in one forward, at most
    layers: int = 2
    seq_len: int = 32


UNTIED = Case("llama", 509, False, 4, steps=10, micro_batch=8, layers=1)  # 10 steps on 8 ranks are slow with more
TIED = Case("qwen3", 512, True, 8, steps=2, micro_batch=4)
LONG = Case("llama", 509, False, 4, steps=2, micro_batch=4, layers=1, seq_len=600)  # the loss is in uneven chunks


def case_config(case):
    sizes = {"num_key_value_heads": case.kv_heads, "num_hidden_layers": case.layers}
    sizes["max_position_embeddings"] = case.seq_len
    return make_config(case.family, case.vocab, case.tied, **sizes)


@functools.cache
def one_process(case):
    """What a plain process computes, and the clipping norm: a value between, so that some steps are clipped only."""
    batches = make_batches(case.steps, case.vocab, seq_len=case.seq_len)
    norms = reference.train(make_model(case_config(case)), batches, learning_rate=LEARNING_RATE, max_grad_norm=1e9)[1]
    max_norm = sum(sorted(norms)[:2]) / 2
    truth = reference.train(make_model(case_config(case)), batches, learning_rate=LEARNING_RATE, max_grad_norm=max_norm)
    return max_norm, truth


def train_on_mesh(sizes, cases_and_norms, options=None):
    """Runs on each rank. For each case: losses, norms, and on rank 0 the full gradients of the first step by name."""
    script, results = load_script(), []
    for case, max_norm in cases_and_norms:
        model, mesh = shard_model(make_model(case_config(case)), sizes, seq_len=case.seq_len, **(options or {}))
        optimizer = RecordingSGD(model.parameters(), lr=LEARNING_RATE)
        losses, norms = [], []
        for inputs, labels in make_batches(case.steps, case.vocab, seq_len=case.seq_len):
            micro_batch = min(case.micro_batch, inputs.shape[0] // sizes.dp)
            micro_batches = script.shard_batch(inputs, labels, mesh, micro_batch, torch.device("cpu"))
            loss, norm, _ = script.train_step(model, optimizer, micro_batches, mesh, max_norm).tolist()
            losses.append(loss)
            norms.append(norm)
        script.check_first_step(model, mesh)  # as each run does: it ends those whose layers went another way
        if (options or {}).get("compile"):  # each layer is one graph
            assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"], f"{sizes}: {counters}"
        names = [name for name, _ in model.named_parameters()]
        grads = {name: grad.full_tensor() for name, grad in zip(names, optimizer.first_grads)}
        results.append((losses, norms, grads if torch.distributed.get_rank() == 0 else None))
    return results


def compare(by_rank, case, sizes):
    where = f"{case.family} in {sizes}"
    losses, norms, grads = one_process(case)[1]
    mesh_losses, mesh_norms, mesh_grads = by_rank[0]
    for rank, result in enumerate(by_rank):
        assert result[:2] == by_rank[0][:2], f"{where}: rank {rank} has other numbers than rank 0"
    assert_close(mesh_losses, losses, TOLERANCE, f"{where}: losses")
    assert_close(mesh_norms, norms, TOLERANCE, f"{where}: gradient norms")
    assert mesh_grads.keys() == grads.keys(), f"{where}: only on one side: {mesh_grads.keys() ^ grads.keys()}"
    for name, grad in grads.items():
        assert_close(mesh_grads[name], grad, TOLERANCE, f"{where}: the gradient of {name}")


def run_and_compare(pool, sizes, cases, options=None):
    cases = [case for case in cases if case.kv_heads % sizes.tp == 0]
    cases_and_norms = [(case, one_process(case)[0]) for case in cases]
    by_rank = pool.run(sizes.ranks, train_on_mesh, sizes, cases_and_norms, options)
    for i, case in enumerate(cases):
        compare([results[i] for results in by_rank], case, sizes)
    return len(cases)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_mesh(pool, sizes):
    assert run_and_compare(pool, sizes, [UNTIED, TIED]) >= 1, f"no case has heads that {sizes} can split"


OPTIONS = [
    (ALL, {"activation_checkpointing": "full"}),
    (ALL, {"activation_checkpointing": "selective", "dp_replicate": 2}),
    (Mesh(dp=4, tp=2), {"dp_replicate": 2}),
    (CP, {"compile": True}),
    (TP, {"compile": True, "activation_checkpointing": "selective"}),
]


@pytest.mark.parametrize("sizes, options", OPTIONS, ids=str)
def test_every_option(pool, sizes, options):
    run_and_compare(pool, sizes, [UNTIED, TIED], options)


@pytest.mark.parametrize("sizes", [ONE, TP, Mesh(dp=2, cp=2)], ids=str)
def test_the_loss_in_chunks(pool, sizes):
    """Of 16 chunks, or of 4, where a rank has fewer tokens."""
    run_and_compare(pool, sizes, [LONG])


def test_clipping_clips_some_steps():
    for case in [UNTIED, TIED]:
        max_norm, (_, norms, _) = one_process(case)
        assert min(norms) < max_norm < max(norms), f"{case}: clipping to {max_norm} clips all of {norms}, or none"


def test_norm_of_large_gradients_is_exact(script):
    """torch's own norm in float32 on CPU is off by 1e-5 for a million elements, and by 1e-3 for 28 million."""
    layer = torch.nn.Linear(2000, 2000)
    for parameter in layer.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = torch.sqrt(sum(parameter.grad.double().square().sum() for parameter in layer.parameters()))
    norm = script.reduce_loss_and_norm(torch.zeros(()), layer, None)[1]
    assert relative(norm, exact) < 1e-12, f"the norm is {norm}, exactly {exact}"
    total_norm = torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()])
    assert relative(total_norm, exact) > 1e-6, f"torch's own norm is {total_norm}, exactly {exact}: no need of another"


def test_learning_rate_is_that_of_transformers_and_a_function_of_the_step(script):
    for peak, steps, warmup in [(1e-2, 10, 3), (3e-3, 20, 3), (1e-3, 5, 0), (1e-3, 4, 6)]:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, warmup, max(steps, warmup + 1))
        for step in range(steps):
            rate = script.learning_rate_of_step(step, peak, warmup, steps)
            assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-15), (peak, steps, step)
            optimizer.step()
            schedule.step()


def train_in_bfloat16(sizes):
    """Losses, the dtypes of a layer's weight and output while it runs, and those of the state. None: no mesh."""
    script = load_script()
    model, mesh = shard_model(make_model(case_config(UNTIED)), sizes, dtype=torch.bfloat16)
    optimizer = make_optimizer(model, 1e-2)
    losses = []
    for inputs, labels in make_batches(4, UNTIED.vocab):
        micro_batches = script.shard_batch(inputs, labels, mesh, 8 // (sizes or ONE).dp, torch.device("cpu"))
        losses.append(script.train_step(model, optimizer, micro_batches, mesh, 1.0)[0].item())
    tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
    seen, dtypes = [], {tensor.dtype for tensor in tensors}
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, args, output: seen.append((module.weight.dtype, output.dtype)))
    script.forward_loss(model, micro_batches[0])
    return losses, seen, dtypes


def test_bfloat16_computes_in_it_and_keeps_float32_state(pool):
    batches = make_batches(4, UNTIED.vocab)
    options = {"learning_rate": 1e-2, "max_grad_norm": 1.0, "weight_decay": 0.1, "optimizer": "adamw"}
    expected = reference.train(make_model(case_config(UNTIED)), batches, **options)[0]
    by_mesh = {sizes: pool.run(sizes.ranks, train_in_bfloat16, sizes)[0] for sizes in [DP, Mesh(cp=2, tp=2)]}
    by_mesh[None] = train_in_bfloat16(None)  # one process, where autocast casts the weights for each operator
    for sizes, (losses, seen, dtypes) in by_mesh.items():
        assert_close(losses, expected, 5e-3, f"{sizes}: losses in bfloat16 and in float32")
        assert relative(losses, expected) > 1e-7, f"{sizes}: that was no bfloat16: {losses}, float32: {expected}"
        weight = torch.float32 if sizes is None else torch.bfloat16
        assert seen == [(weight, torch.bfloat16)] and dtypes == {torch.float32}, (sizes, seen, dtypes)
