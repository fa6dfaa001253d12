"""Plugin of pytest, by ``-p fastcheck.proving.pytest_plugin``: the option ``--fastcheck``, and the
fixtures and markers ``fastcheck_prove`` and ``fastcheck_golden``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

from fastcheck.errors import ConfigError
from fastcheck.monitor.auto_install import AutoInstall

from .case import TestedStep
from .computed import Computed, is_site
from .prove import prove
from .relation import Relation
from .result import FAILED, Proof

_FIXTURES = ("fastcheck_prove", "fastcheck_golden")
_OPTIONS = {
    "--fastcheck": "observe the models of each test from the making of an optimizer on, as "
    "fastcheck run does: a test whose numbers stop being finite fails with the report",
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
    return functools.partial(_proved, "fastcheck_prove", request)


class Golden(Relation):
    """The step as a file has it: its loss, what the model returned, gradients and updates. The
    tolerance is that of every relation: measured, so that another machine may round otherwise.

    Args:
        path: the file, which torch.load() reads.
        update: it is written, with the tensors of the step as it is now.
    """

    name = "golden record"
    kinds = ("loss", "output", "gradient", "update")

    def __init__(self, path: Path, update: bool = False) -> None:
        self._path, self._update = path, update

    def run(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        now = {key: t for key, t in base.tensors.items() if not is_site(key)}
        if self._update:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({key: t.detach().cpu().clone() for key, t in now.items()}, self._path)
            return base
        kept = torch.load(self._path, map_location="cpu", weights_only=True)
        shapes = [
            {" ".join(key): tuple(t.shape) for key, t in tensors.items()} for tensors in (kept, now)
        ]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                "the golden record is of another step",
                expected=str(dict(shapes[0].items() - shapes[1].items())),
                got=str(dict(shapes[1].items() - shapes[0].items())),
                hint="pytest --fastcheck-update writes it anew",
            )
        return Computed(kept)


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
        return _proved("fastcheck_golden", request, step, batch, **options)

    return asserted


def _proved(
    name: str, request: pytest.FixtureRequest, step: Any, batch: Any, **options: Any
) -> Proof:
    marker = request.node.get_closest_marker(name)
    proof = prove(step, batch, **{**(marker.kwargs if marker else {}), **options})
    if not proof or any(outcome.state == FAILED for outcome in proof.outcomes):
        pytest.fail(str(proof), pytrace=False)
    return proof
