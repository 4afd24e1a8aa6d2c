"""The same gauges where asking fails as well: the only way to a gauge's unit is the message of a failed call."""

from __future__ import annotations

from gauges import shown


async def read(gauge: str, unit: str) -> str:
    """Shows the value of a gauge in its own unit.

    Args:
        gauge: Its number.
        unit: The gauge's unit.
    """
    return shown(gauge, unit)
