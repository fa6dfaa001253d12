"""Two steps of training under the module and the config.json on the command line."""

import importlib
import sys

import torch
import torch.nn.functional as F
from torch import nn

tool = importlib.import_module(sys.argv[1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.conv = nn.Conv1d(8, 8, 1)
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.act = nn.GELU()
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        h = self.table(x)
        h = h + self.conv(h.transpose(1, 2)).transpose(1, 2)
        h = self.act(self.norm(self.first(h)))
        h = h + 1 / (2 + torch.linalg.vector_norm(h, dim=-1, keepdim=True))
        weights = torch.softmax(h @ h.transpose(1, 2) / 4, -1)
        return self.head(weights @ h)


tool.seed_all(seed=1234, mode=True)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
debugger = tool.PrecisionDebugger(config_path=sys.argv[2])
for _ in range(2):
    x, y = torch.randint(0, 10, (2, 5)), torch.randint(0, 3, (10,))
    debugger.start(model=model)
    loss = F.cross_entropy(model(x).flatten(0, 1), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    debugger.stop()
    debugger.step()
print(loss.item())
