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
from collections.abc import Callable
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
        _Walk(data, begin).follow()
    except (IndexError, ValueError):
        return
    except _ExcessError as error:
        raise CorruptCheckpointError(
            f"The pickle in {file.name} is refused: {error.message}. No checkpoint does this; the file was made to "
            "harm the machine that reads it.",
            file=str(file),
            offset=error.offset,
        ) from None


class _ExcessError(Exception):
    def __init__(self, message: str, offset: int) -> None:
        self.message, self.offset = message, offset


class _Walk:
    """A walk through the opcodes of a pickle, with a method for each effect on the stack and the memo.

    A value on the stack is 0, or for a tuple its total number of elements, times 1024, plus its depth. Every effect
    takes the opcode and what `_OPCODES` says of it, and raises an `_ExcessError` if the pickle is dangerous.
    """

    def __init__(self, data: bytes | mmap.mmap, at: int) -> None:
        self._data, self._at = data, at
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._tuples: dict[int, int] = {}  # index in the memo -> tuple
        self._memoized, self._named = 0, False  # entries stored by MEMOIZE; whether PUT was used
        self._repeats = self._keys = 0
        self._numbers = _Numbers()
        self._skips = len(data) - at > _LONG  # as long as there is no large tuple in the memo

    def follow(self) -> None:
        """Follow the opcodes to the end of the pickle, which an unknown opcode is as well."""
        data, table = self._data, _TABLE
        while True:
            opcode = data[self._at]
            self._at += 1
            effect, argument, count = table[opcode]
            if effect is None:
                return
            effect(self, opcode, argument, count)

    def memoize(self, opcode: int, argument: int, count: int) -> None:
        """Store the top value at the next index of the memo."""
        if self._named:
            raise self._excess(_TWO_WAYS)
        if value := self._stack[-1]:
            self._store(self._memoized, value)
        self._memoized += 1

    def put(self, opcode: int, argument: int, count: int) -> None:
        """Store the top value at a given index of the memo."""
        begin = self._at - 1
        index = self._index(argument)
        if self._memoized:
            raise _ExcessError(_TWO_WAYS, begin)
        if index > (size := len(self._data)):
            raise _ExcessError(f"it stores a value at index {index} of its memo, but has only {size} bytes", begin)
        self._named = True
        if (value := self._stack[-1]) or index in self._tuples:
            self._store(index, value)

    def get(self, opcode: int, argument: int, count: int) -> None:
        """Push a value of the memo."""
        self._repeat(self._tuples.get(self._index(argument), 0))

    def duplicate(self, opcode: int, argument: int, count: int) -> None:
        """Push the top value again."""
        self._repeat(self._stack[-1])

    def push(self, opcode: int, argument: int, count: int) -> None:
        """Push a value that is not a tuple; its argument has a fixed length."""
        self._stack.append(0)
        self._at += argument

    def push_short(self, opcode: int, argument: int, count: int) -> None:
        """Push a value that is not a tuple; one byte says how long its argument is."""
        self._stack.append(0)
        begin = self._at + 1
        self._at = begin + self._data[self._at]
        if opcode == _LONG1_OPCODE and self._at - begin >= _LARGE:
            self._check_number(self._data[begin : self._at])

    def push_long(self, opcode: int, argument: int, count: int) -> None:
        """Push a value that is not a tuple; several bytes say how long its argument is."""
        self._stack.append(0)
        begin = self._at + argument
        size = int.from_bytes(self._data[self._at : begin], "little")
        if opcode == _LONG4_OPCODE and size > _NUMBER:
            raise self._excess(f"it holds a number of {size} bytes")
        self._at = begin + size
        if opcode == _LONG4_OPCODE:
            self._check_number(self._data[begin : self._at])

    def push_lines(self, opcode: int, argument: int, count: int) -> None:
        """Push a value that is not a tuple; its argument is text that ends with a line."""
        self._stack.append(0)
        begin, self._at = self._at, _after_lines(self._data, self._at, argument)
        text = self._data[begin : self._at - 1]
        if opcode in b"IL" and len(text) >= 2 * _LARGE and self._numbers.collide_text(text):
            raise self._excess(_COLLIDING)

    def pop(self, opcode: int, argument: int, count: int) -> None:
        """Pop a value, or a mark that is on top."""
        if opcode == _POP_OPCODE and self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            del self._stack[-1:]

    def call(self, opcode: int, argument: int, count: int) -> None:
        """Pop the arguments of a call, and replace its function by a value that is not a tuple."""
        del self._stack[len(self._stack) - count :]
        self._stack[-1] = 0

    def begin_value(self, opcode: int, argument: int, count: int) -> None:
        """Push a value, or make a call; pass over what large checkpoints are full of, if it follows."""
        if count < 0:
            self.push(opcode, argument, count)
        else:
            self.call(opcode, argument, count)
        if self._skips and (self._named or self._memoized):
            self._skip(opcode)

    def mark(self, opcode: int, argument: int, count: int) -> None:
        """Set a mark."""
        self._marks.append(len(self._stack))

    def make_tuple(self, opcode: int, argument: int, count: int) -> None:
        """Make the top values a tuple: ``count`` of them, or all above the mark."""
        first = -count or self._marks.pop()
        items = self._stack[first:]
        del self._stack[first:]
        value = (1 + len(items)) << 10 | 1
        if any(items):
            value += sum(item >> 10 for item in items) << 10
            value += max(item & 1023 for item in items)
            if value & 1023 > _NESTING:
                raise self._excess(f"its tuples are nested more than {_NESTING} deep")
        self._stack.append(value)

    def pop_mark(self, opcode: int, argument: int, count: int) -> None:
        """Pop everything above the mark."""
        del self._stack[self._marks.pop() :]

    def replace(self, opcode: int, argument: int, count: int) -> None:
        """Replace everything above the mark by a value that is not a tuple."""
        if argument:
            self._at = _after_lines(self._data, self._at, argument)
        self.pop_mark(opcode, argument, count)
        self._stack.append(0)

    def set_items(self, opcode: int, argument: int, count: int) -> None:
        """Pop everything above the mark. The first of every ``count`` values is a key."""
        self._pop_items(self._marks.pop(), count)

    def set_item(self, opcode: int, argument: int, count: int) -> None:
        """Pop a key and a value."""
        self._pop_items(len(self._stack) - 2, count)

    def make_dict(self, opcode: int, argument: int, count: int) -> None:
        """Replace keys and values above the mark by a value that is not a tuple."""
        self.set_items(opcode, argument, count)
        self._stack.append(0)

    def make_frozenset(self, opcode: int, argument: int, count: int) -> None:
        """Replace the keys above the mark by a frozenset, which may be a key as a tuple may."""
        self.set_items(opcode, argument, count)
        self._stack.append(1 << 10 | 1)

    def skip_argument(self, opcode: int, argument: int, count: int) -> None:
        """Leave the stack as it is."""
        self._at += argument

    def use_extension(self, opcode: int, argument: int, count: int) -> None:
        """Refuse to push what the reading process has registered under a number."""
        raise self._excess("it uses the extension registry of the process that reads it")

    def _excess(self, message: str) -> _ExcessError:
        return _ExcessError(message, self._at - 1)

    def _index(self, argument: int) -> int:
        """Return the index of the memo that is the argument, and go on behind it."""
        begin = self._at
        if argument < 0:
            self._at = _after_lines(self._data, begin, argument)
            return int(self._data[begin : self._at - 1])
        self._at = begin + argument
        return self._data[begin] if argument == 1 else int.from_bytes(self._data[begin : self._at], "little")

    def _store(self, index: int, value: int) -> None:
        self._tuples[index] = value
        self._skips = self._skips and value >> 10 <= _SMALL

    def _repeat(self, value: int) -> None:
        self._repeats += value >> 10
        if self._repeats > _REPEATS:
            raise self._excess(_REPEATED)
        self._stack.append(value)

    def _pop_items(self, first: int, count: int) -> None:
        keys = self._stack[first::count]
        del self._stack[first:]
        if any(keys):
            self._keys += sum(map(bool, keys))
            if self._keys > MOST_KEYS:
                raise self._excess(_MANY_KEYS)

    def _check_number(self, data: bytes) -> None:
        if self._numbers.collide(data):
            raise self._excess(_COLLIDING)

    def _skip(self, opcode: int) -> None:
        """Go on behind the tensors, objects or dicts that follow an opcode as checkpoints describe them."""
        found = _usual(opcode, self._named).match(self._data, self._at)
        if found is None:
            return
        if opcode == _BINPERSID_OPCODE:
            if not self._marks or self._marks[-1] != len(self._stack) - 1:
                return  # a tuple may be among the arguments
            self.pop_mark(opcode, 0, 0)
            self._stack[-1] = 0
        skipped, self._at = found[0], found.end()
        self._stack += [0] * (skipped.count(opcode) * (1 if opcode == _NEWOBJ_OPCODE else 2))
        if not self._named:
            self._memoized += skipped.count(_MEMOIZE_OPCODE)


_Effect = Callable[[_Walk, int, int, int], None]

# Opcodes, effect, bytes of the argument (or of its length; negative: lines), and a number of values.
_OPCODES: tuple[tuple[bytes, _Effect, int, int], ...] = (
    (b"\x94", _Walk.memoize, 0, 0),
    (b"h", _Walk.get, 1, 0),
    (b"j", _Walk.get, 4, 0),
    (b"g", _Walk.get, _LINE, 0),
    (b"q", _Walk.put, 1, 0),
    (b"r", _Walk.put, 4, 0),
    (b"p", _Walk.put, _LINE, 0),
    (b"2", _Walk.duplicate, 0, 0),
    (b"N\x88\x89)]\x8f\x97", _Walk.push, 0, 0),
    (b"K", _Walk.push, 1, 0),
    (b"M", _Walk.push, 2, 0),
    (b"J", _Walk.push, 4, 0),
    (b"G", _Walk.push, 8, 0),
    (b"\x8c\x8aUC", _Walk.push_short, 1, 0),
    (b"X\x8bTB", _Walk.push_long, 4, 0),
    (b"\x8d\x8e\x96", _Walk.push_long, 8, 0),
    (b"ISVLFP", _Walk.push_lines, _LINE, 0),
    (b"c", _Walk.push_lines, _TWO_LINES, 0),
    (b"0ab", _Walk.pop, 0, 1),  # APPEND and BUILD keep the object
    (b"R\x93", _Walk.call, 0, 1),
    (b"\x92", _Walk.call, 0, 2),
    (b"}", _Walk.begin_value, 0, -1),
    (b"Q", _Walk.begin_value, 0, 0),
    (b"\x81", _Walk.begin_value, 0, 1),
    (b"(", _Walk.mark, 0, 0),
    (b"\x85", _Walk.make_tuple, 0, 1),
    (b"\x86", _Walk.make_tuple, 0, 2),
    (b"\x87", _Walk.make_tuple, 0, 3),
    (b"t", _Walk.make_tuple, 0, 0),
    (b"e1", _Walk.pop_mark, 0, 0),
    (b"lo", _Walk.replace, 0, 0),
    (b"i", _Walk.replace, _TWO_LINES, 0),
    (b"u", _Walk.set_items, 0, 2),
    (b"\x90", _Walk.set_items, 0, 1),
    (b"s", _Walk.set_item, 0, 2),
    (b"d", _Walk.make_dict, 0, 2),
    (b"\x91", _Walk.make_frozenset, 0, 1),
    (b"\x80", _Walk.skip_argument, 1, 0),
    (b"\x95", _Walk.skip_argument, 8, 0),
    (b"\x98", _Walk.skip_argument, 0, 0),
    (b"\x82\x83\x84", _Walk.use_extension, 0, 0),
)
_TABLE: list[tuple[_Effect | None, int, int]] = [(None, 0, 0)] * 256
for _codes, _effect, _argument, _count in _OPCODES:
    for _code in _codes:
        _TABLE[_code] = (_effect, _argument, _count)


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

    It does no harm: the memo gets no tuples but those with up to nine integers, and tuples of these;
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


def _after_lines(data: bytes | mmap.mmap, at: int, argument: int) -> int:
    """Return the offset after one line or two."""
    for _ in range(1 if argument == _LINE else 2):
        found = data.find(b"\n", at)
        if found < 0:
            raise ValueError("the pickle ends within a line")
        at = found + 1
    return at
