"""Imported first by each peer: what all benchmarks share lies in the folder above."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import absent  # noqa: E402, F401
