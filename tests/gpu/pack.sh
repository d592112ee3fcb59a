#!/bin/bash
# Packs vLLM, tritonserver and what they need for a GPU machine without a network:
#     pack.sh WORK PARTS LIMIT_MB
# WORK/wheels is filled from the package index with wheels.txt, unless it is there. PARTS gets part.00, part.01, ..., each
# at most LIMIT_MB large. PYTHON names a Python 3.12 that has a shared library: it goes along for machines whose own has
# none. The machine itself has CUDA, torch 2.11 and transformers 5.17, with what these need. Takes ten minutes on two cores.
set -euo pipefail
if [ $# != 3 ]; then
    echo "usage: $0 WORK PARTS LIMIT_MB" >&2
    exit 2
fi
mkdir -p "$1" "$2"
work=$(cd "$1" && pwd) parts=$(cd "$2" && pwd) limit=$3
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3.12}
prefix=$("$python" -c 'import sys; print(sys.base_prefix)')
platforms=()
for glibc in 2_39 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do
    platforms+=(--platform "manylinux_${glibc}_x86_64")
done
if [ ! -d "$work/wheels" ]; then
    "$python" -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
        --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -r "$here/wheels.txt" -d "$work/wheels.new"
    mv "$work/wheels.new" "$work/wheels"
fi
tree=$work/tree
if [ -e "$tree" ]; then
    echo "$tree is there already: remove it, or name another WORK" >&2
    exit 1
fi
mkdir -p "$tree/site" "$tree/python/bin" "$tree/python/lib"
"$python" -m pip install -q --no-index --no-deps --no-compile --target "$tree/site" "$work"/wheels/*.whl

cd "$tree/site"
# vLLM: attention for Ampere, the front end in Rust, sources for Blackwell, other Pythons' DeepGEMM.
rm -rf vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/vllm-rs vllm/third_party/fmha_sm100
find vllm/third_party/deep_gemm -name '_C.cpython-3*.so' ! -name '*-312-*' -delete
python3 "$here/hopper_only.py" vllm/_C_stable_libtorch.abi3.so vllm/_moe_C_stable_libtorch.abi3.so \
    vllm/_flashmla_C.abi3.so
# TileLang: sources for AMD, its own, and a second copy of the solver. Its kernels are compiled from the rest.
if [ -d tilelang ]; then
    rm -rf tilelang/3rdparty/composable_kernel
    find tilelang/src tilelang/3rdparty/cutlass -mindepth 1 -maxdepth 1 ! -name tl_templates ! -name include \
        -exec rm -r {} +
    ln -sf libz3.so.4.15 z3/lib/libz3.so
fi
# tritonserver: other Pythons' stubs.
find pytriton/tritonserver/python_backend_stubs -mindepth 1 -maxdepth 1 ! -name 3.12 -exec rm -r {} +
rm -f nvidia_pytriton.libs/libpython3-*
chmod +x pytriton/tritonserver/bin/tritonserver pytriton/tritonserver/python_backend_stubs/3.12/*
rm -rf xgrammar/lib bin include
find numpy zmq jsonschema referencing -type d -name tests -prune -exec rm -r {} +
strip --strip-unneeded xgrammar/libxgrammar_bindings.so

# A Python with a shared library.
cp "$prefix"/lib/libpython3.12.so.1.0 "$tree/python/lib/"
cp -a "$prefix"/lib/python3.12 "$tree/python/lib/"
cp "$prefix"/bin/python3.12 "$tree/python/bin/"
cd "$tree/python/lib/python3.12"
rm -rf test site-packages idlelib tkinter turtledemo ensurepip lib2to3 config-3.12*
mkdir site-packages
find "$tree" -name __pycache__ -prune -exec rm -r {} +
find "$tree/python" -name '*.so*' -type f -exec strip --strip-unneeded {} +
strip "$tree/python/bin/python3.12"

tar -C "$tree" --sort=name --owner=0 --group=0 --mtime=@0 -cf - site python | xz -T2 -9 |
    split -d -b "${limit}MB" - "$parts/part."
cd "$parts"
sha256sum part.* > SHA256
ls -l
