#!/usr/bin/env bash
# Installs what the tests of launching over several hosts need, as far as it is missing:
#   install_launchers.sh PYTHON FOLDER
# ssh, Open MPI, Slurm, munge and ip from Debian's packages (bookworm; Ubuntu's are called the same), which takes root;
# and mpi4py for PYTHON into FOLDER, beside the environment: the stand-in of that name must not meet it there.
# No service is started. Says nothing when all is there; one line on stderr, exit code 1, when something can't be had.
set -euo pipefail

python="$1"
folder="$2"
packages=(iproute2 munge openmpi-bin openssh-client openssh-server slurm-client slurmctld slurmd)
mpi4py='mpi4py>=4.1,<5'

fail() {
  echo "install_launchers.sh: $1" >&2
  exit 1
}

is_installed() {
  [[ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null || true)" == installed ]]
}

install_packages() {
  [[ "$(id -u)" == 0 ]] || fail "expected root, to apt-get install $*; install them, or run the tests as root"
  local policy=/usr/sbin/policy-rc.d log
  if [[ ! -e $policy ]]; then
    # Asked by every package before it starts its service (invoke-rc.d); 101 is no.
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' > $policy
    chmod +x $policy
  fi
  export DEBIAN_FRONTEND=noninteractive
  log="$(apt-get -o DPkg::Lock::Timeout=300 update 2>&1)" || fail "apt-get update failed: ${log##*$'\n'}"
  log="$(apt-get -o DPkg::Lock::Timeout=300 install --yes --no-install-recommends "$@" 2>&1)" ||
    fail "apt-get install $* failed: ${log##*$'\n'}"
}

mkdir -p -- "$(dirname -- "$folder")"
exec 9> "$folder.lock"
flock 9 # another run's packages, and its policy, are not ours to meet halfway

command -v dpkg-query > /dev/null || fail "expected a Debian with ${packages[*]}; there is no dpkg here"
missing=()
for package in "${packages[@]}"; do
  is_installed "$package" || missing+=("$package")
done
if ((${#missing[@]})); then install_packages "${missing[@]}"; fi

if [[ ! -d "$folder" ]]; then
  making="$(mktemp -d -- "$folder.XXXXXX")"
  log="$("$python" -m pip install --quiet --disable-pip-version-check --target "$making" "$mpi4py" 2>&1)" ||
    { rm -rf -- "$making"; fail "pip install $mpi4py failed: ${log##*$'\n'}"; }
  mv -T -- "$making" "$folder"
fi
