"""One name for the same tensor in every kind of source, after renaming."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Union

from fastcheck.errors import ConfigError, choice, did_you_mean

_LAST_PARTS: Mapping[str, Mapping[str, str]] = {
    # MindSpore's names of parameters and buffers, and PyTorch's: last parts of a name.
    "mindspore": {
        "gamma": "weight",
        "beta": "bias",
        "moving_mean": "running_mean",
        "moving_variance": "running_var",
        "embedding_table": "weight",
    }
}
#: Names within a layer of Megatron-Core, and what they are made of in one of Hugging Face's.
_MEGATRON_LAYER: Sequence[tuple[str, Sequence[str]]] = (
    ("input_layernorm", ("input_layernorm",)),
    ("self_attention.linear_qkv", tuple(f"self_attn.{kind}_proj" for kind in "qkv")),
    ("self_attention.q_layernorm", ("self_attn.q_norm",)),
    ("self_attention.k_layernorm", ("self_attn.k_norm",)),
    ("self_attention.linear_proj", ("self_attn.o_proj",)),
    ("self_attention", ("self_attn",)),
    ("pre_mlp_layernorm", ("post_attention_layernorm",)),
    ("mlp.linear_fc1", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.linear_fc2", ("mlp.down_proj",)),
    ("mlp.router", ("block_sparse_moe.gate",)),
    ("mlp.router", ("mlp.gate",)),
    (
        "mlp.experts.local_experts.*.linear_fc1",
        ("block_sparse_moe.experts.*.w1", "block_sparse_moe.experts.*.w3"),
    ),
    (
        "mlp.experts.local_experts.*.linear_fc1",
        ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj"),
    ),
    ("mlp.experts.local_experts.*.linear_fc2", ("block_sparse_moe.experts.*.w2",)),
    ("mlp.experts.local_experts.*.linear_fc2", ("mlp.experts.*.down_proj",)),
    (
        "mlp.shared_experts.linear_fc1",
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    ),
    ("mlp.shared_experts.linear_fc2", ("mlp.shared_experts.down_proj",)),
    ("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",)),
    ("mlp", ("mlp",)),
    ("mlp", ("block_sparse_moe",)),
)
#: Names of other programs, and what they are made of in those of Hugging Face, one below the other.
#: The names on the right that belong to a name on the left are of several models.
_FUSED: Mapping[str, Sequence[tuple[str, Sequence[str]]]] = {
    "vllm": (
        ("**.qkv_proj", ("**.q_proj", "**.k_proj", "**.v_proj")),
        ("**.gate_up_proj", ("**.gate_proj", "**.up_proj")),
        ("**.experts.w13_weight", ("**.experts.*.w1.weight", "**.experts.*.w3.weight")),
        ("**.experts.w13_weight", ("**.experts.*.gate_proj.weight", "**.experts.*.up_proj.weight")),
        ("**.experts.w13_weight", ("**.experts.gate_up_proj",)),
        ("**.experts.w2_weight", ("**.experts.*.w2.weight",)),
        ("**.experts.w2_weight", ("**.experts.*.down_proj.weight",)),
        ("**.experts.w2_weight", ("**.experts.down_proj",)),
    ),
    "megatron": (
        ("embedding.word_embeddings", ("model.embed_tokens",)),
        *(
            (f"decoder.layers.*.{whole}", tuple(f"model.layers.*.{part}" for part in parts))
            for whole, parts in _MEGATRON_LAYER
        ),
        ("decoder", ("model",)),
        ("decoder.final_layernorm", ("model.norm",)),
        ("output_layer", ("lm_head",)),
    ),
}
#: Names of weights with a row for each word, behind which may be rows of padding, so that ranks or
#: kernels have multiples of something: of Hugging Face, vLLM, Megatron-Core, GPT-2.
VOCABULARY = re.compile(
    r"(^|\.)(embed_tokens|word_embeddings|wte|tok_embeddings|lm_head|output_layer|embed_out)(\.|$)"
)
#: The maps that are built in.
BUILT_IN = (*_LAST_PARTS, *_FUSED)
#: Other names of the same modules: those of Transformer Engine in Megatron-Core; what newer vLLM
#: has between experts and their weights; Mixtral's block, which is mlp in newer transformers.
_OWN: Mapping[str, Sequence[tuple[str, str]]] = {
    "megatron": (
        (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
        (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
        (r"experts\.linear_fc([12])\.weight(\d+)$", r"experts.local_experts.\2.linear_fc\1.weight"),
        (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
    ),
    "vllm": ((r"\.experts\.routed_experts\.", ".experts."), (r"\.block_sparse_moe\.", ".mlp.")),
}


#: Parts of a path that torch's wrappers of single layers add: a layer that is compiled, recomputed
#: in backward or sharded has the names of the same layer without them.
_INNER = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")


class Name(NamedTuple):
    """The place of a tensor. ``label`` is spelt as in a :class:`Site`, a lone ``output``
    as ``output[0]``; a checkpoint's tensor has only a ``label``.
    """

    module: str
    direction: str
    role: str
    label: str
    op: str = ""
    #: The place in the whole, of a tensor that is one of several parts.
    part: tuple[int, ...] = ()

    def __str__(self) -> str:
        label = self.label
        if self.part:  # of a fused tensor that neither side has
            label += f" (part {'.'.join(map(str, self.part))})"
        if self.role in ("", "loss"):
            return label
        if self.role in ("param", "param_grad", "buffer") and self.module:
            label = f"{self.module}.{label}"
        if self.role in ("grad_input", "grad_output", "param_grad"):
            label = f"gradient of {label}"
        place = ".".join(filter(None, (self.module, self.op))) or "the model"
        return f"{place} · {self.direction} · {label}"


def plain_label(label: str, role: str) -> str:
    """``output`` and ``output[0]`` are one tensor to two implementations of a module, one of which
    returns a tuple.
    """
    if role in ("output", "grad_output", "input", "grad_input") and label in ("output", "input"):
        return f"{label}[0]"
    return label


class NameTable:
    """Numbers names in the order in which they are met, for both sides together."""

    def __init__(self) -> None:
        self._names: list[Name] = []
        self._numbers: dict[Name, int] = {}

    def number(self, name: Name) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
        return number

    def __getitem__(self, number: int) -> Name:
        return self._names[number]

    def __len__(self) -> int:
        return len(self._names)


#: Names, and what they are on the other side; the name of a map that is built in; None: no other.
Renamed = Union[str, Mapping[str, Union[str, Sequence[str]]], None]


class _Rule(NamedTuple):
    """``key``: the rule as it was given."""

    left: str
    right: str
    part: int
    key: str


class Renaming:
    """Turns names of ``actual`` into those of ``reference``.

    A rule is a path on either side: it is about that path and all that is below it. ``*`` on the
    left stands for anything within one part of a path, ``**`` at the beginning for any parts, also
    none, and those on the right for what they were. The longest rule that fits is used, once. A
    list on the right has the parts of what is on the left, one below the other: on both sides they
    get the name on the left. A built-in map is for both sides.
    """

    def __init__(
        self,
        rules: Mapping[str, str | Sequence[str]],
        last_parts: Mapping[str, str] | None = None,
        of_reference: Mapping[str, str] | None = None,
        program: str = "",
    ) -> None:
        self._program = program
        fused = _FUSED.get(program, ())
        self._last_parts = dict(last_parts or {})
        self._rules_of_reference = dict(of_reference or {})
        self._used: set[str] = set()
        self._seen: dict[str, None] = {}
        self._layers = ("", 0)
        self._given = list(rules)
        plain = {left: right for left, right in rules.items() if isinstance(right, str)}
        self._parted = [(k, v) for k, v in rules.items() if not isinstance(v, str)]
        all_rules = [_Rule(left, right, -1, left) for left, right in plain.items()]
        for left, right in plain.items():
            if right.count("*") > left.count("*"):
                raise ConfigError(
                    f"a renaming has more * on the right than on the left: {left!r}: {right!r}"
                )
        for left, parts in self._parted:
            # Parts that have more * than the whole are in the order of what these stand for.
            if not parts or any(part.count("*") < left.count("*") for part in parts):
                raise ConfigError(
                    "a renaming's parts need each * of the whole",
                    expected='"layers.*.qkv": ["layers.*.q", "layers.*.k", "layers.*.v"]',
                    got=f"{left!r}: {list(parts)!r}",
                )
        for left, parts in (*self._parted, *fused):
            all_rules.append(_Rule(left, left, -1, ""))
            for place, part in enumerate(parts):
                is_part = len(parts) > 1 or part.count("*") > left.count("*")
                all_rules.append(_Rule(part, left, place if is_part else -1, left))
        self._rules = sorted(all_rules, key=lambda rule: (-rule.left.count("."), -len(rule.left)))

    @classmethod
    def of(cls, rename: Renamed) -> Renaming:
        """Makes a renaming of what ``compare(rename=)`` takes: a mapping, the name of a built-in
        mapping, or None.
        """
        if rename is None:
            return cls({})
        if isinstance(rename, str):
            if rename in _FUSED:
                return cls({}, program=rename)
            choice("rename", rename, BUILT_IN, "a mapping, or a JSON file with one")
            return cls({}, _LAST_PARTS[rename])
        for left, right in rename.items():
            rights = [right] if isinstance(right, str) else right
            is_text = isinstance(left, str) and isinstance(rights, Sequence)
            if not is_text or not left or not all(isinstance(part, str) for part in rights):
                raise ConfigError(
                    "a renaming is no pair of names",
                    expected='"name in actual": "name in reference", or a list of such names',
                    got=f"{left!r}: {right!r}",
                )
        return cls(rename)

    def of_reference(self) -> Renaming:
        rules = {**self._rules_of_reference, **dict(self._parted)}
        renaming = Renaming(rules, self._last_parts, None, self._program)
        renaming._used = self._used
        return renaming

    def of_stage(self, layers: str, first: int) -> Renaming:
        """The renaming of a pipeline stage whose ``<layers>.0`` is number ``first`` of the model;
        ``layers`` as it is renamed.
        """
        renaming = copy.copy(self)
        renaming._layers = (layers, first)
        return renaming

    @property
    def has_groups(self) -> bool:
        """True if the parts of a whole may follow each other in groups of heads. vLLM has each part
        in one piece.
        """
        return self._program != "vllm"

    @property
    def has_parts(self) -> bool:
        """True if several names may become one."""
        return any(rule.part >= 0 for rule in self._rules)

    @property
    def has_met_wholes(self) -> bool:
        """True if a name was one of fused modules, or of the program that has them."""
        wholes = [rule.left for rule in self._rules if not rule.key]
        return any(_fitted(left, path) for left in wholes for path in self._seen)

    def __call__(self, path: str) -> str:
        """The name that ``path`` has on the side of the reference."""
        return self.place(path)[0]

    def place(self, path: str) -> tuple[str, tuple[int, ...]]:
        """The name that ``path`` has on the side of the reference, and where it stands among the
        parts that have this name; empty where it has it alone.
        """
        plain = _INNER.sub("", path).rstrip(".")
        if not self._rules and not self._last_parts and not self._layers[1]:
            return plain, ()
        self._seen.setdefault(path)
        name, part = self._renamed(path, plain)
        return self._of_model(name), part

    def _renamed(self, path: str, plain: str) -> tuple[str, tuple[int, ...]]:
        """``plain``: the path without the wrappers in it, which a rule may name all the same."""
        is_wrapped = plain != path
        for old, new in _OWN.get(self._program, ()):
            plain = re.sub(old, new, plain)
        for rule, spelt in itertools.product(
            self._rules, (plain, path) if is_wrapped else (plain,)
        ):
            fit = _fitted(rule.left, spelt)
            if fit is not None:
                self._used.add(rule.key)
                name, part = _renamed(rule, *fit)
                return _INNER.sub("", name).rstrip("."), part
        head, dot, last = plain.rpartition(".")
        return head + dot + self._last_parts.get(last, last), ()

    def _of_model(self, path: str) -> str:
        layers, first = self._layers
        match = re.match(rf"{re.escape(layers)}\.(\d+)(?=\.|$)", path) if first else None
        if match is None:
            return path
        return f"{layers}.{int(match.group(1)) + first}{path[match.end() :]}"

    def check_used(self) -> None:
        """Raises ConfigError for a rule that matched no name, probably a typing error."""
        for left in self._given:
            # A longer rule may be about all that is below it.
            if left not in self._used and not any(_fitted(left, path) for path in self._seen):
                right = next(rule.right for rule in self._rules if rule.key == left)
                raise ConfigError(
                    "a renaming matches no name of the actual side",
                    expected="a name of the actual side on the left, its name in the "
                    "reference on the right",
                    got=f"{left!r}: {dict(self._parted).get(left, right)!r}",
                    hint=did_you_mean(left, _with_parents(self._seen)),
                )


def _renamed(rule: _Rule, stars: list[str], rest: str) -> tuple[str, tuple[int, ...]]:
    filled = iter(stars)
    text = re.sub(r"\*\*|\*", lambda _: next(filled), rule.right).lstrip(".") if rule.right else ""
    name = text + rest if text else rest.lstrip(".")
    if rule.part < 0:
        return name, ()
    return name, (*(int(star) for star in filled if star.isdecimal()), rule.part)


def _fitted(rule: str, path: str) -> tuple[list[str], str] | None:
    """The text that each * of a rule stands for in ``path``, and what ``path`` has below the rule;
    None where the rule is not about it.
    """
    parts = path.split(".")
    if not rule.startswith("**."):
        return _fitted_parts(rule.split("."), parts)
    left = rule.split(".")[1:]
    for start in range(len(parts) - len(left) + 1):
        fit = _fitted_parts(left, parts[start:])
        if fit is not None:
            return [".".join(parts[:start]), *fit[0]], fit[1]
    return None


def _fitted_parts(left: list[str], parts: list[str]) -> tuple[list[str], str] | None:
    stars: list[str] = []
    for pattern, part in zip(left, parts):
        texts = _stars(pattern, part)
        if texts is None:
            return None
        stars += texts
    rest = "".join(f".{part}" for part in parts[len(left) :])
    return (stars, rest) if len(left) <= len(parts) else None


def _stars(rule: str, part: str) -> list[str] | None:
    """The text that each * of one part of a rule stands for: the first for as much as it can. From
    the right each text between two * is looked for once; a regular expression goes back to try
    others.
    """
    first, *texts = rule.split("*")
    if not (texts and part.startswith(first)):
        return [] if rule == part else None
    texts[-1] += "."  # the end of the part, where the last text has to be
    part += "."
    stars, end = [], len(part)
    for text in reversed(texts):
        start = part.rfind(text, len(first), end)
        if start < 0:
            return None
        stars.append(part[start + len(text) : end])
        end = start
    return [part[len(first) : end], *stars[:0:-1]]


def _with_parents(paths: Iterable[str]) -> dict[str, None]:
    prefixes: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            prefixes.setdefault(".".join(parts[:length]))
    return prefixes
