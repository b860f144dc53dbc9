"""Tests of patterns on names, lists of names and byte counts."""

from __future__ import annotations

import pytest

from mmfsdp.basics.text import clean_fqn, compile_pattern, human_bytes, name_list
from mmfsdp.errors import ConfigError


class TestPatterns:
    @pytest.mark.parametrize(
        ("separators", "name", "matches"),
        [(".", "a.b", False), (".", "a/b", True), ("./", "a/b", False), ("./", "a-b", True)],
    )
    def test_a_star_stays_within_one_part_of_a_name(self, separators: str, name: str, matches: bool) -> None:
        assert bool(compile_pattern("*", separators).fullmatch(name)) is matches
        assert compile_pattern("**", separators).fullmatch(name)

    def test_a_regex_may_begin_with_flags(self) -> None:
        assert compile_pattern("re:(?i)HEAD").fullmatch("head")

    @pytest.mark.parametrize("pattern", ["re:(", "[z-a]"])
    def test_a_malformed_pattern_is_quoted_as_written(self, pattern: str) -> None:
        with pytest.raises(ConfigError) as caught:
            compile_pattern(pattern)
        assert str(caught.value).startswith(f"{pattern!r} is not a regular expression: ")


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("", ""),
        ("_fsdp_wrapped_module", ""),
        ("_fsdp_wrapped_module.weight", "weight"),
        ("a._fsdp_wrapped_module", "a"),
        ("a._fsdp_wrapped_module.b._fsdp_wrapped_module.", "a.b."),
        ("a.my_fsdp_wrapped_module.b", "a.my_fsdp_wrapped_module.b"),
    ],
)
def test_clean_fqn(name: str, clean: str) -> None:
    assert clean_fqn(name) == clean


def test_name_list() -> None:
    assert name_list(["a", "b"]) == "'a', 'b'"
    assert name_list([*"abcd"], 2) == "'a', 'b' and 2 more"
    assert name_list([0, 1, 2], 2) == "0, 1 and 1 more"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 29, "1.50 GiB"), (5 << 50, "5120.00 TiB")],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
