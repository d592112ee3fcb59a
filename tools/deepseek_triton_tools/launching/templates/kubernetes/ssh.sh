# ssh refuses keys that others may read, and a Secret is mounted as links. One pair is user and host key of every pod of the group, so that nobody's first word is taken for true.
umask 077
mkdir -p ~/.ssh
cp -L @@{keys}/id_ed25519 ~/.ssh/id_ed25519
cp -L @@{keys}/id_ed25519.pub ~/.ssh/authorized_keys
read -r type key _ < ~/.ssh/authorized_keys
printf '* %s %s\n' "$type" "$key" > ~/.ssh/known_hosts
# Also for mpirun's daemons, which reach on to further nodes.
printf '%s\n' "Port $SSH_PORT" 'IdentityFile ~/.ssh/id_ed25519' 'UserKnownHostsFile ~/.ssh/known_hosts' \
  'StrictHostKeyChecking yes' 'BatchMode yes' 'ConnectTimeout 10' > ~/.ssh/config
