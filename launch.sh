#!/usr/bin/env bash
# Launches 3D_parallel.py with torchrun on this machine: on all of its GPUs, or on CPU processes where there is none.
#   ./launch.sh [flags of 3D_parallel.py]
#   TP_SIZE=2 DP_SIZE=2 CP_SIZE=2 ./launch.sh       sets the mesh; --tp_size, --dp_size and --cp_size do the same
# PYTHON names the interpreter (default: python).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python}
command -v "$python" >/dev/null || python=python3

# the mesh decides how many processes there are, so its flags are read here too
previous=""
for word in "$@"; do
    case "$previous $word" in
    --tp[_-]size\ *) TP_SIZE=$word ;; *\ --tp[_-]size=*) TP_SIZE=${word#*=} ;;
    --dp[_-]size\ *) DP_SIZE=$word ;; *\ --dp[_-]size=*) DP_SIZE=${word#*=} ;;
    --cp[_-]size\ *) CP_SIZE=$word ;; *\ --cp[_-]size=*) CP_SIZE=${word#*=} ;;
    esac
    previous=$word
done
: "${TP_SIZE:=1}" "${CP_SIZE:=1}" "${DP_SIZE:=}"
for size in "$TP_SIZE" "$CP_SIZE" "${DP_SIZE:-1}"; do
    [[ $size =~ ^[1-9][0-9]*$ ]] || { echo "launch.sh: error: mesh size $size is not a whole number from 1 up" >&2; exit 2; }
done

gpus=0
if [[ " $* " != *" --device cpu "* && " $* " != *" --device=cpu "* ]]; then
    if [[ -n ${CUDA_VISIBLE_DEVICES+x} ]]; then
        gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cv '^-\|^$' || true)
    elif command -v nvidia-smi >/dev/null; then
        gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    fi
fi
if [[ -n $DP_SIZE ]]; then
    processes=$((TP_SIZE * CP_SIZE * DP_SIZE))
elif ((gpus > 0)); then
    processes=$gpus # dp is what tp and cp leave of them
else
    processes=$((TP_SIZE * CP_SIZE))
fi
export TP_SIZE CP_SIZE DP_SIZE

# processes that share the cores of a machine must not each start a thread for every core
if ((gpus == 0)); then
    cores=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
    threads=$((cores / processes))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
else
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
fi
# the script ends with the command that goes on from its checkpoint
LAUNCHED_AS="${PYTHON:+PYTHON=$(printf %q "$PYTHON") }TP_SIZE=$TP_SIZE ${DP_SIZE:+DP_SIZE=$DP_SIZE }CP_SIZE=$CP_SIZE"
LAUNCHED_AS+=" $(printf %q "${BASH_SOURCE[0]}")"
export LAUNCHED_AS
# on SIGTERM and SIGUSR1 the ranks save and end; torchrun hands on what it is told to
exec "$python" -m torch.distributed.run --standalone --nproc_per_node "$processes" \
    --signals_to_handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$here/3D_parallel.py" "$@"
