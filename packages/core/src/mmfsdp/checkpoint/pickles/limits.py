"""Follows the opcodes of a pickle before they are run, to refuse what would exhaust the machine that reads it.

Python's unpickler makes room in its memo for as many values as an opcode says; a tuple that holds another many times
over takes for ever to hash as a key, and one that is nested very deeply ends the process then.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from mmfsdp.checkpoint.pickles.opcodes import LINE, OPCODES, TWO_LINES, Effect
from mmfsdp.checkpoint.pickles.runs import WEIGHT, Runs
from mmfsdp.errors import CorruptCheckpointError

__all__ = ["check_limits"]

_NESTING = 100  # tuples within tuples
_NUMBER = 1000  # bytes of an integer
_REPEATS = 1_000_000  # elements of tuples that are referred to again

_LONG = 1 << 16  # bytes from which on a pickle may have runs of entries worth skipping
_WARM = 1 << 12  # opcodes after which they are looked for; then again after eight times as many
_SMALL = 100  # elements that a tuple in the memo has at most if runs are skipped: they may use it as a key

# A value on the stack is 0, or for a tuple its elements all told, times 1024, plus how deep it is nested.
_UNKNOWN = WEIGHT[0] << 10 | WEIGHT[1]
_ENTRIES = -1  # stands for all entries of a run, which a dict takes as a whole; nothing else may take of them
_TORN = "it takes values apart that belong to a dict"
_POP_OPCODE = 0x30
_AGAIN = frozenset(b"Rbue(")  # opcodes after which an entry of a dict may begin
_PUSH, _GET, _PUT, _MARK, _TUPLE, _TUPLES, _POP, _TO_MARK, _REPLACE_MARKED, _NOTHING, _DUP, _EXTENSION = map(
    int, Effect
)


def check_limits(data: bytes | mmap.mmap, file: Path, begin: int = 0) -> None:
    """Raise if running a pickle would be out of proportion to its size; whether it is valid is for others to say.

    Args:
        data: Bytes that hold the pickle; what follows its end is not looked at.
        file: Where it comes from, for messages.
        begin: Where the pickle begins.

    Raises:
        CorruptCheckpointError: It was made to exhaust the machine that reads it, or asks for what that has registered.
    """
    skip = len(data) - begin > _LONG
    try:
        reason = _excess(data, begin, skip=skip)
        if reason is not None and skip:
            reason = _excess(data, begin, skip=False)  # the memo is not known in full where runs were skipped
    except (IndexError, ValueError):
        return  # it ends early, or makes no sense: the unpickler says so
    if reason is not None:
        message, at = reason
        raise CorruptCheckpointError(
            f"The pickle in {file.name} is refused: {message}. No checkpoint does this; it was made to harm the "
            "machine that reads it.",
            file=str(file),
            offset=at,
        )


def _excess(data: bytes | mmap.mmap, at: int, skip: bool) -> tuple[str, int] | None:
    stack: list[int] = []
    marks: list[int] = []
    memo: dict[int, int] = {}
    repeats, size, table = 0, len(data), OPCODES
    implicit: bool | None = None  # whether places of the memo are taken one after another, without naming them
    runs: Runs | None = None
    skipped = 0  # places that were taken so in runs, and are not in `memo`
    named = size  # the first place that a run may have taken by name
    used: dict[int, int] = {}  # places that hold no tuple to how often they were referred to
    followed, warm, fresh = 0, _WARM, False
    taken, hits = 0, 0  # places that no run takes by name; runs since they were last looked for
    while True:
        if fresh and runs is not None and (run := runs.at(data, at)) is not None:
            at, fresh = run.end, run.closed
            skipped += run.memoized
            if not implicit:
                named = min(named, taken)
            hits += 1
            if run.closed:
                del stack[marks.pop() :]
                continue
            stack.append(_ENTRIES)
        opcode = data[at]
        found = table[opcode]
        if found is None:  # STOP, or no opcode
            return None
        effect, length, number = found
        begin = at + 1
        if length >= 0:
            at = begin + length
        elif length > LINE:
            count = int.from_bytes(data[begin : begin - length], "little")
            at = begin - length + count
            if count > _NUMBER and opcode == 0x8B:
                return f"it holds a number of {count} bytes", begin - 1
        else:
            at = data.find(b"\n", begin) + 1
            if length == TWO_LINES and at:
                at = data.find(b"\n", at) + 1
            if not at:
                return None
        if skip:
            fresh = opcode in _AGAIN or (fresh and effect == _PUT)
            followed += 1
            if followed == warm:
                warm *= 8
                if not hits:
                    plain = sorted(used, key=used.__getitem__)[-64:]
                    taken = max(memo, default=0) + 1
                    runs = Runs(bool(implicit), plain, taken)
                hits = 0
        if effect == _PUSH:
            stack.append(0)
        elif effect == _PUT:
            if implicit is None:
                implicit = length == 0
            elif implicit != (length == 0):
                return "it numbers the places of its memo in two ways", begin - 1
            index = len(memo) + skipped if implicit else _index(data, begin, at, length)
            if index > size:
                return f"it stores a value at place {index} of its memo, but has only {size} bytes", begin - 1
            value = stack[-1]
            if value == _ENTRIES:
                return _TORN, begin - 1
            if value >> 10 > _SMALL or (value and used.pop(index, 0)):
                skip, runs = False, None
            memo[index] = value
        elif effect in (_GET, _DUP):
            if effect == _DUP:
                value = stack[-1]
                if value == _ENTRIES:
                    return _TORN, begin - 1
            else:
                index = _index(data, begin, at, length)
                value = memo.get(index, _UNKNOWN)
                if index >= named and value < _UNKNOWN:
                    value = _UNKNOWN
                if skip and not value:
                    used[index] = used.get(index, 0) + 1
            repeats += value >> 10
            if repeats > _REPEATS:
                return f"its tuples hold each other so often that they have over {_REPEATS} elements", begin - 1
            stack.append(value)
        elif effect == _MARK:
            marks.append(len(stack))
        elif effect in (_TUPLE, _TUPLES):
            first = len(stack) - number if effect == _TUPLES else marks.pop()
            items = stack[first:]
            del stack[first:]
            value = (1 + len(items)) << 10 | 1
            if any(items):
                if _ENTRIES in items:
                    return _TORN, begin - 1
                value += sum(item >> 10 for item in items) << 10
                value += max(item & 1023 for item in items)
                if value & 1023 > _NESTING:
                    return f"its tuples are nested more than {_NESTING} deep", begin - 1
            stack.append(value)
        elif effect == _POP:
            if opcode == _POP_OPCODE and marks and marks[-1] == len(stack):
                marks.pop()  # the mark itself is the topmost
                continue
            first = len(stack) - number if number > 0 else len(stack) + number - 1
            if _ENTRIES in stack[first:]:
                return _TORN, begin - 1
            del stack[first:]
            if number <= 0:
                stack.append(0)
        elif effect in (_TO_MARK, _REPLACE_MARKED):
            del stack[marks.pop() :]
            if effect == _REPLACE_MARKED:
                stack.append(0)
        elif effect == _EXTENSION:
            return "it asks for what is in the extension registry of the process that reads it", begin - 1


def _index(data: bytes | mmap.mmap, begin: int, end: int, length: int) -> int:
    return int(data[begin : end - 1]) if length == LINE else int.from_bytes(data[begin:end], "little")
