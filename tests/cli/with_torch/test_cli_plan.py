"""``plan``, ``rehearse``, ``fit`` and ``measure``: what core returns, for models by name and settings of all kinds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.support import fields_of, invoke
from tests.console_blocks import without_gloo
from tests.forked_scripts import environ_with_commands
from torch import nn

import mmfsdp
from mmfsdp.basics import human_bytes, pip_install
from mmfsdp.planning import estimate_memory
from mmfsdp.rehearsal import advise

HERE = "tests.cli.with_torch.test_cli_plan"
BLOCKS = ("--set", "wrap.kind=module_class", "--set", "wrap.classes=Block")


class Block(nn.Sequential):
    """A unit."""


def build(width: int = 4, depth: int = 2) -> nn.Module:
    assert isinstance(width, int)
    return nn.Sequential(*(Block(nn.Linear(width, width)) for _ in range(depth)), nn.Linear(width, 3))


class Reader(nn.Module):
    """Takes tokens, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 4), nn.Linear(4, 16)
        self.register_buffer("scale", torch.ones(4))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        hints: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        assert attention_mask is None or not attention_mask.is_floating_point()
        assert hints is None or hints.is_floating_point()
        logits = self.head(self.embed(input_ids))
        loss = logits.mean() if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss}


def called(command: str, *words: object) -> tuple[int, str, str]:
    result = invoke(command, f"{HERE}:build", *words)
    return result.exit_code, result.stdout, result.stderr


def plan(*words: object) -> tuple[int, str, str]:
    return called("plan", *words)


def rehearse(*words: object) -> tuple[int, str, str]:
    return called("rehearse", *words)


def wrapped(**settings: object) -> dict[str, object]:
    return {"wrap": {"kind": "module_class", "classes": "Block"}, **settings}


def test_it_is_the_plan_of_core() -> None:
    truth = mmfsdp.plan(build(8, 3), wrapped(), 5)
    arguments = ("--ranks", 5, *BLOCKS, "--model-arg", "width=8", "--model-arg", "depth=3")
    memory = f"\n{estimate_memory(truth)}\n\nFor the optimizer's state: --optimizer adamw, sgd-momentum, ...\n"
    assert plan(*arguments) == (0, f"{truth.table()}\n{memory}", "")
    assert plan(*arguments, "--tree") == (0, f"{truth.tree()}\n{memory}", "")
    assert mmfsdp.ShardPlan.from_json(plan(*arguments, "--json")[1]) == truth


def test_the_memory_of_a_step() -> None:
    truth = mmfsdp.plan(build(), wrapped(), 2)
    for optimizer, given in (("AdamW", "adamw"), ("3", 3)):
        step = estimate_memory(truth, given)
        assert plan(*BLOCKS, "--ranks", 2, "--optimizer", optimizer)[1] == f"{truth}\n\n{step}\n"
        shown = fields_of("plan", plan(*BLOCKS, "--ranks", 2, "--optimizer", optimizer, "--json")[1])
        assert shown == {"plan": truth.to_dict(), "plan_is_suggested": False, "memory": step.describe()}


def test_settings_from_files(tmp_path: Path) -> None:
    truth = mmfsdp.plan(build(), wrapped(sharding="HYBRID_SHARD", precision={"param_dtype": "bfloat16"}), (2, 4))
    (tmp_path / "a.json").write_text(json.dumps(wrapped(sharding="HYBRID_SHARD")))
    (tmp_path / "a.toml").write_text('sharding = "HYBRID_SHARD"\n[wrap]\nkind = "module_class"\nclasses = "Block"\n')
    for name in ("a.json", "a.toml"):
        config = ("--config", tmp_path / name)
        code, text, _ = plan(*config, "--set", "precision.param_dtype=bfloat16", "--ranks", "2x4", "--json")
        assert (code, mmfsdp.ShardPlan.from_json(text)) == (0, truth)
        assert plan(*config, "--diff", tmp_path / "a.json", "--ranks", "2x4")[1] == "The plans are the same.\n"
    old, new = mmfsdp.plan(build(), {}, (1, 8)), mmfsdp.plan(build(), wrapped(sharding="HYBRID_SHARD"), (1, 8))
    assert plan("--diff", tmp_path / "a.json", "--ranks", "1x8")[1] == f"{old.diff(new)}\n"


def test_a_bare_value_and_settings_of_its_section_go_together() -> None:
    words = ("--set", "precision=bf16"), ("--set", "precision.storage_dtype=float32")
    truth = mmfsdp.plan(build(), {"precision": {"preset": "bf16", "storage_dtype": "float32"}}, 8)
    for first, second in (words, words[::-1]):
        assert mmfsdp.ShardPlan.from_json(plan(*first, *second, "--json")[1]) == truth


def test_the_chart_scales_with_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = plan(*BLOCKS, "--ranks", 3, "--model-arg", "width=64", "--chart")[1].splitlines()
    bars = {line.split("  ")[0].strip(): line.count("█") for line in lines if "█" in line}
    assert bars["{0..1}"] > 10 * bars["(root)"] > 0
    assert bars["2 ranks"] > bars["rank 2"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "0"), "'0' is not a number of ranks"),
        (("--set", "sharding.strateg=FULL_SHARD"), "ShardConfig.sharding.strateg: unknown setting 'strateg'. Did you"),
        (("--set", "engine=fsdp1", "--set", "engine.x=2"), "engine is 'fsdp1', which has no settings of its own"),
        (("--set", "sharding.shard_size=2", "--set", "sharding=FUL"), "ShardConfig.sharding: 'FUL' is not accepted"),
        (("--set", "sharding.strategy=HYBRID_SHARD"), "(config: sharding.shard_size)"),
        (("--set", "wrap.kind=module_class", "--set", "wrap.classes=Blok"), "Did you mean 'Block'?"),
        (("--config", "nowhere.json"), "There is no file 'nowhere.json'"),
        (("--config", "README.md"), "README.md is not a .json, .toml or .yaml file"),
        (("--model-arg", "width=wide"), "build(width='wide') failed: AssertionError"),
        (("--optimizer", "adamv"), "'adamv' is not a known optimizer. Did you mean 'adam' or"),
        (("--optimizer", "adam", "--chart"), "not with --params, --chart and --diff, which do not show the memory"),
        (("--tree", "--json"), "Give one of --tree, --params, --chart, --json and --diff"),
    ],
)
def test_wrong_settings(words: tuple[str, ...], message: str) -> None:
    code, out, err = plan(*words)
    assert (code, out) == (2, "")
    assert message in " ".join(err.replace("│", " ").split())


def test_help_needs_no_torch() -> None:
    heavy = "assert not {*sys.modules} & {'torch', 'rich'}"
    code = f"import sys; from mmfsdp_cli.main import main\ntry: main()\nfinally: {heavy}"
    for command in ("plan", "rehearse", "doctor"):
        done = subprocess.run([sys.executable, "-c", code, command, "--help"], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


def test_doctor_without_the_package_that_reads_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmfsdp.frontends.config_readers.entry_points", lambda group: ())
    (tmp_path / "config.py").touch()
    result = invoke("doctor", tmp_path / "config.py")
    assert result.exit_code == 2
    assert pip_install("mmfsdp[torch]", "mmfsdp-mmengine[mmengine]") in result.stderr


@pytest.mark.exhaustive
def test_a_batch_rehearses_a_step() -> None:
    truth = mmfsdp.plan(build(), wrapped(), 2)
    step = advise(wrapped(), build(), torch.empty(6, 4, device="meta"), mesh=2)
    arguments = (*BLOCKS, "--ranks", 2, "--batch", "6x4")
    told = "With AdamW; for another one: --optimizer sgd-momentum, torch.optim:Adagrad, ..."
    assert rehearse(*arguments) == (0, f"{step}\n\n{truth}\n\n{told}\n", "")
    shown = rehearse(*arguments, "--json")[1]
    assert json.loads(shown)["rehearsal"] == json.loads(json.dumps(step.describe()))
    assert mmfsdp.ShardPlan.from_json(shown) == truth
    twice = json.loads(rehearse(*arguments, "--accumulate", 2, "--json")[1])["rehearsal"]
    assert [phase["name"] for phase in twice["phases"]].count("forward") == 2
    told = json.loads(rehearse(*arguments, "--accumulate", 2, "--reduce-each", "--json")[1])["rehearsal"]
    names = [[item["name"] for item in found["collectives"]] for found in (twice, told)]
    assert [found.count("reduce_scatter") for found in names] == [3, 6]
    sgd = mmfsdp.rehearse(truth, build(), torch.empty(6, 4, device="meta"), optimizer="sgd-momentum")
    given = ("--optimizer", "torch.optim:SGD", "--optimizer-arg", "momentum=0.9")
    head, *bars = rehearse(*arguments, *given, "--chart")[1].splitlines()
    assert head.startswith(f"Memory of rank 0 over a step, peak {human_bytes(sgd.peak.nbytes)}:")
    assert {"backward", "zero_grad"} <= {bar.partition(",")[0] for bar in bars}
    device = "a100@roce-50"
    named = advise(
        wrapped(), build(), {"input": torch.empty(6, 4, device="meta")}, mesh=2, optimizer="sgd", device=device
    )
    words = ("--ranks", 2, "--batch", "input=6x4:float32", "--optimizer", "sgd", "--device", device)
    assert f"\n\n{named.time()}\n" in (shown := rehearse(*BLOCKS, *words)[1])
    assert str(named) in shown
    told = json.loads(rehearse(*BLOCKS, *words, "--json")[1])
    assert (told["time"]["seconds"], told["rehearsal"]["device"]["name"]) == (named.time().seconds, device)


def test_a_batch_is_rehearsed_with_the_optimizer_of_the_plan(tmp_path: Path) -> None:
    settings = wrapped(optimizer={"lr": 0.02})
    (path := tmp_path / "muon.json").write_text(json.dumps(settings))
    words = (*BLOCKS, "--ranks", 2, "--batch", "6x4", "--config", path, "--device", "h100", "--json")
    shown = fields_of("rehearse", rehearse(*words)[1])
    step = mmfsdp.rehearse(settings, build(), torch.empty(6, 4, device="meta"), mesh=2)
    assert shown["rehearsal"]["static"] == dict(step.static)
    adamw = mmfsdp.rehearse(settings, build(), torch.empty(6, 4, device="meta"), mesh=2, optimizer="adamw")
    assert adamw.static["optimizer state"] > step.static["optimizer state"]


@pytest.mark.exhaustive
def test_a_page_shows_the_step_and_another_one(tmp_path: Path) -> None:
    other, page = tmp_path / "other.json", tmp_path / "step.html"
    other.write_text(json.dumps({"precision": "bf16"}))
    arguments = (*BLOCKS, "--ranks", 2, "--batch", "6x4", "--diff", other, "--html", page)
    code, told, _ = rehearse(*arguments)
    assert code == 0
    assert "precision" in told
    text = page.read_text(encoding="utf-8")
    step = mmfsdp.rehearse(mmfsdp.plan(build(), wrapped(), 2), build(), torch.empty(6, 4, device="meta"))
    assert f'Rank 0 holds most, <data value="{step.peak.nbytes}"' in text
    assert f"<b>{other}</b> needs" in text.replace("<wbr>", "")
    code, _, told = rehearse(*arguments)
    assert code == 2
    assert "exists already. Add --force to replace it." in " ".join(told.split())
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch", "6x"), "'6x' is not a tensor. Write its shape"),
        (("--batch", "6x4:int65"), "int65"),
        (("--batch", "6x4", "--batch", "x=6x4"), "give a name to all tensors, or to none"),
        (("--batch", "6x4", "--optimizer", "lion"), "'lion' is not an optimizer of torch.optim"),
        (("--batch", "6x5"), "The step failed in forward"),
        (("--batch", "6x4", "--diff", "a.json"), "--diff needs --html, which shows both steps."),
        ((), "Give the shapes of a batch with --batch, or for an MMEngine config --batch-size."),
        (("--batch", "6x4", "--html", "nowhere/a.html"), "the directory 'nowhere' does not exist."),
        (("--batch", "6x4", "--device", "h10"), "'h10' is not a device that is known"),
        (("--device", "h100"), "Give the shapes of a batch"),
        (("--batch", "x=6x4"), "Sequential does not take this batch"),
        (("--batch-size", "0"), "'0' is neither a number of samples nor 'own'"),
        (("--batch-size", "2"), "is for configs that describe their data"),
        (("--batch-size", "2", "--batch", "6x4"), "Give the shapes of a batch with --batch, or"),
        (("--batch-size", "2", "--batch-dim", "1"), "needs --batch, whose samples it counts"),
        (("--batch", "6x4", "--accumulate", "2", "--evaluate"), "which has no micro-batches. Drop --accumulate"),
        (("--batch", "6x4", "--optimizer-arg", "lr=1"), "needs --optimizer"),
        (("--batch", "6x4", "--optimizer", "sgd", "--optimizer-arg", "lrr=1"), "unexpected keyword argument 'lrr'"),
    ],
)
def test_a_batch_that_is_wrong(words: tuple[str, ...], message: str) -> None:
    code, shown, told = rehearse(*words)
    assert code == 2
    assert message in " ".join(told.split())
    # The plan is still shown, because it needs no step.
    assert ("without activations" in shown) == (words in [("--batch", "6x5"), ("--batch", "x=6x4")])


@pytest.mark.exhaustive
def test_fit_prints_settings_that_plan_reads(tmp_path: Path) -> None:
    words = ("--model-arg", "width=64", "--batch", "8x64", "--ranks", 2, "--set", "precision=bf16")
    only = ("--set", "activation_checkpointing.mode=full", "--set", "sharding.strategy=FULL_SHARD")
    pasted = tmp_path / "fit.yaml"
    code, out, err = called("fit", *words, *only, "--memory", "4GiB", "--write", pasted)
    assert code == 0, err
    assert "# " in out.splitlines()[2]
    assert out.split("\n\n")[1] == pasted.read_text().rstrip()
    code, _, err = called("fit", *words, *only, "--memory", "4GiB", "--write", pasted)
    assert code == 2
    assert "exists already. Add --force to replace it." in " ".join(err.replace("│", " ").split())
    as_json = tmp_path / "fit.json"
    assert called("fit", *words, *only, "--memory", "4GiB", "--write", as_json)[0] == 0
    assert mmfsdp.ShardConfig.from_file(as_json) == mmfsdp.ShardConfig.from_file(pasted)
    code, out, _ = called("fit", *words, *only, "--memory", "1MiB", "--write", tmp_path / "none.json")
    assert (code, (tmp_path / "none.json").exists()) == (2, False)
    assert out.startswith("Nothing fits into 1.00 MiB")
    given = {"precision": "bf16", "activation_checkpointing": {"mode": "full"}, "sharding": {"strategy": "FULL_SHARD"}}
    read, stated = mmfsdp.ShardConfig.from_file(pasted), mmfsdp.ShardConfig.from_dict(given)
    assert all(getattr(read, name) == getattr(stated, name) for name in given)
    assert plan(*words[:2], "--config", pasted)[0] == 0
    assert "Give the shapes of a batch" in called("fit", "--memory", "10MiB")[2]
    searches = [
        json.loads(called("fit", *words[:3], *batch, *words[4:], *only, "--memory", "4GiB", "--json")[1])
        for batch in (("8x64",), ("4x64", "--accumulate", 2))
    ]
    assert searches[0] == searches[1], "the samples of a step count, however its micro-batches are stated"
    by_tokens = (*words[:3], "2x8x64", *words[4:], *only, "--device", "a100-40gb@roce-50", "--json")
    by_tokens += ("--margin", 0.2, "--price", 2, "--tokens", 100)
    searched = [fields_of("fit", called("fit", *by_tokens, "--batch-dim", dim)[1]) for dim in (0, 1)]
    # 1 and 2 micro-batches of two samples, 1 to 8 of eight; twice if several.
    assert [one["considered"] for one in searched] == [3, 7]
    assert searched[0]["room"] == round(0.8 * searched[0]["memory_bytes"])
    option = searched[0]["options"][0]
    assert option["price_per_hour"] == 2 * 2
    assert option["tokens_per_second"] == pytest.approx(100 / option["seconds"])
    assert option["price_per_billion_tokens"] == pytest.approx(2 / 3600 * option["seconds"] / 100 * 1e9)
    assert (
        searched[0]["memory_bytes"] == searched[0]["device"]["memory_bytes"] == int(39.38 * (1 << 30))
    )  # as torch reports it
    assert searched[0]["device"]["name"] == "a100-40gb@roce-50"
    assert "Give their number" in called("fit", *words[:-4], "--ranks", "2x2", "--memory", "10MiB")[2]


@pytest.mark.exhaustive
def test_sizes_have_binary_units_and_are_bytes_in_json() -> None:
    def leaves(value: Any) -> Iterator[Any]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        if inner is None:
            yield value
        else:
            for item in inner:
                yield from leaves(item)

    step = ("--batch", "8x4", "--accumulate", 2, "--device", "h100")
    only = ("--set", "activation_checkpointing.mode=full", "--set", "precision=bf16", "--memory", "60GiB")
    given: dict[str, tuple[object, ...]] = {"plan": (), "rehearse": step, "fit": (*step, *only)}
    for command, words in given.items():
        code, shown, error = called(command, *words)
        assert code == 0, error
        assert re.search(r"\d (?:[KMG]iB|B)\b", shown)
        assert not re.search(r"\d ?[KMG]B\b", shown)
        found = json.loads(called(command, *words, "--json")[1])
        texts = [leaf for leaf in leaves(found) if isinstance(leaf, str)]
        assert not [text for text in texts if re.search(r"\d ?[KMG]i?B\b", text)]
        named = {
            "plan": ("memory", "parameters"),
            "rehearse": ("rehearsal", "peak", "nbytes"),
            "fit": ("memory_bytes",),
        }[command]
        for name in named:
            found = found[name]
        assert isinstance(found, int)


MEASURED = (*BLOCKS, "--batch", "6x4", "--device", "cpu")


@pytest.mark.exhaustive
def test_measured_beside_predicted() -> None:
    code, out, _ = called("measure", *MEASURED)  # torch's profiler may write to stderr
    assert code == 0
    config = {**wrapped(), "init": {"device": "cpu"}}
    step = mmfsdp.rehearse(config, build(), torch.empty(6, 4), device_type="cpu")
    assert str(step) in out
    peak = human_bytes(step.peak.nbytes)
    assert f"; peak {peak} predicted, " in out
    for words, message in (
        ((*MEASURED, "--ranks", 2), "the step runs on the ranks at hand, 1, not 2. To start them: torchrun"),
        ((), "Give the shapes of a batch with --batch"),
    ):
        code, out, err = called("measure", *words)
        assert (code, out) == (2, "")
        assert message in " ".join(err.replace("│", " ").split())


@pytest.mark.exhaustive
def test_ranks_of_torchrun_measure_together() -> None:
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", "mmfsdp-cli"]
    words += ["measure", f"{HERE}:build", *MEASURED, "--json"]
    environ = {**environ_with_commands(), "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    shown = fields_of("measure", "\n".join(without_gloo(done.stdout)))  # one rank prints
    found, own = shown["measured"], shown["rehearsal"]["peak"]["nbytes"]
    assert found["mesh"] == "2 ranks"
    assert found["peak_bytes"] == {"predicted": own, "measured": pytest.approx(own, rel=0.2)}  # gloo keeps copies
    assert found["step_seconds"]["measured"] > 0
    assert found["step_seconds"]["predicted"] == shown["time"]["seconds"]


@pytest.mark.sample("rehearse-batch0", "rehearse-batch1", "rehearse-batch2", "rehearse-batch3", "rehearse-batch4")
@pytest.mark.parametrize(
    ("command", "batch"),
    [
        ("rehearse", ("1x8",)),
        ("rehearse", ("1x8", "1x8")),
        ("rehearse", ("input_ids=1x8", "labels=1x8")),
        ("rehearse", ("input_ids=1x8", "hints=1x8")),
        ("rehearse", ("1x8:int32",)),
        ("measure", ("1x8",)),
    ],
)
def test_a_model_that_takes_token_ids_gets_whole_numbers(command: str, batch: tuple[str, ...]) -> None:
    words = [word for text in batch for word in ("--batch", text)]
    done = invoke(command, f"{HERE}:Reader", *words, "--set", "precision=bf16")
    assert done.exit_code == 0, done.stderr
    assert ("ehearsed with no labels" in done.stdout) == (command == "rehearse" and "labels=1x8" not in batch)


def test_a_model_without_data_is_told_which_shapes_to_write() -> None:
    for command in ("rehearse", "fit", "measure", "prove"):
        done = invoke(command, f"{HERE}:Reader", "--batch-size", 2)
        assert done.exit_code == 2
        assert "--batch input_ids=2x4096 --batch labels=2x4096" in " ".join(done.stderr.replace("│", " ").split())


def test_a_wrong_dtype_is_not_blamed_on_buffers() -> None:
    done = invoke("rehearse", f"{HERE}:Reader", "--batch", "1x8:float32", "--set", "precision=bf16")
    assert done.exit_code == 2
    assert "on a command line: --batch 1x8:int64" in done.stderr
    assert not any(words in done.stderr for words in ("Training also fails", "buffer_dtype"))
