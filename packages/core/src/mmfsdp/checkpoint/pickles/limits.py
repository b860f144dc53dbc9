"""Refuses pickles that would exhaust the machine, by following their opcodes before they are run.

Three things are dangerous. Python's unpickler makes its memo as large as an opcode says. A tuple that holds another one
many times over takes exponential time to hash as a key. Hashing a deeply nested tuple overflows the C stack and ends
the process. So the opcodes are followed on a stack that knows only how large and how deep each tuple is.

Opcodes: https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import enum
import mmap
from pathlib import Path

from mmfsdp.errors import CorruptCheckpointError

__all__ = ["check_limits"]

_NESTING = 100  # tuples within tuples
_NUMBER = 1000  # bytes of an integer
_REPEATS = 1_000_000  # elements of tuples that are referred to again

_LINE, _TWO_LINES = -10, -20  # the argument ends with a newline, or with the second one


class _Effect(enum.IntEnum):
    """What an opcode does to the stack and the memo."""

    STOP = 0
    """Ends the pickle; so does an unknown opcode."""
    MEMOIZE = 1
    """Stores the top value at the next place of the memo."""
    GET = 2
    """Pushes a value of the memo."""
    PUSH = 3
    """Pushes a value that is not a tuple."""
    POP = 4
    """Pops N values; if N <= 0, pops 1 - N values and pushes one that is not a tuple."""
    MARK = 5
    """Sets a mark."""
    TUPLES = 6
    """Makes the top N values a tuple."""
    PUT = 7
    """Stores the top value at a given place of the memo."""
    POP_MARK = 8
    """Pops everything above the mark."""
    TUPLE = 9
    """Makes everything above the mark a tuple."""
    REPLACE_MARK = 10
    """Replaces everything above the mark by a value that is not a tuple."""
    NOTHING = 11
    """Leaves the stack as it is."""
    DUP = 12
    """Pushes the top value again."""
    EXTENSION = 13
    """Pushes what the reading process has registered under a number."""


# Opcodes, effect, bytes of the argument (negative: bytes of its length, or lines), and N.
_OPCODES = (
    (b"\x94", _Effect.MEMOIZE, 0, 0),
    (b"h", _Effect.GET, 1, 0),
    (b"j", _Effect.GET, 4, 0),
    (b"g", _Effect.GET, _LINE, 0),
    (b"N\x88\x89})]\x8f\x97", _Effect.PUSH, 0, 0),
    (b"K", _Effect.PUSH, 1, 0),
    (b"M", _Effect.PUSH, 2, 0),
    (b"J", _Effect.PUSH, 4, 0),
    (b"G", _Effect.PUSH, 8, 0),
    (b"ISVLFP", _Effect.PUSH, _LINE, 0),
    (b"c", _Effect.PUSH, _TWO_LINES, 0),
    (b"\x8c\x8aUC", _Effect.PUSH, -1, 0),
    (b"X\x8bTB", _Effect.PUSH, -4, 0),
    (b"\x8d\x8e\x96", _Effect.PUSH, -8, 0),
    (b"0ab", _Effect.POP, 0, 1),  # APPEND and BUILD keep the object
    (b"s", _Effect.POP, 0, 2),
    (b"Q", _Effect.POP, 0, 0),
    (b"R\x81\x93", _Effect.POP, 0, -1),
    (b"\x92", _Effect.POP, 0, -2),
    (b"(", _Effect.MARK, 0, 0),
    (b"\x85", _Effect.TUPLES, 0, 1),
    (b"\x86", _Effect.TUPLES, 0, 2),
    (b"\x87", _Effect.TUPLES, 0, 3),
    (b"q", _Effect.PUT, 1, 0),
    (b"r", _Effect.PUT, 4, 0),
    (b"p", _Effect.PUT, _LINE, 0),
    (b"eu1\x90", _Effect.POP_MARK, 0, 0),
    (b"t", _Effect.TUPLE, 0, 0),
    (b"ldo\x91", _Effect.REPLACE_MARK, 0, 0),
    (b"i", _Effect.REPLACE_MARK, _TWO_LINES, 0),
    (b"\x80", _Effect.NOTHING, 1, 0),
    (b"\x95", _Effect.NOTHING, 8, 0),
    (b"\x98", _Effect.NOTHING, 0, 0),
    (b"2", _Effect.DUP, 0, 0),
    (b"\x82", _Effect.EXTENSION, 1, 0),
    (b"\x83", _Effect.EXTENSION, 2, 0),
    (b"\x84", _Effect.EXTENSION, 4, 0),
)
_TABLE: list[tuple[int, int, int]] = [(0, 0, 0)] * 256
for _codes, _effect, _argument, _count in _OPCODES:
    for _code in _codes:
        _TABLE[_code] = (int(_effect), _argument, _count)

_STOP, _MEMOIZE, _GET, _PUSH, _POP, _MARK, _TUPLES, _PUT, _POP_MARK, _TUPLE, _REPLACE, _NOTHING, _DUP, _EXTENSION = map(
    int, _Effect
)
_MEMOIZE_OPCODE, _POP_OPCODE, _LONG4_OPCODE = 0x94, 0x30, 0x8B

_TWO_WAYS = "it numbers the places of its memo in two ways"
_REPEATED = f"its tuples hold each other so often that they have over {_REPEATS} elements"


def check_limits(data: bytes | mmap.mmap, file: Path, begin: int = 0) -> None:
    """Raise if running a pickle would need time or memory out of proportion to its size.

    A pickle that ends early or makes no sense is accepted here: the unpickler reports it.

    Args:
        data: Bytes that hold the pickle; bytes after its end are ignored.
        file: The file that holds it, for messages.
        begin: Offset of the pickle in `data`.

    Raises:
        CorruptCheckpointError: The pickle would exhaust the machine, or uses the process's extension registry.
    """
    try:
        reason = _excess(data, begin)
    except (IndexError, ValueError):
        return
    if reason is not None:
        message, at = reason
        raise CorruptCheckpointError(
            f"The pickle in {file.name} is refused: {message}. No checkpoint does this; the file was made to harm the "
            "machine that reads it.",
            file=str(file),
            offset=at,
        )


def _excess(data: bytes | mmap.mmap, at: int) -> tuple[str, int] | None:
    """Return what a pickle does that is dangerous, and at which offset; ``None`` if it is safe."""
    # A value on the stack is 0, or for a tuple its total number of elements, times 1024, plus its depth.
    stack: list[int] = []
    marks: list[int] = []
    tuples: dict[int, int] = {}  # place in the memo -> tuple
    memoized, named = 0, False  # places taken by MEMOIZE; whether PUT was used
    repeats = 0
    table, push, from_bytes = _TABLE, stack.append, int.from_bytes
    while True:
        opcode = data[at]
        at += 1
        if opcode == _MEMOIZE_OPCODE:  # a quarter of all opcodes
            if named:
                return _TWO_WAYS, at - 1
            if value := stack[-1]:
                tuples[memoized] = value
            memoized += 1
            continue
        effect, argument, count = table[opcode]
        if effect == _GET:
            if argument == 1:
                place = data[at]
                at += 1
            elif argument == 4:
                place, at = from_bytes(data[at : at + 4], "little"), at + 4
            else:
                place, at = _place(data, at, argument)
            if place not in tuples:
                push(0)
                continue
            value = tuples[place]
            repeats += value >> 10
            if repeats > _REPEATS:
                return _REPEATED, at - 1
            push(value)
        elif effect == _PUT:
            begin = at - 1
            if argument == 4:
                place, at = from_bytes(data[at : at + 4], "little"), at + 4
            else:
                place, at = _place(data, at, argument)
            if memoized:
                return _TWO_WAYS, begin
            if place > len(data):
                return f"it stores a value at place {place} of its memo, but has only {len(data)} bytes", begin
            named = True
            if (value := stack[-1]) or place in tuples:
                tuples[place] = value
        elif effect == _PUSH:
            push(0)
            if argument >= 0:
                at += argument
            elif argument == -1:
                at += data[at] + 1
            elif argument > _LINE:
                size = int.from_bytes(data[at : at - argument], "little")
                if size > _NUMBER and opcode == _LONG4_OPCODE:
                    return f"it holds a number of {size} bytes", at - 1
                at += size - argument
            else:
                at = _after_lines(data, at, argument)
        elif effect == _POP:
            if count > 0:
                if opcode == _POP_OPCODE and marks and marks[-1] == len(stack):
                    marks.pop()  # the mark itself is on top
                    continue
                del stack[-count:]
            else:
                if count:
                    del stack[count:]
                stack[-1] = 0
        elif effect == _MARK:
            marks.append(len(stack))
        elif effect in (_TUPLES, _TUPLE):
            first = -count or marks.pop()
            items = stack[first:]
            del stack[first:]
            value = (1 + len(items)) << 10 | 1
            if any(items):
                value += sum(item >> 10 for item in items) << 10
                value += max(item & 1023 for item in items)
                if value & 1023 > _NESTING:
                    return f"its tuples are nested more than {_NESTING} deep", at - 1
            push(value)
        elif effect in (_POP_MARK, _REPLACE):
            if argument:
                at = _after_lines(data, at, argument)
            del stack[marks.pop() :]
            if effect == _REPLACE:
                push(0)
        elif effect == _NOTHING:
            at += argument
        elif effect == _DUP:
            value = stack[-1]
            repeats += value >> 10
            if repeats > _REPEATS:
                return _REPEATED, at - 1
            push(value)
        elif effect == _EXTENSION:
            return "it uses the extension registry of the process that reads it", at - 1
        else:
            return None


def _place(data: bytes | mmap.mmap, at: int, argument: int) -> tuple[int, int]:
    """Return a place of the memo, and the offset after it."""
    if argument > 0:
        return int.from_bytes(data[at : at + argument], "little"), at + argument
    end = _after_lines(data, at, argument)
    return int(data[at : end - 1]), end


def _after_lines(data: bytes | mmap.mmap, at: int, argument: int) -> int:
    """Return the offset after one line or two."""
    for _ in range(1 if argument == _LINE else 2):
        found = data.find(b"\n", at)
        if found < 0:
            raise ValueError("the pickle ends within a line")
        at = found + 1
    return at
