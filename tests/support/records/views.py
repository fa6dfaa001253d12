"""Views of a long tensor: layouts that a kernel has to read."""

from __future__ import annotations

from collections.abc import Callable

import torch

View = Callable[[torch.Tensor], torch.Tensor]


LAYOUTS: dict[str, View] = {
    "transposed": lambda x: x[:7000].view(70, 100).t(),
    "permuted": lambda x: x[:9000].view(20, 30, 15).permute(2, 0, 1),
    "channels_last": lambda x: x[:8640].view(3, 12, 15, 16).permute(0, 3, 1, 2),
    "dense_inside_a_larger_storage": lambda x: x[11 : 11 + 7000].view(70, 100).t(),
    "size_one_dimensions": lambda x: x[:5000].as_strided((1, 50, 1, 100), (7, 1, 3, 50)),
    "every_second": lambda x: x[3:10003:2],
    "every_second_of_the_last": lambda x: x[:12000].view(100, 120)[:, ::2],
    "columns": lambda x: x[:13000].view(100, 130)[:, 5:70],
    "one_column": lambda x: x[:13000].view(100, 130)[:, 7],
    "rows_apart": lambda x: x[:13000].view(13, 1000)[::3],
    "long_rows_cut": lambda x: x[:13000].view(2, 6500)[:, 1:],
    "strided_transposed": lambda x: x[:12000].view(100, 120)[:, ::3].t(),
    "inner_block": lambda x: x[:12000].view(20, 20, 30)[1:19, 2:18, 3:29],
    "diagonal": lambda x: x[:10000].view(100, 100).diagonal(),
    "expanded_rows": lambda x: x[:100].view(1, 100).expand(90, 100),
    "expanded_columns": lambda x: x[:90].view(90, 1).expand(90, 100),
    "expanded_scalar": lambda x: x[5].expand(70, 70),
    "overlapping": lambda x: x.as_strided((60, 100), (50, 1)),
    "repeated_elements": lambda x: x.as_strided((30, 40, 5), (1, 2, 3)),
    "many_dimensions": lambda x: x[:6561].view(3, 3, 3, 3, 3, 3, 3, 3)[:, ::2, 1:, :, ::2, :, 1:],
    "gaps_of_size_one": lambda x: x[:9000].view(9, 10, 100)[:, 3:4, :],
    "zero_dimensional": lambda x: x[17],
    "zero_dimensional_of_a_view": lambda x: x[:12000].view(100, 120).t()[3, 4],
    "empty_slice": lambda x: x[:12000].view(100, 120)[:, 5:5],
    "empty_and_strided": lambda x: x.as_strided((0, 6), (12, 2)),
    "one_element_strided": lambda x: x.as_strided((1, 1), (12, 2)),
}
