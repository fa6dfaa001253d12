"""Details as CSV, one row a pair that is not equal to the bit, written as they are found."""

from __future__ import annotations

import csv
from typing import TextIO

from .._errors import CompareError, explain
from .row import COLUMNS, Row
from .spelling import spell_shape

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
                came=f"{self._path}: {error.strerror or error}",
            )
        )


def _cell(value: object) -> object:
    if value is None:
        return ""
    if isinstance(value, list):
        return spell_shape(value)
    if isinstance(value, float):
        return repr(value)
    return value
