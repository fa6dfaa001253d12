"""Programs in the manner of public bug reports, for reports.py: a file of them for each subject."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from report_programs.program import Program

SUBJECTS = [import_module(f"report_programs.{file.name}") for file in iter_modules(__path__)]
PROGRAMS = [p for subject in SUBJECTS for p in vars(subject).values() if isinstance(p, Program)]

__all__ = ["PROGRAMS", "Program"]
