#!/usr/bin/env bash
@@{stamp}
# Runs @@{title} once on the prompts of quickstart_advanced.py, in @@{image}. QUICKSTART is the path of that script, when
#   it lies elsewhere. Further arguments go to it.
set -euo pipefail

places=(
  @@{places}
)
quickstart="${QUICKSTART:-}"
for place in "${places[@]}"; do
  if [[ -z "$quickstart" && -f "$place" ]]; then quickstart="$place"; fi
done
if [[ ! -f "$quickstart" ]]; then
  echo "quickstart.sh: expected quickstart_advanced.py of TensorRT-LLM in /app/tensorrt_llm/examples or /app/examples, or at QUICKSTART; found none at ${quickstart:-either}; run this in @@{image}" >&2
  exit 2
fi
echo "quickstart.sh: runs $quickstart" >&2

#include exports.sh

#include on_every_node.sh

@@{flag_comments}
#if left
# Not passed on, because the script has no flag for it: @@{left}.
#end
exec @@{launcher}python3 "$quickstart" \
  --model_dir @@{model} \
  @@{flags} \
  "$@"
