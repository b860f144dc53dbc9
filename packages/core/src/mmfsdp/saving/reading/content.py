"""Makes Python values of a checkpoint's content: tensors stay on disk, and only allowed classes are imported."""

from __future__ import annotations

import datetime
import io
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mmfsdp.checkpoint.layout import Layout, TensorRef
from mmfsdp.checkpoint.pickles.pickling import PickleWriter
from mmfsdp.checkpoint.pickles.unpickling import PickledObject
from mmfsdp.checkpoint.tree import select_tensors
from mmfsdp.errors import CorruptCheckpointError, FormatError, UnsafePickleError
from mmfsdp.saving.reading.source import Source, lazy_tensors
from mmfsdp.state.lazy_tensors import LazyTensor

__all__ = ["restricted_load", "stored_content"]


def stored_content(source: Source, safe_globals: Iterable[Any] = ()) -> Any:
    """Return a checkpoint's content, with each tensor as a `LazyTensor`. Not collective.

    Args:
        source: The checkpoint; its layout was opened with ``trust=True``.
        safe_globals: Classes that pickled objects may have, besides plain data and numpy's arrays.

    Raises:
        UnsafePickleError: The content holds an object of another class.
        FormatError: A tensor lies inside an object.
    """
    return _Content(source.layout, lazy_tensors(source), [*safe_globals]).value(source.layout.tree)


def restricted_load(file: Path | io.BytesIO, name: str, safe_globals: Iterable[Any]) -> Any:
    """Return what ``torch.load`` reads with ``weights_only=True``; tensors of a file are memory-mapped.

    Args:
        file: What to read: a file, or the bytes of one.
        name: Its name, for messages.
        safe_globals: Classes that it may hold besides tensors, plain data and numpy's arrays.

    Raises:
        UnsafePickleError: It holds objects of other classes.
        CorruptCheckpointError: It cannot be read.
    """
    try:
        with torch.serialization.safe_globals([*_DATA, *_of_numpy(), *safe_globals]):
            return torch.load(file, map_location="cpu", mmap=isinstance(file, Path), weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+) was not|got <class '(\S+)'>", str(error))
        reason = (named[1] or named[2]) if named else str(error)
        raise UnsafePickleError(
            f"{name} holds {reason}, which is neither a tensor nor plain data. If you trust the file, pass that "
            "class in safe_globals. load_pretrained() reads the weights alone, and needs no class.",
            file=name,
        ) from error
    except (RuntimeError, EOFError, MemoryError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{name} cannot be read: {error}", file=name) from error


# Plain data, though torch does not list it: Composer saves times and the version of torch, for example.
_DATA = (
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    datetime.timezone,
    torch.torch_version.TorchVersion,
)


def _of_numpy() -> list[Any]:
    """Return what makes numpy's arrays of numbers and text, such as the state of its random numbers, in any release.

    None of it runs code that a file names.
    """
    try:
        import numpy as np
    except ImportError:
        return []
    makers: dict[str, Any] = {"_reconstruct": np.empty(0).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]}
    named = [(maker, f"numpy.{core}.multiarray.{name}") for name, maker in makers.items() for core in ("core", "_core")]
    codes = f"?SU{np.typecodes['AllInteger']}{np.typecodes['AllFloat']}"
    return [*named, bytes, np.ndarray, np.dtype, *{type(np.dtype(code)) for code in codes}]


class _Content:
    def __init__(self, layout: Layout, tensors: Mapping[str, LazyTensor], safe_globals: list[Any]) -> None:
        self._layout = layout
        self._tensors = tensors
        self._safe_globals = safe_globals

    def value(self, tree: Any) -> Any:
        if isinstance(tree, TensorRef):
            return self._tensors[tree.name]
        if not select_tensors(tree) and _holds_pickled(tree):
            return self._object(tree)
        if isinstance(tree, dict):
            return {self._plain(key): self.value(child) for key, child in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(map(self.value, tree))
        if isinstance(tree, PickledObject):
            raise FormatError(
                f"{self._layout.path.name} holds tensors inside a {tree.module}.{tree.qualname}, which cannot be "
                "loaded from this format.",
                file=str(self._layout.path),
            )
        return tree

    def _plain(self, key: Any) -> Any:
        return self._object(key) if _holds_pickled(key) else key

    def _object(self, tree: Any) -> Any:
        """Let torch's own restricted loader make the object that a pickle describes."""
        data = PickleWriter(_no_tensor).dumps(tree)
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("archive/data.pkl", data)
            file.writestr("archive/byteorder", b"little")
            file.writestr("archive/version", b"3\n")
        archive.seek(0)
        return restricted_load(archive, str(self._layout.path), self._safe_globals)


def _no_tensor(_: PickleWriter, ref: TensorRef) -> None:
    raise AssertionError(ref.name)


def _holds_pickled(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(_holds_pickled(key) or _holds_pickled(value) for key, value in tree.items())
    if isinstance(tree, list | tuple | set | frozenset):
        return any(map(_holds_pickled, tree))
    return isinstance(tree, PickledObject) or (isinstance(tree, type) and issubclass(tree, PickledObject))
