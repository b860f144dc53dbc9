"""A merged adapter is what peft's own merge gives in float64, rounded once; adapters that do not fit are named."""

from __future__ import annotations

import ast
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmfsdp.checkpoint import average_checkpoints, convert, merge_lora, verify
from mmfsdp.checkpoint.arithmetic import module_patterns
from mmfsdp.checkpoint.arithmetic.module_patterns import of_modules
from mmfsdp.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FormatError,
    IncompleteCheckpointError,
)

pytest.importorskip("numpy")

GOLDEN = Path(__file__).parent / "adapters"
CASES = ("plain", "rslora", "conv1d")


def adapter(case: str, folder: Path, **changes: Any) -> Path:
    """Copy an adapter, and change its config."""
    copy = Path(shutil.copytree(GOLDEN / case, folder / f"copy_of_{case}"))
    config = copy / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return copy


@pytest.mark.parametrize("case", CASES)
def test_equals_peft(case: str, tmp_path: Path) -> None:
    folder = GOLDEN / case
    merged = load_file(folder / "merged.safetensors")
    changed = [
        name for name, tensor in load_file(folder / "base.safetensors").items() if (tensor != merged[name]).any()
    ]
    assert len(changed) >= 2
    merge_lora(folder / "base.safetensors", folder, tmp_path / "wide.safetensors", dtype="float64")
    merge_lora(folder / "base.safetensors", folder, tmp_path / "out.safetensors", verify_output=True)
    wide, found = load_file(tmp_path / "wide.safetensors"), load_file(tmp_path / "out.safetensors")
    assert {*found} == {*merged}
    for name, tensor in merged.items():
        torch.testing.assert_close(wide[name], tensor, rtol=1e-14, atol=1e-16)
        assert torch.equal(found[name], tensor.float())


@pytest.mark.parametrize(
    "patterns",
    [
        ["head"],
        ["hea."],
        ["^head$"],
        ["model.layers.0.fc", "layers.0"],
        [r"layers\.\d+\.fc"],
        ["(fc|head)"],
        ["[a-h]+", ".*fc"],
        [r"layers\.(?!1)\d+\.\w+"],
        ["ead", "fc.*x"],
    ],
)
def test_patterns_mean_what_they_mean_in_peft(patterns: list[str], tmp_path: Path) -> None:
    names = ["head", "model.head", "model.layers.0.fc", "model.layers.1.fc", "layers.10.fc", "ahead", "headx", "x\n"]
    found = of_modules(names, {pattern: place for place, pattern in enumerate(patterns)}, "rank_pattern", tmp_path)
    for name in names:  # as get_pattern_key of peft does it
        match = next((i for i, key in enumerate(patterns) if re.match(rf"(.*\.)?({key})$", name)), None)
        assert found.get(name) == match


@pytest.mark.parametrize("table", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_would_take_for_ever(table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_patterns, "_LIMIT", 1.0)
    folder = adapter("plain", tmp_path, **{table: {"(([a-z_])+.?)+[A-Z]([a-z])+!": 4}})
    tensors = load_file(folder / "adapter_model.safetensors")
    long = "base_model.model." + "a" * 60
    sides = {f"{long}.lora_A.weight": torch.ones(4, 3), f"{long}.lora_B.weight": torch.ones(3, 4)}
    save_file({**tensors, **sides}, folder / "adapter_model.safetensors")
    began = time.monotonic()
    with pytest.raises(CorruptCheckpointError, match=f"expressions of '{table}' in adapter_config.json take more than"):
        merge_lora(GOLDEN / "plain/base.safetensors", folder, tmp_path / "out.safetensors")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("to", ["dcp", "local"])
def test_bases_and_targets_may_be_sharded(case: str, to: str, tmp_path: Path) -> None:
    folder = GOLDEN / case
    convert(folder / "base.safetensors", tmp_path / "base", to="dcp", ranks=3)
    merge_lora(tmp_path / "base", folder, tmp_path / "out", to=to, ranks=5, dtype="float64")
    convert(tmp_path / "out", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    for name, tensor in load_file(folder / "merged.safetensors").items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-14, atol=1e-16)


def test_low_precision_is_rounded_once(tmp_path: Path) -> None:
    base = {name: tensor.bfloat16() for name, tensor in load_file(GOLDEN / "rslora" / "base.safetensors").items()}
    save_file(base, tmp_path / "base.safetensors")
    factors = load_file(GOLDEN / "rslora" / "adapter_model.safetensors")
    merge_lora(tmp_path / "base.safetensors", GOLDEN / "rslora", tmp_path / "wide.safetensors", dtype="float64")
    merge_lora(tmp_path / "base.safetensors", GOLDEN / "rslora", tmp_path / "out.safetensors")
    wide, found = load_file(tmp_path / "wide.safetensors"), load_file(tmp_path / "out.safetensors")
    a, b = (factors[f"base_model.model.head.lora_{side}.weight"].double() for side in "AB")
    torch.testing.assert_close(
        wide["head.weight"], base["head.weight"].double() + 8 / 5**0.5 * (b @ a), rtol=1e-14, atol=0
    )
    assert found["head.weight"].dtype == torch.bfloat16
    assert (found["head.weight"].double() - wide["head.weight"]).abs().max() <= 2**-8 * wide["head.weight"].abs().max()
    assert torch.equal(found["embed.weight"], base["embed.weight"])


def test_large_weights_go_through_several_blocks(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(700, 3000, generator=generator)
    a, b = torch.randn(4, 3000, generator=generator), torch.randn(700, 4, generator=generator)
    save_file({"fc.weight": base}, tmp_path / "base.safetensors")
    folder = tmp_path / "adapter"
    folder.mkdir()
    names = {f"base_model.model.fc.lora_{side}.weight": tensor for side, tensor in (("A", a), ("B", b))}
    save_file(names, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 2}))
    merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out.safetensors")
    expected = base.double() + 0.5 * (b.double() @ a.double())
    assert torch.equal(load_file(tmp_path / "out.safetensors")["fc.weight"], expected.float())


def test_tied_names_change_together(tmp_path: Path) -> None:
    base = load_file(GOLDEN / "plain" / "base.safetensors")
    base["lm_head.weight"] = base["embed.weight"]
    torch.save({"state_dict": base, "meta": {"epoch": 1}}, tmp_path / "base.pth")
    report = merge_lora(tmp_path / "base.pth", GOLDEN / "plain", tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert found["meta"] == {"epoch": 1}
    assert found["state_dict"]["lm_head.weight"].data_ptr() == found["state_dict"]["embed.weight"].data_ptr()
    assert torch.equal(
        found["state_dict"]["embed.weight"], load_file(GOLDEN / "plain" / "merged.safetensors")["embed.weight"].float()
    )
    assert any(note.endswith("merged too: 'state_dict/lm_head.weight'") for note in report.notes), report.notes


def test_a_head_that_no_file_holds(tmp_path: Path) -> None:
    """peft merges factors of the embedding into the head, too, but unties a head from an embedding that it replaces."""
    (tmp_path / "base").mkdir()
    embedding, change = torch.randn(6, 4), {"A": torch.randn(2, 6), "B": torch.randn(4, 2)}
    base = {"model.embed_tokens.weight": embedding, "model.q_proj.weight": torch.randn(4, 4)}
    save_file(base, tmp_path / "base" / "model.safetensors")
    (folder := tmp_path / "adapter").mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    factors = {f"lora_embedding_{side}": factor for side, factor in change.items()}
    always = {
        f"base_model.model.model.q_proj.lora_{side}.weight": torch.ones(*shape)
        for side, shape in (("A", (2, 4)), ("B", (4, 2)))
    }
    for tied in (True, False):
        (tmp_path / "base" / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
        module = "base_model.model.model.embed_tokens"
        held = {f"{module}.{name}": factor for name, factor in factors.items()}
        held[f"{module}.base_layer.weight"] = embedding  # peft saves it beside them
        save_file(held, folder / "adapter_model.safetensors")
        report = merge_lora(tmp_path / "base", folder, tmp_path / f"{tied}.safetensors")
        note = "Also merged into the head, which config.json ties to it: 'model.embed_tokens.weight'"
        assert (note in report.notes) == tied
        save_file({f"{module}.weight": embedding + 1, **always}, folder / "adapter_model.safetensors")
        if not tied:
            merge_lora(tmp_path / "base", folder, tmp_path / "replaced.safetensors")
            continue
        with pytest.raises(ConfigError, match=r"replaces 'model\.embed_tokens\.weight', and the model of base ties"):
            merge_lora(tmp_path / "base", folder, tmp_path / "replaced.safetensors")
        head = {"base_model.model.lm_head.weight": embedding + 1, f"{module}.weight": (embedding + 1).clone()}
        save_file({**head, **always}, folder / "adapter_model.safetensors")  # as with ensure_weight_tying
        merge_lora(tmp_path / "base", folder, tmp_path / "both.safetensors")


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, True),  # transformers 4 did not write what is a class's default
        ({"architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": False}, False),
        ({"architectures": ["GPT2ForSequenceClassification"], "tie_word_embeddings": True}, False),
        ({"architectures": ["LlavaForConditionalGeneration"], "text_config": {"tie_word_embeddings": True}}, True),
        ({"architectures": ["LlavaForConditionalGeneration"], "text_config": {"tie_word_embeddings": False}}, False),
        ({"architectures": ["BertModel"]}, False),
    ],
)
def test_a_head_that_the_config_ties_without_saying_so(config: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    (base := tmp_path / "base").mkdir()
    (folder := tmp_path / "adapter").mkdir()
    save_file({"transformer.wte.weight": torch.randn(6, 4), "q.weight": torch.randn(4, 4)}, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps(config))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    factors = {
        "base_model.model.q.lora_A.weight": torch.ones(2, 4),
        "base_model.model.q.lora_B.weight": torch.ones(4, 2),
    }
    replaced = {"base_model.model.transformer.wte.weight": torch.zeros(6, 4)}
    save_file({**factors, **replaced}, folder / "adapter_model.safetensors")
    if tied:
        with pytest.raises(ConfigError, match=r"the model of base ties the head to it: no file holds a head"):
            merge_lora(base, folder, tmp_path / "out.safetensors")
    else:
        merge_lora(base, folder, tmp_path / "out.safetensors")
    head = {"lm_head.lora_A.weight": torch.ones(2, 4), "lm_head.lora_B.weight": torch.ones(6, 2)}
    save_file(
        {**factors, **{f"base_model.model.{k}": v for k, v in head.items()}}, folder / "adapter_model.safetensors"
    )
    with pytest.raises(ConfigError, match="Untie the base first" if tied else "it has no 'lm_head.weight'"):
        merge_lora(base, folder, tmp_path / "head.safetensors")


def test_weights_that_zero_3_left_empty(tmp_path: Path) -> None:
    base = load_file(GOLDEN / "plain" / "base.safetensors")
    save_file({**base, "embed.weight": torch.empty(0)}, tmp_path / "base.safetensors")
    for write in (
        lambda: convert(tmp_path / "base.safetensors", tmp_path / "out.pth"),
        lambda: merge_lora(tmp_path / "base.safetensors", GOLDEN / "rslora", tmp_path / "out.pth"),
        lambda: average_checkpoints([tmp_path / "base.safetensors"] * 2, tmp_path / "out.pth"),
    ):
        with pytest.raises((IncompleteCheckpointError, ConfigError), match=r"embed.*(shape \[0\]|has \[0\])"):
            write()
    assert [
        problem for problem in verify(tmp_path / "base.safetensors").problems if "'embed.weight'" in problem.message
    ]
    convert(tmp_path / "base.safetensors", tmp_path / "rest.pth", exclude=["embed.weight"])
    folder = adapter("plain", tmp_path)
    held = load_file(folder / "adapter_model.safetensors")
    save_file({**held, "base_model.model.embed.weight": torch.empty(0)}, folder / "adapter_model.safetensors")
    with pytest.raises(IncompleteCheckpointError, match=r"holds 'base_model.model.embed.weight' of shape \[0\]"):
        merge_lora(GOLDEN / "plain" / "base.safetensors", folder, tmp_path / "merged.safetensors")


def test_names_of_a_wrapped_model(tmp_path: Path) -> None:
    folder = adapter("plain", tmp_path)
    held = load_file(folder / "adapter_model.safetensors")

    def raw(name: str, own: str = "default") -> str:
        name = re.sub(r"\.lora_((?:embedding_)?[AB])", rf".lora_\1.{own}", name)
        return name.replace("base_model.model.", "_orig_mod.base_model.model._checkpoint_wrapped_module.")

    head = {"base_model.model.head.original_module.weight": torch.zeros(1, 1)}
    whole = {re.sub(r"head\.(weight|bias)$", r"head.modules_to_save.default.\1", name): name for name in held}
    save_file({**{raw(new): held[name] for new, name in whole.items()}, **head}, folder / "adapter_model.safetensors")
    merge_lora(GOLDEN / "plain" / "base.safetensors", folder, tmp_path / "out.safetensors")
    found, merged = load_file(tmp_path / "out.safetensors"), load_file(GOLDEN / "plain" / "merged.safetensors")
    assert {*found} == {*merged}
    assert all(torch.equal(found[name], merged[name].float()) for name in merged)
    two = {raw(name, "default" if "lora_A" in name else "other"): tensor for name, tensor in held.items()}
    save_file(two, folder / "adapter_model.safetensors")
    with pytest.raises(FormatError, match="factors of several adapters: 'default', 'other'"):
        merge_lora(GOLDEN / "plain" / "base.safetensors", folder, tmp_path / "two.safetensors")


@pytest.mark.parametrize("kind", ["flat", "nested"])
def test_a_new_head_is_added(kind: str, tmp_path: Path) -> None:
    base = load_file(GOLDEN / "plain" / "base.safetensors")
    del base["head.weight"], base["head.bias"]
    torch.save(base if kind == "flat" else {"model": base, "optimizer": {}}, tmp_path / "base.pth")
    report = merge_lora(tmp_path / "base.pth", GOLDEN / "plain", tmp_path / "out.safetensors", verify_output=True)
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["head.weight"], load_file(GOLDEN / "plain" / "merged.safetensors")["head.weight"].float())
    assert "Added, because only the adapter has it: 'head.bias', 'head.weight'" in report.notes


def test_names_below_a_prefix(tmp_path: Path) -> None:
    folder = GOLDEN / "rslora"
    base = {f"model.{name}": tensor for name, tensor in load_file(folder / "base.safetensors").items()}
    save_file(base, tmp_path / "base.safetensors")
    with pytest.raises(ConfigError, match=r"All of them are there below 'model.': set 'prefix' to it\."):
        merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out.safetensors")
    merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out.safetensors", prefix="model.")
    found = load_file(tmp_path / "out.safetensors")
    merged = load_file(folder / "merged.safetensors")
    assert torch.equal(found["model.head.weight"], merged["head.weight"].float())


class TestAdaptersThatDoNotFit:
    def test_modules(self, tmp_path: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"does not fit '.*': it has no 'head.weight'; it has no 'layers.0.q_proj"
        ):
            merge_lora(GOLDEN / "conv1d" / "base.safetensors", GOLDEN / "rslora", tmp_path / "out.safetensors")
        assert not (tmp_path / "out.safetensors").exists()

    def test_a_prefix_that_the_base_lacks(self, tmp_path: Path) -> None:
        folder = adapter("rslora", tmp_path)
        tensors = load_file(folder / "adapter_model.safetensors")
        longer = {name.replace("base_model.model.", "base_model.model.lm."): held for name, held in tensors.items()}
        save_file(longer, folder / "adapter_model.safetensors")
        with pytest.raises(
            ConfigError, match=r"Without 'lm\.' they are there: copy the adapter's folder, .*"
        ) as raised:
            merge_lora(folder / "base.safetensors", folder, tmp_path / "out.safetensors")
        copy = shutil.copytree(folder, tmp_path / "copy")
        rename = ast.literal_eval(str(raised.value).partition("rename=")[2].partition("}")[0] + "}")
        file = "adapter_model.safetensors"
        convert(folder / file, copy / file, rename=rename, overwrite=True)
        merge_lora(folder / "base.safetensors", copy, tmp_path / "out.safetensors")
        merge_lora(folder / "base.safetensors", GOLDEN / "rslora", tmp_path / "expected.safetensors")
        assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "expected.safetensors").read_bytes()

    def test_shapes(self, tmp_path: Path) -> None:
        folder = adapter("conv1d", tmp_path, fan_in_fan_out=False, base_model_name_or_path="org/gpt")
        message = (
            r"'c_attn' needs a weight of shape \[36, 12\], and the base has \[12, 36\] of float32\. It was trained on "
            "'org/gpt'"
        )
        with pytest.raises(ConfigError, match=message):
            merge_lora(folder / "base.safetensors", folder, tmp_path / "out.safetensors")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"peft_type": "LOHA"}, r"of type 'LOHA'; only LoRA and rsLoRA are merged here"),
            ({"use_dora": True}, r"of DoRA \(it also scales each row\); only LoRA"),
            ({"target_parameters": ["w"]}, r"of LoRA on single parameters \(target_parameters\)"),
            (
                {"init_lora_weights": "pissa_niter_4"},
                r"init_lora_weights='pissa_niter_4', which changes the base weights",
            ),
        ],
    )
    def test_methods(self, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
        folder = adapter("rslora", tmp_path, **changes)
        with pytest.raises(FormatError, match=message):
            merge_lora(folder / "base.safetensors", folder, tmp_path / "out.safetensors")

    def test_dora(self, tmp_path: Path) -> None:
        for folder in (GOLDEN / "dora", adapter("dora", tmp_path, use_dora=False)):
            with pytest.raises(FormatError, match="DoRA"):
                merge_lora(GOLDEN / "conv1d" / "base.safetensors", folder, tmp_path / "out.safetensors")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"r": 6}, r"have shapes \[5, 12\] and \[4, 5\] \(expected rank 6, as adapter_config.json says\)"),
            ({"r": None}, r"gives 'head' the rank None as 'r' or in 'rank_pattern' \(expected a number such as 5\)"),
            ({"rank_pattern": {"head": "4"}}, r"gives 'head' the rank '4'"),
            (
                {"lora_alpha": "8"},
                r"gives 'head' alpha '8' as 'lora_alpha' or in 'alpha_pattern' \(expected a number\)",
            ),
            ({"lora_alpha": None}, r"gives 'head' alpha None"),
            ({"rank_pattern": {"(": 1}}, r"the pattern '\(', which is malformed"),
            ({"alpha_pattern": [1]}, r"adapter_config.json is damaged: alpha_pattern is not a mapping"),
        ],
    )
    def test_damaged_configs(self, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
        folder = adapter("rslora", tmp_path, **changes)
        with pytest.raises(CorruptCheckpointError, match=message):
            merge_lora(folder / "base.safetensors", folder, tmp_path / "out.safetensors")

    def test_missing_files(self, tmp_path: Path) -> None:
        folder = adapter("rslora", tmp_path)
        (folder / "adapter_model.safetensors").unlink()
        for path in (folder, tmp_path / "nothing"):
            with pytest.raises(CheckpointNotFoundError, match=r"There is no LoRA adapter at '.*': adapter_"):
                merge_lora(folder / "base.safetensors", path, tmp_path / "out.safetensors")

    def test_one_factor(self, tmp_path: Path) -> None:
        folder = adapter("rslora", tmp_path)
        tensors = load_file(folder / "adapter_model.safetensors")
        del tensors["base_model.model.head.lora_B.weight"]
        save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(CorruptCheckpointError, match="holds lora_A of 'head' but not the other factor"):
            merge_lora(folder / "base.safetensors", folder, tmp_path / "out.safetensors")

    def test_a_factor_twice(self, tmp_path: Path) -> None:
        folder = adapter("rslora", tmp_path)
        tensors = load_file(folder / "adapter_model.safetensors")
        tensors["head.lora_A.weight"] = 2 * tensors["base_model.model.head.lora_A.weight"]
        save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(CorruptCheckpointError, match=r"holds lora_A of 'head' twice, as '.*head\.lora_A"):
            merge_lora(folder / "base.safetensors", folder, tmp_path / "out.safetensors")

    def test_a_module_that_the_config_names_is_missing(self, tmp_path: Path) -> None:
        folder = adapter("plain", tmp_path)
        report = merge_lora(folder / "base.safetensors", folder, tmp_path / "whole.safetensors")
        assert not any("target_modules" in note for note in report.notes)
        tensors = load_file(folder / "adapter_model.safetensors")
        partial = {name: tensor for name, tensor in tensors.items() if ".layers.1.q_proj." not in name}
        save_file(partial, folder / "adapter_model.safetensors")
        report = merge_lora(folder / "base.safetensors", folder, tmp_path / "out.safetensors")
        assert report.notes == (
            "As in the base, because the adapter has no factors for them, though its config has target_modules for "
            "them: 'layers.1.q_proj'",
        )

    def test_the_config_is_not_replaced(self, tmp_path: Path) -> None:
        folder = adapter("rslora", tmp_path)
        before = (folder / "adapter_config.json").read_bytes()
        with pytest.raises(ConfigError, match="is part of the source"):
            merge_lora(
                GOLDEN / "rslora" / "base.safetensors",
                folder,
                folder / "adapter_config.json",
                to="safetensors",
                overwrite=True,
            )
        assert (folder / "adapter_config.json").read_bytes() == before

    def test_an_empty_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = adapter("rslora", tmp_path)
        monkeypatch.chdir(folder)
        with pytest.raises(ConfigError, match="The path is empty"):
            merge_lora("base.safetensors", "", "out.safetensors")
        assert not (folder / "out.safetensors").exists()
