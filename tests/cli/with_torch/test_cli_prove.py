"""``mmfsdp-cli prove``: a proof from the command line."""

from __future__ import annotations

from tests.cli.support import fields_of, invoke

LINEAR = ["torch.nn:Linear", "--model-arg", "in_features=6", "--model-arg", "out_features=4"]


def test_a_proof() -> None:
    result = invoke("prove", *LINEAR, "--batch", "4x6", "--steps", "1", "--json")
    assert result.exit_code == 0, result.output
    found = fields_of("prove", result.output)
    assert found["proven"] is True
    assert found["trained"]["world_sizes"] == [2, 2]  # the one process plays two


def test_bad_ranks() -> None:
    assert invoke("prove", *LINEAR, "--batch", "4x6", "--ranks", "2x2").exit_code == 2
    assert invoke("prove", *LINEAR, "--batch", "4x6", "--ranks", "1").exit_code == 2


def test_bad_batches() -> None:
    for words in ((), ("--batch", "4x6", "--batch-size", "2"), ("--batch-size", "2")):
        assert invoke("prove", *LINEAR, *words).exit_code == 2
