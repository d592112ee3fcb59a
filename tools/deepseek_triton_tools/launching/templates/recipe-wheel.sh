#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: launch recipe @@{kind} @@{source}
# Builds TensorRT-LLM @@{release}'s wheel from source in NVIDIA's development container of that release, and an image that is @@{image} with this wheel in the place of its own. It needs docker, git, git-lfs, and tens of GB of disk; the compilation takes hours. No GPU.
# The container has the compilers and the very PyTorch that the wheel is linked with: one that was built beside another PyTorch does not load.
set -euo pipefail

sources="${SOURCES:-$PWD/TensorRT-LLM}"
image="${IMAGE:-tritonserver-trtllm:@@{release}-wheel}"
# One GPU's kernels compile in a fraction of the time: @@{architectures} is @@{gpu}'s. More are separated by semicolons, as 90-real;100-real.
architectures="${ARCHITECTURES:-@@{architectures}}"
# Processes of the compiler at once; each takes a few GiB of memory.
jobs="${JOBS:-$(nproc)}"

for program in docker git git-lfs; do
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

# --ipc=host and the limits are what TensorRT-LLM's guide runs this container with. safe.directory: the sources are another user's inside of it.
docker run --rm --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 \
  --mount type=bind,source="$sources",target=/code/tensorrt_llm --workdir /code/tensorrt_llm \
  nvcr.io/nvidia/tensorrt-llm/devel:@@{release} \
  bash -c 'git config --global --add safe.directory "*"; exec python3 ./scripts/build_wheel.py --clean "$@"' build \
  --cuda_architectures "$architectures" -j "$jobs"

# The result is build/tensorrt_llm-*.whl. --no-deps: the image's own packages are those of the same release.
docker build --file - --tag "$image" build <<'END'
FROM @@{image}
COPY tensorrt_llm-*.whl /tmp/wheel/
RUN PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-deps --force-reinstall /tmp/wheel/tensorrt_llm-*.whl && rm -r /tmp/wheel
END
echo "built $image: deepseek-triton launch docker DIR --image $image"
