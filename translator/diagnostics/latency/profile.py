"""What one token costs, by position, with a cache and without: the library behind `translator profile`.

Words used here, in milliseconds unless said otherwise:

* **start**: `model.start()`: the encoder output is projected to every layer's cross-attention K and V, and the cache is
  allocated. Paid once a sentence. The uncached arms have none: they project the encoder output again at every token.
* **token**: one timed step: embedding, decoder, logits of the last position only, argmax. The first is kept apart.
* **cumulative** at token t: start plus the first t tokens: how long a reader waits for token t. Freeing the cache comes
  after the last token.
* **arm**: one way of decoding. `dynamic`, `indirect` and `static` are cache kinds. `none` runs the whole prefix through
  the same decoder at every token: same weights, precision and linear kernels. `torch` does so with PyTorch's own
  `nn.TransformerDecoder` around the same weights.
* **ratio**: an arm's cumulative time over that of `none` in the same repeat; the median of these is reported, so that a
  machine that slows down for a while does not decide the outcome.

Encoding the source is in no arm. Beams are rows decoded side by side; choosing and reordering them is not timed. Before
anything is timed, all arms decode the same tokens in step and must pick the same next token every time: times of two
computations that differ would mean nothing. Arms take turns inside a repeat, in changing order. On a GPU the device is
synchronised around every timed step, or only the launch would be timed.
"""

import copy
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from translator.diagnostics.latency.arms import UNCACHED, Arm, LatencySettings, make_arms
from translator.diagnostics.latency.report import ArmLatency, LatencyReport, machine_facts
from translator.diagnostics.subject import ModelSubject, Subject, layer_sizes
from translator.errors import UserError
from translator.model import TranslationModel
from translator.search.base import check_finite

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
# Two arms may pick different tokens only where the reference's logits are this close, relative to the largest.
_TIE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float64: 1e-10}
_FIRST_ID = 2  # the start token of a checkpoint's tokenizer; any id would take as long

Clock = Callable[[], float]


class ArmsDisagree(RuntimeError):
    """Two arms computed different things, so that comparing their times would say nothing."""


def profile_latency(
    model: TranslationModel, settings: LatencySettings, progress: Callable[[int, int], None] | None = None
) -> LatencyReport:
    """Times every arm of `settings` on `model`, which is left as it was; `progress(done, total)` counts passes.

    Raises `UserError` for lengths past the model's positions, a device that isn't there or a model that gives NaN,
    `ArmsDisagree` when arms do not pick the same tokens.
    """
    _check_fits(model.config.max_positions, settings)
    device, dtype = torch.device(settings.device), DTYPES[settings.dtype]
    model, training = _placed(model, device, dtype), model.training
    try:
        with torch.inference_mode():
            model.eval()
            memory = _memory(model, settings, device)
        return profile_of(ModelSubject(model, [[0] * settings.source_length]), memory, settings, progress)
    finally:
        model.train(training)


def profile_of(
    subject: Subject,
    memory: Tensor,
    settings: LatencySettings,
    progress: Callable[[int, int], None] | None = None,
) -> LatencyReport:
    """As `profile_latency`, on any subject and its encoder output `memory` `(B, S, D)`, in the type they have."""
    device, dtype = memory.device, memory.dtype
    before = os.getloadavg() if hasattr(os, "getloadavg") else None
    with _threads(settings.threads), _no_garbage_collection(), torch.inference_mode():
        arms = make_arms(subject, settings, memory)
        tokens, ties = _agree(arms, settings, device, dtype)
        measured = _measure(arms, tokens, settings, _clock(device), progress)
        machine = machine_facts(device)
    machine["load_before"] = None if before is None else round(before[0], 2)
    sizes = {**layer_sizes(subject.decoder), "vocab_size": subject.vocab_size}
    return LatencyReport(settings, sizes, machine, measured, ties)


def _agree(
    arms: dict[str, Arm], settings: LatencySettings, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, int]:
    """All arms in step on the first arm's greedy tokens `(rows, tokens)`; returns these and the ties among picks."""
    tokens = torch.full((settings.batch * settings.beams, settings.tokens), _FIRST_ID, device=device)
    (lead, leader), *others = arms.items()
    ties = 0
    for arm in arms.values():
        arm.start()
    for t in range(settings.tokens):
        logits = leader.step(tokens, t)
        check_finite(logits)
        picks = logits.argmax(-1)
        for name, arm in others:
            other = arm.step(tokens, t).argmax(-1)
            if torch.equal(other, picks):
                continue
            gaps = logits.gather(1, picks.unsqueeze(1)) - logits.gather(1, other.unsqueeze(1))
            if bool((gaps > _TIE[dtype] * logits.abs().max()).any()):
                raise ArmsDisagree(f"arms {lead!r} and {name!r} pick different tokens at position {t + 1}")
            ties += int((other != picks).sum())
        if t + 1 < settings.tokens:
            tokens[:, t + 1] = picks
    for arm in arms.values():
        arm.finish()
    return tokens, ties


def _measure(
    arms: dict[str, Arm],
    tokens: Tensor,
    settings: LatencySettings,
    clock: Clock,
    progress: Callable[[int, int], None] | None,
) -> dict[str, ArmLatency]:
    measured = {name: ArmLatency(name, [], [], []) for name in arms}
    extra_warmup = settings.warmup - 1  # the check that arms agree was the first
    total, done = (extra_warmup + settings.repeats) * len(arms), 0
    for repeat in range(-extra_warmup, settings.repeats):
        for name in _turn(list(arms), repeat):
            start, steps, wall = _one_pass(arms[name], tokens, clock)
            if repeat >= 0:
                measured[name].start_samples.append(start)
                measured[name].token_samples.append(steps)
                measured[name].wall_samples.append(wall)
                measured[name].cache_bytes = arms[name].nbytes
            done += 1
            if progress is not None:
                progress(done, total)
    if UNCACHED in measured:
        for arm in measured.values():
            arm.ratio = _paired_ratio(arm, measured[UNCACHED])
    return measured


def _turn(names: list[str], repeat: int) -> list[str]:
    """The order of a repeat: another arm first each time, and each neighbour on either side."""
    at = (repeat // 2) % len(names)
    order = names[at:] + names[:at]
    return order[::-1] if repeat % 2 else order


def _one_pass(arm: Arm, tokens: Tensor, clock: Clock) -> tuple[float, list[float], float]:
    """`(start, [token, …], wall)` in milliseconds.

    An untimed first token comes before: else whoever follows the longest arm would pay for the memory it displaced.
    """
    arm.start()
    arm.step(tokens, 0)
    arm.finish()
    steps: list[float] = []
    begin = clock()
    arm.start()
    started = clock()
    for t in range(tokens.shape[1]):
        before = clock()
        arm.step(tokens, t).argmax(-1)
        steps.append((clock() - before) * 1e3)
    arm.finish()
    end = clock()
    return (started - begin) * 1e3, steps, (end - begin) * 1e3


def _paired_ratio(arm: ArmLatency, base: ArmLatency) -> list[float]:
    ratios: list[list[float]] = []
    for mine, theirs in zip(_cumulated(arm), _cumulated(base), strict=True):
        ratios.append([a / b for a, b in zip(mine, theirs, strict=True)])
    return [statistics.median(column) for column in zip(*ratios, strict=True)]


def _cumulated(arm: ArmLatency) -> Iterator[list[float]]:
    for total, times in zip(arm.start_samples, arm.token_samples, strict=True):
        sums = []
        for value in times:
            total += value
            sums.append(total)
        yield sums


def _clock(device: torch.device) -> Clock:
    if device.type != "cuda":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


def _check_fits(most: int, settings: LatencySettings) -> None:
    for name in ("source_length", "tokens"):
        if getattr(settings, name) > most:
            raise UserError(f"{name} {getattr(settings, name)} is more than the model's {most} positions")
    try:
        torch.empty(0, device=settings.device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device {settings.device!r} cannot be used: {str(error).splitlines()[0]}") from None


def _placed(model: TranslationModel, device: torch.device, dtype: torch.dtype) -> TranslationModel:
    """The model itself where it already fits, else a copy: the caller's keeps its device and precision."""
    weight = model.embedding.weight
    if weight.device.type == device.type and weight.dtype == dtype:
        return model
    return copy.deepcopy(model).to(device=device, dtype=dtype)


def _memory(model: TranslationModel, settings: LatencySettings, device: torch.device) -> Tensor:
    """Encoder output `(B, S, D)` of random source tokens, without padding; not timed."""
    generator = torch.Generator().manual_seed(settings.seed)
    shape = (settings.batch, settings.source_length)
    return model.encode(torch.randint(0, model.config.vocab_size, shape, generator=generator).to(device))


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
