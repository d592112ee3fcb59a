#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: launch docker @@{source}
#if has_triton
# To stop it, send SIGTERM (Ctrl-C, docker stop): it finishes open requests and then ends.
#end
set -euo pipefail

# docker refuses to mount a folder that does not exist. Compiled kernels are kept here, for this image and this GPU only.
mkdir -p -- @@{folders}

# A container of ours that has this name and has ended makes room, and its log goes with it. Any other stays, and docker run then says that the name is taken.
ended=$(docker ps --all --quiet --filter name=@@{name_pattern} --filter label=@@{label} --filter status=created --filter status=exited --filter status=dead 2>/dev/null) || true
[[ -z "$ended" ]] || docker rm "$ended" >/dev/null

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
