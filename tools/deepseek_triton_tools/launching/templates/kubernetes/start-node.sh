set -euo pipefail
# The first process of a container ignores SIGTERM unless it sets a trap.
trap 'exit 143' TERM INT
#if copies
#include copy-repository.sh
#end
# vLLM's nodes meet at the leader. Its name resolves once its pod has an address. The controller sets LWS_WORKER_INDEX from version 0.6 on.
export NODE_RANK="$LWS_WORKER_INDEX" MASTER_ADDR="$LWS_LEADER_ADDRESS"
until getent ahosts "$MASTER_ADDR" > /dev/null; do sleep 1; done
# start.sh becomes the supervisor, or the guard of a node without a server. Both receive the signals.
exec bash @@{repository}/start.sh "$@"
