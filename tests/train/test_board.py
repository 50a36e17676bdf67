"""TensorBoard shows what the log says, and a resumed run goes on where it was."""

from pathlib import Path

import pytest

from tests.train.runs import WriteRecipe, records, stop_after
from train.run import run_recipe

event_file_loader = pytest.importorskip("tensorboardX.proto.event_pb2", reason="tensorboardX is not installed")


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """What the event files hold: purged steps left out, later values last."""
    found: dict[tuple[str, int], float] = {}
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = event_file_loader.Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            if event.HasField("session_log"):
                found = {key: value for key, value in found.items() if key[1] < event.step}
            for value in event.summary.value:
                found[value.tag, event.step] = value.simple_value
    return found


def test_the_board_has_the_figures_of_the_log_across_a_resume(
    recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    settings = ["training.tensorboard=true"]
    with monkeypatch.context() as patch:
        stop_after(patch, 7, signal.SIGTERM)
        run_recipe(str(recipe("board")), settings)
    run_recipe(str(recipe("board")), settings, resume=True)
    found = scalars(tmp_path / "board" / "tensorboard")
    steps = [record for record in records(tmp_path / "board") if record["event"] == "step"]
    assert len(steps) == 20
    for record in steps:
        assert found["training/loss", record["step"]] == pytest.approx(record["loss"], rel=1e-5)
    last = [record for record in records(tmp_path / "board") if record["event"] == "validation"][-1]
    assert found["dev/bleu", last["step"]] == pytest.approx(last["dev_bleu"], abs=1e-4)


def test_without_it_nothing_is_written(recipe: WriteRecipe, tmp_path: Path) -> None:
    run_recipe(str(recipe("plain")), ["training.max_steps=2"])
    assert not (tmp_path / "plain" / "tensorboard").exists()
