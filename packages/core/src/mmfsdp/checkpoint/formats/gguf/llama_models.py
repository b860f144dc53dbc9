"""Turns a Llama-like model of Hugging Face into the content of a GGUF file: names, order of rows, dtypes, key-values.

The names and the meaning of the keys are llama.cpp's: ``gguf-py/gguf/constants.py`` and ``convert_hf_to_gguf.py`` of
https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mmfsdp.basics.arguments import argument
from mmfsdp.basics.descriptors import is_remote
from mmfsdp.basics.dtypes import is_floating_point, itemsize
from mmfsdp.basics.text import name_list
from mmfsdp.checkpoint.entries import ComputedEntry, TensorEntry
from mmfsdp.checkpoint.files.cast_entries import CastEntry
from mmfsdp.checkpoint.files.disk import OpenFiles
from mmfsdp.checkpoint.files.eight_bit_blocks import WIDTH, EightBitBlocks
from mmfsdp.checkpoint.files.elements import equal_data, require_numpy
from mmfsdp.checkpoint.formats.gguf.gguf_files import array_length, number, read_keys, real, text, type_of
from mmfsdp.checkpoint.formats.gguf.tokenizers import translated
from mmfsdp.checkpoint.recipes.rearranging import Pattern
from mmfsdp.checkpoint.recipes.stand_in_files import StandIns
from mmfsdp.errors import ConfigError, closest

__all__ = ["VOCABULARY", "GgufModel"]

VOCABULARY = "vocab.gguf"
"""The file beside ``config.json`` from which the tokenizer is copied, whatever else lies there."""

_CONFIG = "config.json"
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}  # by model_type
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CONTEXT = "max_position_embeddings"
_LARGEST = (1 << 32) - 1


@dataclass(frozen=True)
class GgufModel:
    """A model to write as a GGUF file."""

    folder: Path
    """The folder with its ``config.json``."""
    config: Mapping[str, Any]
    """Its content."""

    @classmethod
    def of(cls, folder: Path) -> GgufModel:
        """Read the config of a model and check that a GGUF file can say all of it.

        Args:
            folder: The folder with its ``config.json``.

        Raises:
            ConfigError: It cannot, or the config is malformed.
        """
        try:
            config = json.loads((folder / _CONFIG).read_bytes())
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{_CONFIG} is not valid JSON: {error}.", file=str(folder / _CONFIG)) from None
        model = cls(folder, config if isinstance(config, dict) else {})
        model._check()
        return model

    @property
    def architecture(self) -> str:
        """The name of the architecture in llama.cpp."""
        return _ARCHITECTURES[self.config["model_type"]]

    def renamed(self, tensors: Mapping[str, TensorEntry]) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
        """Return the weights under llama.cpp's names, q and k with their rows in its order, and notes.

        Raises:
            ConfigError: Weights are missing or too many, or have another shape than the config says.
        """
        given, notes = dict(tensors), []
        codes = [name for name, entry in given.items() if itemsize(entry.dtype) == 1]
        if codes and self._get("quantization_config") is not None:
            raise ConfigError(
                f"{name_list(codes, 3)}: quantised, as quantization_config of {_CONFIG} says, and no scales are beside "
                "them that mmfsdp reads: '*.weight_scale' or '*.weight_scale_inv'. Load the model with the library "
                "that wrote it, and save it unquantised.",
                file=str(self.folder / _CONFIG),
            )
        if self._tied and _HEAD in given and _EMBEDDING in given:
            if not equal_data(given[_HEAD], given[_EMBEDDING]):
                raise self._refusal(f"ties {_HEAD!r} to {_EMBEDDING!r}, but they differ", "tie_word_embeddings: false")
            del given[_HEAD]
            notes.append(f"{_HEAD} is tied to {_EMBEDDING} and written once")
        expected = {name: (new, shape, heads) for name, new, shape, heads in self._weights()}
        missing = [name for name in expected if name not in given]
        unexpected = [name for name in given if name not in expected]
        wrong = [name for name in expected if name in given and given[name].shape != expected[name][1]]
        problems = [
            *([f"it lacks {name_list(missing, 4)}"] if missing else []),
            *([f"it has {name_list(unexpected, 4)} besides"] if unexpected else []),
            *(f"{name!r} has shape {[*given[name].shape]} (expected {[*expected[name][1]]})" for name in wrong[:2]),
        ]
        if problems:
            hint = closest(unexpected[0], missing) if unexpected else ""
            raise ConfigError(
                f"The checkpoint is not the {self.config['model_type']} model of {str(self.folder / _CONFIG)!r}: "
                f"{'; '.join(problems)}.{hint} Use a {argument('recipe')}, {argument('strip_prefix')} or "
                f"{argument('rename')} for other names and {argument('exclude')} for what is too much.",
                config="like",
            )
        return {new: _rotated(given[name], heads) for name, (new, _, heads) in expected.items()}, tuple(notes)

    def dtypes(self, casts: Mapping[str, str], tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
        """Return the dtypes that tensors are cast to: what is asked for, but float32 for vectors, as llama.cpp needs.

        Args:
            casts: The dtypes asked for, by llama.cpp's names.
            tensors: The weights by those names.

        Raises:
            ConfigError: A matrix has or gets a dtype that GGUF lacks.
        """
        wanted = {name: casts.get(name, entry.dtype) for name, entry in tensors.items()}
        for name, dtype in wanted.items():
            if not is_floating_point(tensors[name].dtype) or dtype.startswith("float8"):
                raise ConfigError(
                    f"{name!r} is {dtype}, which GGUF files of Llama-like models do not hold. Set {argument('dtype')} "
                    "to float16, bfloat16 or float32.",
                    config="dtype",
                )
            if len(tensors[name].shape) == 1 or dtype == "float64":
                wanted[name] = "float32"
        return {name: dtype for name, dtype in wanted.items() if dtype != tensors[name].dtype}

    def finished(
        self, tensors: Mapping[str, TensorEntry], quantize: str | None, count: Callable[[str, int], None]
    ) -> tuple[dict[str, TensorEntry], dict[str, bytes], tuple[str, ...]]:
        """Return the tensors to write, the file's key-value pairs and notes.

        Args:
            tensors: The weights by llama.cpp's names, of the dtypes that they are written with.
            quantize: ``'q8_0'``, or something else to leave them as they are.
            count: Called with a name and the number of its elements that were too large for float16, if there are any.

        Raises:
            ConfigError: The tokenizer belongs to another model, or numpy is missing.
            CheckpointError: The file with the tokenizer is damaged.
        """
        made, notes = dict(tensors), []
        if quantize == "q8_0":
            require_numpy("Quantising")
            short = []
            for name, entry in tensors.items():
                if len(entry.shape) < 2:
                    continue
                if entry.shape[-1] % WIDTH:
                    short.append(name)
                    made[name] = CastEntry.of(entry, "float16", partial(count, name))
                else:
                    made[name] = EightBitBlocks.of(entry)
            if short:
                notes.append(f"{name_list(short, 4)} stay float16: their rows are no multiple of {WIDTH}")
        types = Counter(type_of(entry) for entry in made.values() if len(entry.shape) > 1)
        if (factors := self._frequencies) is not None:
            made["rope_freqs.weight"] = _ConstantVector.of("rope_freqs.weight", factors)
        keys = {**self._keys(), "general.file_type": number(_FILE_TYPES[types.most_common(1)[0][0]])}
        keys["general.quantization_version"] = number(2)
        tokenizer, why = self._tokenizer()
        if not tokenizer:
            notes.append(
                f"no tokenizer is written, as {why}, and llama.cpp needs one: put the file that its "
                f"convert_hf_to_gguf.py --vocab-only writes beside {_CONFIG} as {VOCABULARY}, and convert again"
            )
        return made, {**keys, **tokenizer}, tuple(notes)

    @cached_property
    def _sizes(self) -> dict[str, int]:
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        sizes = {name: self._count(name) for name in names}
        heads = sizes["num_attention_heads"]
        sizes["kv_heads"] = heads if self._get("num_key_value_heads") is None else self._count("num_key_value_heads")
        if self._get("head_dim") is not None:
            sizes["head_dim"] = self._count("head_dim")
        elif sizes["hidden_size"] % heads:
            raise self._refusal(f"divides hidden_size {sizes['hidden_size']} among {heads} heads", "head_dim")
        else:
            sizes["head_dim"] = sizes["hidden_size"] // heads
        return sizes

    @property
    def _tied(self) -> bool:
        return self._get("tie_word_embeddings") is True

    @property
    def _rope(self) -> Mapping[str, Any]:
        found = self._get("rope_parameters") or self._get("rope_scaling") or {}
        return found if isinstance(found, dict) else {}

    @property
    def _rope_type(self) -> str:
        return str(self._rope.get("rope_type", self._rope.get("type", "default")))

    def _check(self) -> None:
        kind, config = self._get("model_type"), self._get
        if not isinstance(kind, str) or kind not in _ARCHITECTURES:
            raise ConfigError(
                f"GGUF files are written of models of the types {name_list([*_ARCHITECTURES])}, and {_CONFIG} of "
                f"{self.folder.name} says {kind!r}. Write a Hugging Face folder, and convert it with llama.cpp's "
                "convert_hf_to_gguf.py.",
                file=str(self.folder / _CONFIG),
            )
        window = config("sliding_window") if "sliding_window" in self.config else 4096 if kind == "mistral" else None
        slides = kind == "mistral" or config("use_sliding_window") is True
        layers = config("layer_types") or ["full_attention"]
        rope = self._rope_type
        refused = [
            (f"hidden_act {config('hidden_act')!r}", config("hidden_act") not in (None, "silu")),
            (f"sliding_window {window}", slides and window is not None and window < self._count(_CONTEXT)),
            (f"layer_types {layers}", layers != ["full_attention"] * (len(layers) if isinstance(layers, list) else 1)),
            ("mlp_bias", bool(config("mlp_bias"))),
            ("attention_bias", kind != "llama" and bool(config("attention_bias"))),
            (
                "partial_rotary_factor",
                (self._rope.get("partial_rotary_factor") or config("partial_rotary_factor") or 1) != 1,
            ),
            (f"rope scaling {rope!r}", rope not in ("default", "linear", "llama3")),
            (f"rope scaling {rope!r} of {kind}", rope == "llama3" and kind != "llama"),
        ]
        for what, wrong in refused:
            if wrong:
                raise self._refusal(f"sets {what}, which is not written to GGUF files here", "what the model does")
        if self._sizes["head_dim"] % 2:
            raise self._refusal(f"gives {self._sizes['head_dim']} as the size of a head", "an even head_dim")

    def _weights(self) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """Yield each weight's name, llama.cpp's name, its shape, and the heads that rotate, or 0."""
        sizes, kind = self._sizes, self.config["model_type"]
        hidden, inner, vocabulary = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
        heads, kv_heads = sizes["num_attention_heads"], sizes["kv_heads"]
        queries, keys = heads * sizes["head_dim"], kv_heads * sizes["head_dim"]
        turned = self.architecture == "llama"  # llama.cpp rotates neighbouring rows there, and halves of a head else
        projections = [
            ("self_attn.q_proj", "attn_q", (queries, hidden), turned * heads),
            ("self_attn.k_proj", "attn_k", (keys, hidden), turned * kv_heads),
            ("self_attn.v_proj", "attn_v", (keys, hidden), 0),
            ("self_attn.o_proj", "attn_output", (hidden, queries), 0),
            ("mlp.gate_proj", "ffn_gate", (inner, hidden), 0),
            ("mlp.up_proj", "ffn_up", (inner, hidden), 0),
            ("mlp.down_proj", "ffn_down", (hidden, inner), 0),
        ]
        biases = 3 if kind == "qwen2" else 4 if self._get("attention_bias") else 0
        yield _EMBEDDING, "token_embd.weight", (vocabulary, hidden), 0
        for layer in range(sizes["num_hidden_layers"]):
            old, new = f"model.layers.{layer}", f"blk.{layer}"
            yield f"{old}.input_layernorm.weight", f"{new}.attn_norm.weight", (hidden,), 0
            yield f"{old}.post_attention_layernorm.weight", f"{new}.ffn_norm.weight", (hidden,), 0
            for index, (name, short, shape, rotating) in enumerate(projections):
                yield f"{old}.{name}.weight", f"{new}.{short}.weight", shape, rotating
                if index < biases:
                    yield f"{old}.{name}.bias", f"{new}.{short}.bias", shape[:1], rotating
        yield "model.norm.weight", "output_norm.weight", (hidden,), 0
        if not self._tied:
            yield _HEAD, "output.weight", (vocabulary, hidden), 0

    def _keys(self) -> dict[str, bytes]:
        sizes, rope = self._sizes, self._rope
        own = {
            "block_count": number(sizes["num_hidden_layers"]),
            "context_length": number(self._count(_CONTEXT)),
            "embedding_length": number(sizes["hidden_size"]),
            "feed_forward_length": number(sizes["intermediate_size"]),
            "attention.head_count": number(sizes["num_attention_heads"]),
            "attention.head_count_kv": number(sizes["kv_heads"]),
            "rope.freq_base": real(
                self._real("rope_theta", rope.get("rope_theta", self._get("rope_theta") or 10000.0))
            ),
            "attention.layer_norm_rms_epsilon": real(self._real("rms_norm_eps", self._get("rms_norm_eps"))),
        }
        if self._get("head_dim") is not None:
            own["attention.key_length"] = own["attention.value_length"] = number(sizes["head_dim"])
        if self._rope_type == "linear":
            own["rope.scaling.type"] = text("linear")
            own["rope.scaling.factor"] = real(self._real("factor", rope.get("factor")))
        if self.architecture == "llama":
            own["vocab_size"] = number(sizes["vocab_size"])
            own["rope.dimension_count"] = number(sizes["head_dim"])
        general = {"architecture": self.architecture, "type": "model", "name": self.folder.resolve().name}
        return {
            **{f"general.{key}": text(value) for key, value in general.items()},
            **{f"{self.architecture}.{key}": value for key, value in own.items()},
        }

    @cached_property
    def _frequencies(self) -> bytes | None:
        """Llama 3's divisors of the frequencies of rotation: transformers' ``_compute_llama3_parameters``."""
        if self._rope_type != "llama3":
            return None
        rope = self._rope
        theta = self._real("rope_theta", rope.get("rope_theta", self._get("rope_theta") or 10000.0))
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, context = (self._real(name, rope.get(name)) for name in names)
        size, found = self._sizes["head_dim"], []
        for index in range(0, size, 2):
            turns = context / (2 * math.pi * theta ** (index / size))
            if turns > high:
                found.append(1.0)
            elif turns < low:
                found.append(factor)
            else:
                smooth = (turns - low) / (high - low)
                found.append(1 / ((1 - smooth) / factor + smooth))
        return struct.pack(f"<{len(found)}f", *found)

    def _tokenizer(self) -> tuple[dict[str, bytes], str]:
        path, rows = self.folder / VOCABULARY, self._sizes["vocab_size"]
        if not path.is_file():
            return translated(self.folder, rows)
        if is_remote(path):
            raise ConfigError(
                f"{VOCABULARY} of {str(self.folder)!r} is read only on this machine. Copy it here, beside {_CONFIG} of "
                f"the same model, and give that folder as {argument('like')}.",
                config="like",
            )
        found = read_keys(path, "tokenizer.")
        tokens = array_length(found.get("tokenizer.ggml.tokens", b""))
        if tokens != rows:
            raise ConfigError(
                f"{VOCABULARY} of {self.folder.name} has {tokens} tokens, and vocab_size of {_CONFIG} is {rows}. Give "
                "the tokenizer of this model.",
                file=str(path),
            )
        return found, ""

    def _get(self, key: str) -> Any:
        return self.config.get(key)

    def _count(self, key: str) -> int:
        value = self._get(key)
        if type(value) is not int or not 0 < value <= _LARGEST:
            raise self._refusal(f"says {value!r} for {key!r}", "a positive whole number")
        return value

    def _real(self, key: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 < value < 3e38:
            raise self._refusal(f"says {value!r} for {key!r}", "a positive number")
        return float(value)

    def _refusal(self, problem: str, expected: str) -> ConfigError:
        file = self.folder / _CONFIG
        return ConfigError(f"{_CONFIG} of {self.folder.name} {problem}. Expected is {expected}.", file=str(file))


def _rotated(entry: TensorEntry, heads: int) -> TensorEntry:
    """Return a weight or bias whose rows lie half a head apart with those that rotate together side by side."""
    if not heads:
        return entry
    axes = " c" if len(entry.shape) == 2 else ""
    stand_ins = StandIns()
    turned = Pattern(f"(h p d){axes} -> (h d p){axes}").applied(stand_ins.of(entry), {"h": heads, "p": 2})
    return stand_ins.resolved(turned)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConstantVector(ComputedEntry):
    """A vector of float32 that is given."""

    data: bytes

    @classmethod
    def of(cls, name: str, data: bytes) -> _ConstantVector:
        return cls(name, "float32", (len(data) // 4,), (), (), data=data)

    @property
    def formula(self) -> bytes:
        return self.data

    def blocks(self, files: OpenFiles) -> Iterator[memoryview]:
        yield memoryview(self.data)
