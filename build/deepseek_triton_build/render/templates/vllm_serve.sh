#!/usr/bin/env bash
@@{stamp}
# Serves @@{title} with vllm serve, in @@{image}. HOST and PORT set the address it listens on. Further arguments go to
#   vllm serve, and the last of a flag counts: --no-enable-prefix-caching before a benchmark, so that a repeated prompt
#   is computed again.
set -euo pipefail

#include exports.sh

#if vllm_nodes
#include refuse.sh
#include vllm_node.sh
if [[ -n "$refused" ]]; then exit 2; fi
#end

@@{flag_comments}
exec vllm serve @@{model} \
  --host "${HOST:-localhost}" --port "${PORT:-8000}" \
  @@{flags} \
#if vllm_nodes
  "${node[@]}" \
#end
  "$@"
