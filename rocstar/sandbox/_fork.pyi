from collections.abc import Callable

Raised = tuple[int, int, int, int, bool, bool, int, int, bytes]

def serve(raise_slot: Callable[[int], Raised | None], /) -> tuple[bytes, bytes, memoryview] | None: ...
