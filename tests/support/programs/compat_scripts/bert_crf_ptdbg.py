"""A BERT with a CRF on top in float16 with a static loss scale of 256, under which the gradient
that the last Linear makes is beyond float16. Written as ptdbg_ascend documents it.

    bert_crf_ptdbg.py check <overflow_nums>
    bert_crf_ptdbg.py list <name> [no-off]
"""
# ruff: noqa: F403, F405 - scripts of ptdbg_ascend import everything from it; this one is to look like them

import sys

import torch
import torch.nn.functional as F
from torch import nn

from fastcheck.compat.ptdbg import *

LOSS_SCALE = 256


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x):
        scores = torch.matmul(self.query(x), self.key(x).transpose(-1, -2)) / 4
        x = self.norm1(x + self.out(torch.matmul(F.softmax(scores, -1), self.value(x))))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class BertCrf(nn.Module):
    def __init__(self, d=16, tags=5):
        super().__init__()
        self.embed = nn.Embedding(50, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(24))
        self.dense = nn.Linear(d, d)
        self.tagger = nn.Linear(d, tags)
        self.transitions = nn.Parameter(torch.zeros(tags, tags))

    def forward(self, ids, tags):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        emissions = self.tagger(torch.tanh(self.dense(x))).float()
        transitions = self.transitions.float()
        gold = emissions.gather(-1, tags[..., None]).squeeze(-1).sum(1)
        gold = gold + transitions[tags[:, :-1], tags[:, 1:]].sum(1)
        alpha = emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + transitions + emissions[:, t, None], 1)
        return (torch.logsumexp(alpha, 1) - gold).mean()


seed_all(seed=1234)
model = BertCrf().half()
with torch.no_grad():
    # What these weights read is exactly 0 until an update: forward is healthy.
    model.tagger.weight[:, 0] = 3e4 * torch.tensor([1.0, -1, 1, -1, 1])
    model.dense.weight[0] = 0
    model.dense.bias[0] = 0
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

set_dump_path("dump")
if sys.argv[1] == "check":
    register_hook(model, overflow_check, overflow_nums=int(sys.argv[2]))
else:
    register_hook(model, acc_cmp_dump)
    set_dump_switch("ON", mode="list", scope=[sys.argv[2]])

linears = []
for name, module in model.named_modules():
    if isinstance(module, nn.Linear):
        module.register_forward_hook(lambda *_, name=name: linears.append(name))

data = torch.Generator().manual_seed(0)
for step in range(2):
    ids = torch.randint(0, 50, (4, 7), generator=data)
    tags = torch.randint(0, 5, (4, 7), generator=data)
    loss = model(ids, tags)
    if step == 0:
        print("linear 145 is", linears[145], flush=True)
    optimizer.zero_grad()
    (loss * LOSS_SCALE).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= LOSS_SCALE
    optimizer.step()
    print("step", step, "done", flush=True)

if "no-off" not in sys.argv and sys.argv[1] == "list":
    set_dump_switch("OFF")
