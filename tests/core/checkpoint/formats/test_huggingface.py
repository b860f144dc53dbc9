"""Hugging Face folders: weights under the model's names, tied ones once, the files beside them, all or nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmfsdp.checkpoint import TargetExistsError, convert, diff, open_layout, verify
from mmfsdp.errors import CheckpointError, CheckpointNotFoundError, ConfigError, FormatError

EMBEDDING = "transformer.wte.weight"


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {EMBEDDING: torch.randn(6, 4, generator=generator), "transformer.h.0.mlp.weight": torch.ones(4, 4)}
    return {**state, "lm_head.weight": state[EMBEDDING]}


def folder(path: Path, *, with_weights: bool = False, **config: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "gpt2", **config}))
    (path / "tokenizer.json").write_text("{}")
    (path / "merges.txt").symlink_to(path / "tokenizer.json")  # the hub's cache holds links
    (path / ".gitattributes").write_text("")
    (path / "training_args.bin").write_bytes(b"")
    if with_weights:
        save_file({name: value for name, value in weights().items() if "head" not in name}, path / "model.safetensors")
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save({"state_dict": weights(), "optimizer": {"state": {}}}, tmp_path / "epoch_1.pth")
    return tmp_path / "epoch_1.pth"


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_a_folder_of_torch_save(tmp_path: Path) -> None:
    """As transformers wrote it before safetensors, with its config; as accelerate writes it, beside other files."""
    source = folder(tmp_path / "source")
    torch.save(weights(), source / "pytorch_model.bin")
    torch.save({"state": {}}, source / "optimizer.bin")
    assert open_layout(source).format == "torch_index"
    assert verify(source).ok
    convert(source, tmp_path / "out", to="hf", verify_output=True)
    convert(source, tmp_path / "dcp", to="dcp", ranks=2)
    for made in (source / "pytorch_model.bin", tmp_path / "dcp"):
        assert diff(source, made).same, made
    assert {"config.json", "tokenizer.json"} <= {*names(tmp_path / "out")}
    save_file({"other": torch.ones(1)}, source / "model.safetensors")  # preferred, as by transformers
    assert open_layout(source).format == "huggingface"


def test_a_folder_of_checkpoints_names_them(source: Path, tmp_path: Path) -> None:
    """As accelerate's save_state leaves it: weights and optimizer in directories of their own."""
    (tmp_path / "state" / "scheduler").mkdir(parents=True)
    convert(source, tmp_path / "state" / "pytorch_model_fsdp_0", to="dcp")
    with pytest.raises(CheckpointNotFoundError, match=r"Open a checkpoint within it: 'pytorch_model_fsdp_0'\."):
        open_layout(tmp_path / "state")


def test_diffusers_has_names_of_its_own(source: Path, tmp_path: Path) -> None:
    """Checked with `from_pretrained` of diffusers 0.42.1, which loads both folders."""
    like = folder(tmp_path / "like", _diffusers_version="0.42.1", tie_word_embeddings=False)
    convert(source, tmp_path / "one", to="hf", like=like)
    assert "diffusion_pytorch_model.safetensors" in names(tmp_path / "one")
    convert(source, tmp_path / "two", to="hf", like=like, max_shard_size=100)
    shards = [name for name in names(tmp_path / "two") if name.startswith("diffusion")]
    assert shards == [
        *(f"diffusion_pytorch_model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)),
        "diffusion_pytorch_model.safetensors.index.json",
    ]
    for made in ("one", "two"):
        save_file({"other": torch.ones(1)}, tmp_path / made / "diffusion_pytorch_model.fp16.safetensors")
        assert open_layout(tmp_path / made).format == "huggingface"
        assert diff(source, tmp_path / made, keep="model").same
    (tmp_path / "one/diffusion_pytorch_model.safetensors").rename(like / "diffusion_pytorch_model.safetensors")
    with pytest.raises(ConfigError, match=r"it lacks 'transformer\.h\.0\.mlp\.weight'"):
        convert(source, tmp_path / "three", to="hf", like=like, exclude="**.mlp.weight")


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("by_copy", [False, True])
def test_one_file_with_tied_weights_once(source: Path, tmp_path: Path, by_copy: bool, with_weights: bool) -> None:
    if by_copy:  # safetensors cannot tie: both are there
        convert(source, tmp_path / "dcp", to="dcp", keep="model", ranks=2)
        source = tmp_path / "dcp"
    like = folder(tmp_path / "like", with_weights=with_weights)
    report = convert(source, tmp_path / "out", to="hf", like=like, verify_output=True)
    assert names(tmp_path / "out") == [
        "config.json",
        "manifest.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert not (tmp_path / "out/merges.txt").is_symlink()
    assert report.notes == (f"lm_head.weight is tied to {EMBEDDING} and written once",)
    assert (report.tensors, report.bytes) == (2, 160)
    found = load_file(tmp_path / "out/model.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in weights().items() if name != "lm_head.weight"
    }
    assert verify(tmp_path / "out").ok


def test_several_files_and_their_index(source: Path, tmp_path: Path) -> None:
    like = folder(tmp_path / "like")
    convert(source, tmp_path / "out", to="hf", like=like, max_shard_size="100B")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert index == {
        "metadata": {"total_size": 160},
        "weight_map": {EMBEDDING: files[0], "transformer.h.0.mlp.weight": files[1]},
    }
    assert {*files, "config.json"} <= {*names(tmp_path / "out")}
    assert open_layout(tmp_path / "out", format="hf").tensors.keys() == index["weight_map"].keys()


def test_weights_that_are_not_tied_stay(source: Path, tmp_path: Path) -> None:
    like = folder(tmp_path / "like", tie_word_embeddings=False)
    assert convert(source, tmp_path / "out", to="hf", like=like).tensors == 3
    state = weights()
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    torch.save(state, source)
    assert convert(source, tmp_path / "two", to="hf", like=folder(tmp_path / "silent")).tensors == 3
    with pytest.raises(ConfigError, match=rf"ties 'lm_head\.weight' to '{EMBEDDING}', but they differ.*to false"):
        convert(source, tmp_path / "three", to="hf", like=folder(tmp_path / "tied", tie_word_embeddings=True))
    assert not (tmp_path / "three").exists()


def test_a_folder_keeps_its_files(source: Path, tmp_path: Path) -> None:
    like = folder(tmp_path / "like", dtype="float32")
    convert(source, tmp_path / "out", to="hf", like=like, max_shard_size="100B")
    report = convert(tmp_path / "out", tmp_path / "half", to="hf", dtype="bf16")
    assert names(tmp_path / "half") == [
        "config.json",
        "manifest.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert report.notes == ("config.json says float32, and the weights are bfloat16: transformers may cast them",)

    (tmp_path / "out/README.md").write_text("mine")
    (tmp_path / "out/.gitattributes").write_text("mine")
    with pytest.raises(TargetExistsError):
        convert(source, tmp_path / "out", to="hf")
    convert(source, tmp_path / "out", to="hf", overwrite=True, fsync=False)  # its own config.json says which model
    kept = [".gitattributes", "README.md", "config.json", "manifest.json", "merges.txt", "model.safetensors"]
    assert names(tmp_path / "out") == [*kept, "tokenizer.json"]
    (tmp_path / "out/onnx").mkdir()
    with pytest.raises(ConfigError, match="it also holds the directory 'onnx'"):
        convert(source, tmp_path / "out", to="hf", overwrite=True)
    shutil.rmtree(tmp_path / "out/onnx")
    with pytest.raises(CheckpointError, match=r"'\.gitattributes', which is not part of a checkpoint"):
        convert(source, tmp_path / "out", max_shard_size="1MB", overwrite=True)


def test_a_folder_gives_no_files_away_that_are_not_its_own(source: Path, tmp_path: Path) -> None:
    like = folder(tmp_path / "like", dtype="float32")
    (tmp_path / "secret").write_text("hush")
    (like / "special_tokens_map.json").symlink_to("../secret")
    with pytest.raises(FormatError, match=r"'special_tokens_map\.json', which is a link out of its directory\. If you"):
        convert(source, tmp_path / "out", to="hf", like=like)
    (like / "special_tokens_map.json").unlink()
    (like / "special_tokens_map.json").symlink_to("tokenizer.json")
    convert(source, tmp_path / "out", to="hf", like=like)
    assert (tmp_path / "out/special_tokens_map.json").read_text() == (like / "tokenizer.json").read_text()


def test_a_recipe_and_its_numbers(tmp_path: Path) -> None:
    like = folder(tmp_path / "like", num_attention_heads=2, num_key_value_heads=1)
    shapes = {"q": (8, 4), "k": (4, 4), "v": (4, 4)}
    state = {f"model.layers.0.self_attn.{x}_proj.weight": torch.randn(shape) for x, shape in shapes.items()}
    state |= {f"model.layers.0.mlp.{x}_proj.weight": torch.randn(6, 4) for x in ("gate", "up")}
    torch.save(state, tmp_path / "a.pth")
    convert(tmp_path / "a.pth", tmp_path / "out", to="hf", like=like, recipe="hf-llama-to-fused")
    fused = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(fused["model.layers.0.self_attn.qkv_proj.weight"], torch.cat([*state.values()][:3]))


@pytest.mark.parametrize("where", ["checkpoint", "checkpoint/ranks/huggingface"])
def test_a_config_that_lies_near_is_named(where: str, source: Path, tmp_path: Path) -> None:
    """As the Trainer of transformers leaves it above the ranks' files, and verl in a folder beside them."""
    ranks = tmp_path / "checkpoint/ranks"
    ranks.parent.mkdir()
    convert(source, ranks, to="local", ranks=2)
    like = tmp_path / where
    shutil.copytree(folder(tmp_path / "made"), like, dirs_exist_ok=True)
    with pytest.raises(ConfigError, match=f"Give a folder of the same model as 'like', such as {str(like)!r};"):
        convert(ranks, tmp_path / "out", to="hf")
    convert(ranks, tmp_path / "out", to="hf", like=like)
    assert (tmp_path / "out/config.json").is_file()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "needs a config.json, and there is none in"),
        ({"like": "nowhere"}, "'like' is 'nowhere', which holds no config.json"),
        ({"like": "full", "exclude": ["**.mlp.*"]}, "it lacks 'transformer.h.0.mlp.weight'"),
        ({"like": "full", "strip_prefix": "transformer."}, "it has 'wte.weight', 'h.0.mlp.weight'"),
        ({"like": "full", "rename": [("mlp", "mpl")]}, "Did you mean 'transformer.h.0.mlp.weight'?"),
        ({"like": "other"}, "'transformer.h.0.mlp.weight' has shape [4, 4] (expected [2, 4])"),
        ({"like": "plain", "keep": "all"}, "holds the weights; it cannot be combined with 'keep' 'all'"),
        ({"like": "plain", "to": "pth"}, "'like' applies only to the format 'huggingface' or 'gguf', not to 'pth'"),
        ({"like": "broken"}, "config.json is not valid JSON"),
    ],
)
def test_what_does_not_fit(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder(Path("plain"))
    folder(Path("full"), with_weights=True)
    state = load_file("full/model.safetensors")
    save_file({**state, "transformer.h.0.mlp.weight": torch.ones(2, 4)}, folder(Path("other")) / "model.safetensors")
    (folder(Path("broken")) / "config.json").write_text("{")
    before = names(tmp_path)
    with pytest.raises(ConfigError) as caught:
        convert(source, "out", **{"to": "hf", **settings})
    assert said in str(caught.value)
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"vocab_size": 6, "n_embd": 4, "n_layer": 1}, ""),
        ({"vocab_size": 7}, "'transformer.wte.weight' has shape [6, 4], but vocab_size is 7"),
        ({"n_embd": 5}, "'transformer.wte.weight' has shape [6, 4], but n_embd is 5"),
        ({"n_layer": 2}, "layer 1 is missing, but n_layer is 2"),
        ({"n_layer": 0}, "there is a layer 0, but n_layer is 0"),
        ({"n_layer": 2, "model_type": "their_own"}, ""),
        ({"n_layer": 2, "model_type": None, "vocab_size": "many"}, ""),
    ],
)
def test_a_config_of_another_size(config: dict[str, Any], said: str, source: Path, tmp_path: Path) -> None:
    like = folder(tmp_path / "like", **config)
    if not said:
        convert(source, tmp_path / "out", to="hf", like=like)
        return
    with pytest.raises(ConfigError) as caught:
        convert(source, tmp_path / "out", to="hf", like=like)
    assert f"{said}. Give the folder of the model that was trained as 'like', or change its config.json" in str(
        caught.value
    )
    assert not (tmp_path / "out").exists()


def test_codes_have_other_sizes_than_the_config(tmp_path: Path) -> None:
    """Two 4-bit codes to a byte, in a folder that keeps its config."""
    like = tmp_path / "like"
    like.mkdir()
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1}
    (like / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 6, **sizes}))
    packed = {"model.layers.0.mlp.up_proj.weight": torch.ones(48, 1, dtype=torch.uint8)}
    save_file({**packed, "model.embed_tokens.weight": torch.ones(6, 8)}, like / "model.safetensors")
    convert(like, tmp_path / "out", to="hf")
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(13, 8)}, tmp_path / "wrong.safetensors")
    (like / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has shape \[13, 8\], but intermediate_size is 12"):
        convert(tmp_path / "wrong.safetensors", tmp_path / "no", to="hf", like=like)


def test_a_prefix_that_is_too_much(tmp_path: Path) -> None:
    folder(tmp_path / "full", with_weights=True)
    state = load_file(tmp_path / "full/model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in state.items()}, tmp_path / "in.safetensors")
    settings = {"to": "hf", "like": tmp_path / "full"}
    with pytest.raises(ConfigError, match=r"Most names match without 'model\.': set 'strip_prefix' to it\."):
        convert(tmp_path / "in.safetensors", tmp_path / "out", **settings)
    convert(tmp_path / "in.safetensors", tmp_path / "out", strip_prefix="model.", **settings)
