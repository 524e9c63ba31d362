"""Train a Hugging Face causal language model on a TP x DP x CP device mesh, in one script.

    ./launch.sh                                  # the embedded default: a tiny model on the source text of Python
    TP_SIZE=2 DP_SIZE=2 CP_SIZE=2 ./launch.sh    # the same on 8 processes
    torchrun --standalone --nproc_per_node 8 3D_parallel.py --tp_size 2 --cp_size 2 --model_name FOLDER_OR_HUB_ID
    python 3D_parallel.py                        # one process, no process group
    python 3D_parallel.py --dry_run --world_size 64 --tp_size 8 --model_name FOLDER    # what a rank would need

Read it from top to bottom, which is nearly the order in which a run goes through it; main has the exact one.
    1 configuration   2 start   3 model   4 plans   5 attention   6 data   7 loss   8 checkpoint   9 training   10 main

Three axes share the ranks. "tp" splits every large matrix and, between the blocks, the sequence; "cp" splits the
sequence; "dp" splits the batch. Parameters, gradients and optimizer state are sharded over dp x cp as well (FSDP), so
that each of N ranks holds 1/N of the matrices. In float32 every mesh computes the run that one process computes, up to
rounding, and to other dropout masks.

In shapes B is the number of sequences, S that of tokens in one, L = S/cp that of those that a rank has, H the hidden
size, D the size of a head, V the vocabulary. A layer is one of the decoder, a block a child of it (attention, MLP,
experts), a family a `model_type`. DCP is torch.distributed.checkpoint; HSDP is FSDP within groups of ranks that each
hold a copy of the model.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import time
import urllib.parse
import urllib.request
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NoReturn, TextIO


# before the other imports, which fail in their own words with versions that are too old
for package, lowest, below in (("torch", (2, 11), (2, 16)), ("transformers", (5, 17), (6, 0))):
    if not lowest <= tuple(int(part) for part in re.findall(r"\d+", version(package))[:2]) < below:
        needed = "{}.{} or later, below {}.{}".format(*lowest, *below)
        raise SystemExit(f"3D_parallel.py: error: {package} {version(package)} will not do, it takes {needed}")

from transformers import HfArgumentParser  # the rest is imported after the arguments: it takes seconds


# ---- 1 configuration -------------------------------------------------------------------------------------------------


def flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class ModelFlags:
    _argument_group_name = "model"  # what HfArgumentParser prints over these flags
    model_name: str = flag("tiny", "'tiny', a hub id, or a folder with config.json and weights")
    from_scratch: bool = flag(False, "random weights from the model's config instead of its trained ones")
    init_from: str | None = flag(None, "start from these weights: a checkpoint of any mesh, or a Transformers folder")
    dtype: Literal["float32", "bfloat16"] = flag("float32", "compute in this; parameters and optimizer stay float32")


@dataclass
class DataFlags:
    _argument_group_name = "data"
    dataset_name: str = flag("stdlib", "'stdlib', a hub id, a .txt, .jsonl, .parquet or .csv file, or a folder of them")
    dataset_config: str | None = flag(None, "which of the hub dataset's configurations")
    dataset_split: str = flag("train", "which split of a hub dataset or a folder")
    text_column: str = flag("text", "the column that holds the text")
    seq_len: int = flag(256, "tokens in a sequence; a multiple of 2 * cp, and of cp * tp")
    document_mask: bool = flag(False, "attention stays within each document, and positions begin anew in it")


@dataclass
class MeshFlags:
    _argument_group_name = "mesh, memory and speed"
    tp_size: int | None = flag(None, "tensor-parallel ranks; $TP_SIZE sets the default")
    dp_size: int | None = flag(None, "data-parallel ranks; $DP_SIZE sets the default; None: all that tp and cp leave")
    cp_size: int | None = flag(None, "context-parallel ranks; $CP_SIZE sets the default")
    dp_replicate_size: int = flag(1, "copies of the model; each is sharded over dp / this many ranks, and cp (HSDP)")
    activation_checkpointing: Literal["none", "selective", "full"] = flag(
        "none", "which activations to compute again in the backward"
    )
    compile: bool = flag(False, "compile each decoder layer")
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto: CUDA where there is a GPU")
    timeout: int = flag(600, "seconds that a collective waits for a rank before the run ends")
    dry_run: bool = flag(False, "only print what a rank of this mesh would need; takes one process, and no GPU")
    world_size: int = flag(1, "with --dry_run: the number of ranks to plan for")
    device_memory: float = flag(80.0, "with --dry_run: the GiB of a GPU")


@dataclass
class TrainingFlags:
    _argument_group_name = "training"
    global_batch_size: int | None = flag(
        None, "sequences in a step, over all ranks; None: the first multiple of dp from 8 on"
    )
    micro_batch_size: int | None = flag(None, "sequences in one forward of one rank; None: all of its share")
    num_train_steps: int = flag(300, "steps of the whole run, resumed parts included")
    learning_rate: float | None = flag(
        None, "peak learning rate (the flag counts, also on resume); None: 4e-3 for tiny, else 5e-5"
    )
    weight_decay: float = flag(0.1, "AdamW weight decay, on matrices only (the flag counts, also on resume)")
    warmup_steps: int = flag(20, "steps of linear warm-up; a cosine to zero follows")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this global norm")
    seed: int = flag(0, "seed of the initial weights, of the order of the data and of dropout")
    eval_every: int = flag(
        0, "evaluate every so many steps, on data that is always held out (1 %%, at most 256 sequences)"
    )


@dataclass
class CheckpointFlags:
    _argument_group_name = "checkpoints"
    output_dir: str = flag("output", "checkpoints and metrics.jsonl go here; one directory that all machines see")
    save_every: int = flag(0, "save a checkpoint every so many steps; 0: only at the end")
    keep_last: int = flag(2, "how many checkpoints of this run to keep")
    resume: str = flag(
        "never", "'never', 'auto' (the newest good checkpoint in output_dir), or a path; a restart is 'auto'"
    )
    async_save: bool = flag(False, "write checkpoints while training goes on; needs host memory for one more shard")
    export_dir: str | None = flag(None, "turn the checkpoint that --resume names into a Transformers folder, and end")
    export_dtype: Literal["float32", "bfloat16", "float16"] = flag("float32", "the dtype of that folder's weights")
    verify_checksums: bool = flag(True, "on resume, compare checksums, and not only sizes")


@dataclass
class LogFlags:
    _argument_group_name = "logs"
    plot: str | None = flag(None, "only draw the metrics of this output directory, or of several: DIR1,DIR2")
    profile: bool = flag(False, "write a trace, and on CUDA a memory snapshot, of steps 3 to 5 to output_dir/profile")
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = flag("auto", "auto: online where there is a key")
    wandb_all_ranks: bool = flag(False, "a wandb run for each rank, in one group, for its system metrics")
    wandb_artifact: bool = flag(False, "upload the last checkpoint to wandb as an artifact")


@dataclass
class Config(ModelFlags, DataFlags, MeshFlags, TrainingFlags, CheckpointFlags, LogFlags):
    """Every flag of the script; each default works."""


def fail(sentence: str) -> NoReturn:
    """End this process with exit code 2 and one sentence. All ranks must call it, or the others wait for this one."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print(f"3D_parallel.py: error: {sentence}", file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # torchrun stops all ranks when the first one exits: that must be the one that prints
    raise SystemExit(2)


def read_flags(argv: list[str]) -> list[str]:
    """The arguments, with the flags that a JSON file holds in its place, if one comes first; later ones win."""
    if argv and argv[0].endswith(".json") and not argv[0].startswith("-"):  # not --dataset_name=text.json
        try:
            flags = json.loads(Path(argv[0]).read_text())
            return [f"--{name}={value}" for name, value in flags.items() if value is not None] + argv[1:]
        except (OSError, ValueError, AttributeError) as error:
            fail(f"{argv[0]} is no JSON file of flags: {error}")
    return argv


def parse_arguments(argv: list[str]) -> Config:
    """Read the flags, fill in what depends on the number of ranks, and refuse what cannot work.

    A JSON file of flags can stand before them; each run leaves one, flags.json, in its output_dir.
    """
    usage = {
        "usage": "3D_parallel.py [FILE.json] [flags]",
        "description": __doc__.split("\n")[0],
        "allow_abbrev": False,
    }
    parser = HfArgumentParser(Config.__mro__[1:-1], **usage)
    parser.error, env = fail, os.environ.get
    parser.set_defaults(tp_size=env("TP_SIZE") or 1, dp_size=env("DP_SIZE") or None, cp_size=env("CP_SIZE") or 1)
    args = Config(**vars(parser.parse_args(read_flags(argv))))
    if args.learning_rate is None:
        args.learning_rate = 4e-3 if args.model_name == "tiny" else 5e-5
    check_values(args)
    world_size = int(env("WORLD_SIZE", 1)) if "RANK" in os.environ else 1  # some clusters set it without a launcher
    if args.dry_run and world_size > 1:
        fail(f"--dry_run takes one process, but there are {world_size}; --world_size is for the ranks to plan for")
    if args.plot is not None and world_size > 1:
        fail(f"--plot takes one process, but there are {world_size}; plain python would work")
    if args.export_dir is not None:
        check_export(args, world_size)
    elif args.plot is None:
        fit_to_ranks(args, args.world_size if args.dry_run else world_size)
    return args


def check_values(args: Config) -> None:
    """Refuse flags that no number of ranks could make work."""
    positive = "tp_size dp_size cp_size dp_replicate_size world_size seq_len global_batch_size micro_batch_size".split()
    positive += ["num_train_steps", "keep_last", "timeout"]
    for name, value in vars(args).items():
        lowest = 1 if name in positive else 0
        if isinstance(value, int | float) and not lowest <= value < 2**63:
            fail(f"--{name} {value} must be at least {lowest}, and below 2**63")
    if args.max_grad_norm == 0:
        fail("--max_grad_norm 0 would erase every gradient; a large value such as 1e9 turns clipping off")
    if args.init_from is not None and args.from_scratch:
        fail(f"--init_from {args.init_from} and --from_scratch exclude each other; give one of them")
    tools = [name for name in ("plot", "export_dir", "dry_run") if getattr(args, name) not in (None, False)]
    if len(tools) > 1:
        fail(f"--{' and --'.join(tools)} exclude each other; give one of them")
    if args.world_size > 1 and not args.dry_run:
        fail(f"--world_size {args.world_size} is for --dry_run; a launcher such as torchrun sets the number of ranks")


def check_export(args: Config, world_size: int) -> None:
    """Refuse an export that has no checkpoint, or no place."""
    folder = Path(args.export_dir)
    if world_size > 1 or args.resume == "never":
        fail("--export_dir takes one process and a checkpoint: plain python with --resume PATH or auto")
    is_taken = folder.is_symlink() or folder.is_mount()  # a rename cannot put a folder in the place of these
    if is_taken or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        fail(f"--export_dir {folder} exists already; give a new directory")


def list_divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def fit_to_ranks(args: Config, world_size: int) -> None:
    """Fill in the sizes of mesh and batch that were left out, and refuse those that do not go together."""
    tp, cp = args.tp_size, args.cp_size
    dp = args.dp_size = args.dp_size or max(1, world_size // (tp * cp))
    if (needed := tp * dp * cp) != world_size:
        there = "is 1" if world_size == 1 else f"are {world_size}"
        works = f"--world_size {needed} would work" if args.dry_run else f"launch with --nproc_per_node {needed}"
        fail(f"tp_size {tp} x dp_size {dp} x cp_size {cp} needs {needed} processes, but there {there}; {works}")
    if dp % args.dp_replicate_size:
        fail(
            f"--dp_replicate_size {args.dp_replicate_size} does not divide dp_size {dp}; {list_divisors(dp)} would work"
        )
    batch = args.global_batch_size = args.global_batch_size or math.ceil(8 / dp) * dp
    if batch % dp:
        fail(f"--global_batch_size {batch} does not divide by dp_size {dp}; {math.ceil(batch / dp) * dp} would work")
    share = batch // dp
    micro = args.micro_batch_size = args.micro_batch_size or share
    if share % micro:
        fail(f"--micro_batch_size {micro} does not divide a rank's {share} sequences; use {list_divisors(share)}")
    # under cp a rank holds two chunks of the sequence, and tp cuts these tokens again
    unit = math.lcm(2 * cp if cp > 1 else 1, cp * tp)
    if rest := args.seq_len % unit:
        works = " or ".join(str(n) for n in (args.seq_len - rest, args.seq_len - rest + unit) if n)
        fail(f"--seq_len {args.seq_len} does not divide by {unit} (cp_size {cp}, tp_size {tp}); {works} would work")


if __name__ == "__main__":  # the help, and flags that cannot work, end here
    parse_arguments(sys.argv[1:])
    if os.environ.get("RANK", "0") == "0":
        print("loading torch and transformers", flush=True)  # for some seconds nothing else is to be seen

import filelock  # comes with torch
import huggingface_hub
import numpy as np
import tokenizers  # comes with transformers
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors.torch import save_file  # comes with transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # private, but named in torch's documentation
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function


# ---- 2 start ---------------------------------------------------------------------------------------------------------


def start_process_group(device: str, timeout_s: int) -> torch.device:
    """This rank's device. When torchrun started it, it joins the process group: gloo, with NCCL for what is on GPUs."""
    on_gpu, chosen = device != "cpu" and torch.cuda.is_available(), torch.device("cpu")
    if device == "cuda" and not on_gpu:
        fail("--device cuda, but this machine has no GPU that torch can use; --device cpu would work")
    if on_gpu:
        if (ranks := int(os.environ.get("LOCAL_WORLD_SIZE", 1))) > (gpus := torch.cuda.device_count()):
            fail(f"{ranks} ranks on a machine with {gpus} GPUs: start one rank a GPU, or add --device cpu")
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(chosen)
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        timeout = timedelta(seconds=timeout_s)
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun keeps this store over a restart, and with it the addresses of dead ranks
            store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        backend, device_id = ("cpu:gloo,cuda:nccl", chosen) if on_gpu else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id)
    return chosen


def build_mesh(
    device_type: str, *, dp: int, cp: int, tp: int, dp_replicate: int = 1, timeout_s: int = 600
) -> DeviceMesh:
    """The dp x cp x tp device mesh. tp is innermost: its traffic is the most frequent, and takes the fastest links.

    "fsdp" joins the axes that shard the parameters: dp x cp, or with `dp_replicate` (HSDP) dp_shard x cp, where dp is
    dp_replicate x dp_shard: whole copies of the model, and the ranks that share one.
    """
    dp_axes = {"dp": dp} if dp_replicate == 1 else {"dp_replicate": dp_replicate, "dp_shard": dp // dp_replicate}
    axes = {**dp_axes, "cp": cp, "tp": tp}
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    # private, because there is no public way to join two axes; a 2-D mesh would make fully_shard replicate over dp
    if dp_replicate > 1:
        mesh["dp_replicate", "dp_shard"]._flatten("dp")
    mesh[[*dp_axes][-1], "cp"]._flatten("fsdp")
    warnings.filterwarnings("ignore", "Slicing a flattened dim")  # as mesh["fsdp"] does
    # private: the groups of a mesh have torch's own timeouts, 10 to 30 minutes, and there is no public way to set one
    for group in (*mesh.get_all_groups(), mesh["dp"].get_group(), mesh["fsdp"].get_group()):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
    return mesh


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def log(text: str) -> None:
    """Print on rank 0 only."""
    if get_rank() == 0:
        print(text, flush=True)


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """The value of every rank, in the order of ranks, on every rank. A collective."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def host_group(timeout_s: float) -> ProcessGroup | None:
    """A gloo group of all ranks with a timeout of its own; None for one process. A collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if dist.is_initialized() else None


@contextlib.contextmanager
def on_all_ranks(what_fails: str, group: ProcessGroup | None = None) -> Iterator[None]:
    """End all ranks with one sentence if the block raises on any of them. A collective where the block ends, so it is
    also a barrier."""
    problem = None
    try:
        yield
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        problem = f"{what_fails}: {reason_of(error)}"
    if problems := [p for p in gather_objects(problem, group) if p]:
        fail(problems[0])


def reason_of(error: BaseException, limit: int = 200) -> str:
    """The reason, in one line. It may lie deeper: in what all ranks have raised (DCP), or in the cause (datasets)."""
    failures = getattr(error, "failures", None)
    error = next(iter(failures.values()))[0] if failures else error.__cause__ or error
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "unexpected pos" in text:
        text = "no space left on the device"  # this is how a full disk shows up in torch
    return text if len(text) <= limit else text[:limit] + "..."


def open_output_dir(output_dir: Path) -> filelock.BaseFileLock:
    """Create, lock and try the directory before anything expensive starts. Keep the lock it returns. A collective."""
    lock, probe = filelock.FileLock(output_dir / ".lock"), output_dir / f".probe_{gather_objects(uuid.uuid4().hex)[0]}"
    failed = f"--output_dir {output_dir} cannot be used, give another directory"
    with on_all_ranks(failed):
        if get_rank() == 0:
            output_dir.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=False)
            except filelock.Timeout:
                raise OSError("another run is writing to it") from None
            except NotImplementedError:
                log(f"{output_dir} is on a file system without locks: let no other run write there")
            probe.write_text("all machines must see this file")
    if not all(gather_objects(os.path.exists(probe))):
        fail(f"{failed}: it is not the same directory on all machines")
    probe.unlink(missing_ok=True)
    return lock


def go_offline_without_hub(timeout_s: float = 5.0) -> None:
    """Where the hub cannot be reached, take what is cached at once; else each file is asked for again for a minute."""
    hub = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    if urllib.request.getproxies() or huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    try:
        socket.create_connection((hub.hostname, hub.port or (443 if hub.scheme == "https" else 80)), timeout_s).close()
    except OSError:
        if os.environ.get("RANK", "0") == "0":
            print(f"{hub.hostname} cannot be reached: of models and datasets there is what is cached", flush=True)
        os.environ["HF_HUB_OFFLINE"] = "1"  # for datasets, which is not yet imported
        huggingface_hub.constants.HF_HUB_OFFLINE = True


def flush(path: Path) -> None:
    """Make a file's content, or a directory's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- 3 model ---------------------------------------------------------------------------------------------------------


def tiny_config() -> transformers.LlamaConfig:
    """A Llama of 0.6 million parameters that learns to spell Python in a minute on two cores."""
    # 256 bytes and the end of a document, rounded up to a multiple of 64
    tokens = {"vocab_size": 320, "bos_token_id": None, "eos_token_id": 256, "tie_word_embeddings": True}
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "max_position_embeddings": 8192}
    return transformers.LlamaConfig(**tokens, **sizes, num_attention_heads=8, num_key_value_heads=4)


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer whose tokens are the 256 bytes, and one that ends a document."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def load_config(model_name: str) -> PreTrainedConfig:
    """The model's config, from the script itself, a folder, or the hub. A collective."""
    if model_name == "tiny":
        return tiny_config()
    works = "give 'tiny', a model's folder, or a hub id that can be reached"
    with on_all_ranks(f"the config of --model_name {model_name} cannot be read, {works}"):
        config = transformers.AutoConfig.from_pretrained(model_name)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        fail(f"--model_name {model_name} is a {config.model_type}, which Transformers does not list as a causal LM")
    return config


def load_tokenizer(model_name: str, config: PreTrainedConfig, has_documents: bool) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Refuses one that has more tokens than the config. A collective."""
    if model_name == "tiny":
        return byte_tokenizer()
    with on_all_ranks(f"the tokenizer of --model_name {model_name} cannot be read"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_name)
    vocab_size, tokens = config.get_text_config().vocab_size, max(tokenizer.get_vocab().values()) + 1
    if tokens > vocab_size:
        fail(f"the tokenizer of {model_name} has {tokens} tokens, more than its vocab_size {vocab_size}")
    if has_documents and tokenizer.eos_token_id in (None, *tokenizer("a")["input_ids"][:1]):
        fail(f"--document_mask needs a token that only ends documents, and that of {model_name} has none")
    return tokenizer


def check_family(family: str, sizes: dict[str, int]) -> None:
    """Refuse a family that tests/families.md has as "different" for one of these axes, warn if not all say "equal".

    A row of it: | llama | equal | equal | equal | equal |, for tp, dp, cp, and all of them. A collective.
    """
    table, verdicts = Path(__file__).with_name("tests") / "families.md", []
    if get_rank() == 0 and table.exists():
        columns = [{"tp": 2, "dp": 3, "cp": 4}[axis] for axis, size in sizes.items() if size > 1]
        columns += [5] if len(columns) == 3 else []  # all of them together
        rows = [re.split(r" *\| *", line) for line in table.read_text().splitlines() if f"| {family} |" in line]
        verdicts = [row[column] for row in rows for column in columns]
    verdicts = gather_objects(verdicts)[0]
    if different := [verdict for verdict in verdicts if verdict.startswith("different")]:
        fail(f"{family} is known to compute another run in this mesh ({different[0]}); see tests/families.md")
    is_known = len(verdicts) > 0 and all(verdict.startswith("equal") for verdict in verdicts)
    if max(sizes.values()) > 1 and not is_known:
        command = f"python tests/benchmarks/families.py --family {family}"
        log(f"{family} is not known to compute the same run in this mesh; to see if it does: {command}")


def find_weights(
    model_name: str, config: PreTrainedConfig, *, init_from: str | None, from_scratch: bool, with_checksums: bool
) -> tuple[str, str]:
    """Where a new run's weights come from, and what they are: "random", "checkpoint" or "trained". A collective."""
    source = init_from or model_name
    if from_scratch or (source == "tiny" and not init_from):
        return source, "random"
    is_checkpoint = (Path(source) / ".metadata").is_file()
    if is_checkpoint and (Path(source) / MANIFEST).is_file():
        find_checkpoint(source, Path(source).parent, 0, with_checksums)  # refuses it if it is damaged
    if init_from and ((Path(source) / "config.json").is_file() or not is_checkpoint):
        with on_all_ranks(f"--init_from {source} is no checkpoint, and no folder or hub id of such a model"):
            other = transformers.AutoConfig.from_pretrained(source)
            for key in ("model_type", "num_hidden_layers", "tie_word_embeddings"):  # would load without an error
                if (there := getattr(other, key, None)) != (here := getattr(config, key, None)):
                    raise ValueError(f"its {key} is {there}, that of --model_name {model_name} {here}")
    return source, "checkpoint" if is_checkpoint else "trained"


def materialize(model: PreTrainedModel, device: torch.device) -> None:
    """Move a cut model from meta to the device: storage for its parameters, and the values of buffers that no file
    holds, such as rotary frequencies."""
    model.to_empty(device=device)  # only this rank's shards
    model.tie_weights()  # to_empty gave each name of a tied parameter a tensor of its own
    named = [(module, *item) for module in model.modules() for item in module.named_parameters(recurse=False)]
    # meanwhile tensors without data hide the parameters: some families initialize in ways that a DTensor refuses
    for module, name, parameter in named:
        module.__dict__[name] = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        # transformers' own mark: what bears it is not initialized again
        module.__dict__[name]._is_hf_initialized = parameter._is_hf_initialized = True
    model.initialize_weights()  # so this fills the buffers only
    for module, name, _ in named:
        del module.__dict__[name]


def find_folder(source: str, group: ProcessGroup | None) -> Path:
    """The local folder of a model's weights; from the hub, the first rank of a machine downloads it. A collective."""
    options = {"allow_patterns": ["model*.safetensors*"], "local_files_only": int(os.environ.get("LOCAL_RANK", 0)) > 0}
    with on_all_ranks(f"the weights of {source} cannot be downloaded", group):
        if not Path(source).is_dir() and not options["local_files_only"]:
            snapshot_download(source, **options)
    return Path(source) if Path(source).is_dir() else Path(snapshot_download(source, **options))


def read_safetensors(model: PreTrainedModel, folder: Path) -> bool:
    """Read what each rank holds straight from a folder's safetensors. A collective.

    False, and nothing is read, if names, shapes or dtypes are not the model's: then Transformers has to convert them.
    """
    failed, tied, saved = f"the weights of {folder} cannot be loaded", tied_names(model), {}
    state = {name: tensor for name, tensor in get_model_state_dict(model).items() if name not in tied}
    with on_all_ranks(failed):
        expected = {"model.safetensors"}
        if (index := folder / "model.safetensors.index.json").is_file():
            expected = {*json.loads(index.read_text())["weight_map"].values()}
        # not also other copies of the weights, of which the reader would take both
        if {path.name for path in folder.glob("*.safetensors")} == expected:
            reader = dcp.HuggingFaceStorageReader(str(folder))
            saved = reader.read_metadata().state_dict_metadata
    fits = {name: tensor.shape for name, tensor in state.items()} == {name: t.size for name, t in saved.items()}
    plain = {torch.float32, torch.bfloat16, torch.float16}
    if not all(gather_objects(fits and plain.issuperset(t.properties.dtype for t in saved.values()))):
        return False
    with on_all_ranks(failed):
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    return True


def draw_full_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """The whole model on the CPU in float32, with random weights as Transformers draws them."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)


def read_full_model(source: str, config: PreTrainedConfig) -> PreTrainedModel:
    """The whole trained model on the CPU in float32. Raises ValueError if the weights lack some of it."""
    options = {"config": copy.deepcopy(config), "dtype": torch.float32, "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(source, **options)
    if missing := info["missing_keys"]:
        raise ValueError(f"they lack {len(missing)} tensors, {min(missing)} among them")
    return model.train()


@torch.no_grad()
def send_weights(model: nn.Module, read_weights: Callable, source: str, group: ProcessGroup | None) -> None:
    """What works for all: rank 0 has the whole model on the CPU, and sends one tensor at a time. A collective."""
    persistent, full_tensors = model.state_dict().keys(), {}
    targets = dict(model.named_parameters()) | {k: buffer for k, buffer in model.named_buffers() if k in persistent}
    with on_all_ranks(f"the weights of {source} cannot be loaded", group):
        if get_rank() == 0:
            full_tensors = read_weights().state_dict()
            if lacking := sorted(targets.keys() - full_tensors.keys()):
                raise ValueError(f"they lack {lacking[0]}")
            for alias, name in tied_names(model).items():
                if alias in full_tensors and not torch.equal(full_tensors[alias], full_tensors[name]):
                    raise ValueError(
                        f"{alias} differs from {name}, but the config ties them: tie_word_embeddings false"
                    )
    for name, target in targets.items():
        place = {"dtype": target.dtype, "device": target.device}
        full = torch.empty(target.shape, **place)
        if get_rank() == 0:
            full = full_tensors.pop(name).to(**place).contiguous()
        if dist.is_initialized():
            dist.broadcast(full, src=0)
        if isinstance(target, DTensor):
            # src_data_rank=None: each rank cuts its own shard, nothing more is sent
            full = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
        target.copy_(full)


# ---- 4 plans: tensor parallel, then FSDP -----------------------------------------------------------------------------
# what moves between ranks              forward                   backward
# tp, into a block and the head         all-gather of tokens      reduce-scatter
# tp, out of a block and the embedding  reduce-scatter            all-gather
# cp, keys and values of a layer        all-gather of tokens      reduce-scatter
# FSDP, a layer                         all-gather of parameters  all-gather, and reduce-scatter of gradients


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, which may be a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def redistribute(tensor: Tensor, mesh: DeviceMesh, here: Placement, there: Placement) -> Tensor:
    """Bring a rank's tensor from one placement to another, as in the table above, and its gradient back.

    The gradient of what is replicated is taken to be partial: each rank has that of its own part of the work.
    """
    placed = DTensor.from_local(tensor, mesh, [here], run_check=False).redistribute(placements=[there])
    return placed.to_local(grad_placements=[Partial() if there.is_replicate() else there])


def cut_parameters(module: nn.Module, parts: dict[str, nn.Module], styles: dict[str, str], tp_mesh: DeviceMesh) -> None:
    """Cut the parameters of a module's parts over tp; while it runs, they find plain tensors under these names.

    What is not cut is the same on all ranks, but each computes only a part of its gradient, that of its columns or its
    tokens: `sum_over_tp` adds them up, once a step.
    """
    tp, kinds, places = tp_mesh.size(), {*styles.values()}, []
    for part, owner in parts.items():
        style = styles.get(part, "")
        # what such a block itself owns is one number for each head, cut as the heads are; see `plan_block`
        is_column = "col" in style or (owner is module and "colwise" in kinds and "experts" not in kinds)
        for name, parameter in list(owner.named_parameters(recurse=False)):
            is_stacked = style == "experts" and parameter.shape[0] == owner.num_experts
            is_row = "row" in style and name == "weight"
            placement = Shard(0) if is_column or is_stacked else Shard(1) if is_row else Replicate()
            cut = distribute_tensor(parameter, tp_mesh, [placement], src_data_rank=None)
            owner.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
            # the gradient of what is not cut is still a part; called partial, FSDP would sum each one over tp by itself
            places.append((owner, name, placement, tp if "row" in style and name == "bias" else 1))

    def find_plain(module: nn.Module, args: tuple) -> None:
        for owner, name, placement, share in places:
            plain = getattr(owner, name).to_local(grad_placements=[placement])
            # each rank of a sum adds its share of the bias; in __dict__, where it hides the parameter of that name
            owner.__dict__[name] = plain if share == 1 else plain / share

    def find_parameters(module: nn.Module, args: tuple, output: Any) -> None:
        for owner, name, _, _ in places:
            owner.__dict__.pop(name, None)

    module.register_forward_pre_hook(find_plain)
    module.register_forward_hook(find_parameters, always_call=True)


def rows_of_rank(vocab_size: int, tp_size: int) -> int:
    """How many tokens of the vocabulary a tp rank has, as DTensor cuts it; the last one has what is left."""
    return -(-vocab_size // tp_size)


def split_embedding(embedding: nn.Embedding, tp_mesh: DeviceMesh) -> None:
    """Split the vocabulary over tp. Takes all tokens, (B, L), and returns this rank's, (B, L/tp, H)."""
    # not RowwiseParallel, whose backward has a gradient of the whole vocabulary on each rank
    rows = rows_of_rank(embedding.num_embeddings, tp_mesh.size())
    first, padding, own_forward = rows * tp_mesh.get_local_rank(), embedding.padding_idx, embedding.forward

    def forward(ids: Tensor) -> Tensor:
        is_own = (ids >= first) & (ids < first + rows)
        hidden = own_forward((ids - first).where(is_own, 0)).masked_fill(~is_own[..., None], 0)
        if padding is not None:  # whose row has no gradient
            hidden = hidden.detach().where((ids == padding)[..., None], hidden)
        return redistribute(hidden, tp_mesh, Partial(), Shard(1))

    cut_parameters(embedding, {"": embedding}, {"": "colwise"}, tp_mesh)
    embedding.padding_idx, embedding.forward = None, forward


def split_head(head: nn.Linear, tp_mesh: DeviceMesh) -> None:
    """Split the output head over the vocabulary. Takes (B, L/tp, H), returns (B, L, V/tp), which is never gathered."""
    cut_parameters(head, {"": head}, {"": "colwise"}, tp_mesh)
    head.register_forward_pre_hook(lambda module, args: redistribute(args[0], tp_mesh, Shard(1), Replicate()))


def split_experts(experts: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Leave each rank a part of the experts; a token that takes none of these gets zeros from it."""
    experts.num_experts //= tp_mesh.size()
    experts._is_expert_parallel = True  # private: what tells Transformers that there are such tokens
    count, first = experts.num_experts, experts.num_experts * tp_mesh.get_local_rank()

    def localize(value: Any) -> Any:  # this rank's experts from 0 on, and for all others the number after the last
        if not isinstance(value, Tensor) or value.is_floating_point():
            return value
        return torch.where((value >= first) & (value < first + count), value - first, count)

    experts.register_forward_pre_hook(lambda module, *inputs: tree_map(localize, inputs), with_kwargs=True)


def split_block(block: nn.Module, styles: dict[str, str], tp_mesh: DeviceMesh) -> None:
    """Split a block over tp. It takes and returns (B, L/tp, H), and works on (B, L, H) in between."""
    tp, tp_rank, has_experts = tp_mesh.size(), tp_mesh.get_local_rank(), "experts" in styles.values()
    for name in ("num_heads", "num_key_value_heads"):  # some families cut their projections by these
        if "colwise" in styles.values() and not has_experts and isinstance(getattr(block, name, None), int):
            setattr(block, name, getattr(block, name) // tp)

    def gather(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        own = args[0] if args else kwargs["hidden_states"]  # some families pass it by position, some by keyword
        whole = redistribute(own, tp_mesh, Shard(1), Replicate())
        return ((whole, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": whole})

    def scatter(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        batch_and_sequence = (args[0] if args else kwargs["hidden_states"]).shape[:2]
        whole = hidden.view(*batch_and_sequence, -1)  # some families return (B * S, H)
        # of a block without styles each rank has computed all
        own = redistribute(whole, tp_mesh, Partial(), Shard(1)) if styles else whole.chunk(tp, 1)[tp_rank]
        own = own.contiguous().flatten(0, 3 - hidden.ndim)  # to as many dimensions as before
        return (own, *output[1:]) if isinstance(output, tuple) else own

    cut_parameters(block, dict(block.named_modules()), styles, tp_mesh)
    block.register_forward_pre_hook(gather, with_kwargs=True)
    for name, style in styles.items():
        module = block.get_submodule(name)
        if style == "colwise_gather_output":
            # a copy, because some families go on to clamp it in place
            whole = functools.partial(redistribute, mesh=tp_mesh, here=Shard(-1), there=Replicate())
            module.register_forward_hook(lambda module, args, out, whole=whole: whole(out).clone())
        elif style == "rowwise_split_input":
            module.register_forward_pre_hook(lambda module, args: args[0].chunk(tp, -1)[tp_rank])
        elif style == "experts":
            split_experts(module, tp_mesh)
    terms = [name for name, style in styles.items() if "col" not in style]
    # a single term is summed at once, so that what follows it, dropout say, is on own tokens
    summed = block.get_submodule(terms[0]) if len(terms) == 1 and not has_experts else block
    summed.register_forward_hook(scatter, with_kwargs=True)


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The part of a model that holds the decoder layers; the model itself, if none of its parts does."""
    # get_decoder gives the output head of modernbert-decoder, and all of llama4
    candidates = (model.get_decoder(), model.base_model, *model.children())
    holders = (part for part in candidates if any(isinstance(module, nn.ModuleList) for module in part.modules()))
    return next((part for part in holders if part is not model), model)


def find_decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, found by structure: what the outermost module lists of the decoder hold, if it has parts."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in find_decoder(model).named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = module
    return [layer for layers in lists.values() for layer in layers if any(True for _ in layer.children())]


# how tp splits the linear modules of a block that the model's own `tp_plan` leaves out, by what families call them
STYLES_BY_NAME = {
    "colwise": "q_proj k_proj v_proj q_b_proj kv_b_proj gate_proj up_proj fc1 fc_in w1 w3 dense_h_to_4h",
    "rowwise": "o_proj out_proj dense down_proj fc2 fc_out w2 dense_4h_to_h",
    "colwise_gather_output": "query_key_value qkv_proj gate_up_proj",  # several matrices in one, in an unknown order
}
GATHERED = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}  # between them each rank has it all


def is_experts(module: nn.Module) -> bool:
    """Whether it holds all experts of a layer, stacked, and is told which of them each token takes."""
    stacked = [p for p in module.parameters(False) if p.shape[0] == getattr(module, "num_experts", None)]
    return any(p.ndim == 3 for p in stacked) and len(inspect.signature(module.forward).parameters) == 3


def plan_block(block: nn.Module, own_plan: dict[nn.Module, str], hidden_size: int, num_heads: int) -> dict[str, str]:
    """How tp splits the modules of a block, by name; empty where every rank has to run the whole block.

    Each rank computes some outputs of a "colwise" module. "rowwise" modules take these in, and give a term of the
    block's output, as "experts" do; the terms of all ranks are summed: Megatron-LM, arXiv 1909.08053, section 3. So
    whatever adds to the output has to be split, or it counts tp times, and what lies before it sees a rank's columns
    alone. Where the modules do not tell that this will do, the block is run whole.
    """
    leaves = {name: module for name, module in block.named_modules() if list(module.parameters(False))}
    has_plan, has_experts = any(leaf in own_plan for leaf in leaves.values()), any(map(is_experts, leaves.values()))
    styles: dict[str, str] = {}
    for name, leaf in leaves.items():
        if is_experts(leaf):
            styles[name] = "experts"
        elif leaf in own_plan:
            styles[name] = own_plan[leaf]
        elif not has_plan and isinstance(leaf, nn.Linear) and ("shared" in name or not has_experts):  # no router: zaya
            last = name.rpartition(".")[2]
            styles.update((name, style) for style, names in STYLES_BY_NAME.items() if last in names.split())
    widths = {leaves[name].out_features for name, style in styles.items() if "col" in style}
    terms = [name for name, style in styles.items() if "col" not in style]
    has_lists = any(isinstance(module, nn.ModuleList) for module in block.modules())  # a norm for each head: stablelm
    if has_lists or not (has_experts or (widths and terms)):  # the latter is half of a block: bert
        return {}

    is_gathered = any(style in GATHERED.values() for style in styles.values())
    if not has_plan and len(styles) == 2 and widths != {leaves[name].in_features for name in terms}:
        is_gathered = True  # its first half has two matrices in one: moshi
    for name in leaves.keys() - styles.keys():
        leaf, shapes = leaves[name], {tuple(parameter.shape) for parameter in leaves[name].parameters(False)}
        if isinstance(leaf, nn.Linear):  # a term, or a gate of heads: bailing_hybrid
            # but the first half of latent attention (deepseek_v3) and a router (qwen2_moe) do the same on all ranks
            is_unknown = "_a_proj" not in name and not (has_experts and leaf.out_features != hidden_size)
        else:  # the block's own: diffllama; but sinks, one number for each head, are cut as the heads are: gpt_oss
            are_sinks = shapes == {(num_heads,)} and all(
                "sink" in part for part, _ in leaf.named_parameters(recurse=False)
            )
            is_unknown = leaf is block and not has_experts and not are_sinks
        is_last = (hidden_size,) in shapes and (has_experts or len(terms) > 1)  # a norm of the sum: axk1
        if is_unknown or is_last:
            return {}
        if not has_experts and any(math.prod(shape) in widths for shape in shapes):
            is_gathered = True  # a norm over all heads, which takes all columns: cohere, bitnet
    return {name: GATHERED.get(style, style) for name, style in styles.items()} if is_gathered else styles


def plan_blocks(model: PreTrainedModel) -> dict[str, dict[str, str]]:
    """The plan of each block: of a layer's children that mix tokens or widen them, such as attention, MLP, experts.

    For a layer of Llama: "model.layers.0.self_attn": {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise",
    "o_proj": "rowwise"}, "model.layers.0.mlp": {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}.
    """
    num_heads = getattr(model.config.get_text_config(), "num_attention_heads", 0)
    hidden_size = model.get_input_embeddings().embedding_dim
    names, plans = {module: name for name, module in model.named_modules()}, {}
    own_plan = {module: model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name)) for module, name in names.items()}
    own_plan = {module: style for module, style in own_plan.items() if style in {*GATHERED, *GATHERED.values()}}
    for layer in find_decoder_layers(model):
        for child in layer.children():
            for block in child if isinstance(child, nn.ModuleList) else [child]:
                is_alone = "norm" in names[block].rpartition(".")[2] or isinstance(block, nn.Linear)
                if not is_alone and any(parameter.ndim > 1 for parameter in block.parameters()):
                    plans[names[block]] = plan_block(block, own_plan, hidden_size, num_heads)
    return plans


def check_model(model: PreTrainedModel, tp: int) -> None:
    """Refuse a model that tp cannot split, whatever its blocks are."""
    config, embedding = model.config.get_text_config(), model.get_input_embeddings()
    family, is_plain = config.model_type, isinstance(embedding, nn.Embedding) and not list(embedding.children())
    if not is_plain or not isinstance(model.get_output_embeddings(), nn.Linear):
        fail(f"{family} has no plain embedding and output head to split; tp_size 1 would work")
    if rows_of_rank(embedding.num_embeddings, tp) * (tp - 1) >= embedding.num_embeddings:
        fail(f"tp_size {tp} leaves a rank without any of the {embedding.num_embeddings} tokens of this {family}")
    if noisy := [name for name, value in config.to_dict().items() if "jitter" in name and value]:
        fail(f"the routers of {family} have {noisy[0]}, and would differ between tp ranks; tp_size 1 would work")


def check_plans(model: PreTrainedModel, plans: dict[str, dict[str, str]], tp: int) -> None:
    """Refuse plans that split nothing, or not evenly, or that would need the same dropout on all ranks."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    family, num_heads = config.model_type, getattr(config, "num_attention_heads", 0)
    sizes = {} if head.bias is None else {"biases of the output head": head.out_features}  # what tp must divide
    for full_name, styles in plans.items():
        block, name = model.get_submodule(full_name), re.sub(r".*?\.\d+\.", "", full_name, count=1)  # "self_attn", say
        for inner, style in styles.items():
            module, last = block.get_submodule(inner), inner.rpartition(".")[2]
            if style == "experts":
                sizes[last] = module.num_experts
            elif "col" in style:
                sizes[f"outputs of {last}"] = module.out_features
            else:
                sizes[f"inputs of {last}"] = module.in_features
        if "experts" in styles.values() and any(isinstance(m, nn.Dropout) and m.p for m in block.modules()):
            fail(f"{name} of {family} has dropout, which would differ between tp ranks; tp_size 1 would work")
        if "colwise" in styles.values() and ("att" in name or "k_proj" in styles):
            num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
            sizes |= {"attention heads": num_heads, "key/value heads": num_kv_heads}
    if not any(plans.values()):
        fail(f"{family} has no tensor-parallel plan for its layers; tp_size 1 would work")
    if bad := " and ".join(f"{size} {what}" for what, size in sizes.items() if size % tp):
        works = list_divisors(math.gcd(*sizes.values()))
        fail(f"tp_size {tp} does not divide the {bad} of this {family}; tp_size {works} would work")


def apply_tensor_parallel(model: PreTrainedModel, tp_mesh: DeviceMesh) -> None:
    """Split the model's matrices over tp, and the sequence between its blocks.

    Between blocks each rank holds (B, L/tp, H): sequence parallelism, Korthikanti et al., arXiv 2205.05198. A block
    gathers the sequence once, its last projection reduces and scatters it again. The logits stay split over the
    vocabulary. Afterwards every parameter is a DTensor on `tp_mesh`. A model that tp cannot split is refused.
    """
    tp, tp_rank = tp_mesh.size(), tp_mesh.get_local_rank()
    check_model(model, tp)
    plans = plan_blocks(model)
    check_plans(model, plans, tp)

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    split_embedding(embedding, tp_mesh)
    split_head(head, tp_mesh)
    done = {embedding, head}
    for name, styles in plans.items():
        split_block(model.get_submodule(name), styles, tp_mesh)
        done |= {*model.get_submodule(name).modules()}

    in_layers = {module for layer in find_decoder_layers(model) for module in layer.modules()}
    for module in [module for module in model.modules() if module not in done]:
        is_table = isinstance(module, nn.Embedding)  # of positions, which are not cut
        if module in in_layers or is_table or all(p.ndim < 2 for p in module.parameters(False)):
            cut_parameters(module, {"": module}, {}, tp_mesh)  # norms and the like, each rank on its own tokens
        if is_table:
            module.register_forward_hook(lambda module, args, out: out.chunk(tp, -2)[tp_rank])
    model.tie_weights()  # embedding and head were cut one by one
    if left := [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]:
        family = model.config.get_text_config().model_type
        fail(f"no tensor-parallel rule covers {left[0]} of {family}; tp_size 1 would work")


def apply_activation_checkpointing(model: PreTrainedModel, mode: str) -> None:
    """Keep less of each decoder layer for the backward, which computes the rest again: arXiv 1604.06174.

    "full" keeps a layer's input alone; "selective" also what takes longest: attention, products, reduce-scatters.
    """
    aten, context = torch.ops.aten, {}
    if mode == "selective":
        kept = [aten.mm.default, aten.addmm.default, torch.ops._c10d_functional.reduce_scatter_tensor.default]
        kept += [getattr(aten, name).default for name in dir(aten) if re.fullmatch(r"_scaled_dot.*attention\w*", name)]
        kept = [operator for operator in kept if "backward" not in str(operator)]
        context = {"context_fn": functools.partial(create_selective_checkpoint_contexts, kept)}
    for layer in find_decoder_layers(model) if mode != "none" else []:
        # its forward and not its call, so that FSDP's hooks stay outside
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **context)


def apply_compile(model: PreTrainedModel) -> None:
    """Compile each decoder layer by itself, for the shapes that it meets; equal layers share the code."""
    # what a forward leaves on its modules, plain parameters say, need not be left again when it is computed again
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for layer in find_decoder_layers(model):
        layer.forward = torch.compile(layer.forward, dynamic=False)


def shard_dim(parameter: nn.Parameter, tp_size: int, fsdp_size: int) -> Shard | None:
    """Which dimension FSDP cuts: the first, but the second where the first will not do.

    That is a matrix whose rows tp has cut unevenly, for DCP cannot load a dimension that is cut again after that; and
    stacked experts, of which there may be fewer than ranks.
    """
    by_tp = tp_size if isinstance(parameter, DTensor) and Shard(0) in parameter.placements else 1
    if parameter.ndim > 2 and parameter.shape[0] % (by_tp * fsdp_size) and parameter.shape[1] % fsdp_size == 0:
        return Shard(1)
    if parameter.shape[0] % by_tp == 0 or fsdp_size == 1:
        return None  # torch's own choice, the first
    rows, columns = parameter.shape
    if columns % fsdp_size:
        fail(f"tp_size {tp_size} does not divide {rows} rows, so dp x cp {fsdp_size} must divide {columns} columns")
    return Shard(1)


def apply_fsdp(model: PreTrainedModel, fsdp_mesh: DeviceMesh, *, dtype: torch.dtype, tp_size: int = 1) -> None:
    """Shard parameters, gradients and optimizer state: a unit per decoder layer, and one for both ends of the model.

    With one dimension all ranks of `fsdp_mesh` share a copy of the model. With two (HSDP, for machines with a slow
    network in between) the first is that of the copies, over which gradients are summed after the reduce-scatter.
    """
    policy = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    placement = functools.partial(shard_dim, tp_size=tp_size, fsdp_size=fsdp_mesh.shape[-1])
    options = {"mesh": fsdp_mesh, "mp_policy": policy, "shard_placement_fn": placement}
    home = type(model).__module__
    # the root's unit holds the embedding, and the head, which is used once for each chunk of the loss: a unit of its
    # own would be gathered, and its gradient scattered, as often
    for unit in (*find_decoder_layers(model), model):
        fully_shard(unit, **options)  # gives it a class of its own
    type(model).__module__ = home  # by which Transformers knows its code; else initialize_weights skips some buffers


def build_model(
    config: PreTrainedConfig,
    mesh: DeviceMesh | None,
    device: str,
    dtype: torch.dtype,
    *,
    seq_len: int,
    has_documents: bool = False,
    activation_checkpointing: str = "none",
    compile: bool = False,
) -> PreTrainedModel:
    """The model on meta, cut by the plans: tp first, so that FSDP cuts its DTensors once more, and FSDP last, so that
    its hooks are outermost. Refuses what the mesh cannot express.

    Where the sequence is cut, or has documents, it runs `context_parallel_attention`, its `.attention_function`: also
    under tp alone, where Transformers would make masks for the tokens that it sees between the blocks.
    """
    cp, tp = (mesh["cp"].size(), mesh["tp"].size()) if mesh is not None else (1, 1)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and seq_len > positions > 0:
        fail(f"--seq_len {seq_len} is longer than the {positions} positions of this {config.model_type}")
    if config.model_type == "xlm" and activation_checkpointing != "none":
        fail("a layer of xlm cannot run twice, for it changes a cache; --activation_checkpointing none would work")
    if config.model_type == "reformer" and mesh is not None:
        fail("reformer has a backward of its own, which runs layers that FSDP does not see; one process would work")
    # FlexAttention is compiled for each chunk and kind of mask, and layers that differ share one piece of code
    torch._dynamo.config.recompile_limit = 64
    attention, name = None, None
    if cp * tp > 1 or has_documents:
        check_attention(config, seq_len, cp, has_documents)
        attention = context_parallel_attention(mesh["cp"] if mesh is not None else None, seq_len)
        name = "context_parallel"
        register_attention(attention)
    with torch.device("meta"):
        own = copy.deepcopy(config)  # building a model writes its kind of attention into the config
        model = AutoModelForCausalLM.from_config(own, dtype=torch.float32, attn_implementation=name).train()
    model.attention_function = attention
    if tp > 1:
        apply_tensor_parallel(model, mesh["tp"])
    apply_chunked_loss(model, mesh["tp"] if tp > 1 else None)
    apply_activation_checkpointing(model, activation_checkpointing)
    if compile:
        apply_compile(model)
    if mesh is not None:
        axes = ("dp_replicate", "fsdp") if "dp_replicate" in mesh.mesh_dim_names else ("fsdp",)
        apply_fsdp(model, mesh[axes], dtype=dtype, tp_size=tp)
    elif dtype != torch.float32:
        # with no FSDP to cast the weights of each layer, autocast casts them for each operator
        model.forward = torch.autocast(device, dtype)(model.forward)
    return model


# ---- 5 attention: sequence shards, context-parallel attention --------------------------------------------------------


def shard_sequence(full: Tensor, cp_rank: int, cp_size: int, dim: int = 1) -> Tensor:
    """The chunks cp_rank and 2cp-1-cp_rank of 2cp, (B, S) -> (B, L): so all ranks have the same causal work.

    At cp = 2 and S = 16, rank 0 has tokens 0 to 3 and 12 to 15, rank 1 has tokens 4 to 11.
    """
    if cp_size == 1:
        return full
    chunks = full.chunk(2 * cp_size, dim)
    return torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]], dim)


def gather_sequence_shards(shard: Tensor, cp_mesh: DeviceMesh, dim: int) -> Tensor:
    """The inverse of `shard_sequence`, on every rank; the backward adds up the gradients of all (reduce-scatter)."""
    chunks = redistribute(shard, cp_mesh, Shard(dim), Replicate()).chunk(2 * cp_mesh.size(), dim)
    return torch.cat([*chunks[0::2], *chunks[1::2][::-1]], dim)  # they come as 0, 2cp-1, 1, 2cp-2, ...


def pass_mask_function(mask_function: Callable, local_size: int | None = None, **kwargs) -> tuple[Callable, int | None]:
    """Hand on what a layer can see, as a function of positions, instead of a mask, which would be of a shard's size.

    What it raises completes the sentence of `check_attention`.
    """
    if kwargs["attention_mask"] is None:  # Transformers would take the positions of a shard for packed documents
        raise ValueError("attention to which it does not hand on the attention_mask (of ones) that it is given")
    if "allow_is_bidirectional_skip" in kwargs or not kwargs.get("allow_is_causal_skip", True):
        raise ValueError("a mask that is not only causal")
    return mask_function, local_size


def context_parallel_attention(cp_mesh: DeviceMesh | None, seq_len: int) -> Callable:
    """Attention over the whole sequence, of which each rank holds the two chunks of `shard_sequence`.

    Keys and values are gathered along the sequence (they are small under grouped-query attention), queries stay, and
    each chunk of them runs attention on what it can see: the method of Llama 3, arXiv 2407.21783, section 3.3.2.
    `.positions`, (B, S), keeps attention within documents: the position of each token in its own one. A module that
    calls it gets the attribute `has_called`, for `check_first_step`. For another attention, change what the loop does
    with q, k and v; a run without cp, tp and documents has the model's own, see `build_model`.
    """
    cp_rank, cp_size = (cp_mesh.get_local_rank(), cp_mesh.size()) if cp_mesh is not None else (0, 1)
    chunks = (cp_rank, 2 * cp_size - 1 - cp_rank) if cp_size > 1 else (0,)
    length = seq_len // cp_size // len(chunks)
    # made here, for under compile they cannot be, and first small, for their constructor makes the mask as a tensor
    lower_right = {chunk: causal_lower_right(1, 2) for chunk in chunks}
    for chunk, bias in lower_right.items():
        bias.seq_len_q, bias.seq_len_kv = length, (chunk + 1) * length

    def attention(
        module: nn.Module,
        query: Tensor,  # (B, heads, L, D)
        key: Tensor,  # (B, kv heads, L, D)
        value: Tensor,  # (B, kv heads, L, D of values)
        attention_mask: tuple[Callable, int | None],  # from `pass_mask_function`
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs,
    ) -> tuple[Tensor, None]:
        module.has_called = True
        if not isinstance(attention_mask, tuple) or not getattr(module, "is_causal", True):
            raise ValueError("attention that is not causal, or has a mask of its own")
        others = {name for name, value in kwargs.items() if isinstance(value, Tensor)} - {"position_ids", "s_aux"}
        if others or {query.shape[2] * cp_size, key.shape[2] * cp_size} != {seq_len}:
            raise ValueError(f"attention with {', '.join(others) or 'other queries or keys than those of the tokens'}")
        sees, window = attention_mask
        is_plain = sees is causal_mask_function or (window or 0) >= seq_len
        is_plain &= all(kwargs.get(name) is None for name in ("softcap", "s_aux")) and attention.positions is None
        key_value = torch.cat([key, value], dim=-1)  # one collective for both
        key_value = gather_sequence_shards(key_value, cp_mesh, dim=2) if cp_size > 1 else key_value
        key, value = key_value.split([key.shape[-1], value.shape[-1]], dim=-1)  # (B, kv heads, S, ...)
        outputs = []
        for chunk, q in zip(chunks, query.split(length, dim=2)):  # (B, heads, length, D)
            begin, end = chunk * length, (chunk + 1) * length
            first = max(0, begin - window + 1) if window else 0  # what lies before is not computed on
            k, v = key[:, :, first:end], value[:, :, first:end]
            mask_of = sees, attention.positions, range(begin, end), range(first, end), q.device
            if is_plain:  # on CUDA a kernel knows what is masked, on the CPU the layers share one mask
                mask = None if begin == 0 else lower_right[chunk] if q.is_cuda else build_mask(*mask_of, q.dtype)
                options = {"scale": scaling, "enable_gqa": q.shape[1] != k.shape[1], "dropout_p": dropout}
                output = F.scaled_dot_product_attention(q, k, v, mask, is_causal=begin == 0, **options).transpose(1, 2)
            elif q.is_cuda and not dropout:  # other masks, caps and sinks, and never the whole mask in memory
                forward = transformers.AttentionInterface()["flex_attention"]
                output = forward(module, q, k, v, build_mask(*mask_of, None), scaling=scaling, **kwargs)[0]
            else:  # the same in the family's own code, with a mask
                forward = sys.modules[type(module).__module__].eager_attention_forward
                mask = build_mask(*mask_of, q.dtype)
                output = forward(module, q, k, v, mask, scaling=scaling, dropout=dropout, **kwargs)[0]
            outputs.append(output)  # (B, length, heads, D of values)
        return torch.cat(outputs, dim=1), None

    attention.positions = None
    return attention


def register_attention(attention: Callable) -> None:
    """Let models that are built with attn_implementation "context_parallel" call this attention, with its masks."""
    AttentionMaskInterface.register("context_parallel", pass_mask_function)
    transformers.AttentionInterface.register("context_parallel", attention)


@functools.lru_cache(maxsize=4)  # the layers of a forward share it: two chunks, two kinds of layers
def build_mask(
    sees: Callable, places: Tensor | None, queries: range, keys: range, device: torch.device, dtype: torch.dtype | None
) -> Tensor | BlockMask:
    """What these queries see of these keys of a sequence: (1 or B, 1, Q, K), 0 or lowest; without dtype a block mask.

    `sees` tells it of places in a document, which `places`, (B, S), has for each token, or of places in the sequence.
    """

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q, k = q + queries.start, k + keys.start
        if places is None:
            return sees(b, h, q, k)
        q_place, k_place = places[b, q], places[b, k]
        is_same_document = q - q_place == k - k_place  # it begins at the same token
        return sees(b, h, q_place, k_place) & is_same_document

    sizes = (1 if places is None else len(places), 1, len(queries), len(keys))
    if dtype is None:  # compiled, so that no Q x K mask is in memory in between
        return torch.compile(create_block_mask)(visible, sizes[0], None, *sizes[2:], device)
    b, h, q, k = (torch.arange(size, device=device) for size in sizes)
    mask = visible(b[:, None, None, None], h[:, None, None], q[:, None], k)
    return torch.zeros(sizes, device=device, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def find_obstacle(config: PreTrainedConfig, seq_len: int, cp: int, has_documents: bool) -> str | None:
    """The first thing in a model that `context_parallel_attention` cannot express, or None: its config is looked at,
    then its modules, then a forward on meta.

    The run raises ValueError for what attention itself refuses, and RuntimeError where the model cannot be on meta.
    """
    by_attention_alone = cp > 1 or has_documents  # then nothing else may mix tokens, or depend on other positions
    text_config = config.get_text_config()
    floor = text_config.floor_scale if getattr(text_config, "attn_temperature_tuning", False) else math.inf
    if by_attention_alone and seq_len >= floor:  # Llama 4 counts the positions for it by itself
        return f"attention that is scaled by the position from {floor} tokens on"
    rope = getattr(text_config, "rope_parameters", None) or {}
    for kind in (rope,) if "rope_type" in rope else filter(None, rope.values()):  # of all, or by kinds of layers
        limit = kind.get("original_max_position_embeddings") or getattr(text_config, "max_position_embeddings", 0)
        if by_attention_alone and kind.get("rope_type") in ("dynamic", "longrope") and seq_len > limit:
            # its frequencies depend on the largest position that a rank happens to hold
            return f"{kind['rope_type']} rotary embeddings beyond {limit} positions"
    attention = context_parallel_attention(None, seq_len)
    register_attention(attention)
    options = {"attn_implementation": "context_parallel", "experts_implementation": "batched_mm"}  # which runs on meta
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options).train()
        ids = torch.zeros((1, seq_len), dtype=torch.int64)
    if not model._can_set_attn_implementation():  # private, but nothing public tells whether it will be called
        return "attention that Transformers cannot replace"
    tables = {m for m in model.modules() if isinstance(m, nn.Embedding)} - {model.get_input_embeddings()}
    if any(table.padding_idx is not None for table in tables):
        return "positions, or other embeddings, that depend on padding"
    if by_attention_alone and any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return "convolutions along the sequence"
    attention.positions = ids if has_documents else None
    with torch.device("meta"), torch.no_grad():
        model(input_ids=ids, position_ids=ids, attention_mask=ids + 1, use_cache=False)
    calls = [any(hasattr(m, "has_called") for m in layer.modules()) for layer in find_decoder_layers(model)]
    if by_attention_alone and not all(calls):
        return "layers that mix tokens by other means than attention"
    return None


def check_attention(config: PreTrainedConfig, seq_len: int, cp: int, has_documents: bool = False) -> None:
    """Refuse a model whose attention `context_parallel_attention` cannot stand for."""
    try:
        reason = find_obstacle(config, seq_len, cp, has_documents)
    except ValueError as error:
        reason = reason_of(error)
    except RuntimeError:
        reason = None  # not everything runs on meta: what is left to see is seen in the first step
    except Exception as error:
        reason = f"attention with a mask of its own ({reason_of(error, 80)})"
    if reason is not None:
        mode = "--document_mask" if has_documents else f"cp_size {cp}" if cp > 1 else "tp_size above 1"
        fail(f"{config.model_type} has {reason}, which {mode} cannot express; cp and tp 1 without it would work")


# ---- 6 data ----------------------------------------------------------------------------------------------------------


def read_documents(
    dataset_name: str, text_column: str, config: str | None = None, split: str = "train"
) -> tuple[Any, str, bool]:
    """Open a text dataset. Returns it, the column with the texts, and whether each of them is a document."""
    import datasets  # 1 s, and only one rank of a machine needs it

    path, column, is_document = Path(dataset_name), text_column, True
    builders = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    text_files = sorted(str(file) for file in path.rglob("*.txt")) if path.is_dir() else [dataset_name]
    if path.is_file() and path.stat().st_size == 0:
        raise ValueError("it is empty")
    if path.is_dir() and text_files and (others := {file.suffix for file in path.rglob("*")} & builders.keys()):
        raise ValueError(f"it holds .txt and {', '.join(sorted(others))} files; keep one kind in a folder")
    if dataset_name == "stdlib":
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        data = datasets.Dataset.from_dict({column: texts})
    elif text_files and text_files[0].endswith(".txt"):  # by lines, so that files of any size stream; all one document
        data = datasets.load_dataset("text", data_files=text_files, split="train", keep_linebreaks=True)
        column, is_document = "text", False
    elif builder := builders.get(path.suffix):
        data = datasets.load_dataset(builder, data_files=[dataset_name], split="train")
    elif path.is_file():
        raise ValueError(f"the name of a file must end in one of .txt, {', '.join(builders)}")
    else:
        data = datasets.load_dataset(dataset_name, config, split=split)
    if column not in data.column_names:
        raise ValueError(f"it has no column {column}, but {', '.join(data.column_names)}; see --text_column")
    return data, column, is_document


def tokenize_to_file(dataset_name: str, text_column: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Path:
    """Write all tokens of a dataset, documents end to end, to one file in the datasets cache, unless it is there."""
    import datasets

    data, column, is_document = read_documents(dataset_name, text_column, **options)
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())) + repr(tokenizer.init_kwargs) + repr(tokenizer)
    # private, but there is no public name for what the library itself uses to tell two datasets apart
    key = hashlib.sha256(f"1 {data._fingerprint} {text_column} {vocabulary}".encode()).hexdigest()[:32]
    dtype = "uint16" if max(tokenizer.get_vocab().values()) < 2**16 else "uint32"
    path = Path(datasets.config.HF_DATASETS_CACHE) / "3d_parallel" / f"{key}.{dtype}"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None and is_document else []
    # in a folder beside it, so that under its name there is either nothing or all of it
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, (Path(folder) / path.name).open("wb") as file:
        for batch in tqdm(data.iter(1000), total=math.ceil(len(data) / 1000), desc="tokenizing", unit="batch"):
            texts = [text for text in batch[column] if text] if is_document else ["".join(batch[column])]
            # not verbose: a document longer than the model's context is no fault, it is cut into sequences
            tokens = tokenizer(texts, add_special_tokens=is_document, verbose=False)["input_ids"] if texts else []
            for ids in tokens:
                file.write(np.asarray(ids if ids[-1:] == end else ids + end, dtype=dtype).tobytes())
        if file.tell() == 0:
            raise ValueError("it has no text")
        file.flush()
        os.fsync(file.fileno())
        os.replace(file.name, path)
    return path


def prepare_tokens(
    dataset_name: str,
    text_column: str,
    tokenizer: PreTrainedTokenizerBase,
    group: ProcessGroup | None = None,
    **options: Any,
) -> np.ndarray:
    """All tokens as a read-only array on disk, which one rank of each machine writes. A collective over `group`.
    `options` are `config` and `split` of `read_documents`."""
    path, local_rank = None, int(os.environ.get("LOCAL_RANK", 0))
    works = "give 'stdlib', a .txt, .jsonl, .parquet or .csv file, a folder, or a hub id that can be reached"
    with on_all_ranks(f"--dataset_name {dataset_name} cannot be read, {works}", group):
        if local_rank == 0:
            path = str(tokenize_to_file(dataset_name, text_column, tokenizer, **options))
    path = gather_objects(path, group)[get_rank() - local_rank]  # that of this machine's first rank
    return np.memmap(path, mode="r", dtype=path.rsplit(".", 1)[-1])


def split_data(dataset_name: str, num_tokens: int, seq_len: int, with_evaluation: bool) -> tuple[int, range]:
    """How many sequences there are to train on, and which are held out, always: the last 1 %, but no more than 256."""
    sequences = (num_tokens - 1) // seq_len
    if sequences < 1:
        fail(f"{dataset_name} has {num_tokens} tokens, too few for one sequence of --seq_len {seq_len}")
    if with_evaluation and sequences < 100:
        fail(f"{dataset_name} has only {sequences} sequences; --eval_every holds out 1 %, so it needs 100")
    trained = sequences - min(sequences // 100, 256)  # an evaluation must stay short beside the steps
    return trained, range(trained, sequences)


@functools.lru_cache(maxsize=2)
def epoch_order(num_sequences: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_sequences)


def sequences_of_step(num_sequences: int, seed: int, step: int, global_batch_size: int) -> list[int]:
    """Which sequences make up a step (from 0): a function of these numbers alone, so no loader state to save."""
    places = (divmod(i, num_sequences) for i in range(step * global_batch_size, (step + 1) * global_batch_size))
    return [int(epoch_order(num_sequences, seed, epoch)[i]) for epoch, i in places]


def read_sequences(tokens: np.ndarray, indices: Iterable[int], seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels, both (B, S). Sequence i starts at token i * S, and a label is the token after its input, so
    that labels are shifted before anything is cut; the last one is the first token of the next sequence."""
    rows = np.stack([tokens[i * seq_len : (i + 1) * seq_len + 1] for i in indices]).astype(np.int64)
    return torch.from_numpy(rows[:, :-1]).contiguous(), torch.from_numpy(rows[:, 1:]).contiguous()


def shard_batch(
    inputs: Tensor,
    labels: Tensor,
    mesh: DeviceMesh | None,
    micro_batch_size: int,
    device: torch.device,
    document_end: int | None = None,
) -> list[dict[str, Tensor]]:
    """Cut a global batch, (B, S), into this rank's micro-batches, (micro_batch_size, L): dp takes rows, cp the two
    chunks of `shard_sequence`, all of tp the same.

    With `document_end`, the token that ends a document, positions begin anew after it, attention stays within a
    document, for which each rank has the positions of whole rows, and the end has no label.
    """
    dp_rank, dp = (mesh.get_local_rank("dp"), mesh["dp"].size()) if mesh is not None else (0, 1)
    cp_rank, cp = (mesh.get_local_rank("cp"), mesh["cp"].size()) if mesh is not None else (0, 1)
    positions = torch.arange(inputs.shape[1]).expand_as(inputs)
    if document_end is not None:
        starts = F.pad(inputs[:, :-1] == document_end, (1, 0)) * positions
        positions, labels = positions - starts.cummax(dim=1).values, labels.masked_fill(inputs == document_end, -100)
    batch = {"input_ids": inputs, "position_ids": positions, "labels": labels}
    batch = {name: shard_sequence(full.chunk(dp)[dp_rank], cp_rank, cp) for name, full in batch.items()}
    if document_end is not None:
        batch["document_positions"] = positions.chunk(dp)[dp_rank]
    split = {name: shard.contiguous().to(device).split(micro_batch_size) for name, shard in batch.items()}
    return [dict(zip(split, tensors)) for tensors in zip(*split.values())]


# ---- 7 loss ----------------------------------------------------------------------------------------------------------


class ChunkedLoss(torch.autograd.Function):
    """The sum of `loss_of(hidden, labels)` over chunks of the sequence. Its forward computes the gradients as well, one
    chunk after the other: only one chunk's logits are in memory at a time, and nothing is computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        hidden: Tensor,  # (B, L/tp, H)
        labels: Tensor,  # (B, tp, L/tp): the head gathers a chunk over tp, so its labels are a piece of each slice
        num_chunks: int,
        *parameters: Tensor,  # what else gets a gradient
    ) -> Tensor:
        has_grad = any(ctx.needs_input_grad)
        total, hidden_grads, sums = 0, [], [None] * len(parameters)
        for chunk, chunk_labels in zip(hidden.chunk(num_chunks, 1), labels.chunk(num_chunks, 2)):
            chunk = chunk.detach().requires_grad_(has_grad)
            with torch.set_grad_enabled(has_grad):
                loss = loss_of(chunk, chunk_labels.flatten(1))
                own, *grads = torch.autograd.grad(loss, (chunk, *parameters), allow_unused=True) if has_grad else [None]
            total, hidden_grads = total + loss.detach(), [*hidden_grads, own]
            for i, grad in enumerate(grads):
                if grad is not None:  # summed in float32, whatever they are computed in
                    sums[i] = grad.float() if sums[i] is None else sums[i].add_(grad)
            grad = grads = None  # else those of the head would live on until the next chunk has its own
        ctx.grads = [torch.cat(hidden_grads, 1), None, None, *sums] if has_grad else None
        return total

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple:
        grads, ctx.grads = ctx.grads, None
        return None, *(grad if grad is None else grad.mul_(factor) for grad in grads)


class SumCrossEntropy(torch.autograd.Function):
    """The sum of the cross entropy over labels (N,) that are not -100, in float32.

    Logits are (N, V), under tp this rank's (N, V/tp), from entry `first` on: then the ranks of `group` exchange the
    highest logit of each token, and with one more call the sum of the exponents and the logit of the label, as in
    Megatron-LM, arXiv 1909.08053, section 3. A float32 copy of the logits becomes their gradient; autograd's own would
    take three.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: ProcessGroup | None) -> Tensor:
        highest, is_label = logits.amax(dim=-1).float(), labels != -100
        if group is not None:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        is_here = (labels >= first) & (labels < first + logits.shape[-1])
        index = (labels - first).where(is_here, 0)[:, None]
        exponents = logits - highest[:, None]  # (N, V/tp), float32
        chosen = exponents.gather(-1, index).squeeze(-1).where(is_here, 0)
        parts = torch.stack([exponents.exp_().sum(dim=-1), chosen])  # (2, N)
        if group is not None:
            dist.all_reduce(parts, group=group)
        sums, chosen = parts
        ctx.saved, ctx.dtype = (exponents, sums, index, is_here, is_label), logits.dtype
        return ((sums.log() - chosen) * is_label).sum()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple:
        (exponents, sums, index, is_here, is_label), ctx.saved = ctx.saved, None
        grad = exponents.mul_((is_label / sums * factor)[:, None])  # the softmax
        grad.scatter_add_(-1, index, (is_here * -factor)[:, None])
        return grad.to(ctx.dtype), None, None, None


def with_hidden(output: transformers.utils.ModelOutput, hidden: Tensor) -> transformers.utils.ModelOutput:
    """A decoder's output with other hidden states, and without router logits, of which the model would make a loss."""
    kept = {name: value for name, value in output.items() if name not in ("last_hidden_state", "router_logits")}
    return type(output)(last_hidden_state=hidden, **kept)


def apply_chunked_loss(model: PreTrainedModel, tp_mesh: DeviceMesh | None = None) -> None:
    """Let `model(..., shifted_labels=labels)` return a loss and no logits, which then never exist as a whole.

    It returns the sum of `SumCrossEntropy` over labels (B, L), which `train_step` divides by the number of labels of
    the whole step, and the logits of routers, (tokens, experts) for each layer, if the config asks for them.
    What a family does between decoder and logits is only in its own forward, which is therefore called many times,
    each time with something else in place of the decoder:
        once             own forward -> `decode`: the decoder, whose output is kept; it hands on one token -> head
        for each chunk   own forward -> that chunk of the kept hidden states -> head -> `SumCrossEntropy`, gradients
    """
    decoder, own_forward, tp = find_decoder(model), model.forward, 1 if tp_mesh is None else tp_mesh.size()
    after = {*model.modules()} - {*decoder.modules()}
    rows = rows_of_rank(model.get_output_embeddings().out_features, tp) if tp > 1 else 0
    first, group = (rows * tp_mesh.get_local_rank(), tp_mesh.get_group()) if tp > 1 else (0, None)

    @functools.wraps(own_forward)  # some of transformers looks at its signature
    def forward(*args: Any, shifted_labels: Tensor | None = None, **kwargs: Any) -> Any:
        if shifted_labels is None:
            return own_forward(*args, **kwargs)
        run_decoder, decoded = decoder.forward, []

        def run_with(stand_in: Callable) -> Any:
            decoder.forward = stand_in  # an attribute of this one module, which hides the method
            try:
                return own_forward(*args, **kwargs)
            finally:
                del decoder.forward

        def decode(*args: Any, **kwargs: Any) -> Any:
            decoded.append(run_decoder(*args, **kwargs))
            return with_hidden(decoded[0], decoded[0].last_hidden_state[:, :1])

        def loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
            return SumCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), first, group)

        def loss_of_hidden(hidden: Tensor, labels: Tensor) -> Tensor:  # of a chunk of C tokens: (B, C/tp, H) and (B, C)
            output = run_with(lambda *args, **kwargs: with_hidden(decoded[0], hidden))
            return loss_of_logits(output.logits, labels)

        output = run_with(decode)
        if not decoded or output.logits.shape[1] != tp:
            # the model goes another way: these are the logits of all tokens
            return ChunkedLoss.apply(loss_of_logits, output.logits, shifted_labels[:, None], 1), ()
        hidden, labels = decoded[0].last_hidden_state, shifted_labels.unflatten(1, (tp, -1))
        # a 16th of the logits at a time; but the head's gradient is added up once a chunk, which with few tokens takes
        # as long as the products
        num_chunks = 16 if labels.numel() >= 2048 else max(1, labels.numel() // 256)
        parameters = {p for m in after for p in m.parameters(False) if p.requires_grad and torch.is_grad_enabled()}
        loss = ChunkedLoss.apply(loss_of_hidden, hidden, labels, num_chunks, *parameters)
        return loss, decoded[0].router_logits if getattr(output, "aux_loss", None) is not None else ()

    model.forward = forward


def model_inputs(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    """What the model's forward takes of a micro-batch of `shard_batch`; its documents go to the attention."""
    inputs = {"input_ids": batch["input_ids"], "use_cache": False}
    if model.attention_function is not None:  # else it counts positions in its own way
        # a mask of ones, or Transformers takes a shard's positions for those of packed documents
        inputs |= {"position_ids": batch["position_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}
        model.attention_function.positions = batch.get("document_positions")
    return inputs


def forward_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The sum of the loss over a micro-batch of `shard_batch`, and the logits of routers; see `apply_chunked_loss`."""
    return model(**model_inputs(model, batch), shifted_labels=batch["labels"])


@torch.no_grad()
def count_experts(model: nn.Module, micro_batches: list[dict], mesh: DeviceMesh | None) -> Tensor | None:
    """How often all tokens of a step take each expert, over all layers: (experts,). None if the config does not ask.

    A forward of its own: the load balancing loss needs these numbers of the whole batch before its first backward.
    """
    config = model.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return None
    routers = [logits for batch in micro_batches for logits in forward_loss(model, batch)[1]]
    if not routers:
        return None
    chosen = torch.cat([logits.topk(config.num_experts_per_tok).indices.flatten() for logits in routers])
    # not bincount: its shape depends on values, which a dry run has not
    counts = chosen.new_zeros(routers[0].shape[-1]).scatter_add_(0, chosen, torch.ones_like(chosen))
    if mesh is not None:
        dist.all_reduce(counts)
        counts //= mesh["tp"].size()  # tp ranks route the same tokens
    return counts


def load_balancing_loss(
    router_logits: tuple[Tensor, ...], counts: Tensor, num_tokens: int, config: PreTrainedConfig
) -> Tensor:
    """A rank's part of the auxiliary loss of Switch Transformers, arXiv 2101.03961, equations 4 to 6.

    `counts` are those of `count_experts` over all tokens of a step and all layers: this factor of the product has no
    gradient, so that the parts of ranks and micro-batches add up to the loss of the whole batch.
    """
    rows = len(router_logits) * num_tokens
    probabilities = sum(logits.float().softmax(dim=-1).sum(dim=0) for logits in router_logits)
    coefficient = "router_aux_loss_coef" if hasattr(config, "router_aux_loss_coef") else "aux_loss_coef"
    return getattr(config, coefficient) * len(counts) * (counts / rows * probabilities / rows).sum()


# ---- 8 checkpoint: its state, save, find, load, export ---------------------------------------------------------------

MANIFEST, FORMAT = "manifest.json", 1


def init_optimizer_state(optimizer: Optimizer) -> None:
    """Give parameters Adam's state of step 0; else get_state_dict does a step, or omits what never had a gradient."""
    groups = optimizer.param_groups if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) else []
    for parameter, group in [(p, g) for g in groups for p in g["params"] if not g["amsgrad"]]:
        if parameter.requires_grad and not optimizer.state[parameter]:
            place = parameter.device if group.get("fused") or group.get("capturable") else None
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=place), **moments}


def tied_names(model: nn.Module) -> dict[str, str]:
    """The second name of each tied parameter, and the first one, under which it is written."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in named if name != first[id(parameter)]}


class AppState(Stateful):
    """Model and optimizer, or the model alone, as one entry of a DCP checkpoint; a tied parameter is there once."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None):
        self.model, self.tied = model, tied_names(model)
        self.optimizers = [] if optimizer is None else [optimizer]

    def state_dict(self) -> dict[str, Any]:
        for optimizer in self.optimizers:
            init_optimizer_state(optimizer)
        model_state, optimizer_state = get_state_dict(self.model, self.optimizers)
        model_state = {name: value for name, value in model_state.items() if name not in self.tied}
        return {"model": model_state} | ({"optim": optimizer_state} if self.optimizers else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optim = state["model"], state.get("optim", {})
        model = model | {alias: model[name] for alias, name in self.tied.items()}
        set_state_dict(self.model, self.optimizers, model_state_dict=model, optim_state_dict=optim)


def save_checkpoint(
    output_dir: Path,
    model: PreTrainedModel,
    optimizer: Optimizer,
    *,
    about: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
    keep_last: int,
    background: tuple[ThreadPoolExecutor, AsyncStager, ProcessGroup | None] | None = None,
) -> Future:
    """Save model and optimizer to `checkpoint_tp<tp>_dp<dp>_cp<cp>`, whole or not at all. A collective.

    Each rank writes its shards into a hidden sibling. When all have, rank 0 adds the manifest, which is `about` ("tp",
    "dp", "cp", "run", "step", "tokens") and the size and checksum of each file, and renames it. If anything fails, all
    ranks end with one sentence, and older checkpoints are as they were. To save more, add a key to `state` here and in
    `load_checkpoint`. The future gives the path.

    With `background` (thread, stager, group) the call returns when the stager has copied the state to host memory, and
    the thread does the rest over the group. Wait for the future before the next call, which takes the same memory.
    """
    app, is_main = AppState(model, optimizer), get_rank() == 0
    # called here, not by DCP: its collectives belong to this thread, and the stager takes plain dicts
    state = {"app": app.state_dict()}
    manifest = {"format": FORMAT, **about, "model_type": model.config.model_type, "tied": app.tied}
    manifest |= {"torch": torch.__version__, "transformers": transformers.__version__}
    # not by save_pretrained, which refuses some configs that from_pretrained has read, after hours of training
    configs = {"config.json": model.config, "generation_config.json": model.generation_config}
    texts = {name: config.to_json_string() for name, config in configs.items() if config is not None}
    final = output_dir / "checkpoint_tp{tp}_dp{dp}_cp{cp}".format(**about)
    failed = f"step {about['step']} could not be saved in {output_dir}"

    def write(state: dict[str, Any], group: ProcessGroup | None) -> Path:
        for left_over in output_dir.glob(".tmp_checkpoint_*") if is_main else []:
            shutil.rmtree(left_over, ignore_errors=True)  # of a save that was killed: no other run writes here
        temporary = final.with_name(f".tmp_{final.name}_{gather_objects(uuid.uuid4().hex, group)[0]}")
        try:
            with on_all_ranks(failed, group):
                # more than one thread can lose the exception of one, and report a save that lacks half of its tensors
                writer = dcp.FileSystemWriter(temporary, thread_count=1)
                # first in this block, because it is a collective, which raises on all ranks; what follows is local
                meta = dcp.save(state, storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())
                own = [*temporary.glob(f"__{get_rank()}_*.distcp")]
                if is_main:
                    add_tied_names(meta, app.tied)
                    (temporary / ".metadata").write_bytes(pickle.dumps(meta))
                    for name, text in texts.items():
                        (temporary / name).write_text(text)
                    if tokenizer is not None:
                        tokenizer.save_pretrained(temporary)
                    own += [file for file in temporary.rglob("*") if file.is_file() and file.suffix != ".distcp"]
                sums = {str(f.relative_to(temporary)): {"size": f.stat().st_size, "sha256": checksum(f)} for f in own}
            files = {name: entry for part in gather_objects(sums, group) for name, entry in part.items()}
            with on_all_ranks(failed, group):
                if is_main:
                    commit_checkpoint(temporary, final, manifest | {"files": files}, keep_last)
        finally:
            if is_main:  # what is left of a save that fails; a good one is no longer there
                shutil.rmtree(temporary, ignore_errors=True)
        return final

    if background is None:
        done: Future = Future()
        done.set_result(write(state, None))
        return done
    thread, stager, group = background
    state = stager.stage(state)
    stager.cache_staged_state_dict, stager.state_dict_cache = True, state  # the next save goes into its memory
    return thread.submit(write, state, group)


def start_background(device: torch.device, timeout_s: float) -> tuple[ThreadPoolExecutor, AsyncStager, ProcessGroup]:
    """The thread, the host memory and the group of asynchronous saves. A collective."""
    # with a cache from the start the stager pins its memory, which takes a GPU
    stager = BlockingAsyncStager(cache_staged_state_dict=device.type == "cuda")
    thread = ThreadPoolExecutor(1, initializer=torch.get_device_module(device).set_device, initargs=(device,))
    return thread, stager, host_group(timeout_s)


def add_tied_names(metadata: dcp.Metadata, tied: dict[str, str]) -> None:
    """Point each tied name at the bytes of the name under which they were written."""
    for alias, name in tied.items():
        key, written = f"app.model.{alias}", f"app.model.{name}"
        metadata.state_dict_metadata[key] = metadata.state_dict_metadata[written]
        metadata.planner_data[key] = ("app", "model", alias)
        places = [(index, place) for index, place in metadata.storage_data.items() if index.fqn == written]
        metadata.storage_data |= {dataclasses.replace(index, fqn=key): place for index, place in places}


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def commit_checkpoint(temporary: Path, final: Path, manifest: dict[str, Any], keep_last: int) -> None:
    """Turn a written directory into the newest checkpoint of its name, then prune. Rank 0 only, no collective.

    Between any two system calls the last complete checkpoint has a name that `--resume auto` looks at: it is moved to
    `<name>_step<its step>`, and the new one is renamed into place when all of it is on the disk. What is written or
    removed by half has a hidden name, and the next save sweeps it. What another run saved is never pruned.
    """
    saved = [old["saved"] + 0.001 for _, old in list_checkpoints(final.parent) if old]
    manifest["saved"] = max([time.time(), *saved])  # a clock may go back, the order may not
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
    if read_manifest(temporary) is None:
        raise ValueError(f"resume could not read this manifest: {manifest}")
    for path in (*temporary.rglob("*"), temporary):
        flush(path)
    if final.exists():
        old = read_manifest(final) or {"run": None, "step": "_unknown"}
        aside = final.with_name(f"{final.name}_step{old['step']}")
        if aside.exists():  # another run, or this one, has been at that step before
            aside = aside.with_name(f"{aside.name}_{uuid.uuid4().hex[:8]}")
        if old["run"] != manifest["run"]:
            log(f"{final} is of another run: moved to {aside.name}")
        os.rename(final, aside)
    os.rename(temporary, final)
    flush(final.parent)
    ours = [path for path, old in list_checkpoints(final.parent) if old and old["run"] == manifest["run"]]
    own_name = re.compile(r"checkpoint_tp\d+_dp\d+_cp\d+(_step\d+(_[0-9a-f]{8})?)?")  # not a copy that somebody made
    for path in [path for path in ours if own_name.fullmatch(path.name)][keep_last:]:
        hidden = path.with_name(f".tmp_{path.name}_{uuid.uuid4().hex[:8]}")
        os.rename(path, hidden)  # so that no half-removed one is ever seen under its name
        shutil.rmtree(hidden, ignore_errors=True)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint, or None if it is missing, cut short, or not as this script writes it."""
    kinds = {"format": int, "run": str, "step": int, "tokens": int, "saved": float, "files": dict}
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        manifest = json.loads((path / MANIFEST).read_text())
        is_good = all(isinstance(manifest[key], kind) for key, kind in kinds.items()) and manifest["step"] >= 0
        is_good &= re.fullmatch(r"[\w.-]+", manifest["run"]) is not None  # wandb's id, too
        entries = [manifest["files"][".metadata"], *manifest["files"].values()]
        return manifest if is_good and all({"size", "sha256"} <= {*entry} for entry in entries) else None
    return None


def list_checkpoints(output_dir: Path) -> list[tuple[Path, dict[str, Any] | None]]:
    """All checkpoints of a directory with their manifests: unreadable ones first, then the newest to the oldest."""
    found = [(path, read_manifest(path)) for path in output_dir.glob("checkpoint_tp*_dp*_cp*") if path.is_dir()]
    return sorted(found, key=lambda item: item[1]["saved"] if item[1] else math.inf, reverse=True)


def check_files(path: Path, manifest: dict[str, Any] | None, with_checksums: bool) -> str | None:
    """What is wrong with a checkpoint, as far as this rank's part of its files tells, or None. It opens no tensor."""
    if manifest is None:
        return f"{path} has no readable {MANIFEST}: it is no checkpoint of this script, or an incomplete one"
    if manifest["format"] != FORMAT:
        return f"{path} has format {manifest['format']}; this script reads format {FORMAT}"
    for name in sorted(manifest["files"])[get_rank() :: get_world_size()]:
        file, expected = path / name, manifest["files"][name]
        try:
            if (size := file.stat().st_size) != expected["size"]:
                return f"{file} has {size} bytes instead of {expected['size']}"
            if with_checksums and checksum(file) != expected["sha256"]:
                return f"{file} does not have the content that was saved (its checksum differs)"
        except OSError as error:
            return f"{file} is missing or cannot be read ({error.strerror})"
    return None


def find_checkpoint(resume: str, output_dir: Path, since: float, with_checksums: bool) -> tuple[Path, dict] | None:
    """The last whole checkpoint in `output_dir`, or the one that `resume` names; and its manifest. A collective.

    Each rank checks a part of the files. What is skipped is said; a named one that is not whole is refused. With "auto"
    only what was saved after `since` counts, a "saved" of a manifest.
    """
    found = list_checkpoints(output_dir) if resume == "auto" else [(Path(resume), read_manifest(Path(resume)))]
    candidates = [(path, manifest) for path, manifest in found if not manifest or manifest["saved"] > since]
    for path, manifest in gather_objects(candidates)[0]:  # rank 0's: another rank may see a change in between
        problems = [p for p in gather_objects(check_files(path, manifest, with_checksums)) if p]
        if not problems:
            return path, manifest
        if resume != "auto":
            fail(f"{problems[0]}; name another checkpoint, or --resume auto")
        log(f"skipped {path}: {problems[0]}")
    return None


def find_start(resume: str, output_dir: Path, with_checksums: bool) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint that this run begins with, or None; and what is known of it. A collective.

    The latter is the manifest, or {"run": a new name, also the id at wandb, "step": 0, "tokens": 0}. An elastic restart
    goes on from what was saved since its launch, whatever `resume` says, and begins as the launch did if nothing was.
    """
    # after a machine came or went, torchrun may count no restart, or not the same on all; but one launcher has stayed
    starts = gather_objects((os.environ.get("LAUNCH_ID"), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))))
    ids, restarted = {name for name, _ in starts if name}, any(restarts for _, restarts in starts)
    launched, launch = output_dir / ".launch.json", {}
    if get_rank() == 0:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is cut short
            launch = json.loads(launched.read_text())
        restarted = bool(ids.intersection(launch.get("ids", []))) if ids else restarted
        if not (restarted and launch):
            newest = max((manifest["saved"] for _, manifest in list_checkpoints(output_dir) if manifest), default=0)
            launch = {"run": f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}", "since": newest}
        launched.with_suffix(".tmp").write_text(json.dumps(launch | {"ids": sorted(ids)}))
        os.replace(launched.with_suffix(".tmp"), launched)
    launch, restarted = gather_objects((launch, restarted))[0]
    found = find_checkpoint("auto", output_dir, launch["since"], with_checksums) if restarted else None
    if found is None and resume != "never":
        found = find_checkpoint(resume, output_dir, 0, with_checksums)
    if found is None and (restarted or resume != "never"):
        log(f"no checkpoint to go on from in {output_dir}: the run starts at step 0")
    return found or (None, {"run": launch["run"], "step": 0, "tokens": 0})


class MetadataUnpickler(pickle.Unpickler):
    """Reads `.metadata` without running what a stranger may have put there: it admits only DCP's own plain classes."""

    ALLOWED = re.compile(
        r"torch\.(Size|serialization\._get_layout)|pathlib(\._local)?\.(Pure)?PosixPath"
        r"|torch\.distributed\.checkpoint\.(filesystem\._StorageInfo|metadata\.(Metadata|MetadataIndex"
        r"|(Tensor|Bytes|Chunk)StorageMetadata|TensorProperties|StorageMeta|_MEM_FORMAT_ENCODING))"
    )

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and not self.ALLOWED.fullmatch(f"{module}.{name}"):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")
        return super().find_class(module, name)


class SafeReader(dcp.FileSystemReader):
    """Torch's reader, made safe (nothing in a file can run code) and lean (a rank reads what it keeps, and no more)."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.folder = os.open(path, os.O_RDONLY)  # it stays the same one when a run moves it aside meanwhile
        with self.open(".metadata") as file:
            self.metadata = MetadataUnpickler(file).load()

    def open(self, name: str) -> io.BufferedReader:
        # a small buffer: between the slices nothing is read ahead
        return open(name, "rb", buffering=512, opener=functools.partial(os.open, dir_fd=self.folder))

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        return self.metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> torch.futures.Future:
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            with self.open(Path(info.relative_path).name) as file:  # only the name: no file outside of the folder
                entry = self._slice_file(file, info)  # private; the bytes of one torch.save
                if item.type == dcp.planner.LoadItemType.BYTE_IO:
                    data = io.BytesIO(entry.read(-1))
                    torch.load(data, weights_only=True)  # raises for whatever could run code
                    data.seek(0)
                    planner.load_bytes(item, data)
                else:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(read_slice(file, info.offset, entry, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        return torch.futures.collect_all([])  # done


def read_slice(file: io.BufferedReader, start: int, entry: Any, offsets: torch.Size, lengths: torch.Size) -> Tensor:
    """A slice of the tensor that torch.save wrote at `start` of a file: only its rows, and of these only a range."""
    part = tuple(slice(first, first + length) for first, length in zip(offsets, lengths))
    there = torch.load(entry, map_location="meta", weights_only=True)[part]  # its strides and place, no data
    runs = [there] if there.is_contiguous() else [*there]  # whole rows are one run of bytes, else each row is one
    if not runs[0].is_contiguous():
        entry.seek(0)  # rare: read all of it, and cut
        return torch.load(entry, map_location="cpu", weights_only=True)[part]
    data = torch.empty(there.shape, dtype=there.dtype)
    start += there.untyped_storage()._checkpoint_offset  # private: where its data begin; there is no public name for it
    for run, target in zip(runs, data.view(len(runs), -1).view(torch.uint8).numpy()):
        file.seek(start + run.storage_offset() * run.itemsize)
        if file.readinto(target) != target.nbytes:
            raise EOFError(f"{file.name} ends too early")
    return data


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Load model and optimizer from a checkpoint of any mesh. A collective; each rank reads what it holds.

    The optimizer's options (lr, weight decay, ...) stay as the caller has set them.
    """
    app, groups = AppState(model, optimizer), optimizer.param_groups if optimizer is not None else []
    with on_all_ranks(f"{path} cannot be loaded"):
        reader = SafeReader(path)
        saved = reader.metadata.state_dict_metadata
        here = {name: tuple(tensor.shape) for name, tensor in get_model_state_dict(model).items()}
        there = {k.removeprefix("app.model."): tuple(v.size) for k, v in saved.items() if k.startswith("app.model.")}
        for name in sorted(dict(here.items() ^ there.items()).keys() - app.tied.keys()):
            shapes = f"{there.get(name, 'missing')} there and {here.get(name, 'missing')} here"
            raise ValueError(f"it is of another model, {name} is {shapes}")
    with on_all_ranks(f"{path} cannot be loaded"):  # a collective, which no rank may enter alone
        dcp.load({"app": app}, storage_reader=reader, no_dist=not dist.is_initialized())
    if optimizer is not None:
        optimizer.param_groups = groups  # loading has replaced them by others, with the options that were saved


def export_checkpoint(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Turn a checkpoint of any mesh into a folder for `from_pretrained`. One process, one file at a time in memory."""
    temporary = folder.with_name(f".tmp_{folder.name}_{uuid.uuid4().hex[:8]}")
    with on_all_ranks(f"{path} cannot be exported to {folder}"), contextlib.ExitStack() as at_end:
        at_end.callback(shutil.rmtree, temporary, ignore_errors=True)
        reader, config = SafeReader(path), transformers.AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        tied = tied_names(model)
        tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
        file_size = max(2**24, *(tensor.nbytes for tensor in tensors.values()))
        files = split_torch_state_dict_into_shards(tensors, max_shard_size=file_size)
        not_ours = shutil.ignore_patterns("*.distcp", ".metadata", MANIFEST)  # but generation config and tokenizer
        shutil.copytree(path, temporary, ignore=not_ours)
        for filename, names in files.filename_to_tensors.items():
            state = {name: torch.empty_like(tensors[name], device="cpu") for name in names}
            dcp.load({"app": {"model": state}}, storage_reader=reader, no_dist=True)  # it casts what it reads
            save_file(state, temporary / filename, metadata={"format": "pt"})
        if files.is_sharded:
            index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        config.dtype, config.architectures = dtype, [type(model).__name__]
        vars(config).pop("quantization_config", None)  # of the model's source; these weights are plain
        config.to_json_file(temporary / "config.json")
        os.rename(temporary, folder)


# ---- 9 training ------------------------------------------------------------------------------------------------------


def build_optimizer(model: nn.Module, weight_decay: float) -> Optimizer:
    """AdamW with decay on matrices only. Its rate is set before each step."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay}
    vectors = {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)  # betas as of GPT-3, arXiv 2005.14165


def learning_rate_of_step(step: int, peak: float, warmup_steps: int, num_train_steps: int) -> float:
    """Linear warm-up from 0, then a cosine to 0: a function of the step (from 0), so there is no state to save."""
    if step < warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / max(1, num_train_steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


@torch.no_grad()
def sum_over_tp(parameters: Iterable[nn.Parameter], tp_mesh: DeviceMesh) -> None:
    """Add up the gradients of parameters that tp does not cut, norms say: each rank has that of its own tokens and
    columns. One collective for all of them, in float32, after FSDP has reduced gradients over dp x cp."""
    grads = [p.grad.to_local() for p in parameters if p.grad is not None and p.placements[-1].is_replicate()]
    if not grads:  # of a model whose norms have no weights
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=tp_mesh.get_group())
    parts = flat.split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads)])


@torch.no_grad()
def reduce_loss_and_norm(loss_sum: Tensor, model: nn.Module, mesh: DeviceMesh | None, stop: bool = False) -> Tensor:
    """The loss summed over all ranks, the gradient's norm, and how many ranks want to stop: (3,) float64, the same on
    all ranks. A gradient that several ranks hold counts once. One collective."""
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in model.parameters():
        grad, copies = parameter.grad, 1
        if isinstance(grad, DTensor):
            axes = zip(grad.device_mesh.shape, grad.placements)
            copies, grad = math.prod(size for size, placement in axes if placement.is_replicate()), grad.to_local()
        if grad is not None:
            # in pieces, each of which the CPU copies to float64; in float32 it is off by 1e-3 at 28 M elements
            by_copies.setdefault(copies, []).extend(grad.flatten().split(2**18))
    # private, but torch's public norms have no dtype for lists
    norms = {copies: torch._foreach_norm(grads, 2, dtype=torch.float64) for copies, grads in by_copies.items()}
    square = sum((torch.stack(parts).square().sum() / copies for copies, parts in norms.items()), 0 * loss_sum.double())
    tp = mesh["tp"].size() if mesh is not None else 1
    totals = torch.stack([loss_sum.double() / tp, square, torch.full_like(square, stop)])
    if mesh is not None:
        dist.all_reduce(totals)
    return torch.stack([totals[0], totals[1].sqrt(), totals[2]])


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: list[dict[str, Tensor]],
    mesh: DeviceMesh | None,
    max_grad_norm: float,
    wants_stop: Callable[[], bool] = lambda: False,
) -> Tensor:
    """One optimizer step. Returns (3,) on the device, the same in all meshes: the loss over all labels of the step, the
    norm before clipping, and on how many ranks `wants_stop`. Nothing in it makes the CPU wait for the GPU."""
    tp, data_ranks = (mesh["tp"].size(), mesh.size() // mesh["tp"].size()) if mesh is not None else (1, 1)
    num_labels = torch.stack([(batch["labels"] != -100).sum() for batch in micro_batches]).sum()
    if mesh is not None:
        dist.all_reduce(num_labels)
        num_labels //= tp  # tp ranks hold the same labels
    num_labels = num_labels.clamp(min=1)
    # the loss is the mean over all labels of the step, which need not lie evenly on the ranks: their sum, over their
    # number, times the ranks of dp x cp, because FSDP averages over these
    scale, loss_sum = data_ranks / num_labels, torch.zeros((), device=num_labels.device)
    config, counts = model.config.get_text_config(), count_experts(model, micro_batches, mesh)
    num_tokens = data_ranks * sum(batch["labels"].numel() for batch in micro_batches)
    for i, batch in enumerate(micro_batches):
        if mesh is not None and "dp_replicate" in mesh.mesh_dim_names:  # copies sum their gradients once a step
            model.set_requires_all_reduce(i == len(micro_batches) - 1)
        loss, router_logits = forward_loss(model, batch)
        loss_sum += loss.detach()
        if counts is not None:
            extra = load_balancing_loss(router_logits, counts, num_tokens, config) * num_labels
            loss_sum += extra.detach()
            loss = loss + extra / tp  # all of tp compute it, and `sum_over_tp` adds their gradients up
        (loss * scale).backward()
    if tp > 1:
        sum_over_tp(model.parameters(), mesh["tp"])
    totals = reduce_loss_and_norm(loss_sum, model, mesh, wants_stop())
    totals[0] /= num_labels
    # also where nothing is to be clipped: to look at the norm first would make the CPU wait
    nn.utils.clip_grads_with_norm_(model.parameters(), max_grad_norm, totals[1].float())
    optimizer.step()
    optimizer.zero_grad()
    return totals


def check_first_step(model: PreTrainedModel, mesh: DeviceMesh | None) -> None:
    """Refuse a model whose layers did not all run the attention over the whole sequence, or that is not all cut."""
    family, layers, attention = model.config.model_type, find_decoder_layers(model), model.attention_function
    calls = sum(any(hasattr(m, "has_called") for m in layer.modules()) for layer in layers)
    is_cut = mesh is not None and mesh["cp"].size() > 1
    if (is_cut or (attention is not None and attention.positions is not None)) and calls < len(layers):
        # such a layer sees only a part of the sequence, or other documents
        fail(f"{calls} of {len(layers)} layers of {family} ran context-parallel attention, not all")
    axes = {"fsdp", "tp"} if mesh is not None and mesh["tp"].size() > 1 else {"fsdp"}
    for name, parameter in model.named_parameters() if mesh is not None else []:
        if not isinstance(parameter, DTensor) or {*parameter.device_mesh.mesh_dim_names} - {"dp_replicate"} != axes:
            fail(f"{name} of {family} is not cut over the whole mesh: do not trust its gradient")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokens: np.ndarray,
    held_out: range,
    seq_len: int,
    batch_size: int,
    shard: Callable,
    mesh: DeviceMesh | None,
) -> float:
    """The mean cross entropy over all labels of the held-out sequences, the same on all ranks and in all meshes."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)  # loss, labels
    for start in range(0, len(held_out), batch_size):
        indices = [held_out[min(start + i, len(held_out) - 1)] for i in range(batch_size)]
        inputs, labels = read_sequences(tokens, indices, seq_len)
        labels[len(held_out) - start :] = -100  # the last batch is filled up with rows that have no labels
        for batch in shard(inputs, labels):
            totals += torch.stack([forward_loss(model, batch)[0].double(), (batch["labels"] != -100).sum().double()])
    if mesh is not None:
        dist.all_reduce(totals)
    model.train()
    return (totals[0] / totals[1]).item()


@torch.no_grad()
def generate_text(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    mesh: DeviceMesh | None,
    *,
    prompt: str,
    num_tokens: int,
    seq_len: int,
    temperature: float = 0.7,
    seed: int = 0,
    max_seconds: float = 10.0,
) -> str:
    """Continue a prompt in the mesh itself, the same in every mesh. A collective.

    Each rank scores the tokens whose logits it has, and the highest score of all is taken: logits over temperature plus
    Gumbel noise, whose maximum is a sample of the softmax (arXiv 1611.01144, section 2). There is no cache: a token
    takes a forward over all of `seq_len`, so it ends where a rank has spent `max_seconds`.
    """
    model.eval()
    device, vocab_size = next(model.parameters()).device, model.config.get_text_config().vocab_size
    dp, tp, tp_rank = (
        (mesh["dp"].size(), mesh["tp"].size(), mesh.get_local_rank("tp")) if mesh is not None else (1, 1, 0)
    )
    first = tp_rank * rows_of_rank(vocab_size, tp)  # of the tokens whose logits this rank has
    ids, random = tokenizer(prompt)["input_ids"], torch.Generator().manual_seed(seed)
    deadline = time.perf_counter() + max_seconds
    for place in range(len(ids) - 1, min(len(ids) + num_tokens, seq_len) - 1):
        row = torch.tensor(ids + [0] * (seq_len - len(ids)))  # no token sees those after it
        rows = row.expand(dp, -1)  # all of dp do the same
        [batch] = shard_batch(rows, rows, mesh, 1, device)
        logits = model(**model_inputs(model, batch)).logits[0]  # (L, V/tp)
        noise = -torch.empty(vocab_size).exponential_(generator=random).log()
        noise[len(tokenizer) :] = -math.inf  # rows that only fill up the vocabulary
        best = -math.inf, 0
        if (here := batch["position_ids"][0] == place).any():  # on the cp rank that has this token
            scores = logits[here][0].float().cpu() / temperature
            scores += noise[first : first + len(scores)]
            best = scores.max().item(), first + scores.argmax().item()
        found = gather_objects((*best, time.perf_counter() > deadline))
        ids.append(max(found)[1])
        if any(is_late for _, _, is_late in found):
            break
    model.train()
    return tokenizer.decode(ids)


# ---- what a run prints and logs --------------------------------------------------------------------------------------


def describe_run(args: Config, model: nn.Module, num_tokens: int, trained: int, held_out: range) -> None:
    """Print what the flags come to: mesh, model, step, data and schedule."""
    local = [local_part(parameter) for parameter in model.parameters()]
    mebibytes = sum(4 * 4 * p.numel() for p in local) / 2**20  # 4 bytes x (weight, gradient, two moments)
    step_tokens, dp = args.global_batch_size * args.seq_len, args.dp_size
    micro_batches = args.global_batch_size // dp // args.micro_batch_size
    epochs = args.num_train_steps * args.global_batch_size / trained
    size, flops = sum(p.numel() for p in model.parameters()), flops_per_token(model, args.seq_len)
    name = f"{model.config.model_type}, {len(find_decoder_layers(model))} layers, {size:,} parameters"
    batch = f"micro-batches: {micro_batches} of {args.micro_batch_size} x {args.seq_len // args.cp_size}"
    total = f"{args.num_train_steps * step_tokens:,} tokens, {epochs:.2g} epochs"
    log(f"mesh: dp {dp} x cp {args.cp_size} x tp {args.tp_size}, ranks: {get_world_size()} on {local[0].device.type}")
    log(f"model: {name}, {flops:.3g} flop a token, {mebibytes:,.1f} MiB a rank in training")
    log(f"step: {args.global_batch_size} x {args.seq_len} = {step_tokens:,} tokens; of a rank {batch}")
    log(f"data: {num_tokens:,} tokens, {trained:,} sequences to train on, {len(held_out)} held out")
    log(f"run: {args.num_train_steps:,} steps, {total}; lr up to {args.learning_rate:g} in {args.warmup_steps} steps")


# what a GPU can do in bfloat16, FLOP/s without sparsity, from the makers' data sheets
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "MI300X": 1307e12}


def flops_per_token(model: PreTrainedModel, seq_len: int) -> float:
    """Forward and backward for a token: PaLM, arXiv 2204.02311, appendix B, with half of the attention for causality.

    6 for each parameter that a token meets (of the experts those it takes, of the embedding none), and in each layer
    6 x (heads x head size) x seq_len. What is computed twice to save memory does not count.
    """
    config = model.config.get_text_config()
    hidden = model.get_input_embeddings().embedding_dim
    try:
        heads = getattr(config, "num_attention_heads", 0)
        width = heads * (getattr(config, "head_dim", None) or hidden // max(1, heads))
    except RuntimeError:  # of Transformers: they differ between layers
        width = hidden
    share = getattr(config, "num_experts_per_tok", None) or 1
    met = 0 if model.get_output_embeddings() is None else model.get_output_embeddings().weight.numel()
    for layer in find_decoder_layers(model):
        for module in layer.modules():
            size = sum(parameter.numel() for parameter in module.parameters(False))
            # not is_experts: tp has divided num_experts
            stacked = [p for p in module.parameters(False) if p.ndim == 3] if hasattr(module, "num_experts") else []
            met += size * share / stacked[0].shape[0] if stacked else size
        met += width * seq_len
    return 6 * met


def measure_speed(tokens: int, seconds: float, flops: float, device: torch.device) -> dict[str, float]:
    """Tokens/s, of all ranks and of one; on CUDA its peak memory, and on known GPUs the share of `PEAK_FLOPS` in use.

    `flops` are those of a token, see `flops_per_token`.
    """
    speed = {"tokens_per_second": tokens / seconds, "tokens_per_second_per_rank": tokens / seconds / get_world_size()}
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for peak in [peak for gpu, peak in PEAK_FLOPS.items() if gpu in name]:
            speed["mfu"] = speed["tokens_per_second_per_rank"] * flops / peak
        speed["peak_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return speed


def start_profiler(folder: Path, device: torch.device) -> torch.profiler.profile:
    """Call `.step()` after each step: the third to the fifth go into trace_rank<r>.json, for ui.perfetto.dev, and on
    CUDA what was allocated into memory_rank<r>.pickle, for pytorch.org/memory_viz."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=200_000)  # private, but it is the documented way

    def write(profiler: torch.profiler.profile) -> None:
        folder.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"trace_rank{get_rank()}.json"))
        if device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(folder / f"memory_rank{get_rank()}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1), on_trace_ready=write
    )
    profiler.start()
    return profiler


def open_metrics(output_dir: Path, run: str) -> Any:
    """metrics.jsonl, opened to append; what another run has left there is first renamed. Rank 0 only."""
    path = output_dir / "metrics.jsonl"
    if path.exists() and f'"run": "{run}"' not in path.open(errors="replace").readline():
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
        os.rename(path, path.with_name(f"metrics_{stamp}_{uuid.uuid4().hex[:4]}.jsonl"))
    file = path.open("a+")
    if (size := path.stat().st_size) and os.pread(file.fileno(), 1, size - 1) != b"\n":
        file.write("\n")  # after a line that a full disk has cut
    return file


def start_wandb(mode: str, config: dict[str, Any], run_id: str, output_dir: Path) -> Any:
    """Start or go on with a wandb run, or return None. It never raises, never asks, and is no collective.

    Ranks but the first, for their system metrics, have runs of their own in the same group. wandb's own variables,
    WANDB_PROJECT, WANDB_NAME, WANDB_RUN_GROUP and so on, win.
    """
    mode = (os.environ.get("WANDB_MODE") or mode) if mode == "auto" else mode
    if mode == "disabled":
        return None
    rank = f"-rank{get_rank()}" if get_rank() > 0 else ""
    name = f"{output_dir.resolve().name} {run_id}"
    defaults = {"WANDB_PROJECT": "3D_parallel", "WANDB_NAME": name, "WANDB_RUN_GROUP": name}
    config |= {package: version(package) for package in ("torch", "transformers")}
    try:
        import wandb  # 3 s, and only here

        mode = ("online" if wandb.login(prompt=False, verify=False) else "offline") if mode == "auto" else mode
        project, name, group = (os.environ.get(variable) or value for variable, value in defaults.items())
        script = Path(__file__).resolve()  # saved as code with its git commit, wherever the run was started
        code = {"save_code": True, "program_relpath": script.name, "git_root": str(script.parent)}
        settings = wandb.Settings(init_timeout=60, silent=True, **code)
        where = {"project": project, "name": name + rank, "group": group, "id": run_id + rank, "dir": str(output_dir)}
        run = wandb.init(**where, mode=mode, resume="allow", config=config, allow_val_change=True, settings=settings)
        # by our steps and not wandb's, which go up only: after a crash some steps are logged once more
        run.define_metric("*", step_metric="step")
        return run
    except Exception as error:
        log(f"wandb is off: {reason_of(error)}")
        return None


def finish_wandb(run: Any, summary: dict[str, Any], artifact: Path | None) -> None:
    """End a run of wandb with this summary, and with a checkpoint as its artifact, if one is given.

    It may take long, so no rank must wait for this one any more.
    """
    with contextlib.suppress(Exception):  # a failing wandb never stops a run
        run.summary.update(summary)
        if artifact is not None:
            run.log_artifact(str(artifact), name=f"checkpoint-{run.id}", type="model")
        run.finish()


def log_step(entry: dict[str, Any], metrics: TextIO, wandb_run: Any) -> None:
    """Append a step to metrics.jsonl, and send it to wandb. Neither ever stops a run. Rank 0 only."""
    with contextlib.suppress(OSError):  # a full disk ends the run at the next save, if it is still full then
        print(json.dumps(entry), file=metrics, flush=True)
    if wandb_run is not None:
        with contextlib.suppress(Exception):
            wandb_run.log(entry)


def print_summary(summary: dict[str, Any]) -> None:
    """What this process has trained."""
    used = f", MFU {summary['mfu']:.1%}" if "mfu" in summary else ""
    # without a GPU that of the process, which Linux gives in KiB
    gib = summary.get("peak_memory_gib") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    spent = (
        "{tokens_trained:,} tokens in {seconds:,.0f} s with evaluations and saves, {tokens_per_second:,.0f} a second"
    )
    log(f"{spent.format(**summary)}{used}, peak memory of rank 0 {gib:.2f} GiB")
    log("loss {final_loss:.4f}, at best {best_loss:.4f} in step {best_step}".format(**summary))


def resume_command(args: Config, argv: list[str], path: Path | None, num_train_steps: int) -> str:
    """The command that goes on from this run's last checkpoint, `path`, up to `num_train_steps`."""
    replaced = r" --(resume|init[_-]from|num[_-]train[_-]steps|[tdc]p[_-]size)[ =]('[^']*'|\S+)"
    kept = re.sub(replaced, "", " " + shlex.join(argv)).rstrip()
    if not (launcher := os.environ.get("LAUNCHED_AS")):
        processes, script = os.environ.get("LOCAL_WORLD_SIZE"), shlex.quote(sys.argv[0])
        launcher = f"torchrun --standalone --nproc_per_node {processes} {script}" if processes else f"python {script}"
        launcher += f" --tp_size {args.tp_size} --dp_size {args.dp_size} --cp_size {args.cp_size}"
    resume = "auto" if path is None or path.parent == Path(args.output_dir) else shlex.quote(str(path))
    return f"{launcher}{kept} --resume {resume} --num_train_steps {num_train_steps}"


def catch_signals() -> list[int]:
    """From here on SIGTERM and SIGUSR1 only add themselves to this list."""
    caught: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda signum, frame: caught.append(signum))
    return caught


def train(
    model: PreTrainedModel,
    optimizer: Optimizer,
    tokens: np.ndarray,
    num_sequences: int,
    held_out: range,
    args: Config,
    mesh: DeviceMesh | None,
    shard: Callable,
    train_state: dict[str, Any],
    save: Callable[..., Future],
    metrics: TextIO | None,
    wandb_run: Any,
) -> tuple[Path | None, dict[str, Any]]:
    """Train to the last step or a signal, and keep `train_state` up to date.

    Returns the last checkpoint's path, if there is one of this process, and a summary, empty if there was no step.
    """
    is_main, device = get_rank() == 0, next(model.parameters()).device
    profiler = start_profiler(Path(args.output_dir) / "profile", device) if args.profile else None
    flops, step_tokens = flops_per_token(model, args.seq_len), args.global_batch_size * args.seq_len
    first_step, mesh_name = train_state["step"] + 1, "tp{tp}_dp{dp}_cp{cp}".format(**train_state)
    signals = catch_signals()  # the first asks for a save and an end after the step, more of them change nothing
    saving: Future | None = None  # the last save, perhaps still in flight

    def load_batch(step: int) -> list[dict[str, Tensor]]:
        indices = sequences_of_step(num_sequences, args.seed, step - 1, args.global_batch_size)
        return shard(*read_sequences(tokens, indices, args.seq_len))

    def wants_stop() -> bool:  # a signal, or a save that has failed
        return bool(signals) or (saving is not None and saving.done() and saving.exception() is not None)

    loader = ThreadPoolExecutor(1)  # makes the batch of the next step ready during this one
    batch = loader.submit(load_batch, first_step)
    best, begun = (math.inf, 0), time.perf_counter()  # the lowest loss and its step
    bar = tqdm(total=args.num_train_steps, initial=first_step - 1, disable=not is_main, unit="step")
    for step in range(first_step, args.num_train_steps + 1):
        # its batch, and the next one in the background
        started, micro_batches = time.perf_counter(), batch.result()
        batch = loader.submit(load_batch, step + 1)

        # forward, backward, update; dropout has other masks on each rank, and in a resumed run the same
        torch.manual_seed(args.seed + 100_003 * step + get_rank())  # no two ranks and steps have one
        lr = learning_rate_of_step(step - 1, args.learning_rate, args.warmup_steps, args.num_train_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        totals = train_step(model, optimizer, micro_batches, mesh, args.max_grad_norm, wants_stop)
        loss, grad_norm, stop = totals.tolist()  # the one CPU-GPU sync of a step
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            bar.close()
            fail(f"step {step} has loss {loss} and gradient norm {grad_norm}: resume with a lower --learning_rate")
        if step == first_step:
            check_first_step(model, mesh)
        train_state |= {"step": step, "tokens": train_state["tokens"] + step_tokens}
        best = min(best, (loss, step))

        # what it was like
        entry = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": train_state["tokens"]}
        entry |= measure_speed(step_tokens, time.perf_counter() - started, flops, device)
        entry |= {"run": train_state["run"], "mesh": mesh_name, "first_step": first_step}  # tells where it was resumed
        if args.eval_every and step % args.eval_every == 0:
            sizes = args.seq_len, args.global_batch_size
            entry["eval_loss"] = evaluate(model, tokens, held_out, *sizes, shard, mesh)
            entry["eval_perplexity"] = math.exp(min(entry["eval_loss"], 700))  # more overflows
        if is_main:
            log_step(entry, metrics, wandb_run)
            shown = "loss {loss:.4f}, grad norm {grad_norm:.3f}, lr {lr:.2e}, {tokens_per_second:.0f} tok/s"
            bar.set_postfix_str(shown.format(**entry), refresh=False)
            bar.update()

        # save, or stop
        stop = stop or step == args.num_train_steps
        if stop or (args.save_every and step % args.save_every == 0):
            if saving is not None:
                saving.result()  # one save at a time; what broke it, the SystemExit of `fail`, leaves here on all ranks
            saving = save(about=train_state)
        if profiler is not None:
            profiler.step()
        if stop:
            break
    loader.shutdown()
    if profiler is not None:
        profiler.stop()
    path = saving.result() if saving is not None else None
    bar.close()

    if best[1] == 0:
        return path, {}
    seconds, trained = time.perf_counter() - begun, (train_state["step"] - first_step + 1) * step_tokens
    summary = {"final_loss": loss, "best_loss": best[0], "best_step": best[1], "tokens_trained": trained}
    return path, {**summary, "seconds": seconds, **measure_speed(trained, seconds, flops, device)}


def end_run(
    args: Config,
    argv: list[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    mesh: DeviceMesh | None,
    step: int,
    path: Path | None,
    summary: dict[str, Any],
) -> None:
    """Say what was trained, what the tiny model learned and how to go on; leave the process group. A collective."""
    last, finished = args.num_train_steps, step >= args.num_train_steps
    if summary:
        print_summary(summary)
    if args.model_name == "tiny" and finished and step >= 100:  # before, it writes noise
        text = generate_text(model, tokenizer, mesh, prompt="def ", num_tokens=200, seq_len=args.seq_len)
        log(f"---- what it writes now\n{text}\n----")
    if not dist.is_initialized():
        folder = Path(args.output_dir) / "model"
        with on_all_ranks(f"the checkpoint is {path}, but {folder} cannot be written"):
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        log(f"Transformers folder: {folder}")
    log(f"{'' if finished else 'stopped by a signal, '}checkpoint of step {step}: {path}")
    log(f"go on with: {resume_command(args, argv, path, 2 * step if finished else last)}")
    if dist.is_initialized():
        dist.destroy_process_group()


# ---- tools without a run: a picture of what was logged, and a plan ---------------------------------------------------


def draw_metrics(folders: list[Path]) -> Path:
    """Draw loss, gradient norm, learning rate and tokens/s of one or several runs to metrics.svg in the first folder.

    A dotted line is where a process went on from a checkpoint, with the mesh where that is another one.
    """
    try:
        import pandas  # comes with datasets
        from matplotlib.figure import Figure  # an extra, which only this needs
    except ImportError:
        fail("--plot needs a package that is not there: pip install matplotlib")
    titles = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate", "tokens_per_second": "tokens/s"}
    figure = Figure(figsize=(12, 7), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flatten()
    colors = itertools.cycle(["#0072b2", "#d55e00", "#009e73", "#cc79a7"])  # which colour-blind people can tell apart
    for folder, color in zip(folders, colors):
        before = {"mesh": "", "first_step": 0}  # what files of an older version lack
        try:
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            entries = [before | json.loads(line) for line in lines if line.endswith("}")]  # else a full disk has cut it
            # of steps that were done again the later entry counts
            table = pandas.DataFrame(entries).drop_duplicates("step", keep="last").set_index("step").sort_index()
            table[[*titles]] = table[[*titles]].astype(float)
        except (OSError, ValueError, TypeError, KeyError) as error:
            fail(f"--plot {folder} has no metrics.jsonl that can be drawn: {reason_of(error)}")
        table[[*titles]].plot(subplots=True, ax=panels, color=color, linewidth=1, legend=False, grid=True)
        name = str(folder).replace("$", r"\$")  # between two of them matplotlib sets formulas
        panels[0].lines[-1].set_label(f"{name}, {table['mesh'].iloc[0]}")
        if "eval_loss" in table:
            held_out = {"style": "o", "fillstyle": "none", "label": f"{name}, held out"}
            table["eval_loss"].dropna().plot(ax=panels[0], color=color, **held_out)
        for step in table.index[table.index == table["first_step"]][1:]:
            for panel in panels:
                panel.axvline(step, color=color, linestyle=":", linewidth=1)
            last_mesh, mesh = table["mesh"].loc[:step].iloc[-2:]
            where = {"xy": (step, 0.98), "xycoords": ("data", "axes fraction"), "va": "top", "ha": "right"}
            panels[0].annotate("" if mesh == last_mesh else mesh, **where, rotation=90, fontsize=8, color=color)
    for panel, title in zip(panels, titles.values()):
        panel.set_title(title, loc="left")
    for panel in panels[2:]:
        panel.set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    path = folders[0] / "metrics.svg"
    try:
        figure.savefig(path)
    except OSError as error:
        fail(f"--plot {folders[0]} cannot be written to: {reason_of(error)}")
    return path


class Meter(TorchDispatchMode):
    """Counts what operators do inside of it: floating-point operations, bytes in memory, and collectives.

    `.flops`, `.peak` (bytes, those of `tensors` included), and `.collectives`: (calls, bytes) by the group's name and
    the operator; the bytes are those of the whole tensor, before it is scattered or after it is gathered.
    """

    def __init__(self, tensors: Iterable[Tensor], is_gloo: bool = False):
        super().__init__()
        self.is_gloo = is_gloo
        self.flops, self.now, self.peak = 0, 0, 0
        self.sizes: dict[int, int] = {}  # of the storages that are alive
        self.collectives: dict[tuple[str, str], tuple[int, int]] = {}
        for tensor in tensors:
            self.hold(tensor)

    def __enter__(self) -> "Meter":
        self.resize = resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:  # how FSDP frees what it has gathered
            if storage._cdata in self.sizes:
                self.count(storage._cdata, size)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resize_and_count
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize
        super().__exit__(*error)

    def count(self, key: int, size: int) -> None:
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key], self.peak = size, max(self.peak, self.now)

    def hold(self, tensor: Tensor) -> None:
        storage = local_part(tensor).untyped_storage()
        if storage._cdata not in self.sizes:
            self.count(storage._cdata, storage.nbytes())
            weakref.finalize(storage, lambda key: self.count(key, 0) or self.sizes.pop(key), storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # it comes back here with the tensors inside
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        values = tree_leaves((result, args, kwargs))
        if func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        elif "flash_attention_for_cpu" in str(func):  # which torch does not count
            shapes = [value.shape for value in args[:4] if isinstance(value, Tensor)]
            self.flops += (sdpa_backward_flop_count if "backward" in str(func) else sdpa_flop_count)(*shapes)
        if "c10d" in func.namespace and "wait" not in str(func):
            groups = [value for value in values if isinstance(value, torch.ScriptObject)]
            names = [ProcessGroup.unbox(group).group_name for group in groups if "ProcessGroup" in str(group._type())]
            names += [value for value in values if isinstance(value, str)]  # else of the reduction, then of the group
            if names:
                key = names[-1], func.overloadpacket.__name__.strip("_")
                calls, size = self.collectives.get(key, (0, 0))
                largest = max(value.nbytes for value in values if isinstance(value, Tensor))
                self.collectives[key] = calls + 1, size + largest
                if self.is_gloo and "reduce_scatter" in key[1]:
                    self.peak = max(self.peak, self.now + largest)  # it works on a copy of its input
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        return result


def dry_run(args: Config, config: PreTrainedConfig) -> None:
    """Print what the first rank of a mesh would need for a step, without the mesh: a process group that moves nothing,
    and tensors that have sizes and no data. On GPUs attention is taken to run in a kernel that makes no mask."""
    warnings.filterwarnings("ignore")
    dist.init_process_group("fake", rank=0, world_size=args.world_size)
    sizes = {"dp": args.dp_size, "cp": args.cp_size, "tp": args.tp_size}
    # one process without a launcher has no mesh, nor FSDP's copies of what it gathers
    mesh = build_mesh("cpu", **sizes, dp_replicate=args.dp_replicate_size) if args.world_size > 1 else None
    options = {"has_documents": args.document_mask, "activation_checkpointing": args.activation_checkpointing}
    model = build_model(config, mesh, "cpu", getattr(torch, args.dtype), seq_len=args.seq_len, **options)
    if args.device != "cpu":
        globals()["build_mask"] = lambda *ranges_and_kind: None
    # two private functions of Transformers: the kernel of experts does not run without data in float32, and positions
    # without data would look like packed documents, for which each layer gets a mask
    transformers.integrations.moe._can_use_grouped_mm = lambda *tensors: False
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialize(model, torch.device("cpu"))
        optimizer = build_optimizer(model, args.weight_decay)
        init_optimizer_state(optimizer)
        tokens = torch.zeros((args.global_batch_size, args.seq_len), dtype=torch.int64)
        options = {"document_end": 1 if args.document_mask else None, "device": torch.device("cpu")}
        batches = shard_batch(tokens, tokens, mesh, args.micro_batch_size, **options)
        moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
        held = [*model.parameters(), *model.buffers(), *moments, *(t for batch in batches for t in batch.values())]
        step = functools.partial(train_step, model, optimizer, batches, mesh, args.max_grad_norm)
        step()  # it also makes tensors of global shapes, by which DTensor finds out what it keeps for later steps
        with Meter(held, is_gloo=args.device == "cpu") as meter:
            step()
        local = [local_part(parameter) for parameter in model.parameters()]
        parameters = sum(tensor.nbytes for tensor in local)
        state = sum(local_part(tensor).nbytes for tensor in moments)
    total = sum(parameter.numel() for parameter in model.parameters())
    whole = 12 * total + 4 * len(local)  # as it lies in a checkpoint: weights, two moments and steps, in float32
    step_tokens, model_flops = args.global_batch_size * args.seq_len, flops_per_token(model, args.seq_len)
    axes: dict[str, str] = {}  # by the name of their group, which several may share
    for axis in (*mesh.mesh_dim_names, "fsdp") if mesh is not None else ():
        group = mesh[axis].get_group().group_name
        axes[group] = f"{axes[group]} {axis}" if group in axes else axis
    gib = 2**30
    sizes_text = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    print(f"one rank of {args.world_size}: {sizes_text}, {config.model_type}, {total:,} parameters, {args.dtype}")
    micro_batch = f"{args.micro_batch_size} x {args.seq_len // args.cp_size}"
    print(f"tokens a step: {step_tokens:,}, in micro-batches of {micro_batch}")
    print(f"memory, GiB: parameters {parameters / gib:.3f}, gradients {parameters / gib:.3f}, ", end="")
    print(f"optimizer {state / gib:.3f}, activations {max(0, meter.peak - 2 * parameters - state) / gib:.3f}")
    verdict = "fits" if meter.peak / gib <= args.device_memory else "does not fit"
    print(f"peak: {meter.peak / gib:.3f} GiB, which {verdict} into --device_memory {args.device_memory:g}")
    print(f"a step: {meter.flops:.4g} flop of this rank, {model_flops * step_tokens:.4g} of the model")
    print(f"checkpoint: {whole / gib:.3f} GiB, {whole / gib / args.world_size:.3f} a rank")
    for (group, operator), (calls, size) in sorted(meter.collectives.items()):
        print(f"{axes.get(group, 'all ranks'):>12} {operator:<28}{calls:>8,} calls {size / gib:>10.4f} GiB a step")
    dist.destroy_process_group()


# ---- 10 main ---------------------------------------------------------------------------------------------------------


def run_tool(args: Config) -> None:
    """What takes no training: a picture of what was logged, a checkpoint turned into a Transformers folder, a plan."""
    if args.plot is not None:
        return print(f"drawn: {draw_metrics([Path(folder) for folder in args.plot.split(',')])}", flush=True)
    if args.export_dir is not None:
        output_dir = Path(args.output_dir)
        none = f"--export_dir needs a checkpoint, and --output_dir {output_dir} has none; --resume PATH names one"
        path, about = find_checkpoint(args.resume, output_dir, 0, args.verify_checksums) or fail(none)
        export_checkpoint(path, Path(args.export_dir), getattr(torch, args.export_dtype))
        return print(f"Transformers folder: {args.export_dir}, of {path}, step {about['step']}", flush=True)
    config = load_config(args.model_name)
    check_family(config.model_type, {"tp": args.tp_size, "dp": args.dp_size, "cp": args.cp_size})
    try:
        dry_run(args, config)
    except Exception as error:
        fail(f"{config.model_type} cannot be planned without data: {reason_of(error)}")


def main(argv: list[str]) -> None:
    """One run, from its flags to its last checkpoint. The numbers are those of the sections."""
    argv = read_flags(argv)  # 1; `resume_command` repeats them
    args = parse_arguments(argv)
    output_dir, dtype = Path(args.output_dir), getattr(torch, args.dtype)
    sizes = {"tp": args.tp_size, "dp": args.dp_size, "cp": args.cp_size}
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # what DCP tells one process
    names = [name for name in (args.model_name, args.dataset_name) if name not in ("tiny", "stdlib")]
    ids_of_the_hub = [
        name for name in names if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) and not Path(name).exists()
    ]
    if ids_of_the_hub:
        go_offline_without_hub()
    if args.plot is not None or args.export_dir is not None or args.dry_run:
        return run_tool(args)

    # 2: process group, mesh, output directory; 8: where the run begins
    device = start_process_group(args.device, args.timeout)
    mesh = None
    if dist.is_initialized():
        mesh = build_mesh(device.type, **sizes, dp_replicate=args.dp_replicate_size, timeout_s=args.timeout)
    _lock = open_output_dir(output_dir)  # held as long as this process lives
    path, origin = find_start(args.resume, output_dir, args.verify_checksums)
    data_flags = "dataset_name dataset_config dataset_split seq_len global_batch_size document_mask seed".split()
    data = {key: getattr(args, key) for key in data_flags}
    if changed := [key for key in data if origin.get(key, data[key]) != data[key]]:
        log(f"the steps to come see other data than an unbroken run: {', '.join(changed)} changed")
    train_state = sizes | data | {key: origin[key] for key in ("run", "step", "tokens")}

    # 3: config, tokenizer; 4, 5: the model, on meta, as the plans cut it
    config = load_config(args.model_name)
    tokenizer = load_tokenizer(args.model_name, config, args.document_mask)
    if origin.get("model_type", config.model_type) != config.model_type:
        fail(f"{path} holds a {origin['model_type']}, but --model_name {args.model_name} is a {config.model_type}")
    source, kind = str(path), "checkpoint"
    if path is None:
        options = {"from_scratch": args.from_scratch, "with_checksums": args.verify_checksums}
        source, kind = find_weights(args.model_name, config, init_from=args.init_from, **options)
    check_family(config.model_type, sizes)
    options = {"activation_checkpointing": args.activation_checkpointing, "compile": args.compile}
    options |= {"seq_len": args.seq_len, "has_documents": args.document_mask}
    model = build_model(config, mesh, device.type, dtype, **options)
    if args.model_name != "tiny":
        with contextlib.suppress(OSError):  # most models have one; it goes along into each checkpoint
            model.generation_config = transformers.GenerationConfig.from_pretrained(args.model_name)

    # 6: data
    slow_group = host_group(timeout_s=2 * 86400)  # while one rank reads, downloads or tokenizes
    options = {"config": args.dataset_config, "split": args.dataset_split}
    tokens = prepare_tokens(args.dataset_name, args.text_column, tokenizer, slow_group, **options)
    num_sequences, held_out = split_data(args.dataset_name, len(tokens), args.seq_len, args.eval_every > 0)

    # 3: storage for this rank's shards, and values: random, trained, or with the optimizer's from a checkpoint
    materialize(model, device)
    optimizer = build_optimizer(model, args.weight_decay)
    if kind == "random":
        send_weights(model, functools.partial(draw_full_model, config, args.seed), "the seed", slow_group)
    elif kind == "checkpoint":
        load_checkpoint(Path(source), model, optimizer if path is not None else None)
    elif not read_safetensors(model, find_folder(source, slow_group)):
        send_weights(model, functools.partial(read_full_model, source, config), source, slow_group)

    # 9: train, save
    metrics, wandb_run = None, None
    with on_all_ranks(f"--output_dir {output_dir} cannot be written"):
        if get_rank() == 0:
            (output_dir / "flags.json").write_text(json.dumps(asdict(args), indent=1))
            metrics = open_metrics(output_dir, train_state["run"])
    if get_rank() == 0 or args.wandb_all_ranks:
        wandb_run = start_wandb(args.wandb_mode, asdict(args), train_state["run"], output_dir)
    describe_run(args, model, len(tokens), num_sequences, held_out)
    done = ", nothing left to train" if train_state["step"] >= args.num_train_steps else ""
    log(f"weights: {source}, step {train_state['step']}{done}")
    background = start_background(device, args.timeout) if args.async_save else None
    options = {"tokenizer": tokenizer, "keep_last": args.keep_last, "background": background}
    save = functools.partial(save_checkpoint, output_dir, model, optimizer, **options)
    document_end = tokenizer.eos_token_id if args.document_mask else None
    options = {"micro_batch_size": args.micro_batch_size, "document_end": document_end, "device": device}
    shard = functools.partial(shard_batch, mesh=mesh, **options)
    logs = {"metrics": metrics, "wandb_run": wandb_run}
    saved, summary = train(
        model, optimizer, tokens, num_sequences, held_out, args, mesh, shard, train_state, save, **logs
    )
    path = saved or path
    end_run(args, argv, model, tokenizer, mesh, train_state["step"], path, summary)
    if wandb_run is not None:
        artifact = path if args.wandb_artifact and metrics is not None else None
        finish_wandb(wandb_run, {**summary, "checkpoint": str(path)}, artifact)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SystemExit:  # a refusal, on all ranks; gloo's threads can abort a process that ends inside of its group
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
