set -euo pipefail
#if copies
#include copy-repository.sh
#end
# start.sh becomes the supervisor, which receives the signals.
exec bash @@{repository}/start.sh "$@"
