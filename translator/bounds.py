"""How large the numbers may be that a user gives: beyond what people need, within what an ordinary machine can meet.

Settings and options read them from here. They need no other module, so that the command line's help stays quick.
"""

import os

MOST_POSITIONS = 131_072  # tokens of a source or target
MOST_VOCABULARY = 2_000_000  # pieces
MOST_ROWS = 1024  # beams, or samples, of one sentence; sentences side by side in a timing
MOST_TIMED_ROWS = 4096  # sentences by beams in a timing
MOST_BATCH_TOKENS = 1 << 20  # tokens side by side
MOST_LINES = 10_000  # sentences of a proof
MOST_REPEATS = 10_000  # timed passes
MOST_THREADS = max(64, os.cpu_count() or 1)  # the operating system ends a program that starts a million
