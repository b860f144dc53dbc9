"""A config that needs a package which is not installed is answered with the command that installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mmengine.registry import MODELS, DefaultScope
from tests.forked_scripts import python

from mmfsdp.errors import ConfigError
from mmfsdp.frontends import read_config
from mmfsdp_mmengine.configs.lookup import UnknownNameError
from mmfsdp_mmengine.configs.packages import to_install, what_to_install

READ_BASE = "from mmengine.config import read_base\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("custom_imports = dict(imports=['mmrotate.models'])", "pip install mmrotate"),
        (f"{READ_BASE}from mmrotate.models import RotatedRetinaNet", "pip install mmrotate"),
        (f"{READ_BASE}from mmaction.models import Recognizer3D", "pip install mmaction2"),
        ("custom_imports = dict(imports=['nowhere.models'])", "Install the package that it belongs to, or correct"),
        (f"{READ_BASE}from torch.nn import Linnear", "Failed to import Linnear from torch.nn in "),
    ],
)
def test_reading(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.py").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / "config.py")
    assert message in caught.value.message


def test_bases_of_other_packages() -> None:
    # MMEngine says either of these, depending on setuptools' release.
    error = ModuleNotFoundError("No module named 'pkg_resources'")
    assert what_to_install(error).endswith("pip install 'setuptools<81'")
    error = ModuleNotFoundError("mmseg is not installed, please install mmseg manually")
    assert what_to_install(error) == "Install it with: pip install mmsegmentation"
    assert what_to_install(ValueError("something else")) == ""


def test_a_scope_whose_modules_cannot_be_imported_is_one_error(tmp_path: Path) -> None:
    package = tmp_path / "broken_scope"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "models.py").write_text("raise ImportError(\"No module named 'mmcv._ext'\")")
    registries = ", ".join(f"{name} as {name}_" for name in ("HOOKS", "OPTIMIZERS", "MODELS"))
    own = [
        f"{name} = Registry({name}_.name, parent={name}_, locations=['broken_scope.models'])"
        for name in ("HOOKS", "OPTIMIZERS", "MODELS")
    ]
    lines = [f"from mmengine.registry import Registry, {registries}", *own]
    (package / "registry.py").write_text("\n".join(lines))
    (tmp_path / "config.py").write_text(
        "default_scope = 'broken_scope'\ncustom_imports = dict(imports=['mmfsdp_mmengine'])\n"
        "model = dict(type='M')\noptim_wrapper = dict(optimizer=dict(type='O'))\n"
        "custom_hooks = [dict(type='A'), dict(type='B')]\n"
    )
    code = (
        "from mmfsdp.frontends import read_config\n"
        "for item in read_config('config.py').diagnose(None).findings:\n"
        "    if item.level == 'error': print(item.path, item.here)"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [python(), "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    model, scope = done.stdout.splitlines()
    assert model.startswith("model The model cannot be built: ")
    assert scope.startswith("default_scope No name can be looked up, because importing the modules of 'broken_scope'")
    assert "no compiled operations" in model
    assert "no compiled operations" in scope


def test_a_default_scope() -> None:
    with DefaultScope.overwrite_default_scope("mmrotate"), pytest.raises(UnknownNameError) as caught:
        MODELS.build({"type": "RotatedRetinaNet"})
    assert "default_scope is 'mmrotate', but that package is not installed (pip install mmrotate)." in str(caught.value)


def test_what_is_installed_or_unknown_has_no_command() -> None:
    assert to_install("torch") is None
    assert to_install("mammals") is None
