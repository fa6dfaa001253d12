"""A folder whose user is killed at its n-th change."""

from __future__ import annotations

from typing import Any, Callable

from fastcheck.fleet.store import Folder


class Killed(BaseException):
    pass


class Fragile(Folder):
    """Is killed at the n-th change of the folder: before it, in the middle, or after it."""

    left = 0
    moment = ""

    def write(self, path: str, data: Any) -> None:
        self._change(lambda: super(Fragile, self).write(path, data), path, data)

    def delete(self, path: str) -> None:
        self._change(lambda: super(Fragile, self).delete(path), path, None)

    def _change(self, change: Callable[[], None], path: str, data: Any) -> None:
        type(self).left -= 1
        if self.left > 0:
            change()
            return
        if self.moment == "after":
            change()
        elif self.moment == "amid" and data is not None:
            super().write(path + ".part", bytes(data)[: len(bytes(data)) // 2])
        raise Killed


def is_killed(work: Callable[[], object], moment: str, number: int) -> bool:
    Fragile.left, Fragile.moment = number, moment
    try:
        work()
    except Killed:
        return True
    return False
