# Two commands matter: `make demo` and `make test`. Each works from nothing on a fresh clone that has
# Python, a C++17 compiler and make; the second call is quick.

PYTHON ?= python3
VENV ?= .venv
# fastcheck is built against the torch that is installed, so torch comes first and nothing later may
# replace it. Where the default wheel brings CUDA, point TORCH_INDEX_URL at PyTorch's CPU index.
TORCH ?= torch==2.13.0
TORCH_INDEX_URL ?=
# Of `make wheel`: cpu, cuda, cpu-any, cuda-any or generic.
ACCELERATOR ?= cpu
# Passed to pytest, for example TESTS="tests/statistics/test_checksum.py -x".
TESTS ?= tests
# Processes of `make test` and `make test-quick`; 0 runs the tests in that of pytest itself.
WORKERS ?= 2

# Where nothing may be kept, each process that imports torch compiles all of it: 7 s more, and there are hundreds.
unexport PYTHONDONTWRITEBYTECODE

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
PY := $(VENV)/bin/python
CXX_SOURCES = $(shell git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')

.PHONY: help demo test test-quick test-release test-fake-device test-fake-accelerator test-fake-hooks \
	test-fake-statistics test-fake-cuda test-fake-npu test-fake-mlu test-fake-triton test-neon test-sanitizers test-sanitized-extension test-triton \
	test-npu-lab test-old-torch test-trainers test-spark test-s3 test-any-torch test-cuda12 test-torch-cuda \
	lint lines types format build wheel sdist test-wheel clean frontend frontend-check screenshots
help:
	@echo "make demo              train a small float16 GPT until it overflows and is stopped"
	@echo "make test              run the tests; TESTS=... selects"
	@echo "make test-quick        those of them that take little, in a minute"
	@echo "make test-release      all that needs no hardware, with whole sweeps where the others take samples; an hour"
	@echo "make test-fake-device  tests of accelerators, on a fake accelerator"
	@echo "make test-neon         the AArch64 kernel, emulated; skipped where no emulator can be had"
	@echo "make test-sanitizers   all CPU kernels with address, undefined-behaviour and thread sanitizers"
	@echo "make test-sanitized-extension  the extension of torch with the first two of these; slow"
	@echo "make test-triton       the Triton kernels, in Triton's interpreter"
	@echo "make test-npu-lab      torch_npu's own wheel over a substitute runtime; the Triton kernels through"
	@echo "                       Ascend's compiler, as far as it goes without CANN"
	@echo "make test-old-torch    the pure-Python path with torch 2.1, emulated; slow"
	@echo "make test-trainers     tests/callbacks with other versions of the trainers; slow"
	@echo "make test-spark        the questions to a fleet, by Spark and by DuckDB; needs Java 17; slow"
	@echo "make test-s3           a fleet's files in an object store, with moto as the server; slow"
	@echo "make test-any-torch    the wheel of the kernels alone beside torch 2.1 to 2.15 and Python 3.9 to 3.13; slow"
	@echo "make test-cuda12       the CUDA kernels by the compiler of CUDA 12, sm_70 too, run as PTX; slow"
	@echo "make test-torch-cuda   calls of CUDA in a torch.cuda program, over libraries that record them; slow"
	@echo "make lint              ruff, clang-format, import-linter"
	@echo "make format            apply ruff and clang-format"
	@echo "make types             mypy --strict"
	@echo "make lines             the package's files and lines of code"
	@echo "make frontend          build the script and style of the report's page from frontend/ (needs npm)"
	@echo "make frontend-check    check their types and style, and that what is committed is what they build"
	@echo "make screenshots       the pictures of docs/report.md (needs Chromium)"
	@echo "make bench             all benches that this machine can run; results under bench/results"
	@echo "make accuracy SUITE=...  how often verdicts are right (tests/accuracy); minutes to hours"
	@echo "make wheel             build a wheel into dist/; ACCELERATOR=cpu, cuda, cpu-any, cuda-any or generic"
	@echo "make sdist             build a source distribution into dist/"
	@echo "make test-wheel        install each wheel of dist/ into a fresh environment and test it"
	@echo "make clean             remove the environment and all builds"
	@echo "variables: PYTHON, VENV, TORCH, TORCH_INDEX_URL, TESTS, WORKERS, ACCELERATOR, FASTCHECK_CUDA_ARCHS"

# A wheel of dist/ that fits saves the compilation; what is built in place goes before it.
demo: $(if $(wildcard $(VENV)/.built),$(VENV)/.built,$(VENV)/.demo)
	$(PY) -m fastcheck demo

# Without TESTS= in processes that take one file after the other, each with one thread; where files are named, in one.
# A process that ends in a test has no successor: it would run the file again, and wait again where a test waits for ever.
IN_PROCESSES = --dist loadfile --no-loadscope-reorder --max-worker-restart=0
PYTEST = $(PY) -m pytest $(if $(filter-out tests,$(TESTS)),,-n $(WORKERS) $(IN_PROCESSES))
test test-quick: export OMP_NUM_THREADS ?= 1

test: $(VENV)/.built $(VENV)/.tools
	$(PYTEST) $(TESTS)

test-quick: $(VENV)/.built $(VENV)/.tools
	$(PYTEST) -m "not slow" $(TESTS)

# FASTCHECK_WHOLE=1: tests/support/sampling.py takes all cases, and hypothesis more examples.
test-release: export FASTCHECK_WHOLE = 1
test-release: export FASTCHECK_REQUIRE_NEON = 1
test-release: test test-fake-device test-triton test-neon

test-fake-device: test-fake-accelerator test-fake-hooks test-fake-statistics test-fake-cuda test-fake-npu \
	test-fake-mlu test-fake-triton

FAKE := FASTCHECK_FAKE_DEVICE=1
test-fake-accelerator: $(VENV)/.built $(VENV)/.tools
	$(FAKE) $(PY) -m pytest -m fake_accelerator tests

test-fake-hooks: $(VENV)/.built $(VENV)/.tools
	$(FAKE) $(PY) -m pytest -m fake_hooks tests

test-fake-statistics: $(VENV)/.built $(VENV)/.tools
	$(FAKE) FASTCHECK_TEST_DEVICE=fake $(PY) -m pytest -m fake_statistics tests

test-fake-cuda: $(VENV)/.built $(VENV)/.tools
	$(FAKE) FASTCHECK_TEST_DEVICE=fake FASTCHECK_TEST_KERNELS=cuda $(PY) -m pytest -m fake_cuda tests

test-fake-npu: $(VENV)/.built $(VENV)/.tools
	$(FAKE) FAKE_DEVICE_NAME=npu $(PY) -m pytest -m fake_npu tests

test-fake-mlu: $(VENV)/.built $(VENV)/.tools
	$(FAKE) FAKE_DEVICE_NAME=mlu $(PY) -m pytest -m fake_mlu tests

test-fake-triton: $(VENV)/.built $(VENV)/.tools
	$(FAKE) FASTCHECK_TRITON=on TRITON_INTERPRET=1 $(PY) -m pytest -m fake_triton tests

test-neon: $(VENV)/.built $(VENV)/.tools
	PYTHON=$(abspath $(PY)) tests/lab/neon.sh

test-sanitizers: $(VENV)/.built $(VENV)/.tools
	FASTCHECK_WHOLE=1 $(PY) -m pytest tests/backends/test_sanitizers.py

test-sanitized-extension: $(VENV)/.built $(VENV)/.tools
	PYTHON=$(abspath $(PY)) tests/lab/sanitized_extension.sh

test-triton: $(VENV)/.built $(VENV)/.tools
	TRITON_INTERPRET=1 $(PY) -m pytest -m triton tests

test-npu-lab:
	PYTHON=$(PYTHON) TORCH_INDEX_URL=$(TORCH_INDEX_URL) tests/lab/torch_npu.sh
	PYTHON=$(PYTHON) TORCH_INDEX_URL=$(TORCH_INDEX_URL) tests/lab/npu_lab.sh

test-old-torch:
	PYTHON=$(PYTHON) tests/lab/old_torch.sh

test-trainers: $(VENV)/.built $(VENV)/.tools
	PYTHON=$(abspath $(PY)) tests/lab/trainers.sh

test-spark: $(VENV)/.built $(VENV)/.tools
	PYTHON=$(abspath $(PY)) tests/lab/spark.sh

test-s3: $(VENV)/.built $(VENV)/.tools
	PYTHON=$(abspath $(PY)) tests/lab/s3.sh

# Of `make wheel ACCELERATOR=cpu-any`; WHEEL names another, such as cuda-any's.
test-any-torch: $(VENV)/.built $(VENV)/.tools
	PYTHON=$(abspath $(PY)) TORCH_INDEX_URL=$(TORCH_INDEX_URL) tests/lab/any_torch.sh

test-cuda12: export FASTCHECK_WHOLE = 1
test-cuda12: $(VENV)/.built $(VENV)/.tools
	PYTHON=$(abspath $(PY)) tests/lab/cuda12.sh

test-torch-cuda: $(VENV)/.built $(VENV)/.tools
	PYTHON=$(abspath $(PY)) tests/lab/torch_cuda.sh

lint: $(VENV)/.tools
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_SOURCES)
	PYTHONPATH=python $(VENV)/bin/lint-imports --no-cache

format: $(VENV)/.tools
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)

lines: $(VENV)/.tools
	$(VENV)/bin/pygount --format=summary --suffix=py python/fastcheck

types: $(VENV)/.torch $(VENV)/.tools
	$(PY) -m mypy

# ---- the report's page ---------------------------------------------------------------------------

frontend: frontend/node_modules/.installed
	cd frontend && npm run --silent build

# Users need no npm, and neither do the tests: what is built is committed. With FASTCHECK_REQUIRE_NPM=1 a skip is a failure.
frontend-check:
	@if command -v npm > /dev/null; then $(MAKE) --no-print-directory frontend-checked; \
	else echo "SKIPPED frontend-check: no npm; types, style and build of the page's script are not checked"; \
	test "$$FASTCHECK_REQUIRE_NPM" != 1; fi

.PHONY: frontend-checked
frontend-checked: frontend/node_modules/.installed
	cd frontend && npm run --silent check

frontend/node_modules/.installed: frontend/package.json frontend/package-lock.json
	cd frontend && npm ci --silent --no-audit --no-fund
	@touch $@

screenshots: $(VENV)/.built
	$(PY) bench/screenshots.py

# ---- benches, wheels -----------------------------------------------------------------------------

.PHONY: bench accuracy
# A file of tests/accuracy, with its options: SUITE="healthy --steps 5".
accuracy: $(VENV)/.built $(VENV)/.tools
	PYTHONPATH=tests:bench $(PY) -m accuracy.$(SUITE)

bench: $(VENV)/.built
	$(PY) bench/run.py

build: $(VENV)/.built

wheel: $(VENV)/.wheel-tools
	ACCELERATOR=$(ACCELERATOR) PYTHON=$(PY) wheels/make.sh

sdist: $(VENV)/.wheel-tools
	$(PY) -m build --sdist --no-isolation --outdir dist .
	$(PY) -m twine check --strict dist/*.tar.gz

# Where there is no wheel, those that take no nvcc are made first.
test-wheel:
	$(if $(wildcard dist/*.whl),,$(foreach kind,cpu cpu-any generic,$(MAKE) wheel ACCELERATOR=$(kind) &&) true)
	PYTHON=$(PYTHON) TORCH=$(TORCH) TORCH_INDEX_URL=$(TORCH_INDEX_URL) wheels/test.sh

# ---- the environment -----------------------------------------------------------------------------

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install $(TORCH) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
	$(PIP) install -r requirements-build.txt
	@touch $@

$(VENV)/.tools: requirements-dev.txt $(VENV)/.torch
	$(PIP) install -r requirements-dev.txt
	@touch $@

$(VENV)/.wheel-tools: requirements-wheel.txt $(VENV)/.torch
	$(PIP) install -r requirements-wheel.txt
	@touch $@

# Editable: Python sources are used in place, C++ is built again when it changed. The installation
# lists the Python files, so it is renewed where one was added, moved or deleted. Two makes may run
# at once (.ci/run), hence a file name of its own for each.
SOURCES = CMakeLists.txt pyproject.toml python/fastcheck/_build_info.py.in \
	python/fastcheck/_version.py $(shell find csrc -type f)
$(VENV)/.built: $(VENV)/.torch $(VENV)/.modules $(SOURCES)
	$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.modules: $(VENV)/.torch always
	@new=$$(mktemp $@.XXXXXX); find python -name '*.py' | LC_ALL=C sort > "$$new"; \
	if cmp -s "$$new" $@; then rm "$$new"; else mv "$$new" $@; fi

$(VENV)/.demo: $(VENV)/.torch $(SOURCES) $(shell find python -name '*.py')
	wheel=$$($(PY) wheels/fitting.py) && if test -n "$$wheel"; then \
		$(PIP) install --no-deps --force-reinstall "$$wheel" && touch $@; \
	else $(MAKE) $(VENV)/.built; fi

.PHONY: always
clean:
	rm -rf $(VENV) build dist
