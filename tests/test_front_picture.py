"""The picture, the badges and the figures on the front page say what is true now."""

import re

import pytest
from tests.console_blocks import IS_PINNED
from tests.doc_pages import ROOT
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


def test_figures_are_those_of_the_pages_they_link_to() -> None:
    readme, validation, conversions, damage = (
        (ROOT / path).read_text(encoding="utf-8")
        for path in (
            "README.md",
            "docs/explanation/validation.md",
            "benchmarks/conversions.md",
            "docs/appendix/damage.md",
        )
    )
    forecast = re.search(r"(\d+) cases \| median error ([\d.]+)%, worst ([\d.]+)%", validation)
    assert forecast is not None
    assert "{} cases | [median error {} %, worst {} %]".format(*forecast.groups()) in readme
    merged = re.search(
        r"^\| accelerate `merge-weights` \|.*\| ([\d.]+) \(.*\| ([\d,]+) MB, (\d+) MB \|$", conversions, re.M
    )
    assert merged is not None
    ratio, theirs, ours = merged.groups()
    assert f"[{1 / float(ratio):.1f} times as fast, {ours} MB of memory instead of {theirs}]" in readme
    rows = [line.split("|") for line in damage.partition("<!-- end of directories -->")[0].splitlines() if "|" in line]
    wrong = {head.strip(): sum("wrong output" in row[at] for row in rows) for at, head in enumerate(rows[0])}
    assert f"[{wrong['mmfsdp, saved by mmfsdp']} that mmfsdp saved]" in readme
    assert f"torch's tool: {wrong['torch dcp_to_torch_save']} |" in readme
