"""From tasks to hypotheses: batches, the model, a search, and as many different texts as were asked for."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import cached_property
from threading import Event
from typing import Any

from translator.cache import CacheSpec
from translator.config import DecodeConfig
from translator.engine import Engine
from translator.errors import UserError
from translator.pipeline.batching import batches
from translator.pipeline.text import Task, goes_on_and_on, one_line
from translator.search import Driver, Hypothesis, Sentence, Start, rows_per_sentence, starter
from translator.search.rules import has_loop
from translator.tokenizer import Tokenizer
from translator.typed.slots import SLOTS
from translator.typed.spans import same_slots


@dataclasses.dataclass(frozen=True)
class TaskDecoder:
    """Decodes tasks with one engine. `batch_tokens` bounds rows times the longest source; `cache` are fields of a
    `CacheSpec`: a kind, and what was chosen of it."""

    engine: Engine
    tokenizer: Tokenizer
    batch_tokens: int
    cache: dict[str, Any]

    def decode(self, tasks: Sequence[Task], config: DecodeConfig, stopped: Event | None = None) -> None:
        """Puts into each task's `found` its best hypotheses, at most `config.n_best`, no two of the same text.

        Where several token sequences spell one text, the best of them stays and a search of twice the size looks for
        others below the best; there may be fewer in the end. Those that hold the placeholders of their source come
        first: a translation that lost a number is worse than one that is less likely. Raises `UserError` for a prefix
        too long for the model, and `CancelledError` soon after `stopped` is set.
        """
        if config.n_best == 1:
            any_will_do = not config.max_in_a_row and all(task.slots is None for task in tasks)
            if config.search_name != "beam" or any_will_do:
                self._search(tasks, config, stopped)
                return
            self._search(tasks, dataclasses.replace(config, n_best=config.beam_size), stopped)
            for task in tasks:
                task.found = sorted(task.found, key=self._rank(task, config))[:1]
            return
        # A beam finds more hypotheses than are asked for; among them may be other texts.
        whole = config if config.sampling else dataclasses.replace(config, n_best=config.beam_size)
        self._search(tasks, whole, stopped)
        lacking = []
        for task in tasks:
            task.found = self._different(sorted(task.found, key=self._rank(task, config)))[: config.n_best]
            if len(task.found) < config.n_best:
                lacking.append(task)
        rows = min(2 * rows_per_sentence(config), self.tokenizer.vocab_size)
        if lacking and rows > rows_per_sentence(config):
            # Copies: what is missing is added to what was found, which stays.
            again = [dataclasses.replace(task, found=[]) for task in lacking]
            self._search(again, dataclasses.replace(config, beam_size=rows, n_best=rows), stopped)
            for task, more in zip(lacking, again, strict=True):
                rank = self._rank(task, config)
                below = [hypothesis for hypothesis in more.found if rank(hypothesis) >= rank(task.found[0])]
                task.found = self._different(sorted([*task.found, *below], key=rank))[: config.n_best]

    def batches(self, tasks: Sequence[Task], config: DecodeConfig) -> list[list[Task]]:
        """The tasks in batches of like length within `batch_tokens`, the longest first."""
        rows = rows_per_sentence(config)
        return [
            [tasks[index] for index in batch]
            for batch in batches([len(task.ids) * rows for task in tasks], self.batch_tokens)
        ]

    def stream(self, task: Task, config: DecodeConfig) -> Iterator[str]:
        """The text of a task's best hypothesis, in parts as they come; of a greedy search, token by token."""
        if config.search_name != "greedy":
            self.decode([task], config)
            yield one_line(self.tokenizer, task.found[0].tokens)
            return
        shown, ids = "", list[int]()
        (sentence,) = self._sentences([task], config)
        driver = Driver(config, self._start(1, sentence.limit))
        driver.add(sentence, task.ids)
        while driver.busy:
            (event,) = driver.step()
            ids += [row.token for row in event.rows if row]
            text = one_line(self.tokenizer, event.ended[0].tokens if event.ended else ids)
            # A character may be spelled by several byte tokens: until it is whole, it shows as U+FFFD. Should it prove
            # to be white space, the space before it is no longer in the middle of the text.
            if not event.ended:
                text = text.rstrip("\ufffd").rstrip()
            if text.startswith(shown):
                yield text[len(shown) :]
                shown = text

    def _search(self, tasks: Sequence[Task], config: DecodeConfig, stopped: Event | None) -> None:
        # A batch is decoded to its end: sentences of like length end together, and on a CPU a step of fewer rows takes
        # almost as much less time. To let waiting ones in meanwhile was slower with every engine measured.
        rows = rows_per_sentence(config)
        for batch in self.batches(tasks, config):
            driver = Driver(config)
            sentences = self._sentences(batch, config)
            start = self._start(rows, max(sentence.limit for sentence in sentences))
            numbers = driver.adopt(start([task.ids for task in batch], None), sentences)
            by_number = dict(zip(numbers, batch, strict=True))
            while driver.busy:
                if stopped is not None and stopped.is_set():
                    raise CancelledError
                for event in driver.step():
                    if event.result is not None:
                        by_number[event.number].found = event.result

    def _start(self, rows: int, longest: int) -> Start:
        return starter(self.engine, CacheSpec(**self.cache, capacity=longest, beams=rows))

    def _sentences(self, tasks: Sequence[Task], config: DecodeConfig) -> list[Sentence]:
        limit = self.engine.max_positions
        for task in tasks:
            if len(task.prefix) >= limit:
                raise UserError(
                    f"line {task.key[0]}: the target prefix has {len(task.prefix)} tokens; "
                    f"this model's targets end at {limit}"
                )
        return [self._sentence(task, config) for task in tasks]

    def _sentence(self, task: Task, config: DecodeConfig) -> Sentence:
        tokenizer = self.tokenizer
        exactly: dict[int, int] = {}
        suppressed = [tokenizer.pad_id, tokenizer.bos_id]
        if task.slots is not None:
            exactly = {token: task.slots.count(slot) for slot, token in self._slots.items() if slot in task.slots}
            suppressed += [token for token in self._slots.values() if token not in exactly]
        return Sentence(
            max_length=min(config.max_length(len(task.ids)), self.engine.max_positions),
            start_id=tokenizer.bos_id,
            end_id=tokenizer.eos_id,
            suppressed=suppressed,
            prefix=task.prefix,
            exactly=exactly,
            may_loop=bool(config.max_in_a_row) and has_loop(task.ids, config.max_in_a_row),
            key=task.key,
        )

    @cached_property
    def _slots(self) -> dict[str, int]:
        """The ids of the placeholders."""
        return dict(zip(SLOTS, self.tokenizer.ids(list(SLOTS)), strict=True))

    def _different(self, found: list[Hypothesis]) -> list[Hypothesis]:
        """The first hypothesis of each text."""
        by_text: dict[str, Hypothesis] = {}
        for hypothesis in found:
            by_text.setdefault(one_line(self.tokenizer, hypothesis.tokens), hypothesis)
        return list(by_text.values())

    def _rank(self, task: Task, config: DecodeConfig) -> Callable[[Hypothesis], tuple[bool, int, float]]:
        """Complete ones first, then those without a fault, then by score, as searches order them.

        Faults are placeholders lost or made up, and what is repeated though the source repeats nothing.
        """
        may_loop = not config.max_in_a_row or has_loop(task.ids, config.max_in_a_row)

        def rank(hypothesis: Hypothesis) -> tuple[bool, int, float]:
            text = "" if may_loop and task.slots is None else self.tokenizer.decode(hypothesis.tokens)
            faults = 2 * (task.slots is not None and not same_slots(text, task.slots))
            faults += not may_loop and goes_on_and_on(text, config.max_in_a_row)
            return not hypothesis.finished, faults, -hypothesis.score

        return rank
