"""Plans and writes files as ``torch.save`` does, of a rank's part or of all of a checkpoint."""

from __future__ import annotations

import io
import pickle
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.serialization import location_tag

from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.per_rank.rank_local import rank_header
from mmfsdp.checkpoint.formats.torch_files.torch_zip_writer import Archive, archive_of
from mmfsdp.checkpoint.layout import PlannedFile
from mmfsdp.checkpoint.manifest import FileEntry
from mmfsdp.checkpoint.tree import map_leaves
from mmfsdp.errors import StateDictError
from mmfsdp.runtime.dtensors import box_of, is_part_of
from mmfsdp.saving.directory.errors import as_checkpoint_error
from mmfsdp.saving.writing.memory import entry_in_memory, is_plain
from mmfsdp.saving.writing.pieces import write_file
from mmfsdp.saving.writing.publishing import DirectorySave, Files
from mmfsdp.saving.writing.replica_shares import written_boxes

__all__ = ["Placeholders", "plan_live", "write_archive", "write_own_part", "write_rank_file"]


def plan_live(content: Any, others: Mapping[int, TensorEntry] | None = None) -> Archive:
    """Plan an archive as ``torch.save`` would write it. Not collective.

    torch decides how tensors are pickled, views of one storage and tensors of other classes included; only their
    storages are taken out of the pickle, in the form that ``torch.load`` documents (torch/serialization.py).

    Args:
        content: What to save. Its tensors must not change until they are written.
        others: What to write in place of some storages' own bytes, by the address of the storage: as many bytes.
    """
    pickler = _Pickler(others or {})
    pickler.dump(content)
    return archive_of(pickler.file.getvalue(), pickler.storages)


class Placeholders:
    """Stand for tensors in an archive: memory that is never touched, so that a pickle has their shapes, and no data."""

    def __init__(self) -> None:
        self.entries: dict[int, TensorEntry] = {}
        """What is written instead of their own bytes, by the address of the storage; see `plan_live`."""
        self._known: dict[Hashable, torch.Tensor] = {}

    def of(
        self, local: torch.Tensor, shape: Sequence[int] | None = None, entry: TensorEntry | None = None
    ) -> torch.Tensor:
        """Return a tensor in CPU memory; the same one for the same memory, so that tied tensors stay tied.

        Args:
            local: What this rank holds.
            shape: The shape to write; by default the shape of ``local``.
            entry: The tensor to write; ``local`` by default.
        """
        shape = tuple(local.shape if shape is None else shape)
        address = local.data_ptr() if local.numel() else object()
        key = (address, local.dtype, shape, local.shape, local.stride())
        if key not in self._known:
            self._known[key] = made = torch.empty(shape, dtype=local.dtype)
            whole = (0,) * len(shape), shape
            self.entries[made.untyped_storage()._cdata] = entry or entry_in_memory("", local, shape, whole)
        return self._known[key]


class _Pickler(pickle.Pickler):
    """Pickles with references to storages."""

    def __init__(self, others: Mapping[int, TensorEntry]) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=2)  # torch.load(weights_only=True) reads no other
        self._others = others
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._alive: list[torch.UntypedStorage] = []  # an address must not be used again
        self.storages: dict[str, TensorEntry] = {}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if isinstance(obj, torch.storage.TypedStorage):
            # The public way to its bytes, untyped(), warns that the class will go; torch's own pickling uses it.
            storage, dtype = obj._untyped_storage, obj.dtype
            kind = getattr(torch, obj._pickle_storage_type())
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype, kind = obj, torch.uint8, torch.UntypedStorage
        else:
            return None
        if storage.nbytes() and self._dtypes.setdefault(storage._cdata, dtype) != dtype:
            raise StateDictError(
                f"Tensors of the dtypes {self._dtypes[storage._cdata]} and {dtype} share their memory, which a file of "
                "torch.save cannot say. Save a clone() of one."
            )
        return "storage", kind, self._key(storage), location_tag(storage), storage.nbytes() // dtype.itemsize

    def _key(self, storage: torch.UntypedStorage) -> str:
        address = storage._cdata  # the identity that torch.save uses: two Python objects may be one storage
        if address not in self._keys:
            self._keys[address] = key = str(len(self._keys))
            self._alive.append(storage)
            self.storages[key] = self._others.get(address) or _stored(f"storage {key}", storage)
        return self._keys[address]


def _stored(name: str, storage: torch.UntypedStorage) -> TensorEntry:
    held = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return entry_in_memory(name, held, held.shape, ((0,), tuple(held.shape)))


def write_archive(content: Mapping[str, Any], path: Path) -> FileEntry:
    """Save as ``torch.save`` does, wait until all data is on disk, and return the checksums. Not collective.

    Args:
        content: What to save.
        path: The file.
    """
    return write_file(path, plan_live(dict(content)).as_file(path.name))


def write_rank_file(save: DirectorySave, content: Mapping[str, Any], mesh: DeviceMesh) -> Files:
    """Write this rank's file of a ``local`` checkpoint: its part of each tensor, and which box of the whole that is.

    If several ranks hold the same box, one of them writes it. Not collective.

    Args:
        save: The save that the file belongs to.
        content: Nested dicts and lists, with DTensors where tensors are sharded.
        mesh: The ranks that save.
    """
    path = save.temporary / f"rank{save.rank}.pth"
    with as_checkpoint_error(save.target / path.name):
        return {path.name: write_file(path, _plan_rank(content, save, mesh))}


def write_own_part(path: Path, content: Mapping[str, Any], mesh: DeviceMesh, save_id: str, rank: int) -> FileEntry:
    """Write all that a rank holds, also what other ranks hold as well; return the checksums. Not collective.

    Args:
        path: The file.
        content: Nested dicts and lists, with DTensors of the mesh where tensors are sharded.
        mesh: The ranks that save.
        save_id: Identifies the save.
        rank: This rank's index in the mesh.

    Raises:
        StateDictError: A tensor lies on other ranks than the mesh.
    """
    save = DirectorySave(path, path, save_id, rank, mesh.size(), overwrite=True)
    return write_file(path, _plan_rank(content, save, mesh, own_all=True))


def _plan_rank(
    content: Mapping[str, Any], save: DirectorySave, mesh: DeviceMesh, *, own_all: bool = False
) -> PlannedFile:
    boxes: dict[str, dict[str, Any]] = {}
    written: dict[int, dict[int, int]] = {}  # by number of replicas: the bytes that each replica writes
    placeholders = Placeholders()

    def localise(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_own = own_all or save.rank == 0  # tensors that are not sharded are read from the first rank's file
        local = leaf
        if isinstance(leaf, DTensor):
            box: dict[str, Any] = {"shape": list(leaf.shape), "offsets": list(box_of(leaf).offsets)}
            local, is_own = leaf.to_local(), True
            if is_part_of(leaf, mesh):
                rule, writes = written_boxes(leaf, written, mesh)
                box |= {"placements": list(rule.placements), "replica": rule.replica}
                box |= {"order": list(rule.order)} if rule.order else {}
                box |= {"mesh": list(rule.mesh)} if rule.mesh != tuple(mesh.shape) else {}
                is_own = own_all or writes
            elif own_all:
                raise StateDictError(
                    f"{path!r} lies on another mesh than the model: {leaf.device_mesh}. Checkpoints on the disks of "
                    "nodes need one mesh for all tensors; leave fast_directory out."
                )
            boxes[path] = box
        if not is_own and local.dim():
            return local.new_empty((0, *local.shape[1:]), device="cpu")
        return placeholders.of(local) if is_plain(local) else local.detach().cpu()

    tree = map_leaves(dict(content), localise)
    header = rank_header(boxes, save.rank, tuple(mesh.shape), save.save_id)
    return plan_live({**tree, "mmfsdp": header}, placeholders.entries).as_file(f"rank{save.rank}.pth")
