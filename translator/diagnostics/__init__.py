"""Proofs and measurements, of this project's models and of any decoder.

`parity/` compares every logit, token and score with a cache, without, and by another implementation, and plants
faults to see whether it would notice; `latency/` times the same. Both look at a `Subject` (`subject.py`): a model, or a
decoder alone.
For a decoder of one's own: `check_decoder`, `self_test_decoder`, `profile_decoder`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from translator.diagnostics.own_decoder import check_decoder, profile_decoder, self_test_decoder

__all__ = ["check_decoder", "profile_decoder", "self_test_decoder"]


def __getattr__(name: str) -> Any:
    """Imports on first use: the command line asks for one part at a time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from translator.diagnostics import own_decoder

    return getattr(own_decoder, name)
