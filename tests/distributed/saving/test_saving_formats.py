"""Files of other formats from a sharded model: the bytes are those of ``convert``, whoever writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.core.checkpoint.formats.test_gguf import folder
from tests.core.gguf.models import weights
from tests.distributed.models import Named
from tests.distributed.state.test_state_dicts import HYBRID
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mmfsdp
from mmfsdp.checkpoint import convert, diff, verify
from mmfsdp.errors import ConfigError, StateDictError
from mmfsdp.saving import write_checkpoint
from mmfsdp.testing import run_ranks, single_rank

KINDS = {"full": "pth", "safetensors": "safetensors", "gguf": "gguf"}


def save(rank: int, directory: str, name: str, dtype: torch.dtype, config: dict[str, Any], unseen: bool) -> None:
    if unseen and rank:
        from mmfsdp.saving.writing import whole_files

        whole_files.sees = lambda path: False  # as if the path were on a disk of another node
    model = mmfsdp.shard(
        Named({key: value.to(dtype) for key, value in weights(name).items()}, buffers="norm.weight"), config
    )
    for kind, suffix in KINDS.items():
        like = f"{directory}/{name}" if kind == "gguf" else None
        for blocking in (True, False):
            path = f"{directory}/{kind}-{blocking}.{suffix}"
            save = mmfsdp.save_checkpoint(path, model, kind=kind, like=like, blocking=blocking)
            if not blocking:
                with torch.no_grad():
                    for tensor in model.state_dict().values():
                        tensor.add_(1.0)  # what training does meanwhile
            save.result()
            if not blocking:
                mmfsdp.load_checkpoint(f"{directory}/full-True.pth", model)


@pytest.mark.parametrize(
    ("name", "dtype", "config", "ranks", "unseen"),
    [
        ("llama", torch.bfloat16, {}, 2, False),  # vectors become float32, rows change places
        ("llama", torch.float32, {"sharding": HYBRID}, 4, False),
        ("qwen2", torch.float32, {"engine": "fsdp1"}, 3, False),
        ("llama", torch.bfloat16, {}, 3, True),
    ],
)
def test_ranks_write_what_convert_writes(
    name: str, dtype: torch.dtype, config: dict[str, Any], ranks: int, unseen: bool, tmp_path: Path
) -> None:
    folder(tmp_path, name)
    run_ranks(save, ranks, str(tmp_path), name, dtype, config, unseen)
    whole = tmp_path / "full-True.pth"
    expected = {key: value.to(dtype) for key, value in weights(name).items()}
    assert {key: value.equal(expected[key]) for key, value in torch.load(whole)["state_dict"].items()} == dict.fromkeys(
        expected, True
    )
    for blocking in (True, False):
        files = {kind: tmp_path / f"{kind}-{blocking}.{suffix}" for kind, suffix in KINDS.items()}
        assert diff(files["full"], whole).same
        assert all(verify(files[kind]).ok for kind in ("full", "safetensors"))
        assert {
            key: value.equal(expected[key]) for key, value in load_file(files["safetensors"]).items()
        } == dict.fromkeys(expected, True)
        like = str(tmp_path / name)
        for kind, settings in (("safetensors", {}), ("gguf", {"like": like})):
            made = tmp_path / f"converted.{kind}"
            convert(whole, made, overwrite=True, **settings)
            assert made.read_bytes() == files[kind].read_bytes(), kind


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, "llama")
    with single_rank():
        model = mmfsdp.shard(Named({"a": torch.ones(2, 2)}), {})
        with pytest.raises(ConfigError, match=r"kind='gguf' needs like=FOLDER"):
            mmfsdp.save_checkpoint(tmp_path / "out.gguf", model, kind="gguf")
        with pytest.raises(ConfigError, match=r"applies only to kind='hf' and kind='gguf'"):
            mmfsdp.save_checkpoint(tmp_path / "out.safetensors", model, kind="safetensors", like=tmp_path / "llama")
        with pytest.raises(ConfigError, match=r"kind='safetensors' holds the weights alone\. Leave out extra"):
            mmfsdp.save_checkpoint(tmp_path / "out.safetensors", model, kind="safetensors", extra={"step": 1})
        with pytest.raises(ConfigError, match=r"it lacks .* Use a 'recipe'"):
            mmfsdp.save_checkpoint(tmp_path / "out.gguf", model, kind="gguf", like=tmp_path / "llama")
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def save_unlike(rank: int, folder: str) -> tuple[str, bool]:
    """Save content that one rank has under another name, and content with a tensor that pairs of ranks hold."""
    model = mmfsdp.shard(Named({"weight": torch.arange(12.0).reshape(6, 2)}), {})
    weight = mmfsdp.model_state_dict(model, "sharded")["weight"]
    said = ""
    try:
        write_checkpoint(f"{folder}/unlike", {"b" if rank == 2 else "a": weight}, model, kind="sharded")
    except StateDictError as error:
        said = str(error)
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "rank"))
    held = distribute_tensor(torch.arange(10.0).reshape(5, 2), pairs["rank"], [Shard(0)])
    content = {"whole": weight, "in pairs": held, "number": torch.tensor(rank)}
    for kind, name in (("sharded", "dcp"), ("full", "full.pth")):
        write_checkpoint(f"{folder}/{name}", content, model, kind=kind)
    found = {"in pairs": torch.zeros(5, 2), "whole": torch.zeros(6, 2), "number": torch.tensor(9)}
    dcp.load(found, checkpoint_id=f"{folder}/dcp")
    whole = torch.load(f"{folder}/full.pth", weights_only=True)
    expected = {"in pairs": torch.arange(10.0).reshape(5, 2), "whole": torch.arange(12.0).reshape(6, 2)}
    expected["number"] = torch.tensor(0)
    return said, all(each[key].equal(value) for each in (found, whole) for key, value in expected.items())


def test_ranks_that_hold_different_tensors(tmp_path: Path) -> None:
    found = run_ranks(save_unlike, 4, str(tmp_path))
    assert [same for _, same in found] == [True] * 4
    for said, _ in found:
        assert "'a' is float32 of shape [6, 2] on rank 0, and not there on rank 2" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp", "full.pth"]
    assert verify(tmp_path / "dcp").ok
    assert diff(tmp_path / "dcp", tmp_path / "full.pth", keep="all").same
