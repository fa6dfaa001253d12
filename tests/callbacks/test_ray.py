"""The callback in Ray Train's controller, called as the controller does; skipped without Ray."""

from __future__ import annotations

import pickle

import pytest
from torch import nn

import fastcheck
from support.programs.training import Apply, chain, poison, stopped, train

pytest.importorskip("ray.train")

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("default:::(?!fastcheck)"),
]


def a_stop() -> fastcheck.OverflowDetected:
    model = chain(fc=nn.Linear(8, 8), hole=Apply(poison))
    fastcheck.install(model)
    return stopped(train, model, 1)


def test_the_culprit_is_named_in_the_controller() -> None:
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

    stop, callback = a_stop(), fastcheck.callbacks.Ray()
    sent = pickle.loads(pickle.dumps(UserExceptionWithTraceback(stop, "Traceback ...")))
    with pytest.warns(fastcheck.FastcheckWarning, match="hole") as caught:
        callback.after_exception(None, {1: sent, 0: ValueError("another")})
    assert callback.stop is not None and str(callback.stop) == str(stop)
    assert "1 of 2 that failed" in str(caught[0].message)


def test_other_exceptions_are_left_alone() -> None:
    callback = fastcheck.callbacks.Ray()
    callback.after_exception(None, {0: ValueError("another")})
    assert callback.stop is None


def test_it_is_a_callback_that_a_run_takes() -> None:
    import ray.train

    assert isinstance(fastcheck.callbacks.Ray(), ray.train.UserCallback)
