"""Without torch, or with one that is too old, everything that needs it raises one error with the command to type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from mmfsdp.basics import pip_install

NEEDS_TORCH = [
    *(f"from mmfsdp import {name}" for name in ("shard", "plan", "load_checkpoint", "FullyShardedDataParallel")),
    *(
        f"import mmfsdp.{subpackage}"
        for subpackage in ("sharding", "runtime", "saving", "state", "collective", "torch_style")
    ),
    "import mmfsdp.testing",
    "from mmfsdp.planning import plan",
    "from mmfsdp.sharding.apply import shard",
]
NEEDS_NO_TORCH = [
    "import mmfsdp, mmfsdp.errors, mmfsdp.config, mmfsdp.checkpoint, mmfsdp.planning",
    "from mmfsdp import ShardConfig; ShardConfig()",
    "from mmfsdp.checkpoint import convert, diff, open_layout, verify",
]
CODE = """
import json, sys
if sys.argv[1] == 'none':
    sys.modules['torch'] = None
said = {}
for statement in sys.argv[2:]:
    try:
        exec(statement)
    except ImportError as error:
        from mmfsdp.errors import MissingTorchError, MmfsdpError
        assert isinstance(error, MissingTorchError) and isinstance(error, MmfsdpError), repr(error)
        said[statement] = str(error)
print(json.dumps(said))
"""


LOOKED_UP = """
import sys
sys.modules['torch'] = None
import mmfsdp, mmfsdp.planning, mmfsdp.rehearsal
from mmfsdp.errors import MissingTorchError
for module, name in ((mmfsdp, 'shard'), (mmfsdp.planning, 'plan'), (mmfsdp.rehearsal, 'rehearse')):
    assert not hasattr(module, name), name
    assert getattr(module, name, None) is None
    assert name in dir(module)
    try:
        getattr(module, name)
    except MissingTorchError as error:
        print(error)
help(mmfsdp)
"""


def said(statements: list[str], path: Path | None = None) -> dict[str, str]:
    """Return what each statement's error says, where torch is missing or is the one found in ``path``."""
    env = dict(os.environ)
    if path is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(path), env.get("PYTHONPATH", "")])
    words = [sys.executable, "-c", CODE, "none" if path is None else "old", *statements]
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_missing() -> None:
    found = said([*NEEDS_NO_TORCH, *NEEDS_TORCH])
    assert [*found] == NEEDS_TORCH
    for message in found.values():
        assert message.startswith("mmfsdp.")
        assert "needs torch 2.9 or newer, which is not installed" in message
        assert message.endswith(f"Install it with: {pip_install('mmfsdp[torch]')}")


def test_too_old(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("__version__ = '2.8.0+cpu'\n")
    for message in said(["from mmfsdp import shard", "import mmfsdp.saving"], tmp_path).values():
        assert "needs torch 2.9 or newer, and torch 2.8.0+cpu is installed." in message
        assert message.endswith(f"Upgrade it with: {pip_install('mmfsdp[torch]', upgrade=True)}")


def test_looking_up() -> None:
    done = subprocess.run([sys.executable, "-c", LOOKED_UP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *_ = done.stdout.splitlines()
    assert first.startswith("mmfsdp.shard needs torch 2.9 or newer, which is not installed."), first
    assert "class ShardConfig(" in done.stdout
