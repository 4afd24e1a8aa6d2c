"""What all tests run under, set before anything loads torch: as `rocstar.launch.quiet_torch` sets it for a run."""

from __future__ import annotations

import os

from rocstar.launch import quiet_torch

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
quiet_torch(threads=1)
