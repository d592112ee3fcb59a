# In a shell inside a Slurm job, the launcher would take these variables for its rank and the number of ranks.
unset SLURM_PROCID SLURM_NTASKS
#if several_nodes
IFS=', ' read -ra hosts <<< "${HOSTS:-}"
different="$(printf '%s\n' "${hosts[@]}" | sort -u | grep -c . || true)"
if [[ "${#hosts[@]} $different" != "@@{nodes} @@{nodes}" ]]; then
  refuse "expected @@{nodes} different nodes, as in HOSTS=node1,node2; got ${HOSTS:-none}"
fi
printf -v slots '%s:@@{gpus_per_node},' "${hosts[@]}"
ranks=(
  @@{mpirun} "${interface[@]}"
  -H "${slots%,}"
)
ssh="${SSH_PORT:+-p $SSH_PORT}${SSH_ARGS:+ $SSH_ARGS}"
if [[ -n "$ssh" ]]; then ranks+=(-mca plm_rsh_args "${ssh# }"); fi
for name in @@{forwarded} "${engine[@]}"; do
  if [[ -v $name ]]; then ranks+=(-x "$name"); fi
done
ranks+=(-n @@{world_size})
#else
ranks=(
  @@{mpirun} "${interface[@]}"
  -n @@{world_size}
)
#end
