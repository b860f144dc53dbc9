"""A config that needs a package which is not installed is answered with the command that installs it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from tests.forked_scripts import python

from mmfsdp.errors import ConfigError
from mmfsdp.frontends import read_config
from mmfsdp_mmengine.configs.lookup import UnknownNameError
from mmfsdp_mmengine.configs.packages import to_install, what_to_install

RELEASE = torch.__version__.partition("+")[0]
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


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the temporary file that MMEngine then leaves open
def test_a_config_that_was_copied_out_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "site" / "mmyolo" / ".mim" / "configs" / "v5"
    shipped.mkdir(parents=True)
    (shipped.parents[2] / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    text = "_base_ = ['../_base_/default_runtime.py']"
    for path in (shipped / "v5_s.py", tmp_path / "v5_s.py", tmp_path / "mine.py"):
        path.write_text(text)
    for name, end in (
        ("v5_s.py", "In a config of your own, write: _base_ = 'mmyolo::v5/v5_s.py'"),
        ("mine.py", "default_runtime.py'."),
    ):
        with pytest.raises(ConfigError) as caught:
            read_config(tmp_path / name)
        assert caught.value.message.endswith(end)
        del caught
        gc.collect()


def test_bases_of_other_packages() -> None:
    # MMEngine says either of these, depending on setuptools' release.
    error = ModuleNotFoundError("No module named 'pkg_resources'")
    assert what_to_install(error).endswith("pip install 'setuptools<81'")
    error = ModuleNotFoundError("mmseg is not installed, please install mmseg manually")
    assert what_to_install(error) == "Install it with: pip install mmsegmentation"
    assert what_to_install(ValueError("something else")) == ""


MISSING = "raise ModuleNotFoundError(\"No module named '{}'\")"
FAILURES = {
    # What is raised, by which file of the package; what the finding says.
    "mmcv": (MISSING.format("mmcv"), "__init__", "Install it with: pip install 'mmcv-lite<2.2'"),
    "release of mmcv": ("raise AssertionError('MMCV==3.0 is used')", "__init__", "AssertionError: MMCV==3.0 is used"),
    "mmcv-lite": (MISSING.format("mmcv._ext"), "models", "no compiled operations"),
    "torchvision": (MISSING.format("torchvision"), "models", f"pip install torch=={RELEASE} torchvision"),
    "build of torchvision": (
        "raise RuntimeError('operator torchvision::nms does not exist')",
        "models",
        f"Install both together: pip install --force-reinstall torch=={RELEASE} torchvision",
    ),
    "compiled code": ("raise OSError('libcudart.so: cannot open')", "models", "Repair or reinstall the package."),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_scope_whose_modules_cannot_be_imported_is_one_error(tmp_path: Path, failure: str) -> None:
    """Its model, hooks and optimizer are not looked up; what can be said of the config is said all the same."""
    package = tmp_path / "broken_scope"
    package.mkdir()
    registries = ", ".join(f"{name} as {name}_" for name in ("HOOKS", "OPTIMIZERS", "MODELS"))
    own = [
        f"{name} = Registry({name}_.name, parent={name}_, locations=['broken_scope.models'])"
        for name in ("HOOKS", "OPTIMIZERS", "MODELS")
    ]
    raised, file, advice = FAILURES[failure]
    for name in ("__init__", "models"):
        (package / f"{name}.py").write_text(raised if name == file else "")
    (package / "registry.py").write_text("\n".join([f"from mmengine.registry import Registry, {registries}", *own]))
    (tmp_path / "config.py").write_text(
        "default_scope = 'broken_scope'\ncustom_imports = dict(imports=['mmfsdp_mmengine'])\n"
        "model = dict(type='M')\noptim_wrapper = dict(optimizer=dict(type='AdamW'))\n"
        "custom_hooks = [dict(type='A'), dict(type='EMAHook')]\n"
    )
    code = (
        "from mmfsdp.frontends import read_config\n"
        "for item in read_config('config.py').diagnose(None).findings:\n"
        "    print(item.level, item.path, item.here)"
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
    error, warning = done.stdout.splitlines()
    assert error.startswith("error default_scope No name of it can be looked up: ")
    assert advice in error
    assert warning.startswith("warning strategy nothing is sharded")


def test_a_default_scope() -> None:
    with DefaultScope.overwrite_default_scope("mmrotate"), pytest.raises(UnknownNameError) as caught:
        MODELS.build({"type": "RotatedRetinaNet"})
    assert "default_scope is 'mmrotate', but that package is not installed (pip install mmrotate)." in str(caught.value)


def test_what_is_installed_or_unknown_has_no_command() -> None:
    assert to_install("torch") is None
    assert to_install("mammals") is None
