"""The devices of the tests that run on the CPU and, under ``make test-fake-device``, on the fake
accelerator too.
"""

from __future__ import annotations

import os

import pytest

from support.sampling import IS_WHOLE

FAKE = bool(os.environ.get("FASTCHECK_FAKE_DEVICE"))

if FAKE:
    from fakes import fake_device

    # Before the first backward: autograd counts the devices there.
    DEVICE = fake_device.load().name()
else:
    DEVICE = "cpu"


@pytest.fixture(
    params=[
        # It has run in `make test` already.
        pytest.param("cpu", marks=pytest.mark.skipif(FAKE and not IS_WHOLE, reason="a sample")),
        pytest.param(
            "device", marks=pytest.mark.skipif(not FAKE, reason="make test-fake-device runs it")
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    return "cpu" if request.param == "cpu" else DEVICE
