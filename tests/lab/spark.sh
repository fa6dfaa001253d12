#!/usr/bin/env bash
# Runs tests/fleet/test_spark.py, with PySpark in an environment of its own under build/spark that sees
# the packages of PYTHON, the checkout's. `make test-spark` calls it.
#
# Where there is no Java, or PySpark can't be had, it says so; with FASTCHECK_REQUIRE_SPARK=1 it fails.
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
home=$root/build/spark
host_python=${PYTHON:-$root/.venv/bin/python}
cd "$root"

skip() {
  echo "SKIPPED spark: $1"
  test "${FASTCHECK_REQUIRE_SPARK:-0}" != 1
  exit
}

java -version > /dev/null 2>&1 || skip "there is no Java"
if ! test -e "$home/ready"; then
  rm -rf "$home"
  "$host_python" -m venv "$home" || skip "no virtual environment"
  "$home/bin/python" -m pip install --quiet pyspark duckdb pyarrow || skip "pip can't install pyspark"
  "$host_python" - "$home" << 'END' || exit
import sys
from pathlib import Path

own = next(Path(sys.argv[1]).glob("lib/python*/site-packages"))
hosts = [path for path in sys.path if path.endswith("site-packages")]
# Not as bare paths, whose own .pth files nobody reads: fastcheck's extension is found by one.
Path(own, "host.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in hosts))
END
  touch "$home/ready"
fi
# Spark's workers on this machine talk to each other by this name.
export SPARK_LOCAL_IP=127.0.0.1 PYTHONPATH=$root/python:$root/tests PYTHONDONTWRITEBYTECODE=1
"$home/bin/python" -m pytest -q -p no:cacheprovider tests/fleet/test_spark.py "$@"
