"""Input as people type it: what nobody sees goes, what has several forms gets one, what must survive comes through.

`sides.Sides` is what training and translation call; the other files are its parts, pure functions of text.
"""
