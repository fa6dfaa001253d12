"""The CPU kernels under the address and the undefined-behaviour sanitizer, held to the scalar one.

``make test-sanitizers`` and ``make test-release`` have all instruction sets compiled with them, and
add the thread sanitizer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT
from support.sampling import IS_WHOLE

SOURCE = Path(__file__).parent / "sanitized"


def built(sanitizers: str) -> Path:
    """The program, built anew where a source changed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cmake, ninja = (shutil.which(name, path=path) for name in ("cmake", "ninja"))
    assert cmake and ninja, "both are in requirements-build.txt"
    build = ROOT / "build" / "sanitized" / f"{sanitizers.partition(',')[0]}-{int(IS_WHOLE)}"
    options = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DSANITIZERS={sanitizers}"]
    if IS_WHOLE:
        options.append("-DSANITIZED=avx2;avx512;avx512_vnni;avx512_vbmi;neon")
    must(cmake, "-S", SOURCE, "-B", build, "-G", "Ninja", *options)
    must(cmake, "--build", build, "--parallel", "2")
    return build / "kernels"


def must(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode != 0 and "cannot find -l" in done.stderr + done.stdout:
        pytest.skip("the compiler has no sanitizers' libraries")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kernels_read_within_their_tensors_at_any_alignment() -> None:
    # Its own leak check needs ptrace, which containers deny.
    program = built("address,undefined")
    assert must("env", "ASAN_OPTIONS=detect_leaks=0", program).strip(), "no kernel but scalar"


@pytest.mark.skipif(not IS_WHOLE, reason="make test-sanitizers runs this")
def test_threads_share_tensors_and_kernels() -> None:
    must(built("thread"), "threads")
