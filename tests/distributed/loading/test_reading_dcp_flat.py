"""FSDP1's LOCAL_STATE_DICT saved with DCP: put together to what torch gathers, or refused with what is missing."""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.distributed.loading.test_reading_mmengine_local import same
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

import mmfsdp
from mmfsdp.checkpoint import convert, layout_of_model, open_layout, verify
from mmfsdp.errors import CorruptCheckpointError, FormatError, IncompleteCheckpointError
from mmfsdp.testing import run_ranks, single_rank

KINDS = ("plain", "tied", "frozen")


class Model(nn.Module):
    """Nested units, uneven sizes, bfloat16, and buffers; a tied or a frozen parameter on request."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False)
        self.small = nn.Linear(3, 5).bfloat16()
        self.twin = nn.Linear(5, 7)
        self.register_buffer("counts", torch.arange(2))  # no parameters, as their dtype and their rows tell
        self.register_buffer("table", torch.ones(2, 2))
        if kind == "tied":
            self.twin.weight = self.first.weight
        if kind == "frozen":
            self.twin.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.last(self.norm(self.first(x) + self.twin(x))).bfloat16()).float()


def save(rank: int, directory: Path, original: bool) -> None:
    warnings.simplefilter("ignore")
    for kind in KINDS if original else KINDS[:2]:  # a flat parameter is frozen whole or not at all
        model = Model(kind)
        for name in ("small", "last"):
            setattr(model, name, wrapped(getattr(model, name), original))
        whole = wrapped(model, original)
        optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1, foreach=False)
        whole(torch.randn(4, 5)).sum().backward()
        optimizer.step()
        with FullyShardedDataParallel.state_dict_type(whole, StateDictType.LOCAL_STATE_DICT):
            weights = whole.state_dict()
            state = FullyShardedDataParallel.optim_state_dict(whole, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=directory / kind)
        dcp.save(weights, checkpoint_id=directory / f"{kind}_alone")
        if kind == "plain":
            with FullyShardedDataParallel.state_dict_type(whole, StateDictType.SHARDED_STATE_DICT):
                sharded = whole.state_dict()
            own = {"model": sharded, "optimizer": optimizer.state_dict()}
            contents = {
                "local": {"model": weights, "optimizer": state},
                "bare": weights,
                "sharded": sharded,
                "own": own,
            }
            for name, content in contents.items():
                folder = directory / f"{name}_of_ranks"
                folder.mkdir(exist_ok=True)
                torch.save(content, folder / f"model_rank_{rank}.pt")
            torch.save(own["optimizer"], directory / f"own_{rank}.pth")
        with FullyShardedDataParallel.state_dict_type(whole, StateDictType.FULL_STATE_DICT):
            full = whole.state_dict()
        buffers = [full[name].float() for name in full if "running" in name]
        for buffer in buffers:  # DCP keeps those of any rank
            dist.broadcast(buffer, 0)
        if rank == 0:
            torch.save(full, directory / f"{kind}.pth")


def files_of_ranks(folder: Path, target: Path) -> None:
    """The same state dicts by torch.save on each rank, which torch itself loads on as many ranks only."""
    full, start = folder / "plain.pth", folder / "start_of_ranks.pth"
    torch.save(Model("plain").state_dict(), start)
    check(folder / "local_of_ranks", full, target)
    check(folder / "sharded_of_ranks", full, target)
    check(folder / "bare_of_ranks", full, target, reference=start)
    check(folder / "own_of_ranks", full, target)
    convert(folder / "own_of_ranks", target, keep="all", overwrite=True, fsync=False)
    for rank, found in enumerate(torch.load(target)["optimizer"]):
        assert same(found, torch.load(folder / f"own_{rank}.pth"))
    with pytest.raises(IncompleteCheckpointError, match="does not say the shapes of "):
        open_layout(folder / "bare_of_ranks")
    several = folder / "several_kinds"
    several.mkdir()
    for path in (folder / "sharded_of_ranks").iterdir():
        for kind in ("model", "optim"):
            shutil.copy(path, several / path.name.replace("model", kind))
    with pytest.raises(
        FormatError, match=r"model_rank_0\.pt holds ShardedTensors of FSDP1, and several_kinds files of 2"
    ):
        open_layout(several)
    (folder / "sharded_of_ranks" / "model_rank_0.pt").rename(folder / "sharded_of_ranks" / "model_rank_7.pt")
    with pytest.raises(CorruptCheckpointError, match=r"model_rank_7\.pt holds the part of rank 0 of"):
        open_layout(folder / "sharded_of_ranks")
    (folder / "local_of_ranks" / "model_rank_1.pt").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"was saved by \d ranks, but model_rank_1\.pt"):
        open_layout(folder / "local_of_ranks")


def wrapped(module: nn.Module, original: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, use_orig_params=original, device_id=torch.device("cpu"))


def check(source: Path, full: Path, target: Path, **options: object) -> None:
    convert(source, target, keep="model", overwrite=True, fsync=False, **options)
    found, expected = torch.load(target)["state_dict"], torch.load(full)
    assert {*found} == {*expected}
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        if "running" not in name:
            assert torch.equal(found[name], tensor), name
    assert verify(source, reference=options.get("reference")).ok


@pytest.mark.sample("False-2")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("original", "ranks"), [(True, 3), (False, 2)])
def test_equals_what_torch_gathers(tmp_path: Path, original: bool, ranks: int) -> None:
    run_ranks(save, ranks, tmp_path, original)
    target = tmp_path / "out.pth"
    for kind in KINDS if original else KINDS[:2]:
        full, start = tmp_path / f"{kind}.pth", tmp_path / "start.pth"
        torch.save(Model(kind).state_dict(), start)  # in which tied names share their memory
        layout = open_layout(tmp_path / kind, reference=start)
        assert (layout.format, layout.world_size) == ("dcp_flat", ranks)
        check(tmp_path / kind, full, target, reference=start)
        check(tmp_path / f"{kind}_alone", full, target, reference=start)
        check(tmp_path / f"{kind}_alone", full, target, reference=layout_of_model(Model(kind)))
        with pytest.raises(IncompleteCheckpointError, match=r"does not say the shapes of .*_flat_param"):
            open_layout(tmp_path / f"{kind}_alone")
        if kind == "plain":  # the optimizer's state tells the shapes
            check(tmp_path / kind, full, target)
    if original:
        with pytest.raises(IncompleteCheckpointError, match=r"'twin\.weight' may be a buffer, or a part of parameter"):
            open_layout(tmp_path / "tied")
        with pytest.raises(IncompleteCheckpointError, match="does not say the shapes of '_flat_param'"):
            open_layout(tmp_path / "frozen")
    files_of_ranks(tmp_path, target)
    metadata = pickle.loads((tmp_path / "plain" / ".metadata").read_bytes())
    held = [index for index in metadata.storage_data if index.fqn.endswith("_flat_param")]
    metadata.storage_data.pop(held[0])
    shutil.copytree(tmp_path / "plain", tmp_path / "lost")
    (tmp_path / "lost" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(IncompleteCheckpointError, match=r"Tensor '.*_flat_param' of shape .* is incomplete"):
        open_layout(tmp_path / "lost")
    with single_rank():
        model = mmfsdp.shard(Model("plain").float())
        mmfsdp.load_checkpoint(tmp_path / "plain", model)
        expected = torch.load(tmp_path / "plain.pth")["first.weight"]
        assert torch.equal(mmfsdp.model_state_dict(model)["first.weight"], expected)
