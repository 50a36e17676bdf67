"""Set before torch is imported: small tensors gain nothing from a second thread, and a busy machine loses a lot."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
