"""Writes names and shapes of small models of OpenMMLab, timm and transformers, for tests of the recipes between them.

Run it where the library is installed: ``python tests/core/recipes/make.py timm``. Each file records its version;
transformers 4 has the names of the files in memory, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

HERE = Path(__file__).parent / "golden"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA = {**SMALL, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}


def write(name: str, module: object, state: Mapping[str, torch.Tensor]) -> None:
    """Write a file."""
    version = f"{module.__name__} {module.__version__}"  # type: ignore[attr-defined]
    shapes = {key: [*value.shape] for key, value in state.items()}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(shape)}" for key, shape in shapes.items())
    (HERE / f"{name}.json").write_text(f'{{"writer": {json.dumps(version)}, "tensors": {{\n{lines}\n}}}}\n')


def mmpretrain_models() -> None:
    """Classifiers of mmpretrain."""
    import mmpretrain
    from mmpretrain.models import build_classifier
    from mmpretrain.utils import register_all_modules

    register_all_modules()
    arch = {"embed_dims": 32, "num_layers": 2, "num_heads": 2, "feedforward_channels": 64}
    vit = {
        "type": "ImageClassifier",
        "backbone": {"type": "VisionTransformer", "arch": arch, "img_size": 32, "patch_size": 8},
        "head": {"type": "VisionTransformerClsHead", "num_classes": 7, "in_channels": 32},
    }
    write("mmpretrain-vit", mmpretrain, build_classifier(vit).state_dict())
    stages = {"embed_dims": 8, "depths": [2, 1, 1, 1], "num_heads": [2] * 4}
    swin = {
        "type": "ImageClassifier",
        "backbone": {"type": "SwinTransformer", "arch": stages, "img_size": 128, "window_size": 4},
        "neck": {"type": "GlobalAveragePooling"},
        "head": {"type": "LinearClsHead", "num_classes": 7, "in_channels": 64},
    }
    write("mmpretrain-swin", mmpretrain, build_classifier(swin).state_dict())


def detr_models() -> None:
    """Detectors of mmdet and transformers, with one block for each stage of the backbone."""
    import mmdet
    import transformers as library
    from mmdet.models.backbones import ResNet
    from mmdet.models.backbones.resnet import Bottleneck
    from mmdet.registry import MODELS
    from mmdet.utils import register_all_modules
    from mmengine.config import Config

    register_all_modules()
    ResNet.arch_settings[50] = (Bottleneck, (1, 1, 1, 1))
    config = Config.fromfile(Path(mmdet.__file__).parent / ".mim/configs/detr/detr_r50_8xb2-150e_coco.py").model
    config.backbone.init_cfg = None
    config.num_queries, config.bbox_head.num_classes = 5, 7
    for part in (config.encoder, config.decoder):
        part.num_layers, part.layer_cfg.ffn_cfg.feedforward_channels = 2, 32
    write("mmdet-detr", mmdet, MODELS.build(config).state_dict())
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    layers |= {"num_queries": 5, "num_labels": 7}
    timm = {"backbone": "resnet50", "use_timm_backbone": True, "backbone_kwargs": {"layers": (1,) * 4}}
    own = {"backbone": None, "use_timm_backbone": False, "backbone_config": library.ResNetConfig(depths=[1] * 4)}
    for name, backbone in (("hf-detr-timm", timm), ("hf-detr", own)):
        detr = library.DetrConfig(**layers, **backbone, use_pretrained_backbone=False)
        write(name, library, library.DetrForObjectDetection(detr).state_dict())


def timm_models() -> None:
    """The same of timm."""
    import timm
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.vision_transformer import VisionTransformer

    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2, num_classes=7)
    write("timm-vit", timm, vit.state_dict())
    stages = {"depths": (2, 1, 1, 1), "num_heads": (2,) * 4}
    swin = SwinTransformer(img_size=128, patch_size=4, window_size=4, embed_dim=8, num_classes=7, **stages)
    write("timm-swin", timm, swin.state_dict())
    resnet = timm.models.resnet.ResNet(timm.models.resnet.Bottleneck, [2, 1, 1, 1], num_classes=7)
    write("timm-resnet", timm, resnet.state_dict())


def transformers_models() -> None:
    """The same of transformers, under the names of its files, and models of text."""
    import transformers as library

    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    vit = library.ViTConfig(**vision, image_size=32, patch_size=8, num_labels=7)
    write("hf-vit", library, library.ViTForImageClassification(vit).state_dict())
    stages = {"depths": [2, 1, 1, 1], "num_heads": [2] * 4}
    swin = library.SwinConfig(embed_dim=8, **stages, window_size=4, image_size=128, num_labels=7)
    buffers = "relative_position_index"
    state = library.SwinForImageClassification(swin).state_dict()
    write("hf-swin", library, {key: value for key, value in state.items() if not key.endswith(buffers)})
    resnet = library.ResNetConfig(depths=[2, 1, 1, 1], num_labels=7)
    write("hf-resnet", library, library.ResNetForImageClassification(resnet).state_dict())
    write("hf-llama", library, library.LlamaForCausalLM(library.LlamaConfig(**LLAMA)).state_dict())
    write("hf-phi3", library, library.Phi3ForCausalLM(library.Phi3Config(**LLAMA)).state_dict())
    write("hf-qwen-moe", library, library.Qwen2MoeForCausalLM(library.Qwen2MoeConfig(**LLAMA, **EXPERTS)).state_dict())
    bert = library.BertConfig(**SMALL, vocab_size=64)
    write("hf-bert", library, library.BertModel(bert).state_dict())


def transformers_5_models() -> None:
    """What transformers 5 holds in memory where it differs from the files."""
    import transformers as library

    model = library.Qwen2MoeForCausalLM(library.Qwen2MoeConfig(**LLAMA, **EXPERTS))
    write("hf-qwen-moe-stacked", library, model.state_dict())
    from transformers.core_model_loading import revert_weight_conversion

    text = {**LLAMA, "tie_word_embeddings": False}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    qwen = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
    clip = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    clip |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    models = {
        "mixtral": library.MixtralForCausalLM(library.MixtralConfig(**LLAMA, num_local_experts=3)),
        "qwen-vl": library.Qwen2VLForConditionalGeneration(
            library.Qwen2VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=qwen)
        ),
        "llava": library.LlavaForConditionalGeneration(
            library.LlavaConfig(text_config={**text, "model_type": "llama"}, vision_config=clip)
        ),
    }
    for name, model in models.items():
        state = revert_weight_conversion(model, model.state_dict())
        if name == "llava":  # as transformers 4 wrote it
            state = {key.replace("vision_tower.", "vision_tower.vision_model."): held for key, held in state.items()}
        write(f"hf-{name}", library, state)
        write(f"hf-{name}-in-memory", library, model.state_dict())


if __name__ == "__main__":
    parts = {"mmpretrain": mmpretrain_models, "timm": timm_models, "transformers": transformers_models}
    parts |= {"detr": detr_models, "transformers_5": transformers_5_models}
    HERE.mkdir(exist_ok=True)
    for part in sys.argv[1:]:
        parts[part]()
