"""The learning rate as a function of the step alone, so that resuming can't shift it."""

import math
from collections.abc import Callable

Schedule = Callable[[int, int, int], float]
"""`schedule(step, warmup, last)`: the share of the peak rate at `step`, after a warm-up of `warmup` steps."""


def constant(step: int, warmup: int, last: int) -> float:
    """The peak to the end."""
    return 1.0


def inverse_sqrt(step: int, warmup: int, last: int) -> float:
    """Falls with the square root of the step, and never to zero (Vaswani et al. 2017)."""
    return math.sqrt(max(warmup, 1) / step)


def linear(step: int, warmup: int, last: int) -> float:
    """A straight line to zero at the last step."""
    return 1 - _progress(step, warmup, last)


def cosine(step: int, warmup: int, last: int) -> float:
    """Half a cosine to zero at the last step (Loshchilov and Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * _progress(step, warmup, last)))


SCHEDULES: dict[str, Schedule] = {
    "cosine": cosine,
    "linear": linear,
    "inverse_sqrt": inverse_sqrt,
    "constant": constant,
}
"""Every schedule by the name that recipes give it."""


def learning_rate(schedule: str, step: int, *, peak: float, warmup_steps: int, max_steps: int) -> float:
    """Rate of step `step`, counted from 1: linear warm-up over at most a quarter of the run, then the schedule."""
    warmup = min(warmup_steps, max_steps // 4)
    if step <= warmup:
        return peak * step / warmup
    return peak * SCHEDULES[schedule](step, warmup, max_steps)


def _progress(step: int, warmup: int, last: int) -> float:
    return min(1.0, (step - warmup) / max(1, last - warmup))
