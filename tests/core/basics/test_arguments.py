"""Arguments in messages: as Python writes them, or as options of a command, in every thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mmfsdp.basics import arguments_written_as
from mmfsdp.checkpoint import Conversion, convert
from mmfsdp.errors import ConfigError


def message_of(**settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        convert("missing", "out.gguf", **settings)
    return caught.value.message


def test_options_stand_for_arguments_in_all_threads_and_only_while_they_are_set() -> None:
    before = message_of(drop=["optimizer"], keep="model"), message_of(jobs=0)
    assert before[0].startswith("Conversion: 'drop' leaves keys out of everything; it cannot be combined with 'keep'")
    assert before[1].startswith("Conversion.jobs: ")
    with (
        arguments_written_as({"drop": "--drop", "keep": "--keep", "jobs": "--jobs"}),
        ThreadPoolExecutor(1) as thread,
    ):
        together = thread.submit(message_of, drop=["optimizer"], keep="model").result()
        alone = thread.submit(message_of, jobs=0).result()
    assert together == before[0].replace("'drop'", "--drop").replace("'keep'", "--keep")
    assert alone == before[1].replace("Conversion.jobs", "--jobs")
    assert (message_of(drop=["optimizer"], keep="model"), message_of(jobs=0)) == before


def test_words_of_the_user_are_no_options() -> None:
    with arguments_written_as({"limit": "--limit", "to": "--to"}), pytest.raises(ConfigError) as caught:
        Conversion.from_dict({"limit": 3})
    assert caught.value.message.startswith("Conversion.limit: unknown setting 'limit'.")
