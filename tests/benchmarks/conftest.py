"""Benchmarks are scripts that stand side by side and import one another."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
