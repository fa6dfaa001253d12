"""Runs Python programs in processes that are forked from one with torch and fastcheck imported, in
place of new interpreters: the imports take longer than most of these programs.

Where fastcheck is to be imported by the program (``is_fresh``, or another FASTCHECK_ variable than
this process has), the server has torch alone. A program starts as ``python`` starts it (its
arguments, directory, environment, ``sys.path`` and ``__main__``) and ends as a process does, with
its atexit functions and exit status. What depends on the interpreter's own start (its options,
variables that torch reads when it is imported) needs subprocess.run().
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

TESTS = Path(__file__).resolve().parents[1]

__all__ = ["run_code", "run_python"]


def _own(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name.startswith("FASTCHECK_")}


_OWN = _own(os.environ)


def run_python(
    *arguments: object,
    cwd: Optional[Path] = None,
    env: Optional[Mapping[str, str]] = None,
    is_fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """``python *arguments``, waited for: a script, ``-c code`` or ``-m module``, and its arguments.

    ``env``: added to this process's environment.
    """
    environment = {**os.environ, **(env or {})}
    server = _server(
        os.getpid(), "" if is_fresh or _own(environment) != _OWN else "fastcheck.types"
    )
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "arguments": [str(argument) for argument in arguments],
            "cwd": str(cwd or Path.cwd()),
            "env": environment,
            "output": [f"{folder}/out", f"{folder}/error"],
        }
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out, error = (Path(path).read_text(errors="replace") for path in request["output"])
    return subprocess.CompletedProcess(request["arguments"], code, out, error)


def run_code(
    code: str, *, env: Optional[Mapping[str, str]] = None, is_fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """``python -c code`` that can import the tests' modules."""
    path = os.pathsep.join(p for p in (str(TESTS), os.environ.get("PYTHONPATH")) if p)
    return run_python("-c", code, env={"PYTHONPATH": path, **(env or {})}, is_fresh=is_fresh)


@functools.cache
def _server(owner: int, imports: str) -> subprocess.Popen[str]:
    """That of the process ``owner``: a forked child must not read its parent's answers."""
    server = subprocess.Popen(
        [sys.executable, __file__, *imports.split()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "OMP_NUM_THREADS": "1"},
    )

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()

    atexit.register(end)
    return server


def _serve() -> None:
    """A line of standard input is a program; its exit status goes to standard output."""
    del sys.path[0]  # the folder of this file
    gc.disable()  # nothing of what is imported goes
    # The second is what the first optimizer imports; none starts a thread.
    import torch
    import torch._dynamo  # noqa: F401  # imported for the processes that are forked

    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # a collection of a program's would go through all of it, and copy its pages
    gc.enable()
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(request)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(request: dict[str, Any]) -> None:
    """The child of a fork runs the program, and ends."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in zip((1, 2), request["output"]):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  (for as long as the process lives)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115  # for as long as the process lives
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    code = 0
    try:
        _run(request["arguments"], request["env"].get("PYTHONPATH", ""))
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, _RUNPY):
            trace = trace.tb_next
        # As the interpreter does before it calls the hook.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


_RUNPY = "<frozen runpy>"


class _MainOfSpawned(types.ModuleType):
    """``__mp_main__``, where a spawned process has the classes that it pickles: multiprocessing
    sets it to the ``__main__`` of its first import, which is the server's.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["__main__"], name)


def _run(arguments: list[str], python_path: str) -> None:
    import runpy

    first, *rest = arguments
    sys.modules["__mp_main__"] = _MainOfSpawned("__mp_main__")
    sys.path[:1] = [path for path in python_path.split(os.pathsep) if path]
    if first == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        sys.path.insert(0, "")
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif first == "-m":
        name, *rest = rest
        sys.argv = [name, *rest]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        sys.modules["__main__"] = types.ModuleType("__main__")
        runpy.run_path(first, run_name="__main__")


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    _serve()
