#!/usr/bin/env bash
# Runs all CPU benches, about a quarter of an hour on two cores: JSON under bench/results, tables in
# bench/results/tables.md. Run it on an otherwise idle machine. PYTHON: a Python with fastcheck (default:
# .venv/bin/python, else python3).
set -euo pipefail
cd "$(dirname "$0")"
if [ -z "${PYTHON:-}" ]; then
  PYTHON=../.venv/bin/python
  [ -x "$PYTHON" ] || PYTHON=python3
elif [ -x "../$PYTHON" ] && [ "${PYTHON#/}" = "$PYTHON" ]; then
  PYTHON="../$PYTHON" # given from the root of the repository
fi
results="${FASTCHECK_BENCH_RESULTS:-results}"
mkdir -p "$results"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

section() { # title, command...: the table goes to the screen and into tables.md
  echo "## $1"
  echo
  shift
  "$@"
  echo
}

collisions() {
  "${CXX:-g++}" -O3 -march=native -std=c++17 -pthread -I ../csrc collisions.cpp -o "$scratch/collisions"
  "$scratch/collisions" --quick --json "$scratch/collisions.json"
}

{
  echo "# CPU benches"
  echo
  "$PYTHON" -c 'import harness; print("\n".join(f"- {k}: {v}" for k, v in harness.machine().items()))'
  echo
  section "One pass over 256 MiB" "$PYTHON" kernels.py
  section "Small tensors" "$PYTHON" small.py
  section "A training step" "$PYTHON" train_step.py
  section "The portable backend" "$PYTHON" portable.py
  section "Host time for a tensor" "$PYTHON" host_time.py
  section "The drain" "$PYTHON" drain.py
  section "Weights that do not move" "$PYTHON" movement.py
  if command -v nvcc >/dev/null; then
    section "GPU instructions a component" "$PYTHON" instructions.py
  fi
  section "Checksum collisions (quick; results/collisions.json is the full search)" collisions
} | tee "$scratch/tables.md"
cp "$scratch/tables.md" "$results/tables.md"
