"""Markers, the hypothesis profile, and fixtures that restore global state."""

from __future__ import annotations

import functools
import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import hypothesis
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import fastcheck
from fastcheck.monitor.hooks.optimizers import watchers
from fastcheck.monitor.op_level.level import CallMode
from fastcheck.monitor.sinks import connection

TESTS = Path(__file__).resolve().parent

# Nothing of what is imported goes, so nothing is looked for until all tests are collected.
gc.disable()

IS_WHOLE = os.environ.get("FASTCHECK_WHOLE") == "1"
if not IS_WHOLE:
    # Inductor would compile a program for each instruction set, to see whether the compiler has it.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Neither a deadline nor a check of speed: a slow machine is not a defect. Each run draws the same,
# but for whole ones, where what fails is printed so that it can be replayed.
hypothesis.settings.register_profile(
    "fastcheck",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=not IS_WHOLE,
    max_examples=200 if IS_WHOLE else 10,
    print_blob=True,
    database=None,
)
hypothesis.settings.load_profile("fastcheck")


# Nothing is given up because the machine is slow: what a run still has to write to its sinks.
connection.SinkWriter.close.__defaults__ = (600.0,)

# The fake accelerator, once loaded, is that of the whole process, so it has a run of its own
# (`make test-fake-device`).
collect_ignore = []
if os.environ.get("FASTCHECK_FAKE_DEVICE") != "1":
    collect_ignore += [
        "compat/test_device.py",
        "backends/cuda/test_binding.py",
        "backends/cuda/test_binding_errors.py",
        "backends/cuda/test_binding_exponents.py",
        "backends/cuda/test_binding_launches.py",
        "backends/cuda/test_gpu_bench.py",
        "backends/cuda/test_python_launches.py",
        "monitor/hooks/test_cuda.py",
        "monitor/sinks/test_device.py",
        "monitor/devices/test_devices.py",
        "monitor/devices/test_devices_stops.py",
        "monitor/devices/test_host_copies.py",
        "monitor/devices/test_lost_device.py",
        "monitor/devices/test_made_by.py",
        "monitor/devices/test_stats_every.py",
        "monitor/devices/test_waiting.py",
        "monitor/devices/test_watching.py",
        "dump/test_device.py",
        "fakes/test_fake_device.py",
        "fakes/test_fake_device_processes.py",
        "fakes/test_fake_device_torch.py",
        "fakes/test_fake_device_training.py",
        "monitor/op_level/test_async.py",
        "monitor/op_level/test_async_modes.py",
        "fakes/test_fake_graphs.py",
        "monitor/hooks/graphs/test_graph_ends.py",
        "monitor/hooks/graphs/test_graph_parts.py",
        "monitor/hooks/graphs/test_graph_streams.py",
        "monitor/hooks/graphs/test_graphs.py",
        "monitor/on_request/test_device.py",
        "monitor/precision/test_device.py",
        "monitor/op_level/test_device.py",
        "backends/test_mlu.py",
        "backends/test_npu.py",
        "monitor/op_level/test_npu.py",
        "monitor/op_level/test_npu_status.py",
        "monitor/devices/test_npu_saturation.py",
        "monitor/weights/test_movement_device.py",
        "substitution/test_override_device.py",
        "monitor/hooks/protect/test_protect_device.py",
        "ring/test_device.py",
        "selftest/test_device.py",
        "backends/triton/test_device.py",
    ]
elif os.environ.get("FASTCHECK_TEST_KERNELS") == "cuda":
    from fakes import cuda_on_fake

    cuda_on_fake.use()  # before test modules ask for a backend


# torch_npu takes the place of the fake accelerator, and needs an environment of its own.
if os.environ.get("FASTCHECK_FAKE_ACL") != "1":
    collect_ignore += [
        "monitor/devices/test_torch_npu.py",
        "monitor/devices/test_torch_npu_overflow.py",
    ]


#: Files, or single tests, that ``make test-quick`` leaves out: those that compile, train at length
#: or start several processes. Each room keeps others.
SLOW = (
    "accuracy/",
    "backends/cuda/test_build.py",
    "backends/cuda/test_core.py",
    "backends/cuda/test_exponents.py",
    "backends/cuda/test_extension_build.py",
    "backends/cuda/test_instructions.py",
    "backends/cuda/test_kernels.py",
    "backends/cuda/test_merging.py",
    "backends/cuda/test_ptx.py",
    "backends/cuda/test_ptx_exponents.py",
    "backends/cuda/test_ptx_record_and_exponents.py",
    "backends/cuda/test_record_and_exponents.py",
    "backends/portable/test_reading.py",
    "backends/portable/test_values.py",
    "backends/test_any_torch.py",
    "backends/test_extension.py",
    "backends/test_pure_python.py::TestInAProcessOfItsOwn",
    "backends/test_sanitizers.py",
    "backends/triton/test_backend.py::test_importing_and_using",
    "backends/triton/test_compilers.py",
    "callbacks/test_accelerate.py",
    "callbacks/test_docs_programs.py",
    "callbacks/test_huggingface.py",
    "callbacks/test_lightning.py",
    "callbacks/test_package.py",
    "callbacks/test_seals.py::test_weights_of_fsdp",
    "callbacks/test_torchtitan.py",
    "callbacks/test_trl.py",
    "cli/test_commands.py::test_doctor_says_which_variable",
    "cli/test_commands.py::test_doctor_with",
    "cli/test_demo.py",
    "cli/test_dump.py",
    "cli/test_fuzz.py",
    "cli/test_run.py",
    "cli/test_show.py::test_a_closed_pipe",
    "cli/test_show.py::test_an_ascii_terminal",
    "comparison/page/test_two_logs_in_a_browser.py",
    "comparison/test_dumps.py",
    "comparison/test_machines.py",
    "comparison/test_over_time.py",
    "comparison/test_runs.py",
    "comparison/test_sides.py",
    "comparison/test_trainers.py",
    "comparison/test_untrusted_pickles.py::test_no_module_is_imported",
    "compat/test_catch.py",
    "compat/test_msprobe.py",
    "compat/test_ptdbg.py",
    "dump/test_dumper.py::test_a_compiled_model",
    "dump/test_dumper.py::test_the_filters_of_warnings_are_as_before",
    "dump/test_files.py",
    "dump/test_known_readings.py",
    "dump/test_on_stop.py",
    "dump/test_on_stop_conditions.py",
    "dump/test_reference_run.py",
    "fakes/",
    "fleet/page/test_fleet_page_in_a_browser.py",
    "fleet/test_collector.py::test_killed_at_any_write",
    "fleet/test_damage.py",
    "fleet/test_judgement.py",
    "log/test_damaged.py",
    "log/test_failures.py::test_kill_9",
    "monitor/distributed/test_agreement.py",
    "monitor/distributed/test_blame.py",
    "monitor/distributed/test_hostile_store.py",
    "monitor/distributed/test_meeting.py",
    "monitor/distributed/test_replicas.py",
    "monitor/distributed/test_training.py",
    "monitor/hooks/boundaries/",
    "monitor/hooks/protect/test_protect_optimizers.py::test_a_compiled_step_runs_as_ever",
    "monitor/hooks/test_compile.py",
    "monitor/hooks/test_compile_again.py",
    "monitor/loop/test_facts.py",
    "monitor/loop/test_loss_forms.py",
    "monitor/hooks/test_loss_scaling.py::TestGradScaler",
    "monitor/hooks/test_modules.py::TestModes::test_a_compiled_model_still_runs",
    "monitor/hooks/test_observe_compiled.py",
    "monitor/hooks/test_recorder.py",
    "monitor/hooks/test_steps.py::test_the_boundaries_go_with_a_model_that_is_dropped",
    "monitor/on_request/test_asking.py::test_by_another_process",
    "monitor/on_request/test_observed.py::test_of_a_compiled_model",
    "monitor/on_request/test_ranks.py",
    "monitor/op_level/test_consequences.py",
    "monitor/op_level/test_runs.py::test_a_served_model",
    "monitor/op_level/test_runs.py::test_compiled_code",
    "monitor/op_level/test_unobserved.py::test_compiled_code",
    "monitor/reruns/test_ranks.py",
    "monitor/test_bit_identical.py",
    "monitor/test_bounded.py::test_nan_weights_for_ever",
    "monitor/test_cycles.py",
    "monitor/test_ended_early.py",
    "monitor/test_healthy.py",
    "monitor/test_interrupts.py::test_an_interrupt",
    "monitor/origin/test_made_by.py::test_derivatives_are_those_of_torch",
    "monitor/test_open_step.py",
    "monitor/test_process_exit.py",
    "monitor/test_robustness.py::TestLeaks",
    "monitor/test_skipped_updates.py",
    "monitor/test_transformers.py",
    "monitor/test_unobserved_modules.py::test_a_forked_child",
    "monitor/test_watching.py",
    "monitor/weights/test_movement.py",
    "package/test_benches.py::test_they_run_in_small",
    "package/test_docs_commands.py",
    "package/test_exported_members.py::test_import_loads_nothing_heavy",
    "package/test_guides.py",
    "package/test_markers.py",
    "package/test_rooms.py::test_docstrings",
    "package/test_rooms.py::test_the_last_paragraph",
    "package/test_runs.py",
    "package/test_sampling.py::test_time_of_forked",
    "package/test_wheels.py",
    "proving/test_compiled.py",
    "proving/test_doors.py",
    "proving/test_prove.py",
    "record/test_bit_patterns.py",
    "record/test_properties.py",
    "report/page/test_page_in_a_browser.py",
    "report/test_console.py::test_the_command_on_a_terminal",
    "report/test_message.py::test_every_report_comes_back",
    "reproducibility/test_environment.py::test_asking_starts_no_device",
    "reproducibility/test_environment.py::test_every_switch_shows",
    "reproducibility/test_environment.py::test_workers_draw_the_same_again_and_each_its_own",
    "ring/test_native_types.py::TestLock",
    "sealing/test_distributed.py",
    "sealing/test_parts.py::test_shards_of_all_ranks",
    "selftest/test_checks.py",
    "statistics/test_checksum.py",
    "statistics/test_elements.py",
    "statistics/test_exponents.py",
    "statistics/test_flush_denormal.py",
    "statistics/test_stats_api.py::test_ops_compile",
    "statistics/test_stats_values.py",
    "substitution/test_bisect.py",
    "watch/test_causes.py",
    "watch/test_explosions.py",
    "watch/test_invariants.py",
    "watch/test_numbers.py",
    "watch/test_pauses.py",
    "watch/test_precision.py",
    "watch/test_stuck.py",
    "watch/test_watcher.py",
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Random numbers of a test are the same whatever ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _deterministic_algorithms_as_before() -> Iterator[None]:
    """seed_all() switches torch's deterministic algorithms on."""
    were_on = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(were_on)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = f"{item.path.relative_to(TESTS).as_posix()}::{item.nodeid.partition('::')[2]}"
        if name.startswith(SLOW):
            item.add_marker("slow")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the imports made stays: each garbage collection would go through it all, 0.3 s with
    torch's compiler and transformers. None of them may have given the process an accelerator.
    """
    has_fake_device = torch._C._get_privateuse1_backend_name() == "fake"
    if has_fake_device and os.environ.get("FASTCHECK_FAKE_DEVICE") != "1":
        raise pytest.UsageError("a file that loads the fake accelerator is not in collect_ignore")
    gc.collect()
    gc.freeze()
    gc.enable()


#: The file of the test that runs, and the monitors that outlive their test, as those of a module's
#: fixture or of a graph.
_file = ""
_kept = 0


def pytest_runtest_logstart(nodeid: str) -> None:
    """Models and their monitors are cycles: what a file of tests leaves behind is not to observe
    the next one's training. Collections of the next one leave out what is there now, as imports.
    """
    global _file, _kept
    file, _file = _file, nodeid.partition("::")[0]
    if file != _file:
        gc.collect()
        for watcher in list(watchers):  # of a model that something still holds
            with watcher.session.lock:
                watcher.session.removed = True
        _kept = _observing()
        gc.freeze()


def pytest_runtest_logfinish() -> None:
    """Neither is what a test leaves behind to observe the next one's."""
    global _kept
    for generation in (1, 2):
        if _observing() > _kept:
            gc.collect(generation)
    _kept = _observing()


def _observing() -> int:
    return sum(1 for _ in watchers)


def pytest_unconfigure() -> None:
    """Extension modules that count what they leave behind find it collected."""
    gc.unfreeze()


#: Markers of whole files: each is a run of its own with the fake accelerator, and a target of the
#: Makefile.
RUNS = (
    "fake_accelerator",
    "fake_cuda",
    "fake_hooks",
    "fake_mlu",
    "fake_npu",
    "fake_statistics",
    "fake_triton",
    "triton",
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> Optional[bool]:
    """A run of one marker imports no file without it, ``make test-quick`` none of slow tests."""
    run = config.getoption("markexpr")
    if run == "not slow" and collection_path.suffix == ".py":
        name = collection_path.relative_to(TESTS).as_posix()
        return name.startswith(tuple(entry for entry in SLOW if "::" not in entry)) or None
    if run in RUNS and collection_path.suffix == ".py":
        return (
            f"pytest.mark.{run}" not in re.findall(r"[\w.]+", collection_path.read_text()) or None
        )
    return None


class _Elsewhere(pytest.Module):
    """A file of ``collect_ignore`` that was named on the command line: pytest ignores none of
    those.
    """

    def collect(self) -> Any:
        pytest.skip("has a run of its own, see the Makefile", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Optional[pytest.Module]:
    """Its import would give every other file of the run the fake accelerator."""
    if module_path.relative_to(TESTS).as_posix() not in collect_ignore:
        return None
    module: pytest.Module = _Elsewhere.from_parent(parent, path=module_path)
    return module


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slowest-files",
        type=int,
        default=0,
        metavar="N",
        help="print the N files that took the most processor time",
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands over what sweeps left out where this is a worker of pytest-xdist."""
    sampling = sys.modules.get("support.sampling")
    if sampling is not None:
        output = getattr(session.config, "workeroutput", {})
        output["sweeps"] = (sampling.left_out, sampling.total)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes that over from any worker: each has collected all tests."""
    counted = getattr(node, "workeroutput", {}).get("sweeps")  # none of one that crashed
    if counted is not None:
        from support import sampling

        sampling.left_out, sampling.total = counted


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    sampling = sys.modules.get("support.sampling")
    if sampling is not None and sampling.left_out:
        terminalreporter.line(
            f"sweeps left out {sampling.left_out} of {sampling.total} cases; make test-release, or "
            "FASTCHECK_WHOLE=1, runs all"
        )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slowest-files"):
        from support.file_times import FileTimes

        config.pluginmanager.register(FileTimes(config))
    # A shell without job control starts what follows it with `&` (.ci/run) with SIGINT ignored, and
    # processes of tests that are interrupted on purpose would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Reports are as wide as COLUMNS says, and readline sets that for pytest-xdist's workers.
    os.environ.pop("COLUMNS", None)
    config.addinivalue_line(
        "markers",
        "gpu: needs a CUDA device; without one skipped, or failed if FASTCHECK_REQUIRE_GPU=1",
    )
    config.addinivalue_line("markers", "slow: left out by make test-quick (SLOW in conftest.py)")
    for name in RUNS:
        config.addinivalue_line("markers", f"{name}: `make test-{name.replace('_', '-')}` runs it")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if os.environ.get("FASTCHECK_REQUIRE_GPU") == "1":
        pytest.fail("FASTCHECK_REQUIRE_GPU=1, but torch finds no CUDA device", pytrace=False)
    pytest.skip("no CUDA device")


@pytest.fixture
def fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the test's own: a stop writes its log there."""
    monkeypatch.chdir(tmp_path)


def _close_call_modes() -> None:
    """Those that a stop has left."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, CallMode):
            mode.close()


@pytest.fixture
def op_observer(fresh_start: None) -> Iterator[None]:
    """For tests of level="op": no run is left behind."""
    yield
    observer = fastcheck._C.op_observer()
    observer.stop(observer.run())
    _close_call_modes()


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Lets a test call torch.set_num_threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(fresh_start: None, torch_threads: None) -> None:
    """As a fake device's kernels have: some CPU kernels' sums depend on the number of threads."""
    torch.set_num_threads(1)


@pytest.fixture
def fake_accelerator(one_thread: None) -> Iterator[Any]:
    """The fake accelerator, on which nothing is left to run afterwards."""
    from fakes import fake_device

    fake: Any = fake_device.load()
    yield fake
    fake.settle()


@pytest.fixture
def cuda_on_fake_device(fake_accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA backend reads the fake accelerator's tensors."""
    from fakes import cuda_on_fake
    from fastcheck.backends import table

    monkeypatch.setattr(table, "_of_type", table._of_type)  # put back as it is now
    cuda_on_fake.use()


@pytest.fixture
def graphs_on_fake_device(cuda_on_fake_device: None, fake_accelerator: Any) -> Iterator[None]:
    """That, and graphs and their memory are gone afterwards."""
    yield
    gc.collect()
    fake_accelerator.empty_cache()


@pytest.fixture
def fresh_npu(fake_accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fake accelerator as an NPU, whose chip is forgotten afterwards."""
    from support.devices import ascend

    yield
    fake_accelerator.settle()
    monkeypatch.undo()
    ascend.forget_modes()


#: That the second saturates too is seen in backends/test_npu.py; whole runs compute on it as well.
SATURATING = {
    "910A": ("Ascend910A", {}),
    "910B-off": ("Ascend910B1", {"INF_NAN_MODE_FORCE_DISABLE": "1"}),
}


@pytest.fixture(params=list(SATURATING)[: 2 if IS_WHOLE else 1])
def saturating_chip(request: Any, fresh_npu: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An NPU that saturates, as an ascend.Chip."""
    from support.devices import ascend

    name, variables = SATURATING[request.param]
    return ascend.use_chip(monkeypatch, name, **variables)


@pytest.fixture
def computing(saturating_chip: Any) -> Iterator[Any]:
    """Within the test every operator overflows as on that chip: an ascend.Computing."""
    from support.devices import ascend

    with ascend.Computing(saturating_chip) as mode:
        yield mode
        _close_call_modes()  # they lie above it on the stack


@pytest.fixture
def nothing_compiled(fresh_start: None) -> Iterator[None]:
    """Neither before nor afterwards, and no monitor of an earlier test holds torch's settings: one
    that was not removed ends with its model, which is a cycle of references.
    """
    gc.collect()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()
    _freeze_imports_of_compiler()


#: Once: the first compilation imports what every later collection would go through.
_freeze_imports_of_compiler = functools.cache(gc.freeze)
