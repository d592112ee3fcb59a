# @@{world_size} GPUs are @@{nodes} nodes of @@{gpus_per_node}, each of which runs this script: NODE_RANK is the node's
#   number, and MASTER_ADDR the name or address at which the others reach node 0, which answers requests. Each node has
#   this folder and the checkpoint at the same path. Under Slurm, srun's number of the process is the node's: srun
#   --nodes @@{nodes} --ntasks-per-node 1 ./@@{script}
if [[ "${SLURM_STEP_NUM_TASKS:-}" == @@{nodes} ]]; then NODE_RANK="${NODE_RANK:-$SLURM_PROCID}"; fi
if [[ ! "${NODE_RANK:-}" =~ ^(0|[1-9][0-9]{0,3})$ || "${NODE_RANK:-}" -ge @@{nodes} ]]; then
  refuse "expected 0 to @@{last_node} as NODE_RANK, the number of this node; got '${NODE_RANK:-}'"
fi
# vLLM listens at MASTER_ADDR, so that a name has to become an address.
read -r MASTER_ADDR _ < <(getent ahosts "${MASTER_ADDR:-}" || echo "${MASTER_ADDR:-}") || true
export MASTER_ADDR
if [[ ! "$MASTER_ADDR" =~ [.:] || "$MASTER_ADDR" == 127.* ]]; then
  refuse "expected as MASTER_ADDR where the other nodes reach node 0, such as 10.0.0.1; got '$MASTER_ADDR'"
fi
# INTERFACE is the network interface over which the nodes reach each other. Set it when NCCL or Gloo chooses a wrong
#   one, such as the bridge of a container.
if [[ -n "${INTERFACE:-}" ]]; then
  export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$INTERFACE}"
  export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$INTERFACE}"
fi
node_rank="${NODE_RANK:-0}"
node=(--node-rank "$node_rank" --master-addr "$MASTER_ADDR")
if [[ "$node_rank" != 0 ]]; then node+=(--headless); fi
