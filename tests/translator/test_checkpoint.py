"""Checkpoints: what was saved is what loads, anything else is refused in one line, and no pickle is ever read."""

import dataclasses
import errno
import json
import os
import pickle
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.helpers import tiny_checkpoint, tiny_model, tiny_translator
from translator.checkpoint import (
    DEFAULT_CHECKPOINT,
    read_checkpoint,
    replaced_folder,
    write_checkpoint,
    write_tensors,
)
from translator.config import DecodeConfig
from translator.errors import UserError
from translator.pipeline import Translator
from translator.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
FILES = {"model.safetensors", "config.json", "tokenizer.model"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    write_checkpoint(path, tiny_checkpoint(DecodeConfig(beam_size=2)))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


# -- what was saved loads ----------------------------------------------------------------------------------------------


def test_a_checkpoint_comes_back_as_it_was(folder):
    loaded, saved = read_checkpoint(folder), tiny_checkpoint(DecodeConfig(beam_size=2))
    assert set(contents(folder)) == FILES
    assert loaded.config == saved.config
    assert loaded.tokenizer.model == saved.tokenizer.model
    assert not loaded.model.training
    mine, theirs = loaded.model.state_dict(), saved.model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_translator_from_a_checkpoint_translates_as_the_one_it_was_saved_from(folder):
    lines = ["Where is the station?", "", "Tom doesn't know."]
    translator = Translator.from_checkpoint(folder)
    assert translator.translate(lines) == tiny_translator(DecodeConfig(beam_size=2)).translate(lines)
    assert Translator.from_checkpoint(str(folder)).config.decode.beam_size == 2


def test_half_precision_weights_load_in_full(folder):
    for dtype in (torch.float16, torch.bfloat16):
        halves = {name: tensor.to(dtype) for name, tensor in tiny_model().state_dict().items()}
        write_checkpoint(folder, tiny_checkpoint(), halves)
        loaded = read_checkpoint(folder).model.state_dict()
        assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
        assert all(torch.equal(loaded[name], halves[name].float()) for name in halves)


def test_writing_again_replaces_the_files(folder):
    other = dataclasses.replace(tiny_checkpoint(), model=tiny_model(seed=5))
    write_checkpoint(folder, other)
    assert set(contents(folder)) == FILES
    assert torch.equal(read_checkpoint(folder).model.embedding.weight, other.model.embedding.weight)


def test_views_and_shared_tensors_are_saved_by_value(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    write_tensors(tmp_path / "t", {"a": base.T, "b": base[1], "empty": torch.zeros(0)})
    loaded = safetensors.torch.load_file(tmp_path / "t")
    assert torch.equal(loaded["a"], base.T) and torch.equal(loaded["b"], base[1]) and loaded["empty"].numel() == 0


# -- what isn't one is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert f"{name} is missing" in refusal(lambda: read_checkpoint(folder))


def test_a_missing_folder_and_a_file_in_its_place_are_refused(tmp_path):
    assert str(tmp_path / "none") in refusal(lambda: read_checkpoint(tmp_path / "none"))
    (tmp_path / "model.pt").write_bytes(b"x")
    assert "pickle is never read" in refusal(lambda: Translator.from_checkpoint(tmp_path / "model.pt"))
    (tmp_path / "empty").mkdir()
    assert "missing" in refusal(lambda: read_checkpoint(tmp_path / "empty"))


def test_the_shipped_checkpoint_is_found_from_anywhere(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ROOT / "checkpoints" / "en-zh" == DEFAULT_CHECKPOINT
    monkeypatch.setattr("translator.pipeline.translator.DEFAULT_CHECKPOINT", folder)
    assert Translator.from_checkpoint().config.decode.beam_size == 2


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.5, 0.9999])
def test_truncated_weights_are_refused(folder, kept):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    assert "model.safetensors: not a whole safetensors file" in refusal(lambda: read_checkpoint(folder))


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe junk", b"[]", b"[" * 100_000], ids=["empty", "junk", "list", "deep"]
)
def test_files_with_something_else_in_them_are_refused_by_name(folder, name, content):
    (folder / name).write_bytes(content)
    assert name in refusal(lambda: read_checkpoint(folder))


def altered(folder: Path, change: Callable[[dict], object]) -> str:
    """The refusal after `change` was made to the tensors."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return refusal(lambda: read_checkpoint(folder))


def test_tensors_of_another_model_are_refused_by_name(folder):
    assert "'encoder.norm.bias' is missing" in altered(folder, lambda t: t.pop("encoder.norm.bias"))
    assert "'encoder.nrom.bias' is unknown" in altered(
        folder, lambda t: t.update({"encoder.norm.bias": torch.zeros(32), "encoder.nrom.bias": torch.zeros(32)})
    )


def test_a_wrong_shape_is_named_with_both(folder):
    message = altered(folder, lambda t: t.update({"embedding.weight": torch.zeros(7, 32)}))
    assert "embedding.weight" in message and "(7, 32)" in message and "(420, 32)" in message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"mdoel": {}}, "unknown key 'mdoel'; did you mean 'model'?"),
        ({"format": 2}, "format = 2: input should be 1"),
        ({"source_language": None}, "source_language = None"),
        ({"model": {"vocab_size": 420, "d_modle": 32}}, "unknown key 'model.d_modle'; did you mean 'd_model'?"),
        ({"model": {"vocab_sise": 420}}, "unknown key 'model.vocab_sise'; did you mean 'vocab_size'?"),
        ({"model": {}}, "missing key 'model.vocab_size'"),
        ({"model": {"vocab_size": 420, "d_model": 33}}, "d_model 33 must be a multiple of nhead 4"),
        ({"decode": {"beam_size": 0}}, "decode.beam_size = 0: input should be greater than or equal to 1"),
    ],
    ids=str,
)
def test_a_config_that_is_wrong_says_where(folder, change, expected):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = refusal(lambda: read_checkpoint(folder))
    assert str(path) in message and expected in message


def test_a_config_without_a_key_names_it(folder):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    del values["source_language"]
    path.write_text(json.dumps(values))
    assert refusal(lambda: read_checkpoint(folder)) == f"{path}: missing key 'source_language'"


def test_a_tokenizer_of_another_size_is_refused(folder):
    (folder / "tokenizer.model").write_bytes(Tokenizer.train(["a b c d"], 265, threads=1).model)
    message = refusal(lambda: read_checkpoint(folder))
    assert "265" in message and "420" in message


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("kind", ["pickle", "torch", "old torch"])
def test_a_pickle_in_any_files_place_runs_nothing(folder, tmp_path, name, kind):
    made = tmp_path / "made"
    if kind == "pickle":
        (folder / name).write_bytes(pickle.dumps(Bomb(made)))
    else:
        torch.save({"weight": Bomb(made)}, folder / name, _use_new_zipfile_serialization=kind == "torch")
    assert name in refusal(lambda: read_checkpoint(folder))
    assert not made.exists()


def test_the_sources_read_no_pickle():
    sources = [path for package in ("translator", "train") for path in (ROOT / package).rglob("*.py")]
    assert len(sources) > 30
    unsafe = re.compile(
        r"weights_only *= *False|pickle\.|import pickle|(?<!safetensors\.)torch\.(load|save)\(|allow_pickle|joblib"
    )
    found = [f"{path}: {line}" for path in sources for line in path.read_text().splitlines() if unsafe.search(line)]
    assert not found


# -- a full disk -------------------------------------------------------------------------------------------------------


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(folder, monkeypatch):
    before = contents(folder)
    with monkeypatch.context() as patch:
        patch.setattr("translator.textio.os.fsync", no_space)
        message = refusal(lambda: write_checkpoint(folder, dataclasses.replace(tiny_checkpoint(), model=tiny_model(5))))
    assert "model.safetensors: cannot be written: No space left" in message
    assert contents(folder) == before


def test_a_file_that_cannot_grow_leaves_the_old_checkpoint_and_nothing_else(folder):
    before = contents(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # Python ignores the signal, so write() fails
    try:
        message = refusal(lambda: write_checkpoint(folder, dataclasses.replace(tiny_checkpoint(), model=tiny_model(5))))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "model.safetensors: cannot be written" in message
    assert contents(folder) == before


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_new_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch, failing):
    """Whichever of its files finds the disk full."""
    calls = []

    def fsync(fd: int) -> None:
        calls.append(fd)
        if len(calls) == failing:
            no_space()

    with monkeypatch.context() as patch:
        patch.setattr("translator.textio.os.fsync", fsync)

        def save() -> None:
            with replaced_folder(tmp_path / "new") as unfinished:
                write_checkpoint(unfinished, tiny_checkpoint())

        assert "No space left" in refusal(save)
    assert list(tmp_path.iterdir()) == []
    save()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert read_checkpoint(tmp_path / "new").config == tiny_checkpoint().config


def test_a_folder_that_cannot_be_made_or_is_there_already_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_bytes(b"kept")

    def fill(folder: Path) -> None:
        with replaced_folder(folder) as unfinished:
            (unfinished / "y").write_bytes(b"new")

    assert "cannot be written" in refusal(lambda: fill(tmp_path / "file" / "new"))
    assert "cannot be written" in refusal(lambda: fill(tmp_path / "full"))
    assert (tmp_path / "full" / "x").read_bytes() == b"kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_what_an_interrupted_save_left_is_swept_by_the_next(tmp_path):
    left = tmp_path / ".new.unfinished"
    left.mkdir()
    (left / "half").write_bytes(b"x")
    with replaced_folder(tmp_path / "new") as unfinished:
        (unfinished / "whole").write_bytes(b"y")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "whole"]
