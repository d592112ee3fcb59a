#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: launch ssh-setup @@{source}
#
#   bash ssh-setup.sh              does all steps. Run it on @@{first}; it reaches the other nodes by your own ssh
#   bash ssh-setup.sh STEP         does one step, if your own ssh can't reach the other nodes:
#     keys       on the first node: makes the keys; then copy $KEYS to the same path on every node
#     container  on every node: starts the container that the ranks run in
#     sshd       on every node: starts an sshd in that container
#     check      on the first node: tests that ssh reaches every node without a password
#     hello      on the first node: runs @@{ranks} MPI ranks over all nodes, with the mpirun flags of the launch
#     command    prints the command that launches the server
#
# Every step can be repeated: what exists already is kept. CONTAINER= (empty) uses no container; then the nodes themselves need mpirun, Python and mpi4py. Every node needs @@{folder} and the checkpoint at the same path.
# The key pair and the host key are used for this only. All nodes have the same host key, so that none has to be trusted at first sight. Anyone who can read $KEYS can log in at port $PORT.
set -euo pipefail

hosts=(@@{hosts})
port="${PORT:-@@{port}}"
keys="${KEYS:-@@{keys}}"
container="${CONTAINER-@@{container}}"
# Open MPI splits these arguments at blanks (plm_rsh_args). Of an option given twice, ssh takes the first.
ssh_args="-p $port@@{ssh_args} -i $keys/id_ed25519 -o IdentitiesOnly=yes -o UserKnownHostsFile=$keys/known_hosts -o GlobalKnownHostsFile=/dev/null -o StrictHostKeyChecking=yes -o BatchMode=yes -o ConnectTimeout=10"
if [[ ! "$keys" =~ ^/[A-Za-z0-9/._@%+-]+$ ]]; then
  echo "KEYS: expected an absolute path of letters, digits and /._@%+-, got $keys" >&2
  exit 2
fi

inside() {  # run a command where the ranks run
  if [[ -n "$container" ]]; then docker exec "$container" "$@"; else "$@"; fi </dev/null
}

step_keys() {
  mkdir -p -- "$keys"
  chmod 700 "$keys"
  local key
  for key in id_ed25519 ssh_host_ed25519_key; do
    [[ -f "$keys/$key" ]] || ssh-keygen -q -t ed25519 -N '' -C deepseek-triton -f "$keys/$key"
  done
  cp -- "$keys/id_ed25519.pub" "$keys/authorized_keys"
  local host kind key_text
  read -r kind key_text _ < "$keys/ssh_host_ed25519_key.pub"
  for host in "${hosts[@]}"; do
    # known_hosts has the plain name for port 22, and [name]:port for other ports.
    if [[ "$port" != 22 ]]; then host="[$host]:$port"; fi
    printf '%s %s %s\n' "$host" "$kind" "$key_text"
  done > "$keys/known_hosts"
  echo "keys: in $keys"
}

step_container() {
  if [[ -z "$container" ]]; then
    echo "container: none is used"
  elif [[ "$(docker container inspect --format '{{.State.Running}}' "$container" 2>/dev/null)" == true ]]; then
    echo "container: $container is running"
  else
    docker container rm "$container" >/dev/null 2>&1 || true
#if image
    mkdir -p -- @@{folders}
    local rdma=()
    [[ ! -e /dev/infiniband ]] || rdma=(--device /dev/infiniband --cap-add IPC_LOCK)
    local command=(
      #include docker-run.sh
      # The keys, at the same path.
      --detach --mount type=bind,source="$keys",target="$keys",readonly
      # @@{image_why}
      @@{image}
      # The container waits: mpirun starts the ranks in it, by ssh.
      sleep infinity
    )
    "${command[@]}"
#else
    false # the engine was planned for no container
#end
  fi
}

step_sshd() {
  inside bash -c '
    set -euo pipefail
    keys="$1" port="$2"
    if ! [ -x /usr/sbin/sshd ]; then
      apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openssh-server
    fi
    if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
      echo "sshd: port $port is already in use; the step check tells whether this sshd uses it"
      exit 0
    fi
    state=/run/deepseek-triton-sshd
    [ -w /run ] || state="$HOME/.cache/deepseek-triton/sshd"
    mkdir -p "$state"
    chmod 700 "$state"
    [ ! -w /run ] || mkdir -p /run/sshd  # sshd needs it, as the folder of its chroot
    # The keys must belong to the user who runs sshd. Mounted files may belong to another user, so they are copied.
    install -m 600 "$keys/ssh_host_ed25519_key" "$keys/authorized_keys" "$state/"
    # A login does not get the variables that the container was started with. Without PATH, mpirun is not found on the other nodes.
    /usr/sbin/sshd -f /dev/null -p "$port" -E "$state/$port.log" -o PidFile=none \
      -o "HostKey=$state/ssh_host_ed25519_key" -o "AuthorizedKeysFile=$state/authorized_keys" \
      -o "SetEnv=\"PATH=$PATH\" \"LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}\"" \
      -o PermitRootLogin=prohibit-password -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no -o UsePAM=no
    echo "sshd: listens at port $port"
  ' sshd "$keys" "$port"
}

step_check() {
  local host
  for host in "${hosts[@]}"; do
    # shellcheck disable=SC2086
    inside ssh $ssh_args "$host" true || { echo "check: ssh can't reach $host at port $port: does another sshd listen there?" >&2; exit 1; }
    echo "check: $host"
  done
}

step_hello() {
  inside @@{mpirun} python3 -c '@@{hello}'
}

step_command() {
  echo "launch it on @@{first}:"
  local variables=(@@{environment} "SSH_PORT=$port" "SSH_ARGS=${ssh_args#-p "$port" }")
  if [[ -n "$container" ]]; then
    printf '  docker exec'
    printf ' --env %q' "${variables[@]}"
    printf ' %q %q\n' "$container" @@{start}
  else
    printf '  env'
    printf ' %q' "${variables[@]}"
    printf ' %q\n' @@{start}
  fi
}

step_all() {
  step_keys
  local host
  for host in "${hosts[@]:1}"; do
    # This uses your own ssh, which can reach the other nodes already.
    tar -C "$keys" -cf - . | ssh "$host" "mkdir -p -m 700 '$keys' && tar -C '$keys' -xf -"
  done
  for host in "${hosts[@]}"; do
    if [[ "$host" == "${hosts[0]}" ]]; then
      step_container
      step_sshd
    else
      ssh "$host" "KEYS='$keys' PORT='$port' CONTAINER='$container' bash -s -- node" < "$script"
    fi
  done
  step_check
  step_hello
  step_command
}

step_node() {
  step_container
  step_sshd
}

script="${BASH_SOURCE[0]:-}"
step="${1:-all}"
case "$step" in
  keys | container | sshd | check | hello | command | all | node) "step_$step" ;;
  *)
    echo "expected keys, container, sshd, check, hello, command or nothing, got $step" >&2
    exit 2
    ;;
esac
