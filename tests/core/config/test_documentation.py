"""The pages of settings list every setting with its default, and none that is gone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mmfsdp.config import ShardConfig
from mmfsdp.config.precision import PRESETS

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("reference/configuration.md", "explanation/muon.md")
TEXT = "".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
# | `path` | type | default | meaning |
ROW = re.compile(
    r"^\| `(?P<path>[a-z_.]+)` \|(?P<type>[^|]*)\| (?P<default>[^|]*?) \|(?P<meaning>[^|]*)\|$",
    flags=re.MULTILINE,
)
ROWS = {match["path"]: match for match in ROW.finditer(TEXT)}
# ### name, and a paragraph
SECTIONS = dict(re.findall(r"^### (\w+)\n\n(.+?)\n\n", TEXT, flags=re.MULTILINE | re.DOTALL))
ACTIVATION_POLICY = "activation_checkpointing.modules"  # described once, under `wrap`


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def settings(
    model: type[BaseModel], prefix: str = "", above: tuple[type[BaseModel], ...] = ()
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield path and field of every setting; the kinds of a union share the path of their field."""
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}", field
        if f"{prefix}{name}" == ACTIVATION_POLICY:
            continue
        for inner in models_in(field.annotation):
            if inner not in above:
                yield from settings(inner, f"{prefix}{name}.", (*above, *models_in(field.annotation)))


SETTINGS = dict(reversed([*settings(ShardConfig)]))


def test_walk_reaches_every_config_model() -> None:
    assert {"wrap.policies", "precision.overrides.modules", "init.device", ACTIVATION_POLICY} <= SETTINGS.keys()


def test_every_setting_is_documented() -> None:
    assert sorted(SETTINGS.keys() - ROWS.keys() - SECTIONS.keys()) == []


def test_every_section_says_whether_it_is_off() -> None:
    models = {name: field for name, field in ShardConfig.model_fields.items() if any(models_in(field.annotation))}
    assert SECTIONS.keys() == models.keys()
    off = {name for name, field in models.items() if field.get_default(call_default_factory=True) is None}
    assert {name for name, text in SECTIONS.items() if "off by default" in text} == off


def test_every_documented_setting_exists() -> None:
    assert sorted(ROWS.keys() - SETTINGS.keys()) == []


def test_no_setting_is_documented_twice() -> None:
    assert len(ROWS) == len(ROW.findall(TEXT))


@pytest.mark.parametrize("path", sorted(SETTINGS.keys() & ROWS.keys()))
def test_documented_default(path: str) -> None:
    field, documented = SETTINGS[path], ROWS[path]["default"]
    if path == "wrap.kind":
        default: Any = ShardConfig().wrap.kind
    elif field.is_required():
        assert documented == "required"
        return
    else:
        default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        assert documented in ("all defaults", f"`{getattr(default, 'kind', None)}`")
        return
    assert documented == f"`{json.dumps(list(default) if isinstance(default, tuple) else default)}`"


@pytest.mark.parametrize("path", sorted(SETTINGS.keys() & ROWS.keys()))
def test_documented_choices(path: str) -> None:
    accepted = [value for value in get_args(SETTINGS[path].annotation) if isinstance(value, str)]
    if path != "wrap.kind" and accepted:
        assert re.findall(r"`([^`]+)`", ROWS[path]["type"]) == accepted


def test_documented_presets() -> None:
    for preset, fields in PRESETS.items():
        cells = [fields.get(name, "the model's") for name in ("param_dtype", "reduce_dtype", "storage_dtype")]
        assert f"| `{preset}` | {' | '.join(cells)} |" in TEXT
