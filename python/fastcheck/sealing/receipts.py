"""receipt() is a list of checksums of a model's weights, as an object and as JSON."""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch

from fastcheck.comparison.names import VOCABULARY
from fastcheck.comparison.relation import dtype_name
from fastcheck.errors import CompareError, ConfigError, first_line, plain
from fastcheck.utils.reading import MAX_JSON_BYTES, parse_json, read_json

from .reading import own_parts, place_of, split_readable, texts_by_dtype

_SUM = re.compile(r':"([0-9a-f]{16}(?:[0-9a-f]{24})?)"')
#: Dimensions along which ranks have shards: those of experts, one below the other, are three.
_DIMS = 3


@dataclass(frozen=True)
class Receipt:
    """The result of receipt(); ``to_dict()`` is ready for JSON."""

    tensors: Mapping[str, dict[str, Any]]
    unread: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON, the tensors packed; verify() takes it too."""
        packed, unread = _packed(dict(self.tensors)), dict(self.unread)
        return {"fastcheck": "receipt", "format": 2, "packed": packed, "unread": unread}


def receipt(
    model: Union[torch.nn.Module, Mapping[str, Any]],
    *,
    before: Union[Receipt, Mapping[str, Any], None] = None,
    vocabulary: Optional[int] = None,
    ranks: int = 1,
) -> Receipt:
    """A list of the names, shapes, dtypes and checksums of a model's weights, to be compared
    with another model that should have them: ``fastcheck.verify(other, receipt)``.

        receipt = fastcheck.receipt(trainer_model)  # where weights are sent
        print(fastcheck.verify(engine_model, receipt, map="vllm"))  # where they arrive

    Args:
        model: a module, or its state_dict.
        before: the receipt of the weights that the other side had before: verify() then tells those
            that are old.
        vocabulary: the number of words, where embeddings and output layers have more rows: those
            behind it are padding, and left out. (Padding that only the other side has needs no
            option.)
        ranks: how many tensor parallel ranks hold shards of these weights on the other side. Each
            weight is read once more for each dimension that can be divided by it.

    Raises:
        ConfigError: a model without tensors, or an option that can't be used.
        CompareError: a ``before`` that is no receipt.

    Reads every tensor once, on its device (float32 and float64 three times, for what they are in
    bfloat16 and float16), and waits once. 35 bytes of JSON a tensor, 80 of float32 and float64,
    and about as many for each of its shards.
    """
    readable, unread = split_readable(own_parts(model))
    vocabulary, ranks = plain(vocabulary), plain(ranks)
    for option, number in (("vocabulary", vocabulary), ("ranks", ranks)):
        is_given = number is not None or option == "ranks"
        if is_given and (type(number) is not int or not 0 < number < 1 << 31):
            expected = "the number of words, or of ranks: a whole number above 0"
            raise ConfigError(f"{option} can't be used", expected=expected, got=repr(number))
    if vocabulary is not None:
        padded = [name for name in readable if VOCABULARY.search(name) and readable[name].dim()]
        readable.update({name: readable[name][:vocabulary] for name in padded})
    earlier = {} if before is None else read_receipt(before).tensors
    tensors: dict[str, dict[str, Any]] = {}
    first: dict[tuple[object, ...], str] = {}
    for (name, tensor), parts in zip(readable.items(), texts_by_dtype(readable.values())):
        entry: dict[str, Any] = {
            "shape": list(tensor.shape),
            "dtype": dtype_name(tensor.dtype),
            "parts": parts,
        }
        if name in earlier and earlier[name]["parts"] != parts:
            entry["before"] = earlier[name]["parts"]
        if tensor.numel() and (known := first.setdefault(place_of(tensor), name)) != name:
            entry["tied_to"] = known
        tensors[name] = entry
    for dim, rank in itertools.product(range(_DIMS), range(ranks if ranks > 1 else 0)):
        shards = {
            name: tensor.chunk(ranks, dim)[rank]
            for name, tensor in readable.items()
            if dim < tensor.dim() and tensor.numel() and tensor.shape[dim] % ranks == 0
        }
        for name, parts in zip(shards, texts_by_dtype(shards.values())):
            tensors[name].setdefault("shards", {}).setdefault(str(dim), []).append(parts)
    return Receipt(tensors, unread)


def read_document(path: str, what: str) -> Any:
    """The JSON document in a file. Raises CompareError if it can't be read; ``what`` names it."""
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        got = f"{path}: {first_line(error)}"
        raise CompareError(
            f"{what} can't be read",
            expected="JSON",
            got=got,
            hint="copy the file again, or write it again where its weights are known to be right",
        ) from error


def read_receipt(given: object) -> Receipt:
    if isinstance(given, Receipt):
        return given
    tensors = None
    if isinstance(given, Mapping) and given.get("fastcheck") == "receipt":
        with contextlib.suppress(KeyError, TypeError, ValueError, zlib.error):  # it is damaged
            tensors = _unpacked(given)
    if not isinstance(tensors, Mapping) or not all(map(_is_entry, tensors.values())):
        raise CompareError(
            "this is not a receipt",
            expected="what fastcheck.receipt(model) returns, or JSON of it",
            got=type(given).__name__,
            hint="fastcheck.receipt(model).to_dict(), made where the weights are sent",
        )
    return Receipt(tensors, {})


def _packed(tensors: Mapping[str, Any]) -> str:
    """Compressed JSON with control characters in place of the checksums' digits; behind it the
    checksums as bytes, which can't be compressed; before both their CRC-32.
    """
    text = json.dumps(tensors, separators=(",", ":"))
    short = _SUM.sub(lambda found: "\1" * (len(found[1]) // 8), text)
    data = zlib.compress(short.encode(), 9) + bytes.fromhex("".join(_SUM.findall(text)))
    return base64.b85encode(zlib.crc32(data).to_bytes(4, "big") + data).decode()


def _unpacked(given: Mapping[str, Any]) -> Any:
    data, engine = base64.b85decode(given["packed"]), zlib.decompressobj()
    if zlib.crc32(data[4:]).to_bytes(4, "big") != data[:4]:
        raise ValueError("not the bytes that were packed")
    text = engine.decompress(data[4:], MAX_JSON_BYTES).decode()
    digits = io.StringIO(engine.unused_data.hex())
    return parse_json(re.sub("\1+", lambda found: f':"{digits.read(8 * len(found[0]))}"', text))


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, Mapping)
        and isinstance(entry.get("dtype"), str)
        and isinstance(entry.get("shape"), list)
        and all(type(size) is int for size in entry["shape"])
        and _are_parts(entry.get("parts"))
        and _are_parts(entry.get("before", {}))
        and _are_parts(shards := entry.get("shards", {}), list)
        and all(dim in map(str, range(len(entry["shape"]))) for dim in shards)
        and all(rows and all(map(_are_parts, rows)) for rows in shards.values())
    )


def _are_parts(given: Any, kind: type = str) -> bool:
    return isinstance(given, Mapping) and all(isinstance(one, kind) for one in given.values())
