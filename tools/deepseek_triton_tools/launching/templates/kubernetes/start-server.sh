set -euo pipefail
@@{copy}# It becomes the supervisor, which takes the signals.
exec bash @@{repository}/start.sh "$@"
