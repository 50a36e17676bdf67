"""The learning rate as a function of the step alone, so that resuming can't shift it."""

import math

from train.recipe import TrainingConfig


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Rate of step `step`, counted from 1: linear warm-up over at most a quarter of the run, then the schedule."""
    peak, warmup = config.learning_rate, min(config.warmup_steps, config.max_steps // 4)
    if step <= warmup:
        return peak * step / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "inverse_sqrt":
        return peak * math.sqrt(max(warmup, 1) / step)
    progress = min(1.0, (step - warmup) / max(1, config.max_steps - warmup))
    if config.schedule == "linear":
        return peak * (1 - progress)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))
