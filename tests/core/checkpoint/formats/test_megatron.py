"""Directories of Megatron-Core's torch_dist: weights and optimizer state under the names of parameters."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from tests.distributed.loading.test_reading_mmengine_local import same
from torch import nn

import mmfsdp
from mmfsdp.checkpoint import convert, open_layout, verify
from mmfsdp.errors import IncompleteCheckpointError
from mmfsdp.testing import single_rank

GOLDEN = Path(__file__).parents[2] / "megatron" / "0.16.1"
SOURCE = GOLDEN / "iter_0000007"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(SOURCE, tmp_path / "iter_0000007")
    return tmp_path / "iter_0000007"


def test_equals_what_the_ranks_saved(tmp_path: Path) -> None:
    expected = torch.load(GOLDEN / "full.pth")
    layout = open_layout(SOURCE)
    assert (layout.format, layout.world_size) == ("megatron", 2)  # each part is written once
    assert verify(SOURCE).ok
    assert {*layout.tree} == {"state_dict", "optimizer", "objects", "common"}
    assert layout.tree["common"]["iteration"] == 7
    assert layout.tree["objects"]["decoder.rng_state/shard_0_1"] == [{"seed": 1}]
    assert layout.tree["objects"]["decoder._extra_state/shard_0_1"] == [b"scales"]
    convert(SOURCE, tmp_path / "weights.pth", fsync=False)
    assert same(torch.load(tmp_path / "weights.pth")["state_dict"], expected["weights"])
    convert(SOURCE, tmp_path / "all.pth", keep="all", fsync=False)
    assert same(torch.load(tmp_path / "all.pth")["optimizer"]["state"], expected["state"])
    convert(SOURCE, tmp_path / "plain.safetensors", fsync=False)
    assert {*open_layout(tmp_path / "plain.safetensors").tensors} == {*expected["weights"]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Module(), nn.Module()
        self.embedding.word_embeddings = nn.Embedding(10, 6)
        self.decoder.layers, self.decoder.final_layernorm = nn.Module(), nn.LayerNorm(6, bias=False)
        self.decoder.layers.self_attention = nn.Module()
        self.decoder.layers.self_attention.linear_proj = nn.Module()
        self.decoder.layers.self_attention.linear_proj.weight = nn.Parameter(torch.zeros(3, 6, 4))


def test_loads_into_a_sharded_model() -> None:
    with single_rank():
        model = mmfsdp.shard(Model(), {"wrap": {"kind": "none"}})
        mmfsdp.load_checkpoint(SOURCE, model)
        found = mmfsdp.model_state_dict(model)
    for name, tensor in torch.load(GOLDEN / "full.pth")["weights"].items():
        assert torch.equal(found[name], tensor.float())


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / "__1_0.distcp").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"__1_0\.distcp, which holds .* is missing"):
        open_layout(copy)


def test_common_values_that_need_trust(copy: Path) -> None:
    torch.save({"iteration": 7, "args": Path.home}, copy / "common.pt")
    assert "common" not in open_layout(copy).tree
    assert open_layout(copy, trust=True).tree["common"]["iteration"] == 7
    left_out = "not read, as no part of the DCP directory: 'common.pt'; common.pt is read with trust"
    assert convert(copy, copy.with_name("out.pth"), keep="all").notes == (left_out,)
    assert convert(copy, copy.with_name("trusted.pth"), keep="all", trust=True).notes == ()
    torch.save({"step": 7}, copy / "train_state.pt")  # of Megatron-Bridge
    assert "what is no part of the DCP directory: 'common.pt', 'train_state.pt'" in verify(copy).unchecked


def test_tensors_that_name_no_parameter_or_were_flattened(copy: Path) -> None:
    """The buckets of dp_reshardable have no names; older releases stored flattened tensors in another shape."""
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    flat = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    metadata.mcore_data = {flat: {"nd_reformulated_orig_global_shape": (6,)}}
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_0.bucket_idx_0.exp_avg"
    old = "optimizer.state.exp_avg_sq.decoder.final_layernorm.weight"
    metadata.state_dict_metadata[bucket] = metadata.state_dict_metadata.pop(old)
    for index in [index for index in metadata.storage_data if index.fqn == old]:
        place = metadata.storage_data.pop(index)
        metadata.storage_data[type(index)(bucket, index.offset)] = place
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    optimizer = open_layout(copy).tree["optimizer"]
    assert {*optimizer["as_stored"]} == {flat, bucket}
    assert "decoder.final_layernorm.weight" not in optimizer["state"]
