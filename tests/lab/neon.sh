#!/usr/bin/env bash
# Runs tests/backends/test_neon.py: the CPU kernels compiled for AArch64. `make test-neon` calls it.
#
# On AArch64 with its own compiler; elsewhere with a cross compiler, under qemu's user-mode
# emulation: both from the PATH, else from Debian's packages, unpacked under build/neon. Nothing is
# installed on the system.
#
# Where packages can't be had it says so and succeeds; with FASTCHECK_REQUIRE_NEON=1 it fails.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
tools=${FASTCHECK_TEST_BUILD:-$root/build}/neon/tools
python=${PYTHON:-python3}

skip() {
  echo "SKIPPED test-neon: $1; no test of the AArch64 kernels was run"
  test "${FASTCHECK_REQUIRE_NEON:-0}" != 1
  exit
}

unpack_packages() {
  command -v apt-get dpkg > /dev/null ||
    skip "needs aarch64-linux-gnu-g++ and qemu-aarch64, and there is no apt-get to fetch them"
  rm -rf "$tools"
  mkdir -p "$tools"/apt/{state/lists/partial,cache/archives/partial} "$tools/unpacked"
  local apt=(apt-get -qq -o "Dir::State=$tools/apt/state" -o "Dir::Cache=$tools/apt/cache"
    -o Dir::State::status=/var/lib/dpkg/status
    -o "APT::Sandbox::User=$(id -un)")
  "${apt[@]}" update || skip "no package lists"
  "${apt[@]}" install --no-install-recommends --yes --download-only \
    g++-aarch64-linux-gnu qemu-user || skip "no g++-aarch64-linux-gnu or qemu-user"
  local package
  for package in "$tools"/apt/cache/archives/*.deb; do dpkg -x "$package" "$tools/unpacked"; done
  # What these linker scripts name lies where the packages were to be installed.
  grep -lI "GNU ld script" "$tools"/unpacked/usr/aarch64-linux-gnu/lib/*.so |
    xargs sed -i "s| /usr/aarch64-linux-gnu/| $tools/unpacked/usr/aarch64-linux-gnu/|g"
  rm -rf "$tools/apt"
  touch "$tools/complete"
}

if test "$(uname -m)" = aarch64; then
  FASTCHECK_NEON_CXX=${CXX:-g++} FASTCHECK_NEON_RUN=
  command -v "$FASTCHECK_NEON_CXX" > /dev/null || skip "no $FASTCHECK_NEON_CXX"
else
  if ! command -v aarch64-linux-gnu-g++ > /dev/null || ! command -v qemu-aarch64 > /dev/null; then
    test -e "$tools/complete" || unpack_packages
    export PATH=$tools/unpacked/usr/bin:$PATH
    # The cross binutils have libraries of their own, found only where they were to be installed.
    LD_LIBRARY_PATH=$(echo "$tools"/unpacked/usr/lib/*-linux-gnu | tr ' ' :)
    export LD_LIBRARY_PATH
  fi
  FASTCHECK_NEON_CXX=aarch64-linux-gnu-g++ FASTCHECK_NEON_RUN=qemu-aarch64
fi
export FASTCHECK_NEON_CXX FASTCHECK_NEON_RUN
echo "AArch64: $("$FASTCHECK_NEON_CXX" --version | head -1)," \
  "${FASTCHECK_NEON_RUN:-on this machine}"
cd "$root"
exec "$python" -m pytest tests/backends/test_neon.py "$@"
