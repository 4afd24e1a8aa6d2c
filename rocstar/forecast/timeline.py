"""A picture of simulated steps: for each policy, how full each engine's cache was over time. Needs matplotlib."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

from rocstar.forecast.engine_model import EngineModel
from rocstar.forecast.simulate import Moment

COLUMNS = 400  # points of time in the picture


def filled(moments: Sequence[Moment], engines: Mapping[str, EngineModel], until: float) -> list[list[float]]:
    """[engines][COLUMNS] share of the cache in use, engines in order of their names."""
    rows = []
    for name in sorted(engines):
        own = [moment for moment in moments if moment.engine == name]
        times = [moment.seconds for moment in own]
        places = (bisect_right(times, until * (column + 0.5) / COLUMNS) - 1 for column in range(COLUMNS))
        used = [own[place].used_tokens if place >= 0 else 0 for place in places]
        rows.append([tokens / engines[name].capacity_tokens for tokens in used])
    return rows


def draw(moments: Mapping[str, Sequence[Moment]], engines: Mapping[str, EngineModel], path: Path) -> None:
    """One band for each policy, one line of it for each engine, brighter where the cache is fuller; all on one axis of
    seconds. Raises OSError where `path` cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    until = max(moment.seconds for policy in moments.values() for moment in policy)
    figure, bands = pyplot.subplots(len(moments), 1, sharex=True, squeeze=False, figsize=(10, 1 + 1.4 * len(moments)))
    for axes, (policy, own) in zip(bands[:, 0], moments.items(), strict=True):
        picture = axes.imshow(
            filled(own, engines, until),
            aspect="auto",
            vmin=0,
            vmax=1,
            extent=(0, until, len(engines), 0),
            cmap="viridis",
        )
        axes.axvline(max(moment.seconds for moment in own), color="red", linewidth=1)
        axes.set_ylabel(policy, rotation=0, ha="right", va="center")
        axes.set_yticks([])
    bands[-1, 0].set_xlabel("seconds; one line for each engine; red: the last attempt has ended")
    figure.colorbar(picture, ax=bands[:, 0], label="share of the KV cache in use")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
