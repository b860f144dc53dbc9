"""What type checkers know of the settings is what the config models accept."""

from __future__ import annotations

from tools.settings_types import STUB, stub


def test_type_checkers_know_every_setting() -> None:
    assert stub() == STUB.read_text(encoding="utf-8"), "run: python tools/settings_types.py"
