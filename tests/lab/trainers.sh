#!/usr/bin/env bash
# Runs tests/callbacks with other versions of the trainers, each in an environment of its own under
# build/trainers. `make test-trainers` calls it; arguments select environments by name.
#
# PYTHON is the checkout's, with torch, fastcheck's extension and the tools of the tests. The others
# see its packages behind their own, so that torch is not installed again, and not changed.
#
# Where a version can't be had it says so and goes on; with FASTCHECK_REQUIRE_TRAINERS=1 it fails.
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
home=$root/build/trainers
host_python=${PYTHON:-$root/.venv/bin/python}
mkdir -p "$home"
cd "$root"
export PYTHONPATH=$root/python:$root/tests PYTHONDONTWRITEBYTECODE=1 DS_BUILD_OPS=0 HF_HUB_OFFLINE=1
# Tests and programs that cost seconds each run here, and are skipped in CI.
export FASTCHECK_TRAINERS=1

failed=0
table=()

# environment NAME PACKAGE...: made once. A package after "--" is installed without what it needs.
environment() {
  local name=$1 ready=$home/$1 alone=0 package
  shift
  local needed=() without=()
  for package in "$@"; do
    if test "$package" = --; then alone=1; elif test $alone = 1; then without+=("$package"); else needed+=("$package"); fi
  done
  printf '%s\n' "$@" > "$home/$name.needs"
  cmp -s "$home/$name.needs" "$ready/needs" && return
  rm -rf "$ready"
  "$host_python" -m venv "$ready" || return
  "$host_python" - "$ready" << 'END' || return
import sys, sysconfig
from pathlib import Path

own = next(Path(sys.argv[1]).glob("lib/python*/site-packages"))
# In the order of the host: an environment may itself see another one's packages. Not as bare paths, whose own .pth
# files nobody reads: fastcheck's extension is found by one.
hosts = [path for path in sys.path if path.endswith("site-packages")]
Path(own, "host.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in hosts))
END
  "$ready/bin/python" -c 'import torch; print("torch==" + torch.__version__)' > "$ready/torch" || return
  if test ${#needed[@]} -gt 0; then
    "$ready/bin/python" -m pip install --quiet --constraint "$ready/torch" "${needed[@]}" || return
  fi
  if test ${#without[@]} -gt 0; then
    "$ready/bin/python" -m pip install --quiet --no-deps --no-build-isolation "${without[@]}" || return
  fi
  cp "$home/$name.needs" "$ready/needs"
}

# check NAME "TEST..." PACKAGE...
check() {
  local name=$1 tests=$2 result
  shift 2
  test ${#only[@]} -eq 0 || [[ " ${only[*]} " == *" $name "* ]] || return 0
  if ! environment "$name" "$@"; then
    echo "SKIPPED $name: pip can't install $*"
    table+=("$name: can't be installed")
    failed=$((failed + ${FASTCHECK_REQUIRE_TRAINERS:-0}))
    return
  fi
  echo "== $name"
  # Compiled extensions apart by environment; what a run that was ended has left locked would be
  # waited for without end.
  export TORCH_EXTENSIONS_DIR=$home/$name/extensions
  find "$TORCH_EXTENSIONS_DIR" -name lock -delete 2> /dev/null
  test -z "$before" || "$home/$name/bin/python" -c "$before" > /dev/null 2>&1
  # shellcheck disable=SC2086  # several tests
  result=$("$home/$name/bin/python" -m pytest -q -p no:cacheprovider $tests 2>&1) || failed=$((failed + 1))
  grep -E "^(FAILED|ERROR|E  )" <<< "$result"
  table+=("$name: $(tail -1 <<< "$result")")
}

only=("$@")
# Run in an environment before its tests.
before=
T=tests/callbacks
docs="$T/test_docs_programs.py -k"
ranks=$T/test_trainers_on_ranks.py

# Of the packages of requirements-dev.txt: what CI skips.
check host "$T tests/cli/test_run.py tests/monitor/sinks"

# Two versions of each: those that requirements-dev.txt brings are tested by `make test`.
check transformers-4 "$T/test_huggingface.py $ranks $docs huggingface" transformers==4.57.6
check lightning-2.5 "$T/test_lightning.py $ranks $docs lightning" lightning==2.5.6
check accelerate-1.10 "$T/test_accelerate.py $ranks $docs accelerate" accelerate==1.10.1
check trl-1 "$T/test_trl.py $ranks $docs trl" trl==1.16.0
check trl-0 "$T/test_trl.py $ranks $docs trl" trl==0.29.1 requests
check ray-2 "$T/test_ray.py $docs ray" "ray[train]==2.60.0"
check ray-2.51 "$T/test_ray.py $docs ray" "ray[train]==2.51.2"
# Ranks that both wait for the compiler may take longer than a test may.
before="from deepspeed.comm.torch import build_shm_op; build_shm_op()"
check deepspeed-0.19 "$T/test_deepspeed.py $docs deepspeed" deepspeed==0.19.8
# Without the page's program, which has two ranks: there 0.18 fails by itself with torch 2.13.
check deepspeed-0.18 "$T/test_deepspeed.py" deepspeed==0.18.9
before=

# Composer asks for an older torch, so it is installed without what it names.
of_composer=("torch_optimizer<0.4" "coolname<3" tabulate==0.9.0 "py-cpuinfo<10" "importlib-metadata<9" requests psutil
  pillow pyyaml tqdm)
check composer-0.32 "$T/test_composer.py $ranks $docs composer" "${of_composer[@]}" -- mosaicml==0.32.1
check composer-0.31 "$T/test_composer.py $ranks $docs composer" "${of_composer[@]}" -- mosaicml==0.31.0

# Checkpoints and tensor parallelism alone: its optimizers need CUDA.
check megatron-0.16 "$T/test_megatron.py tests/proving/test_megatron.py" megatron-core==0.16.1
check torchao "$T/test_torchao.py" torchao==0.18.0
check sinks tests/monitor/sinks/test_real_libraries.py wandb==0.31.0 mlflow==3.17.2 trackio==0.43.0 aim==3.29.1

printf '%s\n' "${table[@]}"
test $failed = 0
