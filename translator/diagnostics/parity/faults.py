"""What a planted fault is. They are in the modules named `…_faults` beside this one; the product knows none of them."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from translator.cache import CacheSpec, KeyValueState
from translator.decoder import CachedDecoder

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
    "table not reordered",
    "homes stay when sentences leave",
    "table not followed",
    "rows of unequal length not parted",
)
"""A self-test without one of these, where a container can have it, proves too little and fails."""


CONTAINER = "the container"
"""As a fault's owner: the class of the container under test."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: its name, what is wrong, and what stands in for `owner.attribute`.

    Faults are planted on contracts (`DecoderCache`, `KeyValueState`, `LayerStep`, `SourceState`, `Lengths`), not on
    what one container is made of, so that every container is tried with every fault it can have. `wrapper` gets the
    original first, then the original's arguments. `layers` is how many decoder layers a model needs for this to be a
    fault; `growing`, `norm` and `key_values` say that only a container that grows, a decoder with a last norm, or
    layers that keep K and V can have it. `by_reference`: True where only a container can have it whose layers share a
    table of rows (`table_faults`, `page_faults`), False where only one that moves its K and V, layer by layer;
    `container`: where only this one and its subclasses can.
    """

    name: str
    description: str
    owner: Any
    attribute: str
    wrapper: Callable[..., Any]
    layers: int = 1
    growing: bool = False
    norm: bool = False
    key_values: bool = False
    by_reference: bool | None = None
    container: type = object

    def applies(self, container: type[KeyValueState], decoder: CachedDecoder) -> bool:
        """Whether a decoder with this container can have the fault at all."""
        if self.layers > len(decoder.layers) or (self.norm and decoder.norm is None):
            return False
        if self.growing and container.needs_capacity:
            return False
        if self.by_reference not in (None, container.by_reference) or not issubclass(container, self.container):
            return False
        if not self.key_values and self.owner is not CONTAINER:
            return True
        spec = CacheSpec.for_targets(container.kind, 1)
        return any(isinstance(layer.self_attn.new_state(spec, 1), KeyValueState) for layer in decoder.stack)

    @contextmanager
    def planted(self, container: type[KeyValueState]) -> Iterator[None]:
        """The fault is in force inside the block, and gone after it, whatever happened there."""
        owner = container if self.owner is CONTAINER else self.owner
        original = getattr(owner, self.attribute)

        # A plain function, so that it binds to instances as the method it stands in for.
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return self.wrapper(original, *args, **kwargs)

        is_static = isinstance(owner, type) and isinstance(inspect.getattr_static(owner, self.attribute), staticmethod)
        with mock.patch.object(owner, self.attribute, staticmethod(stand_in) if is_static else stand_in):
            yield


class FaultList(list[Fault]):
    """Faults, added by decorating their wrappers."""

    def __init__(self, **common: Any) -> None:
        """`common` options of all that are added."""
        super().__init__()
        self.common = common

    def add(self, name: str, owner: Any, attribute: str, **options: Any) -> Callable[[Original], Original]:
        """Adds the decorated function as a stand-in for `owner.attribute`; its docstring is the description."""

        def decorate(wrapper: Original) -> Original:
            description = (wrapper.__doc__ or "").rstrip(".")
            self.append(Fault(name, description, owner, attribute, wrapper, **self.common, **options))
            return wrapper

        return decorate
