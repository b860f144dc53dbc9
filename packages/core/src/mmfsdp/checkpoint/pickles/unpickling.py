"""Reads the pickle inside a checkpoint without importing or running anything that it names.

A call in a pickle is described (``PickledObject``), not executed. The few exceptions are harmless containers of the
standard library, and torch's functions that rebuild tensors, for which the reader of a format gives stand-ins.

Opcodes: https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import collections
import io
import mmap
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from reprlib import repr as brief  # what is in a pickle may refer to itself many times over
from types import MappingProxyType
from typing import Any, BinaryIO, ClassVar

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.dtypes import DTYPES
from mmfsdp.checkpoint.pickles.limits import MOST_KEYS, check_limits
from mmfsdp.errors import CorruptCheckpointError, MmfsdpError, UnsafePickleError

__all__ = [
    "Attributes",
    "PickledObject",
    "StandIn",
    "check_is_name",
    "fields",
    "integers",
    "is_dotted_name",
    "is_known_object",
    "is_safe_name",
    "read_pickle",
    "shown",
]

_FIRST_PART, _MOST = 1 << 20, 1 << 26  # bytes of a file on a server that are looked at for the end of a pickle
_DIMENSIONS = 64  # no tensor has more; the product of thousands of sizes takes for ever


class PickledObject:
    """Describes an object in a pickle whose class is not imported.

    Each class or function that a pickle names becomes a subclass of this one; calling it makes an instance that keeps
    the arguments and the state, so that the very same pickle can be written again.
    """

    module: ClassVar[str] = ""
    """Module of the class or function, as the pickle spells it."""
    qualname: ClassVar[str] = ""
    """Its name in that module."""
    args: tuple[Any, ...]
    """Positional arguments of the call, or of ``__new__``."""
    kwargs: Mapping[str, Any] = MappingProxyType({})
    """Keyword arguments of ``__new__``."""
    called: bool = False
    """Whether it was called (``__reduce__``) or made with ``__new__`` alone."""
    elements: Sequence[Any] = ()
    """Items that were appended to it."""
    items: Sequence[tuple[Any, Any]] = ()
    """Items that were set on it by key."""
    state: Any = None
    """The state that it was restored from (``__setstate__`` or ``__dict__``)."""
    has_state: bool = False
    """Whether there was a state at all."""

    def __new__(cls, *args: Any, **kwargs: Any) -> PickledObject:
        # A checkpoint can hold a hundred thousand of these: attributes that most lack stay on the class.
        self = object.__new__(cls)
        self.args = args
        if kwargs:
            self.kwargs = kwargs
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.called = True

    def __setstate__(self, state: Any) -> None:
        self.state, self.has_state = state, True

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(self.items, list):
            self.items = []
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.extend((value,))

    def extend(self, values: Any) -> None:
        if not isinstance(self.elements, list):
            self.elements = []
        self.elements.extend(values)

    def __repr__(self) -> str:
        return f"<pickled {self.module}.{self.qualname}>"


class _Sealed(type):
    # Found on a class, and not on its instances: a pickle may restore an instance, but not change its class.
    def __setstate__(cls, state: Any) -> None:
        raise TypeError("a class cannot be given a state")


class Attributes(metaclass=_Sealed):
    """An object that a pickle restores from a dict of its attributes. Subclasses say which there should be.

    They may hold anything. No code of Python runs to make one: a checkpoint can hold a hundred thousand.
    """


class StandIn:
    """A function given to a pickle in place of the one that it names; the pickle cannot set attributes on it.

    Args:
        function: What to call. Without one, calling it is an error.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        if self._function is None:
            raise TypeError("this class cannot be called in a pickle")
        return self._function(*args)

    def __setstate__(self, state: Any) -> None:
        raise TypeError("a function cannot be given a state")


def read_pickle(
    data: bytes | BinaryIO,
    *,
    file: Path,
    trust: bool = False,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the content of a pickle.

    Args:
        data: The pickle, or a file that is read from where it stands to the end of one pickle.
        file: Where it comes from, for messages.
        trust: Keep what is not on the list of safe names as an opaque ``PickledObject`` instead of refusing it. Even
            then nothing is imported or called.
        functions: Stand-ins for functions and classes by ``'module.name'``; a pickle must not be able to change them.
        persistent: Makes an object of a persistent id.

    Raises:
        UnsafePickleError: It names something that is not on the list of safe names.
        CorruptCheckpointError: It is not a pickle, it ends early, or it was made to exhaust the machine.
    """
    if isinstance(data, bytes):
        check_limits(data, file)
    elif data.fileno() < 0:
        return _read_beginning(data, file, trust, functions, persistent)
    else:
        with mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            check_limits(mapped, file, data.tell())
    return _loaded(data, file, trust, functions, persistent)


def _loaded(
    data: bytes | BinaryIO,
    file: Path,
    trust: bool,
    functions: Mapping[str, Callable[..., Any]] | None,
    persistent: Callable[[Any], Any] | None,
) -> Any:
    reader = _Unpickler(data, file, trust, functions or {}, persistent)
    try:
        return reader.load()
    except MmfsdpError:
        raise
    except RecursionError as error:
        raise CorruptCheckpointError(f"The pickle in {file.name} is nested too deeply.", file=str(file)) from error
    except Exception as error:  # A damaged pickle can raise nearly anything.
        raise CorruptCheckpointError(
            f"The pickle in {file.name} cannot be read: {type(error).__name__}: {error}.", file=str(file)
        ) from error


def _read_beginning(data: BinaryIO, file: Path, *rest: Any) -> Any:
    """Read a pickle at the beginning of what a server holds, where nothing says how long it is."""
    begin, most = data.tell(), _FIRST_PART
    while True:
        data.seek(begin)
        part = data.read(most)
        stream = io.BytesIO(part)
        try:
            check_limits(part, file)
            # It sees no byte that has not been checked.
            found = _loaded(stream, file, *rest)
        except CorruptCheckpointError:
            if len(part) < most or most >= _MOST:
                raise
            most *= 8
            continue
        data.seek(begin + stream.tell())
        return found


def integers(values: Any) -> tuple[int, ...]:
    """Return a ``torch.Size``, list or tuple of a pickle as a tuple.

    Raises:
        ValueError: It is anything but up to 64 sizes.
    """
    if type(values) is not tuple:
        if isinstance(values, PickledObject) and values.qualname == "Size":
            values = values.args[0]
        if not isinstance(values, tuple | list):
            raise ValueError(f"{brief(values)} is not a tuple of sizes")
    if len(values) > _DIMENSIONS:
        raise ValueError(f"{brief(values)} has {len(values)} sizes (expected at most {_DIMENSIONS})")
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"{brief(values)} is not a tuple of sizes")
    return tuple(values)


def fields(value: Any) -> Any:
    """Return the attributes of an object that a pickle describes: a dict, or a tuple if it is restored from one."""
    state = value.state if isinstance(value, PickledObject) else None
    if isinstance(state, tuple) and len(state) == 2 and state[0] is None:
        state = state[1]  # of a class with __slots__
    if state is None:
        raise ValueError(f"{value!r} has no attributes")
    return state


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        data: bytes | BinaryIO,
        file: Path,
        trust: bool,
        functions: Mapping[str, Callable[..., Any]],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(io.BytesIO(data) if isinstance(data, bytes) else data)
        self._file = file
        self._trust = trust
        self._functions = functions
        self._persistent = persistent
        self._classes: dict[tuple[str, str], type[PickledObject]] = {}
        self._hashed = 0
        self._containers = {name: StandIn(partial(self._made, kind)) for name, kind in _CONTAINERS.items()}

    def _made(self, kind: Callable[..., Any], *args: Any) -> Any:
        """Make a container or a number that hashes what the pickle chose, unless that may never end."""
        self._hashed += kind in (frozenset, complex)
        for values in args:
            if isinstance(values, list | tuple):
                keys = values if kind is not collections.OrderedDict else [key for key, _ in values]
                self._hashed += sum(isinstance(key, tuple | frozenset | complex) for key in keys)
        if self._hashed > MOST_KEYS:
            raise CorruptCheckpointError(
                f"The pickle in {self._file.name} is refused: it hashes more than {MOST_KEYS} tuples, frozen sets or "
                "complex numbers, which may all collide.",
                file=str(self._file),
            )
        return kind(*args)

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        check_is_name(module_name, global_name, self._file)
        module = _MODULE_ALIASES.get(module_name, module_name)
        full_name = f"{module}.{global_name}"
        if full_name in self._containers:
            return self._containers[full_name]
        if full_name in self._functions:
            return self._functions[full_name]
        if full_name in _REAL:
            return _REAL[full_name]
        if not self._trust and full_name != "builtins.getattr" and not is_safe_name(module, global_name):
            raise _unsafe(self._file, full_name)
        key = (module_name, global_name)
        if key not in self._classes:
            # Made per read: a pickle that sets attributes on a class can only reach its own.
            body: dict[str, Any] = {"module": module_name, "qualname": global_name}
            if full_name == "builtins.getattr":
                body["__new__"] = self._getattr
            self._classes[key] = type(global_name, (PickledObject,), body)
        return self._classes[key]

    def _getattr(self, cls: type[PickledObject], *args: Any) -> Any:
        # Protocol 2 spells what lies within a class as getattr(Class, 'name'); later ones name it as Class.name.
        owner, name = args if len(args) == 2 else (None, None)
        if isinstance(owner, type) and issubclass(owner, PickledObject) and type(name) is str:
            return self.find_class(owner.module, f"{owner.qualname}.{name}")
        if not self._trust:
            raise _unsafe(self._file, "builtins.getattr")
        return PickledObject.__new__(cls, *args)

    def persistent_load(self, pid: Any, /) -> Any:
        if self._persistent is None:
            raise CorruptCheckpointError(
                f"The pickle in {self._file.name} refers to data outside of it.", file=str(self._file)
            )
        return self._persistent(pid)


def _unsafe(file: Path, full_name: str) -> UnsafePickleError:
    if full_name.startswith("torchao."):
        return UnsafePickleError(
            f"{file.name} holds {shown(full_name)}: weights quantised by torchao, which mmfsdp does not read. Load the "
            "model with torchao, and save its weights after dequantize().",
            file=str(file),
        )
    return UnsafePickleError(
        f"{file.name} wants to import {shown(full_name)}, which is not on the list of safe names; nothing was "
        f"imported. If you know where the file comes from, read it with {argument('trust', True)}: then it is kept as "
        "an opaque placeholder, and still not imported.",
        file=str(file),
    )


def _encode(text: str, encoding: str = "latin1") -> bytes:
    # Protocol 2 has no bytes: they are pickled as a call of codecs.encode.
    if encoding not in ("latin1", "utf-8"):
        raise ValueError(f"unexpected encoding {encoding!r} of bytes")
    return text.encode(encoding)


class _Text(metaclass=_Sealed):
    """Stands for a class of texts that are only read: what is made of it is a plain one."""

    def __new__(cls, text: Any) -> Any:
        if type(text) is not str:
            raise ValueError(f"{brief(text)} is not a text")
        return text


_MODULE_ALIASES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
_CONTAINERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": collections.OrderedDict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
}
_REAL: dict[str, Any] = {
    "builtins.bytes": StandIn(lambda: b""),  # empty ones, which are not encoded; a length would be memory for nothing
    "_codecs.encode": StandIn(_encode),
    "torch.torch_version.TorchVersion": _Text,  # `torch.__version__`, which scripts save beside their weights
}
_PATHS = "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath"
_DTYPE_NAMES = " ".join(DTYPES)
_HISTORY = "HistoryBuffer HistoryBuffer.min HistoryBuffer.max HistoryBuffer.current HistoryBuffer.mean"

# By module, what a pickle may mention without being trusted.
_SAFE = {
    "builtins": "bool bytearray dict float int list object range slice str tuple"
    " long unicode xrange",  # protocol 2 spells int, str and range so
    "collections": "defaultdict Counter deque",
    "copyreg": "_reconstructor __newobj_ex__",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "uuid": "UUID SafeUUID",
    "_io": "BytesIO",
    "argparse": "Namespace",
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "torch": f"Size device Tensor {_DTYPE_NAMES}",
    "torch.serialization": "_get_layout",
    "torch.distributed.remote_device": "_remote_device",
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharded_tensor.api": "ShardedTensor ShardedTensor.ProcessGroupState",
    "torch.distributed._shard.sharded_tensor.shard": "Shard",
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING ShardedTensorMetadata TensorProperties",
    "torch.distributed._shard.sharding_spec.api": "EnumerableShardingSpec",
    "torch.distributed._shard.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    "torch.distributed.tensor": "DTensor",
    "torch.distributed.tensor._dtensor_spec": "DTensorSpec ShardOrderEntry TensorMeta",
    "torch.distributed.tensor.placement_types": "Partial Replicate Shard _StridedShard",
    "torch.distributed._tensor.api": "DTensor",  # up to torch 2.4, as are the next two
    "torch.distributed._tensor._dtensor_spec": "DTensorSpec TensorMeta",
    "torch.distributed._tensor.placement_types": "DTensorSpec Replicate Shard TensorMeta _Partial _StridedShard",
    "torch.distributed.device_mesh": "DeviceMesh",
    "torch.distributed._mesh_layout": "_FlatLayout _MeshLayout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
    "torch.nn.parameter": "Parameter Buffer",
    "numpy": f"dtype ndarray bool bool_ str_ bytes_ void {_DTYPE_NAMES}".replace(" bfloat16", ""),
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "addict.addict": "Dict",
    "deepspeed.runtime.fp16.loss_scaler": "DynamicLossScaler LossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "mmengine.config.config": "Config ConfigDict",
    "mmengine.config.lazy": "LazyAttr LazyObject",
    "mmengine.logging.history_buffer": _HISTORY,
}
_SAFE_NAMES = {module: frozenset(names.split()) for module, names in _SAFE.items()}
_ENUMS = frozenset({"MEM_FORMAT_ENCODING", "WriteItemType", "ZeroStageEnum", "_MEM_FORMAT_ENCODING"})
"""Enumerations among the safe names: Python 3.11.0 to 3.11.3 pickle a member by its name, not by its value."""


def is_dotted_name(text: str) -> bool:
    """Tell whether a text is identifiers joined by dots, all ASCII, and so cannot be taken for anything but a name.

    ``torch.save`` writes protocol 2, where names end with a newline and Python itself takes only ASCII ones.
    """
    return text.isascii() and all(part.isidentifier() for part in text.split("."))


def check_is_name(module: str, qualname: str, file: Path | None = None) -> None:
    """Raise ``UnsafePickleError`` unless a module and a name in it are dotted names, even in a trusted file."""
    wrong = next((text for text in (module, qualname) if not is_dotted_name(text)), None)
    if wrong is None:
        return
    where = "The content to be written" if file is None else file.name
    raise UnsafePickleError(
        f"{where} names {shown(wrong)} as a class, function or module, which is not a name: only ASCII letters, digits "
        "and underscores joined by dots are. No checkpoint does this; it was made to plant code in what is written.",
        file=None if file is None else str(file),
    )


def shown(text: str) -> str:
    """Return a text in quotes for a message: in one line of at most some 200 characters."""
    return ascii(text if len(text) <= 100 else f"{text[:60]}...{text[-30:]}")


def is_known_object(value: PickledObject | type[PickledObject]) -> bool:
    """Tell whether the class of an object, or a class, is one that a pickle may mention without being trusted."""
    module = _MODULE_ALIASES.get(value.module, value.module)
    return is_safe_name(module, value.qualname)


def is_safe_name(module: str, qualname: str) -> bool:
    """Tell whether a pickle may mention a name of a module, as Python 3 calls both, without being trusted."""
    if module == "numpy.dtypes":
        return qualname.isascii() and qualname.isidentifier() and qualname.endswith("DType")
    owner, _, member = qualname.rpartition(".")
    name = owner if owner in _ENUMS and not member.startswith("_") else qualname
    return name in _SAFE_NAMES.get(module, ())
