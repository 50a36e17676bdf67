"""What is compared: each class loads one model and gives calls to be timed. Nothing is imported before it is needed.

`one` gives a call that decodes exactly so many tokens for one source, the end token suppressed, and returns their ids;
`file` one that translates lines, from text to text, and returns translations and the target tokens they took. Ids
of padding and start are suppressed in every system, so that all of them find the same tokens.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

PAD, START, END = 0, 2, 3
Layout = dict[str, Any]
Translated = tuple[list[str], int]


class Missing(Exception):
    """The system can't run here; the message says why."""


class System(Protocol):
    """One model in one system, on `threads` threads."""

    def one(self, ids: Sequence[int], beams: int, tokens: int) -> Callable[[], list[int]]:
        """A call that decodes `tokens` tokens for source `ids`, end token included in these."""

    def layouts(self) -> list[Layout]:
        """How a file may be laid out: batches, workers, threads."""

    def file(self, lines: Sequence[str], beams: int, longest: int, layout: Layout) -> Callable[[], Translated]:
        """A call that translates `lines`, `longest` tokens each at most."""


class Project:
    """This project: `engine` "eager", or "packed" with a compute type."""

    def __init__(self, folders: dict[str, str], threads: int, engine: str, compute_type: str | None = None) -> None:
        import torch

        from translator.pipeline import Translator

        torch.set_num_threads(threads)
        options = {"engine": engine} | ({"compute_type": compute_type} if compute_type else {})
        if "engine" not in inspect.signature(Translator.from_checkpoint).parameters:
            if engine != "eager":
                raise Missing(f"this version has no engine {engine!r}")
            options = {}
        self.translator = Translator.from_checkpoint(folders["checkpoint"], **options)
        self.threads, self.engine = threads, self.translator.engine
        self.cache = self.translator._decoder.cache["kind"]

    @staticmethod
    def libraries() -> None:
        """Imports all that the system is made of."""
        import torch  # noqa: F401

        from translator.pipeline import Translator  # noqa: F401

    def decode(self, ids: Sequence[int], beams: int, tokens: int) -> list[int]:
        """`tokens` tokens, none of them the end."""
        from translator.cache import CacheSpec
        from translator.config import DecodeConfig
        from translator.search import Sentence, search, starter

        config = DecodeConfig(beam_size=beams)
        sentence = Sentence(max_length=tokens, start_id=START, end_id=END, suppressed=(PAD, START, END))
        spec = CacheSpec.for_targets(self.cache, self.engine.max_positions, beams=beams)
        [[found]] = search(starter(self.engine, spec)([ids]), [sentence], config)
        return list(found.tokens)

    def one(self, ids: Sequence[int], beams: int, tokens: int) -> Callable[[], list[int]]:
        """See `System.one`."""
        return lambda: self.decode(ids, beams, tokens)

    def layouts(self) -> list[Layout]:
        """See `System.layouts`."""
        workers = sorted({1, self.threads})
        return [{"workers": w, "batch_tokens": tokens} for w in workers for tokens in (1024, 2048, 4096)]

    def file(self, lines: Sequence[str], beams: int, longest: int, layout: Layout) -> Callable[[], Translated]:
        """See `System.file`."""
        import dataclasses

        translator = self.translator
        translator.workers = layout["workers"]
        translator._decoder = dataclasses.replace(translator._decoder, batch_tokens=layout["batch_tokens"])
        limits = {"max_length_factor": 0.0, "max_length_extra": longest}

        def call() -> Translated:
            found = translator.candidates(lines, split=False, beam_size=beams, **limits)
            return [one.text for [one] in found], sum(len(tokens) for [one] in found for tokens in one.tokens)

        return call


class CTranslate2:
    """CTranslate2 on the exported model, weights converted to `compute_type` on loading."""

    def __init__(self, folders: dict[str, str], threads: int, compute_type: str) -> None:
        self.libraries()
        import sentencepiece

        self.folder, self.compute_type = folders["ctranslate2"], compute_type
        self.tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(Path(self.folder) / "tokenizer.model"))
        self.suppressed = [[self.tokenizer.id_to_piece(identity)] for identity in (PAD, START)]
        self.threads, self.workers = threads, 0
        self._with_workers(1)

    @staticmethod
    def libraries() -> None:
        """Imports all that the system is made of."""
        try:
            import ctranslate2  # noqa: F401
            import sentencepiece  # noqa: F401
        except ImportError as error:
            raise Missing(f"not installed ({error.name})") from None

    def _with_workers(self, workers: int) -> None:
        import ctranslate2

        if workers != self.workers:
            self.workers = workers
            self.translator = ctranslate2.Translator(
                self.folder,
                compute_type=self.compute_type,
                inter_threads=workers,
                intra_threads=self.threads // workers,
            )

    def one(self, ids: Sequence[int], beams: int, tokens: int) -> Callable[[], list[int]]:
        """See `System.one`."""
        self._with_workers(1)
        pieces = [self.tokenizer.id_to_piece(list(ids[:-1]))]  # it adds the end token itself
        options: dict[str, Any] = {
            "beam_size": beams,
            "min_decoding_length": tokens,
            "max_decoding_length": tokens,
            "suppress_sequences": self.suppressed,
        }
        return lambda: self.tokenizer.piece_to_id(self.translator.translate_batch(pieces, **options)[0].hypotheses[0])

    def layouts(self) -> list[Layout]:
        """See `System.layouts`."""
        workers = sorted({1, self.threads})
        return [{"workers": w, "max_batch_size": size} for w in workers for size in (16, 32, 64)]

    def file(self, lines: Sequence[str], beams: int, longest: int, layout: Layout) -> Callable[[], Translated]:
        """See `System.file`."""
        self._with_workers(layout["workers"])

        def call() -> Translated:
            pieces = self.tokenizer.encode(list(lines), out_type=str)
            results = self.translator.translate_batch(
                pieces,
                beam_size=beams,
                max_batch_size=layout["max_batch_size"],
                max_decoding_length=longest,
                suppress_sequences=self.suppressed,
                return_end_token=True,
            )
            found = [result.hypotheses[0] for result in results]
            return self.tokenizer.decode(found), sum(map(len, found))

        return call


class Transformers:
    """Transformers' `generate` on the exported model; `compiled` is its static cache with `torch.compile`."""

    def __init__(self, folders: dict[str, str], threads: int, compiled: bool = False) -> None:
        self.libraries()
        import sentencepiece
        import torch
        from transformers import AutoModelForSeq2SeqLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        torch.set_num_threads(threads)
        folder = folders["transformers"]
        self.tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(Path(folder) / "tokenizer.model"))
        self.model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        self.options: dict[str, Any] = {}
        if compiled:
            from transformers import CompileConfig

            config = CompileConfig(mode="default", dynamic=False)
            config._compile_all_devices = True  # else a CPU never compiles
            self.options = {"cache_implementation": "static", "compile_config": config}

    @staticmethod
    def libraries() -> None:
        """Imports all that the system is made of."""
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            import sentencepiece  # noqa: F401
            import torch  # noqa: F401
            from transformers import AutoModelForSeq2SeqLM  # noqa: F401
        except ImportError as error:
            raise Missing(f"not installed ({error.name})") from None

    def _generate(self, sources: Sequence[Sequence[int]], beams: int, **lengths: int) -> list[list[int]]:
        import torch

        width = max(map(len, sources))
        ids = torch.tensor([[*source, *[PAD] * (width - len(source))] for source in sources])
        with torch.inference_mode():
            found = self.model.generate(
                ids, attention_mask=(ids != PAD).long(), num_beams=beams, do_sample=False, **lengths, **self.options
            )
        return [tokens[1:] for tokens in found.tolist()]  # without the start token

    def one(self, ids: Sequence[int], beams: int, tokens: int) -> Callable[[], list[int]]:
        """See `System.one`."""
        return lambda: self._generate([ids], beams, min_new_tokens=tokens, max_new_tokens=tokens)[0]

    def layouts(self) -> list[Layout]:
        """See `System.layouts`."""
        return [{"batch_size": size} for size in (16, 64)]

    def file(self, lines: Sequence[str], beams: int, longest: int, layout: Layout) -> Callable[[], Translated]:
        """See `System.file`."""

        def call() -> Translated:
            sources = [[*ids, END] for ids in self.tokenizer.encode(list(lines))]
            order = sorted(range(len(sources)), key=lambda index: -len(sources[index]))
            found: list[list[int]] = [[] for _ in sources]
            size = layout["batch_size"]
            for start in range(0, len(order), size):
                batch = order[start : start + size]
                targets = self._generate([sources[index] for index in batch], beams, max_new_tokens=longest)
                for index, tokens in zip(batch, targets, strict=True):
                    found[index] = tokens[: tokens.index(END) + 1] if END in tokens else tokens
            return self.tokenizer.decode(found), sum(map(len, found))

        return call


class Uncached:
    """PyTorch's own `nn.TransformerDecoder` on the same weights, the whole prefix at every step; greedy only."""

    def __init__(self, folders: dict[str, str], threads: int) -> None:
        import torch

        from translator.checkpoint import read_checkpoint
        from translator.diagnostics.subject import torch_decoder

        torch.set_num_threads(threads)
        self.model = read_checkpoint(Path(folders["checkpoint"])).model
        self.decoder = torch_decoder(self.model.decoder).eval()

    @staticmethod
    def libraries() -> None:
        """Imports all that the system is made of."""
        Project.libraries()

    def one(self, ids: Sequence[int], beams: int, tokens: int) -> Callable[[], list[int]]:
        """See `System.one`."""
        import torch
        from torch import nn

        if beams > 1:
            raise Missing("greedy only")
        model = self.model

        @torch.inference_mode()
        def call() -> list[int]:
            memory = model.encode(torch.tensor([ids]))
            found = [START]
            for length in range(1, tokens + 1):
                x = model.operations().embed_target(torch.tensor([found]), torch.arange(length))
                mask = nn.Transformer.generate_square_subsequent_mask(length)
                logits = model.logits(self.decoder(x, memory, tgt_mask=mask, tgt_is_causal=True)[:, -1])
                logits[:, [PAD, START, END]] = float("-inf")
                found.append(int(logits.argmax(-1)))
            return found[1:]

        return call

    def layouts(self) -> list[Layout]:
        """See `System.layouts`."""
        raise Missing("no file")

    def file(self, lines: Sequence[str], beams: int, longest: int, layout: Layout) -> Callable[[], Translated]:
        """See `System.file`."""
        raise Missing("no file")


COMPUTE_TYPES = ("float32", "float16", "bfloat16", "int8")
SYSTEMS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "ctranslate2 float32": (CTranslate2, {"compute_type": "float32"}),
    "ctranslate2 int8": (CTranslate2, {"compute_type": "int8"}),
    "eager": (Project, {"engine": "eager"}),
    **{f"packed {name}": (Project, {"engine": "packed", "compute_type": name}) for name in COMPUTE_TYPES},
    "transformers": (Transformers, {}),
    "transformers compiled": (Transformers, {"compiled": True}),
    "nn.TransformerDecoder": (Uncached, {}),
}
"""Systems by the name in tables and results: a class, and what it is made with beside folders and threads."""
