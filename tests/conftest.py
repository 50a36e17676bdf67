"""Set before torch is imported: small tensors gain nothing from a second thread, and a busy machine loses a lot."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest

from tests.rounding import Shaken


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--shake`: see `tests.rounding`."""
    parser.addoption("--shake", action="store_true", help="round sums a little differently at each call")


@pytest.fixture(autouse=True)
def shaken(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test, under `--shake`."""
    if not request.config.getoption("--shake"):
        yield
        return
    with Shaken():
        yield
