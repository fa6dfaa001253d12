"""A warning points at the user's line, at any depth of fastcheck's frames below it."""

import sys
import threading
import warnings

import pytest
import torch

import fastcheck
from fastcheck.errors import warn


def _internal():
    """A function that warns and whose frame belongs to the package, by its globals."""
    scope = {"__name__": "fastcheck.monitor.hooks", "warn": warn}
    exec(compile("def report(*_):\n    warn('found')\n", "internal.py", "exec"), scope)
    return scope["report"]


def _line_of(caught):
    assert [str(warning.message) for warning in caught] == ["found"]
    assert caught[0].category is fastcheck.FastcheckWarning
    return caught[0].filename, caught[0].lineno


def _here(offset):
    return __file__, sys._getframe(1).f_lineno + offset


def test_a_direct_call():
    with pytest.warns(fastcheck.FastcheckWarning) as caught:
        _internal()()
    assert _line_of(caught) == _here(-1)


def test_a_hook_within_forward():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_forward_hook(_internal())
    with pytest.warns(fastcheck.FastcheckWarning) as caught:
        model(torch.ones(1, 2))
    assert _line_of(caught) == _here(-1)


def test_a_hook_within_backward():
    model = torch.nn.Linear(2, 2)
    loss = model(torch.ones(1, 2)).sum()
    model.weight.register_hook(_internal())
    with pytest.warns(fastcheck.FastcheckWarning) as caught:
        loss.backward()
    assert _line_of(caught) == _here(-1)


def test_a_hook_of_an_optimizer_step():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(_internal())
    with pytest.warns(fastcheck.FastcheckWarning) as caught:
        optimizer.step()
    assert _line_of(caught) == _here(-1)


def test_a_thread_with_code_of_the_user():
    def work():
        _internal()()

    with pytest.warns(fastcheck.FastcheckWarning) as caught:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert _line_of(caught) == _here(-6)


def test_a_thread_without_code_of_the_user():
    with pytest.warns(fastcheck.FastcheckWarning) as caught:
        thread = threading.Thread(target=_internal())
        thread.start()
        thread.join()
    assert _line_of(caught) == ("internal.py", 2)


def test_an_import(tmp_path, monkeypatch):
    (tmp_path / "fastcheck_user_module.py").write_text("report()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("builtins.report", _internal(), raising=False)
    with pytest.warns(fastcheck.FastcheckWarning) as caught:
        import fastcheck_user_module  # noqa: F401  # imported for its warning
    assert _line_of(caught) == (str(tmp_path / "fastcheck_user_module.py"), 1)


def test_a_warning_is_shown_once_for_each_line():
    report = _internal()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            report()
        report()
    assert len(caught) == 2


def test_a_warning_can_be_made_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error", fastcheck.FastcheckWarning)
        with pytest.raises(fastcheck.FastcheckWarning, match="found"):
            _internal()()
