set -euo pipefail
@@{copy}# start.sh becomes the supervisor, which receives the signals.
exec bash @@{repository}/start.sh "$@"
