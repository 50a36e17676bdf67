"""The training loop: one optimiser step after another, validated, saved, stopped and resumed without a trace."""

import copy
import dataclasses
import math
import signal
import time
from collections.abc import Iterator
from types import FrameType

import torch

from train.backward import Backward
from train.batches import Batch, collate, divided, plan_epoch
from train.data import Data, encode_pairs, fits, prepared, within
from train.evaluate import Validation, dev_loss, score_sets
from train.folder import RunFolder
from train.optimizer import Optimizer
from train.processes import Processes
from train.recipe import Recipe
from train.report import Report, duration
from train.state import Counters, Saved, load_state, write_state
from translator.checkpoint import Checkpoint
from translator.engine.native import library
from translator.errors import UserError

# A closed terminal, Ctrl-C, a scheduler: each saves first. `nohup` asks for the first to be ignored, and it is.
_STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_AGAIN = 1.0  # seconds after which another Ctrl-C is a second one and not the echo of the first


class Trainer:
    """One run in one folder."""

    def __init__(
        self,
        recipe: Recipe,
        data: Data,
        checkpoint: Checkpoint,
        run: RunFolder,
        report: Report,
        processes: Processes,
    ) -> None:
        self.recipe, self.settings, self.data, self.run = recipe, recipe.training, data, run
        device = processes.device
        self.report, self.device = report, device
        self.model = checkpoint.model.to(device)
        averaged = copy.deepcopy(self.model) if self.settings.average_decay else self.model
        self.averaged = Checkpoint(averaged, checkpoint.tokenizer, checkpoint.config)
        limit = min(self.settings.max_tokens, checkpoint.config.model.max_positions)
        self.max_tokens = limit
        languages = checkpoint.config.source_language, checkpoint.config.target_language
        train, dev = (prepared(part, checkpoint.tokenizer, languages) for part in (data.train, data.dev_pairs))
        self.pairs = fits(train, checkpoint.tokenizer, limit, report.say)
        dev = within(dev, checkpoint.tokenizer, limit)
        self.dev = encode_pairs(dev, checkpoint.tokenizer) if dev and data.dev_sets else None
        if self.dev is None:
            report.say("no dev sentences: nothing is validated; name some under [split] dev")
        self.optimizer = Optimizer(self.model, self.settings)
        self.bfloat16 = uses_bfloat16(self.settings.precision, device)
        self.backward = Backward(self.model, self.settings.label_smoothing, self.bfloat16, processes)
        if device.type == "cpu" and (why := library.missing()) is not None:
            report.say(f"no native kernels ({why}): PyTorch does the training alone, slower")
        self.counters = Counters(fingerprint=data.fingerprint())
        self.stopped_by: signal.Signals | None = None
        self.stopped_at = 0.0
        self.saved_step = -1
        self.validation_seconds = 0.0

    # -- start and end -----------------------------------------------------------------------------------------------

    def resume(self, counters: Counters) -> None:
        """Goes back to `run/last`, whose counters are given; raises `UserError` when it is broken.

        Text and recipe were compared before.
        """
        load_state(self.run.last, self.model, self.optimizer, counters.step)
        self.counters = counters

    def train(self) -> signal.Signals | None:
        """Trains until the last step, until nothing improves, or until a signal of `_STOPPING`, which it returns.

        Raises `UserError` at the first loss or gradient that isn't finite; the last saved step stays as it is.
        """
        caught = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        handlers = {number: signal.signal(number, self._ask_to_stop) for number in caught}
        self.backward.begin()
        try:
            while self.counters.step < self.settings.max_steps and not self._is_stale():
                for epoch, batches in self._epoch():
                    with self.backward.on_one_thread():
                        self._step(epoch, batches)
                    self._keep()
                    if self.stopped_by or self.counters.step >= self.settings.max_steps or self._is_stale():
                        break
                if self.stopped_by:
                    break
            if self.saved_step != self.counters.step:
                self._save()
        finally:
            self.backward.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self.stopped_by

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.stopped_by and number == signal.SIGINT and now - self.stopped_at > _AGAIN:
            raise KeyboardInterrupt  # somebody doesn't want to wait; a save that is cut off harms nothing
        if self.stopped_by is None:
            self.stopped_by, self.stopped_at = signal.Signals(number), now

    def _is_stale(self) -> bool:
        return 0 < self.recipe.evaluation.patience <= self.counters.stale_validations

    # -- one epoch, one step -----------------------------------------------------------------------------------------

    def _epoch(self) -> Iterator[tuple[int, list[Batch]]]:
        """The rest of the current epoch: its number and `accumulate` batches at a time, each in as many parts as are
        worked on at once; the counters always name the next batch."""
        counters, tokenizer, epoch = self.counters, self.averaged.tokenizer, self.counters.epoch
        seed = self.recipe.seed * 1_000_003 + epoch - 1
        alpha = self.recipe.tokenizer.sampling_alpha
        marks = self.settings.drop_final_mark
        encoded = encode_pairs(self.pairs, tokenizer, alpha, seed, self.max_tokens, marks)
        plan = plan_epoch(encoded, self.settings.batch_tokens, self.recipe.seed, epoch - 1)
        if counters.position >= len(plan):
            raise UserError(f"{self.run.last}: counters.position = {counters.position}, but epoch {epoch} has only "
                            f"{len(plan)} batches")  # fmt: skip
        ids, parts = (tokenizer.bos_id, tokenizer.eos_id), self.backward.parts(self.settings.batch_tokens)
        while counters.position < len(plan):
            chosen = plan[counters.position : counters.position + self.settings.accumulate]
            counters.position += len(chosen)
            if counters.position >= len(plan):
                counters.epoch, counters.position, plan = epoch + 1, 0, []
            divisions = [part for indices in chosen for part in divided(indices, parts)]
            yield epoch, [collate(encoded, indices, *ids, self.device) for indices in divisions]

    def _step(self, epoch: int, batches: list[Batch]) -> None:
        began = time.perf_counter()
        counters, settings = self.counters, self.settings
        counters.step += 1
        tokens = sum(batch.tokens for batch in batches)
        rate = settings.rate(counters.step)
        self.optimizer.set_rate(rate)
        self.model.train()
        loss = self.backward.run(batches, tokens)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm))
        self._check_finite(loss, "the loss")
        self._check_finite(norm, "the gradient")
        self.optimizer.step(self.backward.side_by_side)
        self._average()
        counters.target_tokens += tokens
        counters.logged_tokens += tokens
        counters.logged_loss += loss * tokens
        took = time.perf_counter() - began
        counters.seconds += took
        counters.logged_seconds += took
        counters.logged_steps += 1
        self._tell(epoch, rate, norm)

    def _keep(self) -> None:
        """Validates and saves where it is time to."""
        step, settings = self.counters.step, self.settings
        if step % self.recipe.evaluation.every == 0 or step == settings.max_steps:
            self.validate()
        elif step % settings.save_every == 0:
            self._save()

    def _check_finite(self, value: float, what: str) -> None:
        """Stops the run where `value` isn't finite: one more step would put it into every weight."""
        if math.isfinite(value):
            return
        step = self.counters.step
        self.report.record("stop", step, reason=f"{what} is not finite")
        kept = f"{self.run.last} keeps the last saved step" if self.run.last.exists() else "no step was saved before"
        raise UserError(
            f"step {step}: {what} is {value}, which is not a finite number; {kept}. Begin again with a lower "
            f"training.learning_rate than {self.settings.learning_rate:g} or a longer training.warmup_steps than "
            f"{self.settings.warmup_steps}"
        )

    @torch.no_grad()
    def _average(self) -> None:
        if not self.settings.average_decay:
            return
        # Early on the average follows closely: weights from before the warm-up would only harm it.
        decay = min(self.settings.average_decay, (1 + self.counters.step) / (10 + self.counters.step))
        averages: list[torch.Tensor] = list(self.averaged.model.parameters())
        weights: list[torch.Tensor] = list(self.model.parameters())
        torch._foreach_lerp_(averages, weights, 1 - decay)

    def _check_weights(self) -> None:
        """A step can overflow too; what is validated and saved must be something to go on from."""
        for name, tensor in self.averaged.model.named_parameters():
            if not torch.isfinite(tensor).all():
                self._check_finite(math.nan, f"the weight {name!r}")

    # -- what is told, kept and saved --------------------------------------------------------------------------------

    def _tell(self, epoch: int, rate: float, norm: float) -> None:
        counters, total = self.counters, self.settings.max_steps
        # One batch holds sentences of one length, so its loss alone would say more about them than about the model.
        loss = counters.logged_loss / counters.logged_tokens
        speed = counters.logged_tokens / max(counters.logged_seconds, 1e-9)
        line = (
            f"step {counters.step:,}/{total:,}  epoch {epoch}  loss {loss:.3f}  rate {rate:.2e}  {speed:,.0f} tokens/s"
        )
        if counters.step < total:
            line += f"  {duration(self._seconds_left())} left"
        self.report.advance(counters.step, f"loss {loss:.3f}  {speed:,.0f} tokens/s", line)
        if counters.step % self.settings.log_every and counters.step != total:
            return
        self.report.heard()
        self.report.record(
            "step",
            counters.step,
            line,
            epoch=epoch,
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            tokens_per_second=round(speed),
            target_tokens=counters.target_tokens,
            seconds=round(counters.seconds, 1),
        )
        counters.logged_loss, counters.logged_tokens = 0.0, 0
        counters.logged_steps, counters.logged_seconds = 0, 0.0

    def _seconds_left(self) -> float:
        """Of the whole run, validations included as soon as one was timed."""
        counters, total, every = self.counters, self.settings.max_steps, self.recipe.evaluation.every
        steps = counters.logged_seconds / max(counters.logged_steps, 1) * (total - counters.step)
        return steps + self.validation_seconds * (math.ceil(total / every) - counters.step // every)

    def validate(self) -> None:
        """Scores the averaged weights on the dev part, where there is one, and saves: as the best, where they are."""
        counters, wanted = self.counters, self.recipe.evaluation
        improved = True
        self._check_weights()
        if self.dev is not None:
            began = time.perf_counter()
            greedy = dataclasses.replace(self.recipe.decode, beam_size=wanted.beam_size, n_best=1)
            result = Validation(
                dev_loss(self.averaged, self.dev, self.settings.batch_tokens),
                score_sets(self.averaged, self.data.dev_sets, greedy, wanted.sentences, wanted.samples),
            )
            self.validation_seconds = time.perf_counter() - began
            self._check_finite(result.loss, "the loss on the dev part")
            metric = result.metric(wanted.metric)
            improved = counters.best is None or metric > counters.best
            counters.stale_validations = 0 if improved else counters.stale_validations + 1
            self._tell_validation(result, improved)
            if improved:
                counters.best, counters.best_metric = metric, wanted.metric
        if improved:
            counters.best_step = counters.step
        self._save()

    def _tell_validation(self, result: Validation, improved: bool) -> None:
        samples = result.result.samples
        self.report.record(
            "validation",
            self.counters.step,
            f"  dev: loss {result.loss:.3f}  {result.result.line()}" + "  best" * improved,
            dev_loss=result.loss,
            **result.result.scores.figures("dev_"),
            dev_sets=result.result.figures(),
            metric=self.recipe.evaluation.metric,
            best=improved,
            samples=[{"source": source, "translation": text, "references": right} for source, text, right in samples],
        )
        for source, text, _ in samples:
            self.report.say(f"    {source}\n      → {text}")

    def _save(self) -> None:
        self._check_weights()
        saved = Saved(run=self.run.identity, counters=dataclasses.replace(self.counters), recipe=self.recipe)
        with self.run.replacing("last") as folder:
            write_state(folder, self.averaged, self.model.state_dict(), self.optimizer, saved)
        if self.counters.best_step == self.counters.step or not self.run.best.exists():
            self.run.keep_best()
        self.saved_step = self.counters.step


def uses_bfloat16(precision: str, device: torch.device) -> bool:
    """Whether to compute in bf16: asked for, or `auto` on a device that has it in hardware."""
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    # No public call tells. Both of these have to: what the processor has, and what PyTorch's products may use of it.
    # Without the instructions bf16 on a CPU is slower than fp32, and without oneDNN's consent several times slower.
    instructions = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    products = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return device.type == "cpu" and all(known is not None and known() for known in (instructions, products))
