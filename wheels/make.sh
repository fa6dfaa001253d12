#!/usr/bin/env bash
# Builds one wheel into dist/. `make wheel` calls it.
#
# ACCELERATOR: cpu (default), cuda, cpu-any, cuda-any or generic, explained in wheels/label.py. cpu and
# cuda are built against the torch of PYTHON. FASTCHECK_CUDA_ARCHS: the compute capabilities of a cuda
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
if [[ $accelerator == cuda* ]]; then
  # A folder of its own, so that a CPU build in between does not discard minutes of nvcc.
  options=("-Cbuild-dir=build/$accelerator-{wheel_tag}"
    "-Ccmake.define.FASTCHECK_CUDA_ARCHS=${FASTCHECK_CUDA_ARCHS:-}")
fi
FASTCHECK_ACCELERATOR=$accelerator "$python" -m build --wheel --no-isolation --outdir "$out" \
  "${options[@]}" .
wheel=$(echo "$out"/*.whl)

# The lowest manylinux tag whose systems have the libraries that the extension needs. Torch's libraries
# are not part of the wheel: they are loaded before it, from the installed torch.
if test "$accelerator" != generic; then
  PATH=$(dirname "$(command -v "$python")"):$PATH "$python" -m auditwheel repair \
    --exclude 'libtorch*.so' --exclude 'libc10*.so' --wheel-dir "$out/audited" "$wheel"
  wheel=$(echo "$out"/audited/*.whl)
fi

# Removes earlier builds of this version with other platform tags.
name=$(basename "$wheel")
rm -f "dist/${name%-*}"-*.whl
cp "$wheel" dist/
"$python" -m twine check --strict "dist/$name"
if [[ $name == *-abi3-* ]]; then "$python" -m abi3audit --strict "dist/$name"; fi
echo "dist/$name"
