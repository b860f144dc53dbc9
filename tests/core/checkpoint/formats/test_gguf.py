"""GGUF files: the bytes are those of llama.cpp's own package, from any source; the rest is refused by name."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.core.gguf.models import CONFIGS, weights
from tests.core.web_server import serving

from mmfsdp.checkpoint import average_checkpoints, convert, open_layout
from mmfsdp.errors import CheckpointError, ConfigError, CorruptCheckpointError, FormatError

np = pytest.importorskip("numpy")

GOLDEN = Path(__file__).parents[2] / "gguf"

SETTINGS: dict[str, dict[str, str]] = {
    "llama-f16": {"dtype": "float16"},
    "llama-bf16": {"dtype": "bfloat16"},
    "llama-q8_0": {"quantize": "q8_0"},
    "qwen2-q8_0": {"quantize": "q8_0"},
}
SIMPLE = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BYTES = {0: 4, 1: 2, 30: 2, 8: 34 / 32}  # of an element, by ggml's type


class Parsed:
    """A GGUF file, read as its specification says: its keys, and type, dimensions and bytes of each tensor."""

    def __init__(self, path: Path) -> None:
        self.data, self.at = path.read_bytes(), 0
        magic, version, tensors, keys = self.take("<4sIQQ")
        assert (magic, version) == (b"GGUF", 3)
        self.keys = {}
        for _ in range(keys):
            key = self.text()
            self.keys[key] = self.value(self.take("<I")[0])
        infos = {}
        for _ in range(tensors):
            name = self.text()
            dims = self.take(f"<{self.take('<I')[0]}Q")
            infos[name] = (dims, *self.take("<IQ"))
        begin = -(-self.at // 32) * 32
        self.tensors: dict[str, tuple[int, tuple[int, ...], bytes]] = {}
        for name, (dims, kind, offset) in infos.items():
            assert offset % 32 == 0
            data = self.data[begin + offset :][: int(math.prod(dims) * BYTES[kind])]
            self.tensors[name] = (kind, dims, data)

    def take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def text(self) -> str:
        [size] = self.take("<Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> tuple[int, Any]:
        if kind == 8:
            return kind, self.text()
        if kind == 9:
            inner, count = self.take("<IQ")
            return kind, [self.value(inner) for _ in range(count)]
        return kind, self.take(f"<{SIMPLE[kind]}")[0]


def folder(parent: Path, name: str, *, vocabulary: bool = True, **changes: Any) -> Path:
    """A folder of a model as transformers writes it, with a tokenizer from llama.cpp's package."""
    (made := parent / name).mkdir()
    (made / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    save_file(weights(name), made / "model.safetensors")
    if vocabulary:
        (made / "vocab.gguf").write_bytes((GOLDEN / f"{name}-q8_0.gguf").read_bytes())
    return made


@pytest.mark.parametrize("golden", SETTINGS)
def test_keys_and_tensors_are_those_of_the_package_gguf(golden: str, tmp_path: Path) -> None:
    source = folder(tmp_path, golden.partition("-")[0])
    report = convert(source, tmp_path / "out.gguf", **SETTINGS[golden])
    found, expected = Parsed(tmp_path / "out.gguf"), Parsed(GOLDEN / f"{golden}.gguf")
    assert found.keys == expected.keys
    assert found.tensors == expected.tensors
    assert len(found.data) == len(expected.data)
    assert (report.format, report.tensors, report.overflowed) == ("gguf", len(expected.tensors), {})
    if golden == "llama-q8_0":
        assert report.notes == ("'blk.0.ffn_down.weight' stay float16: their rows are no multiple of 32",)
    else:
        assert report.notes == ()


def test_a_sharded_source_gives_the_same_file(tmp_path: Path) -> None:
    source = folder(tmp_path, "llama")
    convert(source, tmp_path / "dcp", to="dcp", ranks=3)
    convert(source, tmp_path / "whole.gguf", quantize="q8_0")
    convert(tmp_path / "dcp", tmp_path / "shards.gguf", like=source, quantize="q8_0", jobs=2)
    assert (tmp_path / "shards.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_vectors_are_float32_as_stored_whatever_the_matrices_become(tmp_path: Path) -> None:
    source = folder(tmp_path, "llama", vocabulary=False)
    report = convert(source, tmp_path / "out.gguf", dtype={"blk.*.attn_*.weight": "bf16", "**": "fp16"})
    found = Parsed(tmp_path / "out.gguf").tensors
    kinds = {name: kind for name, (kind, _, _) in found.items()}
    assert {kinds["blk.0.attn_q.weight"], kinds["blk.0.attn_output.weight"]} == {30}
    assert {kinds["blk.0.attn_norm.weight"], kinds["output_norm.weight"], kinds["blk.0.attn_v.bias"]} == {0}
    assert kinds["blk.0.ffn_up.weight"] == 1
    assert found["output_norm.weight"][2] == weights("llama")["model.norm.weight"].numpy().tobytes()
    assert "output_norm.weight" not in report.casts
    assert "no tokenizer is written" in report.notes[-1]


def test_weights_in_half_precision_keep_theirs(tmp_path: Path) -> None:
    source = folder(tmp_path, "llama")
    given = {name: tensor.bfloat16() for name, tensor in weights("llama").items()}
    save_file(given, source / "model.safetensors")
    convert(source, tmp_path / "out.gguf")
    found = Parsed(tmp_path / "out.gguf")
    assert found.keys["general.file_type"] == (4, 32)
    kind, dims, data = found.tensors["output.weight"]
    assert (kind, dims) == (30, (32, 24))
    assert data == given["lm_head.weight"].view(torch.uint8).numpy().tobytes()
    assert found.tensors["output_norm.weight"][2] == given["model.norm.weight"].float().numpy().tobytes()


def test_tied_heads_are_left_out_if_they_are_equal(tmp_path: Path) -> None:
    source = folder(tmp_path, "qwen2")
    own = weights("qwen2")
    torch.save({**own, "lm_head.weight": own["model.embed_tokens.weight"]}, tmp_path / "tied.pth")
    report = convert(tmp_path / "tied.pth", tmp_path / "out.gguf", like=source, quantize="q8_0")
    assert Parsed(tmp_path / "out.gguf").tensors == Parsed(GOLDEN / "qwen2-q8_0.gguf").tensors
    assert report.notes == ("lm_head.weight is tied to model.embed_tokens.weight and written once",)
    save_file({**own, "lm_head.weight": own["model.embed_tokens.weight"] + 1}, source / "model.safetensors")
    with pytest.raises(ConfigError, match=r"ties 'lm_head.weight' to 'model.embed_tokens.weight', but they differ"):
        convert(source, tmp_path / "other.gguf")


@pytest.mark.parametrize(("name", "tokenizer"), [("llama", "llama3"), ("qwen2", "qwen2"), ("llama", "llama2")])
def test_tokenizers_are_translated_as_the_package_gguf_does(name: str, tokenizer: str, tmp_path: Path) -> None:
    given = GOLDEN / "tokenizers" / tokenizer
    source = folder(tmp_path, name, vocabulary=False, **json.loads((given / "config.json").read_text()))
    size = json.loads((given / "config.json").read_text())["vocab_size"]
    rows = {key: torch.zeros(size, 32) for key in weights(name) if key.startswith(("model.embed", "lm_head"))}
    save_file({**weights(name), **rows}, source / "model.safetensors")
    for file in (*given.glob("*token*.json"), *given.glob("*.model")):
        (source / file.name).write_bytes(file.read_bytes())
    assert convert(source, tmp_path / "out.gguf").notes == ()
    found = Parsed(tmp_path / "out.gguf").keys
    assert {key: found[key] for key in found if key.startswith("tokenizer.")} == {
        key: value for key, value in Parsed(given / "vocab.gguf").keys.items() if key.startswith("tokenizer.")
    }


def test_other_tokenizers_are_left_out_or_refused(tmp_path: Path) -> None:
    source = folder(tmp_path, "qwen2", vocabulary=False)
    content = json.loads((GOLDEN / "tokenizers/qwen2/tokenizer.json").read_text())

    def written(**changes: Any) -> tuple[str, ...]:
        (source / "tokenizer.json").write_text(json.dumps(content | changes))
        return convert(source, tmp_path / "out.gguf", overwrite=True, dry_run=True).notes

    small = content["model"] | {"vocab": {"a": 0, "b": 23}, "merges": ["a b"]}
    assert written(model=small, added_tokens=[]) == ()
    for changes in (
        {"model": small | {"ignore_merges": True}},
        {"model": small | {"type": "Unigram"}},
        {"pre_tokenizer": content["pre_tokenizer"]["pretokenizers"][1]},
        {"normalizer": {"type": "Lowercase"}},
    ):
        assert "no tokenizer is written, as tokenizer.json is not that of Llama 3 or Qwen2" in written(**changes)[-1]
    model = (GOLDEN / "tokenizers/llama2/tokenizer.model").read_bytes()
    (source / "tokenizer.model").write_bytes(model)
    with pytest.raises(ConfigError, match=r"tokenizer\.model of qwen2 has a token 329, and vocab_size"):
        written(model=small, added_tokens=[])
    for damaged in (
        b"IQ== 0\nIg== 1\n",
        model[:-1],
        model.replace(b"\x0a\x05<unk>", b"\x0a\x05<un\xff>"),
        b"\xff" * 12,
    ):
        (source / "tokenizer.model").write_bytes(damaged)  # such as that of Meta's Llama 3, which is text
        assert written(model=small, added_tokens=[]) == ()
    (source / "tokenizer.model").unlink()
    with pytest.raises(ConfigError, match=r"has a token 303, and vocab_size of config\.json is 24"):
        written()
    with pytest.raises(ConfigError, match=r"The tokenizer of qwen2 is malformed: KeyError: 'merges'"):
        written(model={"type": "BPE", "vocab": {"a": 0}}, added_tokens=[])


def test_what_is_computed_on_the_way_gives_the_same_file_as_in_two_steps(tmp_path: Path) -> None:
    """An average, whose rows of q and k are reordered while it is written."""
    source = folder(tmp_path, "llama")
    save_file({name: tensor * 3 for name, tensor in weights("llama").items()}, tmp_path / "b.safetensors")
    both = [source, tmp_path / "b.safetensors"]
    average_checkpoints(both, tmp_path / "mean.safetensors")
    convert(tmp_path / "mean.safetensors", tmp_path / "two.gguf", like=source, quantize="q8_0")
    average_checkpoints(both, tmp_path / "one.gguf", like=source, quantize="q8_0")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


@pytest.mark.parametrize("kind", ["fp8", "fp8_tensor", "fp8_channel"])
def test_codes_of_float8_become_blocks_in_one_step(kind: str, tmp_path: Path) -> None:
    """Nothing says that they are to be restored: a GGUF file cannot hold them. The file is that of two steps."""
    source = folder(tmp_path, "llama", intermediate_size=64)
    given = {name: tensor.bfloat16() for name, tensor in weights("llama", intermediate_size=64).items()}
    save_file(given, source / "model.safetensors")
    (tmp_path / "codes").mkdir()
    (tmp_path / "numbers").mkdir()
    (codes, numbers) = (tmp_path / "codes" / "model", tmp_path / "numbers" / "model")  # the name is in the file
    convert(source, codes, to="hf", quantize=kind)
    convert(codes, numbers, to="hf", quantize="none")
    for number, settings in enumerate(({"quantize": "q8_0"}, {"quantize": "q8_0", "dtype": "fp16"}, {"dtype": "bf16"})):
        one, two = tmp_path / f"one{number}.gguf", tmp_path / f"two{number}.gguf"
        report = convert(codes, one, **settings)
        convert(numbers, two, **settings)
        assert one.read_bytes() == two.read_bytes()
        assert report.notes[0] == "7 weights were codes of 8 bits, and are restored"
    types = {name: tensor[0] for name, tensor in Parsed(tmp_path / "one0.gguf").tensors.items()}
    assert {types[f"blk.0.{name}.weight"] for name in ("attn_q", "ffn_down", "ffn_up")} == {8}
    # A sharded source, whose pieces begin within blocks.
    convert(codes, tmp_path / "dcp", to="dcp", ranks=3)
    convert(tmp_path / "dcp", tmp_path / "sharded.gguf", like=codes, quantize="q8_0")
    assert (tmp_path / "sharded.gguf").read_bytes() == (tmp_path / "one0.gguf").read_bytes()
    # An average of codes and numbers, which is restored first without being told, too.
    average_checkpoints([codes, source], tmp_path / "mean.gguf", like=codes, quantize="q8_0")
    average_checkpoints([numbers, source], tmp_path / "mean.safetensors")
    convert(tmp_path / "mean.safetensors", tmp_path / "mean2.gguf", like=codes, quantize="q8_0")
    assert (tmp_path / "mean.gguf").read_bytes() == (tmp_path / "mean2.gguf").read_bytes()
    # Weights trained from such a folder are numbers, though its config still says otherwise.
    convert(source, tmp_path / "trained.gguf", like=codes, quantize="q8_0")
    convert(source, tmp_path / "plain.gguf", quantize="q8_0")
    assert Parsed(tmp_path / "trained.gguf").tensors == Parsed(tmp_path / "plain.gguf").tensors


def test_the_frequencies_of_llama_3_are_those_of_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    source = folder(tmp_path, "llama", rope_scaling={**rope, "original_max_position_embeddings": 64})
    convert(source, tmp_path / "out.gguf", dtype="float16")
    kind, dims, data = Parsed(tmp_path / "out.gguf").tensors["rope_freqs.weight"]
    assert (kind, dims) == (0, (8,))
    frequencies = 1 / 500000.0 ** (np.arange(0, 16, 2) / 16)
    lengths = 2 * math.pi / frequencies
    smooth = (64 / lengths - 1) / (4 - 1)
    scaled = np.where(lengths > 64, frequencies / 8, (1 - smooth) * frequencies / 8 + smooth * frequencies)
    scaled = np.where(lengths < 16, frequencies, scaled)
    assert len({*scaled / frequencies}) > 2
    np.testing.assert_allclose(np.frombuffer(data, "<f4"), frequencies / scaled, rtol=1e-7)


def test_linear_scaling_is_in_the_keys(tmp_path: Path) -> None:
    source = folder(tmp_path, "llama", rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 2.0})
    convert(source, tmp_path / "out.gguf")
    keys = Parsed(tmp_path / "out.gguf").keys
    assert keys["llama.rope.scaling.type"] == (8, "linear")
    assert keys["llama.rope.scaling.factor"] == (6, 2.0)
    assert keys["llama.rope.freq_base"] == (6, 10000.0)


def test_the_target_may_be_replaced_and_is_not_read(tmp_path: Path) -> None:
    source = folder(tmp_path, "qwen2")
    convert(source, tmp_path / "out.gguf")
    with pytest.raises(CheckpointError, match="exists"):
        convert(source, tmp_path / "out.gguf")
    convert(source, tmp_path / "out.gguf", overwrite=True, dtype="fp16")
    assert Parsed(tmp_path / "out.gguf").keys["general.file_type"] == (4, 1)
    with pytest.raises(FormatError, match=r"gguf\.GGUFReader"):
        open_layout(tmp_path / "out.gguf")


def test_blocks_of_tiny_numbers_are_zeros_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    source = folder(tmp_path, "qwen2")
    given = {**load_file(source / "model.safetensors"), "model.embed_tokens.weight": torch.full((24, 32), 1e-40)}
    save_file(given, source / "model.safetensors")
    convert(source, tmp_path / "out.gguf", quantize="q8_0")
    _, _, data = Parsed(tmp_path / "out.gguf").tensors["token_embd.weight"]
    assert {data[place : place + 2] for place in range(0, len(data), 34)} == {b"\0\0"}  # the scales
    assert not recwarn.list


class TestErrors:
    def refused(self, parent: Path, message: str, name: str = "llama", *, settings: Any = None, **changes: Any) -> None:
        source = folder(parent, name, **changes)
        with pytest.raises(ConfigError, match=message):
            convert(source, parent / "out.gguf", **(settings or {}))
        assert not [*parent.glob("*out*")]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"model_type": "gemma"},
                r"of the types 'llama', 'mistral', 'qwen2', and .* says 'gemma'.*convert_hf_to_gguf",
            ),
            ({"model_type": None}, "says None"),
            ({"hidden_act": "gelu"}, "sets hidden_act 'gelu'"),
            ({"mlp_bias": True}, "sets mlp_bias"),
            ({"partial_rotary_factor": 0.5}, "sets partial_rotary_factor"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "sets rope scaling 'yarn'"),
            ({"rope_scaling": {"type": "linear"}}, "says None for 'factor'"),
            ({"model_type": "mistral", "sliding_window": 128, "attention_bias": False}, "sets sliding_window 128"),
            ({"rms_norm_eps": None}, "says None for 'rms_norm_eps'"),
            ({"num_hidden_layers": 2}, r"it lacks 'model.layers.1.input_layernorm.weight', .*"),
            ({"attention_bias": False}, r"it has 'model.layers.0.self_attn.k_proj.bias', .* besides"),
            ({"num_key_value_heads": 4}, r"k_proj.weight' has shape \[32, 32\] \(expected \[64, 32\]\)"),
            ({"hidden_size": "32"}, "says '32' for 'hidden_size'. Expected is a positive whole number"),
        ],
    )
    def test_models(self, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
        self.refused(tmp_path, message, **changes)

    def test_qwen_with_windows(self, tmp_path: Path) -> None:
        layers = ["sliding_attention"]
        self.refused(tmp_path, "sets layer_types", "qwen2", layer_types=layers)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"dtype": "float8_e4m3fn"}, "is float8_e4m3fn, which GGUF files"),
            ({"quantize": "fp8"}, "'quantize' applies only to the format 'safetensors', .* not to 'gguf'"),
            ({"verify_output": True}, "'verify_output' applies only to the format that can be read, not to 'gguf'"),
            ({"keep": "all"}, "A GGUF file holds the weights"),
            ({"like": "/"}, "'like' is '/', which holds no config.json"),
        ],
    )
    def test_settings(self, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
        self.refused(tmp_path, message, settings=settings)

    def test_codes_with_unknown_scales(self, tmp_path: Path) -> None:
        source = folder(tmp_path, "qwen2", quantization_config={"quant_method": "own"})
        name, given = "model.layers.0.mlp.up_proj.weight", load_file(source / "model.safetensors")
        save_file({**given, name: given[name].to(torch.float8_e4m3fn)}, source / "model.safetensors")
        with pytest.raises(ConfigError, match=rf"{name}': quantised, as quantization_config.*save it unquantised"):
            convert(source, tmp_path / "out.gguf", dtype="fp16")

    def test_quantised_elsewhere(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="'quantize' applies only to the format 'gguf', not to 'safetensors'"):
            convert(folder(tmp_path, "qwen2"), tmp_path / "out.safetensors", quantize="q8_0")

    def test_no_config(self, tmp_path: Path) -> None:
        save_file(weights("qwen2"), tmp_path / "model.safetensors")
        with pytest.raises(ConfigError, match=r"A GGUF file needs a config\.json, and there is none"):
            convert(tmp_path / "model.safetensors", tmp_path / "out.gguf")

    @pytest.mark.parametrize("value", [math.inf, math.nan, 1e7])
    def test_numbers_that_blocks_cannot_hold(self, value: float, tmp_path: Path) -> None:
        source = folder(tmp_path, "llama")
        given = load_file(source / "model.safetensors")
        given["lm_head.weight"][3, 4] = value
        save_file(given, source / "model.safetensors")
        with pytest.raises(ConfigError, match=r"'lm_head\.weight' holds numbers that are infinite, NaN or above"):
            convert(source, tmp_path / "out.gguf", quantize="q8_0")
        assert not [*tmp_path.glob("*out*")]

    def test_tokenizers_of_others(self, tmp_path: Path) -> None:
        source = folder(tmp_path, "llama")
        data = (source / "vocab.gguf").read_bytes()
        (source / "vocab.gguf").write_bytes(data.replace(b"llama.vocab_size", b"llama.vocab_siz0"))
        convert(source, tmp_path / "fine.gguf")
        for cut in (23, 30, 400, 1000):
            (source / "vocab.gguf").write_bytes(data[:cut])
            with pytest.raises(CorruptCheckpointError, match=r"The keys of vocab\.gguf are damaged"):
                convert(source, tmp_path / "out.gguf")
        (source / "vocab.gguf").write_bytes(b"GGUF\2\0\0\0" + data[8:])
        with pytest.raises(FormatError, match="not a little-endian GGUF file of version 3"):
            convert(source, tmp_path / "out.gguf")
        (source / "vocab.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 0))
        with pytest.raises(ConfigError, match=r"has 0 tokens, and vocab_size of config\.json is 24"):
            convert(source, tmp_path / "out.gguf")


def test_folders_on_servers(tmp_path: Path) -> None:
    source = folder(tmp_path, "llama", vocabulary=False)
    convert(source, tmp_path / "here.gguf")
    convert(source, tmp_path / "dcp", to="dcp", ranks=2)
    with serving(tmp_path) as web:
        convert(f"{web.url}/llama", tmp_path / "there.gguf")
        convert(f"{web.url}/dcp", tmp_path / "sharded.gguf", like=f"{web.url}/llama")
        (source / "vocab.gguf").write_bytes(b"GGUF")
        with pytest.raises(ConfigError, match=r"vocab.gguf of 'http.*/llama' is read only on this machine. Copy it"):
            convert(f"{web.url}/llama", tmp_path / "out.gguf")
    for name in ("there", "sharded"):
        assert (tmp_path / f"{name}.gguf").read_bytes() == (tmp_path / "here.gguf").read_bytes()
