"""Files of DTensors, one per rank: read to what torch itself gathers, from any release, and loaded on any ranks."""

from __future__ import annotations

import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.core.dtensors.make import Model, content_of, whole
from tests.distributed.loading.test_reading_mmengine_local import same

import mmfsdp
from mmfsdp.checkpoint import convert, open_layout, verify
from mmfsdp.checkpoint.chunks import Record
from mmfsdp.checkpoint.formats.per_rank.pickled_dtensors import shard_of
from mmfsdp.checkpoint.formats.torch_files.torch_zip import PickledDTensor, PickledTensor
from mmfsdp.checkpoint.pickles.unpickling import PickledObject
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError, MmfsdpError
from mmfsdp.testing import run_ranks, single_rank

GOLDEN = Path(__file__).parents[2] / "core" / "dtensors"
RELEASES = sorted(path.name for path in GOLDEN.iterdir() if (path / "full.pth").exists())
NEWEST = "2.15.0"


def save(rank: int, directory: Path, ranks: int, parallelism: str, names: str) -> None:
    """Save as verl, accelerate or a script does, and the whole to compare with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = content_of(rank, ranks, parallelism)
    if names == "script":
        torch.save(content, directory / f"rank{rank}.pth")
    elif names == "verl":
        suffix = f"world_size_{ranks}_rank_{rank}.pt"
        torch.save(content["model"], directory / f"model_{suffix}")
        torch.save(content["optimizer"], directory / f"optim_{suffix}")
        torch.save({"rng": torch.full((2,), rank), "lr_scheduler": {"last": 1}}, directory / f"extra_state_{suffix}")
    else:
        torch.save(content["model"], directory / f"pytorch_model_fsdp_0_rank{rank}.bin")
        torch.save(content["optimizer"], directory / f"optimizer_0_rank{rank}.bin")
    full = whole(content)
    if rank == 0:
        (directory / "whole").mkdir()
        torch.save(full, directory / "whole" / "full.pth")


def save_steps(rank: int, directories: list[Path]) -> None:
    """Save two steps of a run as accelerate, a script and verl do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = content_of(rank, 2, "fsdp")
    for step, directory in enumerate(directories, start=1):
        for state in content["optimizer"]["state"].values():
            state["step"].fill_(step)
        for folder in ("script", "verl"):
            (directory / folder).mkdir(exist_ok=True)
        torch.save(content["optimizer"], directory / f"optimizer_0_rank{rank}.bin")
        torch.save({**content, "epoch": step}, directory / "script" / f"all_rank{rank}.pt")
        torch.save(content["model"], directory / "verl" / f"model_world_size_2_rank_{rank}.pt")
        own = {"rng": torch.full((2,), rank), "lr_scheduler": {"last_epoch": step}}
        torch.save(own, directory / "verl" / f"extra_state_world_size_2_rank_{rank}.pt")


def converted(source: Path, target: Path) -> Any:
    convert(source, target, keep="all", overwrite=True, fsync=False)
    return torch.load(target)


@pytest.mark.sample("2-fsdp-accelerate", "1-fsdp-verl", "2-only tp-accelerate", "4-fsdp-script")
@pytest.mark.parametrize(
    ("ranks", "parallelism", "names"),
    [
        *((1, "fsdp", names) for names in ("script", "verl", "accelerate")),
        (2, "fsdp", "verl"),
        (2, "fsdp", "accelerate"),
        (4, "fsdp", "script"),
        (4, "hsdp", "verl"),
        (4, "tp", "script"),
        (2, "only tp", "accelerate"),
    ],
)
def test_equals_what_torch_gathers(tmp_path: Path, ranks: int, parallelism: str, names: str) -> None:
    run_ranks(save, ranks, tmp_path, ranks, parallelism, names)
    expected = torch.load(tmp_path / "whole" / "full.pth")
    layout = open_layout(tmp_path)
    assert (layout.format, layout.world_size) == ("dtensor_ranks", ranks)
    assert verify(tmp_path).ok
    found = converted(tmp_path, tmp_path / "whole" / "out.pth")
    if names == "script":
        assert same(found, expected)
        return
    assert same(found["state_dict"], expected["model"])
    assert same(found["optimizer"], expected["optimizer"])
    if names == "verl":
        assert [state["rng"].tolist() for state in found["extra_state"]] == [[rank] * 2 for rank in range(ranks)]


@pytest.mark.parametrize("release", RELEASES)
def test_files_of_other_releases_and_of_accelerate(tmp_path: Path, release: str) -> None:
    found = converted(GOLDEN / release, tmp_path / "out.pth")
    for group in found["optimizer"]["param_groups"]:
        group.pop("param_names", None)  # accelerate's files have names, and a file of torch.save numbers
    assert same(found, torch.load(GOLDEN / release / "full.pth"))


@pytest.mark.parametrize("release", RELEASES)
def test_the_first_file_says_where_everything_is(tmp_path: Path, release: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / release, source)
    expected = open_layout(source).tensors
    layout = pickle.loads(pickle.dumps(open_layout(source, look_up=False)))  # as another rank gets it
    assert layout.tensors.keys() == expected.keys()
    for name, entry in layout.tensors.items():
        by_box = {chunk.bounds: chunk for chunk in expected[name].chunks()}
        found = {chunk.bounds: chunk for chunk in entry.chunks()}
        assert found.keys() == by_box.keys(), name
        assert {chunk.nbytes for chunk in found.values()} == {chunk.nbytes for chunk in by_box.values()}
    [other] = [path for path in source.iterdir() if path.name.endswith(("model_fsdp_0_rank1.bin", "3_rank1.pt"))]
    other.write_bytes(b"")
    late = open_layout(source, look_up=False)
    name = next(name for name in late.tensors if name.endswith(("model/up.weight", "state_dict/0.weight")))
    with pytest.raises(CorruptCheckpointError, match=re.escape(other.name)):
        late.tensors[name].chunks()


def load(rank: int, source: Path, strategy: str) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = mmfsdp.shard(Model().float(), {"sharding": {"strategy": strategy}, "wrap": {"kind": "none"}})
    mmfsdp.load_checkpoint(source, model)
    return {name: tensor.detach() for name, tensor in whole(dict(model.named_parameters())).items()}


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "FULL_SHARD"), (3, "FULL_SHARD"), (2, "NO_SHARD")])
def test_ranks_load_them(ranks: int, strategy: str) -> None:
    source = GOLDEN / NEWEST
    expected = torch.load(source / "full.pth")["model"]
    for found in run_ranks(load, ranks, source, strategy):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name].float(), rtol=0, atol=0)


def test_a_file_of_one_rank_alone(tmp_path: Path) -> None:
    with single_rank():
        save(0, tmp_path, 1, "fsdp", "script")
    expected = torch.load(tmp_path / "whole" / "full.pth")
    assert same(converted(tmp_path / "rank0.pth", tmp_path / "whole" / "out.pth"), expected)
    with pytest.raises(FormatError, match="one rank's part of a sharded checkpoint; open its directory"):
        open_layout(GOLDEN / NEWEST / "step3_rank1.pt")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    target = tmp_path / "step3"
    shutil.copytree(GOLDEN / NEWEST, target)
    return target


def check_error(directory: Path, kind: type[MmfsdpError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        open_layout(directory)
    for word in words:
        assert word in str(caught.value)


class TestBadInput:
    def test_a_missing_rank_is_named(self, copy: Path) -> None:
        (copy / "step3_rank2.pt").unlink()
        check_error(copy, IncompleteCheckpointError, "sharded over 4 ranks, but step3_rank2.pt is missing")

    def test_a_file_under_the_name_of_another_rank(self, copy: Path) -> None:
        shutil.copy(copy / "step3_rank0.pt", copy / "step3_rank3.pt")
        (copy / "step3_rank1.pt").unlink()
        shutil.copy(copy / "step3_rank3.pt", copy / "step3_rank1.pt")
        check_error(copy, CorruptCheckpointError, "step3_rank1.pt was written by rank 0 of 4", "expected rank 1")

    def test_a_file_of_another_save(self, copy: Path, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        run_ranks(save, 2, tmp_path / "other", 2, "fsdp", "script")
        shutil.copy(tmp_path / "other" / "rank1.pth", copy / "step3_rank1.pt")
        check_error(copy, CorruptCheckpointError, "step3_rank1.pt was written by rank 1 of 2", "of another save")

    def test_two_saves_in_one_directory(self, copy: Path) -> None:
        for rank in (0, 1):
            shutil.copy(copy / f"step3_rank{rank}.pt", copy / f"model_world_size_2_rank_{rank}.pt")
        check_error(copy, FormatError, "2 kinds", "'step3' is not known")
        shutil.copy(copy / "step3_rank0.pt", copy / "model_world_size_4_rank_0.pt")
        check_error(copy, CorruptCheckpointError, "two files of rank 0", "left over")

    def test_files_of_two_steps(self, tmp_path: Path) -> None:
        steps = [tmp_path / "one", tmp_path / "two"]
        for step in steps:
            step.mkdir()
        run_ranks(save_steps, 2, steps)
        for name, what in (
            ("optimizer_0_rank1.bin", "(state/0/step another) than optimizer_0_rank0.bin (another)"),
            ("script/all_rank1.pt", "(epoch 2) than all_rank0.pt (1)"),
            ("verl/extra_state_world_size_2_rank_1.pt", "(lr_scheduler/last_epoch 2) than extra_state_world_size_2_ra"),
        ):
            shutil.copy(steps[1] / name, steps[0] / name)
            path = (steps[0] / name).parent
            words = f"{Path(name).name} is of another save {what}", "Use the files of one save only."
            check_error(path, CorruptCheckpointError, *words)
            if "verl" not in name:  # whose own states are read at once
                late = open_layout(path, look_up=False).tensors
                with pytest.raises(CorruptCheckpointError, match="is of another save"):
                    next(entry for name, entry in late.items() if name.endswith("exp_avg")).chunks()

    def test_files_left_over_from_more_ranks(self, copy: Path, tmp_path: Path) -> None:
        (tmp_path / "two").mkdir()
        run_ranks(save, 2, tmp_path / "two", 2, "fsdp", "script")
        for rank in range(2):
            shutil.copy(tmp_path / "two" / f"rank{rank}.pth", copy / f"step3_rank{rank}.pt")
        words = "step3_rank2.pt is left over from another save", "over 2 in step3_rank0.pt. Remove it."
        check_error(copy, CorruptCheckpointError, *words)

    def test_what_is_each_ranks_own_is_complete(self, tmp_path: Path) -> None:
        run_ranks(save, 2, tmp_path, 2, "fsdp", "verl")
        own = [tmp_path / f"extra_state_world_size_2_rank_{rank}.pt" for rank in range(2)]
        data = own[0].read_bytes()
        own[0].unlink()
        check_error(tmp_path, IncompleteCheckpointError, "was saved by 2 ranks, but", f"{own[0].name} is missing")
        own[0].write_bytes((tmp_path / "model_world_size_2_rank_0.pt").read_bytes())
        check_error(tmp_path, FormatError, f"{own[0].name} holds a part of the tensor 'up.weight'", "of another kind")
        own[0].write_bytes(data)
        open_layout(tmp_path)

    def test_a_damaged_file(self, copy: Path) -> None:
        path = copy / "step3_rank1.pt"
        data = bytearray(path.read_bytes())
        [chunk] = [
            chunk
            for chunk in open_layout(copy).tensors["model/up.weight"].chunks()
            if chunk.file == path  # the others are those of other ranks
        ]
        data[chunk.offset] ^= 1
        path.write_bytes(data)
        assert not verify(copy).ok
        with pytest.raises(CorruptCheckpointError, match=r"model/up\.weight.*step3_rank1\.pt"):
            convert(copy, copy.with_name("out.pth"), fsync=False)
        path.write_bytes(data[: len(data) // 2])
        check_error(copy, CorruptCheckpointError, "step3_rank1.pt")

    def test_files_without_any_dtensor(self, tmp_path: Path) -> None:
        for rank in range(2):
            torch.save({"w": torch.ones(2)}, tmp_path / f"model_rank{rank}.pt")
        check_error(tmp_path, FormatError, "model_rank0.pt holds no DTensor", "save the model with torch's distributed")


MESH = {
    "_coordinate_on_dim": (1,),
    "_layout": PickledObject(),
    "_flatten_rank_map": (0, 1),
    "_rank": 1,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"_coordinate_on_dim": (2,)},
        {"_coordinate_on_dim": (0, 1)},
        {"_coordinate_on_dim": None},
        {"_rank": 7},
        {"_flatten_rank_map": "01"},
        {"_flatten_rank_map": (0,)},
        {"sizes": (0, 10**18)},
        {"sizes": (10**18,)},
        {"sizes": ((2, (10**9,)),)},
        {"sizes": (-2,)},
        {"strides": (10**18,)},
        {"strides": ()},
        {"placements": ()},
        {"dim": 5},
        {"dim": "0"},
        {"split_factor": 0},
        {"split_factor": 10**18},
    ],
)
def test_malformed_descriptions(tmp_path: Path, changes: dict[str, Any]) -> None:
    layout, mesh, shard, spec = (PickledObject() for _ in range(4))
    shard.qualname = "_StridedShard" if "split_factor" in changes else "Shard"
    layout.state = {"shape": changes.get("sizes", (2,)), "stride": changes.get("strides", (1,))}
    shard.state = {"dim": 0, "split_factor": 1, **changes}
    mesh.state = {**MESH, "_layout": layout, **changes}
    spec.state = {"mesh": mesh, "placements": changes.get("placements", (shard,))}
    local = PickledTensor("uint8", (2, 3), 0, None, Record(tmp_path / "x.pt", 0, 6, None))
    tensor = PickledDTensor(local, (4, 3), False, spec.state)
    with pytest.raises((CorruptCheckpointError, FormatError), match=r"x\.pt holds"):
        shard_of(tensor, {})
    mesh.state, shard.state, layout.state = {**MESH, "_layout": layout}, {"dim": 0}, {"shape": (2,), "stride": (1,)}
    shard.qualname, spec.state["placements"] = "Shard", (shard,)
    assert shard_of(tensor, {}).box == ((2, 0), (2, 3))


def place(rank: int, directory: Path, kind: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    local = torch.ones(2, 3)
    tensor = DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Partial() if kind == "sum" else Shard(1)])
    torch.save({"w": tensor, **({"only": tensor} if rank else {})}, directory / f"part-rank{rank}.pt")
    dist.barrier()


@pytest.mark.parametrize(
    ("kind", "message"),
    [("sum", "placed as Partial"), ("extra", "'only' is in part-rank1.pt but not in part-rank0.pt")],
)
def test_what_cannot_be_put_together(tmp_path: Path, kind: str, message: str) -> None:
    run_ranks(place, 2, tmp_path, kind)
    check_error(tmp_path, MmfsdpError, message)
