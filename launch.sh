#!/usr/bin/env bash
#SBATCH --ntasks-per-node=1
#SBATCH --signal=USR1@120
# Launches 3D_parallel.py with torchrun: one process a GPU, or CPU processes where there is none.
#
#   ./launch.sh [FILE.json] [flags]                      this machine; python 3D_parallel.py --help has the flags
#   TP_SIZE=2 DP_SIZE=2 CP_SIZE=2 ./launch.sh            the mesh; --tp_size, --dp_size and --cp_size do the same
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 ./launch.sh   the first of two machines; NODE_RANK=1 on the second
#   NNODES=1:4 RDZV_ENDPOINT=node0:29400 ./launch.sh     on each of one to four machines, some of which come and go
#   sbatch --nodes 2 --gpus-per-node 8 launch.sh         Slurm; srun --ntasks-per-node 1 launch.sh does as well
#
#   TP_SIZE, CP_SIZE  1 if not given
#   DP_SIZE           if not given, what tp and cp leave of the GPUs; on CPU, as many as there are machines
#   NNODES            machines: a number (1), or LEAST:MOST, elastic. Such a run starts with those that are there in
#                     30 s. When one is lost or comes, the others go on from the last checkpoint (--save_every) with
#                     another dp: each dp that can be must divide --global_batch_size
#   NODE_RANK, MASTER_ADDR, MASTER_PORT (29500)   of a fixed number of machines; a step of Slurm knows its own
#   RDZV_ENDPOINT     HOST:PORT, the same on all machines, of an elastic run; HOST is the one that must not be lost
#   RDZV_ID           3D_parallel; two runs with one endpoint need two
#   MAX_RESTARTS      how often a machine starts its processes again when one fails, from the last checkpoint of this
#                     launch: 0, elastic 3
#   LAUNCH_ID         names the launch: given again, it goes on from what it has saved, as a requeued job of sbatch does
#   PYTHON            the interpreter (python)
# Other options of torchrun are variables, such as PET_LOCAL_ADDR, or PET_RDZV_CONF=last_call_timeout=5 for those 30 s.
set -euo pipefail
fail() { echo "launch.sh: error: $1" >&2 && exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# in a Slurm job, but in no step of srun: there is one machine, and no signal comes
if [[ -n ${SLURM_JOB_ID:-} ]] && ((${SLURM_STEP_ID:-4294967291} > 4294967000)) && command -v srun >/dev/null; then
    if [[ ! -f $here/3D_parallel.py ]]; then # sbatch runs a copy of this file
        submitted=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p' || true)
        here=$(dirname "${submitted%%launch.sh*}launch.sh")
        [[ -f $here/3D_parallel.py ]] || here=$SLURM_SUBMIT_DIR
        export LAUNCH_ID=${LAUNCH_ID:-${SLURM_CLUSTER_NAME:-slurm}-$SLURM_JOB_ID}
    fi
    nodes=${SLURM_JOB_NUM_NODES:-${SLURM_NNODES:-1}}
    step=("--nodes=$nodes" "--ntasks=$nodes" --cpu-bind=none)
    [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || step+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
    # when the task of one machine ends, the others get two minutes, or, elastic, all the time
    [[ ${NNODES:-} == *:* ]] && step+=(--no-kill --wait=0) || step+=(--wait=120)
    exec srun "${step[@]}" bash "$here/launch.sh" "$@"
fi

# the mesh decides how many processes there are, so its flags are read here too, first those of a file
if [[ ${1:-} == *.json && -f $1 ]]; then
    for axis in TP:tp DP:dp CP:cp; do
        size=$(sed -n "s/.*\"${axis#*:}_size\": *\([0-9]*\).*/\1/p" "$1" | sed -n 1p)
        [[ -z $size ]] || declare "${axis%:*}_SIZE=$size"
    done
fi
previous=""
for word in "$@"; do
    case "$previous $word" in
    *\ --help | *\ -h) sed -n '/^set /q; /^#[!S]/d; s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
    --tp[_-]size\ *) TP_SIZE=$word ;; *\ --tp[_-]size=*) TP_SIZE=${word#*=} ;;
    --dp[_-]size\ *) DP_SIZE=$word ;; *\ --dp[_-]size=*) DP_SIZE=${word#*=} ;;
    --cp[_-]size\ *) CP_SIZE=$word ;; *\ --cp[_-]size=*) CP_SIZE=${word#*=} ;;
    esac
    previous=$word
done
: "${TP_SIZE:=1}" "${CP_SIZE:=1}" "${DP_SIZE:=}"
for size in "$TP_SIZE" "$CP_SIZE" "${DP_SIZE:-1}"; do
    [[ $size =~ ^[1-9][0-9]*$ ]] || fail "mesh size $size is not a whole number from 1 up"
done

# how many machines there are, and where they meet
if [[ -n ${SLURM_JOB_ID:-} && -n ${SLURM_STEP_ID:-} ]]; then
    nodes=${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}} tasks=${SLURM_STEP_NUM_TASKS:-${SLURM_NTASKS:-}}
    [[ ${tasks:-$nodes} == "$nodes" ]] || fail "$tasks tasks on $nodes machines; srun --ntasks-per-node 1 would work"
    [[ ${NNODES:-} == *:* ]] || NNODES=$nodes
    NODE_RANK=${SLURM_NODEID:-0} RDZV_ID=${RDZV_ID:-$SLURM_JOB_ID}
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110} # Slurm's signal comes 120 s before the end
    : "${MASTER_ADDR:=$(scontrol show hostnames "${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}" | sed -n 1p)}"
    : "${MASTER_PORT:=$((15000 + (SLURM_JOB_ID + SLURM_STEP_ID) % 15000))}"
    [[ $NNODES != *:* ]] || : "${RDZV_ENDPOINT:=$MASTER_ADDR:$MASTER_PORT}"
    slurm="sbatch --nodes=$nodes ${SLURM_GPUS_PER_NODE:+--gpus-per-node=$SLURM_GPUS_PER_NODE }"
fi
: "${NNODES:=1}" "${RDZV_ENDPOINT:=}" "${RDZV_ID:=3D_parallel}" "${MASTER_PORT:=29500}"
[[ $NNODES =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] || fail "NNODES=$NNODES is neither a number of machines nor LEAST:MOST"
if [[ -n $RDZV_ENDPOINT ]]; then
    meet=(--nnodes "$NNODES" --rdzv_backend c10d --rdzv_endpoint "$RDZV_ENDPOINT" --rdzv_id "$RDZV_ID")
    again="NNODES=$NNODES ${slurm:-RDZV_ENDPOINT=$RDZV_ENDPOINT RDZV_ID=$RDZV_ID }"
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # the ranks' store is new when they are, without addresses of lost ones
elif [[ $NNODES != 1 ]]; then
    [[ $NNODES != *:* ]] || fail "NNODES=$NNODES needs RDZV_ENDPOINT=HOST:PORT, the same on all machines"
    [[ -n ${NODE_RANK:-} && -n ${MASTER_ADDR:-} ]] || fail "NNODES=$NNODES needs NODE_RANK and MASTER_ADDR"
    meet=(--nnodes "$NNODES" --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT")
    again=${slurm:-"NNODES=$NNODES NODE_RANK=$NODE_RANK MASTER_ADDR=$MASTER_ADDR MASTER_PORT=$MASTER_PORT "}
else
    meet=(--standalone) again=${slurm:-} # a free port, so that two runs can share the machine
fi
[[ $NNODES == *:* ]] && restarts=${MAX_RESTARTS:-3} || restarts=${MAX_RESTARTS:-0}

gpus=0
if [[ " $* " != *" --device cpu "* && " $* " != *" --device=cpu "* ]]; then
    if [[ -n ${CUDA_VISIBLE_DEVICES+x} ]]; then
        gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cv '^-\|^$' || true)
    elif command -v nvidia-smi >/dev/null; then
        gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    fi
fi
if [[ -n $DP_SIZE ]]; then
    [[ $NNODES != *:* ]] || fail "with NNODES=$NNODES the machines that are there decide dp; leave DP_SIZE out"
    processes=$((TP_SIZE * CP_SIZE * DP_SIZE / NNODES))
    ((processes * NNODES == TP_SIZE * CP_SIZE * DP_SIZE)) || fail "NNODES=$NNODES does not divide tp x dp x cp"
elif ((gpus > 0)); then
    processes=$gpus # dp is what tp and cp leave of them
else
    processes=$((TP_SIZE * CP_SIZE))
fi
export TP_SIZE CP_SIZE DP_SIZE

# processes that share the cores of a machine must not each start a thread for every core
if ((gpus == 0)); then
    threads=$(($(nproc 2>/dev/null || sysctl -n hw.ncpu) / processes))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
else
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
fi
# a launch that is started again, by torchrun or by Slurm, goes on from what it has saved
export LAUNCH_ID=${LAUNCH_ID:-$HOSTNAME-$$-$(date +%s)-$RANDOM}
# the script ends with the command that goes on from its checkpoint
LAUNCHED_AS="${PYTHON:+PYTHON=$(printf %q "$PYTHON") }TP_SIZE=$TP_SIZE ${DP_SIZE:+DP_SIZE=$DP_SIZE }CP_SIZE=$CP_SIZE"
LAUNCHED_AS+=" $again$(printf %q "${BASH_SOURCE[0]}")"
export LAUNCHED_AS
echo "launch.sh: $processes process$([[ $processes == 1 ]] || echo es) on this machine, $( ((gpus > 0)) && echo "one a GPU" || echo "on its CPU")"
python=${PYTHON:-python}
command -v "$python" >/dev/null || python=python3
# on SIGTERM and SIGUSR1 the ranks save and end; torchrun hands on what it is told to
exec "$python" -m torch.distributed.run "${meet[@]}" --max_restarts "$restarts" --nproc_per_node "$processes" \
    --signals_to_handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$here/3D_parallel.py" "$@"
