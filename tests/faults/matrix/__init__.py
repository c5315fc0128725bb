"""The fault matrix: every fault x I/O engine x moment, on an emulated device, through real system calls.

`cases.py` is the matrix itself: the faults and what is expected of each, as data. `scene.py` has a store on
a device with a fault, `play.py` runs one cell, `workers.py` all of them, `page.py` writes
`docs/RELIABILITY.md`. `python -m tests.faults.matrix` runs it in full, `test_matrix.py` in short.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "support"))  # as pytest does
