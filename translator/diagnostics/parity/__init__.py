"""Is decoding with a cache the same as without, and would the check notice?

`check.py` compares, in three types: `scenarios.py` is what a cache is put through, `searches.py` are whole searches,
`bench.py` holds the sentences and the ways of decoding them without a cache, `tally.py` counts. `self_test.py` runs the
same with faults planted on contracts (`faults.py`): of a step (`step_faults.py`), of a grid's life (`grid_faults.py`),
of tables that rows are entries of (`table_faults.py`, `page_faults.py`).
`exact.py` is another question: does the packed engine give the same bits in any company?
"""
