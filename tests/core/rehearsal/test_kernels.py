"""What kernels and autograd hold for a moment in a rehearsal is what they really allocate on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from mmfsdp.basics.torch_version import installed_release
from mmfsdp.rehearsal import measure, rehearse
from mmfsdp.rehearsal.measured.measuring import cpu_peak
from mmfsdp.rehearsal.recording.kernels.convolutions import convolution_bytes
from mmfsdp.rehearsal.recording.kernels.cpu_kernels import cpu_scratch_bytes
from mmfsdp.rehearsal.recording.kernels.losses import kept_loss_bytes, run_ctc
from mmfsdp.rehearsal.recording.kernels.onednn_recurrent import add_workspace

CONVOLUTION, BACKWARD = "aten::convolution", "aten::convolution_backward"


IN_BLOCKS_OF_16 = "AVX512" in torch.backends.cpu.get_cpu_capability()
ALL = [True, True, True]


def held(
    inputs: torch.Tensor, weight: torch.Tensor, stride: int, padding: int, groups: int, wanted: list[bool]
) -> Iterator[tuple[int, int]]:
    """Yield what is expected and what is held: by forward, and by backward, with the results."""
    number = weight.dim() - 2
    options = [stride] * number, [padding] * number, [1] * number, False, [0] * number, groups
    forward = inputs, weight, None, *options
    made = torch.ops.aten.convolution(*forward)
    backward = torch.empty_like(made).copy_(torch.randn(made.shape)), inputs, weight, None, *options, wanted
    grads = torch.ops.aten.convolution_backward(*backward)
    for name, args, results in ((CONVOLUTION, forward, [made]), (BACKWARD, backward, grads)):
        operator = getattr(torch.ops.aten, name.removeprefix("aten::"))
        real = cpu_peak(lambda operator=operator, args=args: [operator(*args)].clear(), [])
        found = sum(result.nbytes for result in results if result is not None)
        yield convolution_bytes(name, args, results[0]) + found, real


@pytest.mark.sample("shape1-dtype0-False", "shape0-dtype1-True")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 64, 128), (4, 96, 257)])
def test_a_depthwise_convolution(shape: tuple[int, ...], dtype: torch.dtype, is_transposed: bool) -> None:
    inputs, weight = torch.randn(shape).to(dtype), torch.randn(shape[1], 1, 4).to(dtype)
    if is_transposed:
        inputs = inputs.transpose(1, 2).contiguous().transpose(1, 2)
    for expected, real in held(inputs, weight, 1, 3, shape[1], [True, True, False]):
        assert expected == pytest.approx(real, rel=0.02)


@pytest.mark.sample(
    "shape5-weight5-1-dtype0-True",
    "shape8-weight8-2-dtype1-False",
    "shape7-weight7-1-dtype0-False",
    "shape4-weight4-2-dtype1-True",
    "shape6-weight6-1-dtype1-False",
    "shape3-weight3-1-dtype0-True",
)
@pytest.mark.skipif(not IN_BLOCKS_OF_16, reason="measured on processors with AVX-512")
@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "weight", "stride"),
    [
        ((4, 64, 28, 28), (64, 64, 3, 3), 1),
        ((4, 40, 28, 28), (40, 40, 3, 3), 1),
        ((16, 64, 28, 28), (128, 64, 1, 1), 1),
        ((2, 256, 14, 14), (256, 256, 3, 3), 1),
        ((4, 64, 28, 28), (64, 64, 3, 3), 2),
        ((4, 32, 28, 28), (32, 1, 3, 3), 1),
        ((4, 32, 28, 28), (32, 1, 7, 7), 1),
        ((4, 40, 28, 28), (40, 1, 7, 7), 1),
        ((4, 32, 28, 28), (32, 1, 7, 7), 2),
    ],
)
def test_a_convolution_of_images(
    shape: tuple[int, ...], weight: tuple[int, ...], stride: int, dtype: torch.dtype, is_channels_last: bool
) -> None:
    """A backward in blocks of channels holds up to 256 times the gradient of a depthwise weight."""
    inputs = torch.randn(shape).to(dtype)
    if is_channels_last:
        inputs = inputs.to(memory_format=torch.channels_last)
    groups = shape[1] // weight[1]
    for expected, real in held(inputs, torch.randn(weight).to(dtype), stride, weight[-1] // 2, groups, ALL):
        assert expected == pytest.approx(real, rel=0.05)


@pytest.mark.skipif(not IN_BLOCKS_OF_16, reason="measured on processors with AVX-512")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_depthwise_kernel_that_is_larger_than_the_image(dtype: torch.dtype) -> None:
    inputs = torch.randn(4, 256, 2, 2).to(dtype).to(memory_format=torch.channels_last)
    for expected, real in held(inputs, torch.randn(256, 1, 3, 3).to(dtype), 1, 1, 256, ALL):
        assert expected == pytest.approx(real, rel=0.05)


@pytest.mark.skipif(not IN_BLOCKS_OF_16, reason="measured on processors with AVX-512")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_the_channels_is_copied(dtype: torch.dtype) -> None:
    inputs = torch.randn(4, 28, 28, 96).to(dtype).permute(0, 3, 1, 2)[:, :32]
    for expected, real in held(inputs, torch.randn(32, 1, 7, 7).to(dtype), 1, 3, 32, ALL):
        assert expected == pytest.approx(real, rel=0.05)


@pytest.mark.sample("32-dtype1", "4-dtype0")
@pytest.mark.skipif(not IN_BLOCKS_OF_16, reason="measured on processors with AVX-512")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("side", [4, 8, 16, 32])
def test_patches_of_images(side: int, dtype: torch.dtype) -> None:
    """The first convolution makes no gradient of its input; that of wide kernels is a product of matrices."""
    with one_thread():
        inputs, weight = torch.randn(4, 3, 128, 128).to(dtype), torch.randn(96, 3, side, side).to(dtype)
        for expected, real in held(inputs, weight, side, 0, 1, [False, True, False]):
            assert expected == pytest.approx(real, rel=0.05)


@contextmanager
def one_thread() -> Iterator[None]:
    """Each thread has a matrix of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


# Without AVX-512, oneDNN computes no depthwise convolution of bfloat16, and torch's own holds less.
@pytest.mark.parametrize("precision", ["fp32", "bf16"] if IN_BLOCKS_OF_16 else ["fp32"])
def test_gradients_of_what_is_used_often_add_up_in_place(precision: str) -> None:
    found = measure({"precision": precision}, Scan(), torch.randn(8, 12, 16), steps=3, device="h100")
    assert found.rehearsal.peak.nbytes == pytest.approx(found.peak, rel=0.005)


class Checking(torch.optim.SGD):
    """Looks at what operators on lists of shards return."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        params = [param.detach() for group in self.param_groups for param in group["params"]]
        half, ints = [param.bfloat16() for param in params], [param.int() for param in params]
        for found, dtype in (
            (torch._foreach_sqrt(params), torch.float32),
            (torch._foreach_add(params, params), torch.float32),
            (torch._foreach_mul(half, 2.0), torch.bfloat16),
            (torch._foreach_add(half, params), torch.float32),
            (torch._foreach_div(ints, ints), torch.float32),
        ):
            assert [value.dtype for value in found] == [dtype] * len(params)
            kinds = [(type(value), value.shape, value.placements, value.to_local().shape) for value in found]
            assert kinds == [(type(like), like.shape, like.placements, like.to_local().shape) for like in params]
            assert {value._spec.tensor_meta.dtype for value in found} == {dtype}


def test_what_operators_on_lists_return_lies_as_their_shards_do() -> None:
    rehearse(None, nn.Linear(5, 3), torch.empty(2, 5), mesh=2, optimizer=lambda params: Checking(params, lr=0.1))


def extra_of(name: str, *args: Any) -> tuple[int, int]:
    """Return the bytes that an operator is expected to hold for a moment, and holds, beyond its results."""
    packet, _, overload = name.partition(".")
    operator = getattr(torch.ops.aten, packet)
    operator = getattr(operator, overload) if overload else operator
    result = operator(*args)
    results = [result] if isinstance(result, torch.Tensor) else [part for part in result if part is not None]
    held = sum(part.untyped_storage().nbytes() for part in results)
    return cpu_scratch_bytes(f"aten::{packet}", args, result), cpu_peak(lambda: [operator(*args)].clear(), []) - held


MAP = torch.rand(4, 8, 32, 32)
WAVES = torch.fft.rfft2(MAP)
OPERATORS: dict[str, tuple[Any, ...]] = {
    "a mask that is multiplied": ("mul.Tensor", MAP > 0.5, MAP),
    "a smaller factor of another dtype": ("mul.Tensor", MAP, torch.rand(8, 1, 1).bfloat16()),
    "equal dtypes": ("mul.Tensor", MAP, MAP),
    "a number": ("add.Tensor", MAP, torch.tensor(1, dtype=torch.float64)),
    "a map that grows": ("upsample_bilinear2d", MAP, [64, 64], False),
    "a map that grows far": ("upsample_bilinear2d", MAP, [256, 256], False),
    "to waves": ("_fft_r2c", MAP, [2, 3], 0, True),
    "to waves along other dimensions": ("_fft_c2c", WAVES, [1], 0, True),
    "to real numbers": ("_fft_c2r", WAVES, [2, 3], 0, 32),
    "to real numbers along one dimension": ("_fft_c2r", WAVES, [3], 0, 32),
    "a loss": ("mse_loss", MAP, MAP + 1),
    "a loss of Huber": ("huber_loss", MAP, MAP + 1),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_an_operator(case: str) -> None:
    expected, real = extra_of(*OPERATORS[case])
    assert expected == pytest.approx(real, rel=0.01, abs=1 << 14)  # tables of weights


def test_a_batch_norm() -> None:
    inputs, row = torch.rand(4, 8, 16, 16), torch.ones(8)
    _, mean, rstd = torch.native_batch_norm(inputs, row, row, row.clone(), row.clone(), True, 0.1, 1e-5)
    args = (inputs, inputs, row, row, row, mean, rstd, True, 1e-5, ALL)
    expected, real = extra_of("native_batch_norm_backward", *args)
    assert expected == real == inputs.nbytes


@pytest.mark.parametrize("name", ["mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"])
def test_a_loss_keeps_its_storage(name: str) -> None:
    found = getattr(nn.functional, name)(MAP, MAP.clone())
    assert (kept_loss_bytes(f"aten::{name}", (MAP,), found) or found.nbytes) == found.untyped_storage().nbytes()
    whole = getattr(nn.functional, name)(MAP, MAP.clone(), reduction="none")
    assert kept_loss_bytes(f"aten::{name}", (MAP,), whole) == 0


def test_ctc_returns_what_it_does_on_shapes() -> None:
    scores, targets = torch.rand(64, 4, 30).log_softmax(-1), torch.ones(4, 20, dtype=torch.long)
    lengths = torch.full((4,), 64), torch.tensor([20, 3, 5, 20])
    args = (scores, targets, *lengths, 0, False)
    found = torch.ops.aten._ctc_loss.Tensor(*args)
    assert [part.shape for part in run_ctc("aten::_ctc_loss", args)] == [part.shape for part in found]
    assert run_ctc("aten::_ctc_loss", (scores, targets.flatten(), *args[2:])) is NotImplemented
    again = (torch.ones(4), scores, targets, *lengths, *found, 0, False)
    expected, real = extra_of("_ctc_loss_backward.Tensor", *again)
    assert expected == real == found[1].nbytes


@pytest.mark.skipif(not IN_BLOCKS_OF_16, reason="measured on processors with AVX-512")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "hidden"), [((64, 8, 64), 64), ((32, 16, 128), 256)])
def test_a_layer_of_an_lstm(shape: tuple[int, int, int], hidden: int, dtype: torch.dtype) -> None:
    inputs, state = torch.rand(shape).to(dtype), torch.zeros(shape[1], hidden, dtype=dtype)
    sides = ((4 * hidden, shape[2]), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,))
    weights = [torch.rand(side).to(dtype) for side in sides]
    args = (inputs, *weights, state, state, False, [], 2, hidden, 1, True, False, False, True)
    found = torch.ops.aten.mkldnn_rnn_layer(*args)
    workspace = found[3].nbytes
    assert add_workspace(args, found)[3].nbytes == pytest.approx(workspace, rel=0.05)
    expected, real = extra_of("mkldnn_rnn_layer", *args)
    assert expected == pytest.approx(real, abs=0.1 * workspace)
    grads = [torch.ones_like(part) for part in found[:3]]
    settings = (False, 2, hidden, 1, True, True, False, [], False)
    expected, real = extra_of(
        "mkldnn_rnn_layer_backward", inputs, *weights, state, state, *found[:3], *grads, *settings, found[3]
    )
    assert expected == pytest.approx(real, abs=0.1 * workspace)


def assert_forecast(expected: int, real: int, *, rel: float) -> None:
    """Bytes are forecast for torch 2.13 and newer; the oneDNN of older releases takes less in some of these kernels."""
    assert real <= expected * (1 + rel)
    if installed_release() >= (2, 13):
        assert expected == pytest.approx(real, rel=rel)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU multiplies another way")
@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("shape", [(256, 128, 512), (512, 384, 96)])
def test_a_product_in_16_bits(shape: tuple[int, int, int], is_turned: bool) -> None:
    rows, depth, columns = shape
    one = torch.rand(depth, rows).bfloat16().t() if is_turned else torch.rand(rows, depth).bfloat16()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected, real = extra_of("mm", one, torch.rand(depth, columns).bfloat16())
    finally:
        torch.set_num_threads(threads)
    assert_forecast(expected, real, rel=0.15)


@pytest.mark.skipif(not IN_BLOCKS_OF_16, reason="measured on processors with AVX-512")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "weight", "stride"), [((4, 64, 16, 16), (64, 32, 4, 4), 2), ((4, 64, 1, 1), (64, 128, 8, 8), 1)]
)
def test_a_transposed_convolution(
    shape: tuple[int, ...], weight: tuple[int, ...], stride: int, dtype: torch.dtype
) -> None:
    inputs, kernel = torch.rand(shape).to(dtype), torch.rand(weight).to(dtype)
    options = [stride] * 2, [stride // 2] * 2, [1, 1], True, [0, 0], 1
    made = torch.ops.aten.convolution(inputs, kernel, None, *options)
    expected, real = extra_of("convolution", inputs, kernel, None, *options)
    assert_forecast(expected + made.nbytes, real + made.nbytes, rel=0.05)
    args = made, inputs, kernel, None, *options, [True, True, False]
    expected, real = extra_of("convolution_backward", *args)
    assert_forecast(expected, real, rel=0.05)
