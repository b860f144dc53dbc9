"""Records of one process and of several ranks are equal, faults are noticed where they begin, without false alarm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed.faults import FAULTS
from tests.distributed.recorded import DIM, compared, recorded, reference

import mmfsdp
from mmfsdp.parity.records.record_files import read_record
from mmfsdp.parity.records.whole_tensors import kept_wholes, read_whole

SOME = [
    "gradients_are_summed", "one_parameter_is_not_reduced", "one_replica_scales_its_gradient", "a_gradient_is_removed",
    "accumulation_is_divided_twice", "all_ranks_get_the_same_samples", "query_and_key_are_swapped",
    "a_rank_draws_other_weights", "dropout_has_other_random_numbers", "a_buffer_is_not_synchronised",
    "one_norm_computes_in_bfloat16", "one_rank_computes_nan", "the_norm_is_that_of_one_shard", "a_step_is_skipped",
    "a_stale_average_is_copied_back", "the_last_row_has_no_gradient",
]  # fmt: skip

DIAGNOSED = {
    "gradients_are_summed": "a factor of 2, the number of ranks: summed instead of averaged",
    "one_replica_scales_its_gradient": "apart; wrong: 1",
    "a_gradient_is_removed": "a contribution is missing",
    "query_and_key_are_swapped": "the values of 'layers.0.attend.k.weight' in the reference: swapped",
    "dropout_has_other_random_numbers": "other random numbers",
    "one_rank_computes_nan": "792 elements are infinite or NaN, 0 in the reference; only of rank 1",
    "the_last_row_has_no_gradient": "only the last rows differ, around row 31 of 32",
    "a_stale_average_is_copied_back": "it changed after the step before, and not in the reference: stale weights",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    return reference(tmp_path_factory.mktemp("reference") / "plain")


@pytest.mark.parametrize("how", ["mmfsdp", "mixed", "fully_shard", "ddp"])
def test_ranks_compute_what_one_process_does(how: str, plain: tuple[Path, list[Path]], tmp_path: Path) -> None:
    found = compared(plain, recorded(tmp_path / how, how, 2))
    assert found.same, str(found)
    assert found.notes == []
    assert found.skipped == {}
    assert len(found.compared) > 300


@pytest.mark.exhaustive
def test_four_ranks_compute_what_two_do(tmp_path: Path) -> None:
    two, four = recorded(tmp_path / "2", "ddp", 2), recorded(tmp_path / "4", "mmfsdp", 4)
    found = mmfsdp.compare(two, four)
    assert found.same, str(found)

    (four / "rank00002.jsonl").unlink()
    rest = mmfsdp.compare(two, four)
    assert "Of the other run, the files of ranks 2 of 4 are missing." in rest.notes
    assert rest.same, str(rest)
    assert {item.key.kind for item in rest.compared} >= {"norm", "setting", "buffer"}  # of which each rank has all
    assert len(found.compared) == len(rest.compared) + sum(rest.skipped.values())


@pytest.mark.exhaustive
def test_bfloat16(tmp_path: Path) -> None:
    plain = reference(tmp_path / "plain", dtype=torch.bfloat16)
    found = compared(plain, recorded(tmp_path / "sharded", "fully_shard", 2, dtype=torch.bfloat16))
    assert found.same, str(found)


def test_whole_tensors_are_those_of_one_process(tmp_path: Path) -> None:
    patterns = ("gradient before clipping of head.*", "output of layers.1", "buffer of *", "loss of *")
    one = recorded(tmp_path / "plain", "plain", 1, whole=patterns)
    two = recorded(tmp_path / "ranks", "fully_shard", 2, FAULTS["the_last_row_has_no_gradient"], whole=patterns)
    records = [kept_wholes(read_record(folder)) for folder in (one, two)]
    assert records[0].keys() == records[1].keys()
    assert {key.kind for key in records[0]} == {"gradient before clipping", "output", "buffer", "loss"}
    for key in records[0]:
        if key.step == 0 and key.kind == "output":
            whole, other = (read_whole(folder, kept[key]) for folder, kept in zip((one, two), records, strict=True))
            assert whole.shape == other.shape
            assert whole.values.tolist() == pytest.approx(other.values.tolist(), rel=1e-4, abs=1e-6)
    wanted = "gradient before clipping of head.weight (step 0)"
    [wrong] = [item for item in mmfsdp.compare(one, two).differences if str(item.key) == wanted]
    assert f"of {32 * DIM} elements differ: [15, 0] is 0 and was " in wrong.why, wrong.why


@pytest.mark.sample(
    "a_gradient_is_removed",
    "one_parameter_is_not_reduced",
    "a_step_is_skipped",
    "a_buffer_is_not_synchronised",
    "one_norm_computes_in_bfloat16",
)
@pytest.mark.parametrize("name", SOME)
def test_a_fault_is_noticed_where_it_begins(name: str, plain: tuple[Path, list[Path]], tmp_path: Path) -> None:
    fault = FAULTS[name]
    first = compared(plain, recorded(tmp_path / name, fault.how, 2, fault)).first
    assert first is not None
    assert first.key.kind in fault.kinds
    assert first.key.name.startswith(fault.place)
    assert DIAGNOSED.get(name, "") in first.why
