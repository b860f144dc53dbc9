"""The API pages of docs/reference are what their script writes from the docstrings."""

from __future__ import annotations

import pytest
from tools.api_pages import FOLDER, PAGES, page


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_up_to_date(name: str) -> None:
    assert page(name) == (FOLDER / name).read_text(encoding="utf-8"), "run: python tools/api_pages.py"
