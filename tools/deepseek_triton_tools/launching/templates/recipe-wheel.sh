#!/usr/bin/env bash
# Made by deepseek-triton @@{version}: launch recipe @@{kind} @@{source}
# Builds the wheel of TensorRT-LLM @@{release} from source, in NVIDIA's development container of that release. Then it builds an image that is @@{image} with this wheel instead of its own. It needs docker, git, git-lfs and tens of GB of disk, but no GPU. The compilation takes hours.
# The container has the compilers, and exactly the PyTorch that the wheel is linked with: a wheel that was built with another PyTorch does not load.
set -euo pipefail

sources="${SOURCES:-$PWD/TensorRT-LLM}"
image="${IMAGE:-tritonserver-trtllm:@@{release}-wheel}"
# The kernels of one GPU compile in a fraction of the time that all take. @@{architectures} is for @@{gpu}; separate several with semicolons, such as 90-real;100-real.
architectures="${ARCHITECTURES:-@@{architectures}}"
# Number of compiler processes at once; each takes a few GiB of memory.
jobs="${JOBS:-$(nproc)}"

for program in docker git git-lfs; do
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

# TensorRT-LLM's guide runs this container with --ipc=host and these limits. safe.directory: inside the container the sources belong to another user.
docker run --rm --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 \
  --mount type=bind,source="$sources",target=/code/tensorrt_llm --workdir /code/tensorrt_llm \
  nvcr.io/nvidia/tensorrt-llm/devel:@@{release} \
  bash -c 'git config --global --add safe.directory "*"; exec python3 ./scripts/build_wheel.py --clean "$@"' build \
  --cuda_architectures "$architectures" -j "$jobs"

# The wheel is build/tensorrt_llm-*.whl. --no-deps: the image already has the packages of the same release.
docker build --file - --tag "$image" build <<'END'
FROM @@{image}
COPY tensorrt_llm-*.whl /tmp/wheel/
RUN PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-deps --force-reinstall /tmp/wheel/tensorrt_llm-*.whl && rm -r /tmp/wheel
END
echo "built $image: deepseek-triton launch docker DIR --image $image"
