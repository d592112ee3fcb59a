#!/usr/bin/env bash
@@{stamp}
# Serves the repository that holds this script, @@{where}. A supervisor runs the server: it ends a server that does not
#   become ready in time, restarts a server that was ready and has failed, and leaves no process behind. See
#   tensorrt_llm/1/supervise.py --help.
# Variables change how it runs: HTTP_PORT, GRPC_PORT and METRICS_PORT; HTTP_ADDRESS, GRPC_ADDRESS and METRICS_ADDRESS
#   (the default is every address of the machine); EXIT_TIMEOUT, READY_WITHIN, MAX_RESTARTS and READY_FILE, which are
#   explained below. DRY_RUN=1 prints the command and exits. Arguments go to tritonserver.
set -euo pipefail

repository="$(CDPATH="" cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"
supervise="$repository/tensorrt_llm/1/supervise.py"
#include refuse.sh

#if tensorrt_llm
# The engine's workers are separate processes. This path gives them the work-arounds for known faults of the container.
export PYTHONPATH="$repository/tensorrt_llm/1/deepseek_backend/process/overlay${PYTHONPATH:+:$PYTHONPATH}"
#end

#include exports.sh

#if vllm
# vLLM gives its processes titles by setproctitle, which writes long ones over the environment that the kernel shows,
#   and so over the launch tag. With this variable it does not.
export SPT_NOENV=1
#end

# The launch tag: every process of this launch carries it, and the supervisor ends no process without it. It is eight
#   hexadecimal digits@@{same_in_slurm}.
if [[ -z "${DEEPSEEK_TRITON_LAUNCH:-}" ]]; then
#if for_slurm
  if [[ "${SLURM_STEP_NUM_TASKS:-}" == @@{world_size} ]]; then
    printf -v DEEPSEEK_TRITON_LAUNCH '%08x' "$(((${SLURM_JOB_ID:-0} * 4096 + ${SLURM_STEP_ID:-0}) & 0xffffffff))"
  else
    DEEPSEEK_TRITON_LAUNCH="$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')"
  fi
#else
  DEEPSEEK_TRITON_LAUNCH="$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')"
#end
fi
export DEEPSEEK_TRITON_LAUNCH
if [[ ! "$DEEPSEEK_TRITON_LAUNCH" =~ ^[0-9a-f]{8}$ ]]; then
  refuse "expected eight hexadecimal digits as DEEPSEEK_TRITON_LAUNCH; got '$DEEPSEEK_TRITON_LAUNCH'; unset it, start.sh makes one"
fi

#if tensorrt_llm
#include interface.sh
#end

#if engine_rows
#include engine.sh
#end

# Where the server listens. The supervisor asks over HTTP whether the server is ready.
http_port="${HTTP_PORT:-8000}"
grpc_port="${GRPC_PORT:-8001}"
metrics_port="${METRICS_PORT:-8002}"
http_address="${HTTP_ADDRESS:-0.0.0.0}"
grpc_address="${GRPC_ADDRESS:-0.0.0.0}"
metrics_address="${METRICS_ADDRESS:-$http_address}"
for name in HTTP_PORT GRPC_PORT METRICS_PORT; do
  if [[ ! "${!name:-1}" =~ ^[1-9][0-9]{0,4}$ || "${!name:-1}" -gt 65535 ]]; then
    refuse "expected a port as $name; got '${!name}'"
  fi
done

# EXIT_TIMEOUT: seconds of a stop, of which open requests get all but 5, at least half. Give whatever stops this
#   script (docker stop -t, terminationGracePeriodSeconds) at least 20 seconds more.
exit_timeout="${EXIT_TIMEOUT:-@@{exit_timeout}}"
if [[ ! "$exit_timeout" =~ ^(0|[1-9][0-9]{0,5})$ ]]; then
  refuse "expected whole seconds as EXIT_TIMEOUT; got '$exit_timeout'"
  exit_timeout=0
fi

# READY_WITHIN: seconds within which the server has to be ready; 0 means no limit. @@{why_ready_within}
# MAX_RESTARTS: how often a server that was ready and failed is restarted. @@{why_restarts}
# READY_FILE: path of a file that exists while the server is ready.
if [[ ! "${READY_WITHIN-}" =~ ^([0-9]+([.][0-9]+)?)?$ ]]; then
  refuse "expected seconds as READY_WITHIN; got '$READY_WITHIN'"
fi
if [[ ! "${MAX_RESTARTS-}" =~ ^[0-9]*$ ]]; then
  refuse "expected a whole number as MAX_RESTARTS; got '$MAX_RESTARTS'"
fi
options=(
  --repository "$repository"
#if tensorrt_llm
  --ranks @@{world_size} --ranks-per-node @@{gpus_per_node}
#end
  --http-port "$http_port" --grpc-port "$grpc_port" --metrics-port "$metrics_port"
  --http-address "$http_address"
  --ready-within "${READY_WITHIN:-@@{ready_within}}"
  --exit-timeout "$exit_timeout"
  --max-restarts "${MAX_RESTARTS:-@@{restarts}}"
)
if [[ -n "${READY_FILE:-}" ]]; then options+=(--ready-file "$READY_FILE"); fi

#if own_backend
# config.pbtxt names the backend "@@{own_backend}", which lies in this repository. Triton looks for it in its backend
#   directory, beside the Python backend that it needs.
backends="${TMPDIR:-/tmp}/deepseek_triton_${DEEPSEEK_TRITON_LAUNCH}_backends"
mkdir -p "$backends"
ln -sfn /opt/tritonserver/backends/* "$backends"
ln -sfn "$repository/tensorrt_llm/backends/@@{own_backend}" "$backends/@@{own_backend}"
#end

# By shared-memory, trace and logging any client could map the host's shared memory, have files written and change what
#   is logged. They want a header with this key, which nobody is told, but for those that an argument names, with a key
#   of its own: Triton refuses an endpoint that is named twice.
key="$(od -An -N16 -tx4 /dev/urandom | tr -d ' ')"
closed=()
for option in --http-restricted-api --grpc-restricted-protocol; do
  apis=
  for api in shared-memory trace logging; do
    if [[ ! " $*" =~ " $option"[=\ ][^:]*$api ]]; then apis+=",$api"; fi
  done
  if [[ -n "$apis" ]]; then closed+=("$option=${apis#,}:closed=$key"); fi
done
if [[ " $*" =~ " --http-restricted-api"[=\ ][^:]*health ]]; then
  refuse "expected --http-restricted-api to leave health open, because the supervisor asks without a key"
fi

# The Python backend's shared memory is named after the launch tag, so that what a killed server leaves in /dev/shm can
#   be found and removed.
server=(
  tritonserver --model-repository "$repository"
  --http-address "$http_address" --http-port "$http_port"
  --grpc-address "$grpc_address" --grpc-port "$grpc_port"
  --metrics-address "$metrics_address" --metrics-port "$metrics_port"
  --exit-timeout-secs "$exit_timeout"
  "--backend-config=python,shm-region-prefix-name=deepseek_triton_${DEEPSEEK_TRITON_LAUNCH}_"
#if own_backend
  --backend-directory "$backends"
#end
  "${closed[@]}"
  "$@"
)

# The supervisor needs these settings too, so they are variables and not arguments of tritonserver.
for argument in "$@"; do
  case "${argument%%=*}" in
    --http-port) variable=HTTP_PORT ;;
    --grpc-port) variable=GRPC_PORT ;;
    --metrics-port) variable=METRICS_PORT ;;
    --http-address) variable=HTTP_ADDRESS ;;
    --grpc-address) variable=GRPC_ADDRESS ;;
    --metrics-address) variable=METRICS_ADDRESS ;;
    --exit-timeout-secs) variable=EXIT_TIMEOUT ;;
    --allow-http)
      refuse "expected HTTP to stay on, because the supervisor asks over it; leave $argument out"
      continue
      ;;
    *) continue ;;
  esac
  refuse "expected $variable to be set, because the supervisor needs it too; got the argument $argument"
done

#if tensorrt_llm
# @@{launch} splits its command at spaces, because it uses the variable $task_with_command without quotes
#   (NVIDIA/TensorRT-LLM tensorrt_llm/llmapi/trtllm-llmapi-launch@020c89e6; later versions use an array). For the
#   repository's own path, the guard of rank 0 makes a link without spaces.
for word in "${server[@]}"; do
  if [[ -z "$word" || "$word" =~ [[:space:]] && "$word" != "$repository" ]]; then
    printf -v word '%q' "$word"
    refuse "expected a value without spaces and not empty, because @@{launch} splits words; got $word"
  fi
done

# There is one MPI rank for each GPU. Rank 0 runs tritonserver, and all ranks run the engine's workers, because plain
#   tritonserver can't spawn workers by itself (MPI_ERR_SPAWN). Each rank has a guard, which reports to the supervisor
#   and ends all processes of the rank. --tag-output puts the rank before each line of output.
#if several_nodes
#include hosts_comment.sh
# mpirun's odls_base_sigkill_timeout keeps its default of 1 s. When a rank fails, mpirun waits twice this time before it
#   kills the other ranks, which hold the GPUs of their nodes until then. The supervisor, not mpirun, stops a launch in
#   order.
#else
# odls_base_sigkill_timeout: seconds that mpirun waits before SIGTERM, and again before SIGKILL, when something other
#   than the supervisor tells mpirun to stop, as systemd does with a whole control group. The default is 1 s (Open MPI
#   4: orte/mca/odls/base/odls_base_frame.c and odls_base_default_fns.c). Open MPI 5 ignores it and waits 0.25 s (PRRTE
#   3.0: src/mca/odls/base/odls_base_default_fns.c).
#if for_slurm
# Under Slurm, every rank runs this script: srun --mpi=pmix --ntasks @@{world_size} ./start.sh
#end
#end
#if for_slurm
if [[ "${SLURM_STEP_NUM_TASKS:-}" == @@{world_size} ]]; then
  if [[ -n "${INTERFACE:-}" ]]; then
    export OMPI_MCA_btl_tcp_if_include="${OMPI_MCA_btl_tcp_if_include:-$INTERFACE}"
  fi
  start=(python3 "$supervise" rank -- @@{launch} "${server[@]}")
else
  #include start_ranks.sh
fi
#else
#include start_ranks.sh
#end
#end

#if not tensorrt_llm
#if vllm_nodes
#include vllm_node.sh

if [[ "$node_rank" != 0 ]]; then
  # The GPUs of this node work for node 0; nothing listens here.
  start=(
    python3 "$supervise" rank --
    @@{vllm_serve}
  )
elif [[ "${SLURM_STEP_NUM_TASKS:-}" == @@{nodes} ]]; then
  start=(python3 "$supervise" rank -- "${server[@]}")
else
  #include start_server.sh
fi
#else
#include start_server.sh
#end
#end

if [[ -n "$refused" ]]; then exit 2; fi

# Print one command, to be read or pasted. Each variable, program and long option begins a line.
if [[ "${DRY_RUN:-}" == 1 ]]; then
  quote() {
    if [[ "$1" =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]]; then quoted="$1"; else quoted="${1@Q}"; fi
  }
  printf 'env'
  exported=(@@{exported})
  for name in "${exported[@]}"; do
    if [[ -v $name ]]; then quote "${!name}" && printf ' \\\n  %s=%s' "$name" "$quoted"; fi
  done
  for word in "${start[@]}"; do
    quote "$word"
    case "$word" in
      @@{programs} | --?*) printf ' \\\n  %s' "$quoted" ;;
      *) printf ' %s' "$quoted" ;;
    esac
  done
  echo
  exit 0
fi

# A missing program is told here once. mpirun would first count this machine's cores, and then tell it for each rank.
missing=
for word in "${start[@]}"; do
  case "$word" in
    @@{programs})
      [[ "$missing " == *" $word "* ]] || type -P "$word" > /dev/null || missing+=" $word"
      ;;
  esac
done
if [[ -n "$missing" ]]; then
  echo "start.sh: not on PATH:$missing; run it where its first comment says, as deepseek-triton launch does" >&2
  exit 127
fi

exec "${start[@]}"
