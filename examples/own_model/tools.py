"""A second tool: a plain typed function. Its name, docstring and annotations are shown to the model.

It runs in rocstar's own process, in a thread, for at most `sandbox.timeout_seconds`. What it raises is shown to the
model as an error of its call; raise `rocstar.errors.Unavailable` instead where a service of yours is down: the call is
then tried again and, if that does not help, the attempt is left out rather than counted as wrong.
"""

GRAMS = {
    **{"blem": 7, "corvit": 12, "dralk": 15, "fenn": 4, "gorrim": 25, "hask": 9, "jorl": 30, "kevin": 6},
    **{"lumb": 11, "mirk": 40, "nool": 8, "ostrel": 18, "pell": 3, "quint": 50, "rusk": 14, "sarl": 22},
}


def grams_in(unit: str) -> int:
    """Says how many grams one of a unit of weight is.

    Args:
        unit: The unit's name in the singular.
    """
    if unit not in GRAMS:
        raise ValueError(f"there is no unit {unit!r}")
    return GRAMS[unit]
