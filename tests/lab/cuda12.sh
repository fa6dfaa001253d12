#!/usr/bin/env bash
# The kernels by CUDA 12's compiler, sm_70 among its architectures: no spill (test_build.py), and records equal to the
# CPU's in the interpreter of PTX (test_ptx.py). `make test-cuda12` calls it; about 10 minutes an architecture.
#
# No package index has nvcc 12, but all have what is inside it: NVRTC, and ptxas. nvrtc.py stands on PATH as nvcc.
# Launches and the rest of the host's code are compiled by CUDA 13's nvcc alone.
#
# CUDA12: the release, 12.9 by default. FASTCHECK_CUDA_ARCHS: the architectures. TESTS: which of the tests.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
release=${CUDA12:-12.9}
home=$root/build/cuda12/$release

# With FASTCHECK_REQUIRE_CUDA12=1 a skip is a failure.
if ! test -e "$home/complete"; then
  rm -rf "$home"
  mkdir -p "$home"
  "$python" -m pip install --quiet --no-deps --target "$home/packages" \
    "nvidia-cuda-nvrtc-cu12==$release.*" "nvidia-cuda-nvcc-cu12==$release.*" \
    "nvidia-cuda-runtime-cu12==$release.*" "nvidia-cuda-cccl-cu12==$release.*" || {
    echo "SKIPPED: pip can't install CUDA $release"
    test "${FASTCHECK_REQUIRE_CUDA12:-0}" != 1
    exit
  }
  chmod +x "$home/packages/nvidia/cuda_nvcc/bin/ptxas"
  touch "$home/complete"
fi

# What was compiled is kept by the compiler's path: another nvrtc.py is another compiler.
bin=$home/$(cksum < "$root/tests/lab/nvrtc.py" | tr ' ' -)
mkdir -p "$bin"
printf '#!/bin/sh\nexec "%s" "%s" "$@"\n' "$python" "$root/tests/lab/nvrtc.py" > "$bin/nvcc"
chmod +x "$bin/nvcc"

cd "$root"
export PATH=$bin:$PATH FASTCHECK_CUDA12=$home/packages FASTCHECK_CUDA_ARCHS=${FASTCHECK_CUDA_ARCHS:-70 80 90}
tests=(tests/backends/cuda/test_build.py tests/backends/cuda/test_ptx.py)
exec "$python" -m pytest ${TESTS:-"${tests[@]}"}
