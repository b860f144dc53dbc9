"""The families: architecture, data, optimizer and wrap policies of each, as MMEngine configs say them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["FAMILIES", "Family"]

IMAGE_OPTIM: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "lr": 2e-3, "weight_decay": 0.05},
    "paramwise_cfg": {
        "norm_decay_mult": 0.0,
        "bias_decay_mult": 0.0,
        "custom_keys": {"embeddings": {"lr_mult": 0.5}, "cls_token": {"decay_mult": 0.0}},
    },
    "clip_grad": {"max_norm": 1.0},
}


def by_size(min_num_params: int) -> dict[str, Any]:
    """torch's size policy, as configs name it."""
    return {"type": "size_based_auto_wrap_policy", "min_num_params": min_num_params}


def by_class(*names: str) -> dict[str, Any]:
    """torch's class policy, with classes by name."""
    return {"type": "ModuleWrapPolicy", "module_classes": list(names)}


def by_name(*patterns: str) -> dict[str, Any]:
    """Globs on names."""
    return {"kind": "module_name", "patterns": list(patterns)}


@dataclass(frozen=True)
class Family:
    """A family of models.

    Args:
        model: Config of the model.
        dataset: Config of the data.
        policies: ``auto_wrap_policy`` by kind: ``size``, ``class``, ``name``.
        optim_wrapper: Config of the optimizer wrapper.
    """

    model: dict[str, Any]
    dataset: dict[str, Any]
    policies: dict[str, dict[str, Any]]
    optim_wrapper: dict[str, Any] = field(default_factory=lambda: IMAGE_OPTIM)

    def runner_settings(self, batch_size: int, num_steps: int, val_interval: int) -> dict[str, Any]:
        """Return FlexibleRunner's arguments: a warm-up, clipping, validation and checkpoints on the way."""

        def loader(sampler: dict[str, Any]) -> dict[str, Any]:
            collate = {"type": "default_collate"}
            return {"batch_size": batch_size, "dataset": self.dataset, "sampler": sampler, "collate_fn": collate}

        return {
            "model": self.model,
            "train_dataloader": loader({"type": "InfiniteSampler", "shuffle": True}),
            "val_dataloader": loader({"type": "DefaultSampler", "shuffle": False}),
            "val_evaluator": {"type": "Scores"},
            "train_cfg": {"by_epoch": False, "max_iters": num_steps, "val_interval": val_interval},
            "val_cfg": {},
            "optim_wrapper": self.optim_wrapper,
            "param_scheduler": [
                {"type": "LinearLR", "start_factor": 0.1, "by_epoch": False, "begin": 0, "end": 3},
                {"type": "CosineAnnealingLR", "by_epoch": False, "begin": 3, "end": num_steps},
            ],
            "default_hooks": {"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": val_interval}},
            "env_cfg": {"dist_cfg": {"backend": "nccl"}},
            "randomness": {"seed": 5},
            "log_level": "WARNING",
        }


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    **NO_DROPOUT,
}
WORDS_OPTIM: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    # `bypass_duplicate`: MMEngine's constructor would give tied weights twice.
    "paramwise_cfg": {"norm_decay_mult": 0.0, "bias_decay_mult": 0.0, "bypass_duplicate": True},
    "clip_grad": {"max_norm": 1.0},
}
WORDS = {"vocab_size": 97}

FAMILIES: dict[str, Family] = {
    "deit": Family(
        model={
            "type": "Classifier",
            "architecture": "DeiTForImageClassification",
            "config": {**VIT, "num_labels": 5},
        },
        dataset={"type": "Images"},
        optim_wrapper={
            "optimizer": {"type": "AdamW", "lr": 2e-3, "weight_decay": 0.05},
            "constructor": "LayerDecay",
            "paramwise_cfg": {"layer_decay_rate": 0.75, "num_layers": 3},
            "clip_grad": {"max_norm": 1.0},
        },
        policies={
            "size": by_size(2_000),
            "class": by_class("DeiTLayer"),
            "name": by_name("model.deit.layers.*", "model.classifier"),
        },
    ),
    "swin": Family(
        model={
            "type": "Classifier",
            "architecture": "SwinForImageClassification",
            "config": {
                "image_size": 32,
                "patch_size": 2,
                "embed_dim": 16,
                "depths": [2, 2],
                "num_heads": [2, 4],
                "window_size": 4,
                "num_labels": 5,
                "drop_path_rate": 0.0,
                **NO_DROPOUT,
            },
        },
        dataset={"type": "Images"},
        policies={
            "size": by_size(1_000),
            "class": by_class("SwinLayer", "SwinPatchMerging"),
            "name": by_name("**.blocks.*", "**.downsample"),
        },
    ),
    "convnext": Family(
        model={
            "type": "Classifier",
            "architecture": "ConvNextForImageClassification",
            "config": {
                "hidden_sizes": [8, 16, 32, 64],
                "depths": [1, 1, 2, 1],
                "patch_size": 2,
                "num_labels": 5,
                "drop_path_rate": 0.0,
                "image_size": 32,
            },
        },
        dataset={"type": "Images"},
        policies={
            "size": by_size(1_000),
            "class": by_class("ConvNextLayer"),
            "name": by_name("**.stages.*"),
        },
    ),
    "resnet": Family(
        model={
            "type": "Classifier",
            "architecture": "ResNetForImageClassification",
            "config": {
                "embedding_size": 8,
                "hidden_sizes": [16, 32, 64, 128],
                "depths": [1, 1, 2, 1],
                "layer_type": "bottleneck",
                "num_labels": 5,
            },
            "norm_eval": True,
            "frozen": ("resnet.embedder", "resnet.encoder.stages.0"),
        },
        dataset={"type": "Images"},
        policies={
            "size": by_size(1_000),
            "class": by_class("ResNetStage"),
            "name": by_name("**.stages.*.layers.*"),
        },
    ),
    "mae": Family(
        model={
            "type": "MaskedAutoencoder",
            "architecture": "ViTMAEForPreTraining",
            "config": {
                **VIT,
                "decoder_num_attention_heads": 4,
                "decoder_hidden_size": 24,
                "decoder_num_hidden_layers": 2,
                "decoder_intermediate_size": 48,
            },
        },
        dataset={"type": "Images", "patches": 16},
        policies={
            "size": by_size(2_000),
            "class": by_class("ViTMAELayer"),
            "name": by_name("model.vit.layers.*", "**.decoder_layers.*"),
        },
    ),
    "segformer": Family(
        model={
            "type": "Segmenter",
            "architecture": "SegformerForSemanticSegmentation",
            "config": {
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [8, 16, 24, 32],
                "num_attention_heads": [1, 2, 3, 4],
                "decoder_hidden_size": 32,
                "num_labels": 5,
                "drop_path_rate": 0.0,
                "classifier_dropout_prob": 0.0,
                **NO_DROPOUT,
            },
            "norm_eval": True,
        },
        dataset={"type": "Masks", "size": 32},
        policies={
            "size": by_size(500),
            "class": by_class("SegformerLayer", "SegformerDecodeHead"),
            "name": by_name("**.stages.*", "model.decode_head.linear_projections"),
        },
    ),
    "detr": Family(
        model={
            "type": "Detector",
            "architecture": "DetrForObjectDetection",
            "config": {
                "use_timm_backbone": False,
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "num_queries": 8,
                "dropout": 0.0,
                "num_labels": 5,
            },
            "backbone": {
                "embedding_size": 8,
                "hidden_sizes": [8, 16, 16, 32],
                "depths": [1, 1, 1, 1],
                "layer_type": "basic",
                "out_features": ["stage4"],
            },
        },
        dataset={"type": "Boxes", "size": 64},
        optim_wrapper={
            "optimizer": {"type": "AdamW", "lr": 2e-3, "weight_decay": 1e-4},
            "paramwise_cfg": {"custom_keys": {"backbone": {"lr_mult": 0.1, "decay_mult": 1.0}}},
            "clip_grad": {"max_norm": 0.1},
        },
        policies={
            "size": by_size(2_000),
            "class": by_class("DetrEncoderLayer", "DetrDecoderLayer", "ResNetStage"),
            "name": by_name("model.model.*coder.layers.*", "model.model.backbone"),
        },
    ),
    "gpt2": Family(
        model={
            "type": "CausalLM",
            "architecture": "GPT2LMHeadModel",
            "config": {
                **WORDS,
                "n_positions": 32,
                "n_embd": 32,
                "n_layer": 3,
                "n_head": 4,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
        },
        dataset={"type": "Words"},
        optim_wrapper=WORDS_OPTIM,
        policies={
            "size": by_size(2_000),
            "class": by_class("GPT2Block"),
            "name": by_name("model.transformer.h.*", "model.transformer.wte", "model.lm_head"),
        },
    ),
    "bert": Family(
        model={
            "type": "MaskedLM",
            "architecture": "BertForMaskedLM",
            "config": {
                **WORDS,
                "hidden_size": 32,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "intermediate_size": 64,
                "max_position_embeddings": 32,
                **NO_DROPOUT,
            },
        },
        dataset={"type": "Words", "masked": True},
        optim_wrapper=WORDS_OPTIM,
        policies={
            "size": by_size(2_000),
            "class": by_class("BertLayer", "BertEmbeddings"),
            "name": by_name("**.layer.*", "model.cls"),
        },
    ),
    "llama": Family(
        model={
            "type": "CausalLM",
            "architecture": "LlamaForCausalLM",
            "config": {
                **WORDS,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 32,
            },
        },
        dataset={"type": "Words"},
        optim_wrapper=WORDS_OPTIM,
        policies={
            "size": by_size(2_000),
            "class": by_class("LlamaDecoderLayer"),
            "name": by_name("model.model.layers.*", "model.lm_head"),
        },
    ),
}
