"""The machine code of CUDA kernels as a graph of basic blocks, and the shortest ways through it.

Made from what `nvdisasm -c` prints. A call is one instruction (what it calls is left out), and
BSYNC continues where the BSSY before it says. Nothing runs here.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Optional

LINE = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9]*)([\w.]*)(.*?);")
LABEL = re.compile(r"(\.L_x_\d+):")
SECTION = re.compile(r"\.text\.(\S+):")
PREDICATE = re.compile(r"!?U?P\d")


@dataclasses.dataclass
class Block:
    # With their modifiers; behind an @ where a predicate guards them.
    opcodes: list[str] = dataclasses.field(default_factory=list)
    changed: set[str] = dataclasses.field(default_factory=set)  # the predicates that it writes
    # Where it goes on, and the predicates that must hold for it.
    next: list[tuple[int, tuple[str, ...]]] = dataclasses.field(default_factory=list)

    def count(self, pattern: str) -> int:
        return sum(re.match(pattern, opcode) is not None for opcode in self.opcodes)


@dataclasses.dataclass
class End:
    """The instruction that a block ends with, if it is a branch or the like."""

    opcode: str
    operands: list[str]
    conditions: tuple[str, ...]
    is_sure: bool


def nvdisasm() -> Optional[str]:
    """From PATH, or the one that Triton brings."""
    found = shutil.which("nvdisasm")
    if found is not None:
        return found
    triton = importlib.util.find_spec("triton")
    for folder in (triton.submodule_search_locations or ()) if triton is not None else ():
        for path in Path(folder).glob("backends/nvidia/bin/nvdisasm"):
            return str(path)
    return None


def kernels(cubin: Path, program: str, wanted: re.Pattern[str]) -> dict[str, list[Block]]:
    """The blocks of the functions of a cubin whose mangled names match, by these names."""
    command = [program, "-c", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    functions: dict[str, list[str]] = {}
    is_wanted = False
    for line in text.splitlines():
        section = SECTION.match(line)
        if section is not None:
            is_wanted = wanted.search(section[1]) is not None
            if is_wanted:
                lines = functions.setdefault(section[1], [])
        elif is_wanted and (LABEL.match(line) or LINE.match(line)):
            lines.append(line)
    return {name: blocks_of(lines) for name, lines in functions.items()}


def blocks_of(lines: list[str]) -> list[Block]:
    blocks: list[Block] = [Block()]
    labels: dict[str, int] = {}
    ends: dict[int, End] = {}
    meetings: dict[str, list[tuple[int, str]]] = {}  # of a barrier register: where BSSY stands
    for line in lines:
        label = LABEL.match(line)
        if label is not None:
            if blocks[-1].opcodes:
                blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
            continue
        found = LINE.match(line)
        assert found is not None
        guard, opcode, modifiers = found[1], found[2], found[3]
        operands = [each.strip(" `()") for each in found[4].split(",")]
        block = blocks[-1]
        block.opcodes.append(("@" if guard else "") + opcode + modifiers)
        if opcode == "BSSY":
            meetings.setdefault(operands[0], []).append((len(blocks) - 1, operands[1]))
        if opcode in ("BRA", "EXIT", "RET", "BSYNC"):
            given = [guard, *(each for each in operands[:-1] if opcode == "BRA")]
            conditions = tuple(each for each in given if each and PREDICATE.match(each))
            # BRA.DIV, and others on what is not a predicate, may go either way.
            is_sure = not conditions and ".DIV" not in modifiers and not any(given[1:])
            ends[len(blocks) - 1] = End(opcode, operands, conditions, is_sure)
            blocks.append(Block())
        else:
            for i, each in enumerate(operands):
                if PREDICATE.fullmatch(each):
                    block.changed.add(each)
                elif i > 0 and each not in ("PT", "UPT"):
                    break
    for i, block in enumerate(blocks[:-1]):
        end = ends.get(i)
        if end is None:
            block.next.append((i + 1, ()))
            continue
        target = None
        if end.opcode == "BRA":
            target = labels.get(end.operands[-1])
        elif end.opcode == "BSYNC":
            before = [name for at, name in meetings.get(end.operands[-1], ()) if at <= i]
            target = labels.get(before[-1]) if before else None
        if target is not None:
            block.next.append((target, end.conditions))
        if not end.is_sure or (end.opcode == "BSYNC" and target is None):
            # Of several conditions, any one may be the false one.
            one = end.conditions if len(end.conditions) == 1 else ()
            block.next.append((i + 1, tuple(negated(each) for each in one)))
    return blocks


def negated(condition: str) -> str:
    return condition[1:] if condition[0] == "!" else "!" + condition


def loops(blocks: list[Block]) -> dict[int, set[int]]:
    """The natural loops, by the block that they begin with."""
    order = list(reversed(list(postorder(blocks))))
    number = {block: i for i, block in enumerate(order)}
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for after, _ in blocks[block].next:
            before[after].append(block)
    above = {0: 0}  # the immediate dominator (Cooper, Harvey and Kennedy 2001)
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [b for b in before[block] if b in above]
            best = known[0]
            for other in known[1:]:
                while best != other:
                    if number[best] > number[other]:
                        best = above[best]
                    else:
                        other = above[other]
            changed = changed or above.get(block) != best
            above[block] = best
    found: dict[int, set[int]] = {}
    for block in order:
        for head, _ in blocks[block].next:
            dominator = block
            while dominator not in (head, 0):
                dominator = above[dominator]
            if dominator != head:
                continue
            body, left = found.setdefault(head, {head}), [block]
            while left:
                inside = left.pop()
                if inside not in body:
                    body.add(inside)
                    left += before[inside]
    return found


def postorder(blocks: list[Block]) -> Iterator[int]:
    seen, stack = {0}, [(0, iter(blocks[0].next))]
    while stack:
        block, rest = stack[-1]
        for after, _ in rest:
            if after not in seen:
                seen.add(after)
                stack.append((after, iter(blocks[after].next)))
                break
        else:
            stack.pop()
            yield block


# A block, whether `via` was passed, how much of what is needed, what holds.
State = tuple[int, bool, tuple[int, ...], frozenset[str]]


def shortest_turn(
    blocks: list[Block], head: int, body: set[int], via: int, needs: Mapping[str, int]
) -> collections.Counter[str]:
    """The opcodes of the shortest turn of a loop that passes `via`, and as many instructions of
    each pattern as it needs. A predicate keeps its value until something writes it."""
    wanted = tuple(needs.values())
    has = {block: tuple(blocks[block].count(pattern) for pattern in needs) for block in body}

    def with_block(block: int, seen: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(min(most, n + m) for most, n, m in zip(wanted, seen, has[block]))

    start: State = (head, head == via, with_block(head, (0,) * len(wanted)), frozenset())
    queue: list[tuple[int, int, State, tuple[int, ...]]] = [
        (len(blocks[head].opcodes), 0, start, (head,))
    ]
    # By all but what holds; who knows less may go wherever who knows more may.
    done: dict[tuple[int, bool, tuple[int, ...]], list[frozenset[str]]] = {}
    pushed = 0
    while queue:
        cost, _, state, path = heapq.heappop(queue)
        block, passed, seen, facts = state
        if block < 0:
            return collections.Counter(op for b in path for op in blocks[b].opcodes)
        before = done.setdefault((block, passed, seen), [])
        if any(known <= facts for known in before):
            continue
        before.append(facts)
        facts = frozenset(each for each in facts if each.lstrip("!") not in blocks[block].changed)
        for after, conditions in blocks[block].next:
            if any(negated(each) in facts for each in conditions):
                continue
            pushed += 1
            known = facts.union(conditions)
            if after == head:
                if passed and seen == wanted:
                    heapq.heappush(queue, (cost, pushed, (-1, True, seen, known), path))
            elif after in body:
                state = (after, passed or after == via, with_block(after, seen), known)
                heapq.heappush(
                    queue, (cost + len(blocks[after].opcodes), pushed, state, (*path, after))
                )
    raise ValueError(f"no turn of the loop at {head} passes {via} with {dict(needs)}")
