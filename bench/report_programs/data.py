"""Data, labels, and weights that nothing has written."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import rnn

from report_programs.program import (
    BAD,
    BAD_DATA,
    LOG_OF_ZERO,
    LOSS,
    NO_RATE,
    ZERO_DIVISION,
    Made,
    chain,
    data,
    here,
    mlp,
    program,
    update,
    whole,
)


@program(
    "zhengqili/MegaDepth#38",
    "log of a ground truth with missing depths (0) is -inf: the target, not the model",
    place=LOSS + r"|target|label",
    operator=r"\blog\b|target|\bsub\b|SubBackward",
    kind=LOG_OF_ZERO + r"|target\w* (?:hold|held|is|was|are|were)|before the (?:loss|model)",
    advice=r"clamp|mask|target|eps|data",
    never=(r"the loss itself overflowed", NO_RATE),
)
def log_of_missing_depth(fixed: bool) -> Made:
    model = mlp(6, 16, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        depth = data(i, 8, 4).abs() + 0.5
        if i == BAD:
            depth[3, 1:] = 0.0
        goal = (depth.clamp_min(1e-3) if fixed else depth).log()  # FAULT
        return update(optimizer, (model(data(i + 9, 8, 6)) - goal).square().mean())

    return [model], step


@program(
    "wenet-e2e/wenet#2299",
    "CTC: a transcript that is longer than the frames has no alignment: inf, and NaN gradients",
    place=LOSS + r"|ctc|CTC",
    operator=r"ctc|Ctc",
    kind=r"longer|target length|frames|alignment|zero_infinity",
    advice=r"zero_infinity|longer|length",
    never=(NO_RATE,),
)
def transcript_longer_than_frames(fixed: bool) -> Made:
    model = nn.Sequential(nn.Conv1d(4, 16, 3, stride=2), nn.ReLU(), nn.Conv1d(16, 9, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        logs = model(data(i, 2, 4, 25)).log_softmax(1).permute(2, 0, 1)
        size = 30 if i == BAD else 5
        lengths = torch.tensor([size, 5]), torch.full((2,), len(logs))
        goal = whole(i, 1, 9, 2, 30)
        loss = F.ctc_loss(logs, goal, lengths[1], lengths[0], zero_infinity=fixed)  # FAULT
        return update(optimizer, loss)

    return [model], step


@program(
    "zhouhaoyi/Informer2020#402",
    "a missing value in one row of the data",
    place=r"input|batch",
    operator=r"input\[0\]|\binput\b|\bbatch\b",
    kind=BAD_DATA + r"|from outside",
    advice=r"data",
    never=(r"lower the learning rate", NO_RATE),
)
def missing_value_in_batch(fixed: bool) -> Made:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        if i == BAD and not fixed:
            x[5, 2] = math.nan  # FAULT: row 5, element 32
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "mllam/neural-lam#136",
    "features are divided by their standard deviation, which is 0 for one that never changes",
    place=r"input|batch",
    operator=r"\bdiv\b|input",
    kind=ZERO_DIVISION + "|" + BAD_DATA,
    advice=r"standard deviation|data|eps",
    never=(r"lower the learning rate", NO_RATE),
)
def constant_feature_standardised(fixed: bool) -> Made:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 16, 6)
        if i == BAD:
            x[:, 3] = 0  # no rain
        spread = x.std(0)
        x = (x - x.mean(0)) / (spread + 1e-6 if fixed else spread)  # FAULT
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 16)))

    return [model], step


@program(
    "huggingface/transformers#30953",
    "a head that is not in the checkpoint is left as torch.empty made it",
    place=r"head\.weight",
    operator=r"parameter|head\.weight",
    kind=r"checkpoint|initiali[sz]ed|before the first",
    advice=r"checkpoint|initiali[sz]ed|torch\.empty",
    never=(NO_RATE,),
)
def head_is_not_initialised(fixed: bool) -> Made:
    model = chain(body=nn.Linear(6, 16), head=nn.Linear(16, 3))
    if not fixed:
        with torch.no_grad():  # as memory that held other things may look
            model.head.weight.view(torch.int32).fill_(0x7FC01234)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(data(i, 8, 6)), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "Nixtla/neuralforecast#186",
    "a target that is missing (NaN) in one row",
    place=LOSS + r"|target",
    operator=r"mse|Mse|target|goal",
    kind=r"data|target|no graph",
    advice=r"data|target|goal",
    never=(NO_RATE, r"the loss itself overflowed"),
)
def target_that_is_missing(fixed: bool) -> Made:
    model = mlp(6, 16, 2)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        goal = data(i + 9, 8, 2)
        if i == BAD and not fixed:
            goal[5, 1] = math.nan  # FAULT
        return update(optimizer, F.mse_loss(model(data(i, 8, 6)), goal))

    return [model], step


@program(
    "SeanNaren/deepspeech.pytorch#272",
    "log of the spectrum of a clip of silence is -inf before the model reads it",
    place=r"\binput\b|input\[0\]|batch",
    operator=r"\blog\b|batch|input\[0\]",
    kind=BAD_DATA + "|" + LOG_OF_ZERO,
    advice=r"data|log of zero|eps|clamp",
    never=(NO_RATE,),
)
def spectrum_of_silence(fixed: bool) -> Made:
    model = nn.Sequential(nn.Conv1d(33, 16, 3), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    window = torch.hann_window(64)

    def features(sound: Tensor) -> Tensor:
        power = torch.stft(sound, 64, window=window, return_complex=True).abs().square()
        return (power + 1e-6 if fixed else power).log()  # FAULT

    def step(i: int) -> Tensor:
        sound = data(i, 3, 640)
        if i == BAD:
            sound[1] = 0
        return update(
            optimizer, F.cross_entropy(model(features(sound)).mean(-1), whole(i, 0, 4, 3))
        )

    return [model], step


@program(
    "deepbeepmeep/Wan2GP#1628",
    "a cache that was not initialised: NaN in places that are masked by addition of -inf",
    place=r"\battn\b|Attention|cache",
    operator=r"cache|matmul|bmm|\badd\b",
    kind=r"buffer|NaN|cache",
    advice=r"zeros|initiali|empty|wrote|code that makes it",
    never=(NO_RATE, r"mask\w* whole"),
    steps=3,
)
def cache_that_is_not_written(fixed: bool) -> Made:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)
            filling = 0.0 if fixed else math.nan  # what torch.empty may hold
            self.register_buffer("cache", torch.full((2, 12, 16), filling), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            cache = self.cache.clone()
            cache[:, : x.shape[1]] = torch.cat([k, v], -1)
            keys, values = cache.chunk(2, -1)
            bias = torch.zeros(12).masked_fill(torch.arange(12) >= x.shape[1], -math.inf)
            return (q @ keys.transpose(1, 2) + bias).softmax(-1) @ values  # FAULT

    model = chain(embed=nn.Embedding(20, 8), attn=Attention(), head=nn.Linear(8, 20))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        tokens = whole(i, 0, 20, 2, 8)
        return update(optimizer, F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))

    return [model], step


@program(
    "huggingface/diffusers#14411",
    "noise levels are stretched in NumPy, and of one step that is 0/0",
    place=r"before the model|batch|data",
    operator=r"input|batch|data|target",
    kind=BAD_DATA + r"|NaN",
    advice=r"before the model|look at the data|data",
    never=(NO_RATE,),
    steps=2,
)
def one_noise_level_stretched(fixed: bool) -> Made:
    levels = np.linspace(1.0, 1.0 / 4, 4 if fixed else 1)
    with np.errstate(all="ignore"):
        rest = 1 - levels
        levels = 1 - rest / (rest[-1] / 0.9)  # FAULT
    model = mlp(7, 24, 6)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x, noise = data(i, 8, 6), data(i + 50, 8, 6)
        level = here(torch.from_numpy(levels)).float()[i % len(levels)].expand(8, 1)
        out = model(torch.cat([(1 - level) * x + level * noise, level], 1))
        return update(optimizer, F.mse_loss(out, noise - x))

    return [model], step


@program(
    "chemprop/chemprop#1303",
    "a target that is missing is NaN, comes from NumPy, and is given to mse_loss",
    place=BAD_DATA + "|" + LOSS,
    operator=r"target|missing",
    kind=BAD_DATA + r"|not finite before",
    advice=r"look at the data|mend|leave such rows out",
    never=(NO_RATE, r"everything that it read was finite"),
)
def missing_target_from_numpy(fixed: bool) -> Made:
    model = mlp(6, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        table = np.random.default_rng(i).normal(size=(8, 3)).astype(np.float32)
        if i == BAD:
            table[2, 1] = np.nan  # FAULT
        known = here(torch.from_numpy(np.nan_to_num(table) if fixed else table))
        return update(optimizer, F.mse_loss(model(data(i, 8, 6)), known))

    return [model], step


@program(
    "a detector of rare labels",
    "pos_weight is Inf for a label without positives, and Inf * 0 is NaN",
    place=LOSS,
    operator=r"pos_weight|binary_cross_entropy",
    kind=r"x/0|count of 0",
    advice=r"x/0|count of 0",
    never=(NO_RATE, r"samples of this step"),
)
def label_without_positives(fixed: bool) -> Made:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    positives = torch.tensor([10.0, 5.0, 0.0])
    weight = (100 - positives) / (positives.clamp_min(1) if fixed else positives)  # FAULT
    criterion = nn.BCEWithLogitsLoss(pos_weight=weight)

    def step(i: int) -> Tensor:
        x = data(i, 16, 6)
        y = (x[:, :3] > 0.8).float()
        y[:, 2] = 0
        return update(optimizer, criterion(model(x), y))

    return [model], step


@program(
    "Atcold/NYU-DLSP20#19",
    "output[:, -1] of a packed sequence, which is padding for all but the longest",
    place=r"pad_packed_sequence",
    operator=r"last place",
    kind=r"have padding there",
    advice=r"h_n",
    is_finite=True,
    steps=24,
)
def last_place_of_a_packed_sequence(fixed: bool) -> Made:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
            output, (state, _) = self.lstm(packed)
            last = rnn.pad_packed_sequence(output, batch_first=True)[0][:, -1]  # FAULT
            return self.head(state[-1] if fixed else last)

    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        lengths = whole(i, 2, 9, 16).cpu()
        return update(
            optimizer, F.cross_entropy(model(data(i, 16, 8, 4), lengths), whole(i + 1, 0, 2, 16))
        )

    return [model], step
