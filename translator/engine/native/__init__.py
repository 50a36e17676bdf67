"""Kernels in C++ behind a small C interface (`kernels.h`): `build.py` compiles them, `library.py` loads them."""
