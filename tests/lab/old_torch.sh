#!/usr/bin/env bash
# Runs tests/backends/test_pure_python.py with the old torch of requirements-old-torch.txt, in an
# environment of its own under build/old-torch. `make test-old-torch` calls it.
#
# Two ways to one. OLD_PYTHON, a Python that the old torch has wheels for, with its index in
# OLD_TORCH_INDEX_URL where the default one's wheels are not for the CPU alone. Else, on Debian on
# x86-64: the wheels for aarch64, which are small and know no CUDA, under user-mode emulation.
# Nothing is installed on the system.
#
# Where packages can't be had it says so and succeeds; with FASTCHECK_REQUIRE_OLD_TORCH=1 it fails.
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
home=$root/build/old-torch
needs=$root/requirements-old-torch.txt
host_python=${PYTHON:-python3}
mkdir -p "$home"

skip() {
  echo "SKIPPED test-old-torch: $1"
  test "${FASTCHECK_REQUIRE_OLD_TORCH:-0}" != 1
  exit
}

with_python() {
  local ready=$home/native
  if ! cmp -s "$needs" "$ready/needs"; then
    rm -rf "$ready"
    "$OLD_PYTHON" -m venv "$ready" || skip "$OLD_PYTHON makes no virtual environment"
    "$ready/bin/python" -m pip install --quiet --requirement "$needs" \
      ${OLD_TORCH_INDEX_URL:+--extra-index-url "$OLD_TORCH_INDEX_URL"} ||
      skip "pip can't install $(basename "$needs")"
    cp "$needs" "$ready/needs"
  fi
  run=("$ready/bin/python")
}

with_emulation() {
  local ready=$home/aarch64
  if ! cmp -s "$needs" "$ready/needs"; then
    test "$(uname -sm)" = "Linux x86_64" || skip "set OLD_PYTHON to a Python that $needs fits"
    command -v apt-get dpkg > /dev/null || skip "set OLD_PYTHON: no apt-get for an emulated one"
    rm -rf "$ready"
    mkdir -p "$ready"/apt/{state/lists/partial,cache/archives/partial} "$ready"/{host,system}
    : > "$ready/apt/installed"
    local apt=(apt-get -qq -o APT::Architecture=arm64 -o "APT::Architectures::=arm64"
      -o "APT::Architectures::=amd64" -o "Dir::State=$ready/apt/state"
      -o "Dir::State::status=$ready/apt/installed" -o "Dir::Cache=$ready/apt/cache"
      -o "APT::Sandbox::User=$(id -un)")
    "${apt[@]}" update || skip "no package lists for arm64"
    "${apt[@]}" install --no-install-recommends --yes --download-only \
      python3.11 libgomp1 libstdc++6 || skip "no python3.11 for arm64"
    (cd "$ready/apt" && "${apt[@]}" download qemu-user-static:amd64) ||
      skip "no qemu-user-static"
    local package
    for package in "$ready"/apt/cache/archives/*.deb; do dpkg -x "$package" "$ready/system"; done
    dpkg -x "$ready"/apt/qemu-user-static*.deb "$ready/host"
    "$host_python" -m venv "$ready/pip"
    local pip=("$ready/pip/bin/python" -m pip install --quiet --target "$ready/site"
      --python-version 3.11 --implementation cp --only-binary ":all:"
      --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64)
    "${pip[@]}" --no-deps "$(grep '^torch==' "$needs")" &&
      grep -v '^torch==' "$needs" > "$ready/others" &&
      "${pip[@]}" --requirement "$ready/others" || skip "pip can't get $(basename "$needs")"
    rm -rf "$ready"/{apt,pip}
    cp "$needs" "$ready/needs"
  fi
  run=("$ready/host/usr/bin/qemu-aarch64-static" -L "$ready/system"
    "$ready/system/usr/bin/python3.11")
  site=:$ready/site
}

run=() site=
if test -n "${OLD_PYTHON:-}"; then with_python; else with_emulation; fi

cd "$root"
export PYTHONPATH=$root/python:$root/tests$site PYTHONDONTWRITEBYTECODE=1
"${run[@]}" -c 'import platform, torch
print("torch", torch.__version__, "on Python", platform.python_version(), platform.machine())'
exec "${run[@]}" -m pytest -q -p no:cacheprovider tests/backends/test_pure_python.py "$@"
