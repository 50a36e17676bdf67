"""Packed weights in a file: the bits of those packed in memory, one copy of them, and nothing else taken for them."""

import json
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.helpers import ENGLISH, tiny_checkpoint, tiny_model
from tests.translator.engine.test_packed import decoded, halved
from translator import cli
from translator.checkpoint import DEFAULT_CHECKPOINT, PACKED_WEIGHTS, WEIGHTS, map_checkpoint, read_checkpoint
from translator.engine.engines import read_engine
from translator.engine.native.library import VARIABLE, available, load
from translator.engine.native.weights import PackedWeights
from translator.engine.packed import PackedEngine
from translator.errors import UserError
from translator.export import export_checkpoint
from translator.pipeline import Translator

pytestmark = pytest.mark.skipif(not available(), reason="the native kernels aren't built")

CPU = torch.device("cpu")
CHECKPOINT = tiny_checkpoint(model=halved(tiny_model(positions="sinusoidal")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    export_checkpoint(CHECKPOINT, "packed", tmp_path / "int8", "int8")
    return tmp_path / "int8"


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        action()
    return str(caught.value)


def header(folder: Path) -> tuple[dict, bytes]:
    """The weights' header and all that follows it."""
    data = (folder / PACKED_WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(folder: Path, values: dict, rest: bytes, more: int = 0) -> None:
    text = json.dumps(values).encode()
    text += b" " * (-(8 + len(text)) % 64 + more)
    (folder / PACKED_WEIGHTS).unlink()  # the old one stays mapped where it is
    (folder / PACKED_WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + rest)


@pytest.mark.parametrize("compute_type", ["auto", "float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("changes", [{}, {"positions": "sinusoidal", "activation": "gelu"}])
def test_what_was_saved_gives_the_same_bits(compute_type: str, changes: dict, tmp_path: Path) -> None:
    model = halved(tiny_model(**changes))
    export_checkpoint(tiny_checkpoint(model=model), "packed", tmp_path / "out", compute_type)
    expected = PackedEngine(model, compute_type)
    checkpoint, engine = read_engine(tmp_path / "out", CPU)
    assert engine.compute_type == expected.compute_type
    assert checkpoint.config.model == model.config
    for mine, theirs in zip(decoded(engine), decoded(expected), strict=True):
        assert torch.equal(mine, theirs)
    again = tmp_path / "again"
    export_checkpoint(tiny_checkpoint(model=model), "packed", again, compute_type)
    assert (again / PACKED_WEIGHTS).read_bytes() == (tmp_path / "out" / PACKED_WEIGHTS).read_bytes()


def test_nothing_of_the_blocks_is_copied(folder: Path) -> None:
    _, engine = read_engine(folder, CPU)
    assert isinstance(engine, PackedEngine)
    weights = engine.operations.weights
    mapped = [
        range(*(int(end, 16) for end in line.split()[0].split("-")))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(folder / PACKED_WEIGHTS))
    ]
    for name, product in weights.products.items():
        assert product.address % 64 == 0
        assert any(product.address in pages for pages in mapped), name
    names = [name for name, parameter in engine.model.named_parameters() if not parameter.is_meta]
    assert "embedding.weight" in names and "decoder.layers.0.norm1.weight" in names
    assert not any("linear" in name or "proj" in name for name in names)  # those are in the blocks, and only there


def test_threads_share_one_copy(folder: Path) -> None:
    translator = Translator.from_checkpoint(folder)
    expected = [translator.translate([line]) for line in ENGLISH]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda line: translator.translate([line]), ENGLISH)) == expected
    plain = Translator(CHECKPOINT, engine="packed", compute_type="int8")
    assert [plain.translate([line]) for line in ENGLISH] == expected


def test_the_command_writes_what_translate_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def status(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["translator", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    out = tmp_path / "out"
    assert status("export", "--to", "packed", "--compute-type", "int8", out) == 0
    capfd.readouterr()
    assert status("translate", "--checkpoint", out, "Thank you.") == 0
    assert capfd.readouterr().out in ("谢谢你。\n", "谢谢。\n")
    for words in (["translate", "--engine", "eager"], ["translate", "--compute-type", "float16"]):
        assert status(*words, "--checkpoint", out, "Thank you.") == 2
        assert f"{out}: " in capfd.readouterr().err
    assert status("parity", "--self-test", "--checkpoint", out) == 2
    assert f"{out}: holds packed weights, for translating alone" in capfd.readouterr().err
    assert status("export", "--to", "transformers", "--compute-type", "int8", tmp_path / "other") == 2
    assert "--compute-type int8: goes with --to packed" in capfd.readouterr().err
    assert not (tmp_path / "other").exists()


def test_what_it_cannot_be_used_for_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "for translating alone" in refusal(lambda: read_checkpoint(folder))
    assert "engine packed alone" in refusal(lambda: read_engine(folder, CPU, "graphs"))
    assert "packed as int8" in refusal(lambda: read_engine(folder, CPU, compute_type="float16"))
    assert read_engine(folder, CPU, "packed", "int8")[1].compute_type == "int8"
    monkeypatch.setenv(VARIABLE, "none")
    assert "native kernels" in refusal(lambda: read_engine(folder, CPU))
    assert "native kernels" in refusal(lambda: export_checkpoint(CHECKPOINT, "packed", folder.parent / "new"))


@pytest.mark.parametrize("key, value, said", [
    ("form", 2, "form 2: this program reads form 1" ),
    ("compute_type", "int4", "packed.compute_type"),
    ("compute_type", "float16", "has shape"),
    ("checksum", "0" * 32, "checksum"),
])  # fmt: skip
def test_another_form_or_type_is_refused(folder: Path, key: str, value: object, said: str) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["packed"][key] = value
    path.write_text(json.dumps(values))
    message = refusal(lambda: read_engine(folder, CPU))
    assert said.replace("form 2", "packed.form = 2") in message and str(folder) in message


def test_a_changed_bit_anywhere_is_found(folder: Path) -> None:
    path = folder / PACKED_WEIGHTS
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    places = [0, 3, 8, 20, 8 + length - 70, *(8 + length + k for k in (0, 777, 100_000)), len(whole) - 1]
    for place in places:
        path.unlink()  # the old one stays mapped where it is
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert PACKED_WEIGHTS in refusal(lambda: read_engine(folder, CPU)), place
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.unlink()  # the old one stays mapped where it is
        path.write_bytes(whole[:length])
        assert PACKED_WEIGHTS in refusal(lambda: read_engine(folder, CPU)), length
    path.unlink()  # the old one stays mapped where it is
    path.write_bytes(whole)
    read_engine(folder, CPU)


def test_other_tensors_and_places_are_refused(folder: Path) -> None:
    values, rest = header(folder)
    with_header(folder, values, rest)
    read_engine(folder, CPU)
    with_header(folder, {name.replace("logits", "scores"): value for name, value in values.items()}, rest)
    assert "'packed.logits' is missing" in refusal(lambda: read_engine(folder, CPU))
    with_header(folder, values, rest, more=8)
    assert "doesn't lie on 64 bytes" in refusal(lambda: read_engine(folder, CPU))
    with_header(folder, {**values, "more": {"dtype": "U8", "shape": [1], "data_offsets": [len(rest), len(rest) + 1]}},
                rest + b"\0")  # fmt: skip
    assert "'more' is unknown" in refusal(lambda: read_engine(folder, CPU))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_packed_of_a_file_is_no_longer_in_memory() -> None:
    model = map_checkpoint(DEFAULT_CHECKPOINT).model
    weights = PackedWeights.pack(load(), model.products(), "int8", spent=True)
    path, resident, inside = str(DEFAULT_CHECKPOINT / WEIGHTS), [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-", line):
            inside = line.endswith(path)
        elif inside and line.startswith("Rss:"):
            resident.append(int(line.split()[1]))
    assert resident and sum(resident) < 4 << 10  # kilobytes, of 20 MB: what the system maps around a page that is read
    kept = PackedWeights.pack(load(), model.products(), "int8")  # from the file once more
    assert all(torch.equal(block, kept.blocks[name]) for name, block in weights.blocks.items())
    _, engine = read_engine(DEFAULT_CHECKPOINT, CPU, "packed", "int8")
    plain = PackedEngine(read_checkpoint(DEFAULT_CHECKPOINT).model, "int8")
    ids = torch.arange(5, 25).unsqueeze(0)
    assert torch.equal(engine.log_probs(ids, ids), plain.log_probs(ids, ids))
