"""Compiles the fake ACL runtime into build/fake_acl, once per content of the sources, torch and
torch_npu: libascendcl.so, and empty libraries of the other names that torch_npu loads.

Operators come from csrc/operators.txt, two functions for each line. What torch_npu's libraries want
and nobody has becomes a function that prints its name and aborts.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fakes.fake_device.build import SOURCE as DRIVER
from fakes.fake_device.build import compile_flags

__all__ = ["LIBRARY", "NAMES", "build", "torch_npu_folder"]

SOURCE = Path(__file__).resolve().parent / "csrc"
BUILD = Path(__file__).resolve().parents[3] / "build" / "fake_acl"
UNITS = ("devices", "memory_api", "overflow", "opapi")
DRIVER_UNITS = ("counters", "streams", "memory", "graphs")
LIBRARY = "libascendcl.so"
#: Others that torch_npu is linked against or opens by name; all that is in them is in LIBRARY.
NAMES = (
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libopapi.so",
)

_TYPES = {
    "T": "const aclTensor*",
    "O": "aclTensor*",
    "L": "const aclTensorList*",
    "OL": "aclTensorList*",
    "S": "const aclScalar*",
    "SL": "const aclScalarList*",
    "I": "const aclIntArray*",
    "B": "const aclBoolArray*",
    "dtype": "aclDataType",
    "bool": "bool",
    "int": "int64_t",
    "int8": "int8_t",
    "double": "double",
    "float": "float",
}


def torch_npu_folder() -> Path:
    """Where torch_npu is installed, without importing it.

    Raises:
        ModuleNotFoundError: it isn't.
    """
    found = importlib.util.find_spec("torch_npu")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("torch_npu is not installed", name="torch_npu")
    return Path(found.origin).parent


def _operator(line: str) -> str:
    """The two C functions of a line of operators.txt."""
    found = re.fullmatch(r"(move )?(\w+): (.*?) = (.*)", line)
    if found is None:
        raise ValueError(f"operators.txt: not understood: {line}")
    is_move, name, arguments, expression = found.groups()
    pairs = [argument.split() for argument in arguments.split(", ")]
    names = [pair[1] for pair in pairs]
    written = [name for kind, name in pairs if kind in ("O", "OL")]
    parameters = "".join(f"{_TYPES[kind]} {name}_, " for kind, name in pairs)
    taken = ", ".join(f"{name} = fake_acl::given({name}_)" for name in names)
    is_list = any(kind == "OL" for kind, _ in pairs)
    results = written[0] if is_list else f"fake_acl::Tensors{{{', '.join(written)}}}"
    to = written[0] if len(written) == 1 else results
    unused = "".join(f"(void){name}; " for name in names)
    held = re.sub(r"\b(\w+)\b", r"fake_acl::given(\1_)", ", ".join(written))
    planned = held if is_list else f"fake_acl::Tensors{{{held}}}"
    if is_move:
        planned = "{}"  # no result that could saturate
    return (
        f"FAKE_ACL_EXPORT int {name}GetWorkspaceSize({parameters}uint64_t* workspace,\n"
        f"    aclOpExecutor** executor) {{\n"
        f'  return fake_acl::plan("{name}", workspace, executor, {planned}, [{taken}] {{\n'
        f"    {unused}fake_acl::put({to}, {expression});\n  }});\n}}\n"
        f"FAKE_ACL_EXPORT int {name}(void*, uint64_t, aclOpExecutor* executor,\n"
        f"    aclrtStream stream) {{ return fake_acl::run(executor, stream); }}\n"
    )


def _operators() -> str:
    lines = (SOURCE / "operators.txt").read_text().splitlines()
    made = [_operator(line) for line in lines if line and not line.startswith("#")]
    return '#include "opapi.h"\n\n' + "\n".join(made)


def _symbols(path: Path, which: str) -> Iterator[str]:
    command = ["nm", which, str(path)] if path.suffix == ".o" else ["nm", "-D", which, str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in said.splitlines():
        yield line.split()[-1].split("@")[0]


def _absent(npu: Path, made: Sequence[Path]) -> str:
    """Functions for what CANN has and this runtime doesn't."""
    wanted = {
        name
        for library in (*npu.glob("lib/lib*.so"), *npu.glob("_C*.so"))
        if library.name != "libop_plugin_atb.so"  # opened only where its own needs are met
        for name in _symbols(library, "--undefined-only")
        if re.match(r"(acl|rt|Msprof)[A-Z]?\w+$", name) and not name.startswith("rtld")
    }
    wanted -= {name for path in made for name in _symbols(path, "--defined-only")}
    body = "".join(
        f'FAKE_ACL_EXPORT void {name}() {{ unimplemented("{name}"); }}\n' for name in sorted(wanted)
    )
    return (
        "#include <string>\n#define FAKE_ACL_EXPORT "
        'extern "C" __attribute__((visibility("default")))\n'
        "namespace fake_acl { [[noreturn]] void unimplemented(const char*, "
        'const std::string& = ""); }\nusing fake_acl::unimplemented;\n' + body
    )


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"building the fake ACL failed:\n{' '.join(command)}\n{done.stderr}")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _object(name: str, text: str, base: str, compiler: str, flags: Sequence[str]) -> Path:
    path = BUILD / f"{name}-{_digest(base, text)}.o"
    if not path.exists():
        source = path.with_suffix(".cpp")
        source.write_text(text)
        part = path.with_suffix(".part")
        _run([compiler, *flags, "-c", str(source), "-o", str(part)])
        part.rename(path)
    return path


def build() -> Path:
    """The folder of the libraries. Needs a C++20 compiler ($CXX, else g++) and nm.

    Raises:
        ModuleNotFoundError: torch_npu is not installed, whose headers and wants are asked.
        RuntimeError: it can't be compiled; with what the compiler said.
    """
    npu = torch_npu_folder()
    compiler = os.environ.get("CXX", "g++")
    acl = npu / "include" / "third_party" / "acl" / "inc"
    flags = [*compile_flags(), "-std=c++20", f"-I{SOURCE}", f"-I{DRIVER}", f"-isystem{acl}"]
    headers = [p.read_text() for p in sorted((*SOURCE.glob("*.h"), *DRIVER.glob("runtime.h")))]
    base = _digest(torch.__version__, compiler, *flags, *headers)
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:  # several test processes may start at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        texts = {unit: (SOURCE / f"{unit}.cpp").read_text() for unit in UNITS}
        texts.update({unit: (DRIVER / f"{unit}.cpp").read_text() for unit in DRIVER_UNITS})
        texts["operators"] = _operators()
        made = [_object(name, text, base, compiler, flags) for name, text in texts.items()]
        made.append(_object("absent", _absent(npu, made), base, compiler, flags))
        folder = BUILD / _digest(*map(str, made))
        if not (folder / NAMES[-1]).exists():
            folder.mkdir(exist_ok=True)
            libraries = Path(torch.__file__).parent / "lib"
            wanted = [*map(str, made), f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
            wanted += ["-ltorch_cpu", "-lc10", "-pthread"]
            _link(compiler, folder / LIBRARY, wanted)
            for name in NAMES:  # a name is looked up in what a library needs, too
                needed = ["-Wl,--no-as-needed,-rpath,$ORIGIN", str(folder / LIBRARY)]
                _link(compiler, folder / name, needed)
    return folder


def _link(compiler: str, path: Path, inputs: Sequence[str]) -> None:
    part = path.with_suffix(".part")
    _run([compiler, "-shared", f"-Wl,-soname,{path.name}", "-o", str(part), *inputs])
    part.rename(path)
