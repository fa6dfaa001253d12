#!/usr/bin/env bash
# The Triton kernels through Ascend's compilers, without an Ascend: `make test-npu-lab`.
#
# triton-ascend lowers them to Linalg (tests/npu_lab.py looks at what comes out), and bishengir-compile
# takes that through its planning of on-chip memory, up to the closed compiler that only CANN has. Where Debian's
# MLIR 19 can be had, the Linalg also runs on the CPU. Environments of its own under build/npu-lab: triton-ascend takes the place of triton. Nothing is
# installed on the system.
#
# Where packages can't be had it says so and succeeds; with FASTCHECK_REQUIRE_NPU_LAB=1 it fails.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
home=$root/build/npu-lab
mkdir -p "$home"

skip() {
  echo "SKIPPED test-npu-lab: $1"
  test "${FASTCHECK_REQUIRE_NPU_LAB:-0}" != 1
  exit
}

# environment NAME PACKAGE...: made once; the packages by themselves, then what they need of others.
environment() {
  local ready=$home/$1 needs=$home/$1.needs
  shift
  printf '%s\n' "$@" > "$needs"
  cmp -s "$needs" "$ready/needs" && return
  rm -rf "$ready"
  "${PYTHON:-python3}" -m venv "$ready" || skip "${PYTHON:-python3} makes no virtual environment"
  "$ready/bin/python" -m pip install --quiet --no-deps "$@" || skip "pip can't install $*"
  cp "$needs" "$ready/needs"
}

test "$(uname -sm)" = "Linux x86_64" || skip "the packages are for Linux on x86-64"
environment bishengir ascendnpu-ir==1.2.0
environment triton-ascend triton-ascend==3.2.0 torch==2.13.0 numpy pybind11 decorator attrs psutil scipy \
  typing-extensions sympy mpmath networkx jinja2 markupsafe fsspec filelock

compiler=$("$home/bishengir/bin/python" -c \
  'import pathlib, sysconfig; print(pathlib.Path(sysconfig.get_path("purelib")) / "ascendnpuir/bin/bishengir-compile")')
test -f "$compiler" || skip "ascendnpu-ir has no bishengir-compile"
chmod +x "$compiler"

# Debian's tools, unpacked beside it all.
tools=$home/mlir/usr/lib/llvm-19/bin
if ! test -x "$tools/mlir-opt" && command -v apt-get dpkg > /dev/null; then
  mkdir -p "$home/debs"
  (cd "$home/debs" && apt-get -qq download mlir-19-tools clang-19 libllvm19 libclang-cpp19 \
    libclang-common-19-dev libclang1-19 libz3-4 libedit2 libbsd0) &&
    for package in "$home"/debs/*.deb; do dpkg -x "$package" "$home/mlir"; done
fi
run=()
if test -x "$tools/mlir-opt"; then
  run=(--mlir "$tools")
else
  echo "SKIPPED running the Linalg on the CPU: no mlir-19-tools and clang-19 from apt-get"
fi

export PYTHONPATH=$root/python:$root/tests PYTHONDONTWRITEBYTECODE=1
export FASTCHECK_NO_EXTENSION=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0
exec "$home/triton-ascend/bin/python" "$root/tests/npu_lab.py" "$compiler" "${run[@]}" "$@"
