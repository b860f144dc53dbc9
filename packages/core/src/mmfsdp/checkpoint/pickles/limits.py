"""Refuses pickles that would exhaust the machine, by following their opcodes before they are run.

Four things are dangerous. The hashes of numbers and tuples can be foreseen, so that a dict whose keys all collide takes
quadratic time. Python's unpickler makes its memo as large as an opcode says. A tuple that holds another one
many times over takes exponential time to hash as a key. Hashing a deeply nested tuple overflows the C stack and ends
the process. So the opcodes are followed on a stack that knows only how large and how deep each tuple is.

Opcodes: https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import mmap
import re
from functools import cache
from pathlib import Path

from mmfsdp.errors import CorruptCheckpointError

__all__ = ["MOST_KEYS", "check_limits"]

_NESTING = 100  # tuples within tuples
_NUMBER = 1000  # bytes of an integer
_REPEATS = 1_000_000  # elements of tuples that are referred to again
MOST_KEYS = 10_000
"""Tuples that may be keys: whoever chooses them can give all of them the same hash."""
_COLLISIONS = 1_000  # integers with the same hash
_LARGE = 8  # bytes of integers whose hash is not they themselves

_LINE, _TWO_LINES = -10, -20  # the argument ends with a newline, or with the second one


# What an opcode does to the stack and the memo.
_STOP = 0  # ends the pickle; so does an unknown opcode
_MEMOIZE = 1  # stores the top value at the next index of the memo
_GET = 2  # pushes a value of the memo
_PUSH = 3  # pushes a value that is not a tuple
_POP = 4  # pops N values; if N <= 0, pops 1 - N values and pushes one that is not a tuple
_MARK = 5  # sets a mark
_TUPLES = 6  # makes the top N values a tuple
_PUT = 7  # stores the top value at a given index of the memo
_POP_MARK = 8  # pops everything above the mark
_TUPLE = 9  # makes everything above the mark a tuple
_REPLACE = 10  # replaces everything above the mark by a value that is not a tuple
_NOTHING = 11  # leaves the stack as it is
_DUP = 12  # pushes the top value again
_EXTENSION = 13  # pushes what the reading process has registered under a number
_ITEMS = 15  # pops what is above the mark, every second (2) or each (1) of it a key; if N < 0, pushes a value
_SETITEM = 16  # pops a key and a value
_USUAL = 14  # as _POP, or as _PUSH if N is 1; what large checkpoints are full of may follow

# Opcodes, effect, bytes of the argument (negative: bytes of its length, or lines), and N.
_OPCODES = (
    (b"\x94", _MEMOIZE, 0, 0),
    (b"h", _GET, 1, 0),
    (b"j", _GET, 4, 0),
    (b"g", _GET, _LINE, 0),
    (b"N\x88\x89)]\x8f\x97", _PUSH, 0, 0),
    (b"K", _PUSH, 1, 0),
    (b"M", _PUSH, 2, 0),
    (b"J", _PUSH, 4, 0),
    (b"G", _PUSH, 8, 0),
    (b"ISVLFP", _PUSH, _LINE, 0),
    (b"c", _PUSH, _TWO_LINES, 0),
    (b"\x8c\x8aUC", _PUSH, -1, 0),
    (b"X\x8bTB", _PUSH, -4, 0),
    (b"\x8d\x8e\x96", _PUSH, -8, 0),
    (b"0ab", _POP, 0, 1),  # APPEND and BUILD keep the object
    (b"s", _SETITEM, 0, 2),
    (b"R\x93", _POP, 0, -1),
    (b"\x92", _POP, 0, -2),
    (b"(", _MARK, 0, 0),
    (b"\x85", _TUPLES, 0, 1),
    (b"\x86", _TUPLES, 0, 2),
    (b"\x87", _TUPLES, 0, 3),
    (b"q", _PUT, 1, 0),
    (b"r", _PUT, 4, 0),
    (b"p", _PUT, _LINE, 0),
    (b"e1", _POP_MARK, 0, 0),
    (b"u", _ITEMS, 0, 2),
    (b"\x90", _ITEMS, 0, 1),
    (b"t", _TUPLE, 0, 0),
    (b"lo", _REPLACE, 0, 0),
    (b"d", _ITEMS, 0, -2),
    (b"\x91", _ITEMS, 0, -1),
    (b"i", _REPLACE, _TWO_LINES, 0),
    (b"\x80", _NOTHING, 1, 0),
    (b"\x95", _NOTHING, 8, 0),
    (b"\x98", _NOTHING, 0, 0),
    (b"2", _DUP, 0, 0),
    (b"\x82", _EXTENSION, 1, 0),
    (b"\x83", _EXTENSION, 2, 0),
    (b"\x84", _EXTENSION, 4, 0),
    (b"}", _USUAL, 0, 1),
    (b"Q", _USUAL, 0, 0),
    (b"\x81", _USUAL, 0, -1),
)
_TABLE: list[tuple[int, int, int]] = [(0, 0, 0)] * 256
for _codes, _effect, _argument, _count in _OPCODES:
    for _code in _codes:
        _TABLE[_code] = (_effect, _argument, _count)

_LONG1_OPCODE = 0x8A
_MEMOIZE_OPCODE, _POP_OPCODE, _LONG4_OPCODE, _BINPERSID_OPCODE, _NEWOBJ_OPCODE = 0x94, 0x30, 0x8B, 0x51, 0x81

_MANY_KEYS = f"it uses more than {MOST_KEYS} tuples as keys, which may all have the same hash"
_COLLIDING = f"it holds more than {_COLLISIONS} different integers with the same hash"
_TWO_WAYS = "it numbers the entries of its memo in two ways"
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
    tuples: dict[int, int] = {}  # index in the memo -> tuple
    memoized, named = 0, False  # entries stored by MEMOIZE; whether PUT was used
    repeats = made_keys = 0
    numbers = _Numbers()
    skips = len(data) - at > _LONG  # as long as there is no large tuple in the memo
    table, push, from_bytes = _TABLE, stack.append, int.from_bytes
    while True:
        opcode = data[at]
        at += 1
        if opcode == _MEMOIZE_OPCODE:  # a quarter of all opcodes
            if named:
                return _TWO_WAYS, at - 1
            if value := stack[-1]:
                tuples[memoized] = value
                skips = skips and value >> 10 <= _SMALL
            memoized += 1
            continue
        effect, argument, count = table[opcode]
        if effect == _GET:
            if argument == 1:
                index = data[at]
                at += 1
            elif argument == 4:
                index, at = from_bytes(data[at : at + 4], "little"), at + 4
            else:
                index, at = _memo_index(data, at, argument)
            if index not in tuples:
                push(0)
                continue
            value = tuples[index]
            repeats += value >> 10
            if repeats > _REPEATS:
                return _REPEATED, at - 1
            push(value)
        elif effect == _PUT:
            begin = at - 1
            if argument == 4:
                index, at = from_bytes(data[at : at + 4], "little"), at + 4
            else:
                index, at = _memo_index(data, at, argument)
            if memoized:
                return _TWO_WAYS, begin
            if index > len(data):
                return f"it stores a value at index {index} of its memo, but has only {len(data)} bytes", begin
            named = True
            if (value := stack[-1]) or index in tuples:
                tuples[index] = value
                skips = skips and value >> 10 <= _SMALL
        elif effect == _PUSH:
            push(0)
            if argument >= 0:
                at += argument
            elif argument == -1:
                begin = at + 1
                at += data[at] + 1
                if opcode == _LONG1_OPCODE and at - begin >= _LARGE and numbers.collide(data[begin:at]):
                    return _COLLIDING, at - 1
            elif argument > _LINE:
                size = int.from_bytes(data[at : at - argument], "little")
                if size > _NUMBER and opcode == _LONG4_OPCODE:
                    return f"it holds a number of {size} bytes", at - 1
                at += size - argument
                if opcode == _LONG4_OPCODE and numbers.collide(data[at - size : at]):
                    return _COLLIDING, at - 1
            else:
                begin, at = at, _after_lines(data, at, argument)
                if opcode in b"IL" and at - begin > 2 * _LARGE and numbers.collide_text(data[begin : at - 1]):
                    return _COLLIDING, at - 1
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
        elif effect == _USUAL:
            if count > 0:
                push(0)
            else:
                del stack[len(stack) + count :]
                stack[-1] = 0
            if skips and (named or memoized) and (found := _usual(opcode, named).match(data, at)):
                if opcode == _BINPERSID_OPCODE:
                    if not marks or marks[-1] != len(stack) - 1:
                        continue  # a tuple may be among the arguments
                    del stack[marks.pop() :]
                    stack[-1] = 0
                skipped, at = found[0], found.end()
                stack += [0] * (skipped.count(opcode) * (1 if opcode == _NEWOBJ_OPCODE else 2))
                memoized += 0 if named else skipped.count(_MEMOIZE_OPCODE)
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
        elif effect in (_ITEMS, _SETITEM):
            first = len(stack) - 2 if effect == _SETITEM else marks.pop()
            keys = stack[first :: abs(count)]
            del stack[first:]
            if any(keys):
                made_keys += sum(map(bool, keys))
                if made_keys > MOST_KEYS:
                    return _MANY_KEYS, at - 1
            if count < 0:  # a frozenset may be a key as a tuple may
                push(1 << 10 | 1 if count == -1 else 0)
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


class _Numbers:
    """Counts large integers by their hash, which nothing randomises: as keys of a dict they take quadratic time."""

    def __init__(self) -> None:
        self._seen: dict[int, set[bytes]] = {}  # bytes have a hash that nobody can foresee

    def collide(self, data: bytes) -> bool:
        """Note an integer by its bytes; tell whether too many others have its hash."""
        return self._add(int.from_bytes(data, "little", signed=True))

    def collide_text(self, data: bytes) -> bool:
        """Note an integer as text. What is not a number, the unpickler reports; what is too long, Python rejects."""
        return len(data) <= _NUMBER and self._add(int(data.rstrip(b"L")))

    def _add(self, value: int) -> bool:
        same = self._seen.setdefault(hash(value), set())
        same.add(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        return len(same) > _COLLISIONS


_LONG = 1 << 18  # bytes from which on a pickle may describe thousands of tensors
_ATTRIBUTES = 100  # keys of an object's state
_SMALL = 100  # elements of a tuple that may be a key where opcodes are skipped


@cache
def _usual(opcode: int, named: bool) -> re.Pattern[bytes]:
    """Return what matches tens of thousands of tensors after an opcode, as checkpoints describe them.

    After ``BINPERSID`` it is what else rebuilds a tensor, and more tensors by name; after ``NEWOBJ`` the state of an
    object and more objects, as in DCP's metadata; after ``EMPTY_DICT`` its items and more dicts by name, as in
    ``rank{i}.pth``. A match takes a tenth of the time of its opcodes (docs/adr/0006-mechanisms-removed-and-kept.md).

    It does no harm: what it stores in the memo holds no tuples but those of up to nine integers, and tuples of these;
    its keys are in the memo. No argument contains an opcode that is counted in it: the given one, which begins another
    value, and the one that takes an entry of the memo.

    Args:
        opcode: The opcode.
        named: Whether values are stored at given indices of the memo.
    """
    byte = rb"[^\x94\x%02x]" % opcode
    put = rb"(?:q%b|r%b{2}[\0-\x0f]\0)?" % (byte, byte) if named else rb"\x94?"
    get = rb"(?:h%b|j%b{4})" % (byte, byte)
    integer = rb"(?:K%b|M%b{2}|J%b{4}|\x8a(?:\x05%b{5}|\x06%b{6}))" % ((byte,) * 5)
    integers = rb"(?:\)|%b\x85|%b{2}\x86|%b{3}\x87|\(%b{0,9}t)" % ((integer,) * 4) + put
    length = rb"\x%02x\0{3}%b{%d}" if named else rb"\x%02x%b{%d}"
    texts = b"|".join(length % (size, byte, size) for size in range(128))
    text = rb"%b(?:%b)" % (b"X" if named else rb"\x8c", texts) + put
    if opcode == _BINPERSID_OPCODE:
        view = integer + integers * 2 + rb"[\x88\x89]" + get + rb"\)R%bt%bR" % (put, put) + put
        storage = rb"\(\(%b%btQ" % (get * 2, text + get + integer)  # its tuple is not in the memo
        return re.compile(view + rb"(?:%b)*+" % (text + get + storage + view), re.DOTALL)
    size = rb"(?:%b\x85|\(%bt)%bR" % (integers, integers, put) + put
    numbers = rb"\]%b\((?:%b|N)*+e" % (put, integer)
    value = rb"(?:%b(?:%b)?|%b|%b|%b|[N\x88\x89])" % (get, size, integer, numbers, text)
    items = put + rb"\((?:%b){0,%d}+u" % (get + value, _ATTRIBUTES)
    if opcode == _NEWOBJ_OPCODE:
        state = put + b"}" + items + b"b"
        return re.compile(state + rb"(?:%b\)\x81%b)*+" % (get, state), re.DOTALL)
    return re.compile(items + b"(?:%b}%b)*+" % (text, items), re.DOTALL)


def _memo_index(data: bytes | mmap.mmap, at: int, argument: int) -> tuple[int, int]:
    """Return an index of the memo, and the offset after it."""
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
