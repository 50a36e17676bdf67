"""What the tests of training share."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.copy_task import write_copy_task


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """Writes the copy task and a recipe for it; see `write_copy_task`."""
    return partial(write_copy_task, tmp_path)
