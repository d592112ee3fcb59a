#if several_nodes
#include refuse.sh

#include interface.sh

#include engine.sh

#include hosts_comment.sh
if [[ "${SLURM_STEP_NUM_TASKS:-}" == @@{world_size} ]]; then
  ranks=()
else
  #include ranks.sh
fi
if [[ -n "$refused" ]]; then exit 2; fi
#end
