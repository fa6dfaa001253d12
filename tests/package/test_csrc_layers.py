"""Includes of csrc: downwards only, no circles, torch only where allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.paths import ROOT

#: Each folder of csrc, lowest layer first. Folders of one layer do not include each other.
LAYERS = (
    ("core",),
    ("cpu", "cuda"),
    ("kernels",),
    ("abi3", "torch/read", "torch/kernels"),
    ("torch/cuda", "torch/python"),
    ("torch/operators",),
    ("torch/hooks", "torch/op_level", "torch/dump"),
    ("torch/binding",),
)
LEVEL = {folder: level for level, folders in enumerate(LAYERS) for folder in folders}

# The shim that takes the place of CUDA's headers where the kernels are compiled for a CPU.
OUTSIDE = {("cuda/platform.cuh", "cuda_on_cpu/cuda_on_cpu.h")}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]', re.MULTILINE)
TORCH_HEADERS = re.compile(r"(ATen|c10|torch|caffe2|pybind11)/|Python\.h$")

Includes = Mapping[str, list[tuple[bool, str]]]


def includes_of(csrc: Path) -> Includes:
    """Of each file, its includes: whether written with quotes, and the path."""
    files = (p for p in csrc.rglob("*") if p.suffix in (".h", ".cuh", ".cpp", ".cu"))
    return {
        path.relative_to(csrc).as_posix(): [
            (quote == '"', target) for quote, target in INCLUDE.findall(path.read_text("utf-8"))
        ]
        for path in files
    }


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def faults(includes: Includes) -> list[str]:
    """Every include that the layers forbid, in words."""
    found = [
        f"{path}: its folder has no layer" for path in includes if folder_of(path) not in LEVEL
    ]
    for path, targets in includes.items():
        source = folder_of(path)
        for quoted, target in targets:
            if not quoted:
                if target == "Python.h" and source == "abi3":
                    continue
                if TORCH_HEADERS.match(target) and not source.startswith("torch/"):
                    found.append(f"{path} includes {target}, a header of torch or Python")
            elif target not in includes:
                if (path, target) not in OUTSIDE:
                    found.append(f"{path} includes {target}, which is not in csrc")
            elif source != folder_of(target) and LEVEL.get(source, 0) <= LEVEL[folder_of(target)]:
                found.append(f"{path} includes {target}, which is not in a lower layer")
    graph = {
        path: [target for quoted, target in targets if quoted] for path, targets in includes.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("a circle of includes: " + " <- ".join(error.args[1]))
    return found


def test_includes_run_downwards() -> None:
    includes = includes_of(ROOT / "csrc")
    assert set(map(folder_of, includes)) == set(LEVEL)
    assert faults(includes) == []


def test_no_file_includes_all_operators_of_torch() -> None:
    """Each file is compiled for ten seconds longer with them (torch/extension.cmake)."""
    headers = ("ATen/ATen.h", "ATen/Functions.h", "torch/all.h", "torch/extension.h")
    includes = includes_of(ROOT / "csrc").items()
    assert [path for path, found in includes if any(name in headers for _, name in found)] == []


@pytest.mark.parametrize(
    ("path", "line", "fault"),
    [
        ("core/record.h", '#include "cpu/reduce.h"', "not in a lower layer"),
        ("cuda/plan.h", '#include "cpu/reduce.h"', "not in a lower layer"),
        ("torch/hooks/call.h", '#include "torch/dump/module.h"', "not in a lower layer"),
        ("cpu/kernel.h", "#include <ATen/ATen.h>", "a header of torch or Python"),
        ("cuda/launch.h", "#  include <Python.h>", "a header of torch or Python"),
        ("kernels/table.h", "#include <Python.h>", "a header of torch or Python"),
        ("abi3/module.cpp", "#include <ATen/ATen.h>", "a header of torch or Python"),
        ("core/record.h", '#include "record.h"', "not in csrc"),
        ("core/platform.h", '#include "core/accumulator.h"', "a circle of includes"),
        ("new/file.h", "", "its folder has no layer"),
    ],
)
def test_a_forbidden_include_is_found(path: str, line: str, fault: str) -> None:
    includes = dict(includes_of(ROOT / "csrc"))
    added = [(quote == '"', target) for quote, target in INCLUDE.findall(line)]
    includes[path] = [*includes.get(path, []), *added]
    assert any(fault in found for found in faults(includes))
