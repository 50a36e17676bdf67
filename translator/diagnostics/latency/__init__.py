"""What a token costs, with each cache and without.

`profile.py` times the `arms.py`; `report.py` and `plot.py` show what it found.
"""
