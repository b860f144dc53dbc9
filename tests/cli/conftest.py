"""An option that keeps a session from passing because it found no tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--least", type=int, default=0, help="Fail if fewer tests ran.")


def pytest_sessionfinish(session: pytest.Session) -> None:
    least = session.config.getoption("--least", default=0)
    if session.testscollected - session.testsfailed < least and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nOnly {session.testscollected} tests ran, expected at least {least}.")
