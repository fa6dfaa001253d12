#!/usr/bin/env bash
# Builds one wheel into dist/. `make wheel` calls it.
#
# ACCELERATOR: cpu (default), cuda or generic; wheels/label.py says what they are. The source tree's
# torch is the one it is built against. FASTCHECK_CUDA_ARCHS: the compute capabilities of a cuda
# wheel, by default all that the toolkit has. PYTHON: an environment with torch and what
# requirements-build.txt and requirements-wheel.txt name.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
accelerator=${ACCELERATOR:-cpu}
out=build/wheels/$accelerator
rm -rf "$out"
mkdir -p "$out" dist

options=()
if test "$accelerator" = cuda; then
  # A folder of its own: minutes of nvcc that a build for the CPU in between must not undo.
  options=("-Cbuild-dir=build/cuda-{wheel_tag}"
    "-Ccmake.define.FASTCHECK_CUDA_ARCHS=${FASTCHECK_CUDA_ARCHS:-}")
fi
FASTCHECK_ACCELERATOR=$accelerator "$python" -m build --wheel --no-isolation --outdir "$out" \
  "${options[@]}" .
wheel=$(echo "$out"/*.whl)

# The lowest manylinux tag whose systems have what the extension asks for. Torch's libraries are not
# part of the wheel: they are loaded before it, from the torch that is installed.
if test "$accelerator" != generic; then
  PATH=$(dirname "$(command -v "$python")"):$PATH "$python" -m auditwheel repair \
    --exclude 'libtorch*.so' --exclude 'libc10*.so' --wheel-dir "$out/audited" "$wheel"
  wheel=$(echo "$out"/audited/*.whl)
fi

# Nothing of an earlier build but another platform's tag may lie beside it.
name=$(basename "$wheel")
rm -f "dist/${name%-*}"-*.whl
cp "$wheel" dist/
echo "dist/$name"
