"""Recipes: the shipped ones fit the models that they name, every one can be undone, and bad ones say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmfsdp.checkpoint import apply_recipe, convert, known_recipes, open_layout
from mmfsdp.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"
PAIRS = [
    ("mmpretrain-vit", "mmpretrain-vit-to-timm", "timm-vit"),
    ("timm-vit", "timm-vit-to-hf", "hf-vit"),
    ("mmpretrain-swin", "mmpretrain-swin-to-timm", "timm-swin"),
    ("timm-swin", "timm-swin-to-hf", "hf-swin"),
    ("timm-resnet", "timm-resnet-to-hf", "hf-resnet"),
    ("mmdet-detr", "mmdet-detr-to-hf", "hf-detr-timm"),
    ("mmdet-detr", "mmdet-detr-to-hf-resnet", "hf-detr"),
    ("hf-llama", "hf-llama-to-fused", "hf-phi3"),
    ("hf-qwen-moe", "hf-qwen-moe-to-stacked", "hf-qwen-moe-stacked"),
    ("hf-mixtral", "hf-mixtral-to-stacked", "hf-mixtral-in-memory"),
    ("hf-qwen-vl", "hf-qwen-vl-to-memory", "hf-qwen-vl-in-memory"),
    ("hf-llava", "hf-llava-to-memory", "hf-llava-in-memory"),
]
HEADS = {"heads": 4, "kv_heads": 2}


def shapes(name: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = json.loads((GOLDEN / f"{name}.json").read_text())["tensors"]
    return {key: [-(-size // 16) for size in shape] for key, shape in found.items()} if "detr" in name else found


def weights(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes(name).items()}


def saved(path: Path, state: dict[str, torch.Tensor]) -> Path:
    torch.save({"state_dict": state, "meta": {"epoch": 3}, "optimizer": {"state": {}}}, path)
    return path


def rules(path: Path, *given: Any, **more: Any) -> Path:
    path = path / "recipe.json"
    path.write_text(json.dumps({"rules": given, **more}))
    return path


def test_every_shipped_recipe_is_tested() -> None:
    infos = known_recipes()
    tested = {recipe for _, recipe, _ in PAIRS} | {"meta-llama-to-hf", "hf-bert-to-torch"}
    tested |= {"megatron-llama-to-hf", "megatron-mixtral-to-hf", "peft-to-adapter", "peft-to-base"}
    assert {info.name for info in infos} == tested
    for info in infos:
        assert info.about
        assert Path(info.path).is_file()


@pytest.mark.parametrize(("source", "recipe", "target"), PAIRS, ids=[recipe for _, recipe, _ in PAIRS])
def test_shipped_recipes_fit_both_models(source: str, recipe: str, target: str, tmp_path: Path) -> None:
    state = weights(source)
    values = HEADS if "llama" in recipe else None
    there = tmp_path / "there.safetensors"
    convert(saved(tmp_path / "a.pth", state), there, recipe=recipe, recipe_values=values, verify_output=True)
    found = load_file(there)
    assert {name: [*tensor.shape] for name, tensor in found.items()} == shapes(target)
    convert(there, tmp_path / "back.pth", recipe=recipe, inverse=True, recipe_values=values)
    back = torch.load(tmp_path / "back.pth", weights_only=True)["state_dict"]
    assert all(torch.equal(back[name], state[name]) for name in back)
    # Swin computes the first itself; the norms of detectors are frozen, and count nothing.
    own = ("position_index", *(["num_batches_tracked"] if "detr" in recipe else []))
    assert {name for name in state if name not in back} == {name for name in state if name.endswith(own)}


def test_a_module_of_torch_computes_what_a_layer_of_bert_does(tmp_path: Path) -> None:
    state = {name: value * 0.2 for name, value in weights("hf-bert").items()}
    target = tmp_path / "out.safetensors"
    convert(saved(tmp_path / "a.pth", state), target, recipe="hf-bert-to-torch")
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, 0.0, "gelu", 1e-12, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    prefix = "encoder."
    encoder.load_state_dict(
        {name.removeprefix(prefix): value for name, value in load_file(target).items() if name.startswith(prefix)}
    )
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(encoder.train()(x), _bert(state, x), atol=1e-5)


def _bert(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The encoder of BERT in the names of Hugging Face: Devlin et al., 2018, section 3, and Vaswani et al., 2017."""
    for i in range(2):
        own = {name.removeprefix(p): v for p in [f"encoder.layer.{i}."] for name, v in state.items() if p in name}

        def linear(name: str, given: torch.Tensor, own: dict[str, torch.Tensor] = own) -> torch.Tensor:
            return torch.nn.functional.linear(given, own[f"{name}.weight"], own[f"{name}.bias"])

        def norm(name: str, given: torch.Tensor, own: dict[str, torch.Tensor] = own) -> torch.Tensor:
            return torch.nn.functional.layer_norm(given, (32,), own[f"{name}.weight"], own[f"{name}.bias"], 1e-12)

        q, k, v = (
            linear(f"attention.self.{part}", x).unflatten(-1, (4, 8)).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        mixed = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v
        x = norm("attention.output.LayerNorm", linear("attention.output.dense", mixed.transpose(1, 2).flatten(2)) + x)
        inner = torch.nn.functional.gelu(linear("intermediate.dense", x))
        x = norm("output.LayerNorm", linear("output.dense", inner) + x)
    return x


def test_rows_of_llama_are_in_the_order_that_each_library_rotates(tmp_path: Path) -> None:
    """Equal scores: Meta rotates neighbouring elements of a head, Hugging Face elements half a head apart."""
    hf = weights("hf-llama")
    source = saved(tmp_path / "a.pth", hf)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4, "num_key_value_heads": 2}))
    convert(source, tmp_path / "meta.pth", recipe="meta-llama-to-hf", inverse=True)
    meta = torch.load(tmp_path / "meta.pth", weights_only=True)["state_dict"]
    assert meta["layers.1.feed_forward.w3.weight"].equal(hf["model.layers.1.mlp.up_proj.weight"])
    (tmp_path / "config.json").unlink()
    (tmp_path / "params.json").write_text(json.dumps({"n_heads": 4, "n_kv_heads": 2, "rope_theta": 1e4}))
    meta["rope.freqs"] = torch.ones(4)
    convert(saved(tmp_path / "b.pth", meta), tmp_path / "again.safetensors", recipe="meta-llama-to-hf")
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == hf.keys()
    assert all(torch.equal(again[name], hf[name]) for name in hf)

    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    angles = torch.outer(torch.arange(6.0), 1e4 ** (-torch.arange(0, 8, 2) / 8))
    turn = torch.polar(torch.ones(6, 1, 4), angles[:, None])  # position, head, pair

    def by_neighbours(weight: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex((x @ weight.t()).unflatten(-1, (-1, 4, 2)))
        return torch.view_as_real(pairs * turn).flatten(2)

    def by_halves(weight: torch.Tensor) -> torch.Tensor:
        first, second = (x @ weight.t()).unflatten(-1, (-1, 2, 4)).unbind(2)
        turned = torch.complex(first, second) * turn
        return torch.cat([turned.real, turned.imag], -1)

    scores = []
    for rotated, q, k in (
        (by_neighbours, meta["layers.0.attention.wq.weight"], meta["layers.0.attention.wk.weight"]),
        (by_halves, hf["model.layers.0.self_attn.q_proj.weight"], hf["model.layers.0.self_attn.k_proj.weight"]),
    ):
        scores.append(torch.einsum("qhd,khd->hqk", rotated(q), rotated(k).repeat_interleave(2, 1)))
    assert torch.allclose(*scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral"])
def test_what_ranks_of_megatron_save(model: str, tmp_path: Path) -> None:
    """Each part is where Megatron's source says; ``tests/models`` compares the logits of both models."""
    source, recipe = (
        GOLDEN / "megatron-0.16.1" / model,
        f"megatron-{'mixtral' if model == 'mixtral' else 'llama'}-to-hf",
    )
    numbers = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(numbers))
    convert(source, tmp_path / "hf", to="hf", like=tmp_path, recipe=recipe)
    found = load_file(tmp_path / "hf/model.safetensors")
    names = found.keys() | set()
    convert(tmp_path / "hf", tmp_path / "back.pth", recipe=recipe, inverse=True)
    back = torch.load(tmp_path / "back.pth", weights_only=True)["state_dict"]
    convert(source, tmp_path / "own.pth")
    own = torch.load(tmp_path / "own.pth", weights_only=True)["state_dict"]
    if model in ("qwen3", "qwen2_moe"):  # a tensor for each layer, expert and half; the inverse writes one for all
        for name in [name.removesuffix("_w") for name in own if name.endswith("_w")]:
            own[name] = torch.cat([own.pop(f"{name}_w"), own.pop(f"{name}_v")])
        for kind in ("experts.experts", "layers"):
            for name in [name for name in own if f".{kind}.0." in name]:
                parts = [own.pop(name.replace(f"{kind}.0.", f"{kind}.{i}.")) for i in range(2)]
                own[name.replace(f"{kind}.0.", f"{kind}.")] = torch.stack(parts)
    whole = {name: value[:50] if value.shape[0] == 64 else value for name, value in own.items()}  # 14 rows are padding
    assert back.keys() == whole.keys()
    assert all(torch.equal(back[name], whole[name]) for name in whole)
    qkv = own["decoder.layers.self_attention.linear_qkv.weight"][1].reshape(2, 4, -1, 16)  # groups, 2 q + k + v
    for part, rows in (("q", qkv[:, :2]), ("k", qkv[:, 2]), ("v", qkv[:, 3])):
        assert found[f"model.layers.1.self_attn.{part}_proj.weight"].equal(rows.reshape(-1, 16))
    if model == "mixtral":
        llama = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        for name in [name for name in found if ".block_sparse_moe." in name]:
            other = ".".join(llama.get(part, part) for part in name.replace("block_sparse_moe", "mlp").split("."))
            found[other] = found.pop(name)
    experts, expert = (".experts.experts", ".experts.1") if "moe" in model or model == "mixtral" else ("", "")
    if expert:  # the name that it has with Transformer Engine
        rename = {r"mlp\.linear_fc1\.layer_norm_weight": "pre_mlp_layernorm.weight"}
        convert(source, tmp_path / "engine", to="hf", like=tmp_path, recipe=recipe, rename=rename)
        assert load_file(tmp_path / "engine/model.safetensors").keys() == names
    halves = own[f"decoder.layers.mlp{experts}.linear_fc1.weight"][0]
    for part, rows in zip(("gate", "up"), (halves[1] if expert else halves).chunk(2), strict=True):
        assert found[f"model.layers.0.mlp{expert}.{part}_proj.weight"].equal(rows)


def test_only_a_shipped_recipe_can_be_extended(tmp_path: Path) -> None:
    for name in ("megatron-llama-to-hff", "recipe.json"):
        recipe = rules(tmp_path, {"rename": {"a": "b"}}, extends=name)
        with pytest.raises(ConfigError, match=f"recipe.json: extends is '{name}', expected the name of a shipped"):
            apply_recipe(open_layout(saved(tmp_path / "a.pth", {"a": torch.ones(1)})), recipe)


def test_any_source_and_any_target(tmp_path: Path) -> None:
    state = weights("hf-qwen-moe")
    convert(saved(tmp_path / "a.pth", state), tmp_path / "dcp", to="dcp", ranks=3, keep="model")
    report = convert(
        tmp_path / "dcp",
        tmp_path / "local",
        to="local",
        ranks=2,
        recipe="hf-qwen-moe-to-stacked",
        dtype={"**.gate_up_proj": "bf16"},
        exclude=["lm_head.*"],
        verify_output=True,
    )
    assert report.verified
    assert report.dropped == ("lm_head.weight",)
    layout = open_layout(tmp_path / "local")
    entry = layout.tensors["state_dict/model.layers.1.mlp.experts.gate_up_proj"]
    assert (entry.dtype, entry.shape) == ("bfloat16", (3, 32, 32))
    convert(tmp_path / "local", tmp_path / "b.pth")
    found = torch.load(tmp_path / "b.pth", weights_only=True)["state_dict"]
    part = "model.layers.1.mlp.experts"
    wanted = [torch.cat([state[f"{part}.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(3)]
    assert torch.equal(found[f"{part}.gate_up_proj"], torch.stack(wanted).bfloat16())


@pytest.mark.parametrize(("source", "recipe", "target"), PAIRS[:2] + PAIRS[-3:])
def test_the_recipe_for_a_folder_is_named(source: str, recipe: str, target: str, tmp_path: Path) -> None:
    for name, other, set_to in ((source, target, ""), (target, source, ", inverse=True")):
        like = tmp_path / f"like_{other}"
        like.mkdir()
        (like / "config.json").write_text('{"tie_word_embeddings": false}')
        save_file(weights(other), like / "model.safetensors")
        with pytest.raises(ConfigError, match=rf"Set recipe='{recipe}'{set_to}: this shipped recipe makes them\."):
            convert(saved(tmp_path / "a.pth", weights(name)), tmp_path / "out", to="hf", like=like)
        settings = {"recipe": recipe, "inverse": bool(set_to)}
        convert(tmp_path / "a.pth", tmp_path / f"out_of_{name}", to="hf", like=like, **settings)


def test_a_layout_without_writing(tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pth", weights("timm-vit"))
    layout = apply_recipe(open_layout(source), "timm-vit-to-hf")
    assert {name: [*entry.shape] for name, entry in layout.tensors.items()} == shapes("hf-vit")
    assert {chunk.file for entry in layout.tensors.values() for chunk in entry.chunks()} == {source}


def test_tied_weights(tmp_path: Path) -> None:
    embedding = torch.randn(6, 4)
    copies = {"embed.weight": embedding, "head.weight": embedding.clone()}
    recipe = rules(tmp_path, {"untie": {"head.weight": "embed.weight"}}, unmatched="keep")
    convert(saved(tmp_path / "a.pth", copies), tmp_path / "b.pth", recipe=recipe)
    assert [*open_layout(tmp_path / "b.pth").tensors] == ["state_dict/embed.weight"]
    convert(tmp_path / "b.pth", tmp_path / "c.pth", recipe=recipe, inverse=True)
    back = torch.load(tmp_path / "c.pth", weights_only=True)["state_dict"]
    assert back["head.weight"].data_ptr() == back["embed.weight"].data_ptr()
    copies["head.weight"][5, 3] += 1
    with pytest.raises(ConfigError, match=r"'head\.weight' is not equal to 'embed\.weight'"):
        convert(saved(tmp_path / "a.pth", copies), tmp_path / "d.pth", recipe=recipe)
    assert not (tmp_path / "d.pth").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([{"rename": {"a.{x}": "b.c"}}], "different placeholders"),
        ([{"rename": {"a.weight": "c", "b.weight": "c"}}], "'a.weight' and 'b.weight' would both be named 'c'"),
        ([{"rename": {"a.weight": "b.weight"}}], "would both be named 'b.weight'"),
        ([{"rename": {"a.weight": "c"}}], "no rule for 2 of 3 tensors: 'b.weight' [2, 3], 'n.bias' [4]"),
        (
            [{"rename": {"a.wieght": "c"}}],
            "rules[0].rename matches no tensor: no name is like 'a.wieght'. Did you mean 'a.w",
        ),
        (
            [{"fuse": {"parts": ["a.weight", "n.bias"], "whole": "c"}}],
            "float32 of shape [4, 3] does not fit float32 of shape [4]",
        ),
        ([{"fuse": {"parts": ["a.weight", "b.weight"], "whole": "c"}}], "have 4, 2 elements along dimension 0. State"),
        (
            [{"fuse": {"parts": ["a.weight", "b.weight"], "whole": "c", "sizes": [1, 1]}}],
            "The rule's sizes are 1:1",
        ),
        ([{"fuse": {"parts": ["{x}.weight", "{x}.other"], "whole": "{x}"}}], "'a.weight' came without 'a.other'"),
        ([{"split": {"whole": "a.weight", "parts": ["c", "d", "e"]}}], "4 elements, which do not divide into 1:1:1"),
        (
            [{"split": {"whole": "a.weight", "parts": ["c", "d"], "sizes": ["q", 1]}}],
            "'q' is neither a number nor a value",
        ),
        ([{"stack": {"parts": "w.{e}", "over": "e", "whole": "w"}}], "matches no tensor"),
        ([{"unstack": {"parts": "w.{e}", "over": "e", "whole": "n.bias", "dim": 3}}], "it has no dimension 3"),
        ([{"rearrange": {"names": ["n.bias"], "pattern": "o i -> i o"}}], "it has 1 dimensions, and the pattern 2"),
        ([{"rearrange": {"names": ["n.bias"], "pattern": "o i -> i"}}], "the pattern 'o i -> i' is malformed"),
        ([{"trim": {"names": ["n.bias"], "size": 5}}], "dimension 0 has 4 elements, expected 5 or more"),
        ([{"trim": {"names": ["n.bias"], "size": 4, "dim": 1}}], "it has no dimension 1"),
        ([{"trim": {"names": ["n.bias"]}}], "lacks 'size'"),
        ([{"trim": {"names": ["n.bias"], "size": [4, 5]}}], "is [4, 5], expected a number or a value"),
        ([{"drop": ["{x:.*}"]}], "leaves no tensor"),
        (
            [{"stack": {"parts": "{x:.*}.weight", "over": "x", "whole": "w"}}],
            "'a.weight' has 'a' where {x} is a number such as 7",
        ),
        (
            [{"rename": {"a.weight": "w.00"}}, {"stack": {"parts": "w.{e}", "over": "e", "whole": "w"}}],
            "'w.00' has '00' where {e} is a number",
        ),
        ([{"rename": {"a.weight": "w." + "9" * 5000}}, {"rename": {"w.{i+1}": "v.{i}"}}], "matches no tensor"),
        ([{"rename": {"a.weight": "w." + "9" * 5000}}, {"rename": {"w.{i}": "v.{i+1}"}}], "adds a number to {i}"),
        ([{"renam": {"a": "b"}}], "Did you mean 'rename'?"),
        ([{"rename": {"a": "b"}, "drop": ["c"]}], "rules[0] has 2 of rename"),
        ([{"fuse": {"part": ["a"], "whole": "b"}}], "unknown key 'part'. Did you mean 'parts'?"),
        ([{"fuse": {"parts": ["a"]}}], "lacks 'whole'"),
        ([{"rename": {"a.{": "b"}}], "a brace that is not part of a placeholder"),
        ([{"rename": {"a.{x:(}": "b{x}"}}], "rules[0].rename: "),
        ([{"rename": {"a": 3}}], "is 3, expected text"),
        ([], "has no rules"),
    ],
)
def test_bad_recipes(tmp_path: Path, given: list[Any], said: str) -> None:
    state = {"a.weight": torch.ones(4, 3), "b.weight": torch.ones(2, 3), "n.bias": torch.ones(4)}
    with pytest.raises(ConfigError) as caught:
        convert(saved(tmp_path / "a.pth", state), tmp_path / "b.pth", recipe=rules(tmp_path, *given))
    assert said in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pth", "recipe.json"]


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    state = {f"experts.{e}.w": torch.ones(2, 2) for e in (0, 1, 3)}
    recipe = rules(tmp_path, {"stack": {"parts": "experts.{e}.w", "over": "e", "whole": "experts.w"}})
    source = saved(tmp_path / "a.pth", state)
    with pytest.raises(ConfigError, match=r"lacks 'experts\.2\.w'"):
        convert(source, tmp_path / "b.pth", recipe=recipe)


def test_numbers_in_names_are_shifted(tmp_path: Path) -> None:
    state = {f"stages.{i}.{'ab'[i % 2]}": torch.full((1,), float(i)) for i in range(12)}
    recipe = rules(tmp_path, {"rename": {"stages.{i}.{x:[ab]}": "layers.{i+1}.{x}"}})
    convert(saved(tmp_path / "a.pth", state), tmp_path / "b.pth", recipe=recipe)
    there = torch.load(tmp_path / "b.pth", weights_only=True)["state_dict"]
    assert there["layers.11.a"] == 10
    convert(tmp_path / "b.pth", tmp_path / "c.pth", recipe=recipe, inverse=True)
    assert [*torch.load(tmp_path / "c.pth", weights_only=True)["state_dict"]] == [*state]


def test_what_cannot_be_undone_says_so(tmp_path: Path) -> None:
    recipe = rules(tmp_path, {"drop": ["head.{x}"]}, unmatched="keep")
    source = saved(tmp_path / "a.pth", {"head.weight": torch.ones(2), "w": torch.ones(2)})
    convert(source, tmp_path / "b.pth", recipe=recipe)
    with pytest.raises(ConfigError, match=r"drops 'head\.\{x\}', and nothing tells what it held.*recomputed = true"):
        convert(tmp_path / "b.pth", tmp_path / "c.pth", recipe=recipe, inverse=True)


def test_settings_of_recipes(tmp_path: Path) -> None:
    source = saved(tmp_path / "a.pth", weights("hf-llama"))
    target = tmp_path / "b.pth"
    for settings, said in (
        ({"recipe": "meta-lama-to-hf"}, "Did you mean 'meta-llama-to-hf'"),
        ({"recipe": str(tmp_path / "no.toml")}, "There is no file"),
        (
            {"recipe": "hf-llama-to-fused"},
            "needs the value 'heads'. Give it in 'recipe_values', as heads=8, or put a config",
        ),
        ({"recipe": "hf-llama-to-fused", "recipe_values": {"head": 4}}, "Did you mean 'heads'"),
        ({"recipe": "hf-llama-to-fused", "recipe_values": {"heads": 0}}, "positive whole numbers"),
        ({"recipe": "hf-llama-to-fused", "recipe_values": {"heads": 3}}, "needs the value 'kv_heads' beside 'heads'"),
        ({"recipe": "hf-llama-to-fused", "recipe_values": {"heads": 3, "kv_heads": 3}}, "The rule's sizes are 3:3:3"),
        ({"recipe": "hf-llama-to-fused", "keep": "all"}, "'recipe' writes the weights"),
        ({"inverse": True}, "'inverse' needs a 'recipe'"),
        ({"recipe": 3}, "valid string"),
    ):
        with pytest.raises(ConfigError) as caught:
            convert(source, target, **settings)  # type: ignore[arg-type]
        assert said in str(caught.value)
    assert not target.exists()


def test_heads_of_llama_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    rows = {"q": 64, "k": 32, "v": 32, "o": 64}  # grouped queries: the heads of k and v are fewer
    state = {f"layers.0.attention.w{part}.weight": torch.ones(count, 64) for part, count in rows.items()}
    source = saved(tmp_path / "in" / "a.pth", state)
    for values, said in (
        ({"heads": 4}, "rules[1].fuse needs the value 'kv_heads' beside 'heads', from which it may differ"),
        ({"heads": 4, "kv_heads": 4}, "have 64, 32 elements along dimension 0. The rule's sizes are 4:4"),
    ):
        with pytest.raises(ConfigError) as caught:
            convert(source, tmp_path / "b.pth", recipe="meta-llama-to-hf", recipe_values=values)
        assert said in str(caught.value)
    for name, config in (("config.json", {"num_attention_heads": 4}), ("params.json", {"n_heads": 4})):
        (source.parent / name).write_text(json.dumps(config))  # without the others, there are as many
        with pytest.raises(ConfigError, match="sizes are 4:4"):
            convert(source, tmp_path / "b.pth", recipe="meta-llama-to-hf")
        (source.parent / name).unlink()
    assert not (tmp_path / "b.pth").exists()
