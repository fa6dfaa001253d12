"""A loop over steps with a Dumper around each, as Cambricon Catch has it."""

import torch
from torch import nn

from fastcheck.compat.catch import Dumper

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for name, level in (("values", 0), ("sums", 1)):
    for step in range(4):
        x, labels = torch.randn(3, 8), torch.randint(0, 4, (3,))
        with Dumper(dump_dir=name, enable=step in (1, 3), use_cpu=True, level=level):
            optimizer.zero_grad()
            loss = criterion(model(x), labels)
            loss.backward()
            optimizer.step()

again = Dumper("again")
for _ in range(2):
    with again:
        model(torch.randn(3, 8))
