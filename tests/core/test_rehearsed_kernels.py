"""What kernels and autograd hold for a moment in a rehearsal is what they really allocate on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmfsdp.rehearsal import measure
from mmfsdp.rehearsal.kernels import scratch_bytes
from mmfsdp.rehearsal.peaks import cpu_peak

CONVOLUTION, BACKWARD = "aten::convolution", "aten::convolution_backward"


def tensor(shape: tuple[int, ...], dtype: torch.dtype, *, is_transposed: bool) -> torch.Tensor:
    values = torch.randn(shape).to(dtype)
    return values.transpose(1, 2).contiguous().transpose(1, 2) if is_transposed else values


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 64, 128), (4, 96, 257)])
def test_a_depthwise_convolution(shape: tuple[int, ...], dtype: torch.dtype, is_transposed: bool) -> None:
    channels = shape[1]
    inputs, weight = tensor(shape, dtype, is_transposed=is_transposed), torch.randn(channels, 1, 4).to(dtype)
    options = [1], [3], [1], False, [0], channels
    forward = inputs, weight, None, *options
    made = torch.ops.aten.convolution(*forward)
    grad = tensor(tuple(made.shape), dtype, is_transposed=is_transposed)
    backward = grad, inputs, weight, None, *options, [True, True, False]
    grads = torch.ops.aten.convolution_backward(*backward)
    for name, args, results in ((CONVOLUTION, forward, [made]), (BACKWARD, backward, grads[:2])):
        operator = getattr(torch.ops.aten, name.removeprefix("aten::"))
        real = cpu_peak(lambda operator=operator, args=args: [operator(*args)].clear(), [])
        expected = scratch_bytes(name, args, made) + sum(result.nbytes for result in results)
        assert expected == pytest.approx(real, rel=0.02)


class Scan(nn.Module):
    """Takes apart what it computes along time, as a state-space model does."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.mix = nn.Linear(16, 256), nn.Conv1d(256, 256, 4, padding=3, groups=256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.wide(x).transpose(1, 2))[..., : x.shape[1]].sigmoid()
        state = x.new_zeros(x.shape[:2])
        for step in range(x.shape[2]):
            state = state * 0.5 + x[:, :, step]
        return state


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_of_what_is_used_often_add_up_in_place(precision: str) -> None:
    found = measure({"precision": precision}, Scan(), torch.randn(8, 12, 16), steps=3, device="h100")
    assert found.rehearsal.peak.nbytes == pytest.approx(found.peak, rel=0.005)
