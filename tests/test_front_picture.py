"""The picture on the front page is that of the present rehearsal."""

import pytest
from tests.console_blocks import IS_PINNED
from tools.front_picture import PICTURE, drawn, rehearsed


@pytest.mark.exhaustive
@pytest.mark.skipif(not IS_PINNED, reason="other releases of torch hold other bytes for a moment")
def test_the_picture_is_up_to_date() -> None:
    assert drawn(rehearsed()) == PICTURE.read_text(encoding="utf-8"), "run: python tools/front_picture.py"
