"""The base of all config models: frozen, strict about names, with errors that say what to write instead."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails

from mmfsdp.config.settings_file import read_settings
from mmfsdp.config.synonyms import advice_for
from mmfsdp.errors import ConfigError, closest

__all__ = ["ConfigModel", "setting", "settings_written_as"]

_validating: ContextVar[bool] = ContextVar("_validating", default=False)
_written: ContextVar[Mapping[str, str] | None] = ContextVar("_written", default=None)


def setting(path: str) -> str:
    """Return how the user writes a setting, for a message: as its path, unless `settings_written_as` says otherwise."""
    names, parts = _written.get() or {}, path.split(".")
    for end in range(len(parts), 0, -1):
        if (name := names.get(".".join(parts[:end]))) is not None:
            return ".".join([name, *parts[end:]])
    return path


@contextmanager
def settings_written_as(names: Mapping[str, str]) -> Iterator[None]:
    """Make errors about settings show the names that the user wrote for them.

    Args:
        names: The user's name of each setting, or section of settings, by path.
    """
    token = _written.set(names)
    try:
        yield
    finally:
        _written.reset(token)


class ConfigModel(BaseModel):
    """A frozen record of settings. Wrong input raises a `ConfigError` with the path, the value and a remedy."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)

    def __init__(self, /, **data: Any) -> None:
        with _explaining(type(self)):
            super().__init__(**data)

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """As pydantic's, with our errors."""
        with _explaining(cls):
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """As pydantic's, with our errors."""
        with _explaining(cls):
            return super().model_validate_json(json_data, **options)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        self.check_together()
        return self

    def check_together(self) -> None:
        """Check settings against each other; raises ValueError, which becomes a `ConfigError`."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings, numbers, bools: fit for JSON, YAML and TOML (no nulls)."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return JSON text that `from_json` reads back to an equal object."""
        return self.model_dump_json(indent=indent, exclude_none=True)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return a config from plain data; ``data`` is not changed.

        Raises:
            ConfigError: Something is unknown, misspelt or of the wrong type.
        """
        return cls.model_validate(data)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return a config from JSON text.

        Raises:
            ConfigError: Something is unknown, misspelt or of the wrong type, or the text is not JSON.
        """
        return cls.model_validate_json(text)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Return a config from a file of settings: ``.json``, ``.toml``, ``.yaml`` or ``.yml``.

        Raises:
            ConfigError: There is no such file, it cannot be parsed, or a setting is unknown or malformed.
        """
        return cls.from_dict(read_settings(path))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema (draft 2020-12) of this model, for editors and validators."""
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **cls.model_json_schema()}


@contextmanager
def _explaining(model: type[ConfigModel]) -> Iterator[None]:
    if _validating.get():  # only the outermost model explains errors, because it sees the full path of a wrong setting
        yield
        return
    token = _validating.set(True)
    try:
        yield
    except ValidationError as error:
        raise _explained(model, error) from None
    finally:
        _validating.reset(token)


def _explained(model: type[BaseModel], error: ValidationError) -> ConfigError:
    """Return one `ConfigError` for everything that pydantic found; a misspelt key comes before a missing one."""
    # pydantic also reports a tuple whose only item is wrong as too short.
    found = [d for d in error.errors(include_url=False) if not (d["type"] == "too_short" and d["input"])]
    details = sorted(found, key=lambda detail: detail["type"] != "extra_forbidden")
    lines = [_explain_one(model, detail) for detail in details]
    message = (
        lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} settings are wrong:", *(f"  - {x}" for x in lines)])
    )
    return ConfigError(message, config=setting(".".join(_walk(model, details[0]["loc"])[0])) or None)


def _explain_one(model: type[BaseModel], detail: ErrorDetails) -> str:
    path, names = _walk(model, detail["loc"])
    given, kind, context = detail["input"], detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        hint = advice_for(path[-1], names, keywords=False) or closest(path[-1], names) or _list_of(names)
        text = f"unknown setting {path[-1]!r}.{hint}"
    elif kind == "missing":
        text = "this setting is required."
    elif kind in ("literal_error", "union_tag_invalid"):
        is_tag = kind == "union_tag_invalid"
        given, accepted = (
            context["tag"] if is_tag else given,
            _quoted(context["expected_tags" if is_tag else "expected"]),
        )
        path = [*path, "kind"] if is_tag else path
        text = f"{given!r} is not accepted.{closest(given, accepted)}{_list_of(accepted)}"
    elif kind == "union_tag_not_found":
        text = f"got {given!r} (type {type(given).__name__}), expected a mapping with a 'kind'."
    elif kind == "too_short":
        text = f"expected at least one item, got {given!r}."
    elif kind == "value_error":
        text = str(context["error"])
    else:
        text = f"{detail['msg']}, got {given!r} (type {type(given).__name__})."
    where = ".".join([model.__name__, *path]) if _written.get() is None else setting(".".join(path))
    return f"{where}: {text}" if where else text


def _walk(model: type[BaseModel], location: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """Return the path as the user wrote it, and the accepted names of its last part.

    Pydantic adds the tag of a union's branch to a location; it narrows the models, but no user wrote it.
    """
    path: list[str] = []
    models = [model]
    names = list(model.model_fields)
    for part in location:
        branch = [m for m in models if "kind" in m.model_fields and part in get_args(m.model_fields["kind"].annotation)]
        if branch and len(models) > 1:
            models = branch
            names = list(branch[0].model_fields)
            continue
        path.append(str(part))
        names = [name for m in models for name in m.model_fields]
        if not isinstance(part, int):
            fields = [m.model_fields[part] for m in models if part in m.model_fields]
            if not fields:
                continue  # a key of a mapping, whose values are these models
            models = [found for field in fields for found in _models_in(field.annotation)]
    return path, names


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _quoted(words: str) -> list[str]:
    return re.findall(r"'([^']*)'", words)


def _list_of(names: list[str]) -> str:
    return f" Accepted: {', '.join(repr(name) for name in names)}."
