"""The proofs and the profile for a decoder of one's own: an `nn.TransformerDecoder`, or a `CachedDecoder` around one.

    report = check_decoder(trained, embed, project, memory, padding)     # cached = uncached = PyTorch's own?
    print(report)
    print(self_test_decoder(trained, embed, project, memory, padding))   # would the check notice a fault?
    print(profile_decoder(trained, embed, project, memory))              # what a token costs, with and without

`embed(ids, positions)` takes two `(rows, T)` int64 and gives the decoder's input `(rows, T, D)`; `project(hidden)`
gives logits `(…, V)` of `(…, D)`. Where both are modules everything is also checked in float64, which decides to 1e-10;
otherwise in the decoder's own type.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from translator.cache import CACHE_KINDS
from translator.config import parse
from translator.diagnostics.latency.arms import LatencySettings
from translator.diagnostics.latency.profile import profile_of
from translator.diagnostics.latency.report import LatencyReport
from translator.diagnostics.parity.bench import Bench, SpecialIds
from translator.diagnostics.parity.check import SHORTEST_BEAM, ParityReport, Progress, parity_of, type_name
from translator.diagnostics.parity.faults import Fault
from translator.diagnostics.parity.scenarios import LIFE_POSITIONS
from translator.diagnostics.parity.self_test import BEAMS, FAULTS, LONGEST, SelfTestReport, self_test_of
from translator.diagnostics.subject import DecoderSubject, Embed, Project
from translator.errors import UserError

MOST_SENTENCES = 12


def check_decoder(
    decoder: nn.Module,
    embed: Embed,
    project: Project,
    memory: Tensor,
    memory_key_padding_mask: Tensor | None = None,
    *,
    bos_id: int = 1,
    eos_id: int = 2,
    pad_id: int = 0,
    max_positions: int = 32,
    beam_size: int = 4,
    kinds: Iterable[str] = CACHE_KINDS,
    progress: Progress | None = None,
) -> ParityReport:
    """Compares steps with each cache container to passes without one and to PyTorch's own decoder; `print` the report.

    `memory` `(B, S, D)`, or `(S, B, D)` where the decoder isn't `batch_first`, of at least one sentence, better of
    several of different lengths; the first 12 are used. `max_positions` is how long targets may get, at least 16. The
    ids are those that a search must know. `report.passed` is the verdict. Raises `UserError` for shapes that don't fit,
    `TypeError` for a decoder that `CachedDecoder.from_torch` refuses.
    """
    if beam_size < SHORTEST_BEAM:
        raise UserError(f"a parity check needs a beam of {SHORTEST_BEAM} or more, not {beam_size}: fewer hide faults")
    subject = _subject(decoder, embed, project, memory, memory_key_padding_mask, max_positions)
    dtypes = list(dict.fromkeys([torch.float64, subject.dtype])) if subject.converts else [subject.dtype]
    return parity_of(
        [subject],
        SpecialIds(pad_id, bos_id, eos_id),
        kinds=kinds,
        dtypes=dtypes,
        beam_size=beam_size,
        max_tokens=min(max_positions, 32),
        progress=progress,
    )


def self_test_decoder(
    decoder: nn.Module,
    embed: Embed,
    project: Project,
    memory: Tensor,
    memory_key_padding_mask: Tensor | None = None,
    *,
    bos_id: int = 1,
    eos_id: int = 2,
    pad_id: int = 0,
    max_positions: int = 32,
    kinds: Iterable[str] = CACHE_KINDS,
    faults: Sequence[Fault] = FAULTS,
    progress: Progress | None = None,
) -> SelfTestReport:
    """Plants faults one by one and asks whether `check_decoder` catches each, with each container; `print` the report.

    Arguments as for `check_decoder`. Faults that come from outside the decoder need positions and sources that matter:
    with an `embed` that ignores positions, or one sentence alone, some can't be seen, and the report says `MISSED`.
    `faults` are those to plant, by default all there are.
    """
    subject = _subject(decoder, embed, project, memory, memory_key_padding_mask, max_positions)
    dtype = torch.float64 if subject.converts else subject.dtype
    bench = Bench(
        subject.in_dtype(dtype),
        special=SpecialIds(pad_id, bos_id, eos_id),
        beams=BEAMS,
        longest=min(LONGEST, max_positions - 1),
    )
    return self_test_of(bench, kinds=kinds, faults=faults, progress=progress)


def profile_decoder(
    decoder: nn.Module,
    embed: Embed,
    project: Project,
    memory: Tensor,
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> LatencyReport:
    """Milliseconds a token by position, with each container and without, and each one's bytes; `print` the report.

    `memory` `(B, S, D)` (or `(S, B, D)`) without padding. `settings` are those of `LatencySettings`: tokens, beams,
    threads, repeats, arms. Raises `UserError` for a setting that is unknown or impossible.
    """
    unwanted = {"source_length", "batch", "dtype", "device"} & settings.keys()
    if unwanted:
        raise UserError(f"{', '.join(sorted(unwanted))}: given by memory and decoder, not as a setting")
    wanted = {"tokens": 32, **settings}
    subject = DecoderSubject(decoder, embed, project, memory, max_positions=wanted["tokens"])
    subject = subject.in_dtype(subject.dtype)
    B, S = subject.whole.shape[:2]
    placed = {"source_length": S, "batch": B, "dtype": type_name(subject.dtype), "device": str(subject.device)}
    return profile_of(subject, subject.whole, parse(LatencySettings, {**wanted, **placed}, where="profile"), progress)


def _subject(
    decoder: nn.Module,
    embed: Embed,
    project: Project,
    memory: Tensor,
    memory_key_padding_mask: Tensor | None,
    max_positions: int,
) -> DecoderSubject:
    if max_positions <= LIFE_POSITIONS:
        raise UserError(f"max_positions {max_positions}: the check decodes more than {LIFE_POSITIONS} tokens")
    return DecoderSubject(
        decoder, embed, project, memory, memory_key_padding_mask, max_positions=max_positions, most=MOST_SENTENCES
    )
