#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: launch docker @@{source}
#if has_triton
# To stop it, send SIGTERM (Ctrl-C, docker stop): it finishes open requests and then ends.
#end
set -euo pipefail

# docker refuses to mount a folder that does not exist. Compiled kernels are kept here, for this image and this GPU only.
mkdir -p -- @@{folders}

#if several_nodes
rdma=()
[[ ! -e /dev/infiniband ]] || rdma=(--device /dev/infiniband --cap-add IPC_LOCK)
#end
command=(
  #include docker-run.sh
  # @@{image_why}
  @@{image}
  #if has_triton
  # Process 1 is the supervisor: it receives the signals, and ends all processes that it started.
  #end
  @@{start}
)
exec "${command[@]}"
