"""``load_from`` in every form that users write it."""

from __future__ import annotations

import functools
import http.server
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS
from safetensors.torch import save_file
from tests.mmengine_adapter.toy import POLICY
from torch.distributed import checkpoint as dcp

from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import FSDPStrategy


def strategy_at(folder: Path) -> FSDPStrategy:
    made = FSDPStrategy(work_dir=str(folder), model_wrapper={"auto_wrap_policy": POLICY}, state_dict_cfg="full")
    made.prepare({"type": "ToyModel"})
    return made


def loaded(rank: int, folder: Path, places: dict[str, str]) -> dict[str, bool]:
    os.environ["TORCH_HOME"] = str(folder / "hub")  # what is downloaded is kept there
    made = strategy_at(folder)
    expected = torch.load(folder / "bare.pth", weights_only=True)
    found = {}
    for name, place in places.items():
        with torch.no_grad():
            for param in made.model.parameters():
                param.zero_()
        made.load_checkpoint(place, strict=True)
        whole = {key: value.full_tensor() for key, value in made.model.state_dict().items()}
        found[name] = all(torch.equal(whole[key], value) for key, value in expected.items())
    del os.environ["TORCH_HOME"]
    return found


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """One model's weights in every form, by what the form is called."""
    torch.manual_seed(1)
    weights = dict(MODELS.build({"type": "ToyModel"}).state_dict())
    torch.save(weights, tmp_path / "bare.pth")
    torch.save({"state_dict": weights, "meta": {}}, tmp_path / "published.pth")
    torch.save({"model": weights, "epoch": 3}, tmp_path / "model.pth")
    torch.save({"state_dict": {f"module.{key}": value for key, value in weights.items()}}, tmp_path / "ddp.pth")
    save_file(weights, tmp_path / "one.safetensors")
    (tmp_path / "shards").mkdir()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({key: weights[key] for key in part}, tmp_path / "shards" / file)
    index = {"weight_map": {key: file for file, part in parts.items() for key in part}, "metadata": {"total_size": 1}}
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"state_dict": weights}, checkpoint_id=tmp_path / "dcp")
    forms = ("bare.pth", "published.pth", "model.pth", "ddp.pth", "one.safetensors", "shards", "dcp")
    return {form: str(tmp_path / form) for form in forms}


class TestForms:
    def test_files_directories_and_urls(self, tmp_path: Path, places: dict[str, str]) -> None:
        handler = functools.partial(Quiet, directory=str(tmp_path))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            places["http"] = f"http://127.0.0.1:{server.server_port}/published.pth"
            found = run_ranks(loaded, 2, tmp_path, places)
            server.shutdown()
        assert found == [dict.fromkeys(places, True)] * 2


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, *args: object) -> None:
        pass
