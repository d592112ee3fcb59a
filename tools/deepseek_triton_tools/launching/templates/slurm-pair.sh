#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: launch slurm @@{source}
#SBATCH @@{directives}
#
# @@{what} Each server has nodes of its own, and its tritonserver answers on the first of them, port @@{port}. The log begins with the command of a gateway that joins them. Every other line begins with the server that it is from.
# To stop the job in order: scancel --batch --signal=TERM JOBID. Open requests get all but 5 s of @@{exit_timeout_s} s (EXIT_TIMEOUT), at least half, and after @@{kill_s} s the supervisors kill what is left. Plain scancel tells every rank too, but Slurm kills them after KillWait, which is 30 s unless slurm.conf says more.
# --signal: SIGTERM also comes at the end of the job's time, @@{grace_s} s before it or up to 60 s earlier. Only this script gets it, and passes it on. At preemption it comes only with preempt_send_user_signal in SlurmctldParameters.
# --requeue: after a node has failed, the job starts again on other nodes. When a server fails, its supervisor starts it again within the job. When that doesn't help, all servers are stopped and the job ends with the code of the one that failed. --open-mode=append keeps the log.
# @@{memory_why}
#
# Every node needs both repositories and the checkpoint at the same path, and @@{python}, 3.10 or newer, for the supervisors.
set -euo pipefail

export @@{exports}
mapfile -t hosts < <(for nodes in @@{node_lists}; do scontrol show hostnames "$nodes"; done)
if ((${#hosts[@]} < @@{num_nodes})); then
  echo "launch: expected @@{num_nodes} nodes, got ${#hosts[@]}: let sbatch take --nodes from this script" >&2
  exit 2
fi

#if folders
# Mounted folders must exist. Compiled kernels are kept there, for this image and this GPU only.
@@{folders}

#end
# These start a server on the nodes $1 with the tag $2. --overlap: the step of the supervisor shares its node with that of the ranks. --kill-on-bad-exit: when a rank has ended, the others would wait for it for ever. --label: each line of the log has its rank. --cpu-bind=none: otherwise all threads of the engine share the one core of their rank. --export=ALL: passes the variables on even if sbatch was told to export none. --no-container-mount-home: Python packages in the user's home would hide the container's.
context() {
@@{context}
}
generation() {
@@{generation}
}

servers=() tags=() nodes_of=() where_of=() labels=() taken=0 gateway=
start() { # SIDE NODES OPTION WHERE
  local nodes log
  nodes="$(IFS=, && echo "${hosts[*]:taken:$2}")"
  taken=$((taken + $2))
  gateway+=" $3 http://${nodes%%,*}:@@{port}"
  # This tag marks all processes of a server.
  tags+=("$(od -An -N4 -tx4 /dev/urandom | tr -d ' ')")
  nodes_of+=("$nodes")
  where_of+=("$4")
  exec {log}> >(exec sed -u "s/^/$1 ${nodes%%,*}: /")
  labels+=($!)
  "$1" "$nodes" "${tags[-1]}" >&"$log" 2>&1 &
  servers+=($!)
  exec {log}>&-
}
for ((n = 0; n < @@{counts}; n++)); do start @@{starts}; done
echo "launch: for clients start deepseek-triton gateway --triton-model @@{model}$gateway"

stopping='' stops=()
# At SIGTERM srun kills its tasks at once (Slurm 22.05), so each supervisor is told on its own node: again and again, because it may not run yet.
stop() {
  local n
  for n in "${!tags[@]}"; do
    while true; do
      @@{stop} "${tags[n]}" > /dev/null || true
      kill -0 "${servers[n]}" 2> /dev/null || break
      sleep 1
    done &
    stops+=($!)
  done
}
trap 'stopping=yes; stop' TERM
all_run() {
  local server
  for server in "${servers[@]}"; do kill -0 "$server" 2> /dev/null || return 1; done
}
while [[ -z $stopping ]] && all_run; do
  sleep 1 &
  wait $! || true
done
if [[ -z $stopping ]]; then stop; fi
code=0
for server in "${servers[@]}"; do
  while true; do
    ended=0
    wait "$server" || ended=$?
    # A signal interrupts wait.
    if ! kill -0 "$server" 2> /dev/null; then break; fi
  done
  if ((code == 0)); then code=$ended; fi
done
# The last lines of the log are written by then.
wait "${stops[@]}" "${labels[@]}" 2> /dev/null || true
exit "$code"
