"""Text in the cells of a CSV file."""

from __future__ import annotations

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(text: str) -> str:
    """``text`` as a cell that no spreadsheet takes for a formula: an apostrophe goes before one.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    return f"'{text}" if text.startswith(_FORMULA) else text
