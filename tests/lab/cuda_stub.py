"""Builds libraries of the names that NVIDIA's have, with each function that the given ones call.

    python cuda_stub.py CUDA_INCLUDE OUT LIBRARY...

What a function does is in cuda_stub.cpp, or it is recorded and returns 0.
"""

from __future__ import annotations

import collections
import re
import subprocess
import sys
from pathlib import Path

BODIES = Path(__file__).with_name("cuda_stub.cpp")
RUNTIME = "libcudart."
#: Of functions without a version: the beginning of the name, and of the library's.
LIBRARIES = {
    "cusparseLt": "libcusparseLt.",
    "nccl": "libnccl.",
    "cuFile": "libcufile.",
    "nvshmem": "libnvshmem_host.",
    "NVSHMEM": "libnvshmem_host.",
    "cu": "libcuda.",
}


def output(*command: object) -> str:
    text = [str(part) for part in command]
    return subprocess.run(text, capture_output=True, text=True, check=True).stdout


def symbols(library: Path, which: str) -> list[tuple[str, str]]:
    """Names, and their versions or nothing."""
    lines = output("nm", "-D", "--with-symbol-versions", which, library).splitlines()
    return [
        (name, version) for line in lines for name, _, version in [line.split()[-1].partition("@")]
    ]


def build(include: str, out: Path, libraries: list[Path]) -> None:
    own = {name for path in libraries for name, _ in symbols(path, "--defined-only")}
    sonames = {
        soname
        for path in libraries
        for soname in re.findall(r"\[(lib(?:cu|nv|nccl)[^\]]*)\]", output("readelf", "-d", path))
    }
    functions: dict[str, set[str]] = collections.defaultdict(set)
    versions = {}
    for path in libraries:
        for name, version in symbols(path, "--undefined-only"):
            if version in sonames:
                functions[version].add(name)
                versions[version] = version
                continue
            start = next((s for s in LIBRARIES if (version or name).startswith(s)), None)
            if start is None or name in own:
                continue
            soname = next(s for s in sonames if s.startswith(LIBRARIES[start]))
            functions[soname].add(name)
            if version:
                versions[soname] = version
    written = set(re.findall(r"\b\w*(?:cu|CU)\w*\b", BODIES.read_text()))
    for soname in sorted(sonames, key=lambda soname: not soname.startswith(RUNTIME)):
        source = out / f"{soname}.cpp"
        lines = ["int stub_note(const char*);"]
        for name in sorted(functions[soname] - written):
            lines.append(f'int {name}() {{ return stub_note("{name}"); }}')
        source.write_text("\n".join(['extern "C" {', *lines, "}\n"]))
        script = out / f"{soname}.map"
        script.write_text(f"{versions.get(soname, '')} {{ global: *; }};\n")
        command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", f"-I{include}", str(source)]
        command += [f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}"]
        is_runtime = soname.startswith(RUNTIME)
        command.append(str(BODIES if is_runtime else next(out.glob(f"{RUNTIME}so.*[0-9]"))))
        subprocess.run([*command, "-o", str(out / soname)], check=True)


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]), [Path(argument) for argument in sys.argv[3:]])
