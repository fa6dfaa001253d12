"""Plugin of pytest, by ``-p fastcheck.proving.pytest_plugin``: the option ``--fastcheck``, and the
fixtures and markers ``fastcheck_prove`` and ``fastcheck_golden``.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, Callable

import pytest

from fastcheck.monitor.auto_install import AutoInstall

from .golden import Golden
from .prove import prove
from .result import FAILED, Proof

_FIXTURES = ("fastcheck_prove", "fastcheck_golden")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("fastcheck")
    group.addoption(
        "--fastcheck",
        action="store_true",
        help="observe the models of each test from the making of an optimizer on, as fastcheck run "
        "does: a test whose numbers stop being finite fails with the report",
    )
    group.addoption(
        "--fastcheck-update",
        action="store_true",
        help="write the files of the fixture fastcheck_golden anew",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes the markers known."""
    for name in _FIXTURES:
        text = (
            f"options of fastcheck.prove() for the fixture {name}; every test that uses it has it"
        )
        config.addinivalue_line("markers", f"{name}(**options): {text}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what uses a fixture, so that ``-m fastcheck_prove`` selects it."""
    for item in items:
        for name in _FIXTURES:
            if name in getattr(item, "fixturenames", ()) and not item.get_closest_marker(name):
                item.add_marker(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Runs a test with its models observed."""
    if not item.config.getoption("--fastcheck"):
        return (yield)
    with AutoInstall():
        return (yield)


@pytest.fixture
def fastcheck_prove(request: pytest.FixtureRequest) -> Callable[..., Proof]:
    """fastcheck.prove() with the options of the test's marker. Where a relation differs the test
    fails with the table.
    """

    def asserted(step: Any, batch: Any, **options: Any) -> Proof:
        return _proved("fastcheck_prove", request, step, batch, options)

    return asserted


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
        options["relations"] = [Golden(path, update)]
        return _proved("fastcheck_golden", request, step, batch, options)

    return asserted


def _proved(
    name: str, request: pytest.FixtureRequest, step: Any, batch: Any, options: dict[str, Any]
) -> Proof:
    marker = request.node.get_closest_marker(name)
    proof = prove(step, batch, **{**(marker.kwargs if marker else {}), **options})
    if not proof or any(outcome.state == FAILED for outcome in proof.outcomes):
        pytest.fail(str(proof), pytrace=False)
    return proof
