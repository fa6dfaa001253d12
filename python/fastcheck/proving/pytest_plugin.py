"""Plugin of pytest, by ``-p fastcheck.proving.pytest_plugin`` or a line of conftest.py: the fixture
and the marker ``fastcheck_prove``.
"""

from __future__ import annotations

from typing import Any, Callable

import pytest

from .prove import prove
from .result import Proof

_NAME = "fastcheck_prove"


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marker known."""
    text = (
        "options of fastcheck.prove() for the fixture of this name; every test that uses it has it"
    )
    config.addinivalue_line("markers", f"{_NAME}(**options): {text}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what uses the fixture, so that ``-m fastcheck_prove`` selects it."""
    for item in items:
        if _NAME in getattr(item, "fixturenames", ()) and not item.get_closest_marker(_NAME):
            item.add_marker(_NAME)


@pytest.fixture
def fastcheck_prove(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """fastcheck.prove() with the options of the test's marker. Where a relation differs the test
    fails with the table.
    """
    marker = request.node.get_closest_marker(_NAME)
    options = dict(marker.kwargs) if marker else {}

    def asserted(step: Any, batch: Any, **more: Any) -> Proof:
        proof = prove(step, batch, **{**options, **more})
        if not proof:
            pytest.fail(str(proof), pytrace=False)
        return proof

    return asserted
