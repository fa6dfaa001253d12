"""Finds secrets by name, and cuts credentials out of what is recorded."""

from __future__ import annotations

import re

# The short ones are also parts of other words (`PASSES` of a compiler, `PATH`): they count alone.
_SECRET = (
    r"(?:TOKEN|KEY|SECRET|PASSW|PASSPHRASE|PWD|CREDENTIAL|CREDS|AUTH|BEARER|COOKIE|PRIVATE|SIGNATURE"
    r"|(?<![A-Z])(?:PASS|PAT|PW|SAS|SIG)(?![A-Z]))"
)
_NAME = re.compile(_SECRET, re.IGNORECASE)
# Up to the last @ before the host's end (RFC 3986, 3.2.1); a password that should have been quoted
# may hold a slash, where a port can't be meant.
_USER = re.compile(r"(?<=://)(?:[^\s/?#]*@|[^\s/?#:@]*:(?!\d+(?:[/?#]|$))\S*@)")
# `name=value` as in a URL's query or a connection string, `--name value`, `Name: Bearer value`.
_VALUE = re.compile(
    rf"([\w.-]*{_SECRET}[\w.-]*(?:\s*=\s*|:\s+)|--[\w-]*{_SECRET}[\w-]*\s+)"
    r"(?:(?:Bearer|Basic)\s+)?[^\s&;,]+",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name may hold a secret."""
    return _NAME.search(name) is not None


def without_credentials(text: str) -> str:
    """``text`` with URLs that have no user and password, and ``***`` for what its names call a
    secret.
    """
    return _VALUE.sub(r"\1***", _USER.sub("", text))
