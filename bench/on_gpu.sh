#!/usr/bin/env bash
# What only a GPU can show, within eight minutes: builds fastcheck from source here, runs the tests that need a GPU,
# compute-sanitizer over the kernels, and bench/gpu.py. Uses no network and installs nothing outside a scratch folder.
#
# Logs, summary.json and gpu.json go to OUT (default: bench/results/gpu). Exit code 1 when anything failed, ran out of
# time, or could not be run.
# PYTHON (default python3) has torch for CUDA, numpy, pybind11, scikit-build-core, cmake, ninja, pytest and hypothesis.
# FASTCHECK_CUDA_ARCHS (default: the GPU's own), SECONDS_IN_ALL (default 470).
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-bench/results/gpu}
in_all=${SECONDS_IN_ALL:-470}
mkdir -p "$out"
out=$(cd "$out" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
: >"$scratch/phases"
failed=0

# phase NAME SECONDS LOG COMMAND...: runs it within its share of what time is left, and notes how it ended.
phase() {
  local name=$1 share=$2 log=$3 left start code state
  shift 3
  left=$((in_all - SECONDS))
  if [ "$left" -lt 5 ]; then
    code=124
    start=$SECONDS
  else
    if [ "$share" -gt "$left" ]; then share=$left; fi
    start=$SECONDS
    {
      echo "== $name"
      timeout --kill-after=5 "$share" "$@"
    } >>"$out/$log" 2>&1
    code=$?
  fi
  case $code in
    0) state=passed ;;
    124 | 137) state="out of time" ;;
    127) state="not there" ;;
    *) state=failed ;;
  esac
  if [ "$code" -ne 0 ]; then failed=1; fi
  printf '%s\t%s\t%s\t%s\n' "$name" "$state" "$code" "$((SECONDS - start))" >>"$scratch/phases"
  printf '%-24s %-12s %4d s\n' "$name" "$state" "$((SECONDS - start))"
  if [ "$code" -ne 0 ] && [ -f "$out/$log" ]; then tail -n 25 "$out/$log"; fi
  return 0
}

tests() { # arguments of pytest
  FASTCHECK_REQUIRE_GPU=1 "$python" -m pytest -q -p no:cacheprovider "$@"
}

sanitized() { # tool
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 FASTCHECK_REQUIRE_GPU=1 \
    compute-sanitizer --tool "$1" --error-exitcode 9 --target-processes all --print-limit 20 \
    "$python" -m pytest -q -x -p no:cacheprovider tests/test_gpu.py -k "TestKernels and (float32 or bfloat16 or int8 or list)"
}

values() {
  FASTCHECK_TEST_DEVICE=cuda tests tests/test_stats_values.py tests/test_stats_api.py tests/test_checksum.py
}

rm -f "$out"/{build,gpu,sanitizer,values,bench}.log "$out"/{summary,gpu}.json
{
  nvidia-smi
  nvcc --version
  "$python" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())'
} >"$out/build.log" 2>&1
archs=${FASTCHECK_CUDA_ARCHS:-$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')}

export CMAKE_BUILD_PARALLEL_LEVEL
CMAKE_BUILD_PARALLEL_LEVEL=$(nproc)
phase build 200 build.log "$python" -m pip install --no-build-isolation --no-deps --no-index --target "$scratch/site" \
  -C build-dir="$scratch/build" -C cmake.define.FASTCHECK_CUDA=ON -C cmake.define.FASTCHECK_CUDA_ARCHS="$archs" .
export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
"$python" -m fastcheck doctor >>"$out/build.log" 2>&1

# timeout runs programs, not functions.
export -f tests sanitized values
export python
phase "tests on the GPU" 150 gpu.log bash -c 'tests tests/test_gpu.py --durations=10'
phase bench 100 bench.log env FASTCHECK_BENCH_RESULTS="$out" "$python" bench/gpu.py
for tool in memcheck racecheck initcheck synccheck; do
  phase "$tool" 45 sanitizer.log bash -c "sanitized $tool"
done
phase "values on the GPU" 100 values.log bash -c values

"$python" - "$scratch/phases" "$out/summary.json" <<'END'
import json, sys, torch
rows = [line.rstrip("\n").split("\t") for line in open(sys.argv[1])]
phases = [{"name": n, "state": s, "code": int(c), "seconds": int(t)} for n, s, c, t in rows]
machine = {"torch": torch.__version__, "cuda": torch.version.cuda}
if torch.cuda.is_available():
    machine["gpu"] = torch.cuda.get_device_name()
json.dump({"machine": machine, "phases": phases}, open(sys.argv[2], "w"), indent=1)
END
tail -n 60 "$out/bench.log" 2>/dev/null
exit "$failed"
