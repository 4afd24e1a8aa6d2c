"""A PlainEngine in a process of its own, which starts in a fraction of the torch engine's time."""

from __future__ import annotations

from functools import partial

from rocstar.engines.process import EngineSettings, run
from rocstar.errors import ConfigError
from tests.engines.plain import PlainEngine

PAUSE_SECONDS = 0.002


async def opened(settings: EngineSettings) -> PlainEngine:
    if settings.rows > 1000:
        raise ConfigError(f"{settings.rows} rows do not fit; lower rollout.engine_rows")
    return PlainEngine(version=settings.version, pause=PAUSE_SECONDS)


main = partial(run, opened)
