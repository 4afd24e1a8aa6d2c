"""The tool: gauges, each with a value that it shows in one unit only. No prompt tells the unit."""

from __future__ import annotations

from rocstar.types import seed_for

UNITS = ("blem", "corvit", "dralk", "fenn", "gorrim", "hask", "jorl", "lumb", "mirk", "nool", "pell", "quint")
ASK = "?"


def unit_of(gauge: str) -> str:
    """The only unit in which the gauge shows its value; a hash, so nothing about it can be learned from others."""
    return UNITS[seed_for("unit", gauge) % len(UNITS)]


def value_of(gauge: str) -> str:
    """Four digits, as every gauge's number: a value may name the next gauge."""
    return str(1000 + seed_for("value", gauge) % 9000)


async def read(gauge: str, unit: str) -> str:
    """Shows the value of a gauge in its own unit.

    Args:
        gauge: Its number.
        unit: The gauge's unit; "?" says which one it is.
    """
    if unit == ASK:
        return f"use {unit_of(gauge)}"
    return shown(gauge, unit)


def shown(gauge: str, unit: str) -> str:
    """The value. Raises ValueError, which names the unit, for any other unit than the gauge's own."""
    if unit != unit_of(gauge):
        raise ValueError(f"use {unit_of(gauge)}")
    return value_of(gauge)
