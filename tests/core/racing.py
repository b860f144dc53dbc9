"""Two conversions into one target at the same moment, again and again. Run as a program: it forks, without torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mmfsdp.checkpoint import TargetExistsError, convert, diff, verify

NAMES = ("old.pth", "new.pth")


def main(directory: Path, name: str, overwrite: bool, pairs: int) -> None:
    """Race so often; the answers of each pair are printed, after what is left was proven whole."""
    answers = []
    for number in range(pairs):
        target = directory / str(number) / name
        target.parent.mkdir()
        begin, go = os.pipe()
        children = [started(directory / source, target, overwrite, begin) for source in NAMES]
        os.close(begin)
        os.close(go)  # both read to the end of it
        found = {source: answer.read() for source, (_, answer) in zip(NAMES, children, strict=True)}
        for child, _ in children:
            os.waitpid(child, 0)
        winners = [source for source, answer in found.items() if answer == "wrote"]
        assert winners, found
        assert verify(target).ok
        assert any(diff(target, directory / source).same for source in winners)
        assert os.listdir(target.parent) == [name]
        answers.append(found)
    print(json.dumps(answers))


def started(source: Path, target: Path, overwrite: bool, begin: int):  # type: ignore[no-untyped-def]
    """Fork a conversion that waits for the end of a pipe; return its process id, and where its answer comes from."""
    answer, to_answer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.close(to_answer)
        return child, os.fdopen(answer)
    os.closerange(begin + 1, to_answer)  # the other end of what it waits for
    os.read(begin, 1)
    to = None if target.suffix else "local"
    try:
        convert(source, target, to=to, ranks=2 if to else None, overwrite=overwrite)
        text = "wrote"
    except TargetExistsError as error:
        text = str(error)
    os.write(to_answer, text.encode())
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "force", int(sys.argv[4]))
