"""`Translator`: lines in, the same number of lines out, in order, whatever they hold."""

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from translator.arguments import item_list, text_list
from translator.cache import cache_options, container_of
from translator.checkpoint import DEFAULT_CHECKPOINT, Checkpoint, check_ensemble
from translator.config import DecodeConfig, parse
from translator.device import usable_device
from translator.engine import Engine
from translator.engine.engines import AUTO, make_engine, read_engine
from translator.engine.ensemble import EnsembleEngine
from translator.engine.exact import check_exact
from translator.errors import UserError
from translator.padding import pad, padding
from translator.pipeline.batching import batches
from translator.pipeline.bulk import Bulk, Report, Totals
from translator.pipeline.decoding import TaskDecoder
from translator.pipeline.sentences import join_sentences, marker_text, sentence_gap, split_marker, split_sentences
from translator.pipeline.text import Piece, Task, check_text, fitted, one_line
from translator.pipeline.workers import Workers, layout
from translator.search import Hypothesis, check_finite, policy_of
from translator.typed.sides import Sides, Source
from translator.typed.spans import restore

log = logging.getLogger("translator")

BATCH_TOKENS = 8192

Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is in all."""


@dataclasses.dataclass(slots=True)
class Candidate:
    """One translation of a line: its text, log-probability and score; sums, for a line of several sentences.

    `sources` are the sentences that the line was split into, without the number of a list's item, which is copied, and
    one too long as far as it was translated; `tokens` are the pieces of each one's translation.
    """

    text: str
    log_prob: float
    score: float
    sources: list[str]
    tokens: list[list[str]]


class Translator:
    """A checkpoint ready to translate, or several that decode together as an ensemble.

    One serves several threads at once: nothing in it changes by translating.

    `batch_tokens` bounds a batch: rows (sentences by beams) times the longest source. `workers` batches are decoded at
    once and share PyTorch's CPU threads (by default see `pipeline.workers.layout`). `cache` is the container's kind, by
    default the engine's own choice; `engine` one that runs the models, or the name of one in `engine.engines.ENGINES`,
    and `compute_type` what it computes with. Raises `UserError` for an unknown kind, engine or type, and for
    checkpoints of other languages or tokens than the first's. Lines, sources, targets and prefixes are lists of texts
    everywhere: a single string in their place is a `TypeError`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *others: Checkpoint,
        engine: Engine | str = AUTO,
        compute_type: str = AUTO,
        batch_tokens: int = BATCH_TOKENS,
        cache: str | None = None,
        workers: int | None = None,
    ) -> None:
        check_ensemble([checkpoint, *others], [f"checkpoint {number}" for number in range(1, len(others) + 2)])
        if isinstance(engine, str):
            engines = [make_engine(each.model.eval(), engine, compute_type) for each in (checkpoint, *others)]
            engine = EnsembleEngine(engines) if others else engines[0]
        options = cache_options(cache or engine.cache_kind)
        if (loses := container_of(options["kind"]).loses) is not None:
            log.warning("cache %s is approximate, %s: translations may be other ones", cache, loses)
        self.engine = engine
        self.tokenizer = checkpoint.tokenizer
        self.config = checkpoint.config
        self.batch_tokens = batch_tokens
        self.workers = workers
        self._sides = Sides(self.tokenizer, self.config.source_language, self.config.target_language)
        self._decoder = TaskDecoder(self.engine, self.tokenizer, batch_tokens, options)

    @classmethod
    def from_checkpoint(
        cls,
        *paths: str | Path | None,
        device: str = "cpu",
        engine: str = AUTO,
        compute_type: str = AUTO,
        batch_tokens: int = BATCH_TOKENS,
        cache: str | None = None,
        workers: int | None = None,
        exact: bool = False,
    ) -> "Translator":
        """The checkpoint in folder `path`, by default the shipped model; several decode together as an ensemble.

        With `exact`, only on an engine that gives the same bits in any company: see `engine.exact.check_exact`. Raises
        `UserError` when one can't be used, or not with the first, or not exactly.
        """
        folders = [Path(path) if path else DEFAULT_CHECKPOINT for path in paths or (None,)]
        read = [read_engine(folder, usable_device(device), engine, compute_type) for folder in folders]
        checkpoints, engines = [each for each, _ in read], [made for _, made in read]
        check_ensemble(checkpoints, folders)
        whole = EnsembleEngine(engines) if len(engines) > 1 else engines[0]
        if exact:
            check_exact(whole)
        return cls(*checkpoints, engine=whole, batch_tokens=batch_tokens, cache=cache, workers=workers)

    def translate(
        self,
        lines: Sequence[str],
        config: DecodeConfig | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        split: bool = True,
        first_line: int = 1,
        progress: Progress | None = None,
        **settings: Any,
    ) -> list[str]:
        """The best translation of each line, in the order given; blank lines give empty ones.

        See `candidates` for the arguments.
        """
        found = self.candidates(
            lines, config, prefixes=prefixes, split=split, first_line=first_line, progress=progress, **settings
        )
        return [candidates[0].text for candidates in found]

    def candidates(
        self,
        lines: Sequence[str],
        config: DecodeConfig | None = None,
        *,
        prefixes: Sequence[str] | None = None,
        split: bool = True,
        first_line: int = 1,
        progress: Progress | None = None,
        **settings: Any,
    ) -> list[list[Candidate]]:
        """The `n_best` translations of each line, best first; at least one for every line, no two of the same text.

        There are fewer where the search found fewer texts. `settings` change `config`, by default the checkpoint's:
        `translate(lines, beam_size=5)`. `prefixes` force how each translation begins. A line of several sentences is
        split, translated and joined again, the numbers of a list copied, unless `split` is False. A sentence longer
        than the model's positions is cut, with a warning that names its line, counted from `first_line`.
        `progress(done, total)` counts lines. Raises `UserError` for settings this model can't meet.
        """
        lines = text_list(lines, "lines")
        if prefixes is not None:
            prefixes = text_list(prefixes, "prefixes")
            if len(prefixes) != len(lines):
                raise UserError(f"{len(lines)} lines need as many target prefixes, not {len(prefixes)}")

        def report(totals: Totals) -> None:
            if progress:
                progress(totals.lines, len(lines))

        windows = [list(zip(lines, prefixes or [""] * len(lines), strict=True))]
        ((_, found),) = self._in_windows(windows, self.decode_config(config, **settings), split, first_line, report)
        return found

    def windows(
        self,
        windows: Iterable[Sequence[str]],
        config: DecodeConfig | None = None,
        *,
        prefix: str = "",
        split: bool = True,
        first_line: int = 1,
        report: Report | None = None,
        ready: Callable[[], bool] = lambda: True,
        **settings: Any,
    ) -> Generator[tuple[list[str], list[list[Candidate]]], None, None]:
        """Each window of lines and their `candidates`, in order: a file of any length in the memory of a few windows.

        The next windows are read, cut into sentences and decoded while one is waited for, unless `ready()` says that
        reading would wait: then what has been read comes first. Sentences met before are not searched for again, but
        for samples. `prefix` begins every translation; `report` hears of each batch. Close what this returns to stop
        early: its threads end then, or when it is exhausted.
        """
        config = self.decode_config(config, **settings)
        pairs = ([(line, prefix) for line in text_list(lines, "lines")] for lines in windows)
        yield from self._in_windows(pairs, config, split, first_line, report, ready)

    def stream(self, text: str, config: DecodeConfig | None = None, **settings: Any) -> Iterator[str]:
        """Yields the translation of `text` as it comes: token by token when greedy, else sentence by sentence.

        The parts joined are what `translate([text])` returns.
        """
        config = self.decode_config(config, **settings)
        (text,) = text_list([text], "text")
        language, started = self.config.target_language, False
        for piece in self._pieces(1, text, "", True):
            before = marker_text(piece.marker, language)
            if started:
                before = sentence_gap(language) + before
            for part in self._shown(piece.source, self._decoder.stream(piece.task, config)):
                if part:
                    yield before + part
                    before, started = "", True

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str | list[str]],
        *,
        line_numbers: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> list[tuple[float, int]]:
        """(log-probability, tokens) of each target given its source, teacher-forced.

        A target is text, which is scored with its end token, or pieces as `Candidate.tokens` gives them, which are
        scored as they are: a translation cut at its longest has no end token. `progress(done, total)` counts pairs.
        Raises `UserError` for a source or target longer than the model's positions, which names its line, by
        `line_numbers` or else by its place.
        """
        sources, targets = text_list(sources, "sources"), item_list(targets, "targets")
        if len(sources) != len(targets):
            raise UserError(f"{len(sources)} sources and {len(targets)} targets: there must be as many of each")
        numbers = line_numbers or range(1, len(sources) + 1)
        pairs = [
            self._checked_pair(number, source, target if isinstance(target, str) else text_list(target, "a target"))
            for number, source, target in zip(numbers, sources, targets, strict=True)
        ]
        results: list[tuple[float, int]] = [(0.0, 0)] * len(pairs)
        widths, done = [max(len(source), len(target)) for source, target, _ in pairs], 0
        for batch in batches(widths, self.batch_tokens):
            for index, total in zip(batch, self._score_batch([pairs[index] for index in batch]), strict=True):
                results[index] = (total, len(pairs[index][1]))
            done += len(batch)
            if progress:
                progress(done, len(pairs))
        return results

    def decode_config(self, config: DecodeConfig | None = None, **settings: Any) -> DecodeConfig:
        """`config`, by default the checkpoint's, with `settings` changed.

        Raises `UserError` for an unknown setting or search, an impossible value, or a beam larger than the vocabulary.
        """
        config = config or self.config.decode
        if settings:
            config = parse(DecodeConfig, dataclasses.asdict(config) | settings, where="search settings")
        policy_of(config)
        if config.beam_size > self.tokenizer.vocab_size:
            raise UserError(
                f"beam_size {config.beam_size} is larger than the vocabulary of {self.tokenizer.vocab_size} tokens"
            )
        return config

    # ----------------------------------------------------------------------------------------------------------------

    def _in_windows(
        self,
        windows: Iterable[Sequence[tuple[str, str]]],
        config: DecodeConfig,
        split: bool,
        first_line: int,
        report: Report | None,
        ready: Callable[[], bool] = lambda: True,
    ) -> Generator[tuple[list[str], list[list[Candidate]]], None, None]:
        """What `windows` gives, of lines with the beginnings of their translations."""
        texts: deque[list[str]] = deque()

        def cut() -> Iterator[list[list[Piece]]]:
            number = first_line
            for window in windows:
                texts.append([line for line, _ in window])
                yield [self._pieces(number + i, line, prefix, split) for i, (line, prefix) in enumerate(window)]
                number += len(window)

        with Workers(*layout(self.workers, torch.get_num_threads(), self.engine.device)) as workers:
            for by_line in Bulk(self._decoder, config, report).run(cut(), workers, ready):
                yield texts.popleft(), [self._joined(pieces, config.n_best) for pieces in by_line]

    def _pieces(self, number: int, line: str, prefix: str, split: bool) -> list[Piece]:
        check_text(number, line, prefix)
        limit, sides = self.engine.max_positions, self._sides
        pieces = []
        for place, (marker, sentence) in enumerate(self._marked_sentences(sides.line(line), prefix, split)):
            source, ids, whole = fitted(self.tokenizer, sides.source(sentence), limit)
            if whole > limit:
                log.warning("line %d: a sentence of %d tokens was cut to the model's %d", number, whole, limit)
                sentence = sides.typed(source)
            forced: list[int] = []
            if prefix and place == 0:
                forced = self.tokenizer.encode(sides.forced(prefix, source))
            elif len(ids) < limit and sides.is_copied(source):
                forced = ids  # its end too
            task = Task(tuple(ids), tuple(forced), (number, place), source.text if sides.slots else None)
            pieces.append(Piece(marker, sentence, source, task))
        return pieces

    def _marked_sentences(self, line: str, prefix: str, split: bool) -> list[tuple[str, str]]:
        """A line's sentences, each with the number of a list before it; a forced beginning leaves no room for one."""
        if not line.strip():
            return []
        language = self.config.source_language
        if not split:
            return [("", line)]
        first, *others = split_sentences(line, language)
        return [("", first) if prefix else split_marker(first, language), *(split_marker(s, language) for s in others)]

    def _joined(self, pieces: list[Piece], most: int) -> list[Candidate]:
        """At most `most` candidates of a line from its pieces' hypotheses, no two of the same text."""
        if not pieces:
            return [Candidate("", 0.0, 0.0, [], [])]
        by_text: dict[str, Candidate] = {}
        for rank in range(min(most, max(len(piece.task.found) for piece in pieces))):
            # A sentence with fewer hypotheses than another stays at its last.
            chosen = [piece.task.found[min(rank, len(piece.task.found) - 1)] for piece in pieces]
            text = self._line_text(pieces, chosen)
            by_text.setdefault(
                text,
                Candidate(
                    text,
                    sum(hypothesis.log_prob for hypothesis in chosen),
                    sum(hypothesis.score for hypothesis in chosen),
                    [piece.text for piece in pieces],
                    [self.tokenizer.pieces(hypothesis.tokens) for hypothesis in chosen],
                ),
            )
        return list(by_text.values())

    def _line_text(self, pieces: list[Piece], chosen: list[Hypothesis]) -> str:
        language, texts = self.config.target_language, []
        for piece, hypothesis in zip(pieces, chosen, strict=True):
            text = self._sides.target(one_line(self.tokenizer, hypothesis.tokens), piece.source)
            texts.append(marker_text(piece.marker, language) + text if text else "")
        return join_sentences(texts, language)

    def _shown(self, source: Source, parts: Iterable[str]) -> Iterator[str]:
        """The parts of a translation of `source` as they are to be read; all at once where the whole decides."""
        written = shown = ""
        for part in parts:
            written += part
            if source.accelerator is None:
                shown += (more := restore(part, source.spans))
                yield more
        yield self._sides.target(written, source)[len(shown) :]

    def _checked_pair(self, number: int, source: str, target: str | list[str]) -> tuple[list[int], list[int], int]:
        tokenizer, limit = self.tokenizer, self.engine.max_positions
        check_text(number, source, target if isinstance(target, str) else "")
        typed = self._sides.source(source)
        source_ids = [*tokenizer.encode(typed.text), tokenizer.eos_id]
        if isinstance(target, str):
            target_ids = [*tokenizer.encode(self._sides.forced(target, typed)), tokenizer.eos_id]
        else:
            target_ids = tokenizer.ids(target)
        if not target_ids:
            raise UserError(f"line {number}: there are no tokens to score")
        for side, ids in (("source", source_ids), ("target", target_ids)):
            if len(ids) > limit:
                raise UserError(f"line {number}: the {side} has {len(ids)} tokens; this model's limit is {limit}")
        return source_ids, target_ids, number

    @torch.no_grad()
    def _score_batch(self, pairs: list[tuple[list[int], list[int], int]]) -> list[float]:
        device, tokenizer = self.engine.device, self.tokenizer
        source = pad([pair[0] for pair in pairs], tokenizer.pad_id).to(device)
        hidden = padding([len(pair[0]) for pair in pairs]).to(device)
        target = pad([pair[1] for pair in pairs], tokenizer.pad_id).to(device)
        target_in = target.roll(1, dims=1)
        target_in[:, 0] = tokenizer.bos_id
        chosen = self.engine.log_probs(source, target_in, hidden).gather(2, target.unsqueeze(2)).squeeze(2)  # (B, T)
        check_finite(chosen)
        # Rounded once, in whatever batch: sums of padded rows would hang on the longest of them.
        return [math.fsum(own[: len(pair[1])]) for own, pair in zip(chosen.tolist(), pairs, strict=True)]
