"""Other libraries' weights fill models that were planned on meta: disks read each byte once, names are rewritten."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.core.recipes.test_recipes import PAIRS, shapes
from tests.core.recipes.test_recipes import weights as golden
from tests.core.web_server import serving
from tests.distributed.models import Named
from tests.distributed.state.test_state_dicts import equal
from torch import nn

import mmfsdp
from mmfsdp.collective import steps
from mmfsdp.errors import CheckpointError, ConfigError, CorruptCheckpointError, StateDictError
from mmfsdp.saving.reading.initial_weights import left_initial
from mmfsdp.saving.reading.source import Source
from mmfsdp.testing import run_ranks

BLOCKS = {"kind": "module_class", "classes": "Layer"}
HYBRID = {"wrap": BLOCKS, "sharding": {"strategy": "HYBRID_SHARD", "shard_size": 2}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {"wrap": BLOCKS}),
    "2x2": (4, HYBRID),
    "2x2 on two hosts": (4, HYBRID),
    "replicate": (2, {"sharding": "NO_SHARD"}),
    "replicate on two hosts": (2, {"sharding": "NO_SHARD"}),
    "fsdp1": (2, {"engine": "fsdp1", "wrap": BLOCKS}),
}
COPIES = {"2x2": 2, "replicate": 2}  # each rank of one host reads what it holds


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)


class Decoder(nn.Module):
    """As the user's model names and shapes its weights; the head is tied to the embedding."""

    base_model_prefix = "model"

    def __init__(self, dim: int = 96, classes: int = 1001) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Embedding(classes, dim)})
        self.model["layers"] = nn.ModuleList(Layer(dim) for _ in range(2))
        self.head = nn.Linear(dim, classes, bias=False)
        self.head.weight = self.model["embed"].weight
        self.register_buffer("steps", torch.tensor(0))

    def reset_parameters(self) -> None:
        self.steps.zero_()


RECIPE = """
unmatched = "keep"

[[rules]]
[rules.rename]
"{a:.+}.attention.out.{b}" = "{a}.out.{b}"

[[rules]]
[rules.fuse]
parts = ["{a:.+}.attention.q.{b}", "{a}.attention.k.{b}", "{a}.attention.v.{b}"]
whole = "{a}.qkv.{b}"
"""


def pretrained(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a folder of two files whose names and shapes are another library's, and return what the model must have."""
    torch.manual_seed(3)
    model = Decoder()
    model.steps += 7
    want = model.state_dict()
    stored: dict[str, torch.Tensor] = {}
    for name, value in want.items():
        if ".qkv." in name:
            for part, each in zip("qkv", value.chunk(3), strict=True):
                stored[name.replace("qkv", f"attention.{part}")] = each.clone()
        elif name != "head.weight":
            stored[name.replace(".out.", ".attention.out.")] = value.clone()
    folder.mkdir()
    weight_map = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(stored)}
    for file in sorted({*weight_map.values()}):
        save_file({name: stored[name] for name in stored if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder.parent / "rules.toml").write_text(RECIPE)
    return folder, want


def sharded(settings: dict[str, Any], build: Any = Decoder) -> nn.Module:
    with torch.device("meta"):
        model = build()
    return mmfsdp.shard(model, {**settings, "init": {"device": "cpu"}})


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Count the bytes that this process reads from files; ``/proc/self/io`` would count what gloo receives, too."""
    counts: list[int] = []
    reads = {name: getattr(os, name) for name in ("pread", "preadv")}

    def pread(*args: Any) -> bytes:
        data: bytes = reads["pread"](*args)
        counts.append(len(data))
        return data

    def preadv(*args: Any) -> int:
        count: int = reads["preadv"](*args)
        counts.append(count)
        return count

    os.pread, os.preadv = pread, preadv
    try:
        yield counts
    finally:
        os.pread, os.preadv = reads["pread"], reads["preadv"]


def fill(rank: int, case: str, path: str, rules: str) -> tuple[dict[str, torch.Tensor], int, bool, bool]:
    model = sharded(CASES[case][1])
    kernel = steps.kernel_of
    if case.endswith("on two hosts"):
        steps.kernel_of = lambda: f"{kernel()} {rank % 2}"
    try:
        with counted_reads() as counts:
            report = mmfsdp.load_pretrained(model, path, rules)
    finally:
        steps.kernel_of = kernel
    tied = model.head.weight is model.model["embed"].weight
    return mmfsdp.model_state_dict(model, rank0_only=False), sum(counts), report.clean, tied


@pytest.mark.parametrize("case", CASES)
def test_equals_the_weights_and_reads_each_byte_once_per_host(tmp_path: Path, case: str) -> None:
    path, want = pretrained(tmp_path / "weights")
    size = sum(value.nbytes for name, value in want.items() if name != "head.weight")
    results = run_ranks(fill, CASES[case][0], case, str(path), str(tmp_path / "rules.toml"))
    for found, _, clean, tied in results:
        assert equal(found, want)
        assert clean
        assert tied or case == "fsdp1"
    read = sum(read for _, read, _, _ in results) / COPIES.get(case, 1)
    assert size <= read < 1.05 * size  # headers take some more


class Longer(Decoder):
    """Has a layer that the file lacks, and a head of its own."""

    def __init__(self) -> None:
        super().__init__(classes=1003)
        self.extra = nn.Linear(3, 3)


class Unlike(nn.Module):
    """Has no name in common with the file."""

    def __init__(self) -> None:
        super().__init__()
        self.only = Layer(4)


def misfits(rank: int, path: str, rules: str) -> list[str]:
    """What is said about weights that do not fit, and whether the model is unchanged."""
    found = []

    def said(build: Any, *args: Any, **settings: Any) -> None:
        model = sharded(CASES["fsdp2"][1], build)
        before = mmfsdp.model_state_dict(model, rank0_only=False)
        with pytest.raises((ConfigError, StateDictError)) as raised:
            mmfsdp.load_pretrained(model, path, *args, **settings)
        assert equal(mmfsdp.model_state_dict(model, rank0_only=False), before)
        found.append(str(raised.value))

    said(Decoder, "hf-llama-to-fusedd")
    said(Decoder, strict=True)
    said(Longer, rules)
    said(Decoder, strict=True, ignore_mismatched_sizes=True)
    said(Unlike)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model = sharded(CASES["fsdp2"][1], Longer)
        report = mmfsdp.load_pretrained(model, path, rules, ignore_mismatched_sizes=True)
    said_now = [str(warning.message) for warning in caught if "in all names" in str(warning.message)]
    assert len(said_now) == (rank == 0)
    weights = mmfsdp.model_state_dict(model, rank0_only=False)
    assert int(weights["steps"]) == 7
    return [*found, str(report), *said_now]


def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path) -> None:
    path, _ = pretrained(tmp_path / "weights")
    first, second = run_ranks(misfits, 2, str(path), str(tmp_path / "rules.toml"))
    assert all(said.partition(" [")[0] in heard for said, heard in zip(first, second, strict=False))
    recipe, strict, shapes, both, other, report, warning = first
    assert "Did you mean 'hf-llama-to-fused'" in recipe
    assert "missing: model.layers.0.qkv.weight" in strict
    assert "model.embed.weight: (1001, 96) in the state dict, (1003, 96) in the model" in shapes
    assert "Set 'ignore_mismatched_sizes'" in shapes
    assert "contradict" in both
    assert "No tensor of" in other
    assert "known_recipes()" in other
    assert report in warning
    assert "2 missing: extra.weight, extra.bias" in report


class Experts(nn.Module):
    """Three experts as a stack."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.zeros(3, dim, dim)) for _ in range(2))

    def reset_parameters(self) -> None:
        for weight in self.parameters():
            nn.init.zeros_(weight)


class Expert(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(dim), Experts(dim)


class Mixture(nn.Module):
    def __init__(self, depth: int = 2, dim: int = 8) -> None:
        super().__init__()
        self.tower = nn.ModuleDict({"layers": nn.ModuleList(Expert(dim) for _ in range(depth))})
        self.head = nn.Linear(dim, 2)


def initial_by_mistake(rank: int, folder: str) -> list[str]:
    found = []
    for file, depth in (("apart", 2), ("short", 3), ("renamed", 2)):
        model = sharded({"wrap": {"kind": "module_class", "classes": "Expert"}}, lambda depth=depth: Mixture(depth))
        before = mmfsdp.model_state_dict(model, rank0_only=False)
        with pytest.raises(StateDictError) as raised:
            mmfsdp.load_pretrained(model, f"{folder}/{file}.safetensors")
        assert equal(mmfsdp.model_state_dict(model, rank0_only=False), before)
        found.append(str(raised.value))
        with warnings.catch_warnings(action="ignore"):
            report = mmfsdp.load_pretrained(model, f"{folder}/{file}.safetensors", initial=["tower.layers.*"])
        assert report.missing
    return found


def test_layers_that_the_file_seems_to_hold_do_not_stay_initial(tmp_path: Path) -> None:
    stored = {name: torch.ones_like(value) for name, value in Mixture().state_dict().items()}
    apart = {name: value for name, value in stored.items() if ".experts." not in name}
    for name in {*stored} - {*apart}:
        layer, _, way = name.rpartition(".experts.")
        apart |= {f"{layer}.experts.{each}.{way}": torch.ones(8, 8) for each in range(3)}
    renamed = {name.replace("tower.", "model.tower."): value for name, value in stored.items()}
    for name, weights in {"apart": apart, "short": stored, "renamed": renamed}.items():
        save_file(weights, tmp_path / f"{name}.safetensors")
    first, second = run_ranks(initial_by_mistake, 2, str(tmp_path))
    assert all(said in heard for said, heard in zip(first, second, strict=True))
    for said, named, remedy in zip(
        first,
        (
            "4 parameters of Mixture: 'tower.layers.0.experts.",
            "4 parameters of Mixture: 'tower.layers.2.norm",
            "8 param",
        ),
        ("It has 'tower.layers.0.experts.0.", "Is a file of it missing? If", "It has 'model.tower.layers.0.experts."),
        strict=True,
    ):
        assert named in said
        assert remedy in said
    assert "add initial=['tower.layers.*.experts']." in first[0]


def advice(rank: int, folder: str) -> dict[str, list[str]]:
    """What is said of each pair's file when the other's model shall be filled."""
    found = {}
    for source, recipe, target in PAIRS:
        said = []
        for one, two, settings in (
            (source, target, {}),
            (target, source, {"strict": True}),
            (source, target, {"ignore_mismatched_sizes": True}),
        ):
            model = mmfsdp.shard(
                Named({name: torch.zeros(shape) for name, shape in shapes(two).items()}), {"init": {"device": "cpu"}}
            )
            caught = warnings.catch_warnings(action="error", category=UserWarning)
            with caught, pytest.raises((StateDictError, UserWarning)) as raised:
                mmfsdp.load_pretrained(model, f"{folder}/{one}/model.safetensors", **settings)
            said.append(str(raised.value))
        found[recipe] = said
    return found


@pytest.mark.exhaustive
def test_the_shipped_recipe_that_fits_is_named(tmp_path: Path) -> None:
    for name in {name for source, _, target in PAIRS for name in (source, target)}:
        (tmp_path / name).mkdir()
        save_file(golden(name), tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text('{"num_attention_heads": 4, "num_key_value_heads": 2}')
    [found] = run_ranks(advice, 1, str(tmp_path))
    for recipe, (there, back, any_shape) in found.items():
        assert f"Pass rules='{recipe}': this shipped recipe makes them." in there, (recipe, there)
        assert f"Pass rules='{recipe}', inverse=True: this" in back, (recipe, back)
        assert f"Pass rules='{recipe}': this" in any_shape, (recipe, any_shape)


MATRIX, VECTOR = (8, 8), (8,)
TAKEN = {f"layers.{layer}.{part}.weight": MATRIX for layer in range(2) for part in ("attn", "mlp")}
RIGHT: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    "a new head": ({"head.0.weight": MATRIX, "head.2.weight": MATRIX}, {"fc.0.weight": MATRIX, "fc.weight": MATRIX}),
    "adapters beside tables": ({"layers.0.attn.lora_A": (8, 2)}, {"layers.0.attn.rotary_emb.inv_freq": VECTOR}),
    "adapters beside masks": ({"layers.0.attn.lora_A": (8, 2)}, {"layers.0.attn.bias": (1, 1, 16, 16)}),
    "another tower": ({"vision.layers.0.attn.weight": MATRIX, "vision.layers.0.mlp.weight": MATRIX}, {}),
    "a tower of other shapes": ({"decoder.layers.0.attn.weight": (4, 4)}, {"text.layers.0.attn.weight": MATRIX}),
    "one convolution more": ({"neck.convs.2.conv.weight": MATRIX}, {"neck.convs.1.conv.weight": MATRIX}),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_new_may_stay_initial(case: str) -> None:
    new, spare = RIGHT[case]
    shapes = TAKEN | new
    weights: Any = {name: torch.empty(shape, device="meta") for name, shape in (TAKEN | spare).items()}
    assert left_initial([(name,) for name in shapes], shapes, weights) == []


def prefixed(rank: int, folder: str) -> list[bool]:
    found = []
    for file in ("module.safetensors", "base.safetensors"):
        model = sharded(CASES["fsdp2"][1])
        report = mmfsdp.load_pretrained(model, f"{folder}/{file}")
        weights = mmfsdp.model_state_dict(model, rank0_only=False)
        found += [bool(weights["model.embed.weight"].eq(weights["head.weight"]).all()), report.unexpected == ()]
        found.append(report.missing == (() if file == "module.safetensors" else ("steps",)))
        found.append(float(weights["model.embed.weight"].min()) == 5.0)
    return found


def test_prefixes_of_wrappers_and_base_models(tmp_path: Path) -> None:
    want = {name: torch.full_like(value, 5) for name, value in Decoder().state_dict().items() if name != "head.weight"}
    save_file({f"module.{name}": value for name, value in want.items()}, tmp_path / "module.safetensors")
    base = {name.removeprefix("model."): value for name, value in want.items() if name != "steps"}
    save_file(base, tmp_path / "base.safetensors")
    for found in run_ranks(prefixed, 2, str(tmp_path)):
        assert all(found), found


def damaged(rank: int, path: str) -> str:
    model = sharded(CASES["replicate"][1])
    with pytest.raises(CorruptCheckpointError) as raised:
        mmfsdp.load_pretrained(model, path)
    return str(raised.value)


def test_damage_that_one_rank_reads_is_named_on_all(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(Decoder().state_dict(), path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for message in run_ranks(damaged, 2, str(path)):
        assert "weights.pth is damaged: the CRC-32 of bytes" in message


def from_server(rank: int, url: str, names: list[str]) -> list[dict[str, torch.Tensor]]:
    found = []
    for name in names:
        model = sharded(CASES["replicate" if name.endswith("pth") else "fsdp2"][1])
        assert mmfsdp.load_pretrained(model, f"{url}/{name}").clean
        found.append(mmfsdp.model_state_dict(model, rank0_only=False))
    rest, report = mmfsdp.load_checkpoint(f"{url}/whole.pth", model)
    assert rest["epoch"] == 3
    assert report.clean
    return found


def saved(rank: int, folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    model = mmfsdp.shard(Decoder(), CASES["fsdp2"][1])
    mmfsdp.save_checkpoint(f"{folder}/dcp", model, extra={"epoch": 3})
    mmfsdp.save_checkpoint(f"{folder}/local", model, kind="local", extra={"epoch": 3})
    mmfsdp.save_checkpoint(f"{folder}/whole.pth", model, kind="full", extra={"epoch": 3})
    return mmfsdp.model_state_dict(model, rank0_only=False)


@pytest.mark.exhaustive
def test_from_a_server(tmp_path: Path) -> None:
    want = run_ranks(saved, 2, str(tmp_path))[0]
    names = ["dcp", "local", "whole.pth"]
    with serving(tmp_path) as server:
        for found in run_ranks(from_server, 2, server.url, names):
            assert all(equal(weights, want) for weights in found)


def changing(rank: int, url: str, folder: str) -> str:
    model = sharded(CASES["fsdp2"][1])
    replaced = Path(folder) / "whole.pth"
    prepare = Source.check_own

    def replace(*args: Any) -> None:
        if rank == 0:
            replaced.write_bytes(replaced.read_bytes()[::-1])
        prepare(*args)

    Source.check_own = replace
    try:
        with pytest.raises(CheckpointError) as raised:
            mmfsdp.load_pretrained(model, f"{url}/whole.pth")
    finally:
        Source.check_own = prepare
    return str(raised.value)


def test_a_file_that_changes_on_its_server_is_named_on_every_rank(tmp_path: Path) -> None:
    run_ranks(saved, 2, str(tmp_path))
    with serving(tmp_path) as server:
        for message in run_ranks(changing, 2, server.url, str(tmp_path)):
            assert "whole.pth changed" in message
