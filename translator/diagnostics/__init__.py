"""Proofs and measurements, of this project's models and of any decoder.

`parity.check_parity` runs `scenarios` over a `Bench` (a `Subject` and its references) and tallies every difference;
`self_test` plants `step_faults` and `grid_faults` on the contracts and runs the same; `latency` times the subjects.
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
