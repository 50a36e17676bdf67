"""The subcommands, one file each: `run` parses, calls and prints; `EXAMPLES` end its help.

A new one is a file here and a place in `COMMANDS`, in the order of the help. What needs PyTorch is imported inside
`run`.
"""

from translator.commands import attention, evaluate, export, memory, parity, plot, profile, score, train, translate

COMMANDS = (translate, evaluate, score, train, plot, parity, attention, profile, memory, export)
