#!/usr/bin/env bash
# torch_npu's own wheel over an ACL runtime of our own (tests/fakes/fake_acl): part of `make test-npu-lab`.
# A process has one chip: what depends on it runs once for each.
set -euo pipefail
source "$(dirname "$0")/lab_environment.sh"

environment torch-npu torch-npu==2.13.0 pyyaml pytest pluggy iniconfig packaging pygments hypothesis \
  sortedcontainers "${TORCH_PACKAGES[@]}"
command -v "${CXX:-g++}" nm > /dev/null || skip "no ${CXX:-g++} and nm to make the runtime with"

cd "$root"
export FASTCHECK_FAKE_ACL=1
unset FAKE_ACL_SOC INF_NAN_MODE_ENABLE INF_NAN_MODE_FORCE_DISABLE
tests=("$home/torch-npu/bin/python" -m pytest -p no:cacheprovider -q)
"${tests[@]}" tests/monitor/devices/test_torch_npu.py "$@"
for chip in Ascend910A Ascend910B1 "Ascend910B1 off" "Ascend950PR_9579 off"; do
  read -r name mode <<< "$chip"
  echo "$chip"
  env FAKE_ACL_SOC="$name" ${mode:+INF_NAN_MODE_FORCE_DISABLE=1} \
    "${tests[@]}" tests/monitor/devices/test_torch_npu_overflow.py "$@"
done
