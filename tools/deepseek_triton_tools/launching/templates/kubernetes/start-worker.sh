set -euo pipefail
#if copies
#include copy-repository.sh
#end
#include ssh.sh
# An ssh session begins with an empty environment. This file gives it the container's, which has mpirun's daemon on PATH.
while IFS= read -r -d '' setting; do
  [[ $setting == *$'\n'* ]] || printf '%s\n' "$setting"
done < <(env -0) > ~/.ssh/environment
umask 022
mkdir -p /run/sshd
# sshd ignores the image's own configuration and the modes of its folders. LogLevel FATAL: otherwise the probe's connections are logged as errors.
exec /usr/sbin/sshd -D -e -f /dev/null -p "$SSH_PORT" -h ~/.ssh/id_ed25519 \
  -o PermitRootLogin=prohibit-password -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no \
  -o StrictModes=no -o PermitUserEnvironment=yes -o PidFile=none -o LogLevel=FATAL
