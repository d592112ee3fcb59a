# The keys are copied, because a Secret is mounted as links and ssh refuses keys that others may read. One key pair is both the user key and the host key of every pod in the group, so that no host key has to be trusted at first sight.
umask 077
mkdir -p ~/.ssh
cp -L @@{keys}/id_ed25519 ~/.ssh/id_ed25519
cp -L @@{keys}/id_ed25519.pub ~/.ssh/authorized_keys
read -r type key _ < ~/.ssh/authorized_keys
printf '* %s %s\n' "$type" "$key" > ~/.ssh/known_hosts
# A file and not options, because mpirun's daemons also start ssh, to further nodes.
printf '%s\n' "Port $SSH_PORT" 'IdentityFile ~/.ssh/id_ed25519' 'UserKnownHostsFile ~/.ssh/known_hosts' \
  'StrictHostKeyChecking yes' 'BatchMode yes' 'ConnectTimeout 10' > ~/.ssh/config
