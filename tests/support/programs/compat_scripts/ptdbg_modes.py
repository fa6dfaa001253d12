"""Every mode of set_dump_switch(), one after the other, each for one step."""

import torch
from torch import nn

from fastcheck.compat import ptdbg

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.Softmax(-1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ptdbg.register_hook(model, ptdbg.acc_cmp_dump)

for path, options in {
    "all": {},
    "list": {"mode": "list", "scope": ["Functional_linear_1_forward"]},
    "range": {"mode": "range", "scope": ["Functional_relu_0", "Functional_softmax_0"]},
    "api_list": {"mode": "api_list", "api_list": ["relu"]},
    "stack": {"mode": "stack", "scope": ["Functional_relu_0"]},
    "api_stack": {"mode": "api_stack"},
    "summary": {"mode": "all", "summary_only": True},
    "typo": {"mode": "list", "scope": ["Functional_linaer_0_forward"]},
}.items():
    ptdbg.set_dump_path("modes", dump_tag=path)
    ptdbg.set_dump_switch("ON", **options)
    model(torch.randn(3, 8)).square().sum().backward()
    optimizer.step()
    loss = torch.zeros(1).item()  # between two steps
    ptdbg.set_dump_switch("OFF")
    model(torch.randn(3, 8))
print("trained to the end")
