"""Models of the stress test: they copy every tensor a monitor may observe, and inject faults."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

Key = tuple[str, str, str, int, int]  # role, module, label, step, call


class Book:
    """Copies of all tensors that one model's monitor may observe, by the records' identity."""

    def __init__(self) -> None:
        self.step = 0
        self.copies: dict[Key, torch.Tensor] = {}
        self._calls: dict[str, tuple[int, int]] = {}

    def next_call(self, path: str) -> int:
        step, calls = self._calls.get(path, (-1, 0))
        call = calls if step == self.step else 0
        self._calls[path] = self.step, call + 1
        return call

    def keep(self, role: str, path: str, label: str, call: int, tensor: torch.Tensor) -> None:
        self.copies[role, path, label, self.step, call] = tensor.detach().clone()

    def keep_output(self, path: str, call: int, y: torch.Tensor) -> None:
        """Keeps a copy of a module's output and of its gradient."""
        self.keep("output", path, "output", call, y)
        if y.requires_grad:
            key = ("grad_output", path, "output", self.step, call)

            def keep_gradient(gradient: torch.Tensor) -> None:
                self.copies[key] = gradient.detach().clone()

            y.register_hook(keep_gradient)


class ServedBook(Book):
    """The copies of a model that many threads call at once: only the monitor has the order."""

    def __init__(self) -> None:
        super().__init__()
        self._count = itertools.count()

    def next_call(self, path: str) -> int:
        return next(self._count)


class Layer(nn.Linear):
    """Keeps a copy of its output."""

    def __init__(self, path: str, book: Book, *sizes: int) -> None:
        super().__init__(*sizes)
        self.path, self.book = path, book

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call = self.book.next_call(self.path)
        y = torch.tanh(super().forward(x))
        self.book.keep_output(self.path, call, y)
        return y


class Trouble(nn.Module):
    """The identity, with a fault on request: it raises, sets an element, or changes the stream."""

    def __init__(self, path: str, book: Book) -> None:
        super().__init__()
        self.path, self.book = path, book
        self.todo: Any = None
        self.has_damaged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call = self.book.next_call(self.path)
        todo, self.todo = self.todo, None
        if todo == "raise":
            raise ValueError("on purpose")
        if todo == "nan":
            mask = torch.zeros_like(x, dtype=torch.bool)
            mask.view(-1)[-1] = True
            x = torch.where(mask, torch.full_like(x, float("nan")), x)
            self.book.keep_output(self.path, call, x)
            self.has_damaged = True
        elif todo is not None:
            go_on(todo)
            x.record_stream(todo)
        return x


def go_on(stream: Any) -> None:
    """Makes ``stream`` the current one of its device, after the work queued on the previous one."""
    module = getattr(torch, stream.device.type)
    stream.wait_stream(module.current_stream(stream.device))
    module.set_stream(stream)


def make_model(book: Book, depth: int, width: int, device: torch.device) -> nn.Sequential:
    model = nn.Sequential()
    for index in range(depth):
        model.add_module(f"layer{index}", Layer(f"layer{index}", book, width, width))
        model.add_module(f"trouble{index}", Trouble(f"trouble{index}", book))
    model.add_module("head", Layer("head", book, width, 5))
    return model.to(device)
