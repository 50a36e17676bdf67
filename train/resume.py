"""What may change between the start of a run and its resumption, and what may not."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from train.recipe import Recipe
from translator.errors import UserError, quoted

# Keys, or whole sections, that say how long, how watched and where; the weights of the next step don't hang on them.
FREE = {
    "training.max_steps",
    "training.log_every",
    "training.save_every",
    "evaluation",
    "decode",
    "output",
}
# These only say where the text comes from. The text itself is compared, by its fingerprint.
TEXT = {"corpora", "split", "filters", "simplify_chinese"}
# What the value of the best metric hangs on, beside its name.
_JUDGING = ("evaluation.sentences", "evaluation.beam_size", "decode.")

Changes = dict[str, tuple[Any, Any]]


def changed_settings(saved: Recipe, wanted: Recipe, step: int, where: Path) -> Changes:
    """Old and new value of every key in which two recipes differ, keys dotted.

    Raises `UserError`, with both values, when the run saved in `where` at step `step` can't take the new one up.
    """
    changes = _difference("", _plain(saved), _plain(wanted))
    refused = {key: pair for key, pair in changes.items() if not _in(key, FREE | TEXT)}
    if refused:
        raise UserError(
            f"--resume: {where} has {described(refused)}; a run goes on only as it began. Leave the old "
            f"value{'s' if len(refused) > 1 else ''}, or begin another run with --init-from and --set output=…"
        )
    if wanted.training.max_steps < step:
        raise UserError(
            f"--resume: training.max_steps = {wanted.training.max_steps}: {step} steps are done already in {where}"
        )
    return changes


def text_changes(changes: Changes) -> Changes:
    """Those of `changes` that may have changed the text."""
    return {key: pair for key, pair in changes.items() if _in(key, TEXT)}


def judged_otherwise(changes: Changes, metric: str) -> bool:
    """Whether values of `metric` from before and after `changes` can't be compared."""
    return metric != "loss" and any(key.startswith(_JUDGING) for key in changes)


def described(changes: Changes) -> str:
    """`key: old → new, …`."""
    return ", ".join(f"{key}: {quoted(old)} → {quoted(new)}" for key, (old, new) in changes.items())


def _plain(recipe: Recipe) -> dict[str, Any]:
    plain: dict[str, Any] = TypeAdapter(Recipe).dump_python(recipe, mode="json")
    return plain


def _difference(prefix: str, old: dict[str, Any], new: dict[str, Any]) -> Changes:
    changes: Changes = {}
    for key in old.keys() | new.keys():
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changes |= _difference(f"{prefix}{key}.", before, after)
        elif before != after:
            changes[prefix + key] = (before, after)
    return dict(sorted(changes.items()))


def _in(key: str, keys: set[str]) -> bool:
    return key in keys or key.split(".")[0] in keys
