#!/usr/bin/env bash
# Runs tests/lab/s3.py: fastcheck collect and fleet over s3://, with moto as the server, in an
# environment of its own under build/s3 that sees the packages of PYTHON, the checkout's.
# `make test-s3` calls it.
#
# Where moto can't be had, it prints so; with FASTCHECK_REQUIRE_S3=1 it fails.
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
home=$root/build/s3
host_python=${PYTHON:-$root/.venv/bin/python}
cd "$root"

if ! test -e "$home/ready"; then
  rm -rf "$home"
  if ! "$host_python" -m venv "$home" || ! "$home/bin/python" -m pip install --quiet 'moto[server]'; then
    echo "SKIPPED s3: pip can't install moto"
    test "${FASTCHECK_REQUIRE_S3:-0}" != 1
    exit
  fi
  touch "$home/ready"
fi
export PYTHONPATH=$root/python:$root/tests:$root/bench PYTHONDONTWRITEBYTECODE=1
FASTCHECK_MOTO=$home/bin/moto_server "$host_python" -m pytest -q -p no:cacheprovider tests/lab/s3.py "$@"
