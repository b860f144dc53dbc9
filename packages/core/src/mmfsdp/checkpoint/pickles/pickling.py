"""Writes a checkpoint's tree as a protocol 2 pickle that ``torch.load`` understands, without torch.

Only opcodes of protocol 2 are written, since ``weights_only=True`` reads no others
(https://docs.python.org/3/library/pickletools.html).
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Sequence
from typing import Any

from mmfsdp.checkpoint.layout import TensorRef
from mmfsdp.checkpoint.pickles.unpickling import PickledObject, check_is_name, is_known_object, shown
from mmfsdp.errors import FormatError, UnsafePickleError

__all__ = ["PickleWriter", "int_opcodes", "name_opcodes", "text_opcodes"]


def int_opcodes(value: int) -> bytes:
    """Return the opcodes that push an integer."""
    if 0 <= value < 256:
        return b"K" + _BYTES[value]
    if -(2**31) <= value < 2**31:
        return b"J" + _INT32(value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + _BYTES[len(data)] if len(data) < 256 else b"\x8b" + _INT32(len(data))) + data


def name_opcodes(module: str, name: str) -> bytes:
    """Return the opcodes that push a class or function by its name.

    Raises:
        UnsafePickleError: The name is not one, and would be read as opcodes.
    """
    check_is_name(module, name)
    return f"c{module}\n{name}\n".encode("ascii")


def text_opcodes(value: str) -> bytes:
    """Return the opcodes that push a text."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + _UINT32(len(data)) + data


class PickleWriter:
    """Turns one tree into a pickle; shared objects stay shared.

    Args:
        write_tensor: Called as ``write_tensor(writer, ref)`` for each ``TensorRef``; writes the opcodes that push the
            tensor. Without it, a tree with tensors is an error.
    """

    def __init__(self, write_tensor: Callable[[PickleWriter, TensorRef], None] | None = None) -> None:
        self._write_tensor = write_tensor
        self._out = bytearray(b"\x80\x02")
        # Place of each name (module, name), text, object (by its id) and value of `keep` (by its opcodes).
        self._memo: dict[tuple[str, str] | str | bytes | int, int] = {}
        self._alive: list[Any] = []  # an id must not be reused by another object

    def dumps(self, tree: Any) -> bytes:
        """Return the pickle of a tree.

        Raises:
            FormatError: The tree holds an object that a checkpoint cannot hold, or is nested too deeply.
            UnsafePickleError: The tree holds a class whose name is not one.
        """
        try:
            self.save(tree)
        except RecursionError as error:
            raise FormatError("The content is nested too deeply to be pickled.") from error
        return self.complete()

    def complete(self, opcodes: bytes = b"") -> bytes:
        """Return the whole pickle, whose value is what ``opcodes``, or else the last call of ``save``, pushes."""
        return bytes(self._out) + opcodes + b"."

    def keep(self, opcodes: bytes) -> bytes:
        """Store the value that opcodes push in the memo, and return opcodes that push it again, any number of times."""
        if opcodes not in self._memo:
            self._out += opcodes
            self._remember(opcodes)
            self._out += b"0"
        return self._pushing(self._memo[opcodes])

    def raw(self, opcodes: bytes) -> None:
        """Append opcodes as they are."""
        self._out += opcodes

    def name(self, module: str, name: str) -> None:
        """Push the class or function ``module.name`` by name; a dot in the name leads into a class.

        Raises:
            UnsafePickleError: The name is not one, and would be read as opcodes.
        """
        key = (module, name)
        if self._recall(key):
            return
        check_is_name(module, name)
        owner, _, attribute = name.rpartition(".")
        if owner:  # protocol 2 has no other way
            self.name("__builtin__", "getattr")
            self.raw(b"(")
            self.name(module, owner)
            self.save(attribute)
            self.raw(b"tR")
        else:
            self._out += name_opcodes(module, name)
        self._remember(key)

    def save(self, value: Any) -> None:
        """Push any value of a tree."""
        saver = _SAVERS.get(type(value))
        if saver is not None:
            saver(self, value)
        elif isinstance(value, TensorRef) and self._write_tensor is not None:
            self._write_tensor(self, value)
        elif isinstance(value, PickledObject):
            _check_known(value)
            self._save_pickled(value)
        elif isinstance(value, type) and issubclass(value, PickledObject):
            _check_known(value)
            self.name(value.module, value.qualname)
        elif value is None:
            self.raw(b"N")
        else:
            raise FormatError(
                f"A value of type {type(value).__module__}.{type(value).__qualname__} cannot be written to a .pth file "
                "here; write plain Python values."
            )

    def reduce(self, module: str, name: str, args: tuple[Any, ...]) -> None:
        """Push the result of calling ``module.name(*args)``."""
        self.name(module, name)
        self.save(args)
        self.raw(b"R")

    def _recall(self, key: tuple[str, str] | str | bytes | int) -> bool:
        index = self._memo.get(key)
        if index is None:
            return False
        self._out += self._pushing(index)
        return True

    @staticmethod
    def _pushing(index: int) -> bytes:
        return b"h" + _BYTES[index] if index < 256 else b"j" + _UINT32(index)

    def _remember(self, key: tuple[str, str] | str | bytes | int) -> None:
        index = self._memo[key] = len(self._memo)
        self._out += b"q" + _BYTES[index] if index < 256 else b"r" + _UINT32(index)

    def _remember_object(self, value: object) -> None:
        self._alive.append(value)
        self._remember(id(value))

    def _save_str(self, value: str) -> None:
        if not self._recall(value):
            self._out += text_opcodes(value)
            self._remember(value)

    def _save_tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.raw(b")")
            return
        if self._recall(id(value)):
            return
        self.raw(b"(")
        for element in value:
            self.save(element)
        self.raw(b"t")
        self._remember_object(value)

    def _save_list(self, value: list[Any]) -> None:
        if not self._recall(id(value)):
            self.raw(b"]")
            self._remember_object(value)
            self._elements(value)

    def _save_dict(self, value: dict[Any, Any]) -> None:
        if not self._recall(id(value)):
            self.raw(b"}")
            self._remember_object(value)
            self._pairs(list(value.items()))

    def _save_ordered(self, value: collections.OrderedDict[Any, Any]) -> None:
        if self._recall(id(value)):
            return
        self.reduce("collections", "OrderedDict", ())
        self._remember_object(value)
        self._pairs(list(value.items()))
        if vars(value):  # a module's state dict carries `_metadata` (versions of its modules)
            self.save(dict(vars(value)))
            self.raw(b"b")

    def _save_set(self, value: set[Any] | frozenset[Any]) -> None:
        if not self._recall(id(value)):
            self.reduce("__builtin__", type(value).__name__, (list(value),))
            self._remember_object(value)

    def _save_pickled(self, value: PickledObject) -> None:
        if self._recall(id(value)):
            return
        if value.kwargs:
            self.reduce("copyreg", "__newobj_ex__", (type(value), value.args, dict(value.kwargs)))
        else:
            self.name(value.module, value.qualname)
            self.save(value.args)
            self.raw(b"R" if value.called else b"\x81")
        self._remember_object(value)
        self._elements(value.elements)
        self._pairs(value.items)
        if value.has_state:
            self.save(value.state)
            self.raw(b"b")

    def _elements(self, elements: Sequence[Any]) -> None:
        if elements:
            self.raw(b"(")
            for element in elements:
                self.save(element)
            self.raw(b"e")

    def _pairs(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        if pairs:
            self.raw(b"(")
            for key, value in pairs:
                self.save(key)
                self.save(value)
            self.raw(b"u")


def _check_known(value: PickledObject | type[PickledObject]) -> None:
    """Raise ``UnsafePickleError`` for a class that is not on the list of safe names: loading the file calls it."""
    check_is_name(value.module, value.qualname)
    if not is_known_object(value):
        raise UnsafePickleError(
            f"The content to be written holds {shown(f'{value.module}.{value.qualname}')}, which is not on the list of "
            "safe names: whoever loads it would call that. Remove it."
        )


_BYTES = [bytes([value]) for value in range(256)]
_INT32, _UINT32 = struct.Struct("<i").pack, struct.Struct("<I").pack

_SAVERS: dict[type, Callable[[PickleWriter, Any], None]] = {
    bool: lambda writer, value: writer.raw(b"\x88" if value else b"\x89"),
    int: lambda writer, value: writer.raw(int_opcodes(value)),
    float: lambda writer, value: writer.raw(b"G" + struct.pack(">d", value)),
    str: PickleWriter._save_str,
    bytes: lambda writer, value: writer.reduce("_codecs", "encode", (value.decode("latin1"), "latin1")),
    complex: lambda writer, value: writer.reduce("__builtin__", "complex", (value.real, value.imag)),
    tuple: PickleWriter._save_tuple,
    list: PickleWriter._save_list,
    dict: PickleWriter._save_dict,
    collections.OrderedDict: PickleWriter._save_ordered,
    set: PickleWriter._save_set,
    frozenset: PickleWriter._save_set,
}
