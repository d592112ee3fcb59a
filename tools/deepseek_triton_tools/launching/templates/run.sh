#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: launch @@{form} @@{source}
set -euo pipefail

export @@{exports}

# start.sh then runs this command, with a new @@{tag} and key at each start:
#   @@{command}

exec @@{start}
