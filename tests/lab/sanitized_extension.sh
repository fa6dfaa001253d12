#!/usr/bin/env bash
# The extension of torch, built with address and undefined-behaviour sanitizers in an environment of its own under
# build/sanitized, runs the tests of what calls it: hooks, op level, dumps and rings, on the CPU and on a fake
# accelerator. `make test-sanitized-extension` calls it. Tests that measure memory fail there: what is freed is kept
# for a while, to find its use.
#
# Arguments: tests in place of these. PYTHON: that of an environment with torch and what builds and tests fastcheck.
# Left out of undefined behaviour are vptr, which needs what torch does not export, and what the kernels leave out
# (tests/backends/sanitized).
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
home=$root/build/sanitized
python=${PYTHON:-$root/.venv/bin/python}
sanitizers=address,undefined
test $# -gt 0 || set -- tests/{calls,dump,ring,statistics} tests/monitor/{hooks,loop,op_level,origin,weights} \
  tests/monitor/test_{bit_identical,threads}.py

packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if ! test -e "$home/env/complete"; then
  rm -rf "$home/env"
  "$python" -m venv --without-pip "$home/env"
  # A path in a .pth file: the packages that are there, without the installation of fastcheck.
  own=$(packages_of "$home/env/bin/python")
  packages_of "$python" > "$own/base.pth"
  touch "$home/env/complete"
fi
export PATH=$home/env/bin:$(dirname "$python"):$PATH
CXXFLAGS="-fsanitize=$sanitizers -fno-sanitize-recover=all -fno-sanitize=vptr,null,pointer-overflow -g1 -O1" \
  LDFLAGS="-fsanitize=$sanitizers" "$home/env/bin/python" -m pip install --quiet --no-build-isolation --no-deps \
  --editable "$root" --config-settings "build-dir=$home/cmake"

# Of CPython and torch not all memory is freed at exit. Their own allocator would hide what is beyond an object.
export ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc OMP_NUM_THREADS=1
libraries=$(for name in asan ubsan stdc++; do g++ -print-file-name=lib$name.so; done)
cd "$root"
export LD_PRELOAD=${libraries//$'\n'/ }
"$home/env/bin/python" -m pytest -p no:benchmark "$@"
FASTCHECK_FAKE_DEVICE=1 "$home/env/bin/python" -m pytest -p no:benchmark -m fake_hooks "$@"
