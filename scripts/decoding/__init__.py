"""The parts of `scripts/bench_decode.py`: systems under test, the process each runs in, sections, the report."""
