"""What a token costs, with each cache and without.

`profile.py` times the `arms.py`; `report.py`, `table.py` and `plot.py` show what it found.
"""
