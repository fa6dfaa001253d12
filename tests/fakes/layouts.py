"""Views of a 1-d tensor of 12000 elements, one for each way in which a tensor can lie in memory."""

from __future__ import annotations

from typing import Callable

import torch

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x[:2100].view(30, 70).t(),
    "channels last": lambda x: x[:3360].view(2, 7, 12, 20).permute(0, 3, 1, 2),
    "every second": lambda x: x[::2],
    "every third from the second on": lambda x: x[1::3],
    "columns 8 to 40": lambda x: x[: 90 * 96].view(90, 96)[:, 8:40],
    "columns 1 to 40": lambda x: x[: 90 * 96].view(90, 96)[:, 1:40],
    "a middle slice": lambda x: x[: 8 * 16 * 64].view(8, 16, 64)[:, 4:12, 16:48],
    "every second row": lambda x: x[: 64 * 128].view(64, 128)[::2],
    "expanded": lambda x: x[:129].view(3, 1, 43).expand(3, 50, 43),
    "one value": lambda x: x[5].expand(5000),
    "no dimensions": lambda x: x[7],
    "empty": lambda x: x[:0].view(0, 7).t(),
    "unfolded": lambda x: x[:500].unfold(0, 32, 3),
    "a diagonal": lambda x: x[: 90 * 90].view(90, 90).diagonal(),
    "five dimensions": lambda x: (
        x[: 2 * 3 * 4 * 5 * 66].view(2, 3, 4, 5, 66)[:, :, 1:3, :, ::2].permute(3, 0, 2, 1, 4)
    ),
}
