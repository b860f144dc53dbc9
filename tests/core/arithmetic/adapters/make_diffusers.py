"""Writes adapters with diffusers' own functions, and what its fuse_lora() makes of the base in float64.

    python tests/core/arithmetic/adapters/make_diffusers.py     # diffusers 0.42.1, peft 0.21.2, torch 2.13.0

``diffusers/unet`` and ``diffusers/text_encoder`` are the bases. Beside them lie, for each case, the adapter and the
weights of both with it. ``settings`` says rank and alpha in the header, ``plain`` is as releases before 0.34 wrote it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel

HERE = Path(__file__).parent / "diffusers"


def components() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(4,),
        layers_per_block=1,
        norm_num_groups=2,
        cross_attention_dim=6,
        attention_head_dim=2,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
    )
    sizes = {"hidden_size": 6, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    encoder = CLIPTextModel(CLIPTextConfig(**sizes, **ends, vocab_size=20, max_position_embeddings=8))
    return {"unet": unet, "text_encoder": encoder}


def make(case: str) -> None:
    parts = components()
    plain = case == "plain"
    patterns = {} if plain else {"rank_pattern": {"to_q": 2}, "alpha_pattern": {"conv1": 5}}
    targets = ["to_k", "to_q", "to_out.0", "conv1"]
    alpha = 4 if plain else 6
    for part, config in (
        ("unet", LoraConfig(r=4, lora_alpha=alpha, target_modules=targets, init_lora_weights=False, **patterns)),
        (
            "text_encoder",
            LoraConfig(r=3, lora_alpha=3, target_modules=["q_proj"], init_lora_weights=False, use_rslora=not plain),
        ),
    ):
        parts[part].add_adapter(config)
    factors = {name: get_peft_model_state_dict(part) for name, part in parts.items()}
    if plain:
        factors = {name: convert_state_dict_to_diffusers(part) for name, part in factors.items()}
    StableDiffusionPipeline.save_lora_weights(
        HERE / case,
        unet_lora_layers=factors["unet"],
        text_encoder_lora_layers=factors["text_encoder"],
        **({} if plain else _collate_lora_metadata(parts)),
    )
    fresh = components()
    for name, part in fresh.items():
        part.save_pretrained(HERE / name)
    pipeline = StableDiffusionPipeline(
        **{name: part.double() for name, part in fresh.items()},
        vae=None,
        tokenizer=None,
        scheduler=DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.load_lora_weights(HERE / case)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    for name, part in fresh.items():
        merged = {key: value.contiguous() for key, value in part.state_dict().items()}
        save_file(merged, HERE / case / f"{name}.safetensors")


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    for case in ("settings", "plain"):
        make(case)
