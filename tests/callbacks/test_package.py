"""fastcheck.callbacks imports a framework when its adapter is used, and names a missing one."""

from __future__ import annotations

import pytest

import fastcheck
from support.processes import run_code


def test_frameworks_are_imported_when_an_adapter_is_used() -> None:
    done = run_code(
        "import sys, fastcheck\n"
        "frameworks = 'transformers lightning accelerate deepspeed composer ray'\n"
        "assert not set(frameworks.split()) & set(sys.modules)\n"
        "assert len(fastcheck.callbacks.__all__) == 8\n",
        is_fresh=True,
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_framework_is_an_error_with_a_hint() -> None:
    frameworks = {
        "HuggingFace": "transformers",
        "Lightning": "lightning",
        "Composer": "composer",
        "Ray": "ray",
    }
    done = run_code(
        "import sys, fastcheck\n"
        f"for name, framework in {frameworks}.items():\n"
        "    sys.modules[framework] = None\n"
        "    try:\n"
        "        getattr(fastcheck.callbacks, name)()\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    for line, (name, framework) in zip(done.stdout.splitlines(), frameworks.items(), strict=True):
        assert line.startswith(f"fastcheck.callbacks.{name} needs {framework}: pip install")


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Keras'"):
        fastcheck.callbacks.Keras  # noqa: B018  (the access is what is tested)
    with pytest.raises(AttributeError, match=r"'Lightening'; did you mean 'Lightning'\?"):
        fastcheck.callbacks.Lightening  # noqa: B018  (as above)


def test_dir_lists_the_adapters() -> None:
    assert dir(fastcheck.callbacks) == sorted(fastcheck.callbacks.__all__)
