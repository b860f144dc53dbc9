"""A run whose checkpoints lie in S3: saved by two ranks in the background, kept, removed, and resumed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests.distributed.store_runs import trained
from tests.stores.conftest import keys

import mmfsdp
from mmfsdp.testing import run_ranks

NAMES = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")


def train(rank: int, environ: dict[str, str], stop: int, kind: str, url: str | None = "s3://bucket/run") -> Any:
    os.environ.update(environ)
    model, _ = trained(url, stop, max_to_keep=1, kind=kind)
    return mmfsdp.model_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("kind", ["sharded", "local", "full"])
def test_a_run_goes_on_from_s3(kind: str, s3: Any) -> None:
    environ = {name: os.environ[name] for name in NAMES}
    whole = run_ranks(train, 2, environ, 7, kind, None)
    run_ranks(train, 2, environ, 5, kind)
    # What a killed save has left: files without a manifest.
    s3.put_object(Bucket="bucket", Key="run/step_6/rank7.pth", Body=b"half")
    resumed = run_ranks(train, 1, environ, 7, kind)
    torch.testing.assert_close(resumed[0], whole[0], rtol=1e-5, atol=1e-6)
    names = {"/".join(key.split("/")[:2]) for key in keys(s3)}
    assert names == {"run/holder.json", "run/run.json", f"run/step_6{'.pth' if kind == 'full' else ''}"}
    assert "run/step_6/rank7.pth" not in keys(s3)
