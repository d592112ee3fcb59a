#!/bin/bash
# Runs the live tests of the contract on vLLM on a GPU of this machine, without a network:
#     run_contract.sh WHEELS OUTPUT [PYTEST_OPTION...]
# vLLM, tritonserver, numpy below 2, torch and transformers are there for the python3 on PATH (`. TARGET/activate` of
# unpack.sh). WHEELS has what the tests need beside them (18 MB); a machine with a network fills it:
#     run_contract.sh --download WHEELS
# OUTPUT gets pytest's report. The tests are those of `make test-vllm` in tests/live (tests/support/on_vllm.py).
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
# tritonclient's dependencies, what the client and the tools import, pytest.
packages=(
    anyio attrs brotli certifi charset-normalizer gevent geventhttpclient greenlet grpcio h11 httpcore httpx
    hypothesis idna iniconfig jinja2 markdown-it-py markupsafe mdurl ml-dtypes packaging pluggy protobuf psutil
    pygments 'pytest<9.2' pytest-timeout pytest-xdist execnet pyyaml requests rich shtab sortedcontainers
    typing-extensions urllib3 zope-event zope-interface
)
if [ $# = 2 ] && [ "$1" = --download ]; then
    exec python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        --dest "$2" "${packages[@]}"
fi
if [ $# -lt 2 ]; then
    echo "usage: $0 WHEELS OUTPUT [PYTEST_OPTION...], or $0 --download WHEELS" >&2
    exit 2
fi
wheels=$1 output=$2
shift 2
mkdir -p "$output"
output=$(cd "$output" && pwd)
site=$output/site
# A wheel is a ZIP file; the environment of unpack.sh has no pip.
python3 - "$wheels" "$site" << 'PYTHON'
import pathlib, sys, zipfile

wheels = sorted(pathlib.Path(sys.argv[1]).glob("*.whl"))
if not wheels:
    sys.exit(f"no wheels in {sys.argv[1]}: fill it with --download where there is a network")
for wheel in wheels:
    zipfile.ZipFile(wheel).extractall(sys.argv[2])
PYTHON

mkdir -p "$output/bin"
printf '#!/bin/sh\nexec python3 -m deepseek_triton_tools.cli.main "$@"\n' > "$output/bin/deepseek-triton"
chmod +x "$output/bin/deepseek-triton"

export PATH=$output/bin:$PATH
export PYTHONPATH=$root/client:$root/build:$root/tools:$site HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
# Neither library is needed for a model of this size, and both compile at the start.
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0
# On a host that others share, a program that uses NVLink's multicast can stop all of them.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0 NVSHMEM_DISABLE_NVLS=1
cd "$root"
exec python3 -m pytest -p no:cacheprovider --override-ini filterwarnings=default --engine vllm --with-gpu \
    --junit-xml="$output/report.xml" tests/live "$@"
