"""A small language model in Hugging Face's names, whole and spread over gloo ranks: tensor parallel
by hand, fused as in Megatron-Core, by DTensors, FSDP2, pipeline stages. The programs
of compare_sides.py whose sides have another layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fastcheck
from accuracy.sides_programs import start_ranks

WIDTH, HEADS, SIZE, INNER, VOCABULARY, LAYERS, ROWS, TOKENS = 32, 4, 8, 48, 64, 4, 4, 12


class Copied(torch.autograd.Function):
    """The input of a column-parallel layer: its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Reduced(torch.autograd.Function):
    """The output of a row-parallel layer: the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def copied(x: torch.Tensor) -> torch.Tensor:
    made: Any = Copied.apply
    y: torch.Tensor = made(x)
    return y


def reduced(x: torch.Tensor) -> torch.Tensor:
    made: Any = Reduced.apply
    y: torch.Tensor = made(x)
    return y


class Column(nn.Linear):
    """Some rows of the weight on each rank."""

    fault = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spread = x if self.fault == "gradient is not reduced" else copied(x)
        return super().forward(spread)


class Row(nn.Linear):
    """Some columns of the weight on each rank; the bias is added once."""

    fault = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "bias on each rank":
            return reduced(F.linear(x, self.weight, self.bias))
        y = F.linear(x, self.weight)
        if self.fault == "not reduced":
            return y + self.bias if dist.get_rank() == 0 else y
        y = reduced(y)
        if self.fault == "reduced twice":
            y = reduced(y)
        made: torch.Tensor = y if self.bias is None else y + self.bias
        return made


class VocabularyRows(nn.Embedding):
    """Some rows of the table on each rank."""

    fault = ""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rank = 0 if self.fault == "rows of rank 0" else dist.get_rank()
        own = ids - rank * self.num_embeddings
        is_here = (own >= 0) & (own < self.num_embeddings)
        rows = super().forward(own * is_here) * is_here[..., None]
        made: torch.Tensor = reduced(rows)
        return made


class Attention(nn.Module):
    def __init__(self, heads: int, column: Any, row: Any, is_fused: bool) -> None:
        super().__init__()
        self.heads, inner = heads, heads * SIZE
        if is_fused:
            self.linear_qkv = column(WIDTH, 3 * inner, bias=False)
            self.linear_proj = row(inner, WIDTH)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                column(WIDTH, inner, bias=False) for _ in range(3)
            )
            self.o_proj = row(inner, WIDTH)
        self.is_fused, self.fault = is_fused, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        if self.is_fused:  # head by head, as Megatron-Core has them
            parts = self.linear_qkv(x).view(rows, tokens, -1, 3 * SIZE).split(SIZE, -1)
        else:
            parts = [
                linear(x).view(rows, tokens, -1, SIZE)
                for linear in (self.q_proj, self.k_proj, self.v_proj)
            ]
        q, k, v = (part.transpose(1, 2) for part in parts)
        if self.fault == "scale":
            q = q * 2**0.5
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        made: torch.Tensor = self.linear_proj(y) if self.is_fused else self.o_proj(y)
        return made


class Mlp(nn.Module):
    def __init__(self, inner: int, column: Any, row: Any, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused
        if is_fused:
            self.linear_fc1 = column(WIDTH, 2 * inner, bias=False)
            self.linear_fc2 = row(inner, WIDTH)
        else:
            self.gate_proj, self.up_proj = (column(WIDTH, inner, bias=False) for _ in range(2))
            self.down_proj = row(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_fused:
            gate, up = self.linear_fc1(x).chunk(2, -1)
            made: torch.Tensor = self.linear_fc2(F.silu(gate) * up)
            return made
        y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Layer(nn.Module):
    def __init__(self, ranks: int, column: Any, row: Any, is_fused: bool) -> None:
        super().__init__()
        attention = Attention(HEADS // ranks, column, row, is_fused)
        mlp = Mlp(INNER // ranks, column, row, is_fused)
        self.names = ("self_attention" if is_fused else "self_attn", "mlp")
        second = "pre_mlp_layernorm" if is_fused else "post_attention_layernorm"
        self.input_layernorm = nn.RMSNorm(WIDTH, 1e-6)
        self.add_module(self.names[0], attention)
        self.add_module(second, nn.RMSNorm(WIDTH, 1e-6))
        self.mlp, self.second = mlp, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.get_submodule(self.names[0])(self.input_layernorm(x))
        made: torch.Tensor = x + self.mlp(self.get_submodule(self.second)(x))
        return made


class Body(nn.Module):
    """The layers ``first`` to ``last`` of the model; ``layers.0`` is the first of them."""

    def __init__(
        self,
        first: int,
        last: int,
        ranks: int = 1,
        is_parallel: bool = False,
        is_fused: bool = False,
    ) -> None:
        super().__init__()
        column, row = (Column, Row) if is_parallel else (nn.Linear, nn.Linear)
        table: Any = VocabularyRows if is_parallel else nn.Embedding
        if first == 0:
            self.embed_tokens = table(VOCABULARY // ranks, WIDTH)
        self.layers = nn.ModuleList(Layer(ranks, column, row, is_fused) for _ in range(first, last))
        if last == LAYERS:
            self.norm = nn.RMSNorm(WIDTH, 1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embed_tokens"):
            x = self.embed_tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) if hasattr(self, "norm") else x


class Model(nn.Module):
    def __init__(self, first: int = 0, last: int = LAYERS, ranks: int = 1, **options: bool) -> None:
        super().__init__()
        self.model = Body(first, last, ranks, **options)
        if last == LAYERS:
            column = Column if options.get("is_parallel") else nn.Linear
            self.lm_head = column(WIDTH, VOCABULARY // ranks, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.model(x)
        return self.lm_head(x) if hasattr(self, "lm_head") else x


class Megatron(nn.Module):
    """The same, fused and named as in Megatron-Core."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Module(), nn.Module()
        column, row = (Column, Row) if ranks > 1 else (nn.Linear, nn.Linear)
        table: Any = VocabularyRows if ranks > 1 else nn.Embedding
        self.embedding.word_embeddings = table(VOCABULARY // ranks, WIDTH)
        self.decoder.layers = nn.ModuleList(Layer(ranks, column, row, True) for _ in range(LAYERS))
        self.decoder.final_layernorm = nn.RMSNorm(WIDTH, 1e-6)
        self.output_layer = column(WIDTH, VOCABULARY // ranks, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.get_submodule("embedding.word_embeddings")(x)
        for layer in self.get_submodule("decoder.layers").children():
            x = layer(x)
        made: torch.Tensor = self.output_layer(self.get_submodule("decoder.final_layernorm")(x))
        return made


class Loss(nn.Module):
    """Cross entropy of logits of which each rank may have some columns."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.ranks > 1:
            rank = dist.get_rank()
            columns = [torch.zeros_like(logits) for _ in range(self.ranks)]
            dist.all_gather(columns, logits.detach().contiguous())
            columns[rank] = logits
            logits = torch.cat(columns, -1)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def whole_state() -> dict[str, torch.Tensor]:
    """The weights of all layouts."""
    draw = torch.Generator().manual_seed(0)
    state = Model().state_dict()
    for name, value in state.items():
        noise = torch.randn(value.shape, generator=draw)
        state[name] = 1 + 0.1 * noise if "norm" in name else noise * 0.1
    return state


_ROWS = ("embed_tokens", "lm_head", "q_proj.w", "k_proj.w", "v_proj.w", "gate_proj", "up_proj")
_COLUMNS = ("o_proj.weight", "down_proj.weight")


def shard(name: str, value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    if any(part in name for part in _ROWS):
        return value.chunk(ranks)[rank].clone()
    if any(part in name for part in _COLUMNS):
        return value.chunk(ranks, 1)[rank].clone()
    return value.clone()


def shards(rank: int, ranks: int, fault: str) -> dict[str, torch.Tensor]:
    """What a rank of a tensor parallel model loads."""
    found = {}
    for name, value in whole_state().items():
        own = rank
        if fault == "shards swapped" and name == "model.layers.1.mlp.up_proj.weight":
            own = 1 - rank
        if fault == "columns swapped" and name == "model.layers.2.self_attn.o_proj.weight":
            own = 1 - rank
        if fault == "the shard of rank 0" and name == "model.layers.2.mlp.gate_proj.weight":
            own = 0
        if fault == "q and k swapped" and "layers.1.self_attn" in name:
            other = {"q_proj": "k_proj", "k_proj": "q_proj"}
            kind = name.split(".")[-2]
            value = whole_state()[name.replace(kind, other.get(kind, kind))]
        found[name] = shard(name, value, own, ranks)
    return found


def fused(state: dict[str, torch.Tensor], fault: str = "") -> dict[str, torch.Tensor]:
    """The state in the names and parts of Megatron-Core."""
    found = {}
    names = {
        "model.embed_tokens.weight": "embedding.word_embeddings.weight",
        "model.norm.weight": "decoder.final_layernorm.weight",
        "lm_head.weight": "output_layer.weight",
    }
    for name, mine in names.items():
        found[mine] = state[name]
    for number in range(LAYERS):
        old, new = f"model.layers.{number}.", f"decoder.layers.{number}."
        q, k, v = (state[f"{old}self_attn.{x}_proj.weight"].view(-1, SIZE, WIDTH) for x in "qkv")
        gate, up = (state[f"{old}mlp.{x}_proj.weight"] for x in ("gate", "up"))
        if fault == "q and k swapped" and number == 1:
            q, k = k, q
        if fault == "gate and up swapped" and number == 2:
            gate, up = up, gate
        if fault == "q, k, v one below the other" and number == 1:
            whole = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
        else:
            whole = torch.cat([q, k, v], 1).flatten(0, 1)
        found[f"{new}self_attention.linear_qkv.weight"] = whole
        found[f"{new}mlp.linear_fc1.weight"] = torch.cat([gate, up])
        for kind in ("weight", "bias"):
            found[f"{new}self_attention.linear_proj.{kind}"] = state[
                f"{old}self_attn.o_proj.{kind}"
            ]
            found[f"{new}mlp.linear_fc2.{kind}"] = state[f"{old}mlp.down_proj.{kind}"]
        found[f"{new}input_layernorm.weight"] = state[f"{old}input_layernorm.weight"]
        found[f"{new}pre_mlp_layernorm.weight"] = state[f"{old}post_attention_layernorm.weight"]
    return found


def batches(steps: int) -> Any:
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS + 1), generator=draw)
        yield ids[:, :-1], ids[:, 1:]


#: The module that a fault of the code is in.
_FAULTY = {
    "gradient is not reduced": "layers.2.mlp.up_proj",
    "bias on each rank": "layers.1.self_attn.o_proj",
    "not reduced": "layers.1.mlp.down_proj",
    "reduced twice": "layers.2.self_attn.o_proj",
    "rows of rank 0": "embed_tokens",
    "scale": "layers.1.self_attn",
}


def built(layout: str, rank: int, ranks: int, fault: str) -> nn.Module:
    """The model of a rank, with its weights."""
    if layout == "tp":
        model: Any = Model(ranks=ranks, is_parallel=True)
        model.load_state_dict(shards(rank, ranks, fault))
        if fault in _FAULTY:
            model.model.get_submodule(_FAULTY[fault]).fault = fault
    elif layout == "megatron":
        model = Megatron(ranks)
        model.load_state_dict(fused(shards(rank, ranks, ""), fault))
    elif layout.startswith("pp"):
        size = LAYERS // ranks
        span = (rank * size, (rank + 1) * size)
        model = Model(*span)
        start = span[0] if fault != "layers of stage 0" else 0
        state = whole_state()
        for name in model.state_dict():
            parts = name.split(".")
            if parts[1] == "layers":
                parts[2] = str(int(parts[2]) + start)
            model.state_dict()[name].copy_(state[".".join(parts)])
        if fault == "a layer is left out" and rank == 1:
            del model.model.layers[1]
    else:
        model = Model()
        model.load_state_dict(whole_state())
        if fault == "one weight is not loaded":
            nn.init.normal_(model.model.get_parameter("layers.1.mlp.up_proj.weight"), std=0.1)
        model = _spread(model, layout, ranks)
    made: nn.Module = model
    return made


def _spread(model: Any, layout: str, ranks: int) -> Any:
    if layout == "dtensor":
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        for number in range(LAYERS):
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                plan[f"model.layers.{number}.{name}"] = ColwiseParallel()
            for name in ("mlp.gate_proj", "mlp.up_proj"):
                plan[f"model.layers.{number}.{name}"] = ColwiseParallel(output_layouts=Shard(-1))
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                plan[f"model.layers.{number}.{name}"] = RowwiseParallel()
        return parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    if layout == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return nn.parallel.DistributedDataParallel(model) if layout == "ddp" else model


def train_layout(
    log: Path,
    *,
    layout: str = "",
    fault: str = "",
    ranks: int = 2,
    steps: int = 3,
    dump: bool = False,
) -> None:
    """Trains with a log, or writes a dump of the first step with the values."""
    if not layout or ranks == 1:
        _train(0, 1, str(log), layout, fault, steps, dump)
        return
    start_ranks(_train, ranks, str(log), layout, fault, steps, dump)


def _train(
    rank: int, ranks: int, log: str, layout: str, fault: str, steps: int, dump: bool, port: int = 0
) -> None:
    if ranks > 1:
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    fastcheck.seed_all(0)
    model = built(layout, rank, ranks, fault)
    is_tensor_parallel = layout in ("tp", "megatron") and ranks > 1
    criterion = Loss(ranks if is_tensor_parallel else 1)
    update = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    has_loss = not layout.startswith("pp") or rank == ranks - 1
    modules = (model, criterion) if has_loss else (model,)
    observing: Any
    if dump:
        observing = fastcheck.Dumper(log, step=0, tensors=True, level="module")
    else:
        observing = fastcheck.install(*modules, log_dir=log)
    with observing:
        for x, labels in batches(steps):
            if layout in ("fsdp2", "ddp"):
                x, labels = x.chunk(ranks)[rank], labels.chunk(ranks)[rank]
            if layout.startswith("pp"):
                _pipelined(model, criterion, x, labels, rank, fault)
            else:
                criterion(model(x), labels).backward()
            if fault == "summed over the ranks":
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad *= ranks
            update.step()
            update.zero_grad()
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _pipelined(
    model: Any, criterion: Any, x: torch.Tensor, labels: torch.Tensor, rank: int, fault: str
) -> None:
    last = dist.get_world_size() - 1
    if rank > 0:
        x = torch.zeros(ROWS, TOKENS, WIDTH)
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = model(x)
    if rank < last:
        dist.send(y.detach().contiguous(), rank + 1)
        grad = torch.zeros_like(y)
        dist.recv(grad, rank + 1)
        y.backward(grad)
    else:
        criterion(y, labels).backward()
    if rank > 0:
        assert x.grad is not None
        dist.send(x.grad * 2 if fault == "gradient doubled" and rank == last else x.grad, rank - 1)
