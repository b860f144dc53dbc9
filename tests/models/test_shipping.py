"""Weights that recipes and Hugging Face folders ship: the models of other libraries load them and compute the same."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from mmfsdp.checkpoint import convert, open_layout, verify
from mmfsdp.checkpoint.entries import TensorEntry
from mmfsdp.checkpoint.formats.huggingface.config_sizes import _MODELS, check_sizes
from mmfsdp.errors import ConfigError

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 32}
BART = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "vocab_size": 32,
}
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32},
    ),
    "BertForMaskedLM": ("BertConfig", SMALL),
    "BartForConditionalGeneration": ("BartConfig", BART),
    "LlamaForCausalLM": ("LlamaConfig", LLAMA),
}
IDS = torch.arange(20).reshape(2, 10) % 32


def built(name: str, config: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def logits(model: Any, given: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(given).logits
    return found


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("with_weights", [False, True])
def test_from_pretrained_loads_a_folder(name: str, with_weights: bool, tmp_path: Path) -> None:
    model = built(name, TEXT[name][0], **TEXT[name][1])
    model.save_pretrained(tmp_path / "own")
    like = tmp_path / "own" if with_weights else tmp_path / "config"
    model.config.save_pretrained(tmp_path / "config")
    torch.save(model.state_dict(), tmp_path / "a.pth")
    convert(tmp_path / "a.pth", tmp_path / "dcp", to="dcp", ranks=3, keep="model")
    for settings in ({}, {"max_shard_size": "4kB"}):
        folder = tmp_path / f"out{len(settings)}"
        convert(tmp_path / "dcp", folder, to="hf", like=like, **settings)
        assert verify(folder).ok
        # transformers' own folder has the same tensors: the same tied ones are left out.
        assert open_layout(folder).tensors.keys() == open_layout(tmp_path / "own/model.safetensors").tensors.keys()
        loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())


def test_fused_llama_is_phi3(tmp_path: Path) -> None:
    model = built("LlamaForCausalLM", "LlamaConfig", **LLAMA)
    model.save_pretrained(tmp_path / "llama")
    convert(tmp_path / "llama", tmp_path / "fused.safetensors", recipe="hf-llama-to-fused")
    phi = built("Phi3ForCausalLM", "Phi3Config", **LLAMA, rms_norm_eps=1e-6)
    phi.load_state_dict(load_file(tmp_path / "fused.safetensors"))
    assert torch.allclose(logits(phi, IDS), logits(model, IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Qwen2Moe", "Qwen3Moe"])
def test_stacked_experts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = built(f"{name}ForCausalLM", f"{name}Config", **LLAMA, **EXPERTS)
    model.save_pretrained(tmp_path / "moe")  # a tensor per expert
    convert(tmp_path / "moe", tmp_path / "stacked.safetensors", recipe="hf-qwen-moe-to-stacked")
    found, state = load_file(tmp_path / "stacked.safetensors"), model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in found)
    # What ranks train and save has the stacked names; a folder has those of files.
    torch.save(state, tmp_path / "trained.pth")
    convert(
        tmp_path / "trained.pth",
        tmp_path / "out",
        to="hf",
        like=tmp_path / "moe",
        recipe="hf-qwen-moe-to-stacked",
        inverse=True,
    )
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))


def randomised(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def timm_vit() -> Any:
    vision_transformer = pytest.importorskip("timm.models.vision_transformer")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
    return randomised(vision_transformer.VisionTransformer(**sizes, num_classes=7))


def timm_swin() -> Any:
    swin_transformer = pytest.importorskip("timm.models.swin_transformer")
    sizes = {"img_size": 128, "patch_size": 4, "window_size": 4, "embed_dim": 8, "always_partition": True}
    return randomised(swin_transformer.SwinTransformer(**sizes, **STAGES, num_classes=7))


def timm_resnet() -> Any:
    resnet = pytest.importorskip("timm.models.resnet")
    return resnet.ResNet(resnet.Bottleneck, [2, 1, 1, 1], num_classes=7).eval()


STAGES = {"depths": (2, 1, 1, 1), "num_heads": (2,) * 4}
ARCH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
IMAGES = {
    "vit": ("ViTForImageClassification", "ViTConfig", {**ARCH, "image_size": 32, "patch_size": 8}),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {"embed_dim": 8, "window_size": 4, "image_size": 128, "depths": [2, 1, 1, 1], "num_heads": [2] * 4},
    ),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", {"depths": [2, 1, 1, 1]}),
}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "vit": {
        "backbone": {
            "type": "VisionTransformer",
            "arch": {"embed_dims": 32, "num_layers": 2, "num_heads": 2, "feedforward_channels": 64},
            "img_size": 32,
            "patch_size": 8,
        },
        "head": {"type": "VisionTransformerClsHead", "num_classes": 7, "in_channels": 32},
    },
    "swin": {
        "backbone": {
            "type": "SwinTransformer",
            "arch": {"embed_dims": 8, "depths": [2, 1, 1, 1], "num_heads": [2] * 4},
            "img_size": 128,
            "window_size": 4,
        },
        "neck": {"type": "GlobalAveragePooling"},
        "head": {"type": "LinearClsHead", "num_classes": 7, "in_channels": 64},
    },
}


@pytest.mark.parametrize("kind", IMAGES)
def test_models_of_timm_in_transformers(kind: str, tmp_path: Path) -> None:
    model = {"vit": timm_vit, "swin": timm_swin, "resnet": timm_resnet}[kind]()
    name, config, settings = IMAGES[kind]
    eps = {"layer_norm_eps": 1e-6} if kind == "vit" else {}
    built(name, config, **settings, **eps, num_labels=7).config.save_pretrained(tmp_path / "like")
    torch.save(model.state_dict(), tmp_path / "a.pth")
    convert(tmp_path / "a.pth", tmp_path / "out", to="hf", like=tmp_path / "like", recipe=f"timm-{kind}-to-hf")
    loaded = getattr(transformers, name).from_pretrained(tmp_path / "out").eval()
    size = settings.get("image_size", 64)
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(logits(loaded, x), model(x), atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # mmcv's own
@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_models_of_mmpretrain_in_timm(kind: str, tmp_path: Path) -> None:
    mmpretrain = pytest.importorskip("mmpretrain", reason="`nox -s configs` has it, with another transformers")
    from tests.configs.sweep import stand_in

    stand_in()
    mmpretrain.utils.register_all_modules()
    model = {"vit": timm_vit, "swin": timm_swin}[kind]()
    classifier = randomised(mmpretrain.models.build_classifier({"type": "ImageClassifier", **CLASSIFIERS[kind]}))
    torch.save(classifier.state_dict(), tmp_path / "a.pth")
    convert(tmp_path / "a.pth", tmp_path / "b.safetensors", recipe=f"mmpretrain-{kind}-to-timm")
    model.load_state_dict(load_file(tmp_path / "b.safetensors"))
    size = IMAGES[kind][2]["image_size"]
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(classifier(x, mode="tensor"), model(x), atol=1e-5)


MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True, "tie_word_embeddings": False}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 6}),
        ("qwen2_moe", {**MOE, "num_experts": 2, "shared_expert_intermediate_size": 12}),
        ("qwen3_moe", {**MOE, "num_experts": 4, "head_dim": 4}),
        ("mixtral", {"intermediate_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **ROPE}),
    ],
)
def test_models_of_megatron_in_transformers(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    """The logits are those that Megatron itself computed on the ranks that saved."""
    own = Path(__file__).parents[1] / "core/recipes/golden/megatron-0.16.1"
    sizes = {**LLAMA, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 50}
    name = kind.title().replace("_", "")
    config = getattr(transformers, f"{name}Config")(**{**sizes, "rms_norm_eps": 1e-6, **more})
    config.save_pretrained(tmp_path / "like")
    recipe = f"megatron-{'mixtral' if kind == 'mixtral' else 'llama'}-to-hf"
    convert(own / kind, tmp_path / "out", to="hf", like=tmp_path / "like", recipe=recipe)
    loaded = getattr(transformers, f"{name}ForCausalLM").from_pretrained(tmp_path / "out").eval()
    expected = torch.load(own / f"{kind}.pt", weights_only=True)
    assert torch.allclose(logits(loaded, expected["ids"]), expected["logits"], atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # mmcv's and mmdet's own
@pytest.mark.parametrize("kind", ["timm", "resnet"])
def test_detr_of_mmdet_in_transformers(kind: str, tmp_path: Path) -> None:
    if find_spec("mmdet") is None:
        pytest.skip("`nox -s configs` has mmdet, with another transformers")
    from tests.configs.sweep import stand_in

    stand_in()
    import mmdet
    from mmdet.registry import MODELS
    from mmdet.structures import DetDataSample
    from mmdet.utils import register_all_modules
    from mmengine.config import Config

    register_all_modules()
    config = Config.fromfile(Path(mmdet.__file__).parent / ".mim/configs/detr/detr_r50_8xb2-150e_coco.py").model
    config.backbone.init_cfg = None
    config.num_queries, config.bbox_head.num_classes = 5, 7
    torch.manual_seed(0)
    model = MODELS.build(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.ndim > 1 and not name.startswith("backbone."):
                tensor.normal_(0, 0.05)
            elif name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
    own = {"backbone": None, "backbone_config": transformers.ResNetConfig(out_features=["stage4"])}
    backbone = {"backbone": "resnet50"} if kind == "timm" else own
    settings = {"use_timm_backbone": kind == "timm", "use_pretrained_backbone": False, **backbone}
    transformers.DetrConfig(**settings, num_queries=5, num_labels=7).save_pretrained(tmp_path / "like")
    torch.save(model.state_dict(), tmp_path / "a.pth")
    recipe = "mmdet-detr-to-hf" if kind == "timm" else "mmdet-detr-to-hf-resnet"
    convert(tmp_path / "a.pth", tmp_path / "out", to="hf", like=tmp_path / "like", recipe=recipe)
    loaded = transformers.DetrForObjectDetection.from_pretrained(tmp_path / "out").eval()
    x = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(1))
    sample = DetDataSample(metainfo={"batch_input_shape": (64, 96), "img_shape": (64, 96)})
    with torch.no_grad():
        classes, boxes = model.bbox_head(**model.forward_transformer(model.extract_feat(x), [sample]))
        found = loaded(x)
    assert torch.allclose(found.logits, classes[-1], atol=1e-5)
    assert torch.allclose(found.pred_boxes, boxes[-1], atol=1e-5)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("kind", ["fp8_tensor", "fp8_channel"])
def test_compressed_tensors_in_transformers(kind: str, tmp_path: Path) -> None:
    """The library of that name takes the folder, keeps its codes, and restores what we restore, bit for bit."""
    pytest.importorskip("compressed_tensors")
    model = built("LlamaForCausalLM", "LlamaConfig", **LLAMA).bfloat16()
    model.save_pretrained(tmp_path / "llama")
    convert(tmp_path / "llama", tmp_path / "codes", to="hf", quantize=kind)
    convert(tmp_path / "codes", tmp_path / "restored", to="hf", quantize="none", dtype="bf16")
    held = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "codes").state_dict()
    codes = load_file(tmp_path / "codes/model.safetensors")
    for name in [name for name in codes if name + "_scale" in codes]:
        assert torch.equal(held[name].view(torch.uint8), codes[name].view(torch.uint8))
        assert torch.equal(held[name + "_scale"], codes[name + "_scale"])
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "codes", quantization_config=settings)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "restored").state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in theirs.state_dict().items() if name in ours)
    assert {*ours} <= {*theirs.state_dict()}


# Settings of small models of any type; a config takes those that it has.
SIZES = {
    **{
        "vocab_size": 40,
        "hidden_size": 32,
        "n_embd": 32,
        "d_model": 32,
        "word_embed_proj_dim": 32,
        "embedding_size": 16,
    },
    **{"num_hidden_layers": 3, "n_layer": 3, "num_layers": 3, "num_decoder_layers": 2, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "n_head": 4, "num_heads": 4, "num_experts": 4, "d_kv": 8},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "d_ff": 16, "ffn_dim": 16},
    **{"max_position_embeddings": 64, "rotary_dim": 4, "pad_token_id": 0, "shared_expert_intermediate_size": 16},
}
COUNTS = ("vocab_size", "num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")


@pytest.mark.parametrize("kind", _MODELS)
def test_sizes_are_compared_with_the_config(kind: str, tmp_path: Path) -> None:
    """No model is refused beside its own config, and each beside one with another number."""
    config = transformers.CONFIG_MAPPING[kind]
    known = {name: value for name, value in SIZES.items() if hasattr(config(), name)}
    if getattr(made := config(**known), "layer_types", None):
        made = config(**known, layer_types=made.layer_types[:3])
    for auto in ("AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForSequenceClassification"):
        if auto != "AutoModel" and config not in getattr(transformers, auto)._model_mapping:
            continue
        with torch.device("meta"):
            state = getattr(transformers, auto).from_config(made).state_dict()
        entries = {name: TensorEntry(name, "float32", tuple(value.shape), ()) for name, value in state.items()}
        made.save_pretrained(tmp_path)
        check_sizes(entries, tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        for name in COUNTS:
            if isinstance(written.get(name), int) and name in known:
                changed = written | {name: written[name] + 1}
                (tmp_path / "config.json").write_text(json.dumps(changed))
                with pytest.raises(ConfigError, match=f"but {name} is {changed[name]}"):
                    check_sizes(entries, tmp_path)
