"""The picture and the badges on the front page say what is true now."""

import re

import pytest
from tests.console_blocks import IS_PINNED
from tools.badges import BADGES, count_tests, path_of
from tools.badges import drawn as drawn_badge
from tools.front_picture import PICTURE, drawn, rehearsed


@pytest.mark.exhaustive
@pytest.mark.skipif(not IS_PINNED, reason="other releases of torch hold other bytes for a moment")
def test_the_picture_is_up_to_date() -> None:
    assert drawn(rehearsed()) == PICTURE.read_text(encoding="utf-8"), "run: python tools/front_picture.py"


@pytest.mark.parametrize("badge", BADGES)
def test_badges_are_true(badge: str) -> None:
    text = path_of(badge).read_text(encoding="utf-8")
    if badge == "tests":  # new ones do not make it untrue, so it need not follow each
        [said] = re.findall(r"more than ([\d,]+)</title>", text)
        assert int(said.replace(",", "")) <= count_tests() < int(said.replace(",", "")) + 500, "run: tools/badges.py"
    else:
        assert text == drawn_badge(badge), "run: python tools/badges.py"
