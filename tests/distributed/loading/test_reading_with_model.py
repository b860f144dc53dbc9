"""`local` checkpoints of stock MMEngine that lack shapes, read with the model itself in place of a whole checkpoint."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tests.distributed.stock_local import save_local, toy
from tests.forked_scripts import python

from mmfsdp.checkpoint import convert, layout_of_model, open_layout
from mmfsdp.errors import CorruptCheckpointError, IncompleteCheckpointError
from mmfsdp.sharding.meta import parameters_on_meta
from mmfsdp.testing import run_ranks
from mmfsdp_cli.main import app

pytestmark = pytest.mark.filterwarnings("ignore")  # FSDP1 is deprecated
ROOT = Path(__file__).parents[3]
MODEL = ("--model", "tests.distributed.stock_local:toy", "--model-arg", "kind=plain")


def cli(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the command line where `tests` can be imported, without it being on any path."""
    code = "import sys; sys.path.remove(''); from mmfsdp_cli.main import main; main()"
    command = [python(), "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("flat", [False, True], ids=["orig_params", "flat"])
@pytest.mark.parametrize(("kind", "optimizer", "keep"), [("plain", "sgd", True), ("frozen", "adamw", False)])
def test_shapes_order_and_ties_come_from_the_model(
    tmp_path: Path, kind: str, optimizer: str, keep: bool, flat: bool
) -> None:
    run_ranks(save_local, 3, tmp_path, kind, not flat, optimizer, keep)
    with pytest.raises(IncompleteCheckpointError, match="does not say the shapes"):
        open_layout(tmp_path / "local")
    with parameters_on_meta():
        model = toy(kind)
    convert(tmp_path / "local", tmp_path / "out.pth", reference=layout_of_model(model))
    found, truth = torch.load(tmp_path / "out.pth")["state_dict"], torch.load(tmp_path / "truth.pth")["state_dict"]
    assert {*found} == {*truth}
    for name, tensor in truth.items():
        assert torch.equal(found[name], tensor), name
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


def test_another_model(tmp_path: Path) -> None:
    run_ranks(save_local, 2, tmp_path, "plain", True, "sgd", True)
    other = toy("plain")
    other.stem = torch.nn.Conv1d(1, 4, 3)
    with pytest.raises(CorruptCheckpointError, match=r"'stem\.weight' has 15 elements in local \(expected 12"):
        open_layout(tmp_path / "local", reference=layout_of_model(other))


def test_the_command_line_builds_the_model(tmp_path: Path) -> None:
    run_ranks(save_local, 2, tmp_path, "plain", False, "sgd", True)
    source = tmp_path / "local"
    done = cli("diff", source, tmp_path / "truth.pth", "--keep", "model", *MODEL)
    assert (done.returncode, done.stdout.splitlines()[-1][:8]) == (0, "the same"), done.stdout
    run = CliRunner()
    unknown = run.invoke(app, ["verify", str(source)])
    assert unknown.exit_code == 1
    assert "Or give the model itself: --model." in " ".join(unknown.stderr.split())
    assert run.invoke(app, ["verify", str(source), *MODEL]).exit_code == 0
    assert run.invoke(app, ["convert", str(source), str(tmp_path / "out.pth"), *MODEL]).exit_code == 0
    assert "head.weight" in run.invoke(app, ["inspect", str(source), *MODEL]).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "nowhere.models:build"), "no module named 'nowhere'"),
        (("--model", "tests.distributed.stock_local:toi"), "Did you mean 'toy'"),
        (("--model", "tests.distributed.stock_local:toy"), "missing 1 required positional argument: 'kind'"),
        (("--model", "json:dumps", "--model-arg", "obj=1"), "must return an nn.Module, got '1' (type str)"),
        (("--model", "nothing.py"), "There is no config 'nothing.py'"),
        (("--model", "pyproject.toml"), "No installed package reads '.toml' configs"),
        ((*MODEL[:2], "--model-arg", "kind"), "'kind' is not of the form KEY=VALUE"),
        ((*MODEL, "--reference", "a.pth"), "give --reference or --model, not both"),
        (MODEL[2:], "needs --model"),
    ],
)
def test_models_that_cannot_be_built(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "local").mkdir()
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "local"), *words])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
