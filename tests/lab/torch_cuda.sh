#!/usr/bin/env bash
# Calls of CUDA in a real torch.cuda program with fastcheck, without a device: torch's CUDA wheel and the kernels stand
# on libraries that record who calls what (cuda_stub.py), and torch_cuda_run.py holds the calls of a step to be free of
# waits, allocations and contexts. `make test-torch-cuda` calls it.
#
# Needs nvcc 13, g++ and binutils. Downloads torch's wheel for CUDA (0.5 GB), of the release that fastcheck is installed
# beside. CUDA: where the toolkit lies. With FASTCHECK_REQUIRE_TORCH_CUDA=1 a skip is a failure.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
home=$root/build/torch_cuda
python=${PYTHON:-$root/.venv/bin/python}

skip() {
  echo "SKIPPED torch_cuda: $1"
  test "${FASTCHECK_REQUIRE_TORCH_CUDA:-0}" != 1
  exit
}
for tool in nvcc g++ nm readelf cmake ninja; do command -v "$tool" > /dev/null || skip "no $tool"; done
cuda=${CUDA:-$(dirname "$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')/bin")}

release=$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')
if ! test -e "$home/torch-$release/complete"; then
  rm -rf "$home"
  mkdir -p "$home/torch-$release"
  "$python" -m pip download --quiet --no-deps --dest "$home/wheel" "torch===$release" || skip "pip can't load torch $release"
  "$python" -m zipfile -e "$home"/wheel/torch-*.whl "$home/torch-$release"
  touch "$home/torch-$release/complete"
fi

# The kernels' objects as they are, with the stand-in in place of the runtime that is linked into them, and the installed
# binding: nothing of what it is compiled from depends on CUDA.
cmake -G Ninja -S "$root" -B "$home/kernels" -DPython_EXECUTABLE="$(command -v "$python")" -DFASTCHECK_CUDA=ON \
  -DFASTCHECK_CUDA_ARCHS=90 -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" -DCMAKE_CUDA_FLAGS=-Ofc=max > "$home/cmake.log"
cmake --build "$home/kernels" --target _kernels > "$home/build.log" || { cat "$home/build.log"; exit 1; }
rm -rf "$home/stub" "$home/package"
mkdir "$home/stub" "$home/package"
"$python" "$root/tests/lab/cuda_stub.py" "$cuda/include" "$home/stub" "$home/torch-$release"/torch/lib/*.so
cp -r "$root/python/fastcheck" "$home/package/fastcheck"
cp "$("$python" -c 'from fastcheck import _C; print(_C.__file__)')" "$home/kernels/_build_info.py" "$home/package/fastcheck"
mapfile -t objects < <(find "$home"/kernels/CMakeFiles/{fastcheck_cuda,fastcheck_cpu,_kernels}.dir -name '*.o')
g++ -shared -o "$home/package/fastcheck/_kernels.abi3.so" "${objects[@]}" "$home"/stub/libcudart.so.13 -lpthread -ldl

packages=$("$python" -c 'import sys; print(":".join(p for p in sys.path if p.endswith("packages")))')
export PYTHONPATH=$home/package:$home/torch-$release:$packages LD_LIBRARY_PATH=$home/stub PYTHONWARNINGS=ignore
cd "$home"
# -S: an editable installation would put its own fastcheck in front.
exec "$python" -S "$root/tests/lab/torch_cuda_run.py"
