# Two commands matter: `make demo` and `make test`. Each works from nothing on a fresh clone that has
# Python, a C++17 compiler and make; the second call is quick.

PYTHON ?= python3
VENV ?= .venv
# fastcheck is built against the torch that is installed, so torch comes first and nothing later may
# replace it. Where the default wheel brings CUDA, point TORCH_INDEX_URL at PyTorch's CPU index.
TORCH ?= torch==2.13.0
TORCH_INDEX_URL ?=
# Of `make wheel`: cpu, cuda or generic.
ACCELERATOR ?= cpu
# Passed to pytest, for example TESTS="tests/test_checksum.py -x".
TESTS ?= tests

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
PY := $(VENV)/bin/python
CXX_SOURCES = $(shell git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')

.PHONY: help demo test test-fake-device test-neon test-triton test-npu-lab test-old-torch lint types \
	format build wheel sdist test-wheel clean
help:
	@echo "make demo    train a small float16 GPT until it overflows, and see fastcheck stop it"
	@echo "make test    run the tests"
	@echo "make test-fake-device   what needs an accelerator, on a fake one"
	@echo "make test-neon          the AArch64 kernel, under emulation; skips where that can't be had"
	@echo "make test-triton        the Triton kernels, in Triton's interpreter"
	@echo "make test-npu-lab       torch_npu's own wheel over a runtime of our own; the Triton kernels through"
	@echo "                        Ascend's compiler, as far as it goes without CANN"
	@echo "make test-old-torch     the pure-Python path with torch 2.1; slow, under emulation"
	@echo "make wheel   a wheel into dist/; ACCELERATOR=cpu, cuda or generic;  make sdist the sources"
	@echo "make test-wheel         installs each wheel of dist/ into a fresh environment and tries it"
	@echo "make lint    ruff and clang-format;  make format applies them"
	@echo "make types   mypy --strict"
	@echo "make bench   the CPU benches, about ten minutes; results under bench/results"
	@echo "variables: PYTHON, VENV, TORCH, TORCH_INDEX_URL, TESTS, ACCELERATOR, FASTCHECK_CUDA_ARCHS"

demo: $(VENV)/.built
	$(PY) -m fastcheck demo

test: $(VENV)/.built $(VENV)/.tools
	$(PY) -m pytest $(TESTS)

test-fake-device: $(VENV)/.built $(VENV)/.tools
	FASTCHECK_FAKE_DEVICE=1 $(PY) -m pytest tests/test_fake_device.py tests/test_fake_device_processes.py \
		tests/test_fake_device_torch.py tests/test_compat_device.py tests/test_devices.py tests/test_dump_device.py \
		tests/test_movement_device.py tests/test_op_async.py tests/test_op_async_beside.py tests/test_op_device.py \
		tests/test_override_device.py tests/test_protect_device.py tests/test_reader.py tests/test_recorder.py \
		tests/test_cuda_binding.py tests/test_cuda_install.py tests/test_selftest_device.py \
		tests/test_fake_graphs.py tests/test_graphs.py tests/test_graph_parts.py tests/test_graph_ends.py
	FASTCHECK_FAKE_DEVICE=1 FASTCHECK_TEST_DEVICE=fake $(PY) -m pytest tests/test_stats_values.py \
		tests/test_stats_api.py tests/test_stats_errors.py tests/test_checksum.py tests/test_properties.py \
		tests/test_portable_device.py
	FASTCHECK_FAKE_DEVICE=1 FASTCHECK_TEST_DEVICE=fake FASTCHECK_TEST_KERNELS=cuda \
		$(PY) -m pytest tests/test_stats_values.py tests/test_stats_api.py tests/test_selftest_device.py
	FASTCHECK_FAKE_DEVICE=1 FAKE_DEVICE_NAME=npu $(PY) -m pytest tests/test_npu.py tests/test_npu_saturation.py \
		tests/test_npu_ops.py tests/test_npu_ops_status.py
	FASTCHECK_FAKE_DEVICE=1 FAKE_DEVICE_NAME=mlu $(PY) -m pytest tests/test_mlu.py

test-neon: $(VENV)/.built $(VENV)/.tools
	PYTHON=$(abspath $(PY)) tests/neon.sh

test-triton: $(VENV)/.built $(VENV)/.tools
	TRITON_INTERPRET=1 $(PY) -m pytest tests/test_triton.py tests/test_triton_lists.py
	FASTCHECK_FAKE_DEVICE=1 FASTCHECK_TRITON=on TRITON_INTERPRET=1 $(PY) -m pytest tests/test_triton_device.py

test-npu-lab:
	PYTHON=$(PYTHON) TORCH_INDEX_URL=$(TORCH_INDEX_URL) tests/torch_npu.sh
	PYTHON=$(PYTHON) TORCH_INDEX_URL=$(TORCH_INDEX_URL) tests/npu_lab.sh

test-old-torch:
	PYTHON=$(PYTHON) tests/old_torch.sh

lint: $(VENV)/.tools
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(VENV)/.tools
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)

types: $(VENV)/.torch $(VENV)/.tools
	$(PY) -m mypy

.PHONY: bench
bench: $(VENV)/.built
	PYTHON=$(PY) bench/run_cpu.sh

build: $(VENV)/.built

wheel: $(VENV)/.wheel-tools
	ACCELERATOR=$(ACCELERATOR) PYTHON=$(PY) wheels/make.sh

sdist: $(VENV)/.wheel-tools
	$(PY) -m build --sdist --no-isolation --outdir dist .

# Where there is no wheel, those that take no nvcc are made first.
test-wheel:
	$(if $(wildcard dist/*.whl),,$(MAKE) wheel ACCELERATOR=cpu && $(MAKE) wheel ACCELERATOR=generic)
	PYTHON=$(PYTHON) TORCH=$(TORCH) TORCH_INDEX_URL=$(TORCH_INDEX_URL) wheels/test.sh

# ---- the environment -----------------------------------------------------------------------------

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
	$(PIP) install -r requirements-build.txt
	@touch $@

$(VENV)/.tools: requirements-dev.txt $(VENV)/.torch
	$(PIP) install -r requirements-dev.txt
	@touch $@

$(VENV)/.wheel-tools: requirements-wheel.txt $(VENV)/.torch
	$(PIP) install -r requirements-wheel.txt
	@touch $@

# Editable: Python sources are used in place, C++ is built again when it changed.
$(VENV)/.built: $(VENV)/.torch CMakeLists.txt pyproject.toml python/fastcheck/_build_info.py.in \
		python/fastcheck/_version.py $(shell find csrc -type f)
	$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@

clean:
	rm -rf $(VENV) build dist
