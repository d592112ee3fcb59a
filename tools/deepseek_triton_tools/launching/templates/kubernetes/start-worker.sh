set -euo pipefail
@@{copy}@@{ssh}# A session of ssh begins with an empty environment: it gets the container's, where mpirun's daemon is on PATH.
while IFS= read -r -d '' setting; do
  [[ $setting == *$'\n'* ]] || printf '%s\n' "$setting"
done < <(env -0) > ~/.ssh/environment
umask 022
mkdir -p /run/sshd
# Nothing of the image's own configuration, and whatever the modes of its folders. The probe's connections would be logged as errors.
exec /usr/sbin/sshd -D -e -f /dev/null -p "$SSH_PORT" -h ~/.ssh/id_ed25519 \
  -o PermitRootLogin=prohibit-password -o PasswordAuthentication=no -o KbdInteractiveAuthentication=no \
  -o StrictModes=no -o PermitUserEnvironment=yes -o PidFile=none -o LogLevel=FATAL
