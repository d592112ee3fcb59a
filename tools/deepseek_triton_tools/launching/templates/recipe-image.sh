#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: launch recipe @@{kind} @@{source}
# Builds an image with tritonserver and TensorRT-LLM @@{release} from source, to use instead of @@{image}. It needs docker with buildx, git, git-lfs, make and about 63 GB of disk for the image (TensorRT-LLM's own figure) besides the sources, but no GPU. The compilation takes hours.
# The published image has everything that is built here. This is for your own sources, or for kernels of one GPU only.
set -euo pipefail

sources="${SOURCES:-$PWD/TensorRT-LLM}"
image="${IMAGE:-tritonserver-trtllm:@@{release}-source}"
# The kernels of one GPU compile in a fraction of the time that all take. @@{architectures} is for @@{gpu}; separate several with semicolons, such as 90-real;100-real.
architectures="${ARCHITECTURES:-@@{architectures}}"
# Number of compiler processes at once; each takes a few GiB of memory.
jobs="${JOBS:-$(nproc)}"

for program in docker git git-lfs make; do
  command -v "$program" >/dev/null || { echo "$program is not on PATH: install it" >&2; exit 1; }
done

# The tag of the release, with its submodules and the files that git-lfs keeps (kernels as binaries).
if [[ ! -d "$sources/.git" ]]; then
  git clone --branch v@@{release} --depth 1 https://github.com/NVIDIA/TensorRT-LLM.git "$sources"
fi
cd "$sources"
git lfs install --local
git submodule update --init --recursive
git lfs pull

# The stage tritonrelease holds the release's base, tritonserver with its Python backend, and the wheel. Dockerfile.multi names the base images.
make -C docker tritonrelease_build \
  CUDA_ARCHS="$architectures" \
  BUILD_WHEEL_OPTS="-j $jobs" \
  IMAGE_WITH_TAG="$image"

# Shows the version in the new image.
docker run --rm "$image" python3 -c 'import importlib.metadata as m; print(m.version("tensorrt_llm"))'
echo "built $image: deepseek-triton launch docker DIR --image $image"
