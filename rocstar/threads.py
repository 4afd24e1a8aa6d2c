"""What torch reads from the environment when it is loaded: its threads and its order of summation."""

from __future__ import annotations

import os


def quiet_torch(threads: int) -> None:
    """Threads that wait must sleep: spinning costs several times the work itself on a busy machine.

    Matrix products must keep one summation order whatever the batch: MKL promises that in its strict mode only, which
    costs about 5% (measured on an AVX-512 Xeon, where the default mode breaks the engine's bit-for-bit invariance).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
