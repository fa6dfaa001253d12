"""A tiny Llama with its tokenizer and texts, for TRL's trainers."""

from __future__ import annotations

import importlib
from typing import Any

import torch

WORDS = [f"w{number}" for number in range(28)]
TEXTS = [" ".join(WORDS[(row * 5 + step) % 28] for step in range(8)) for row in range(16)]


def tokenizer() -> Any:
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def llama() -> Any:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config)
