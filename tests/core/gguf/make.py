"""Makes the golden files of this folder with llama.cpp's own package: pip install gguf==0.19.0 numpy, then run this.

It lays out each tiny model as convert_hf_to_gguf.py of llama.cpp does, with gguf's own table of tensor names, keys,
quantisation and writer, from the same numbers that the test draws.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from models import CONFIGS, weights

VERSION = "0.19.0"


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """The order of llama.cpp: of each head, row i of the first half, then row i of the second."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(np.moveaxis(halves, 1, 2).reshape(rows.shape))


def write(path: Path, name: str, kind: Kind, file_type: gguf.LlamaFileType) -> None:
    config = CONFIGS[name]
    qwen = config["model_type"] == "qwen2"
    arch = gguf.MODEL_ARCH.QWEN2 if qwen else gguf.MODEL_ARCH.LLAMA
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if not qwen:
        writer.add_vocab_size(config["vocab_size"])
        size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        writer.add_rope_dimension_count(size)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([f"token {i} \N{HIGH VOLTAGE SIGN}" for i in range(config["vocab_size"])])
    writer.add_token_types([1] * config["vocab_size"])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(True)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for given, value in weights(name).items():
        new = names.get_name(given, try_suffixes=(".weight", ".bias"))
        assert new is not None
        data = value.float().numpy()
        if not qwen and ".q_proj." in given:
            data = permuted(data, config["num_attention_heads"])
        if not qwen and ".k_proj." in given:
            data = permuted(data, config["num_key_value_heads"])
        used = Kind.F32 if data.ndim == 1 else kind
        try:
            data = gguf.quants.quantize(data, used)
        except gguf.QuantError:
            used = Kind.F16
            data = gguf.quants.quantize(data, used)
        writer.add_tensor(new, data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    here = Path(__file__).parent
    types = gguf.LlamaFileType
    write(here / "llama-f16.gguf", "llama", Kind.F16, types.MOSTLY_F16)
    write(here / "llama-bf16.gguf", "llama", Kind.BF16, types.MOSTLY_BF16)
    write(here / "llama-q8_0.gguf", "llama", Kind.Q8_0, types.MOSTLY_Q8_0)
    write(here / "qwen2-q8_0.gguf", "qwen2", Kind.Q8_0, types.MOSTLY_Q8_0)
