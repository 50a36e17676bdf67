"""Checkpoints made to do harm, and damaged ones: refused in one line, soon, before anything of their size is allocated.

They are read in a child process with little memory and time: a reader that believes a file doesn't come back.
"""

import copy
import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.helpers import tiny_checkpoint
from translator.checkpoint import read_checkpoint, write_checkpoint
from translator.config import LARGEST_POSITIONS, DecodeConfig, ModelConfig
from translator.diagnostics.latency.arms import LatencySettings
from translator.diagnostics.latency.profile import profile_latency
from translator.diagnostics.parity.check import check_parity
from translator.errors import UserError
from translator.pipeline import Translator

ROOT = Path(__file__).resolve().parents[2]
CONFIG, TOKENIZER, WEIGHTS = FILES = ("config.json", "tokenizer.model", "model.safetensors")
TENSOR = "encoder.norm.bias"

# Reads folders named on standard input; answers each with its outcome, its message and the seconds it took.
CHILD = """
import json, resource, sys, time
from pathlib import Path
from translator.checkpoint import read_checkpoint
from translator.errors import UserError
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for line in sys.stdin:
    began = time.process_time()
    try:
        read_checkpoint(Path(line.rstrip("\\n")))
        outcome, message = "loaded", ""
    except UserError as error:
        outcome, message = "refused", str(error)
    except BaseException as error:
        outcome, message = "escaped", repr(error)[:1000]
    print(json.dumps([outcome, message, time.process_time() - began]), flush=True)
"""


class Child:
    """A process that reads checkpoints within 1 GiB of memory."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def read(self, folder: Path) -> tuple[str, str]:
        """(loaded, refused or escaped; the message)."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the reader ended with status {self.process.wait()}"
        outcome, message, seconds = json.loads(answer)
        assert seconds < 5, f"{seconds:.0f} seconds of work for: {message}"
        assert outcome != "escaped", message
        assert "\n" not in message and len(message) < 1100
        return outcome, message

    def refusal(self, folder: Path) -> str:
        outcome, message = self.read(folder)
        assert outcome == "refused"
        return message


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    assert child.process.stdin
    child.process.stdin.close()
    assert child.process.wait(10) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    write_checkpoint(path, tiny_checkpoint())
    return path


def configure(folder: Path, **model: Any) -> None:
    values = json.loads((folder / CONFIG).read_text())
    values["model"] |= model
    (folder / CONFIG).write_text(json.dumps(values))


def change_tensor(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    tensors[TENSOR] = change(tensors[TENSOR])
    safetensors.torch.save_file(tensors, folder / WEIGHTS)


# -- sizes -------------------------------------------------------------------------------------------------------------

FIELDS = ModelConfig.__dataclass_fields__
SIZES = [name for name, field in FIELDS.items() if field.type in (int, float)]
WHOLE = [name for name in SIZES if FIELDS[name].type is int]


def bounds(name: str) -> tuple[int, int]:
    """The lowest and the highest value that a whole number of `ModelConfig` may have."""
    found = {type(constraint).__name__: constraint for constraint in FIELDS[name].default.metadata}
    return found["Ge"].ge, found["Le"].le


def test_all_sizes_are_looked_at() -> None:
    assert set(FIELDS) - set(SIZES) == {"activation", "positions", "attention", "decoder_layers"}
    assert len(WHOLE) == 7


@pytest.mark.parametrize("value", [10**9, 20_000_000, 10**30, -(10**9)])
@pytest.mark.parametrize("name", SIZES)
def test_a_size_far_out_is_refused_by_name(child: Child, folder: Path, name: str, value: int) -> None:
    configure(folder, **{name: value})
    assert f"{CONFIG}: model.{name} = " in child.refusal(folder)


@pytest.mark.parametrize("name", WHOLE)
def test_a_size_at_its_bounds_is_compared_with_the_files_before_any_model_is_made(
    child: Child, folder: Path, name: str
) -> None:
    for value, beyond in zip(bounds(name), (-1, 1), strict=True):
        configure(folder, **{name: value + beyond})
        assert f"{CONFIG}: model.{name} = {value + beyond}: " in child.refusal(folder)
        configure(folder, **{name: value})
        if (name, value) != ("nhead", 1):  # any number of heads has the same weights
            assert f"model.{name} = " not in child.refusal(folder)


def test_more_layers_than_tensors_are_refused_before_they_are_put_together(child: Child, folder: Path) -> None:
    configure(folder, num_encoder_layers=200, num_decoder_layers=200)
    assert f"{WEIGHTS}: 67 tensors are too few for the 400 layers of {CONFIG}" in child.refusal(folder)


def test_positions_that_are_computed_are_bounded_too() -> None:
    longest = bounds("max_positions")[1]
    ModelConfig(vocab_size=9, d_model=LARGEST_POSITIONS // longest, max_positions=longest)
    with pytest.raises(ValueError, match=f"max_positions {longest} times d_model 1024 is more than 67,108,864"):
        ModelConfig(vocab_size=9, d_model=1024, max_positions=longest, positions="sinusoidal")


# -- what isn't an ordinary file of an ordinary size -------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_sparse_file_of_three_gigabytes_is_not_read(child: Child, folder: Path, name: str) -> None:
    os.truncate(folder / name, 3 << 30)
    assert name in child.refusal(folder)


@pytest.mark.parametrize("count", [600_000, 200_000])
def test_a_weights_file_of_empty_tensors_is_refused(child: Child, folder: Path, count: int) -> None:
    header = json.dumps(
        {f"t{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(count)}
    ).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    assert f"{WEIGHTS}: " in child.refusal(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("put", "expected"),
    [
        (os.mkfifo, "is a pipe or a device"),
        (os.mkdir, "is a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "is a pipe or a device"),
        (lambda path: path.symlink_to("nowhere"), "no such file"),
        (lambda path: path.symlink_to(path.name), "symbolic links"),
    ],
    ids=["pipe", "folder", "device", "dangling", "loop"],
)
def test_what_is_no_file_is_named_and_not_waited_for(
    child: Child, folder: Path, name: str, put: Callable[[Path], object], expected: str
) -> None:
    (folder / name).unlink()
    put(folder / name)
    message = child.refusal(folder)
    assert f"{name}: " in message and expected in message


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_may_not_be_read_is_named(child: Child, folder: Path, name: str) -> None:
    (folder / name).chmod(0)
    message = child.refusal(folder)
    assert name in message and "ermission" in message


def test_linked_files_are_files(child: Child, folder: Path, tmp_path: Path) -> None:
    for name in FILES:
        shutil.move(folder / name, tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    assert child.read(folder) == ("loaded", "")


@pytest.mark.parametrize("path", ["x" * 300, "x\0y", "\udcff", "/dev/zero", "/dev/null/x"])
def test_a_path_that_cannot_be_is_one_line(path: str) -> None:
    with pytest.raises(UserError) as caught:
        read_checkpoint(Path(path))
    assert str(caught.value).isprintable()


# -- config.json -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"format": 1, "format": 1}', "key 'format' stands there twice"),
        (b'{"format": NaN}', "NaN is not a JSON number"),
        (b'{"format": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"format": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
        (b"[" * 500_000, "cannot be read as JSON"),
        (b'{"a":' * 100_000, "cannot be read as JSON"),
        (b'{"format": "\xff"}', "cannot be read as JSON"),
        ('{"format": 1}'.encode("utf-16"), "cannot be read as JSON"),
        (b"{" + b",".join(b'"k%d": 1' % number for number in range(60_000)) + b"}", "and 59,980 more; known: "),
        (b'{"' + b"k" * 900_000 + b'": 1}', "unknown key"),
        (b'{"source_language": "' + b"x" * 900_000 + b'"}', ""),
        (b'{"' + b"x" * (1 << 20) + b'": 1}', "at most 1,048,576 are read"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_json_that_means_harm(child: Child, folder: Path, text: bytes, expected: str) -> None:
    (folder / CONFIG).write_bytes(text)
    message = child.refusal(folder)
    assert message.startswith(f"{folder / CONFIG}: ") and expected in message


def test_a_number_too_large_for_a_float_is_refused(child: Child, folder: Path) -> None:
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(text.replace('"dropout": 0.0', '"dropout": 1e999'))
    assert "model.dropout = inf: input should be a finite number" in child.refusal(folder)


def test_a_byte_order_mark_is_no_fault(child: Child, folder: Path) -> None:
    (folder / CONFIG).write_bytes(b"\xef\xbb\xbf" + (folder / CONFIG).read_bytes())
    assert child.read(folder) == ("loaded", "")


# -- weights that are no numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.int64, "I64"),
        (torch.uint8, "U8"),
        (torch.bool, "BOOL"),
        (torch.complex64, "C64"),
        (torch.float8_e4m3fn, "F8_E4M3"),
    ],
)
def test_weights_that_are_no_floats_are_refused(child: Child, folder: Path, dtype: torch.dtype, name: str) -> None:
    change_tensor(folder, lambda tensor: tensor.to(dtype))
    assert f"tensor {TENSOR!r} holds {name}; weights are F16, BF16, F32, F64" in child.refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_name(
    child: Child, folder: Path, dtype: torch.dtype, value: float
) -> None:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        spoiled = tensor.to(dtype)
        spoiled[3] = value
        return spoiled

    change_tensor(folder, spoil)
    assert f"{WEIGHTS}: tensor {TENSOR!r} holds NaN or infinite values" in child.refusal(folder)


def test_weights_too_large_for_single_precision_are_refused(child: Child, folder: Path) -> None:
    change_tensor(folder, lambda tensor: tensor.double() + 1e300)
    assert f"tensor {TENSOR!r} holds NaN or infinite values" in child.refusal(folder)
    change_tensor(folder, lambda tensor: torch.full_like(tensor, 3e38, dtype=torch.float32))
    assert f"{folder / WEIGHTS}: the model gives NaN" in child.refusal(folder)


@pytest.mark.parametrize("config", [DecodeConfig(beam_size=1), DecodeConfig(), DecodeConfig(sampling=True, n_best=2)])
def test_a_model_that_gives_nan_is_named_as_such_by_every_search(config: DecodeConfig) -> None:
    checkpoint = tiny_checkpoint()
    broken = checkpoint.model.__class__(checkpoint.config.model).eval()
    with torch.no_grad():
        broken.embedding.weight[7] = float("nan")  # one piece's row: one logit of each step
    checkpoint.model = broken
    translator = Translator(checkpoint, engine="eager")  # the packed engine refuses such weights
    for call in (
        lambda: translator.translate(["Where is it?"], config),
        lambda: list(translator.stream("Where is it?", config)),
        lambda: translator.score(["a"], ["b"]),
    ):
        with pytest.raises(UserError, match="the model gives NaN instead of probabilities"):
            call()


def test_a_model_that_gives_nan_later_on_is_named_as_such_by_both_proofs() -> None:
    checkpoint = tiny_checkpoint()
    checkpoint.model = copy.deepcopy(checkpoint.model)
    with torch.no_grad():
        checkpoint.model.target_positions.weight[5] = 3e38  # the first positions are in order
    for call in (
        lambda: check_parity(checkpoint, max_tokens=8),
        lambda: profile_latency(checkpoint.model, LatencySettings(tokens=8, repeats=1)),
    ):
        with pytest.raises(UserError, match="the model gives NaN instead of probabilities"):
            call()


# -- a training run's folder -------------------------------------------------------------------------------------------


def test_the_folder_of_a_run_stands_for_its_best_checkpoint(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "step-00000005").mkdir(parents=True)
    write_checkpoint(run / "step-00000005", tiny_checkpoint(DecodeConfig(beam_size=7)))
    (run / "best").symlink_to("step-00000005")
    assert read_checkpoint(run).config.decode.beam_size == 7
    shutil.rmtree(run / "step-00000005")
    with pytest.raises(UserError, match="run/best: leads nowhere"):
        read_checkpoint(run)
    # A folder that is a checkpoint itself is taken as it is, whatever else it holds.
    shutil.copytree(folder, folder / "best")
    assert read_checkpoint(folder).config.decode.beam_size == 4


# -- damage at random --------------------------------------------------------------------------------------------------


def damage(data: bytes, draw: random.Random) -> bytes:
    """A few bytes flipped, a piece lost, doubled or overwritten, mostly near the start where the structure is."""
    data_ = bytearray(data)
    at = draw.randrange(min(len(data_), draw.choice([64, 4096, len(data_)])))
    length = draw.choice([1, 3, 40, 5000])
    kind = draw.randrange(5)
    if kind == 0:
        for _ in range(draw.choice([1, 1, 4, 64])):
            data_[draw.randrange(at + 1)] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del data_[at:]
    elif kind == 2:
        del data_[at : at + length]
    elif kind == 3:
        data_[at:at] = data_[at : at + length]
    else:
        data_[at : at + length] = draw.randbytes(length)
    return bytes(data_)


@pytest.mark.parametrize("name", FILES)
def test_damage_at_random_loads_or_is_refused_in_one_line(child: Child, folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    draw = random.Random(f"{name} 1")
    outcomes = []
    for _ in range(120):
        (folder / name).write_bytes(damage(whole, draw))
        outcomes.append(child.read(folder)[0])
    assert outcomes.count("refused") > 30


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"F32"', b'"F99"'),
        (b'"shape":[32]', b'"shape":[-1]'),
        (b'"shape":[32]', b'"shape":[99999999999999999999]'),
        (b'"shape":[32]', b'"shape":[4294967296,4294967296]'),
        (b'"data_offsets":[', b'"data_offsets":[9223372036854775807,'),
        (b'"data_offsets":[', b'"data_offset":['),
        (b"{", b'{"__metadata__":7,'),
        (b"{", b'{"' + b"n" * 900_000 + b'":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'),
    ],
    ids=lambda value: value[:40].decode(),
)
def test_headers_that_lie_are_refused(child: Child, folder: Path, old: bytes, new: bytes) -> None:
    data = (folder / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + length]
    assert old in header
    header = header.replace(old, new, 1)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])
    assert f"{WEIGHTS}: " in child.refusal(folder)
