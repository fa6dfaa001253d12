# What the scripts of `make test-npu-lab` share: virtual environments of their own under
# build/npu-lab, and skipping visibly where packages can't be had. Nothing is installed on the system.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
home=$root/build/npu-lab
lab=$(basename "$0" .sh)
mkdir -p "$home"

# With FASTCHECK_REQUIRE_NPU_LAB=1 a skip is a failure.
skip() {
  echo "SKIPPED $lab: $1"
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
  "$ready/bin/python" -m pip install --quiet --no-deps ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$@" ||
    skip "pip can't install $*"
  cp "$needs" "$ready/needs"
}

test "$(uname -sm)" = "Linux x86_64" || skip "the packages are for Linux on x86-64"

# torch 2.13.0 and what it imports.
TORCH_PACKAGES=(torch==2.13.0 numpy typing-extensions sympy mpmath networkx jinja2 markupsafe fsspec filelock)

export PYTHONPATH=$root/python:$root/tests PYTHONDONTWRITEBYTECODE=1
export FASTCHECK_NO_EXTENSION=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0
