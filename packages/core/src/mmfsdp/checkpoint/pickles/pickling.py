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
from mmfsdp.checkpoint.pickles.safe_names import check_is_name
from mmfsdp.checkpoint.pickles.unpickling import PickledObject
from mmfsdp.errors import FormatError

__all__ = ["PickleWriter"]


class PickleWriter:
    """Turns one tree into a pickle; shared objects stay shared.

    Args:
        write_tensor: Called as ``write_tensor(writer, ref)`` for each ``TensorRef``; writes the opcodes that leave the
            tensor on the stack.
    """

    def __init__(self, write_tensor: Callable[[PickleWriter, TensorRef], None]) -> None:
        self._write_tensor = write_tensor
        self._out = bytearray()
        self._memo: dict[Any, int] = {}
        self._alive: list[Any] = []  # keeps ids in the memo from being reused

    def dumps(self, tree: Any) -> bytes:
        """Return the pickle of a tree.

        Raises:
            FormatError: It holds an object that a checkpoint cannot hold, or is nested too deeply.
            UnsafePickleError: It holds a class whose name is not one.
        """
        self.raw(b"\x80\x02")
        try:
            self.save(tree)
        except RecursionError as error:
            raise FormatError("The content is nested too deeply to be pickled.") from error
        self.raw(b".")
        return bytes(self._out)

    def raw(self, opcodes: bytes) -> None:
        """Append opcodes as they are."""
        self._out += opcodes

    def name(self, module: str, name: str) -> None:
        """Push the class or function ``module.name``, by name; with a dot in it, what lies within a class.

        Raises:
            UnsafePickleError: It is not a name, and would be taken for opcodes.
        """
        check_is_name(module, name)
        key = ("name", module, name)
        if self._recall(key):
            return
        owner, _, attribute = name.rpartition(".")
        if owner:  # protocol 2 has no other way
            self.name("__builtin__", "getattr")
            self.raw(b"(")
            self.name(module, owner)
            self.save(attribute)
            self.raw(b"tR")
        else:
            self.raw(b"c" + f"{module}\n{name}\n".encode("ascii"))
        self._remember(key)

    def save(self, value: Any) -> None:
        """Push any value of a tree."""
        if isinstance(value, TensorRef):
            self._write_tensor(self, value)
        elif isinstance(value, PickledObject):
            self._save_pickled(value)
        elif isinstance(value, type) and issubclass(value, PickledObject):
            self.name(value.module, value.qualname)
        elif value is None:
            self.raw(b"N")
        elif type(value) in _SAVERS:
            _SAVERS[type(value)](self, value)
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

    def _recall(self, key: Any) -> bool:
        index = self._memo.get(key)
        if index is None:
            return False
        self.raw(b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index))
        return True

    def _remember(self, key: Any) -> None:
        index = self._memo[key] = len(self._memo)
        self.raw(b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index))

    def _recall_object(self, value: object) -> bool:
        return self._recall(("id", id(value)))

    def _remember_object(self, value: object) -> None:
        self._alive.append(value)
        self._remember(("id", id(value)))

    def _save_bool(self, value: bool) -> None:
        self.raw(b"\x88" if value else b"\x89")

    def _save_int(self, value: int) -> None:
        if 0 <= value < 256:
            self.raw(b"K" + bytes([value]))
        elif -(2**31) <= value < 2**31:
            self.raw(b"J" + struct.pack("<i", value))
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.raw(b"\x8a" + bytes([len(data)]) if len(data) < 256 else b"\x8b" + struct.pack("<i", len(data)))
            self.raw(data)

    def _save_float(self, value: float) -> None:
        self.raw(b"G" + struct.pack(">d", value))

    def _save_str(self, value: str) -> None:
        key = ("str", value)
        if not self._recall(key):
            data = value.encode("utf-8", "surrogatepass")
            self.raw(b"X" + struct.pack("<I", len(data)) + data)
            self._remember(key)

    def _save_bytes(self, value: bytes) -> None:
        self.reduce("_codecs", "encode", (value.decode("latin1"), "latin1"))

    def _save_complex(self, value: complex) -> None:
        self.reduce("__builtin__", "complex", (value.real, value.imag))

    def _save_tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.raw(b")")
            return
        if self._recall_object(value):
            return
        self.raw(b"(")
        for element in value:
            self.save(element)
        self.raw(b"t")
        self._remember_object(value)

    def _save_list(self, value: list[Any]) -> None:
        if not self._recall_object(value):
            self.raw(b"]")
            self._remember_object(value)
            self._elements(value)

    def _save_dict(self, value: dict[Any, Any]) -> None:
        if not self._recall_object(value):
            self.raw(b"}")
            self._remember_object(value)
            self._pairs(list(value.items()))

    def _save_ordered(self, value: collections.OrderedDict[Any, Any]) -> None:
        if self._recall_object(value):
            return
        self.reduce("collections", "OrderedDict", ())
        self._remember_object(value)
        self._pairs(list(value.items()))
        if vars(value):  # a module's state dict carries `_metadata` (versions of its modules)
            self.save(dict(vars(value)))
            self.raw(b"b")

    def _save_set(self, value: set[Any] | frozenset[Any]) -> None:
        if not self._recall_object(value):
            self.reduce("__builtin__", type(value).__name__, (list(value),))
            self._remember_object(value)

    def _save_pickled(self, value: PickledObject) -> None:
        if self._recall_object(value):
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


_SAVERS: dict[type, Callable[[PickleWriter, Any], None]] = {
    bool: PickleWriter._save_bool,
    int: PickleWriter._save_int,
    float: PickleWriter._save_float,
    str: PickleWriter._save_str,
    bytes: PickleWriter._save_bytes,
    complex: PickleWriter._save_complex,
    tuple: PickleWriter._save_tuple,
    list: PickleWriter._save_list,
    dict: PickleWriter._save_dict,
    collections.OrderedDict: PickleWriter._save_ordered,
    set: PickleWriter._save_set,
    frozenset: PickleWriter._save_set,
}
