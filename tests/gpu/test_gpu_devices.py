"""The program's own choice of a GPU stays."""

from __future__ import annotations

import pytest
import torch

from mmfsdp.sharding.devices import select_device
from mmfsdp.testing import single_rank


@pytest.mark.usefixtures("on_cuda")
def test_the_devices_choice_of_the_program_stays() -> None:
    last = torch.cuda.device_count() - 1
    torch.cuda.set_device(last)
    with single_rank():
        select_device("cuda")
    assert torch.cuda.current_device() == last
