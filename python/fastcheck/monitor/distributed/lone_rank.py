"""A rank that can't reach the others: it warns once, and posts its events in the store."""

from __future__ import annotations

import re
from typing import Optional

from .channel import Agreed, Channel, Lost

# How long a message that must be in the store is waited for.
_POST_SECONDS = 2.0


class LoneRank:
    """The part of RankAgreement that needs no other rank to answer."""

    rank: int
    is_alone: bool
    _channel: Optional[Channel]
    _agreed: Optional[Agreed]
    _proposals: dict[tuple[int, int], bytes]
    _warning: str

    def _stop_proxy(self) -> None:
        raise NotImplementedError

    def _alone(self) -> Optional[Agreed]:
        """One look into the store for what another rank that is alone stopped for."""
        agreed, self._agreed = self._agreed, None
        agreed = agreed or self._posted()
        if agreed is None and self._proposals:
            first = min(list(self._proposals))
            step, own = first[0], self._proposals[first]
            self._post(step, own)
            # Not always its own: another rank may have been first.
            agreed = self._posted(_POST_SECONDS) or Agreed(step, self.rank, own, together=False)
        if agreed is not None:
            self._proposals.clear()
        return agreed

    def _post(self, step: int, message: bytes) -> None:
        if self._channel is None:
            return
        try:
            self._channel.post(step, self.rank, message)
        except Exception:
            self._channel = None

    def _posted(self, timeout_seconds: float = 0.0) -> Optional[Agreed]:
        if self._channel is None:
            return None
        try:
            return self._channel.posted(timeout_seconds)
        except ValueError as error:
            self._warning = f"fastcheck: a message in the ranks' store was left out: {error}."
            return None
        except Exception:
            # The store is gone with the process that served it: from here on really alone.
            self._channel = None
            return None

    def _lose(self, error: Exception) -> None:
        """Warns once that the others can't be reached, and marks the channel broken for those that
        still wait."""
        if self.is_alone:
            return
        self.is_alone = True
        self._stop_proxy()
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        if not isinstance(error, Lost):
            # Without the source line that gloo starts with.
            reason = f"the connection failed: {re.sub(r'^.[^]]*[.]cc:[0-9]+. ', '', reason)[:120]}"
        if self._channel is not None:
            try:
                self._channel.mark_broken(reason)
            except Exception:
                self._channel = None
        self._warning = (
            f"fastcheck: rank {self.rank} can't agree with the other ranks ({reason}). Training "
            "is not affected; from now on this rank watches alone, and may stop alone."
        )
