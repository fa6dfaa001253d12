"""A training loop as msprobe documents it, once for each config.json on the command line."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from fastcheck.compat.msprobe import PrecisionDebugger, seed_all


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(config_path):
    seed_all(seed=1234)
    debugger = PrecisionDebugger(config_path=config_path)
    model, criterion = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        x, labels = torch.randn(6, 8), torch.randint(0, 4, (6,))
        with torch.no_grad():
            model(x * float("nan"))  # an evaluation, which is not observed
        if step == 1:
            # What leaves the first block's GELU overflows in the Linear after it.
            with torch.no_grad():
                model.blocks[0].down.weight.fill_(3e38)
        debugger.start(model)
        loss = criterion(model(x), labels)
        loss.backward()
        debugger.stop()
        optimizer.step()
        optimizer.zero_grad()
        debugger.step()


for path in sys.argv[1:]:
    train(path)
    print("done", path, flush=True)
