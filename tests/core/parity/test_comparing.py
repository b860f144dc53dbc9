"""Recording in one process, and comparing records: what is equal, what differs, and records that are incomplete."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import mmfsdp
from mmfsdp.errors import CheckpointNotFoundError, ConfigError, FormatError
from mmfsdp.parity import Key, comparison_page
from mmfsdp.parity.records.record_files import read_record


def train(
    folder: Path, steps: int = 2, lr: float = 1e-2, dim: int = 6, samples: int = 8, data: int = 1, **options: Any
) -> Path:  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, dim), nn.BatchNorm1d(dim), nn.Linear(dim, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    torch.manual_seed(data)
    with mmfsdp.recording(folder, model, optimizer, **options) as recording:
        for _ in range(steps):
            loss = F.cross_entropy(model(torch.randn(samples, 4)), torch.randint(0, 3, (samples,)))
            recording.loss(loss)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return folder


def kinds(folder: Path) -> list[str]:
    seen: dict[str, None] = {}
    for entry in read_record(folder)[0].entries:
        seen.setdefault(entry.key.kind)
    return [*seen]


def test_what_is_recorded_in_order(tmp_path: Path) -> None:
    assert kinds(train(tmp_path / "a", steps=1)) == [
        "initial parameter", "input", "output", "loss", "gradient of output", "gradient before clipping", "norm",
        "gradient", "setting", "update", "state", "parameter", "buffer",
    ]  # fmt: skip


def test_a_run_is_equal_to_itself(tmp_path: Path) -> None:
    found = mmfsdp.compare(train(tmp_path / "a"), train(tmp_path / "b"), rtol=0)
    assert found.same
    assert len(found.compared) > 100
    assert str(found).startswith("Equal: ")


def test_recording_changes_nothing(tmp_path: Path) -> None:
    clip, state = torch.nn.utils.clip_grad_norm_, []
    for folder in (tmp_path / "a", None):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if folder is None:
            model(torch.randn(2, 3)).sum().backward()
            optimizer.step()
        else:
            with mmfsdp.recording(folder, model, optimizer):
                model(torch.randn(2, 3)).sum().backward()
                optimizer.step()
        state.append(model.weight.detach().clone())
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
    assert torch.equal(*state)
    assert torch.nn.utils.clip_grad_norm_ is clip


def test_the_first_difference(tmp_path: Path) -> None:
    found = mmfsdp.compare(train(tmp_path / "a"), train(tmp_path / "b", lr=3e-2))
    assert not found.same
    assert found.first is not None
    assert found.first.key == Key(0, "setting", "0.weight[lr]", 0)
    assert found.first.why == "the optimizer is set to 0.03, and to 0.01 in the reference"
    update = next(difference for difference in found.differences if difference.key.kind == "update")
    assert update.why == "a factor of 3, as of 3 micro-batches that are summed, or divided twice"
    assert found.first.equal_before == Key(0, "gradient", "2.bias", 0)
    assert "The first difference: setting of 0.weight[lr] (step 0)" in str(found)
    assert json.loads(json.dumps(found.describe()))["differences"][0]["name"] == "0.weight[lr]"


def train_bare(folder: Path, decay: float = 0.1, between: Any = None) -> Path:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": decay}]
    if decay == 0.1:
        groups = [{"params": [model.weight, model.bias]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=decay != 0.1)
    with mmfsdp.recording(folder, model, optimizer):
        for _ in range(2):
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if between is not None:
                with torch.no_grad():
                    model.weight.copy_(between(model.weight))
    return folder


def test_a_setting_of_one_parameter(tmp_path: Path) -> None:
    one = train_bare(tmp_path / "a")
    assert mmfsdp.compare(one, train_bare(tmp_path / "same"), rtol=0).same
    first = mmfsdp.compare(one, train_bare(tmp_path / "b", decay=0.0)).first
    assert first is not None
    assert first.key == Key(0, "setting", "each parameter[weight_decay]", 0)
    assert first.why == "the optimizer's setting for 'bias' is -0.1 from the reference"


@pytest.mark.parametrize("change", [torch.neg, lambda held: held.flip(0), lambda held: held[:, [1, 0, 2, 3, 4, 5]]])
def test_what_changes_between_steps_and_keeps_the_norm(change: Any, tmp_path: Path) -> None:
    first = mmfsdp.compare(train_bare(tmp_path / "a"), train_bare(tmp_path / "b", between=change)).first
    assert first is not None
    assert str(first.key) == "parameter changed between steps of weight (step 1)"


def test_perturbed_runs_are_the_yardstick(tmp_path: Path) -> None:
    reference = train(tmp_path / "a")
    perturbed = [train(tmp_path / f"a{seed}", perturb=seed) for seed in (1, 2)]
    assert not mmfsdp.compare(reference, perturbed[0], rtol=0).same
    found = mmfsdp.compare(reference, train(tmp_path / "b"), perturbed=perturbed)
    assert found.same
    assert not mmfsdp.compare(reference, train(tmp_path / "c", lr=1.001e-2), perturbed=perturbed).same


def test_each_nth_step(tmp_path: Path) -> None:
    steps = {entry.key.step for entry in read_record(train(tmp_path / "a", steps=5, every=2))[0].entries}
    assert steps == {0, 2, 4}


def test_other_steps_and_models_are_reported(tmp_path: Path) -> None:
    found = mmfsdp.compare(train(tmp_path / "a", steps=1), train(tmp_path / "b", steps=3))
    assert found.same
    assert "Only the other run has 2 of its steps, from step 1 on." in found.notes
    found = mmfsdp.compare(train(tmp_path / "a"), train(tmp_path / "c", dim=7))
    assert found.first is not None
    assert found.first.key.kind == "initial parameter"
    assert found.first.why == "shapes (6, 4) and (7, 4)"


def test_other_data_is_reported_and_what_it_does_not_reach_is_compared(tmp_path: Path) -> None:
    one = train(tmp_path / "a", steps=1)
    found = mmfsdp.compare(one, train(tmp_path / "b", steps=1, data=2))
    assert found.first is not None
    assert (found.first.key.kind, found.first.key.name) == ("input", "[0][0]")
    assert [item.key.kind for item in found.compared if not item.differs][:6] == ["initial parameter"] * 6
    found = mmfsdp.compare(one, train(tmp_path / "c", steps=1, samples=6))
    assert found.skipped["shapes differ: other batches, or no dimension of samples"] > 5
    assert found.first is not None
    assert found.first.key.kind == "loss"


@pytest.mark.parametrize("which", [0, 1])
def test_a_record_that_is_cut_off_is_read_to_its_end(which: int, tmp_path: Path) -> None:
    folders = [train(tmp_path / "a"), train(tmp_path / "b")]
    path = folders[which] / "rank00000.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 4 // 5])
    found = mmfsdp.compare(*folders)
    assert any("is cut off or damaged" in note for note in found.notes)
    assert len(found.compared) > 60
    assert {item.key.step for item in found.compared} == {0, 1}
    assert found.same, str(found)  # what was not written is no difference
    assert which == 0 or found.skipped["a record ends in its step"] > 5


def test_missing_ranks_are_reported(tmp_path: Path) -> None:
    path = train(tmp_path / "a") / "rank00000.jsonl"
    head, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(head), "world": 2}) + "\n" + rest)
    found = mmfsdp.compare(tmp_path / "a", tmp_path / "a")
    assert "Of the reference, the files of ranks 1 of 2 are missing." in found.notes


@pytest.mark.parametrize("content", ["", "x", "[]", "{}", '{"mmfsdp_record": 99, "rank": 0, "world": 1}'])
def test_other_files_are_rejected(content: str, tmp_path: Path) -> None:
    (tmp_path / "rank00000.jsonl").write_text(content)
    with pytest.raises(FormatError):
        mmfsdp.compare(tmp_path, tmp_path)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="holds no record"):
        mmfsdp.compare(tmp_path, tmp_path)
    with pytest.raises(ConfigError, match=r"recording\(\) needs depth >= 0, every >= 1"):
        train(tmp_path / "a", every=0)
    with pytest.raises(ConfigError, match="rtol >= 0"):
        mmfsdp.compare(tmp_path, tmp_path, rtol=-1)


def test_a_full_disk_stops_the_recording_and_not_the_training(caplog: pytest.LogCaptureFixture) -> None:
    folder = Path("/dev/full")  # a folder cannot be made there
    with caplog.at_level(logging.ERROR, logger="mmfsdp.parity"):
        train(folder)
    assert "Recording has stopped, training goes on" in caplog.text


def test_a_disk_that_fills_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "rank00000.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.ERROR, logger="mmfsdp.parity"):
        train(tmp_path / "a")
    assert "No space left on device" in caplog.text


def test_comparing_needs_no_torch(tmp_path: Path) -> None:
    train(tmp_path / "a")
    script = (
        "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\nimport mmfsdp\n"
        "assert mmfsdp.compare(sys.argv[1], sys.argv[1]).same"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "a"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_where_numbers_began_that_are_not_finite(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].register_forward_hook(lambda _, args, output: output.log())
    with mmfsdp.recording(tmp_path / "a", model, optimizer) as recording:
        assert recording.not_finite == ""
        model(torch.randn(2, 4)).sum().backward()
        with caplog.at_level(logging.ERROR, logger="mmfsdp.parity"):
            optimizer.step()
    assert recording.not_finite.startswith("output of 0 (step 0) is the first with infinite or NaN elements: ")
    assert recording.not_finite in caplog.text


def test_the_page_shows_what_differs(tmp_path: Path) -> None:
    found = mmfsdp.compare(train(tmp_path / "a"), train(tmp_path / "b", lr=3e-2))
    page = comparison_page(found)
    assert f"<h1>Different: {len(found.differences)} of {len(found.compared)} tensors</h1>" in page
    assert "update of 0.weight (step 0)" in page
    assert page.count("<svg") == 2


def test_steps_that_only_make_states_do_not_count(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with mmfsdp.recording(tmp_path, model, optimizer):
        get_optimizer_state_dict(model, optimizer)  # makes a step with learning rate 0
        for _ in range(2):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {entry.key.step for entry in read_record(tmp_path)[0].entries} == {0, 1}


class Nets(nn.Module):
    """A generator and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.critic(self.maker(noise))


def play(folder: Path, lr: float = 0.1, spoil: float = 0.0) -> Path:
    """Two updates of the critic and one of the generator in each of two steps."""
    torch.manual_seed(0)
    model = Nets()
    critic, maker = torch.optim.AdamW(model.critic.parameters(), lr), torch.optim.SGD(model.maker.parameters(), 0.1)
    with mmfsdp.recording(folder, model, [critic, maker]):
        for step in range(2):
            for optimizer in (critic, critic, maker):
                model(torch.randn(8, 4)).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
                optimizer.step()
                model.zero_grad()
            with torch.no_grad():
                model.critic.weight.add_(spoil * (step == 0))
    return folder


def test_several_optimizers(tmp_path: Path) -> None:
    """A step ends with the last one's step; the others may step more often within it."""
    one = play(tmp_path / "a")
    calls: dict[str, set[tuple[int, int]]] = {}
    for entry in read_record(one)[0].entries:
        calls.setdefault(f"{entry.key.kind} of {entry.key.name}", set()).add((entry.key.step, entry.key.call))
    assert calls["update of critic.weight"] == calls["state of critic.bias[exp_avg]"] == {
        (step, call) for step in range(2) for call in range(2)
    }  # fmt: skip
    assert calls["update of maker.weight"] == {(0, 0), (1, 0)}
    assert calls["norm of "] == {(step, call) for step in range(2) for call in range(3)}
    assert mmfsdp.compare(one, play(tmp_path / "b"), rtol=0).same
    found = mmfsdp.compare(one, play(tmp_path / "c", lr=0.2))
    assert found.first is not None
    assert found.first.key == Key(0, "setting", "critic.weight[lr]", 0)
    found = mmfsdp.compare(one, play(tmp_path / "d", spoil=1e-2))
    assert found.first is not None
    assert str(found.first.key) == "parameter changed between steps of critic.weight (step 1)"
    with pytest.raises(ConfigError, match="an optimizer or a list of optimizers"):
        mmfsdp.recording(tmp_path, Nets(), []).__enter__()


def test_other_dtypes_are_one_note(tmp_path: Path) -> None:
    for name, dtype in (("a", torch.float64), ("b", torch.float32)):
        torch.manual_seed(0)
        model = nn.Linear(3, 2).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mmfsdp.recording(tmp_path / name, model, optimizer):
            model(torch.ones(4, 3, dtype=dtype)).sum().backward()
            optimizer.step()
    [note] = mmfsdp.compare(tmp_path / "a", tmp_path / "b").notes
    assert note.startswith(
        "initial parameter of weight (step 0) is float64 in the reference and float32 in the other run,"
    )
    assert note.endswith(" more.")
