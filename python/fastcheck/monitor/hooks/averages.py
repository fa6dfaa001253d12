"""An average of a model, such as a teacher, whose weights move and whose BatchNorm statistics do
not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Optional

from torch.nn.modules.batchnorm import _BatchNorm

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.monitor.weight_updates import checksums

# Looks that read tensors, of which four tell.
_LOOKS = 5


class StaleStatistics:
    """Looks now and then at one BatchNorm in evaluation mode whose weight no optimizer holds, where
    another of its size is trained: reads its weight and its running mean, a few times in a run, and
    waits for a device then.
    """

    def __init__(self) -> None:
        self._looks = 0
        # The node, its calls so far, and the checksums of its weight and mean, at the last look.
        self._last: Optional[tuple[ModuleNode, int, list[int]]] = None

    def look(self, nodes: Sequence[ModuleNode], held: Collection[int]) -> str:
        """Names it if since the last look it was called and its weight has moved, as have the
        statistics of the other, while its own have not. ``held``: what optimizers hold.
        """
        norms = [(n, m) for n in nodes if isinstance(m := n.module(), _BatchNorm)]
        trained = {m.num_features: m for _, m in norms if m.training and id(m.weight) in held}
        at_rest = ((n, m) for n, m in norms if not m.training and id(m.weight) not in held)
        pair = next(((n, m) for n, m in at_rest if m.num_features in trained), None)
        last, self._last = self._last, None
        if pair is None or self._looks == _LOOKS:
            return ""
        self._looks += 1
        node, module = pair
        read = module.weight, module.running_mean, trained[module.num_features].running_mean
        now = checksums([tensor for tensor in read if tensor is not None])
        self._last = node, node.total_calls, now
        if last is None or last[0] is not node or last[1] == node.total_calls or 0 in now:
            return ""
        are_same = [before == after for before, after in zip(last[2], now)]
        is_stale = are_same == [False, True, False]
        return f"{node.path} ({type(module).__name__})" if is_stale else ""
