#!/bin/bash
# Unpacks what pack.sh made, and makes an environment of it:
#     unpack.sh PARTS TARGET
# PARTS holds all parts. Afterwards `. TARGET/activate` puts the environment's python3 first on PATH. It sees the archive's
# packages before those of the python3 that is on PATH now, from which torch and transformers come.
set -euo pipefail
if [ $# != 2 ]; then
    echo "usage: $0 PARTS TARGET" >&2
    exit 2
fi
parts=$1
mkdir -p "$2"
target=$(cd "$2" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
(cd "$parts" && sha256sum --quiet --check SHA256)
if command -v xz > /dev/null; then
    cat "$parts"/part.* | xz -dc -T0 | tar -C "$target" -xf -
else
    cat "$parts"/part.* | python3 -c 'import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1], filter="fully_trusted")' "$target"
fi
others=$(python3 -c 'import site; print("; ".join(f"site.addsitedir({path!r})" for path in site.getsitepackages()))')
export PYTHONPATH=$root/tools:$root/client:$root/build
libraries=
problem=$(python3 -c 'from deepseek_triton_tools.host.preflight import libpython_problem; print(libpython_problem() or "")')
if [ -z "$problem" ]; then
    python3 -m venv --without-pip "$target/venv"
else
    # tritonserver's stub links Python's shared library, so the Python that was taken along runs everything.
    echo "the machine's own Python will not do ($problem): the one from the archive is used"
    libraries=$target/python/lib
    mkdir -p "$target/python/include"
    ln -sfn "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])')" "$target/python/include/python3.12"
    LD_LIBRARY_PATH=$libraries "$target/python/bin/python3.12" -m venv --without-pip "$target/venv"
fi
ln -sf python3 "$target/venv/bin/python"
{
    # Not as a plain line: then the .pth of CuTe DSL's package would not be read.
    echo "import site; site.addsitedir('$target/site'); $others"
    # These are of versions that need numpy 2, with which the stub hands over wrong values.
    echo 'import sys; sys.modules.update(scipy=None, sklearn=None, pandas=None)'
} > "$target/venv/lib/python3.12/site-packages/engines.pth"
{
    echo "export PATH=$target/venv/bin:\$PATH"
    [ -z "$libraries" ] || echo "export LD_LIBRARY_PATH=$libraries:\${LD_LIBRARY_PATH:-}"
    echo "unset PYTHONPATH"
} > "$target/activate"
. "$target/activate"
python3 -c 'import numpy, vllm, torch; print("numpy", numpy.__version__, "vllm", vllm.__version__, "torch", torch.__version__)'
