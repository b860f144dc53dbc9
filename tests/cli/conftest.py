"""An option that keeps a session from passing because it found no tests, or skipped them."""

from __future__ import annotations

import pytest

_passed: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--least", type=int, default=0, help="Fail if fewer tests passed.")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    least = session.config.getoption("--least", default=0)
    if len(_passed) < least and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nOnly {len(_passed)} tests passed, expected at least {least}.")
