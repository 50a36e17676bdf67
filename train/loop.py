"""The training loop: one optimiser step after another, validated, saved, stopped and resumed without a trace."""

import copy
import dataclasses
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from pydantic import TypeAdapter

from train.batches import Batch, collate, plan_epoch
from train.data import Data, encode_pairs, fits
from train.evaluate import Validation, translate_set, validate
from train.loss import smoothed_cross_entropy
from train.recipe import Recipe
from train.report import Report
from train.schedule import learning_rate
from train.state import Counters, load_counters, load_state, point, save_state, sweep
from translator.checkpoint import Checkpoint, load_weights, read_tensors
from translator.errors import UserError
from translator.metrics import Scores, corpus_scores


class Trainer:
    """One run in one folder."""

    def __init__(
        self, recipe: Recipe, data: Data, checkpoint: Checkpoint, run: Path, report: Report, device: torch.device
    ) -> None:
        self.recipe, self.settings, self.data, self.run_folder = recipe, recipe.training, data, run
        self.report, self.device = report, device
        self.model = checkpoint.model.to(device)
        averaged = copy.deepcopy(self.model) if self.settings.average_decay else self.model
        self.averaged = Checkpoint(averaged, checkpoint.tokenizer, checkpoint.config)
        limit = min(self.settings.max_tokens, checkpoint.config.model.max_positions)
        self.max_tokens = limit
        self.pairs = fits(data.train, checkpoint.tokenizer, limit, report.say)
        dev = [
            pair
            for pair in data.dev_pairs
            if max(len(checkpoint.tokenizer.encode(side)) for side in (pair.source, pair.target)) < limit
        ]
        self.dev = encode_pairs(dev, checkpoint.tokenizer) if dev and data.dev.sources else None
        if self.dev is None:
            report.say("no dev sentences: nothing is validated; name some under [split] dev")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=self.settings.learning_rate,
            betas=self.settings.adam_betas,
            weight_decay=self.settings.weight_decay,
            fused=True,
        )
        self.bfloat16 = uses_bfloat16(self.settings.precision, device)
        self.counters = Counters(fingerprint=data.fingerprint())
        self.stopped_by: signal.Signals | None = None

    # -- start and end -----------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Goes back to `run/last`; raises `UserError` when it is broken or the training text has changed."""
        folder = self.run_folder / "last"
        counters = load_counters(folder)
        if counters.fingerprint != self.counters.fingerprint:
            raise UserError(f"{folder}: the training text has changed since this was saved; start a new run instead")
        load_weights(self.averaged.model, read_tensors(folder / "model.safetensors"), folder / "model.safetensors")
        load_state(folder, self.model, self.optimizer)
        self.counters = counters
        self.report.resume(counters.step)
        self.report.say(f"resumed after step {counters.step:,}")

    def train(self) -> signal.Signals | None:
        """Trains until the last step, until nothing improves, or until SIGINT or SIGTERM, which it returns."""
        handlers = {number: signal.signal(number, self._ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self.counters.step < self.settings.max_steps and not self._is_stale():
                for batches in self._epoch():
                    self._step(batches)
                    if self.stopped_by or self.counters.step >= self.settings.max_steps or self._is_stale():
                        break
                if self.stopped_by:
                    break
            self._save()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self.stopped_by

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped_by = signal.Signals(number)

    def _is_stale(self) -> bool:
        return 0 < self.recipe.evaluation.patience <= self.counters.stale_validations

    # -- one epoch, one step -----------------------------------------------------------------------------------------

    def _epoch(self) -> Iterator[list[Batch]]:
        """The rest of the current epoch, `accumulate` batches at a time; the counters always name the next batch."""
        counters, tokenizer = self.counters, self.averaged.tokenizer
        seed = self.recipe.seed * 1_000_003 + counters.epoch
        alpha = self.recipe.tokenizer.sampling_alpha
        encoded = encode_pairs(self.pairs, tokenizer, alpha, seed, self.max_tokens)
        plan = plan_epoch(encoded, self.settings.batch_tokens, self.recipe.seed, counters.epoch)
        while counters.position < len(plan):
            chosen = plan[counters.position : counters.position + self.settings.accumulate]
            counters.position += len(chosen)
            if counters.position >= len(plan):
                counters.epoch, counters.position, plan = counters.epoch + 1, 0, []
            ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
            yield [collate(encoded, indices, *ids).to(self.device) for indices in chosen]

    def _step(self, batches: list[Batch]) -> None:
        began = time.perf_counter()
        counters, settings = self.counters, self.settings
        counters.step += 1
        tokens = sum(batch.tokens for batch in batches)
        rate = learning_rate(settings, counters.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.model.train()
        loss = sum(self._backward(batch, tokens) for batch in batches)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._average()
        counters.target_tokens += tokens
        counters.logged_tokens += tokens
        counters.logged_loss += loss * tokens
        took = time.perf_counter() - began
        counters.seconds += took
        counters.logged_seconds += took
        counters.logged_steps += 1
        self._tell(rate, float(norm))
        if counters.step % self.recipe.evaluation.every == 0 or counters.step == settings.max_steps:
            self._validate()
        elif counters.step % settings.save_every == 0:
            self._save()

    def _backward(self, batch: Batch, tokens: int) -> float:
        """Adds the gradients of one batch, each target token weighing 1 / `tokens`; returns its share of the loss."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            memory = self.model.encode(batch.source, batch.source_padding)
            hidden = self.model.decode(batch.target_in, memory, batch.source_padding)
            logits = self.model.logits(hidden[batch.real])
        loss = smoothed_cross_entropy(logits, batch.target_out[batch.real], self.settings.label_smoothing) / tokens
        loss.backward()
        return float(loss.detach())

    @torch.no_grad()
    def _average(self) -> None:
        if not self.settings.average_decay:
            return
        # Early on the average follows closely: weights from before the warm-up would only harm it.
        decay = min(self.settings.average_decay, (1 + self.counters.step) / (10 + self.counters.step))
        averages: list[torch.Tensor] = list(self.averaged.model.parameters())
        weights: list[torch.Tensor] = list(self.model.parameters())
        torch._foreach_lerp_(averages, weights, 1 - decay)

    # -- what is told, kept and saved --------------------------------------------------------------------------------

    def _tell(self, rate: float, norm: float) -> None:
        counters, total = self.counters, self.settings.max_steps
        # One batch holds sentences of one length, so its loss alone would say more about them than about the model.
        loss = counters.logged_loss / counters.logged_tokens
        speed = counters.logged_tokens / max(counters.logged_seconds, 1e-9)
        self.report.advance(counters.step, f"loss {loss:.3f}  {speed:,.0f} tokens/s")
        if counters.step % self.settings.log_every and counters.step != total:
            return
        left = counters.logged_seconds / counters.logged_steps * (total - counters.step)
        self.report.figures(
            counters.step,
            f"step {counters.step:,}/{total:,}  epoch {counters.epoch + 1}  loss {loss:.3f}  rate {rate:.2e}  "
            f"{speed:,.0f} tokens/s  {left / 60:.0f} min left",
            epoch=counters.epoch,
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            tokens_per_second=round(speed),
            target_tokens=counters.target_tokens,
            seconds=round(counters.seconds, 1),
        )
        counters.logged_loss, counters.logged_tokens = 0.0, 0
        counters.logged_steps, counters.logged_seconds = 0, 0.0

    def _validate(self) -> None:
        counters, wanted = self.counters, self.recipe.evaluation
        improved = True
        if self.dev is not None:
            greedy = dataclasses.replace(self.recipe.decode, beam_size=wanted.beam_size, n_best=1)
            result = validate(
                self.averaged, self.dev, self.data.dev, wanted.sentences, greedy, self.settings.batch_tokens
            )
            metric = result.metric(wanted.metric)
            improved = counters.best is None or metric > counters.best
            counters.stale_validations = 0 if improved else counters.stale_validations + 1
            self._tell_validation(result, improved)
            if improved:
                counters.best = metric
        if improved:
            counters.best_step = counters.step
        self._save()

    def _tell_validation(self, result: Validation, improved: bool) -> None:
        scores = result.scores
        self.report.figures(
            self.counters.step,
            f"  dev: loss {result.loss:.3f}  BLEU {scores.bleu:.1f}  chrF {scores.chrf:.1f}" + "  best" * improved,
            dev_loss=result.loss,
            dev_bleu=scores.bleu,
            dev_chrf=scores.chrf,
            bleu_signature=scores.bleu_signature,
            chrf_signature=scores.chrf_signature,
        )
        for source, text in list(zip(self.data.dev.sources, result.hypotheses, strict=False))[
            : self.recipe.evaluation.samples
        ]:
            self.report.say(f"    {source}\n      → {text}")

    def _save(self) -> None:
        recipe: dict[str, Any] = TypeAdapter(Recipe).dump_python(self.recipe, mode="json")
        folder = save_state(
            self.run_folder, self.averaged, self.model.state_dict(), self.optimizer, self.counters, recipe
        )
        point(self.run_folder / "last", folder)
        if self.counters.best_step == self.counters.step or not (self.run_folder / "best").exists():
            point(self.run_folder / "best", folder)
        sweep(self.run_folder)


def uses_bfloat16(precision: str, device: torch.device) -> bool:
    """Whether to compute in bf16: asked for, or `auto` on a device that has it in hardware."""
    if precision != "auto":
        return precision == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    # No public call tells; without the instructions bf16 on a CPU is slower than fp32.
    return device.type == "cpu" and bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def test_scores(checkpoint: Checkpoint, data: Data, recipe: Recipe) -> Scores:
    """BLEU and chrF on the test part, decoded as the recipe says."""
    hypotheses = translate_set(checkpoint, data.test.sources, recipe.decode)
    return corpus_scores(hypotheses, data.test.references, recipe.target_language)
