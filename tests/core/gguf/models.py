"""The tiny models of the golden files: their configs, and the numbers of their weights."""

from __future__ import annotations

from typing import Any

import torch

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 24,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 24,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
}


def weights(name: str, **changes: Any) -> dict[str, torch.Tensor]:
    """Return the weights by their names in transformers: numbers of an integer generator, equal with every torch."""
    config = {**CONFIGS[name], **changes}
    hidden, inner, rows = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    size = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, hidden)}
    biased = "qkv" if name == "qwen2" else "qkvo"
    for layer in range(config["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        own["post_attention_layernorm.weight"] = (hidden,)
        for letter, out, inside in (
            ("q", queries, hidden),
            ("k", keys, hidden),
            ("v", keys, hidden),
            ("o", hidden, queries),
        ):
            own[f"self_attn.{letter}_proj.weight"] = (out, inside)
            if letter in biased:
                own[f"self_attn.{letter}_proj.bias"] = (out,)
        own |= {"mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden)}
        own["mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"model.layers.{layer}.{part}": shape for part, shape in own.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (rows, hidden)
    state, made = 12345, {}
    for part, shape in shapes.items():
        numbers = []
        for _ in range(torch.Size(shape).numel()):
            state = (1103515245 * state + 12345) % 2**31
            numbers.append((state / 2**30 - 1) * 0.7)
        made[part] = torch.tensor(numbers, dtype=torch.float32).reshape(shape)
    if name == "llama":
        made["model.embed_tokens.weight"][3] = 0  # a block without a scale
        made["model.embed_tokens.weight"][4] = torch.arange(-16, 16) * 127 / 32  # its codes lie half way
        made["model.embed_tokens.weight"][5] = torch.arange(32) * 1e-9  # its scale is below the smallest float16
    return made
