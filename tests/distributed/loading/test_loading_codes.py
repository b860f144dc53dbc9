"""Weights that a checkpoint holds as codes fill models as the numbers they stand for, or are refused by name."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.distributed.state.test_state_dicts import equal
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

import mmfsdp
from mmfsdp.checkpoint import convert
from mmfsdp.errors import StateDictError
from mmfsdp.testing import run_ranks

ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "replicate": {"sharding": "NO_SHARD"},
    "hybrid": {"sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}},
    "fsdp1": {"engine": "fsdp1"},
    "flat": {"engine": "fsdp1", "sharding": {"use_orig_params": False}},
}


class Net(nn.Module):
    """A model with stacked experts, as transformers 5 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(300, 130), nn.Linear(130, 20, bias=False)
        self.experts = nn.Parameter(torch.zeros(2, 130, 140))


def codes(folder: Path) -> dict[str, list[str]]:
    """Write checkpoints with codes, and beside each what `convert` makes of it; return the names of the files."""
    torch.manual_seed(0)
    float8, exponents = torch.float8_e4m3fn, torch.float8_e8m0fnu
    plain = {name: torch.randn_like(value) / 20 for name, value in Net().state_dict().items()}
    save_file(plain, folder / "plain.safetensors")
    files = ["int8.safetensors", "deepseek.safetensors", "comfy.safetensors", "experts.safetensors"]
    for kind in ("fp8", "fp8_tensor", "fp8_channel"):
        convert(folder / "plain.safetensors", folder / f"{kind}.safetensors", quantize=kind)
        files.append(f"{kind}.safetensors")
    whole = torch.randint(-127, 127, (130, 300), dtype=torch.int8)
    save_file(plain | {"fc.weight": whole, "fc.weight_scale": torch.rand(130, 1)}, folder / files[0])
    part = {"fc.weight": torch.randn(130, 300).to(float8)}
    save_file(plain | part | {"fc.scale": torch.tensor([[0.5, 2, 4], [1, 8, 0.25]]).to(exponents)}, folder / files[1])
    marked = {"fc.scale_weight": torch.tensor(0.5), "fc.scale_input": torch.ones(()), "scaled_fp8": torch.ones(2)}
    save_file(plain | part | marked, folder / files[2])
    stacked = {"experts": torch.randn(2, 130, 140).to(float8), "experts_scale_inv": torch.rand(2, 2, 2) + 0.5}
    save_file(plain | stacked, folder / files[3])
    for name in files:
        convert(folder / name, folder / f"numbers-{name}", quantize="none")
    convert(folder / "fp8.safetensors", folder / "dcp", to="dcp", ranks=3)
    torch.save({"state_dict": load_file(folder / "fp8.safetensors")}, folder / "fp8.pth")
    return {**{name: name for name in files}, "dcp": "fp8.safetensors", "fp8.pth": "fp8.safetensors"}


def fill(rank: int, folder: str, engine: str, files: dict[str, str]) -> list[str]:
    """Return where a model differs from the numbers, for each file and each way to load it."""

    def by_pretrained(path: str, model: nn.Module) -> Any:
        return mmfsdp.load_pretrained(model, path, strict=True)

    def by_checkpoint(path: str, model: nn.Module) -> Any:
        return mmfsdp.load_checkpoint(path, model, strict=path.endswith("fp8.pth"))[1]

    def in_memory(path: str, model: nn.Module) -> Any:
        return mmfsdp.load_model_state_dict(model, load_file(path))

    def from_rank0(path: str, model: nn.Module) -> Any:
        return mmfsdp.load_model_state_dict(model, load_file(path) if rank == 0 else {}, from_rank0=True)

    wrong = []
    model = mmfsdp.shard(Net(), ENGINES[engine])
    for file, numbers in files.items():
        want = load_file(f"{folder}/numbers-{numbers}")
        ways = [by_pretrained, by_checkpoint]
        for load in [*ways, in_memory, from_rank0] if file.endswith("safetensors") else ways:
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            report = load(f"{folder}/{file}", model)
            if not report.clean or not equal(mmfsdp.model_state_dict(model, rank0_only=False), want):
                wrong.append(f"{file} {load.__name__}: {report}")
    return wrong


@pytest.mark.sample("fsdp2")
@pytest.mark.parametrize("engine", ENGINES)
def test_codes_are_restored_at_every_entrance(engine: str, tmp_path: Path) -> None:
    files = codes(tmp_path)
    for wrong in run_ranks(fill, 4 if engine == "hybrid" else 2, str(tmp_path), engine, files):
        assert not wrong


def load_by_torch(rank: int) -> list[str]:
    """Return what torch's own load_state_dict() does not refuse, of whole tensors and of the model's own shards."""
    wrong = []
    for engine in ("fsdp2", "replicate", "fsdp1", "flat"):
        model = mmfsdp.shard(Net(), ENGINES[engine])
        outer = nn.ModuleDict({"net": model})
        before = mmfsdp.model_state_dict(model, rank0_only=False)
        shards = mmfsdp.model_state_dict(model, "sharded")
        for kind, stored in (("whole", before), ("shards", shards)):
            for scale in ("fc.weight_scale_inv", "fc.my_scale"):
                fc = stored["fc.weight"].detach()
                coded = fc.to(torch.float8_e4m3fn) if scale.endswith("inv") or kind == "shards" else fc.to(torch.int8)
                given = {**stored, "fc.weight": coded, scale: torch.ones(1)}
                for owner, prefix in ((model, ""), (outer, "net.")):
                    with warnings.catch_warnings(), type_of(engine, kind, model):
                        try:
                            owner.load_state_dict({prefix + name: value for name, value in given.items()}, strict=False)
                            wrong.append(f"{engine} {kind} {scale} loads")
                        except StateDictError as error:
                            if "fc.weight'" not in str(error):
                                wrong.append(f"{engine} {kind} {scale}: {error}")
        if not equal(mmfsdp.model_state_dict(model, rank0_only=False), before):
            wrong.append(f"{engine}: the model has changed")
        if engine not in ("replicate", "fsdp2"):
            model.load_state_dict({**before, "fc.bias": before["fc.bias"].to(torch.float8_e5m2)})  # nothing scales it
    return wrong


def type_of(engine: str, kind: str, model: nn.Module) -> Any:
    """Return the context in which torch's FSDP1 loads shards."""
    if kind == "whole" or engine in ("fsdp2", "replicate"):
        return nullcontext()
    warnings.simplefilter("ignore")  # torch's, of its own method
    return FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)


def test_torchs_own_load_refuses_codes() -> None:
    for wrong in run_ranks(load_by_torch, 2):
        assert not wrong


CODES = torch.ones(130, 300).to(torch.float8_e4m3fn)
BYTES = torch.ones(130, 150, dtype=torch.uint8)
REFUSED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "unknown": ({"fc.weight": CODES, "fc.my_scale": torch.ones(1)}, "in units of 'fc.my_scale', which mmfsdp does not"),
    "unfit": (
        {"fc.weight": CODES, "fc.weight_scale": torch.ones(7, 1)},
        "float32 scales of shape [7, 1]. Expected one",
    ),
    "gptq": ({"fc.qweight": torch.ones(9, 130, dtype=torch.int32)}, "quantised by GPTQ or AWQ, which mmfsdp does not"),
    "nf4": ({"fc.weight": BYTES, "fc.weight.absmax": torch.ones(1)}, "quantised by bitsandbytes (4 bits)"),
    "int8": ({"fc.weight": CODES.float().to(torch.int8)}, "'fc.weight' is int8, and the model's is float32"),
    "bnb8": ({"fc.weight": CODES.float().to(torch.int8), "fc.SCB": torch.ones(130)}, "by bitsandbytes (8 bits)"),
    "mxfp4": ({"experts": torch.ones(2, 130, 70, dtype=torch.uint8)}, "'experts' is uint8, and the model's is float32"),
    "lost": (
        {"fc.weight": CODES, "fc.weight_scale": torch.ones(1), "out.weight": CODES[:20, :130].clone()},
        "'out.weight' is float8_e4m3fn and has no scale beside it, as 'fc.weight' has",
    ),
}


class Holds(nn.Module):
    """A model that holds codes, or the scale of what may be in any dtype, or has no use for them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 4), nn.Linear(8, 4, bias=False)
        self.register_buffer("weight", torch.zeros(4, 8, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.zeros(4, 1))
        self.register_buffer("mask", torch.zeros(4))
        self.norm.register_parameter("weight_scale", nn.Parameter(torch.zeros(4, 1)))


def refuse(rank: int, folder: str) -> list[str]:
    wrong = []
    model = mmfsdp.shard(Net(), {})
    before = mmfsdp.model_state_dict(model, rank0_only=False)
    for name, (_, message) in REFUSED.items():
        file = f"{folder}/{name}.safetensors"
        for load in (
            lambda file: mmfsdp.load_pretrained(model, file, ignore_mismatched_sizes=True),
            lambda file: mmfsdp.load_checkpoint(file, model, strict=False),
            lambda file: mmfsdp.load_model_state_dict(model, load_file(file), strict=False),
        ):
            try:
                load(file)
                wrong.append(name)
            except StateDictError as error:
                if message not in str(error):
                    wrong.append(f"{name}: {error}")
    if not equal(mmfsdp.model_state_dict(model, rank0_only=False), before):
        wrong.append("the model has changed")
    # None of this is to be refused: the model holds the codes, has the scale, or lacks what is quantised.
    holds = mmfsdp.shard(Holds(), {})
    stored = load_file(f"{folder}/held")
    _, report = mmfsdp.load_checkpoint(f"{folder}/held", holds, strict=False)
    found = mmfsdp.model_state_dict(holds, rank0_only=False)
    wrong += [name for name, value in found.items() if not torch.equal(value, stored[name].to(value.dtype))]
    return [*wrong, *report.missing]


def test_other_codes_are_refused_by_name(tmp_path: Path) -> None:
    for name, (tensors, _) in REFUSED.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    held = {name: torch.ones_like(value) * 3 for name, value in Holds().state_dict().items()}
    held |= {"norm.weight": held["norm.weight"].to(torch.float8_e4m3fn), "mask": held["mask"].to(torch.uint8)}
    held |= {"fc.weight": held["fc.weight"].to(torch.float8_e5m2)}  # numbers: nothing scales them
    held |= {"text.weight": CODES, "text.other_scale": torch.ones(1), "text.fc.qweight": BYTES}
    save_file(held, tmp_path / "held")
    for wrong in run_ranks(refuse, 2, str(tmp_path)):
        assert not wrong
