"""``load_from`` in every form that users write it."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import load_state_dict
from safetensors.torch import save_file
from tests.mmengine_adapter.toy import POLICY
from torch.distributed import checkpoint as dcp

from mmfsdp import model_state_dict
from mmfsdp.testing import run_ranks
from mmfsdp_mmengine import FSDPStrategy, MMFullyShardedDataParallel


def strategy_at(folder: Path, **wrapper: Any) -> FSDPStrategy:
    wrapper = {"auto_wrap_policy": POLICY, **wrapper}
    made = FSDPStrategy(work_dir=str(folder), model_wrapper=wrapper, state_dict_cfg="full")
    made.prepare({"type": "ToyModel"})
    return made


def loaded(rank: int, folder: Path, places: dict[str, str], wrapper: dict[str, Any]) -> dict[str, bool]:
    os.environ["TORCH_HOME"] = str(folder / "hub")  # what is downloaded is kept there
    made = strategy_at(folder, **wrapper)
    expected = torch.load(folder / "bare.pth", weights_only=True)
    found = {}
    for name, place in places.items():
        with torch.no_grad():
            for param in made.model.parameters():
                param.zero_()
        made.load_checkpoint(place, strict=True)
        whole = model_state_dict(made.model, rank0_only=False)
        found[name] = all(torch.equal(whole[key], value) for key, value in expected.items())
    del os.environ["TORCH_HOME"]
    return found


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """One model's weights in every form, by what the form is called."""
    torch.manual_seed(1)
    weights = dict(MODELS.build({"type": "ToyModel"}).state_dict())
    codes = weights["head.weight"].to(torch.float8_e4m3fn)
    weights["head.weight"] = codes.float() / 2
    torch.save(weights, tmp_path / "bare.pth")
    coded = {**weights, "head.weight": codes, "head.weight_scale_inv": torch.tensor([0.5])}
    torch.save({"state_dict": coded, "meta": {}}, tmp_path / "codes.pth")
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
    forms = ("bare.pth", "published.pth", "model.pth", "ddp.pth", "codes.pth", "one.safetensors", "shards", "dcp")
    return {form: str(tmp_path / form) for form in forms}


class TestForms:
    @pytest.mark.sample("{}")
    @pytest.mark.parametrize("wrapper", [{}, {"engine": "fsdp1"}, {"use_orig_params": False}], ids=str)
    def test_files_directories_and_urls(self, tmp_path: Path, places: dict[str, str], wrapper: dict[str, Any]) -> None:
        handler = functools.partial(Quiet, directory=str(tmp_path))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            places["http"] = f"http://127.0.0.1:{server.server_port}/published.pth"
            places["http safetensors"] = f"http://127.0.0.1:{server.server_port}/one.safetensors"
            places["file"] = f"file://{tmp_path}/published.pth"
            found = run_ranks(loaded, 2, tmp_path, places, wrapper)
            server.shutdown()
        assert found == [dict.fromkeys(places, True)] * 2


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Logs nothing."""

    def log_message(self, *args: object) -> None:
        pass


def held(model: nn.Module) -> list[torch.Tensor]:
    """What this rank holds of the parameters, copied."""
    return [getattr(param, "_local_tensor", param).detach().clone() for param in model.parameters()]


def refused(rank: int, folder: Path, places: dict[str, str], wrapper: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Errors by place, and whether weights stayed as they were."""
    os.environ["TORCH_HOME"] = str(folder / "hub")
    made = strategy_at(folder, **wrapper)
    before = held(made.model)
    found = {}
    for name, place in places.items():
        try:
            made.load_checkpoint(place, strict=True)
            error = ""
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        found[name] = error, all(torch.equal(old, new) for old, new in zip(before, held(made.model), strict=True))
    del os.environ["TORCH_HOME"]
    return found


def damage(folder: Path) -> dict[str, str]:
    """Make what cannot be loaded, beside what can, and return the errors by name."""
    for name in ("published.pth", "one.safetensors"):
        (folder / f"short {name}").write_bytes((folder / name).read_bytes()[:-200])
    (folder / "text.pth").write_text("weights")
    (folder / "nothing here").mkdir()
    [data] = (folder / "dcp").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-3000])
    torch.save({"state_dict": [1, 2]}, folder / "list.pth")
    torch.save({f"layer{place}.weight": torch.ones(3) for place in range(7)}, folder / "other.pth")
    torch.save(MODELS.build({"type": "ToyModel", "width": 32}).state_dict(), folder / "wide.pth")
    return {
        "short published.pth": "CorruptCheckpointError: short published.pth is truncated or damaged",
        "short one.safetensors": "CorruptCheckpointError: short one.safetensors has 13340 bytes (expected 13540)",
        "dcp": "CorruptCheckpointError: __0_0.distcp is truncated",
        "text.pth": "FormatError: text.pth is a short text, 'weights', and not a checkpoint",
        "nothing here": f"CheckpointNotFoundError: The directory '{folder}/nothing here' is not a checkpoint",
        "missing.pth": f"CheckpointNotFoundError: There is no checkpoint at '{folder}/missing.pth'",
        "list.pth": f"FormatError: {folder}/list.pth has a list under 'state_dict', not a dict of tensors",
        "other.pth": "16 missing: patch.weight, patch.bias, blocks.0.norm.weight, blocks.0.norm.bias, "
        "blocks.0.fc1.weight ...; 7 unexpected: layer0.weight, layer1.weight, layer2.weight, layer3.weight, "
        "layer4.weight ...",
        "wide.pth": "15 of another shape: patch.weight: (32, 3, 4, 4) in the state dict, (16, 3, 4, 4) in the model",
        "404": "404.pth cannot be downloaded: HTTP Error 404",
        "short": "CorruptCheckpointError: short%20published.pth is truncated or damaged",
        "nobody": "http://127.0.0.1:9/x.pth cannot be downloaded: ",
    }


@pytest.mark.usefixtures("places")
class TestRefused:
    @pytest.mark.parametrize("wrapper", [{}, {"engine": "fsdp1"}, {"use_orig_params": False}], ids=str)
    def test_every_rank_stops_and_keeps_its_weights(self, tmp_path: Path, wrapper: dict[str, Any]) -> None:
        expected = damage(tmp_path)
        handler = functools.partial(Quiet, directory=str(tmp_path))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            places = {name: str(tmp_path / name) for name in expected}
            places["404"] = f"http://127.0.0.1:{server.server_port}/404.pth"
            places["short"] = f"http://127.0.0.1:{server.server_port}/short%20published.pth"
            places["nobody"] = "http://127.0.0.1:9/x.pth"
            results = run_ranks(refused, 2, tmp_path, places, wrapper, timeout=60)
            server.shutdown()
        for rank, found in enumerate(results):
            for name, (error, is_unchanged) in found.items():
                assert is_unchanged, name
                if rank and name in ("404", "short", "nobody"):  # the first rank tried
                    assert "Error: Rank 0 failed: " in error
                # It also opens what all of them load.
                assert expected[name] in error.replace("Rank 0 failed: ", ""), name
        assert not [*(tmp_path / "hub").rglob("*.pth")]  # the next attempt downloads again


def with_options(rank: int, folder: Path, wrapper: dict[str, Any]) -> dict[str, Any]:
    expected = torch.load(folder / "bare.pth", weights_only=True)
    if rank == 0:
        torch.save({f"net.{key}": value for key, value in expected.items()}, folder / "net.pth")
    torch.distributed.barrier()
    made = strategy_at(folder, **wrapper)
    logged: list[str] = []
    made.logger.warning = logged.append  # type: ignore[method-assign]

    def weights_equal() -> bool:
        with MMFullyShardedDataParallel.summon_full_params(made.model):
            whole = {name: param.detach().clone() for name, param in made.model.named_parameters()}
        made.load_model_state_dict({name: torch.zeros_like(value) for name, value in expected.items()}, strict=True)
        return all(torch.equal(whole[name], value) for name, value in expected.items())

    made.load_checkpoint(str(folder / "net.pth"), strict=True, revise_keys=[(r"^net\.", "")])
    found: dict[str, Any] = {"revised": weights_equal()}

    def rename(content: dict[str, Any]) -> None:
        content["state_dict"] = {key.removeprefix("net."): value for key, value in content["state_dict"].items()}
        content["seen"] = True

    rest = made.load_checkpoint(str(folder / "net.pth"), strict=True, map_location="meta", callback=rename)
    found["callback"] = weights_equal() and rest == {"seen": True}
    found["quiet"] = not logged
    made.load_checkpoint(str(folder / "wide.pth"))
    found["report"] = logged.pop()
    return found


class TestOptions:
    @pytest.mark.parametrize("wrapper", [{}, {"engine": "fsdp1"}], ids=str)
    def test_revise_keys_callback_and_report(
        self, tmp_path: Path, places: dict[str, str], wrapper: dict[str, Any]
    ) -> None:
        wide = dict(MODELS.build({"type": "ToyModel", "width": 32}).state_dict())
        wide["tail.weight"] = wide.pop("patch.bias")
        torch.save(wide, tmp_path / "wide.pth")
        with pytest.raises(RuntimeError) as stock:
            load_state_dict(MODELS.build({"type": "ToyModel"}), wide, strict=True)
        for found in run_ranks(with_options, 2, tmp_path, wrapper):
            assert found["revised"]
            assert found["callback"]
            assert found["quiet"]
            mine, theirs = (
                [re.sub(r": .* model.*", "", line) for line in text.splitlines()]
                for text in (found["report"], str(stock.value))
            )
            assert mine == theirs
