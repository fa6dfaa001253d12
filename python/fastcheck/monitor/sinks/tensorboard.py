"""TensorBoard: an event file of one's own, or a SummaryWriter that was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional


def library() -> Any:
    """The module; ImportError if tensorboard is not installed."""
    from torch.utils import tensorboard

    return tensorboard


def active() -> TensorBoard:
    """Writes to ``runs/<date and host>-fastcheck``, beside what a SummaryWriter() writes."""
    return TensorBoard()


class TensorBoard:
    """``writer``: a SummaryWriter, which stays open. ``directory``: that of an event file, which is
    made when something is written.
    """

    def __init__(self, writer: Any = None, directory: Optional[str] = None) -> None:
        self._given = writer is not None
        self._writer = writer
        self._directory = directory

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._open().add_scalar(name, value, step)

    def text(self, name: str, text: str, step: int) -> None:
        self._open().add_text(name, text, step)

    def alert(self, title: str, text: str, step: int) -> None:
        # Four spaces: Markdown shows the columns of the report as they are.
        lines = "\n".join(f"    {line}" for line in text.splitlines())
        self._open().add_text("fastcheck/stop", f"{title}\n\n{lines}", step)
        self._open().flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.flush() if self._given else self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            self._writer = library().SummaryWriter(self._directory, comment="-fastcheck")
        return self._writer
