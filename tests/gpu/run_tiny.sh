#!/bin/bash
# Runs the tiny checkpoint in vLLM and transformers on this machine's GPUs: run_tiny.sh CHECKPOINT QUESTIONS OUTPUT
# Each step has a time limit and a log of its own. A step that fails does not stop the others; the exit status says so.
set -u
if [ $# != 3 ]; then
    echo "usage: $0 CHECKPOINT QUESTIONS OUTPUT" >&2
    exit 2
fi
checkpoint=$1 questions=$2 output=$3
here=$(cd "$(dirname "$0")" && pwd)
gpus=$(nvidia-smi --list-gpus | wc -l)
limit=${STEP_SECONDS:-150}
status=0

export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_WORKER_MULTIPROC_METHOD=spawn PYTHONUNBUFFERED=1
# Neither library is needed for a model of this size, and both compile at the start.
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0
# On a host that others share, a program that uses NVLink's multicast can stop all of them.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0 NVSHMEM_DISABLE_NVLS=1

step() {
    local name=$1 started=$SECONDS
    shift
    if timeout --kill-after=10 "$limit" "$@" > "$output/$name.log" 2>&1; then
        echo "$name: done in $((SECONDS - started)) s"
    else
        status=1
        echo "$name: FAILED after $((SECONDS - started)) s; the end of $name.log:"
        tail -n 15 "$output/$name.log"
    fi
}

answers() { # answers NAME CHECKPOINT OPTION...
    local name=$1 folder=$2
    shift 2
    step "$name" python3 "$here/tiny_answers.py" --checkpoint "$folder" --questions "$questions" \
        --output "$output/$name.json" "$@"
    grep -h tokens_per_second "$output/$name.log"
}

mkdir -p "$output"
bfloat16=$(mktemp -d)/bfloat16
root=$(cd "$here/../.." && pwd)
step bfloat16 env PYTHONPATH="$root/client:$root/build:$root/tools" python3 -m deepseek_triton_tools.cli.main \
    checkpoint quantize "$checkpoint" --to bf16 --output "$bfloat16"
if [ "$gpus" -gt 1 ]; then
    answers "vllm-fp8-tp$gpus" "$checkpoint" --engine vllm --tensor-parallel "$gpus"
    answers "vllm-mtp-fp8-tp$gpus" "$checkpoint" --engine vllm-mtp --tensor-parallel "$gpus"
else
    answers vllm-fp8 "$checkpoint" --engine vllm
    answers vllm-mtp-fp8 "$checkpoint" --engine vllm-mtp
    answers vllm-bfloat16 "$bfloat16" --engine vllm
    answers transformers-bfloat16 "$bfloat16" --engine transformers
    answers transformers-fp8 "$checkpoint" --engine transformers
    for other in vllm-mtp-fp8 vllm-bfloat16 transformers-bfloat16 transformers-fp8; do
        if [ -f "$output/vllm-fp8.json" ] && [ -f "$output/$other.json" ]; then
            echo "== vllm-fp8 against $other"
            python3 "$here/compare_answers.py" "$output/vllm-fp8.json" "$output/$other.json"
        fi
    done
fi
exit $status
