"""Files made to harm whoever reads them: refused with what is wrong and where, soon, and in little memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import resource
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.core.samples import content, write_samples
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from mmfsdp.checkpoint import convert, open_layout, verify
from mmfsdp.checkpoint.manifest import write_manifest
from mmfsdp.checkpoint.pickles.limits import check_limits
from mmfsdp.checkpoint.pickles.unpickling import Attributes, integers, read_pickle
from mmfsdp.errors import CorruptCheckpointError, FormatError, MmfsdpError

PROTOCOL = b"\x80\x02"
TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x10tQ"
)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_samples(tmp_path_factory.mktemp("samples"))


def archive(path: Path, pickled: bytes, data: bytes = bytes(64)) -> Path:
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("x/data.pkl", pickled)
        target.writestr("x/data/0", data)
    return path


def in_little(path: Path) -> subprocess.CompletedProcess[str]:
    """Open a checkpoint in a process of its own, with 400 MB of memory and 20 seconds."""
    program = (
        "import sys; from mmfsdp.checkpoint import open_layout; from mmfsdp.errors import MmfsdpError\n"
        "try: open_layout(sys.argv[1])\n"
        "except MmfsdpError as error: sys.exit(f'refused: {error}')"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (400_000_000, 400_000_000))
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))

    command = [sys.executable, "-c", program, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=limit, check=False)


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"]" * 50_000 + b"a" * 49_999 + b".", "more than 100 levels"),
        (b"}(" + b")" + b"\x85" * 1_000_000 + b"Nu.", "nested more than 100 deep"),
        (b"}(N" + b"2\x86" * 60 + b"Nu.", "over 1000000 elements"),
        (b"}(" + b"Nq\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"Nu.", "over 1000000 elements"),
        (b"N" + b"q\x00(" + b"h\x00" * 1000 + b"tq\x00(" + b"h\x00" * 9000 + b"t0h\x00.", "over 1000000 elements"),
        (b"Nr\xff\xff\xff\x3f.", "at index 1073741823 of its memo"),
        (b"N(0r\xff\xff\xff\x3f.", "at index 1073741823 of its memo"),
        (b"Np999999999\n.", "at index 999999999 of its memo"),
        (b"}\x8b\x00\x00\x10\x00" + b"\x11" * 0x100000 + b"Ns.", "a number of 1048576 bytes"),
        (b"\x8e" + b"\xff" * 5 + b"\0\0\0.", "cannot be read"),
        (b"X\xff\xff\xff\xff.", "cannot be read"),
        (b"]q\x00h\x00a.", "'0' holds itself"),
        (b"}q\x00X\x01\0\0\0ah\x00s.", "'a' holds itself"),
        (b"]q\x00(h\x00l\x85a.", "holds itself"),
        (b"cargparse\nNamespace\n)\x81q\x00}X\x01\0\0\0ah\x00sb.", "holds itself"),
    ],
)
def test_pickles_made_to_exhaust(tmp_path: Path, pickled: bytes, message: str) -> None:
    done = in_little(archive(tmp_path / "in.pth", PROTOCOL + pickled))
    assert done.returncode == 1, done.stderr[-500:]
    assert done.stderr.startswith("refused: ")
    assert message in done.stderr


def test_many_lists_within_each_other_are_read_once(tmp_path: Path) -> None:
    pickled = PROTOCOL + b"]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(100)) + b"."
    done = in_little(archive(tmp_path / "in.pth", pickled))
    assert done.returncode == 1, done.stderr[-500:]
    assert "more than 100 levels" in done.stderr
    shallow = PROTOCOL + b"]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(60)) + b"."
    assert in_little(archive(tmp_path / "in.pth", shallow)).returncode == 0


def test_messages_do_not_spell_out_what_refers_to_itself_many_times() -> None:
    nested: list[object] = []
    for _ in range(80):
        nested = [nested, nested]
    with pytest.raises(ValueError, match="is not a tuple of sizes") as caught:
        integers(nested)
    assert len(str(caught.value)) < 100_000


def test_pickles_that_only_look_bad(tmp_path: Path) -> None:
    pair = ((1, 2), (3, 4))
    shared = [pair] * 5000 + [(index, (index, "r\xff\xff\xff\xff")) for index in range(5000)]
    groups = [{"betas": (0.9, 0.999)} for _ in range(300)]
    tree = {"state_dict": content()["state_dict"], "meta": {"shared": shared, ("a", ("b",)): 1}, "groups": groups}
    torch.save(tree, tmp_path / "in.pth")
    assert open_layout(tmp_path / "in.pth").tree["meta"]["shared"] == shared
    torch.save(tree, tmp_path / "in.pth", pickle_protocol=4)
    assert open_layout(tmp_path / "in.pth").tree["meta"]["shared"] == shared


def described(protocol: int) -> bytes:
    """Return a pickle of what DCP's metadata consists of, without its end."""
    places = {
        MetadataIndex(
            f"layer.{number}.weight", torch.Size((number, 0, number << 9)[: number % 4]), number
        ): _StorageInfo("__0_0.distcp", number << 30, 1 << 8)
        for number in range(4000)
    }
    chunks = [[ChunkStorageMetadata(torch.Size((0, number)), torch.Size((2, 2)))] * 2 for number in range(99)]
    content = [("a", ("b", "c")), places, chunks, {f"n{number}": ("model", str(number)) for number in range(99)}]
    return pickle.dumps(content, protocol=protocol)[:-1]


def tensors(protocol: int) -> bytes:
    """Return a pickle of tensors as torch writes it, with places of the memo at all sizes, without its end."""
    names = [f"layers.{number}.weight" for number in range(3000)]
    tree = {
        "meta": {"shared": [("a", ("b",))] * 20},
        "state_dict": {name: torch.zeros(2, number % 3 + 1) for number, name in enumerate(names)},
        "mmfsdp": {"tensors": {name: {"shape": [2, 300], "offsets": [0, 1 << 17]} for name in names}},
        "optimizer": {"state": {0: {"step": 1.0, "exp_avg": torch.zeros(3)}}, "param_groups": [{"params": [0]}]},
    }
    file = io.BytesIO()
    torch.save(tree, file, pickle_protocol=protocol)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")[:-1]


def verdict(pickled: bytes) -> str | None:
    try:
        check_limits(pickled, Path("x"))
    except CorruptCheckpointError as error:
        return str(error)
    return None


LARGE = b"X\0\0\x08\0" + bytes(1 << 19) + b"0"  # a long text makes a pickle large, whose usual parts are not followed
DEEP = b")" + b"\x85" * 100
OBJECT = b"ca\nb\nq\x00"
MADE = b"((h\0h\0X\1\0\0\0xh\0K\1tQK\0K\2\x85K\1\x85\x89h\0)RtR"  # a tensor, of what is called
VIEW = b"K\0K\2\x85K\1\x85\x89h\x00)Rtq\x05R0"  # the rest of the arguments that rebuild a tensor, which is thrown away


@pytest.mark.parametrize("before", [b"", LARGE], ids=["followed", "skipped"])
@pytest.mark.parametrize(
    ("pickled", "refused"),
    [
        # Keys of the state of an object, and of a dict, that are large tuples.
        (b"(" + b"N" * 2000 + b"tq\x01" + OBJECT + b")\x81}(" + b"h\x01N" * 2000 + b"ub", True),
        (b"(" + b"N" * 2000 + b"tq\x01" + b"}(" + b"h\x01N" * 2000 + b"u", True),
        # The arguments that rebuild a tensor, with those of the one before beside the storage, and without.
        (b"Nq\x05" + (OBJECT + b"(h\x05h\x05(h\x00tQ" + VIEW) * 60, True),
        (b"Nq\x05" + (OBJECT + b"((h\x00tQ" + VIEW) * 60, False),
        # A place far away, in two ways, a large number.
        (OBJECT + b")\x81}r\xff\xff\xff\x3f(h\x00Nub", True),
        (OBJECT + b")\x81}\x94(h\x00Nub", True),
        (OBJECT + b")\x81}(h\x00\x8b\0\0\x10\0" + bytes(1 << 20) + b"ub", True),
        (OBJECT + b")\x81}(h\x00K\x01ub" + b"h\x00)\x81}(h\x00h\x00K\2\x85\x85Rub" * 100, False),
        # What follows a match is found on the stack where it should be.
        (DEEP + OBJECT + b")\x81}(h\x00K\x01ub" + b"h\x00)\x81}(h\x00K\x01ub" * 9 + b"\x86" * 9, False),
        (DEEP + OBJECT + b")\x81}(h\x00K\x01ub" + b"h\x00)\x81}(h\x00K\x01ub" * 9 + b"\x86" * 10, True),
        (DEEP + b"Nq\0}(h\0Nu" + b"X\1\0\0\0x}(h\0Nu" * 9 + b"\x86" * 19, False),
        (DEEP + b"Nq\0}(h\0Nu" + b"X\1\0\0\0x}(h\0Nu" * 9 + b"\x86" * 20, True),
        (DEEP + OBJECT + MADE + (b"X\1\0\0\0yh\0" + MADE) * 9 + b"\x86" * 18, False),
        (DEEP + OBJECT + MADE + (b"X\1\0\0\0yh\0" + MADE) * 9 + b"\x86" * 19, True),
    ],
)
def test_bombs_in_what_is_not_followed(before: bytes, pickled: bytes, refused: bool) -> None:
    assert (verdict(PROTOCOL + before + pickled + b".") is not None) == refused


@pytest.mark.parametrize("begin", [described(4), tensors(2), tensors(4)], ids=["dcp", "torch", "torch, protocol 4"])
def test_a_bomb_behind_a_checkpoint_is_found(begin: bytes) -> None:
    # Its places in the memo must be counted through everything that torch writes.
    implicit = begin[1] == 4
    opcodes = [opcode.name for opcode, _, _ in pickletools.genops(begin + b".")]
    places = sum(name in ("MEMOIZE", "BINPUT", "LONG_BINPUT") for name in opcodes)

    def put(place: int) -> bytes:
        return b"\x94" if implicit else b"r" + struct.pack("<I", place)

    def got(place: int) -> bytes:
        return b"j" + struct.pack("<I", place)

    bomb = [b"N" + put(places)]
    doubled = [got(places + step) * 2 + b"\x86" + put(places + step + 1) for step in range(60)]
    harmless = [got(places - 1) * 2 + b"\x86" + put(places + step) for step in range(60)]
    tails = {
        b"": False,
        b"".join(bomb + doubled): True,
        b"".join(bomb + [got(places + step) + b"\x85" + put(places + step + 1) for step in range(200)]): True,
        b"".join(bomb + harmless): False,
        b"Nr\xff\xff\xff\x3f": True,
        b"N" + (b"q\xff" if implicit else b"\x94"): True,
    }
    assert verdict(begin + b".") is None
    found = {tail: verdict(begin + tail + b".") is not None for tail in tails}
    assert found == tails


def test_pickles_of_other_protocols_are_accepted() -> None:
    assert [verdict(described(protocol) + b".") for protocol in (2, 3, 5)] == [None] * 3
    assert [verdict(tensors(protocol) + b".") for protocol in (3, 5)] == [None] * 2


def view(offset: bytes, size: bytes, stride: bytes) -> bytes:
    return PROTOCOL + b"}X\x01\0\0\0w" + TENSOR + offset + size + stride + b"\x89ccollections\nOrderedDict\n)RtRs."


@pytest.mark.parametrize(
    ("offset", "size", "stride", "message"),
    [
        (b"J\xff\xff\xff\xff", b"K\x02\x85", b"K\x01\x85", "not a tuple of sizes"),
        (b"K\x00", b"J\xff\xff\xff\xff\x85", b"K\x01\x85", "not a tuple of sizes"),
        (b"K\x00", b"K\x02\x85", b"J\xff\xff\xff\xff\x85", "not a tuple of sizes"),
        (b"K\x0f", b"K\x02\x85", b"K\x01\x85", "reaches past its storage of 64 bytes"),
        (b"K\x00", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x87", b"K\x01K\x01K\x01\x87", "too large"),
        (b"K\x00", b"\x8a\x09" + b"\0" * 8 + b"\x01\x85", b"K\x00\x85", "too large for any machine"),
        (b"K\x00", b"K\x02\x85", b"K\x01K\x01\x86", "cannot be read"),
        (b"\x8a\x09" + b"\0" * 8 + b"\x01", b"K\x02\x85", b"K\x01\x85", "reaches past"),
    ],
)
def test_views_of_storages(tmp_path: Path, offset: bytes, size: bytes, stride: bytes, message: str) -> None:
    path = archive(tmp_path / "in.pth", view(offset, size, stride))
    with pytest.raises(MmfsdpError, match=message) as caught:
        convert(path, tmp_path / "out.safetensors")
    assert caught.value.context["file"] == str(path)
    assert os.listdir(tmp_path) == ["in.pth"]


def changed_directory(path: Path, at: int, form: str, value: int) -> None:
    """Change a field of the first entry of an archive's central directory."""
    raw = bytearray(path.read_bytes())
    struct.pack_into(form, raw, raw.index(b"PK\x01\x02") + at, value)
    path.write_bytes(raw)


def test_archives_that_lie(tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    for at, form, value, message in (
        (20, "<L", 1 << 31, "has two sizes"),
        (42, "<L", 1 << 31, "local header of entry 'x/data.pkl' .*is damaged"),
        (42, "<L", 0xFFFFFFFF, "a zip64 field is too short"),
        (10, "<H", 8, "is compressed or encrypted"),
        (8, "<H", 1, "is compressed or encrypted"),
        (28, "<H", 0xFFFF, "is damaged"),
    ):
        changed_directory(archive(path, PROTOCOL + b"}."), at, form, value)
        with pytest.raises((CorruptCheckpointError, FormatError), match=message) as caught:
            open_layout(path)
        assert caught.value.context["file"] == str(path)
    archive(path, PROTOCOL + b"}.")
    for at in (20, 24):
        changed_directory(path, at, "<L", 1 << 30)
    with pytest.raises(CorruptCheckpointError, match="reaches past the end of the file") as caught:
        open_layout(path)
    assert "offset" in caught.value.context


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "in.pth", "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("x/data.pkl", bytes(200_000_000))
    done = in_little(tmp_path / "in.pth")
    assert "is compressed or encrypted" in done.stderr


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entries_that_share_bytes_or_a_name(tmp_path: Path) -> None:
    path = tmp_path / "in.pth"
    with zipfile.ZipFile(path, "w") as target:
        for data in (PROTOCOL + b"}.", PROTOCOL + b"]."):
            target.writestr("x/data.pkl", data)
    with pytest.raises(CorruptCheckpointError, match=r"entry 'x/data\.pkl'"):
        open_layout(path)
    archive(path, view(b"K\x00", b"K\x02\x85", b"K\x01\x85"))
    raw = bytearray(path.read_bytes())
    struct.pack_into("<L", raw, raw.index(b"PK\x01\x02", raw.index(b"PK\x01\x02") + 1) + 42, 0)
    path.write_bytes(raw)  # the second entry where the first is
    with pytest.raises(CorruptCheckpointError, match=r"x/data/0'.* (overlaps|shares|is damaged|reaches)"):
        open_layout(path)


def safetensors(path: Path, header: str, data: int = 8) -> Path:
    text = header.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return path


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[-1,-2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}',
        '{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[true,2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[NaN,8]}}',
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"x":1}}',
        '{"a":' * 5000 + "1" + "}" * 5000,
        "[]",
        "{}",
    ],
)
def test_headers_of_safetensors(tmp_path: Path, header: str) -> None:
    path = safetensors(tmp_path / "in.safetensors", header)
    with pytest.raises((CorruptCheckpointError, FormatError)) as caught:
        open_layout(path)
    assert caught.value.context["file"] == str(path)


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    for length in (99_000_000, 101_000_000, (1 << 64) - 1):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(MmfsdpError):
            open_layout(path)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert in_little(path).returncode == 1


def test_names_that_are_no_text(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "in.safetensors", '{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}')
    archive(tmp_path / "in.pth", PROTOCOL + b"}X\x03\0\0\0\xed\xa0\x80" + view(b"K\0", b"K\2\x85", b"K\1\x85")[9:])
    text = path.read_bytes().replace(b"\\ud800", b"\xff\xfe\xfd\xff\xfe\xfd")
    for source in (path, tmp_path / "in.pth"):
        for target in ("out.safetensors", "out.pth", "out"):
            options = {"to": "dcp"} if target == "out" else {}
            with pytest.raises(MmfsdpError, match=r"not text|cannot be read|surrogate"):
                convert(source, tmp_path / target, **options)
    path.write_bytes(text)
    with pytest.raises(CorruptCheckpointError, match=r"header of in\.safetensors is damaged"):
        open_layout(path)


@pytest.mark.parametrize(
    "change",
    [
        {"size": -1},
        {"size": 1e400},
        {"size": True},
        {"crc32": "-1"},
        {"crc32": "zz"},
        {"crc32": 5},
    ],
)
def test_manifests(samples: dict[str, Path], tmp_path: Path, change: dict[str, object]) -> None:
    path = Path(shutil.copytree(samples["local"], tmp_path / "local"))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["rank0.pth"].update(change)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json is damaged"):
        open_layout(path)
    manifest["files"] = {"../rank0.pth": {"size": 1, "crc32": None}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "manifest.json is damaged" in verify(path).problems[0].message


@pytest.mark.parametrize("kind", ["local", "stock", "dcp", "index", "bins", "safetensors_ranks"])
def test_links_out_of_the_directory_and_what_is_no_file(samples: dict[str, Path], tmp_path: Path, kind: str) -> None:
    for name in sorted(os.listdir(samples[kind])):
        path = tmp_path / kind
        for make in (_link, _pipe, _folder, _device):
            if path.exists():
                shutil.rmtree(path)
            shutil.copytree(samples[kind], path)
            make(path / name, tmp_path)
            with pytest.raises(MmfsdpError) as caught:
                convert(path, tmp_path / "out.pth")
            assert "file" in caught.value.context, (name, make)
            if make is not _link:
                with pytest.raises(MmfsdpError):
                    raise_problems(path)
    # The directory itself may be reached through a link.
    shutil.rmtree(path)
    path.symlink_to(samples[kind])
    convert(path, tmp_path / "out.pth")


def raise_problems(path: Path) -> None:
    for problem in verify(path).problems:
        raise CorruptCheckpointError(problem.message)


def _link(path: Path, elsewhere: Path) -> None:
    (elsewhere / "elsewhere").unlink(missing_ok=True)
    path.rename(elsewhere / "elsewhere")
    path.symlink_to(elsewhere / "elsewhere")


def _pipe(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path, _: Path) -> None:
    path.unlink()
    path.mkdir()


def _device(path: Path, _: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", ["in.pth", "in.safetensors", "model.safetensors.index.json"])
def test_pipes_and_devices_are_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for path in (tmp_path / name, Path("/dev/zero")):
        with pytest.raises(FormatError, match="is a pipe, a device or a socket, and not a file"):
            open_layout(path)
        assert not verify(path).ok


def test_a_manifest_of_something_else_entirely(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "in" / "model.safetensors")
    write_manifest(tmp_path / "in", save_id="a", world_size=1)
    text = (tmp_path / "in" / "manifest.json").read_text()
    for bad in (
        text[:-3],
        text.replace('"version": 1', '"version": NaN'),
        "[" * 100_000,
        text.replace('"size"', '"crc32"'),
    ):
        (tmp_path / "in" / "manifest.json").write_text(bad)
        assert not verify(tmp_path / "in").ok
        with pytest.raises(MmfsdpError):
            convert(tmp_path / "in", tmp_path / "out.pth")


@pytest.mark.parametrize("state", [b"N}X\x04\0\0\0evilK\x01s\x86", b"}X\x04\0\0\0evilK\x01s"])
def test_a_pickle_cannot_change_the_classes_that_it_is_given(state: bytes) -> None:
    class Given(Attributes):
        pass

    pickled = PROTOCOL + b"ctorch\nSize\n" + state + b"b."
    with pytest.raises(CorruptCheckpointError, match="a class cannot be given a state"):
        read_pickle(pickled, file=Path("x"), functions={"torch.Size": Given})
    assert not hasattr(Given, "evil")
    instance = PROTOCOL + b"ctorch\nSize\n)\x81" + state + b"b."
    assert read_pickle(instance, file=Path("x"), functions={"torch.Size": Given}).evil == 1
    assert not hasattr(Given, "evil")
