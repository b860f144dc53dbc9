"""Models with the traits of families in mmpretrain, mmdet and mmsegmentation that were hard to plan or to build."""

import torch
import torch.distributed as dist
from mmengine.model import BaseModel, BaseModule
from torch import nn

from zoo.registry import MODELS


class Block(BaseModule):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), nn.MultiheadAttention(width, 2)
        self.ffn = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


@MODELS.register_module()
class Vit(BaseModule):
    def __init__(self, width=16, depth=3, pretrained=None, init_cfg=None):
        super().__init__(init_cfg)
        self.pos_embed = nn.Parameter(torch.zeros(1, 4, width))
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def init_weights(self):
        super().init_weights()
        if self.pos_embed.sum() != 0:  # values, which a parameter on the meta device does not have
            raise AssertionError


@MODELS.register_module()
class Swin(BaseModule):
    """Stages of equal class and unequal width, each with blocks."""

    def __init__(self, width=8, depths=(2, 2, 4), pretrained=None):
        super().__init__()
        self.stages = nn.ModuleList(Stage(width * 2**place, depth) for place, depth in enumerate(depths))


class Stage(BaseModule):
    def __init__(self, width, depth):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.downsample = nn.Linear(width, 2 * width)


class BasicBlock(BaseModule):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3), nn.BatchNorm2d(width)


@MODELS.register_module()
class ResNet(BaseModule):
    def __init__(self, width=8, pretrained=None):
        super().__init__()
        self.layer1 = nn.Sequential(BasicBlock(width), BasicBlock(width))


@MODELS.register_module()
class Vgg(BaseModule):
    """Layers of torch, none repeated."""

    def __init__(self, pretrained=None):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3))
        self.classifier = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.Linear(48, 10))


@MODELS.register_module()
class LoRA(BaseModule):
    """As mmpretrain's: initialises the model that it builds, freezes it and adds small weights."""

    def __init__(self, module, rank=2):
        super().__init__()
        self.module = MODELS.build(module)
        self.module.init_weights()
        self.requires_grad_(False)
        for block in self.module.layers:
            block.lora = nn.Linear(rank, rank)


@MODELS.register_module()
class Classifier(BaseModel):
    """Reads its config as attributes, as mmsegmentation's segmentors do."""

    def __init__(self, backbone, head=0):
        super().__init__()
        if backbone.get("pretrained") is not None:
            raise AssertionError(backbone.pretrained)
        self.name = backbone.type
        self.backbone = MODELS.build(backbone)
        self.head = nn.Sequential(nn.Conv2d(head, 64, 1), nn.Linear(64, 8)) if head else nn.Identity()

    def forward(self, inputs, mode="tensor"):
        raise NotImplementedError


@MODELS.register_module()
class Detr(BaseModel):
    """Blocks of several classes, in a backbone, an encoder and a decoder."""

    def __init__(self, backbone, encoder, decoder):
        super().__init__()
        self.backbone = MODELS.build(backbone)
        self.encoder = nn.ModuleList(Block(encoder.width) for _ in range(encoder.depth))
        self.decoder = nn.ModuleList(DecoderLayer(decoder.width) for _ in range(decoder.depth))
        self.query_embed = nn.Embedding(10, decoder.width)

    def forward(self, inputs, mode="tensor"):
        raise NotImplementedError


class DecoderLayer(Block):
    def __init__(self, width):
        super().__init__(width)
        self.cross_attn = nn.MultiheadAttention(width, 2)


@MODELS.register_module()
class Fused(BaseModule):
    """Fuses convolutions and batch norms when it is built, as LeViT's and RepVGG's deployed models do."""

    def __init__(self, pretrained=None):
        super().__init__()
        self.layers = nn.ModuleList(BasicBlock(8) for _ in range(4))
        for layer in self.layers:
            scale = layer.bn1.weight / (layer.bn1.running_var + 1e-5).sqrt()
            layer.conv1.weight.data = layer.conv1.weight * scale.reshape(-1, 1, 1, 1)


@MODELS.register_module()
class AsksRanks(Fused):
    """Asks for the ranks when it is built, as mmcv's SyncBatchNorm in some of mmdet's configs does."""

    def __init__(self):
        super().__init__()
        self.ranks = dist.get_world_size(dist.group.WORLD)
