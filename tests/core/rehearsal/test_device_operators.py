"""Composite operators of a rehearsal run as on a GPU: which kernels, what they keep, and nothing outside of it."""

from __future__ import annotations

import functools
import json
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mmfsdp
from mmfsdp.errors import ConfigError
from mmfsdp.rehearsal import Rehearsal, advise, report
from mmfsdp.rehearsal.fakes.fake import fake_tensors
from mmfsdp.rehearsal.recording.device_operators import device_operators
from mmfsdp.rehearsal.recording.kernels.attention_backends import attention_backend, attention_order
from mmfsdp.rehearsal.timing.device_names import device_of
from mmfsdp.rehearsal.timing.links import links_of

ROWS, HEADS, SIZE = 256, 4, 64
TOKENS = 2 * ROWS
FLASH = "aten::_scaled_dot_product_flash_attention"
HAS_CUDNN_FIRST = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


class Attends(nn.Module):
    """Causal attention of a few heads; keys and values of fewer."""

    def __init__(self, kv_heads: int = HEADS, size: int = SIZE) -> None:
        super().__init__()
        self.size, self.kv_heads = size, kv_heads
        self.qkv = nn.Linear(64, (HEADS + 2 * kv_heads) * size, bias=False)
        self.out = nn.Linear(HEADS * size, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [count * self.size for count in (HEADS, self.kv_heads, self.kv_heads)]
        parts = [part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.qkv(x).split(sizes, -1)]
        found = attend(*parts, is_causal=True, enable_gqa=self.kv_heads < HEADS)
        return self.out(found.transpose(1, 2).flatten(2))


def rehearse(model: nn.Module, precision: str = "bf16", **options: Any) -> Rehearsal:
    return mmfsdp.rehearse({"precision": precision}, model, torch.empty(2, ROWS, 64), **options)


def names(step: Rehearsal, phase: str) -> list[str]:
    return [item.name for item in step.operators if item.phase == phase]


def kept(step: Rehearsal) -> list[int]:
    """Return the sizes of activations that are there when backward begins."""
    begin = dict(step.phases)["backward"] - 1
    live = (item for item in step.allocations if item.begin <= begin and (item.end is None or item.end > begin))
    return sorted(item.nbytes for item in live if item.kind == "activation")


def shaped(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "flash"),
        ({"query": shaped(2, 4, 16, 40), "key": shaped(2, 4, 16, 40), "value": shaped(2, 4, 16, 40)}, "flash"),
        ({"mask": shaped(16, 16)}, "efficient"),
        ({"key": shaped(2, 4, 8, 64), "value": shaped(2, 4, 8, 64)}, "flash"),
        ({"key": shaped(2, 4, 8, 64), "value": shaped(2, 4, 8, 64), "is_causal": True}, "efficient"),
        ({"key": shaped(2, 2, 16, 64), "value": shaped(2, 2, 16, 64), "is_grouped": True}, "flash"),
        ({"key": shaped(2, 2, 16, 64), "value": shaped(2, 2, 16, 64), "mask": shaped(16, 16)}, "math"),
        ({"value": shaped(2, 4, 16, 32)}, "efficient"),
        ({name: shaped(2, 4, 16, 64, dtype=torch.float32) for name in ("query", "key", "value")}, "efficient"),
        ({name: shaped(2, 4, 16, 64, dtype=torch.float64) for name in ("query", "key", "value")}, "math"),
        ({name: shaped(2, 4, 16, 512) for name in ("query", "key", "value")}, "efficient"),
        ({name: shaped(4, 16, 64) for name in ("query", "key", "value")}, "math"),
        ({"capability": (7, 5)}, "efficient"),
    ],
)  # fmt: skip
def test_the_first_kernel_that_takes_the_tensors(changes: dict[str, Any], expected: str) -> None:
    usual = {name: shaped(2, 4, 16, 64) for name in ("query", "key", "value")}
    given = {**usual, "mask": None, "is_causal": False, "is_grouped": False, "capability": None, **changes}
    tensors = [given.pop(name) for name in ("query", "key", "value", "mask")]
    assert attention_backend(*tensors, order=("flash", "efficient", "math"), **given) == expected


def test_what_cudnn_takes() -> None:
    choose = functools.partial(
        attention_backend, is_causal=True, is_grouped=False, order=("cudnn", "flash", "math"), capability=(9, 0)
    )
    narrow, wide = shaped(2, 4, 16, 128), shaped(2, 4, 16, 256)
    assert choose(narrow, narrow, narrow, shaped(16, 16)) == "cudnn"
    assert choose(wide, wide, wide, None) == "flash"
    assert choose(narrow, narrow, narrow, shaped(16, 16).requires_grad_()) == "math"


def test_the_order_follows_the_architecture_and_what_a_user_says() -> None:
    assert attention_order(None)[:2] == ("flash", "efficient")
    assert attention_order((8, 0)) == attention_order((12, 0)) == attention_order(None)
    assert attention_order((9, 0))[0] == ("cudnn" if HAS_CUDNN_FIRST else "flash")
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert attention_order((9, 0)) == ("efficient", "math")
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert attention_order((9, 0)) == ("math", "flash")


def test_flash_attention_keeps_its_inputs_its_result_and_a_number_per_row() -> None:
    """The function was imported by name, and heads are of a grouped query."""
    step = rehearse(Attends(kv_heads=1))
    assert names(step, "forward").count(FLASH) == names(step, "backward").count(f"{FLASH}_backward") == 1
    qkv, found, rows = 2 * TOKENS * 6 * SIZE, 2 * TOKENS * HEADS * SIZE, 4 * TOKENS * HEADS
    held = kept(step)
    assert all(size in held for size in (qkv, found, rows))
    # Beside these: the input in bfloat16, the output and the loss.
    assert sum(held) <= qkv + found + rows + 2 * 2 * TOKENS * 64 + 64


def test_heads_are_padded_to_eight_columns() -> None:
    step = rehearse(Attends(size=20))
    assert 2 * TOKENS * HEADS * 24 in kept(step)
    flops = [item.flops for item in step.operators if item.name == FLASH]
    assert flops == [2 * 2 * 2 * HEADS * ROWS * ROWS * 24 // 2]


@pytest.mark.skipif(not HAS_CUDNN_FIRST, reason="earlier releases prefer flash attention everywhere")
def test_a_hopper_runs_cudnn() -> None:
    forward = {name: names(rehearse(Attends(), device=name), "forward") for name in ("h100", "a100")}
    assert "aten::_scaled_dot_product_cudnn_attention" in forward["h100"]
    assert FLASH in forward["a100"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_efficient_attention_pads_a_number_per_row(precision: str) -> None:
    class Masked(Attends):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)[..., :250, :]
            mask = torch.ones(250, 250, dtype=torch.bool).tril()
            return self.out(F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2))

    assert 4 * 2 * HEADS * 256 in kept(rehearse(Masked(), precision))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.RMSNorm(64), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def test_rms_norm_is_one_kernel_that_keeps_its_input_and_a_number_per_row() -> None:
    step = rehearse(Normed())
    assert names(step, "forward").count("aten::_fused_rms_norm") == 1
    assert names(step, "backward").count("aten::_fused_rms_norm_backward") == 1
    assert kept(step).count(4 * TOKENS) == 1
    # In bfloat16: the input, which is cast, what goes into the product, and the output; and the loss.
    assert sum(kept(step)) <= 3 * 2 * TOKENS * 64 + 4 * TOKENS + 64
    on_cpu = rehearse(Normed(), device_type="cpu")
    assert "aten::_fused_rms_norm" not in names(on_cpu, "forward")
    wide = 4 * TOKENS * 64
    assert wide in kept(on_cpu)
    assert wide not in kept(step)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_rms_norm_with_a_weight_of_another_dtype_is_taken_apart() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.out = nn.Parameter(torch.ones(64)), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(F.rms_norm(x.bfloat16(), (64,), self.weight).float())

    assert "aten::_fused_rms_norm" not in names(rehearse(Mixed(), "fp32"), "forward")


def test_save_ops_name_the_operators_of_cuda() -> None:
    def recomputed(*save: str) -> int:
        config = {"precision": "bf16", "activation_checkpointing": {"mode": "ops", "save_ops": [*save]}}
        step = mmfsdp.rehearse({**config, "wrap": "Attends"}, nn.Sequential(Attends()), torch.empty(2, ROWS, 64))
        return names(step, "backward").count(FLASH)

    assert recomputed("aten.mm", "aten._scaled_dot_product_flash_attention") == 0
    assert recomputed("aten.mm") == 1


def test_a_list_of_the_users_own_names_the_operators_of_cuda() -> None:
    class Selects(Attends):
        def __init__(self, *operators: Any) -> None:
            super().__init__()
            self.operators = operators

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
                return CheckpointPolicy.MUST_SAVE if func in self.operators else CheckpointPolicy.PREFER_RECOMPUTE

            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)

    operators = torch.ops.aten
    save = (operators.mm.default, operators._scaled_dot_product_flash_attention.default)
    assert names(rehearse(Selects(*save)), "backward").count(FLASH) == 0
    assert names(rehearse(Selects(operators.mm.default)), "backward").count(FLASH) == 1


def test_real_tensors_and_other_threads_are_left_alone() -> None:
    def results() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 4, 16, 8, requires_grad=True)
        found = F.dropout(F.rms_norm(attend(x, x, x, is_causal=True), (8,)), 0.5)
        return [found, *torch.autograd.grad(found.sum(), x)]

    before, elsewhere = results(), []
    with fake_tensors() as mode, device_operators(mode):
        thread = threading.Thread(target=lambda: elsewhere.extend(results()))
        thread.start()
        thread.join()
    after = results()
    for one, two, three in zip(before, elsewhere, after, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    assert before[0].grad_fn is not None


def test_a_gpu_is_no_cpu() -> None:
    with pytest.raises(ConfigError, match="h100 is of type 'cuda', but device_type is 'cpu'"):
        rehearse(Attends(), device="h100", device_type="cpu")


def kernels(step: Rehearsal) -> set[str]:
    return {item.name for item in step.operators if "attention" in item.name and item.phase == "forward"}


def test_every_function_passes_the_device_on() -> None:
    """The kernel of attention, the workspaces and the time are those of the device; a name may end with a network."""
    model, batch = Attends(), torch.empty(2, ROWS, 64)
    named = rehearse(model, device="a100@roce-50", mesh=16)
    assert named.device is not None
    assert (named.device.name, named.device.links) == ("a100@roce-50", links_of("roce-50", device_of("a100").links))
    assert named.time() == named.time("a100@roce-50")
    assert named.time().seconds == named.time("a100", "roce-50").seconds
    assert named.time().low > named.time("a100").low  # the CPU is what a step waits for most
    assert json.loads(json.dumps(named.describe()))["device"]["name"] == "a100@roce-50"
    advised = advise({"precision": "bf16"}, model, batch, mesh=16, device="a100@roce-50")
    assert (kernels(advised), advised.allocated(), advised.time()) == ({FLASH}, named.allocated(), named.time())
    config = {"precision": "bf16", "sharding": {"strategy": "FULL_SHARD"}}
    choices = {"accumulate": [1], "wrap": [None], "activation_checkpointing": [None]}
    for device, links in (("a100@roce-50", None), ("a100", "roce-50")):
        found = mmfsdp.fit(
            model, batch, ranks=16, config=config, choices=choices, device=device, links=links, optimizer="adamw"
        )
        step = found.options[0].rehearsal
        assert found.memory == device_of("a100").memory
        assert (kernels(step), step.device) == ({FLASH}, found.device)
        assert found.options[0].seconds == step.time().seconds
        assert (
            step.time().seconds == mmfsdp.rehearse(config, model, batch, mesh=16, device="a100@roce-50").time().seconds
        )
        assert found.describe()["device"]["links"] == named.describe()["device"]["links"]
    assert "a100@roce-50" in report(named)


def test_the_device_says_of_which_type_it_is() -> None:
    assert rehearse(Attends(), device="cpu").device_type == "cpu"
    assert rehearse(Attends(), device="mi300x").device_type == rehearse(Attends()).device_type == "cuda"
    assert rehearse(Attends(), device_type="cpu").time().device == "cpu"
    for name, message in (("h100@", "'' is not a network"), ("h10@roce-50", "'h10' is not a device")):
        with pytest.raises(ConfigError, match=message):
            rehearse(Attends(), device=name)
    with pytest.raises(ConfigError, match="How much memory cpu has is not known"):
        mmfsdp.fit(Attends(), torch.empty(2, ROWS, 64), device="cpu")
