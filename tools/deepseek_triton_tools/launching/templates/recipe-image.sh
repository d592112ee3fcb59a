#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: launch recipe @@{kind} @@{source}
# Builds an image with tritonserver and TensorRT-LLM @@{release} from source, in place of @@{image}. It needs docker with buildx, git, git-lfs, make and about 63 GB of disk for the image (TensorRT-LLM's own figure) beside the sources; the compilation takes hours. No GPU.
# Nothing is built that the published image does not have: this is for sources of your own, or for one GPU only.
set -euo pipefail

sources="${SOURCES:-$PWD/TensorRT-LLM}"
image="${IMAGE:-tritonserver-trtllm:@@{release}-source}"
# One GPU's kernels compile in a fraction of the time: @@{architectures} is @@{gpu}'s. More are separated by semicolons, as 90-real;100-real.
architectures="${ARCHITECTURES:-@@{architectures}}"
# Processes of the compiler at once; each takes a few GiB of memory.
jobs="${JOBS:-$(nproc)}"

for program in docker git git-lfs make; do
  command -v "$program" >/dev/null || { echo "$program is not on PATH: install it" >&2; exit 1; }
done

# The release's own tag; submodules and the files that git-lfs keeps (kernels as binaries) belong to it.
if [[ ! -d "$sources/.git" ]]; then
  git clone --branch v@@{release} --depth 1 https://github.com/NVIDIA/TensorRT-LLM.git "$sources"
fi
cd "$sources"
git lfs install --local
git submodule update --init --recursive
git lfs pull

# The stage tritonrelease: the release's base, tritonserver with its Python backend, and the wheel. The base images are Dockerfile.multi's own.
make -C docker tritonrelease_build \
  CUDA_ARCHS="$architectures" \
  BUILD_WHEEL_OPTS="-j $jobs" \
  IMAGE_WITH_TAG="$image"

# The result.
docker run --rm "$image" python3 -c 'import importlib.metadata as m; print(m.version("tensorrt_llm"))'
echo "built $image: deepseek-triton launch docker DIR --image $image"
