#!/usr/bin/env bash
@@{stamp}
# Measures @@{title} with trtllm-bench, in @@{image}. DATASET is a file of requests, NUM_REQUESTS is how many of them are
#   sent, CONCURRENCY how many at once. Further arguments go to trtllm-bench throughput: --streaming measures the time to
#   the first token too, --report_json FILE keeps the figures, and --warmup 0 leaves the warm-up out.@@{about_prepare}
set -euo pipefail

#include here.sh

dataset="${DATASET:-$here/dataset.txt}"
#if lengths
if [[ -n "${PREPARE:-}" && -f "$dataset" ]]; then exit; fi
#end
if [[ ! -f "$dataset" ]]; then
#if lengths
  # The command that is printed makes requests of the lengths that were planned for. With MTP, use real requests, because
  #   the number of accepted drafts depends on them.
  places=(
    /app/tensorrt_llm/benchmarks/cpp/prepare_dataset.py
    /app/benchmarks/cpp/prepare_dataset.py
  )
  prepare=""
  for place in "${places[@]}"; do
    if [[ -z "$prepare" && -f "$place" ]]; then prepare="$place"; fi
  done
  if [[ -n "$prepare" ]]; then
    make=(
      python3 "$prepare" --stdout --tokenizer @@{model}
      @@{lengths}
    )
    if [[ -n "${PREPARE:-}" ]]; then
      "${make[@]}" > "$dataset.part"
      mv -- "$dataset.part" "$dataset"
      exit
    fi
    echo "bench.sh: expected a dataset at $dataset, found none; set DATASET, or make one:$(printf ' %q' "${make[@]}") > $(printf %q "$dataset")" >&2
  else
#if prepares_itself
    make=(
      trtllm-bench --model @@{model}
      prepare-dataset --output "$dataset${PREPARE:+.part}"
      @@{lengths}
    )
    if [[ -n "${PREPARE:-}" ]]; then
      "${make[@]}"
      mv -- "$dataset.part" "$dataset"
      exit
    fi
    echo "bench.sh: expected a dataset at $dataset, found none; set DATASET, or make one:$(printf ' %q' "${make[@]}")" >&2
#else
    echo "bench.sh: expected a dataset at $dataset, found none; set DATASET, or run this in @@{image}, which has benchmarks/cpp/prepare_dataset.py" >&2
#end
  fi
#else
  echo "bench.sh: expected a dataset at $dataset, found none; set DATASET to a file of requests" >&2
#end
  exit 2
fi

#include on_every_node.sh

@@{flag_comments}
exec @@{launcher}trtllm-bench @@{model_flags} throughput \
  --dataset "$dataset" \
  --num_requests "${NUM_REQUESTS:-@@{requests}}" \
  --concurrency "${CONCURRENCY:-@@{concurrency}}" \
  @@{flags} \
  --extra_llm_api_options "$@@{folder}/extra-llm-api-config.yml" \
  "$@"
