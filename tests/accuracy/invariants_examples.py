"""Healthy programs for invariants.py in the manner of the official PyTorch examples that
``invariants_healthy.py`` has not, and of the trainers.

Each is a generator: it gives the models, with which fastcheck is installed, and then trains.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from accuracy.invariants_healthy import STEPS, cnn, healthy, images, step, words


@healthy
def mnist_rnn() -> Iterator[Any]:
    """Rows of an image as a sequence, with dropout, and a test after each epoch."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 32, batch_first=True)
            self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.25)
            self.first, self.second = nn.Linear(32, 16), nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output, _ = self.rnn(x.view(-1, 8, 8))
            x = self.drop(F.relu(self.first(self.norm(output[:, -1]))))
            return F.log_softmax(self.second(x), dim=1)

    model = Net()
    yield model
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    for _ in range(3):
        model.train()
        for _ in range(50):
            x, y = images()
            step(optimizer, F.nll_loss(model(x), y))
        model.eval()
        with torch.no_grad():
            for _ in range(5):
                model(images()[0])
        scheduler.step()


@healthy
def mnist_hogwild() -> Iterator[Any]:
    """Several optimizers on shared parameters that take turns, as processes of Hogwild do."""
    model = cnn().share_memory()
    yield model
    workers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5) for _ in range(2)]
    for number in range(STEPS):
        x, y = images()
        step(workers[number % 2], F.nll_loss(F.log_softmax(model(x), dim=1), y))


@healthy
def mnist_forward_forward() -> Iterator[Any]:
    """Each layer has an optimizer of its own, and no gradient passes between layers."""
    layers = nn.ModuleList(nn.Linear(74, 32) if n == 0 else nn.Linear(32, 32) for n in range(2))
    yield layers
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.03) for layer in layers]
    for _ in range(30):
        x, y = images(32)
        wrong = (y + torch.randint(1, 10, y.shape)) % 10
        good, bad = (torch.cat([F.one_hot(t, 10).float(), x.flatten(1)], 1) for t in (y, wrong))
        for layer, optimizer in zip(layers, optimizers):
            for _ in range(5):
                high, low = (layer(F.normalize(one)).relu() for one in (good, bad))
                margins = torch.cat([2 - high.square().mean(1), low.square().mean(1) - 2])
                step(optimizer, F.softplus(margins).mean())
            good, bad = high.detach(), low.detach()


@healthy
def actor_critic() -> Iterator[Any]:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.action, self.value = (
                nn.Linear(4, 32),
                nn.Linear(32, 2),
                nn.Linear(32, 1),
            )

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = F.relu(self.body(x))
            return F.softmax(self.action(x), dim=-1), self.value(x)

    model = Policy()
    yield model
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for _ in range(40):
        logs, values, rewards, state = [], [], [], torch.randn(4)
        for _ in range(12):
            chances, value = model(state)
            chosen = torch.distributions.Categorical(chances)
            move = chosen.sample()
            logs.append(chosen.log_prob(move))
            values.append(value.squeeze())
            rewards.append(float(move == (state.sum() > 0)))
            state = torch.randn(4)
        returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        gain = returns - torch.stack(values).detach()
        actor = -(torch.stack(logs) * gain).sum()
        step(optimizer, actor + F.smooth_l1_loss(torch.stack(values), returns, reduction="sum"))


@healthy
def snli() -> Iterator[Any]:
    """Two sentences through one encoder, embeddings that are frozen, and a falling rate."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.project = nn.Embedding(30, 16), nn.Linear(16, 24)
            self.encoder = nn.LSTM(24, 24, batch_first=True, bidirectional=True)
            self.out = nn.Sequential(
                nn.Linear(96, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 3)
            )
            self.embed.weight.requires_grad_(False)

        def encode(self, ids: torch.Tensor) -> torch.Tensor:
            _, (hidden, _) = self.encoder(F.relu(self.project(self.embed(ids))))
            return hidden.transpose(0, 1).flatten(1)

        def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return self.out(torch.cat([self.encode(first), self.encode(second)], 1))

    model, criterion = Classifier(), nn.CrossEntropyLoss()
    yield model, criterion
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    for number in range(STEPS):
        model.train()
        first = words(16)
        second = first.roll(1, 1) if number % 2 else words(16)
        step(optimizer, criterion(model(first, second), first[:, 0] % 3))
        if number % 50 == 49:
            model.eval()
            with torch.no_grad():
                for _ in range(4):
                    model(words(16), words(16))


@healthy
def graph_attention() -> Iterator[Any]:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(16, 8))
            self.left, self.right = (nn.Parameter(torch.empty(8, 1)) for _ in range(2))
            for parameter in self.parameters():
                nn.init.xavier_normal_(parameter)
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
            h = F.dropout(x, 0.6, self.training) @ self.weight
            scores = F.leaky_relu(h @ self.left + (h @ self.right).T, 0.2)
            scores = scores.masked_fill(graph == 0, float("-inf")).softmax(1)
            scores = F.dropout(scores, 0.6, self.training)
            return self.head(F.elu(scores @ h)).log_softmax(1)

    model = Attention()
    yield model
    graph = torch.eye(50) + (torch.rand(50, 50) < 0.1)
    x, y = torch.randn(50, 16), torch.randint(0, 4, (50,))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    for _ in range(STEPS):
        model.train()
        step(optimizer, F.nll_loss(model(x, graph)[:20], y[:20]))
        model.eval()
        with torch.no_grad():
            model(x, graph)


@healthy
def language_translation() -> Iterator[Any]:
    """An encoder and a decoder with masks and padding, as nn.Transformer has them."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = (nn.Embedding(30, 32, padding_idx=0) for _ in range(2))
            self.body = nn.Transformer(32, 2, 1, 1, 64, batch_first=True)
            self.head = nn.Linear(32, 30)
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]) < 0
            padding = source == 0
            x = self.body(
                self.source(source),
                self.target(target),
                tgt_mask=mask,
                src_key_padding_mask=padding,
                tgt_key_padding_mask=target == 0,
                memory_key_padding_mask=padding,
            )
            return self.head(x)

    model, criterion = Translator(), nn.CrossEntropyLoss(ignore_index=0)
    yield model, criterion
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    for number in range(STEPS):
        model.train()
        source = words(8) % 29 + 1
        source[:, 8 + number % 4 :] = 0
        target = (source.flip(1) + (source.flip(1) > 0)) % 30
        target[:, 0] = 1
        logits = model(source, target[:, :-1])
        step(optimizer, criterion(logits.flatten(0, 1), target[:, 1:].flatten()))


@healthy
def vision_transformer() -> Iterator[Any]:
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(1, 32, 2, 2)
            self.token = nn.Parameter(torch.zeros(1, 1, 32))
            self.positions = nn.Parameter(torch.randn(1, 17, 32) * 0.02)
            layer = nn.TransformerEncoderLayer(
                32, 4, 64, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
            )
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.patches(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
            return self.head(self.body(x)[:, 0])

    model = Vision()
    yield model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        x, y = images()
        step(optimizer, F.cross_entropy(model(x), y, label_smoothing=0.1))
        scheduler.step()


# Trainers, whose loops are not this file's


@healthy
def transformers_trainer() -> Iterator[Any]:
    """Accumulation, clipping, a warm-up, evaluations and checkpoints."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=40,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: Any = transformers.GPT2LMHeadModel(config)
    yield model
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 40, (256, 12))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=60, per_device_train_batch_size=8, gradient_accumulation_steps=2,
            learning_rate=1e-3, warmup_steps=5, eval_strategy="steps", eval_steps=20, save_steps=30,
            use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=20,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:32])
        trainer.train()


@healthy
def accelerate_loop() -> Iterator[Any]:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    x, y = images(320)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=16, shuffle=True
    )
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 60)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    yield model
    for _ in range(6):
        model.train()
        for rows, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(rows), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            for rows, _ in loader:
                model(rows)


@healthy
def lightning_module() -> Iterator[Any]:
    import lightning

    class Program(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = cnn()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    program = Program()
    yield program
    data = torch.utils.data.TensorDataset(*images(320))
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=5, accelerator="cpu", logger=False, gradient_clip_val=1.0,
            accumulate_grad_batches=2, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder, enable_checkpointing=False,
        )  # fmt: skip
        loaders = [torch.utils.data.DataLoader(data, 16, shuffle=shuffled) for shuffled in (1, 0)]
        trainer.fit(program, *loaders)
