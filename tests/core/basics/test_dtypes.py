"""Dtypes are one thing in every spelling, with the sizes that torch has."""

import pytest
import torch

from mmfsdp.basics.dtypes import (
    DTYPES,
    canonical_dtype,
    from_safetensors_code,
    is_floating_point,
    itemsize,
    numbers_per_element,
    safetensors_code,
    to_torch,
)
from mmfsdp.errors import ConfigError


@pytest.mark.parametrize(
    "spelling", ["float16", "torch.float16", torch.float16, "fp16", "half", torch.half, " Float16 ", "f16"]
)
def test_one_dtype_in_every_spelling(spelling: object) -> None:
    assert canonical_dtype(spelling) == "float16"


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_sizes_and_kinds_are_those_of_torch(name: str) -> None:
    dtype = getattr(torch, name)
    assert to_torch(name) is dtype
    assert canonical_dtype(dtype) == name
    assert itemsize(dtype) == dtype.itemsize
    assert is_floating_point(dtype) == (dtype.is_floating_point and numbers_per_element(dtype) == 1)


@pytest.mark.parametrize("alias", ["half", "float", "double", "long", "int", "short", "cfloat", "cdouble"])
def test_short_names_are_those_of_torch(alias: str) -> None:
    assert to_torch(alias) is getattr(torch, alias)


@pytest.mark.parametrize("name", [name for name, (_, code) in DTYPES.items() if code is not None])
def test_codes_lead_back(name: str) -> None:
    assert from_safetensors_code(safetensors_code(name)) == name


def test_a_misspelt_dtype_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        canonical_dtype("bfloat17")
    assert str(caught.value).startswith("'bfloat17' is not a dtype. Did you mean 'bfloat16'")


def test_a_far_off_dtype_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"^'zzz' is not a dtype\. Known dtypes: bool, uint8, .*complex128\.$"):
        canonical_dtype("zzz")


@pytest.mark.parametrize("thing", [None, 3, object, ["float16"]])
def test_what_is_no_dtype_at_all(thing: object) -> None:
    with pytest.raises(ConfigError, match="is not a dtype"):
        canonical_dtype(thing)


def test_dtypes_that_safetensors_lacks() -> None:
    with pytest.raises(ConfigError) as caught:
        safetensors_code("complex128")
    assert str(caught.value) == "safetensors cannot hold dtype 'complex128'. Cast it, or write a .pth file instead."
    with pytest.raises(ConfigError) as caught:
        from_safetensors_code("F33")
    assert str(caught.value).startswith("'F33' is not a dtype of safetensors that this version of mmfsdp knows. Did")
    with pytest.raises(ConfigError, match=r"Only safetensors holds 'float6_e2m3fn_x4' \(F6_E2M3\)"):
        to_torch("float6_e2m3fn_x4")
