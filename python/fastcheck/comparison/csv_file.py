"""Writes details as CSV: one row per pair that is not equal to the bit."""

from __future__ import annotations

import csv
from typing import TextIO

from fastcheck.errors import CompareError, explain, printable
from fastcheck.utils.text.csv_cells import csv_text
from fastcheck.utils.text.numbers import format_shape

from .row import COLUMNS, Row

__all__ = ["CsvRows"]


class CsvRows:
    """Writes rows to a file. CompareError when that can't be written."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._file: TextIO = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115  (closed by close())
        except OSError as error:
            raise self._failed(error) from error
        self._writer = csv.writer(self._file)
        self._writer.writerow(COLUMNS)

    def write(self, row: Row) -> None:
        values = row.to_dict()
        try:
            self._writer.writerow([_cell(values[column]) for column in COLUMNS])
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> CompareError:
        return CompareError(
            explain(
                "the CSV can't be written",
                expected="a file that can be created, and room for it",
                got=f"{self._path}: {error.strerror or error}",
            )
        )


def _cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, list):
        return format_shape(value)
    if isinstance(value, float):
        return repr(value)
    return csv_text(printable(value)) if isinstance(value, str) else value
