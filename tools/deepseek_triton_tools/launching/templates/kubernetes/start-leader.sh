set -euo pipefail
# The first process of a container ignores SIGTERM unless it sets a trap.
trap 'exit 143' TERM INT
#if copies
#include copy-repository.sh
#end
#include ssh.sh
umask 022
# The pods of a group are NAME-0 (the leader), NAME-0-1, NAME-0-2 and so on, all in one subdomain.
leader=${LWS_LEADER_ADDRESS%%.*} subdomain=${LWS_LEADER_ADDRESS#*.}
hosts=("$LWS_LEADER_ADDRESS")
for ((n = 1; n < LWS_GROUP_SIZE; n++)); do hosts+=("$leader-$n.$subdomain"); done

# Wait until every name resolves, also this pod's own, and every worker answers ssh. Otherwise mpirun fails without naming the pod.
missing=("${hosts[@]}") said=
while true; do
  still=()
  for host in "${missing[@]}"; do
    if [[ $host == "$LWS_LEADER_ADDRESS" ]]; then
      getent hosts "$host" > /dev/null || still+=("$host")
    else
      ssh "$host" true 2> ~/.ssh/"said-$host" || still+=("$host")
    fi
  done
  missing=("${still[@]}")
  if ((${#missing[@]} == 0)); then break; fi
  if ((SECONDS >= @@{gather_s})); then
    reason="no such name"
    # The last line of ssh is the error.
    if [[ -s ~/.ssh/said-${missing[-1]} ]]; then
      while IFS= read -r line; do reason=${line%$'\r'}; done < ~/.ssh/"said-${missing[-1]}"
    fi
    echo "launch: not there after @@{gather_s} s: ${missing[*]} ($reason); kubectl get pods shows why" >&2
    exit 4
  fi
  if [[ $said != "${missing[*]}" ]]; then
    said=${missing[*]}
    echo "launch: waiting for $said, up to @@{gather_s} s" >&2
  fi
  sleep 2
done

IFS=,
export HOSTS="${hosts[*]}"
# start.sh becomes the supervisor, which receives the signals.
exec bash @@{repository}/start.sh "$@"
