"""Hugging Face folders from ranks: each writes its rows, and the folder is what ``convert`` makes of the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.distributed.models import BLOCKS, build
from tests.distributed.state.test_state_dicts import HYBRID
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mmfsdp
from mmfsdp.checkpoint import convert, diff, open_layout, verify
from mmfsdp.errors import CheckpointError, ConfigError, MmfsdpError
from mmfsdp.testing import run_ranks, single_rank

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (3, {"wrap": BLOCKS}),
    "hybrid": (4, {"sharding": HYBRID, "wrap": BLOCKS}),
    "fsdp1": (2, {"engine": "fsdp1", "wrap": BLOCKS}),
    "replicate": (2, {"sharding": "NO_SHARD"}),
}


def like(path: Path, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    return path


def save(rank: int, config: dict[str, Any], folder: str) -> None:
    model = mmfsdp.FullyShardedDataParallel(build().bfloat16(), config=config)
    mmfsdp.save_checkpoint(f"{folder}/full.pth", model, kind="full")
    mmfsdp.save_checkpoint(f"{folder}/out", model, kind="hf", like=f"{folder}/like")


@pytest.mark.parametrize("case", CONFIGS)
def test_it_is_what_convert_makes(case: str, tmp_path: Path) -> None:
    ranks, config = CONFIGS[case]
    of_diffusers = case == "hybrid"
    like(tmp_path / "like", **({"_diffusers_version": "0.42.1"} if of_diffusers else {}))
    weights = "diffusion_pytorch_model.safetensors" if of_diffusers else "model.safetensors"
    run_ranks(save, ranks, config, str(tmp_path))
    names = sorted(entry.name for entry in (tmp_path / "out").iterdir())
    assert names == sorted(["config.json", "manifest.json", weights, "tokenizer.json"])
    # The head is tied to the embedding, which comes first. FSDP1 hands out two tensors.
    tied = [] if case == "fsdp1" else ["head.weight"]
    convert(tmp_path / "full.pth", tmp_path / "whole", to="hf", like=tmp_path / "like", exclude=tied)
    assert (tmp_path / "out" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
    assert diff(tmp_path / "out", tmp_path / "whole").same
    report = verify(tmp_path / "out")
    assert report.ok
    assert report.unchecked == ()


def by_columns(rank: int, folder: str) -> None:
    """Tensor parallelism by columns: such tensors have no rows of their own."""
    model = torch.nn.Linear(6, 4, bias=False)
    mesh = init_device_mesh("cpu", (2,))
    with torch.no_grad():
        model.weight.copy_(torch.arange(24.0).reshape(4, 6))
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
    from mmfsdp.checkpoint.formats.registry import find_format
    from mmfsdp.collective.scopes import scope_of
    from mmfsdp.saving.writing.model_files import ModelFiles, write_model_folder
    from mmfsdp.saving.writing.publishing import DirectorySave
    from mmfsdp.saving.writing.whole_files import write_whole

    scope = scope_of(mesh)
    target = Path(folder, "out")
    like = Path(folder, "like")
    chosen = ModelFiles.of(model.state_dict(), find_format("hf"), target, scope, like=like, overwrite=False)
    started = DirectorySave.begin(target, scope, overwrite=False)
    started.finish(lambda started: write_model_folder(started, chosen, scope), scope)
    file = Path(folder, "whole.pth")
    write_whole(file, {"a": [model.weight]}, scope, overwrite=False)
    assert torch.load(file)["a"][0].equal(torch.arange(24.0).reshape(4, 6))


def test_columns_are_written_where_they_belong(tmp_path: Path) -> None:
    like(tmp_path / "like")
    run_ranks(by_columns, 2, str(tmp_path))
    assert load_file(tmp_path / "out" / "model.safetensors")["weight"].equal(torch.arange(24.0).reshape(4, 6))
    assert verify(tmp_path / "whole.pth").ok


def save_in_background(rank: int, folder: str) -> None:
    model = mmfsdp.shard(build(), {"wrap": BLOCKS})
    mmfsdp.save_checkpoint(f"{folder}/now", model, kind="hf", like=f"{folder}/like")
    save = mmfsdp.save_checkpoint(f"{folder}/later", model, kind="hf", like=f"{folder}/like", blocking=False)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)  # what training does meanwhile
    save.result()


def test_in_the_background_the_same_folder_is_written(tmp_path: Path) -> None:
    like(tmp_path / "like")
    run_ranks(save_in_background, 2, str(tmp_path))
    names = {path.name for path in (tmp_path / "now").iterdir()}
    assert names == {path.name for path in (tmp_path / "later").iterdir()}
    for name in names - {"manifest.json"}:  # which has the id of the save
        assert (tmp_path / "now" / name).read_bytes() == (tmp_path / "later" / name).read_bytes()


def replace_and_load(rank: int, folder: str) -> tuple[list[str], dict[str, Any]]:
    model = mmfsdp.FullyShardedDataParallel(build(), config={"wrap": BLOCKS})
    said = []

    def attempt(path: str, **settings: Any) -> None:
        try:
            mmfsdp.save_checkpoint(path, model, **settings)
        except MmfsdpError as error:
            said.append(f"{type(error).__name__}: {error.message}")
        else:
            said.append("saved")

    optimizer = torch.optim.SGD(model.parameters())
    attempt(f"{folder}/a", kind="hf")
    attempt(f"{folder}/a", kind="hf", like=f"{folder}/nowhere")
    attempt(f"{folder}/a", kind="hf", like=f"{folder}/other")
    attempt(f"{folder}/a", kind="hf", like=f"{folder}/like", optimizer=optimizer)
    attempt(f"{folder}/a", like=f"{folder}/like")
    attempt(f"{folder}/a.safetensors", kind="hf", like=f"{folder}/like")
    attempt(f"{folder}/like", kind="hf", like=f"{folder}/like")
    attempt(f"{folder}/like", kind="hf", like=f"{folder}/like", overwrite=True)
    again = mmfsdp.FullyShardedDataParallel(build(seed=4), config={"wrap": BLOCKS})
    mmfsdp.load_checkpoint(f"{folder}/like", again)
    loaded, given = (mmfsdp.model_state_dict(each, "full", rank0_only=False) for each in (again, model))
    return said, {name: torch.equal(loaded[name], given[name]) for name in given}


def test_errors_reach_every_rank_and_a_folder_keeps_its_files(tmp_path: Path) -> None:
    like(tmp_path / "like")
    (tmp_path / "like/README.md").write_text("mine")
    save_file({"wrong.name": torch.ones(2)}, like(tmp_path / "other") / "model.safetensors")
    (said, equal), *others = run_ranks(replace_and_load, 2, str(tmp_path))
    for place, text in enumerate(
        [
            "ConfigError: kind='hf' needs like=FOLDER",
            "holds no config.json",
            "does not fit the weights in",
            "Leave out the optimizer",
            "applies only to kind='hf' and kind='gguf', not to kind='sharded'",
            "is a directory, and",
            "TargetExistsError: ",
            "saved",
        ]
    ):
        assert text in said[place]
        assert all(text in other[place] for other, _ in others)
    assert all(equal.values())
    assert (tmp_path / "like/README.md").read_text() == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["like", "other"]
    assert "head.weight" not in open_layout(tmp_path / "like").tensors


def too_large(rank: int, folder: str) -> str:
    import resource
    import signal

    model = mmfsdp.FullyShardedDataParallel(torch.nn.Linear(512, 512), config={})
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:  # this rank alone cannot write beyond the first rows
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        mmfsdp.save_checkpoint(f"{folder}/out", model, kind="hf", like=f"{folder}/like")
    except CheckpointError as error:
        return error.message
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return "saved"


def test_a_rank_that_cannot_write(tmp_path: Path) -> None:
    like(tmp_path / "like")
    own, other = run_ranks(too_large, 2, str(tmp_path))[::-1]
    assert "model.safetensors" in own
    assert "Rank 1 failed" in other
    assert [entry.name for entry in tmp_path.iterdir()] == ["like"]


def test_config_error_is_a_value_error() -> None:
    with (
        single_rank(),
        pytest.raises(ConfigError, match="'safetensors_index' or 'gguf', got 'hff'"),
    ):
        mmfsdp.save_checkpoint("x", mmfsdp.shard(torch.nn.Linear(1, 1)), kind="hff")  # type: ignore[arg-type]
