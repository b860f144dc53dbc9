"""Names in a pickle: what could be more than a name is refused by the reader and by the writer alike."""

from __future__ import annotations

import argparse
import collections
import copyreg
import os
import pickle
import pickletools
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.planted_names import stack_global, text

from mmfsdp.checkpoint import convert, open_layout
from mmfsdp.checkpoint.layout import TensorRef
from mmfsdp.checkpoint.pickles.pickling import PickleWriter
from mmfsdp.checkpoint.pickles.unpickling import (
    PickledObject,
    is_dotted_name,
    is_known_object,
    is_safe_name,
    read_pickle,
)
from mmfsdp.errors import CorruptCheckpointError, UnsafePickleError

FILE = Path("x")
EXAMPLES = int(os.environ.get("MMFSDP_FUZZ", "300"))


def no_tensor(_: PickleWriter, ref: TensorRef) -> None:
    raise AssertionError(ref)


def written(tree: Any) -> bytes:
    return PickleWriter(no_tensor).dumps(tree)


def globals_of(pickled: bytes) -> list[str]:
    return [str(argument) for opcode, argument, _ in pickletools.genops(pickled) if opcode.name == "GLOBAL"]


NOT_NAMES = [
    "posix\nsystem",
    "a\n",
    "\na",
    "a b",
    "a\r",
    "a\x00",
    "a-b",
    "",
    ".",
    "a.",
    ".a",
    "a..b",
    "1a",
    "größe",
    "\ud800",
    "a\u2028b",
    "a(b)",
    "<locals>",
]


@pytest.mark.parametrize("wrong", NOT_NAMES)
@pytest.mark.parametrize("trust", [False, True])
def test_neither_reader_nor_writer_takes_what_is_not_a_name(wrong: str, trust: bool) -> None:
    for module, name in (("numpy.dtypes", wrong), (wrong, "Int8DType"), ("numpy.dtypes", f"{wrong}DType")):
        if is_dotted_name(module) and is_dotted_name(name):
            continue
        with pytest.raises(UnsafePickleError, match="is not a name"):
            read_pickle(b"\x80\x04" + stack_global(module, name) + b".", file=FILE, trust=trust)
        with pytest.raises(UnsafePickleError, match="is not a name"):
            PickleWriter(no_tensor).name(module, name)
        kind = type("Kind", (PickledObject,), {"module": module, "qualname": name})
        for value in (kind, kind.__new__(kind), kind(1)):
            with pytest.raises(UnsafePickleError, match="is not a name"):
                written({"meta": value})


def test_names_count_in_their_module_only() -> None:
    assert is_safe_name("builtins", "int")
    assert is_safe_name("torch.distributed._shard.sharded_tensor.api", "ShardedTensor.ProcessGroupState")
    assert not is_safe_name("torch.distributed._shard.sharded_tensor", "api.ShardedTensor")
    assert not is_safe_name("", "builtins.int")
    assert is_safe_name("numpy.dtypes", "Float32DType")
    assert not is_safe_name("numpy", "dtypes.Float32DType")
    assert not is_safe_name("numpy.dtypes", "x.Float32DType")
    assert not is_safe_name("numpy.dtypes.x", "Float32DType")


def spellings(module: str, name: str) -> list[bytes]:
    """Return pickles that name one thing, through every opcode that can."""
    line, memo = f"{module}\n{name}\n".encode("utf-8", "surrogatepass"), b"\x80\x04"
    pickles = [
        memo + stack_global(module, name) + b".",
        memo + text(module) + b"\x940" + text(name) + b"\x940h\x00h\x01\x93.",
        memo + stack_global(module, name) + b")\x81.",
        memo + stack_global(module, name) + b")}\x92.",
        memo + stack_global(module, name) + b")R.",
        memo + b"(" + stack_global(module, name) + b"o.",
        memo + b"\x95\xff\0\0\0\0\0\0\0" + stack_global(module, name) + b".",
        b"\x80\x02c" + line + b".",
        b"\x80\x02c" + line + b")\x81.",
        b"(i" + line + b".",
        b"(c" + line + b"o.",
    ]
    if "\n" not in module + name and "'" not in module + name and "\\" not in module + name:
        quoted = b"".join(b"V" + part.encode("raw_unicode_escape") + b"\n" for part in (module, name))
        pickles.append(memo + quoted + b"\x93.")
    return pickles


WORDS = st.one_of(
    st.sampled_from(["os", "posix", "system", "builtins", "getattr", "eval", "numpy.dtypes", "torch", "Size", "int"]),
    st.sampled_from(
        ["Int8DType", "HistoryBuffer.min", "mmengine.logging.history_buffer", "a.b_c", "DType", *NOT_NAMES]
    ),
    st.text(max_size=12),
    st.text("aA1_.\n\r\0 ()c0Rt", max_size=12).map(lambda word: f"{word}DType"),
)


@given(module=WORDS, name=WORDS, trust=st.booleans())
@settings(max_examples=EXAMPLES, deadline=None)
def test_what_the_reader_takes_is_written_as_one_global_and_read_again(module: str, name: str, trust: bool) -> None:
    shaped = is_dotted_name(module) and is_dotted_name(name)
    for pickled in spellings(module, name):
        try:
            value = read_pickle(pickled, file=FILE, trust=trust)
        except (UnsafePickleError, CorruptCheckpointError):
            continue
        kind = value if isinstance(value, type) else type(value)
        if not issubclass(kind, PickledObject):
            continue  # one of the few that are real
        assert is_dotted_name(kind.module)  # lines of GLOBAL may end where another name begins
        assert is_dotted_name(kind.qualname)
        assert trust or is_safe_name(kind.module, kind.qualname) or kind.qualname == "getattr"
        if not is_known_object(value):  # only of a trusted file
            with pytest.raises(UnsafePickleError, match="whoever loads it would call that"):
                written([value])
            continue
        again = written([value])
        expected = [f"{kind.module} {kind.qualname}"]
        if "." in kind.qualname:
            expected = ["__builtin__ getattr", f"{kind.module} {kind.qualname.split('.')[0]}"]
        assert globals_of(again) == expected
        back = read_pickle(again, file=FILE, trust=trust)[0]
        same = back if isinstance(back, type) else type(back)
        assert (same.module, same.qualname) == (kind.module, kind.qualname)
        assert written([back]) == again
    if not shaped:
        with pytest.raises(UnsafePickleError):
            PickleWriter(no_tensor).name(module, name)


KEYS = st.one_of(st.text(max_size=8), st.integers(), st.sampled_from(["a\nb", "cposix\nsystem\n", "\ud800"]))
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(1 << 600), 1 << 600), st.floats(allow_nan=False), st.complex_numbers(
            allow_nan=False), st.binary(max_size=20), st.text(max_size=20), st.sampled_from(["x\n.", "(S'a'\n"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)  # fmt: skip
WRITTEN = """PROTO STOP NONE NEWTRUE NEWFALSE BININT1 BININT LONG1 LONG4 BINFLOAT BINUNICODE EMPTY_TUPLE MARK TUPLE
    EMPTY_LIST APPENDS EMPTY_DICT SETITEMS GLOBAL REDUCE BUILD BINPUT LONG_BINPUT BINGET LONG_BINGET"""


@pytest.mark.exhaustive
@given(tree=VALUES, protocol=st.integers(0, 5))
@settings(max_examples=EXAMPLES, deadline=None)
def test_texts_and_numbers_of_any_protocol_are_written_with_lengths_and_not_as_lines(tree: Any, protocol: int) -> None:
    try:
        pickled = pickle.dumps(tree, protocol)
    except UnicodeEncodeError:  # protocol 0 cannot write a lone surrogate
        return
    read = read_pickle(pickled, file=FILE)
    assert read == tree
    again = written(read)
    assert {opcode.name for opcode, _, _ in pickletools.genops(again)} <= {*WRITTEN.split()}
    assert {*globals_of(again)} <= {"collections OrderedDict", "_codecs encode", "__builtin__ complex"}
    assert pickle.loads(again) == tree
    assert written(read_pickle(again, file=FILE)) == again


@pytest.mark.parametrize("code", [b"\x82\x07", b"\x83\x07\x00", b"\x84\x07\x00\x00\x00"])
def test_the_extension_registry_is_refused(code: bytes) -> None:
    copyreg.add_extension("posix", "system", 7)
    try:
        assert pickle.loads(b"\x80\x02" + code + b".") is os.system  # the registry holds it now, for whoever asks
        for trust in (False, True):
            with pytest.raises(CorruptCheckpointError, match="extension registry"):
                read_pickle(b"\x80\x02" + code + b".", file=FILE, trust=trust)
    finally:
        copyreg.remove_extension("posix", "system", 7)
        copyreg.clear_extension_cache()


def test_messages_show_a_name_in_one_line() -> None:
    for name in ("a\x1b[2J", "b\nc", "x" * 100_000):
        for trust in (False, True):
            if trust and name.isidentifier():
                continue
            with pytest.raises(UnsafePickleError) as caught:
                read_pickle(b"\x80\x04" + stack_global("os", name) + b".", file=FILE, trust=trust)
            assert re.fullmatch(r"[ -~]{1,1000}", str(caught.value))


class Buffer(list):  # type: ignore[type-arg]
    class Kept:
        pass

    def largest(self) -> Any:
        return max(self)


def test_what_lies_within_a_class_loads_again(tmp_path: Path) -> None:
    for protocol in (2, 4):
        tree = {
            "model": {"w": torch.ones(2)},
            "meta": {"statistics": Buffer.largest, "kind": Buffer.Kept, "x": Buffer.Kept()},
        }
        torch.save(tree, tmp_path / "in.pth", pickle_protocol=protocol)
        report = convert(tmp_path / "in.pth", tmp_path / "out.pth", keep="all", trust=True, overwrite=True, fsync=False)
        assert report.dropped == ("meta/statistics", "meta/kind", "meta/x")
        assert torch.load(tmp_path / "out.pth", weights_only=True)["meta"] == {}


class Caller:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("to", ["torch_zip", "dcp", "local"])
def test_a_trusted_source_puts_no_call_into_the_target(to: str, tmp_path: Path) -> None:
    caller = Caller(tmp_path / "called")
    groups = [{"lr": 0.1, "params": [0], "hook": caller}]
    ordered = collections.OrderedDict(a=1, b=[caller])
    ordered.metadata = {"x": 1, "y": caller}  # type: ignore[attr-defined]
    tree = {
        "state_dict": {"w": torch.ones(4), "odd": caller},
        "meta": {"deep": {"a": [1, (caller,)], "b": [1, (2,)]}, "config": argparse.Namespace(a=1, b=caller)},
        "optimizer": {"state": {}, "param_groups": groups},
        "ordered": ordered,
        "top": caller,
    }
    torch.save(tree, tmp_path / "in.pth")
    report = convert(tmp_path / "in.pth", tmp_path / "out", to=to, keep="all", trust=True, fsync=False)
    assert {*report.dropped} == {
        *(
            "state_dict/odd",
            "meta/deep/a",
            "meta/config",
            "optimizer/param_groups/0/hook",
            "ordered/b",
            "ordered/metadata/y",
        ),
        "top",
    }
    layout = open_layout(tmp_path / "out")  # without trust
    assert {*layout.tree} >= {"state_dict", "meta", "optimizer", "ordered"}
    assert layout.tree["meta"]["deep"] == {"b": [1, (2,)]}
    report = convert(tmp_path / "in.pth", tmp_path / "weights.pth", trust=True, fsync=False)
    assert {"odd", "meta/deep/a", "meta/config"} <= {*report.dropped}
    torch.load(tmp_path / "weights.pth", weights_only=True)
    for file in tmp_path.rglob("*.pth"):
        if file.name != "in.pth":
            torch.load(file, weights_only=False)
    assert not (tmp_path / "called").exists()
    with pytest.raises(UnsafePickleError, match="whoever loads it would call that"):
        PickleWriter().dumps(open_layout(tmp_path / "in.pth", trust=True).tree["top"])


def test_the_version_of_torch_is_a_text(tmp_path: Path) -> None:
    """Scripts save `torch.__version__`, which is of a class of its own, and Composer does."""
    torch.save({"state_dict": {"w": torch.ones(2)}, "meta": {"torch": torch.__version__}}, tmp_path / "given.pth")
    assert open_layout(tmp_path / "given.pth").tree["meta"] == {"torch": str(torch.__version__)}
    convert(tmp_path / "given.pth", tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth", weights_only=True)  # which torch refuses to do with the source
    assert type(found["meta"]["torch"]) is str


@pytest.mark.parametrize("argument", [b"K\x05", b"]", b"(X\x01\0\0\0ae"])
def test_a_version_of_something_else_is_refused(argument: bytes) -> None:
    named = b"\x80\x02ctorch.torch_version\nTorchVersion\n"
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        read_pickle(named + argument + b"\x85\x81.", file=FILE)
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):  # a state for the class itself
        read_pickle(named + b"}X\x01\0\0\0aK\x01sb.", file=FILE)


@pytest.mark.parametrize("protocol", [2, 4])
def test_members_of_enumerations_as_python_3_11_2_names_them(protocol: int) -> None:
    """Debian 12 has that Python: without this, nothing that it saved could be read elsewhere."""
    module, name, member = "torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", "TORCH_CHANNELS_LAST"

    def named(owner: str, part: str) -> bytes:
        if protocol == 4:
            return b"\x80\x04" + stack_global(module, f"{owner}.{part}") + b"."
        found = f"cbuiltins\ngetattr\n(c{module}\n{owner}\nV{part}\ntR."
        return b"\x80\x02" + found.encode()

    found = read_pickle(named(name, member), file=FILE)
    assert (found.module, found.qualname) == (module, f"{name}.{member}")
    for owner, part in ((name, "__class__"), (name, "_member_map_"), ("BytesStorageMetadata", "x")):
        with pytest.raises(UnsafePickleError, match=f"{owner}.{part}"):
            read_pickle(named(owner, part), file=FILE)
