#!/usr/bin/env bash
# The wheel of the kernels alone (make wheel ACCELERATOR=cpu-any) beside several releases of Python and of
# torch: the records have to be those of this checkout's own build. `make test-any-torch` calls it.
#
# 1. Each Python loads the module of the kernels by itself, without torch (any_python.py).
# 2. Each pair of a Python and a torch, in an environment of its own under build/any-torch, runs any_torch.py.
#
# Arguments: pairs "PYTHON TORCH", such as "3.9 2.1.2". A Python is looked for on PATH and among pyenv's; what
# can't be had is skipped, and is a failure with FASTCHECK_REQUIRE_ANY_TORCH=1. PYTHON: the checkout's, with torch
# and fastcheck's extension. WHEEL: the wheel, by default the newest of dist/. TORCH_INDEX_URL: an index whose
# torch is for the CPU; the default one's is for CUDA, at 0.6 to 0.9 GB.
#
# torch is installed without the gigabytes of CUDA's libraries: a stub stands for them, whose every function
# returns "no device".
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
home=$root/build/any-torch
own_python=${PYTHON:-$root/.venv/bin/python}
wheel=${WHEEL:-$(ls -t "$root"/dist/fastcheck-*+cpu-cp39-abi3-*.whl 2> /dev/null | head -n 1)}
test -n "$wheel" || { echo "expected a wheel dist/fastcheck-*+cpu-cp39-abi3-*.whl; make wheel ACCELERATOR=cpu-any" >&2; exit 1; }
test $# -gt 0 || set -- "3.9 2.1.2" "3.10 2.4.1" "3.11 2.11.0" "3.11 2.13.0" "3.12 2.15.0" "3.13 2.13.0"
mkdir -p "$home"
unset FASTCHECK_NO_EXTENSION FASTCHECK_NO_BINDING FASTCHECK_CPU_ISA
export PYTHONDONTWRITEBYTECODE=1

failed=0 ran=0
skip() {
  echo "SKIPPED $1"
  test "${FASTCHECK_REQUIRE_ANY_TORCH:-0}" != 1 || failed=1
}

# compare LINE EXPECTED: the digest is what follows the colon.
compare() {
  if test "${1##*: }" = "$2"; then
    echo "equal: $1"
    ran=$((ran + 1))
  else
    echo "DIFFERENT: $1 (expected $2)"
    failed=1
  fi
}

interpreter() {
  local found
  for found in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if "$found" -c "import sys; assert sys.version_info[:2] == tuple(map(int, '$1'.split('.')))" 2> /dev/null; then
      echo "$found"
      return
    fi
  done
  return 1
}

# stubs SITE-PACKAGES INTO: a library by each name that torch's libraries miss, with all of CUDA's functions, under
# the versions that they are asked for.
stubs() {
  local libraries=("$1"/torch/lib/*.so*) into=$2 name missing version versions
  mkdir -p "$into"
  missing=$(ldd "${libraries[@]}" | awk '/not found/ { print $1 }' | sort -u)
  test -n "$missing" || return 0
  # Of cuDNN torch asks for the version, at least its own; 100 is CUDA's "no device".
  {
    echo "long cudnnGetVersion(void) { return $([[ $missing == *libcudnn.so.8* ]] && echo 8999 || echo 99999); }"
    nm -D --undefined-only "${libraries[@]}" | awk 'NF == 2 { sub(/@.*/, "", $2); print $2 }' |
      grep -E '^(cu|nccl|nv|__cuda)' | grep -vx cudnnGetVersion | sort -u |
      sed 's/.*/long &(void) { return 100; }/'
  } > "$into/stub.c"
  for name in $missing; do
    versions=$(objdump -p "${libraries[@]}" | awk -v name="$name:" '
      /required from/ { is_its = $3 == name }
      /^ *0x[0-9a-f]+ 0x[0-9a-f]+ [0-9]+ / && is_its { print $4 }' | sort -u)
    : > "$into/versions"
    for version in $versions; do echo "$version { global: *; };" >> "$into/versions"; done
    gcc -shared -fPIC -fno-builtin -w -Wl,-soname,"$name" ${versions:+-Wl,--version-script="$into/versions"} \
      -o "$into/$name" "$into/stub.c"
  done
}

environment() {
  local python=$1 torch=$2 at=$3 numpy=numpy
  test -e "$at/complete" && return
  rm -rf "$at"
  [[ $torch == 2.[12].* ]] && numpy="numpy<2"
  "$python" -m venv "$at" &&
    "$at/bin/python" -m pip install --quiet --no-deps ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==$torch" &&
    "$at/bin/python" -m pip install --quiet "$numpy" setuptools filelock fsspec jinja2 networkx sympy typing-extensions &&
    stubs "$(echo "$at"/lib/python3*/site-packages)" "$at/empty" &&
    touch "$at/complete"
}

rm -rf "$home/wheel"
mkdir "$home/wheel"
"$own_python" -m zipfile -e "$wheel" "$home/wheel"
kernels=$home/wheel/fastcheck/_kernels.abi3.so

own_kernels=$("$own_python" -I -c 'from fastcheck import _kernels; print(_kernels.__file__)')
expected=$("$own_python" -I "$root/tests/lab/any_python.py" "$own_kernels")
echo "this checkout's kernels: $expected"
for version in 3.9 3.10 3.11 3.12 3.13; do
  if ! python=$(interpreter "$version"); then
    skip "Python $version: none found"
    continue
  fi
  compare "$("$python" -I "$root/tests/lab/any_python.py" "$kernels" || echo "Python $version: failed")" "${expected##*: }"
done

expected=$(cd "$home" && "$own_python" -I "$root/tests/lab/any_torch.py" built)
echo "this checkout's build: $expected"
for pair in "$@"; do
  read -r version torch <<< "$pair"
  at=$home/$version-$torch
  if ! python=$(interpreter "$version"); then
    skip "torch $torch: no Python $version"
    continue
  fi
  if ! environment "$python" "$torch" "$at"; then
    skip "torch $torch, Python $version: pip can't install it"
    continue
  fi
  # --no-deps: what is under test is that nothing but the wheel is needed.
  "$at/bin/python" -m pip install --quiet --no-deps --no-index --force-reinstall "$wheel"
  line=$(cd "$at" && LD_LIBRARY_PATH=$at/empty bin/python -I "$root/tests/lab/any_torch.py" wheel) ||
    line="torch $torch, Python $version: failed"
  compare "$line" "${expected##*: }"
done
echo "$ran equal; exit status $failed"
exit "$failed"
