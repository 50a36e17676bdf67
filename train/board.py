"""The run's figures for TensorBoard, beside its log."""

from pathlib import Path
from typing import Any

from translator.errors import UserError

FOLDER = "tensorboard"
_NAMES = {"step": "training", "validation": "dev"}
_SHOWN = {"loss", "learning_rate", "gradient_norm", "tokens_per_second", "dev_loss", "dev_bleu", "dev_chrf"}


class Board:
    """Writes event files into a run's folder; steps after `resumed` are there from a run that was lost, and go."""

    def __init__(self, run: Path, resumed: int = 0) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise UserError(
                "training.tensorboard: needs tensorboardX, which is not installed; run: "
                "pip install 'xianyan-translator[tensorboard]'"
            ) from None
        self._writer = SummaryWriter(
            str(run / FOLDER), purge_step=resumed + 1 if resumed else None, filename_suffix=f".{resumed}"
        )

    def record(self, event: str, step: int, values: dict[str, Any]) -> None:
        """The figures of one record of the log that change over the steps."""
        if event not in _NAMES:
            return
        for name, value in values.items():
            if name in _SHOWN:
                self._writer.add_scalar(f"{_NAMES[event]}/{name.removeprefix('dev_')}", value, step)
        for corpus, scores in values.get("dev_sets", {}).items():
            for name, value in scores.items():
                self._writer.add_scalar(f"dev_{corpus}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Ends the event file."""
        self._writer.close()
