"""Plugin of pytest: the option ``--fastcheck``, the fixtures and markers ``fastcheck_prove`` and
``fastcheck_golden``.

pytest imports this module wherever fastcheck is installed. A module of the package would import all
of it, torch included.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import pytest

if TYPE_CHECKING:
    from fastcheck.types import Proof

__all__ = [
    "fastcheck_golden",
    "fastcheck_prove",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
]

_FIXTURES = ("fastcheck_prove", "fastcheck_golden")
_OPTIONS = {
    "--fastcheck": "observe the models of each test, from their first call or the making of an "
    "optimizer on: a test whose numbers stop being finite fails with the report",
    "--fastcheck-update": "write the files of the fixture fastcheck_golden anew",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("fastcheck")
    for name, text in _OPTIONS.items():
        group.addoption(name, action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Makes the markers known."""
    text = "options of fastcheck.prove() for the fixture; every test that uses it has the marker"
    for name in _FIXTURES:
        config.addinivalue_line("markers", f"{name}(**options): {text}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what uses a fixture, so that ``-m fastcheck_prove`` selects it; with ``--fastcheck``
    has each test run with its models observed.
    """
    for item in items:
        if item.config.getoption("--fastcheck"):  # no wrapper: pluggy 1.2 changed their form
            observed = functools.partial(_run_observed, item.runtest)
            item.runtest = observed  # type: ignore[method-assign]  # this test's alone
        for name in _FIXTURES:
            if name in getattr(item, "fixturenames", ()) and not item.get_closest_marker(name):
                item.add_marker(name)


def _run_observed(run: Callable[[], None]) -> None:
    from fastcheck.monitor.auto_install import AutoInstall

    with AutoInstall(at_calls=True):
        run()


@pytest.fixture
def fastcheck_prove(request: pytest.FixtureRequest) -> Callable[..., Proof]:
    """fastcheck.prove() with the options of the test's marker. Where a relation differs the test
    fails with the table.
    """
    return functools.partial(_proved, "fastcheck_prove", request)


@pytest.fixture
def fastcheck_golden(request: pytest.FixtureRequest) -> Callable[..., Proof]:
    """Compares a step with what it computed when ``golden/<file>-<test>.pt`` was written, beside
    the test's file: loss, outputs, gradients, updates. A tensor differs that has moved by more than
    ten times what one ulp of every weight moves it. The arguments are those of fastcheck.prove().
    """
    where = Path(request.node.path)
    name = re.sub(r"[^\w.-]+", "_", f"{where.stem}-{request.node.name}")
    path = where.parent / "golden" / f"{name}.pt"
    update = request.config.getoption("--fastcheck-update")

    def asserted(step: Any, batch: Any, **options: Any) -> Proof:
        if not update and not path.exists():
            pytest.fail(f"there is no {path}: pytest --fastcheck-update writes it", pytrace=False)
        from fastcheck.proving.models import Golden

        options["relations"] = [Golden(path, update)]
        return _proved("fastcheck_golden", request, step, batch, **options)

    return asserted


def _proved(
    name: str, request: pytest.FixtureRequest, step: Any, batch: Any, **options: Any
) -> Proof:
    from fastcheck.proving.prove import prove
    from fastcheck.proving.result import FAILED

    marker = request.node.get_closest_marker(name)
    proof = prove(step, batch, **{**(marker.kwargs if marker else {}), **options})
    if not proof or any(outcome.state == FAILED for outcome in proof.outcomes):
        pytest.fail(str(proof), pytrace=False)
    return proof
