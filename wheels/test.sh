#!/usr/bin/env bash
# Installs each wheel of dist/ into an environment of its own, torch first, and runs
# tests/package/wheel_smoke.py there, from outside the source tree. `make test-wheel` calls it.
#
# PYTHON makes the environments; TORCH (and TORCH_INDEX_URL) is what they get. An environment is a
# copy of the first one, which pip fills once.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
wheels=("$root"/dist/fastcheck-*.whl)
if ! test -e "${wheels[0]}"; then
  echo "expected wheels in dist/, found none; make wheel builds one" >&2
  exit 1
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/with-torch"
cd "$scratch"
unset PYTHONPATH FASTCHECK_ACCELERATOR FASTCHECK_CPU_ISA FASTCHECK_NO_EXTENSION
pip=(-m pip --quiet --disable-pip-version-check)

with-torch/bin/python "${pip[@]}" install "${TORCH:-torch==2.13.0}" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
with-torch/bin/python "${pip[@]}" install numpy

failed=0
for wheel in "${wheels[@]}"; do
  cp -al with-torch fresh
  { fresh/bin/python "${pip[@]}" install --no-deps --no-index "$wheel" &&
    fresh/bin/python "${pip[@]}" check &&
    fresh/bin/python -I "$root/tests/package/wheel_smoke.py" "$wheel"; } || failed=1
  rm -rf fresh
done
exit "$failed"
