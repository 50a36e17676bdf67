"""Training of translation models; depends on `translator`, never the other way round.

`run.run_recipe` reads a recipe (`recipe.py`; what is left at "auto" is fitted to the text by `fit.py`), loads its text
(`data.py`: `sources/` → `corpus.py` splits → `filters.py`), makes or reads the first checkpoint (`initial.py`) and lets
the `Trainer` (`loop.py`) go through `batches.py`, `loss.py` and `schedule.py`, validate (`evaluate.py`), tell
(`report.py`) and save (`state.py` what, `folder.py` where). `resume.py` goes on from there.
"""
