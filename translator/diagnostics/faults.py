"""What a planted fault is. The faults are in `step_faults` and `grid_faults`; the product knows none of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

Original = Callable[..., Any]

REQUIRED = (
    "position restarts at 0",
    "position off by one",
    "past K/V ignored",
    "causal flag on in a step",
    "causal mask top-left on a filled cache",
    "values stored as keys",
    "unwritten slots visible",
    "source padding forgotten after step 1",
    "reorder skipped",
    "reorder across sentences",
    "cross cache not compacted",
    "final norm skipped",
    "reset that keeps the length",
    "stale rows after crop",
)
"""A self-test without one of these proves too little and fails."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: its name, what is wrong, and what stands in for `owner.attribute`.

    `wrapper` gets the original first, then the original's arguments. `layers` is how many decoder layers a model needs
    for this to be a fault.
    """

    name: str
    description: str
    owner: Any
    attribute: str
    wrapper: Callable[..., Any]
    layers: int = 1

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is in force inside the block, and gone after it, whatever happened there."""
        original = getattr(self.owner, self.attribute)

        # A plain function, so that it binds to instances as the method it stands in for.
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return self.wrapper(original, *args, **kwargs)

        with mock.patch.object(self.owner, self.attribute, stand_in):
            yield


class FaultList(list[Fault]):
    """Faults, added by decorating their wrappers."""

    def add(self, name: str, owner: Any, attribute: str, *, layers: int = 1) -> Callable[[Original], Original]:
        """Adds the decorated function as a stand-in for `owner.attribute`; its docstring is the description."""

        def decorate(wrapper: Original) -> Original:
            self.append(Fault(name, (wrapper.__doc__ or "").rstrip("."), owner, attribute, wrapper, layers))
            return wrapper

        return decorate
