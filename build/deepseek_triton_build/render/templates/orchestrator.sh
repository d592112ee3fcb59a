#!/usr/bin/env bash
@@{stamp}
# Joins the context and generation servers of @@{title} with trtllm-serve, in @@{image}. It needs no GPU.
#   @@{config} says where the servers are. Further arguments go to trtllm-serve disaggregated.
# The servers are started by themselves: @@{starts}; HOST=0.0.0.0 beside PORT for other machines.
set -euo pipefail

here="$(CDPATH="" cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)"

# START_TIMEOUT: seconds to wait until all servers are ready; a first load takes up to an hour. REQUEST_TIMEOUT: seconds
#   that a request may take. trtllm-serve's own 180 is too short for both.
exec trtllm-serve disaggregated \
  -c "$here/@@{config}" \
  -t "${START_TIMEOUT:-@@{start_timeout}}" \
  -r "${REQUEST_TIMEOUT:-@@{request_timeout}}" \
  "$@"
