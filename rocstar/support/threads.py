"""What torch reads from the environment when it is loaded: its threads, its order of summation, its memory."""

from __future__ import annotations

import os

KEPT_PRODUCTS = "64"


def quiet_torch(threads: int = 1) -> None:
    """Threads that wait must sleep: spinning costs several times the work itself on a busy machine. Their number is set
    again once torch is loaded (`parts/threads.py`).

    Matrix products must keep one summation order whatever the batch: MKL promises that in its strict mode only, which
    costs about 5% (measured on an AVX-512 Xeon, where the default mode breaks the engine's bit-for-bit invariance).

    Large blocks are given back to the system as they are freed (`keep_freed_memory`), and the kernel clears new ones
    page by page: in pages of 2 MiB an update of 5M parameters under 49,152 tokens takes 8.0 CPU-s, else 11.2.

    oneDNN, and ideep above it, cache 1,024 products each, by their numbers of rows. Decoding has many such numbers and
    seldom repeats one: the caches took 430 MB and saved no time (384 attempts of a model of 0.34 million parameters).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KEPT_PRODUCTS)
    os.environ.setdefault("LRU_CACHE_CAPACITY", KEPT_PRODUCTS)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
