"""seal() writes the checksums of a model's weights beside its checkpoint; verify() compares a
checkpoint's tensors with its seal, and checks that they are finite.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union, overload

import numpy as np
import torch

from fastcheck.comparison.sources.checkpoint import CheckpointSource, record_of
from fastcheck.comparison.sources.files import Loader
from fastcheck.errors import (
    CompareError,
    ConfigError,
    FastcheckError,
    check_bool,
    choice,
    local_path,
    plain,
    string_list,
)
from fastcheck.record.format import DTYPES, NONFINITE_COUNTS
from fastcheck.reproducibility.environment import environment
from fastcheck.sealing.arrival import Arrival, Given, Map, arrival
from fastcheck.sealing.reading import place_of, read_all, state_of
from fastcheck.sealing.receipts import read_document
from fastcheck.sealing.resuming import (
    Resumption,
    Tree,
    check_parts,
    is_tree,
    record_steps,
    resumption,
    training_tree,
)
from fastcheck.statistics.functions import stats
from fastcheck.utils.private import write_private
from fastcheck.utils.reading import why_missing
from fastcheck.utils.text.layout import listed
from fastcheck.utils.torch.rank import of_all_ranks, own_rank
from fastcheck.utils.torch.sharding import LocalShard, part_of

# 2: some weights are sealed in parts.
FORMATS = (1, 2)
_NAME = "fastcheck.json"

# The data that a seal keeps of each key.
Entries = dict[str, dict[str, Any]]


class NonFiniteWeightsError(FastcheckError):
    """seal(nonfinite="refuse") found NaN or infinities in the weights. Nothing was written."""

    __module__ = "fastcheck"


@dataclass(frozen=True)
class Seal:
    """The seal that seal() wrote.

    ``path``: the JSON file. ``nonfinite``: the keys of tensors that hold NaN or infinities.
    ``unsealed``: the keys of tensors that can't be read, each with the reason. ``resume``: with
    ``resume=True``, fingerprints of the state of the run, by part.
    """

    path: str
    step: Optional[int]
    tensors: dict[str, dict[str, Any]]
    nonfinite: tuple[str, ...]
    unsealed: dict[str, str]
    resume: Optional[Tree] = None

    @property
    def is_finite(self) -> bool:
        """True if no tensor that was sealed holds a NaN or an infinity."""
        return not self.nonfinite


def seal_path(checkpoint: Union[str, os.PathLike[str]]) -> str:
    """The path of the seal of a checkpoint: ``fastcheck.json`` in a directory, else
    ``<file>.fastcheck.json`` beside the file.
    """
    path = local_path("checkpoint", checkpoint)
    return os.path.join(path, _NAME) if os.path.isdir(path) else f"{path}.{_NAME}"


def seal(
    checkpoint: Union[str, os.PathLike[str]],
    model: Union[torch.nn.Module, Mapping[str, Any]],
    *,
    step: Optional[int] = None,
    nonfinite: str = "mark",
    together: bool = False,
    resume: bool = False,
    **parts: Any,
) -> Seal:
    """Writes a checksum for each tensor of ``model.state_dict()`` beside a checkpoint.

        torch.save(model.state_dict(), "model.pt")
        fastcheck.seal("model.pt", model, step=step)

    ``fastcheck verify model.pt`` then checks whether the file holds these very weights, and whether
    all of them are finite. Checksums are those of :func:`fastcheck.checksum` with
    ``order="logical"``: they do not depend on the device, the strides or the file format.

    Args:
        checkpoint: a file, or a directory of files; it need not be written yet, but a directory has
            to exist.
        model: a module, or its state_dict.
        step: the step after which the weights were saved, for the seal's ``step``.
        nonfinite: what happens when a tensor holds NaN or infinities. ``"mark"``: the seal names
            it. ``"refuse"``: NonFiniteWeightsError, and no seal is written; call seal() before the
            checkpoint is written to keep it from being written.
        together: every rank of the default process group calls this, for weights that are spread
            over them (FSDP2 and other DTensors): each rank reads its own parts, rank 0 writes one
            seal of all, and the exceptions are the same on all ranks. The ranks exchange the
            checksums; no weight is gathered.
        resume: the seal also has what else a run goes on from: the states of Python's, NumPy's and
            torch's generators, and the ``parts``. ``verify(path, resume=model)`` in the resumed
            program names what did not come back. What one rank holds; not with ``together``.
        parts: with ``resume``, by a name of your own: whatever has ``state_dict()`` (optimizer,
            scheduler, scaler, sampler, data loader), a torch.Generator, or a mapping
            (``position={"epoch": 3, "batch": 120}``).

    Returns:
        A Seal.

    Raises:
        ConfigError: an option that can't be used, or a model without tensors.
        NonFiniteWeightsError: see ``nonfinite``.
        OSError: the seal can't be written.

    Reads every tensor once, on its device, and waits for the results. Without ``together`` parts of
    tensors are not sealed, but listed with the reason.
    """
    choice("nonfinite", nonfinite, ("mark", "refuse"))
    step = plain(step)
    if step is not None and (type(step) is not int or step < 0):
        raise ConfigError("step is no number of a step", expected="an int >= 0", got=repr(step))
    together, resume = check_bool("together", together), check_bool("resume", resume)
    tree = training_tree(model, parts) if resume else None
    check_parts(parts, resume, "seal", "resume=True, which seals these parts too")
    if resume and together:
        expected = "resume=True on a rank that holds whole weights, without together=True"
        raise ConfigError("both seal() together and resume", expected=expected, got="both")
    tensors, unsealed = _of_all_ranks(model) if together else _own(model, in_parts=False)
    bad = tuple(key for key, entry in tensors.items() if entry["nan"] or entry["inf"])
    if bad and nonfinite == "refuse":
        text = f"{len(bad):,} of {len(tensors):,} weights are not finite"
        hint = 'nonfinite="mark" seals these all the same, marked'
        raise refusal(text, bad, f"go back to the last sealed checkpoint; {hint}")
    made = Seal(seal_path(checkpoint), step, tensors, bad, unsealed, tree)
    if not together or own_rank() == 0:
        _write(made)
    if isinstance(model, torch.nn.Module) and resume:
        record_steps(model, made.path)
    return made


def refusal(error: str, bad: Sequence[str], hint: str) -> NonFiniteWeightsError:
    """The exception with the text ``error``, of tensors that are not finite: the keys ``bad``."""
    got = listed(bad, 5, ", ...")
    return NonFiniteWeightsError(error, expected="finite weights", got=got, hint=hint)


def _own(model: object, in_parts: bool) -> tuple[Entries, dict[str, str]]:
    """The entries that the seal keeps of each tensor that this rank holds, and why others can't be
    read.
    """
    state = state_of(model, "there is nothing to seal", (torch.Tensor, LocalShard))
    parts: dict[str, LocalShard] = {}
    for key, tensor in state.items() if in_parts else ():
        part = tensor if isinstance(tensor, LocalShard) else part_of(tensor)
        if part is not None:
            parts[key], state[key] = part, part.data
    tensors: Entries = {}
    first: dict[tuple[object, ...], str] = {}  # formats without aliases store a tied weight once
    read, unsealed = read_all(state)
    for key, statistics in read.items():
        entry = tensors[key] = {
            "dtype": statistics.dtype,
            "numel": statistics.numel,
            "checksum": f"{statistics.checksum:016x}",
            "nan": statistics.nan_count,
            "inf": statistics.posinf_count + statistics.neginf_count,
        }
        if key in parts:
            _, offsets, sizes, entry["numel"] = parts[key]
            part_entry = {"offsets": list(offsets), "sizes": list(sizes)}
            part_entry["checksum"] = entry.pop("checksum")
            entry["parts"] = [part_entry] if statistics.numel else []
        elif statistics.numel and (earlier := first.setdefault(place_of(state[key]), key)) != key:
            entry["tied_to"] = earlier
    return tensors, unsealed


# ---- weights that are spread over ranks ---------------------------------------------------------


def _of_all_ranks(model: object) -> tuple[Entries, dict[str, str]]:
    """The entries of all ranks. A rank that can't read its own part takes part too, because the
    others wait.
    """
    own: Any
    failure: Optional[Exception] = None
    try:
        own = _own(model, in_parts=True)
    except Exception as error:
        own, failure = f"{type(error).__name__}: {error}", error
    ranks = of_all_ranks(own)
    if failure is not None:
        raise failure
    failed = [answer for answer in ranks if isinstance(answer, str)]
    if failed:
        raise FastcheckError(f"another rank could not read its weights: {failed[0]}")
    tensors, unsealed = merged([entries for entries, _ in ranks])
    for _, reasons in reversed(ranks):
        unsealed.update(reasons)
    return {key: entry for key, entry in tensors.items() if key not in unsealed}, unsealed


def merged(ranks: Sequence[Entries]) -> tuple[Entries, dict[str, str]]:
    """The entries of all ranks together; and why keys are left out. Parts that several ranks hold
    count once.
    """
    tensors: Entries = {}
    for key, entry in (pair for entries in ranks for pair in entries.items()):
        known = tensors.setdefault(key, entry)
        if known is entry or "parts" not in known or "parts" not in entry:
            continue
        places = [(part["offsets"], part["sizes"]) for part in known["parts"]]
        new = [part for part in entry["parts"] if (part["offsets"], part["sizes"]) not in places]
        if new:
            sums = {name: known[name] + entry[name] for name in ("nan", "inf")}
            tensors[key] = {**known, "parts": known["parts"] + new, **sums}
    left_out = {}
    for key, entry in tensors.items():
        held = sum(math.prod(part["sizes"]) for part in entry.get("parts", ()))
        if "parts" in entry and held != entry["numel"]:
            left_out[key] = (
                f"these ranks hold {held:,} of its {entry['numel']:,} elements; every rank that "
                "holds a part has to call seal(together=True)"
            )
    return {key: entry for key, entry in tensors.items() if key not in left_out}, left_out


# ---- the file -----------------------------------------------------------------------------------


def _write(made: Seal) -> None:
    content = {
        "fastcheck": "seal",
        "format": 2 if any("parts" in entry for entry in made.tensors.values()) else 1,
        "step": made.step,
        "verdict": "finite" if made.is_finite else "non-finite",
        "nonfinite": list(made.nonfinite),
        "tensors": made.tensors,
        "unsealed": made.unsealed,
        **({} if made.resume is None else {"resume": made.resume}),
        # A seal travels with its checkpoint: it says nothing of the host and the process.
        "environment": {key: part for key, part in environment().items() if key != "where"},
    }
    # Holds counts and checksums, no values: as readable as other files.
    write_private(made.path, json.dumps(content, indent=1).encode(), 0o666)


# The state of callbacks in checkpoints of Lightning, whose best score so far begins as infinity.
_NOT_TRAINED = "callbacks."


@dataclass(frozen=True)
class Verification:
    """The result of verify(). ``bool()`` of it: the checkpoint is as it was sealed, and finite.

    ``equal``: how many tensors are equal to the bit. ``differing``: keys of tensors whose bits
    differ, each with what differs first (dtype, numel, values). ``missing``: sealed keys that no
    file holds. ``nonfinite``: tensors of the checkpoint, sealed or not, that hold NaN or
    infinities, each with their number. ``notes``: what could not be read or was not sealed.
    """

    path: str
    step: Optional[int]
    verdict: str
    equal: int
    differing: dict[str, str]
    missing: tuple[str, ...]
    nonfinite: dict[str, int]
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.equal) and not (self.differing or self.missing or self.nonfinite)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        fields = {**vars(self), "ok": bool(self), "sealed_as": self.verdict}
        del fields["verdict"]
        return {**fields, "missing": list(self.missing), "notes": list(self.notes)}


@overload
def verify(checkpoint: str, *, trust: bool = False) -> Verification: ...
@overload
def verify(
    checkpoint: Union[str, torch.nn.Module, Mapping[str, Any]],
    receipt: Union[Given, Sequence[Given]],
    *,
    map: Map = None,
    accept: Sequence[str] = (),
    trust: bool = False,
) -> Arrival: ...
@overload
def verify(
    checkpoint: str, *, resume: torch.nn.Module, accept: Sequence[str] = (), **parts: Any
) -> Resumption: ...
def verify(
    checkpoint: Any,
    receipt: Any = None,
    *,
    map: Map = None,
    accept: Sequence[str] = (),
    trust: bool = False,
    resume: Optional[torch.nn.Module] = None,
    **parts: Any,
) -> Union[Verification, Arrival, Resumption]:
    """Compares a checkpoint with its seal, or weights with a receipt, or a resumed run with the
    seal of the checkpoint that it was resumed from.

        fastcheck.verify("model.pt")  # the seal beside it
        fastcheck.verify(engine_model, receipt, map="vllm")
        fastcheck.verify("model.pt", resume=model, optimizer=optimizer)  # all is loaded

    Args:
        checkpoint: a file of torch, safetensors or NumPy, or a directory of them, such as a sharded
            checkpoint. With a receipt also a module or a state_dict.
        receipt: what ``fastcheck.receipt(model)`` returned where the weights come from, its
            ``to_dict()``, or a file with the JSON of that; of tensor parallel ranks, or pipeline
            stages, a list with the receipt of each, for the whole model. Each weight that is not as
            it was there is named, and how: old (``receipt(before=)``), missing, cast, transposed,
            swapped, half written, the shard of another rank.
        map: with a receipt, names that differ: those of the weights, and what they are made of in
            the receipt, one below the other. ``*`` stands for anything:
            ``{"*.qkv.weight": ["*.q.weight", "*.k.weight", "*.v.weight"]}``. ``"vllm"`` is built
            in (qkv_proj, gate_up_proj).
        accept: with a receipt, ``("dtype",)``: a cast is as good. With ``resume``, names of what
            is not verified, such as ``"random.python"`` or ``"scheduler"``.
        trust: load files that torch.load reads only with ``weights_only=False``, which runs code
            of the file.
        resume: the model of a program that has loaded the checkpoint and has not gone on yet; the
            seal was written with ``seal(resume=True)``, and the checkpoint itself is not read. Its
            next two steps are compared with those that followed the seal, and a FastcheckWarning
            names what differs.
        parts: with ``resume``, those that were given to seal(), by the same names.

    Returns:
        A Verification; with a receipt an Arrival, with ``resume`` a Resumption.

    Raises:
        CompareError: there is no seal or no checkpoint, or it can't be read.
        ConfigError: parts that can't be read, or without ``resume``.

    Reads on the host, a tensor at a time; with a receipt or ``resume`` where the weights are, all
    at once.
    """
    check_parts(parts, resume, "verify", "resume=model, which verifies these parts too")
    check_bool("trust", trust)
    if resume is not None and receipt is not None:
        raise ConfigError("a receipt and resume", expected="one of the two", got="both")
    if receipt is None and map is not None:
        raise ConfigError("map= without a receipt", expected="receipt= with it", got=f"map={map!r}")
    accept = string_list("accept", accept)
    if receipt is None and resume is None and accept:
        raise ConfigError("accept= alone", expected="receipt= or resume= with it", got=repr(accept))
    if resume is not None:
        path, weights = seal_path(checkpoint), _own(resume, in_parts=False)
        return resumption(_read_seal(path), path, resume, weights, parts, accept)
    if receipt is not None:
        return arrival(checkpoint, receipt, map=map, accept=accept, trust=trust)
    return _verification(checkpoint, _read_seal(_seal_of(checkpoint)), trust)


def _seal_of(checkpoint: Any) -> str:
    """The path of the seal: of a link without one, that beside what the link leads to."""
    path = seal_path(checkpoint)
    if not os.path.lexists(path) and os.path.islink(checkpoint):  # latest.pt
        path = seal_path(os.path.realpath(checkpoint))
    if not os.path.lexists(path) and not os.path.exists(checkpoint):
        raise CompareError(
            "there is no checkpoint here",
            expected="a file that was sealed, or a directory of such files",
            got=f"{os.fspath(checkpoint)}: no such file or directory",
            hint=why_missing(os.fspath(checkpoint)),
        )
    return path


def _verification(checkpoint: Any, content: Mapping[str, Any], trust: bool) -> Verification:
    """``content``: that of the seal."""
    sealed: dict[str, dict[str, Any]] = content["tensors"]
    source = CheckpointSource(checkpoint, trust)
    key_of, several = _keys_by_name(sealed, source.tensors)
    differing = {
        key: f"{len(names)} tensors may be it: {listed(names, 3, ', ...')}"
        for key, names in several.items()
    }
    nonfinite: dict[str, int] = {}
    notes = list(source.notes)
    notes += (f"{key} was not sealed: {why}" for key, why in content["unsealed"].items())
    equal: set[str] = set()
    for name, load in source.tensors.items():
        record, extra = record_of(load)
        key = key_of.get(name)
        bad = 0 if extra.problem else sum(int(record[kind]) for kind in NONFINITE_COUNTS)
        if bad and key is None and name.startswith(_NOT_TRAINED):
            notes.append(f"{name} holds {bad:,} NaN or infinities, and is not a weight")
        elif bad:
            nonfinite[key or name] = bad
        problem = f"can't be read: {extra.problem}" if extra.problem else ""
        if key is None:
            notes += [f"{name} {problem}"] if problem else []
        elif difference := problem or _difference(record, load, sealed[key]):
            differing[key] = difference
        else:
            equal.add(key)
    # A tied weight that is there stands for the others.
    held = {sealed[key].get("tied_to", key) for key in equal}
    missing = tuple(
        key
        for key, entry in sealed.items()
        if key not in equal and key not in differing and entry.get("tied_to", key) not in held
    )
    count = len(sealed) - len(differing) - len(missing)
    about = (checkpoint, content["step"], content["verdict"], count)
    return Verification(*about, differing, missing, nonfinite, tuple(notes))


def _difference(record: np.void, load: Loader, entry: Mapping[str, Any]) -> str:
    """The first difference, in words; the parts of several ranks are slices of the checkpoint's
    tensor.
    """
    dtype, numel = DTYPES[int(record["dtype"])].name, int(record["numel"])
    if dtype != entry["dtype"]:
        return f"dtype {dtype}, sealed as {entry['dtype']}"
    if numel != entry["numel"]:
        return f"{numel:,} elements, sealed as {entry['numel']:,}"
    if "parts" not in entry:
        return "" if f"{int(record['checksum']):016x}" == entry["checksum"] else "other values"
    whole = load()
    is_sealed = torch.zeros(whole.shape, dtype=torch.bool)
    for part in entry["parts"]:
        at = tuple(slice(n, n + size) for n, size in zip(part["offsets"], part["sizes"]))
        name = "[" + ", ".join(f"{span.start}:{span.stop}" for span in at) + "]"
        if len(at) != whole.dim() or any(span.stop > n for span, n in zip(at, whole.shape)):
            return f"shape {tuple(whole.shape)}, in which there is no part {name}"
        if f"{stats(whole[at].detach(), order='logical').checksum:016x}" != part["checksum"]:
            return f"other values in the part {name}"
        is_sealed[at] = True
    return "" if is_sealed.all() else "the seal lacks parts of it"


def _keys_by_name(
    sealed: Iterable[str], names: Iterable[str]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """The key of the state_dict that each tensor of the checkpoint is: its name, or its name
    without a wrapper such as ``model.`` or ``state_dict.``; and the keys that several may be, as
    where two files hold a tensor of one name.
    """
    keys, below = set(sealed), dict[str, list[str]]()
    for name in names:
        parts = name.split(".")
        endings = (".".join(parts[start:]) for start in range(len(parts)))
        if (key := next((ending for ending in endings if ending in keys), None)) is not None:
            below.setdefault(key, []).append(name)
    several = {key: m for key, m in below.items() if key not in m and len(m) > 1}
    known = {
        (key if key in matches else matches[0]): key
        for key, matches in below.items()
        if key not in several
    }
    return known, several


def _read_seal(path: str) -> dict[str, Any]:
    hint = "fastcheck.seal(checkpoint, model) writes one"
    if not os.path.lexists(path):
        text = "the checkpoint has no seal"
        raise CompareError(text, expected=path, got="no such file", hint=hint)
    content: dict[str, Any] = read_document(path, "the seal")
    if not _is_seal(content):
        text = "this file is not a seal, or is one of a later version"
        expected = f'JSON with "fastcheck": "seal" of format {FORMATS[-1]} or before'
        raise CompareError(text, expected=expected, got=path, hint=hint)
    return content


def _is_seal(content: Any) -> bool:
    return (
        _has(content, fastcheck=str, format=int, unsealed=dict, verdict=str, tensors=dict)
        and content["fastcheck"] == "seal"
        and content["format"] in FORMATS
        and type(content.get("step", False)) in (int, type(None))
        and all(map(_is_entry, content["tensors"].values()))
        and is_tree(content.get("resume", {}))
    )


def _is_entry(entry: Any) -> bool:
    if not _has(entry, dtype=str, numel=int) or not isinstance(entry.get("tied_to", ""), str):
        return False
    if "parts" not in entry:
        return _has(entry, checksum=str)
    return isinstance(entry["parts"], list) and all(
        _has(part, checksum=str, offsets=list, sizes=list)
        and all(type(n) is int and n >= 0 for n in part["offsets"] + part["sizes"])
        for part in entry["parts"]
    )


def _has(value: Any, **kinds: type) -> bool:
    """True if this is an object of JSON with members of these types."""
    return isinstance(value, dict) and all(type(value.get(n)) is kinds[n] for n in kinds)
