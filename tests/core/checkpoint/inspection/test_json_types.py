"""Each value of each JSON that is read is replaced by values of every other type: only errors of mmfsdp may follow."""

from __future__ import annotations

import copy
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.core.gguf.models import CONFIGS, weights
from tests.core.samples import write_samples

from mmfsdp.checkpoint import Conversion, apply_delta, checkpoint_delta, convert, merge_lora, open_layout, verify
from mmfsdp.errors import MmfsdpError

pytest.importorskip("numpy")

OTHERS: tuple[Any, ...] = (None, True, -1, 1.5, 10**30, "x", [], ["x"], [[7]], {"x": 1})
ADAPTERS = Path(__file__).parents[2] / "arithmetic" / "adapters"
TOKENIZERS = Path(__file__).parents[2] / "gguf" / "tokenizers"
MOST = 10  # of the entries of one object or list; the others are like these


def changed(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of a value with one part replaced, and where; and objects with one key left out."""
    places: list[tuple[Any, ...]] = [()]
    for place in places:  # which grows
        found = at(content, place)
        if isinstance(found, dict | list):
            places += [(*place, key) for key in [*(found if isinstance(found, dict) else range(len(found)))][:MOST]]
    for place in places:
        for other in OTHERS:
            if not place:
                yield f"the whole = {other!r}", other
                continue
            changed = copy.deepcopy(content)
            at(changed, place[:-1])[place[-1]] = other
            yield f"{place} = {other!r}", changed
        if place and isinstance(place[-1], str):
            changed = copy.deepcopy(content)
            del at(changed, place[:-1])[place[-1]]
            yield f"{place} left out", changed


def at(content: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        content = content[key]
    return content


Attempt = Callable[..., None]


@pytest.fixture
def attempt() -> Iterator[Attempt]:
    """Call functions that may raise errors of mmfsdp only; what else they raise fails the test in the end."""
    wrong: list[str] = []

    def attempt(text: str, *calls: Callable[[], object]) -> None:
        for call in calls:
            try:
                call()
            except MmfsdpError:
                pass
            except Exception as error:
                wrong.append(f"{text}: {error!r}")

    yield attempt
    assert not wrong, "\n".join(wrong[:50])


def with_header(path: Path, header: Any) -> None:
    """Give a safetensors file another header."""
    raw = path.read_bytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + int.from_bytes(raw[:8], "little") :])


def header_of(path: Path) -> Any:
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_samples(tmp_path_factory.mktemp("samples"))


@pytest.mark.sample("plain.safetensors")
@pytest.mark.parametrize("name", ["plain.safetensors", "ours.safetensors"])
def test_headers_of_safetensors(name: str, samples: dict[str, Path], tmp_path: Path, attempt: Attempt) -> None:
    path = Path(shutil.copy(samples[name], tmp_path / name))
    for text, header in changed(header_of(path)):
        shutil.copy(samples[name], path)
        with_header(path, header)
        attempt(text, lambda: open_layout(path), lambda: verify(path))


def test_boxes_of_ranks(samples: dict[str, Path], tmp_path: Path, attempt: Attempt) -> None:
    folder = Path(shutil.copytree(samples["safetensors_ranks"], tmp_path / "ranks"))
    file = next(folder.glob("*.safetensors"))
    header = header_of(file)
    for text, info in changed(json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])):
        given = copy.deepcopy(header)
        given["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(info)
        with_header(file, given)
        attempt(text, lambda: verify(folder), lambda: open_layout(folder))


@pytest.mark.sample("index-model.safetensors.index.json")
@pytest.mark.parametrize(("name", "file"), [("index", "model.safetensors.index.json"), ("dcp", "manifest.json")])
def test_indexes_and_manifests(
    name: str, file: str, samples: dict[str, Path], tmp_path: Path, attempt: Attempt
) -> None:
    folder = Path(shutil.copytree(samples[name], tmp_path / name))
    for text, content in changed(json.loads((folder / file).read_text())):
        (folder / file).write_text(json.dumps(content))
        attempt(text, lambda: open_layout(folder), lambda: verify(folder))


@pytest.mark.parametrize("case", ["plain", "rslora"])
def test_settings_of_adapters(case: str, tmp_path: Path, attempt: Attempt) -> None:
    folder = Path(shutil.copytree(ADAPTERS / case, tmp_path / case))
    config = folder / "adapter_config.json"
    known = json.loads(config.read_text()) | {"rank_pattern": {"a.b": 3}, "alpha_pattern": {"c": 1.0}}
    for text, content in changed(known):
        config.write_text(json.dumps(content))
        attempt(text, lambda: merge_lora(folder / "base.safetensors", folder, tmp_path / "out.pth", dry_run=True))


@pytest.mark.exhaustive
def test_settings_in_files_of_diffusers(tmp_path: Path, attempt: Attempt) -> None:
    folder = Path(shutil.copytree(ADAPTERS / "diffusers" / "settings", tmp_path / "settings"))
    file = folder / "pytorch_lora_weights.safetensors"
    header = header_of(file)
    for text, content in changed(json.loads(header["__metadata__"]["lora_adapter_metadata"])):
        given = copy.deepcopy(header)
        given["__metadata__"]["lora_adapter_metadata"] = json.dumps(content)
        with_header(file, given)
        attempt(text, lambda: merge_lora(ADAPTERS / "diffusers/unet", folder, tmp_path / "out", to="hf", dry_run=True))


def test_tables_of_deltas(tmp_path: Path, attempt: Attempt) -> None:
    base, after = tmp_path / "base.safetensors", tmp_path / "after.safetensors"
    save_file({"w": torch.ones(4), "v": torch.zeros(3)}, base)
    save_file({"w": torch.zeros(4), "v": torch.zeros(3)}, after)
    checkpoint_delta(base, after, tmp_path / "delta.safetensors")
    raw = load_file(tmp_path / "delta.safetensors")
    [table] = [name for name, tensor in raw.items() if tensor.dtype == torch.uint8 and b"version" in bytes(tensor)]
    for text, content in changed(json.loads(bytes(raw[table]))):
        raw[table] = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        save_file(raw, tmp_path / "changed.safetensors")
        attempt(text, lambda: apply_delta(base, tmp_path / "changed.safetensors", tmp_path / "out.pth", dry_run=True))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_configs_of_models(name: str, tmp_path: Path, attempt: Attempt) -> None:
    (folder := tmp_path / "model").mkdir()
    save_file(weights(name), folder / "model.safetensors")
    for text, content in changed(CONFIGS[name] | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}):
        (folder / "config.json").write_text(json.dumps(content))
        attempt(
            text,
            lambda: convert(folder, tmp_path / "out.gguf", dry_run=True),
            lambda: convert(folder, tmp_path / "out", to="hf", dry_run=True),
        )


@pytest.mark.sample(
    "tokenizer_config.json-qwen2",
    "tokenizer_config.json-llama3",
    "special_tokens_map.json-qwen2",
    "special_tokens_map.json-llama3",
)
@pytest.mark.parametrize("name", ["llama3", "qwen2"])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_tokenizers(name: str, file: str, tmp_path: Path, attempt: Attempt) -> None:
    model = "llama" if name == "llama3" else "qwen2"
    folder = Path(shutil.copytree(TOKENIZERS / name, tmp_path / "model"))
    if not (folder / file).is_file():
        pytest.skip(f"{name} has no {file}")
    rows = 400
    save_file(weights(model, vocab_size=rows), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS[model] | {"vocab_size": rows}))
    known = json.loads((folder / file).read_text())
    for text, content in changed(cut(known)):
        (folder / file).write_text(json.dumps(content))
        attempt(text, lambda: convert(folder, tmp_path / "out.gguf", dry_run=True))


def cut(content: Any) -> Any:
    """Shorten long lists and objects: their entries are alike."""
    if isinstance(content, dict):
        return {key: cut(value) for key, value in [*content.items()][:8]}
    return [cut(value) for value in content[:3]] if isinstance(content, list) else content


def test_settings_of_conversions(tmp_path: Path, attempt: Attempt) -> None:
    known = Conversion(include=["a.*"], rename=[("a", "b")], dtype={"a": "float32"}).to_dict()
    for text, content in changed(known):
        attempt(text, lambda content=content: Conversion.from_dict(content))
