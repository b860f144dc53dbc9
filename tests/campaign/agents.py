"""Runs the ranks of a job under torchrun itself, which starts them again when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.campaign.job import Job, is_alive
from tests.forked_scripts import python

__all__ = ["TorchrunJob"]

_RANKS = 2
_PROGRAM = """
import sys
from pathlib import Path
from tests.campaign.training import main
main(Path(sys.argv[1]))
"""


class TorchrunJob(Job):
    """A job of two ranks, with one agent of torchrun. If the agent ends with an error, another one is started.

    Args:
        folder: See `Job`.
        settings: See `Job`.
        chance: See `Job`.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], chance: Any) -> None:
        super().__init__(folder, settings, chance)
        self._agent: subprocess.Popen[bytes] | None = None
        self._program = folder / "rank.py"
        self._program.write_text(_PROGRAM)

    def launch(self) -> None:
        """Start torchrun, as a scheduler does."""
        self.launches += 1
        paths = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        environ |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MMFSDP_TIMEOUT": "40"}
        words = ["--standalone", "--nproc-per-node", str(_RANKS), "--max-restarts", "1000", "--monitor-interval", "0.1"]
        command = [python(), "-m", "torch.distributed.run", *words, str(self._program), str(self.folder)]
        with (self.folder / "log").open("ab") as log:
            self._agent = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)

    def is_done(self) -> bool:
        """Start torchrun again if it has failed, and tell whether it has ended with 0."""
        assert self._agent is not None
        code = self._agent.poll()
        if code is None:
            return False
        self.endings[code] += 1
        if code != 0:
            self.launch()
        return code == 0

    def restart(self) -> None:
        """Ask torchrun to end; it passes that on to the ranks, and kills them 30 s later."""
        assert self._agent is not None
        self._agent.send_signal(signal.SIGTERM)

    def ranks(self, node: int | None = None) -> list[int]:
        """Return the processes of the ranks that have not ended."""
        return [pid for rank in range(_RANKS) if (pid := self.board.process(rank)) and is_alive(pid)]

    def end(self, *, stacks: bool = False) -> None:
        """End torchrun and all ranks."""
        ranks = self.ranks()
        if self._agent is not None:
            self._agent.kill()
        super().end(stacks=stacks)
        self.signal_ranks(ranks, signal.SIGKILL)
        if self._agent is not None:
            self._agent.wait()
