#!/usr/bin/env bash
# Builds fastcheck from source on a machine with a GPU, runs the tests that need one, the benches with their bars, and
# compute-sanitizer over the kernels, within eight minutes a call. Uses no network and installs nothing outside
# build/gpu, which a second call finds built.
#
# Logs, summary.json, gpu.json and gpu_train.json go to OUT (default: bench/results/gpu). Exit code 1 when anything
# failed, missed a bar, ran out of time, or could not be run. Without a GPU it builds fastcheck, prints that there
# is none, and exits with 1.
# PYTHON (default python3) has torch for CUDA, numpy, pybind11, pytest and hypothesis; cmake (3.22 on), a C++ compiler
# and nvcc are in PATH, ninja if it is there. scikit-build-core is not needed.
# FASTCHECK_CUDA_ARCHS (default: the GPU's own), SECONDS_IN_ALL (default 470), BUILD_SECONDS (of them, default 200).
# PHASES: a regular expression of names, to run some alone. compute-sanitizer's four need a call of their own:
#   PHASES='tests|lost|captured|bench|training' bench/on_gpu.sh; PHASES='check$|values' OUT=... bench/on_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-bench/results/gpu}
in_all=${SECONDS_IN_ALL:-470}
mkdir -p "$out"
out=$(cd "$out" && pwd)
scratch=$PWD/build/gpu
mkdir -p "$scratch"
: >"$scratch/phases"
failed=0

# phase NAME SECONDS LOG COMMAND...: runs the command within its share of the remaining time, and records the result.
# It is interrupted at the end: pytest then prints the failures so far.
phase() {
  local name=$1 share=$2 log=$3 left start code state
  shift 3
  if [ "$name" != build ] && ! [[ $name =~ ${PHASES:-.} ]]; then return 0; fi
  left=$((in_all - SECONDS))
  if [ "$left" -lt 5 ]; then
    code=124
    start=$SECONDS
  else
    if [ "$share" -gt "$left" ]; then share=$left; fi
    start=$SECONDS
    {
      echo "== $name"
      timeout --signal=INT --kill-after=10 "$share" "$@"
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
  FASTCHECK_REQUIRE_GPU=1 "$python" -m pytest -q "$@"
}

# Only our kernels are instrumented: torch's are many and slow. The option was called --filter once.
sanitized() { # tool
  local option
  option=$(compute-sanitizer --help | grep -oE -m 1 -e '--(kernel-regex|filter)' || echo --kernel-regex)
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 FASTCHECK_REQUIRE_GPU=1 \
    compute-sanitizer --tool "$1" "$option" kns=fastcheck --error-exitcode 9 --target-processes all --print-limit 20 \
    "$python" -m pytest -q -x tests/backends/cuda/test_gpu.py -k "TestKernels and (float32 or bfloat16 or int8 or list)"
}

values() {
  FASTCHECK_TEST_DEVICE=cuda tests tests/statistics/test_stats_values.py tests/statistics/test_stats_api.py tests/statistics/test_checksum.py
}

# The contents of the wheel, assembled without a build backend.
build() { # value of FASTCHECK_CUDA, architectures
  local generator=()
  if command -v ninja >/dev/null; then generator=(-G Ninja); fi
  cmake -S . -B "$scratch/build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$(command -v "$python")" -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" \
    -DFASTCHECK_CUDA="$1" -DFASTCHECK_CUDA_ARCHS="$2" -DCMAKE_INSTALL_PREFIX="$scratch/site" &&
    cmake --build "$scratch/build" --parallel "$(nproc)" &&
    rm -rf "$scratch/site" && cmake --install "$scratch/build" &&
    rm -rf "$scratch/site/fastcheck/__pycache__" &&
    (cd python && find fastcheck -name '*.py' -o -name py.typed | grep -v _build_info.py | tar cf - --files-from=-) |
    tar xf - -C "$scratch/site" &&
    "$python" -m fastcheck doctor
}

rm -f "$out"/{build,gpu,sanitizer,values,bench}.log "$out"/{summary,gpu,gpu_train}.json
{
  nvidia-smi
  nvcc --version
  "$python" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())'
} >"$out/build.log" 2>&1
has_gpu=$("$python" -c 'import torch; print(int(torch.cuda.is_available()))')
if [ "$has_gpu" = 1 ]; then
  with_cuda=ON
  archs=${FASTCHECK_CUDA_ARCHS:-$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')}
else
  with_cuda=AUTO
  archs=${FASTCHECK_CUDA_ARCHS:-}
fi

# timeout runs programs, not functions.
export -f build tests sanitized values
export python scratch
export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# Not with pyproject.toml's options: other releases of pytest don't know them all, and with another torch a warning would
# be a failure.
export PYTEST_ADDOPTS="-c /dev/null --rootdir='$PWD' -o 'pythonpath=$PWD/tests $PWD/bench' --import-mode=importlib -p no:cacheprovider"
phase build "${BUILD_SECONDS:-200}" build.log bash -c "build $with_cuda '$archs'"
if [ "$has_gpu" != 1 ]; then
  echo "There is no GPU here: torch finds no CUDA device. Nothing was measured."
  exit 1
fi
phase "tests on the GPU" 120 gpu.log bash -c 'tests tests/backends/cuda/test_gpu.py --durations=10'
phase "lost devices, launches by Python" 60 gpu.log bash -c 'tests tests/backends/cuda/test_gpu_processes.py'
phase "captured graphs" 60 gpu.log bash -c 'tests tests/monitor/hooks/graphs/test_gpu_graphs.py --durations=5'
phase bench 100 bench.log env FASTCHECK_BENCH_RESULTS="$out" "$python" bench/gpu.py
phase "training steps" 90 bench.log env FASTCHECK_BENCH_RESULTS="$out" "$python" -W ignore bench/gpu_train.py --rounds 3
for tool in memcheck racecheck initcheck synccheck; do
  phase "$tool" 110 sanitizer.log bash -c "sanitized $tool"
done
phase "values on the GPU" 100 values.log bash -c values

"$python" - "$scratch/phases" "$out" <<'END'
import json, pathlib, sys, torch
rows = [line.rstrip("\n").split("\t") for line in open(sys.argv[1])]
phases = [{"name": n, "state": s, "code": int(c), "seconds": int(t)} for n, s, c, t in rows]
machine = {"torch": torch.__version__, "cuda": torch.version.cuda}
if torch.cuda.is_available():
    machine["gpu"] = torch.cuda.get_device_name()
out = pathlib.Path(sys.argv[2])
bars = []
for name in ("gpu.json", "gpu_train.json"):
    if (out / name).exists():
        bars += json.loads((out / name).read_text())["bars"]
missed = [bar["what"] for bar in bars if not bar["is_met"]]
summary = {"machine": machine, "phases": phases, "bars": len(bars), "missed_bars": missed}
(out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
print(f"{len(bars)} bars measured, {len(missed)} missed", *missed, sep="\n  ")
sys.exit(bool(missed) or (not bars and any(phase["name"] == "bench" for phase in phases)))
END
if [ $? -ne 0 ]; then failed=1; fi
grep -A 100 -m 1 '^\(met   \|MISSED\)' "$out/bench.log" 2>/dev/null
exit "$failed"
