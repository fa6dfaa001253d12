#!/usr/bin/env bash
# The Triton kernels through Ascend's compilers, without an Ascend: part of `make test-npu-lab`.
#
# triton-ascend lowers them to Linalg (tests/lab/npu_lab.py looks at what comes out), and bishengir-compile
# takes that through its planning of on-chip memory, up to the closed compiler that only CANN has. Where Debian's
# MLIR 19 can be had, the Linalg also runs on the CPU. triton-ascend takes the place of triton, so it has an
# environment of its own.
set -euo pipefail
source "$(dirname "$0")/lab_environment.sh"

environment bishengir ascendnpu-ir==1.2.0
environment triton-ascend triton-ascend==3.2.0 pybind11 decorator attrs psutil scipy "${TORCH_PACKAGES[@]}"

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

exec "$home/triton-ascend/bin/python" "$root/tests/lab/npu_lab.py" "$compiler" "${run[@]}" "$@"
