"""What a KV cache takes, worked out before anything is allocated: formulas by kind of layer, presets, own models.

`layers` has a formula for each kind of layer, `presets` known models made of them, `own` the account of a model of this
project, structure by structure and container by container; `report` and `plot` show them. Containers give their own
account (`KeyValueState.account`), and a test holds it against the bytes of a real cache.
"""

from translator.diagnostics.memory.figures import parse_bytes
from translator.diagnostics.memory.own import OwnAccount, StackAccount, account_of
from translator.diagnostics.memory.presets import PRESETS, Preset, Rule, memory_preset

__all__ = [
    "PRESETS",
    "OwnAccount",
    "Preset",
    "Rule",
    "StackAccount",
    "account_of",
    "memory_preset",
    "parse_bytes",
]
