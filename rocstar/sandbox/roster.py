"""All tiers of a host: which there are, which are up, and how all of them are isolated. A tier's nursery is started
when the first program asks for it; one that cannot be had is left to the next best."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rocstar.sandbox import jail, tiers
from rocstar.sandbox.crew import RETRY_SECONDS, Crew, Terms
from rocstar.sandbox.jail import Plan
from rocstar.sandbox.tiers import Tier
from rocstar.sandbox.wire import SandboxDown

MAX_BUSY_TRIES = 10  # some seconds


class Roster:
    """`failed` is set when not even the bare tier can be had any more, and nothing but a new host helps."""

    def __init__(self, preload: Sequence[str], terms: Terms, plans: Sequence[Plan]) -> None:
        """`plans`: ways to isolate, to be tried in this order."""
        self.preload = tuple(preload)
        self.terms = terms
        self.plans = plans
        self.plan = jail.PLANS[-1]
        self.problems: list[str] = []
        offered = tiers.offered(preload)
        self.order = {tier: n for n, tier in enumerate(offered)}
        self.chooser = tiers.Chooser(offered)
        self.crews: dict[Tier, Crew] = {}
        self.coming: set[asyncio.Task[None]] = set()
        self.failed = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None

    async def start(self) -> Crew:
        """Bring up the bare tier behind the strongest plan that works here, and the operator's own; the bare one.

        Raises SandboxDown."""
        bare, *own = [self.crew(tier) for tier in self.order if tier is tiers.BARE or tier.modules == self.preload]
        await asyncio.gather(*(crew.start() for crew in (bare, *own)))
        for crew in (bare, *own):
            if crew.problem:
                raise SandboxDown(crew.problem)
        self.plan = await self.choose_plan(bare)
        for crew in (bare, *own):
            crew.plan = self.plan
        return bare

    async def choose_plan(self, crew: Crew) -> Plan:
        for plan in self.plans:
            problem = await self.try_plan(crew, plan)
            if not problem:
                return plan
            self.problems.append(problem)
        raise SandboxDown(f"no sandbox slot can be started here: {'; '.join(self.problems)}")

    async def try_plan(self, crew: Crew, plan: Plan) -> str:
        """What went wrong. A machine that is full for a moment must not lead to a weaker plan."""
        for _ in range(MAX_BUSY_TRIES):
            problem = await crew.open_lane(plan, 0)
            if not crew.busy:
                break
            await asyncio.sleep(RETRY_SECONDS)
        return problem

    def choose(self, code: str) -> Crew:
        """The crew that should run a program; its nursery may still be coming up."""
        return self.usable(self.chooser.choose(code))

    def usable(self, tier: Tier) -> Crew:
        crew = self.crews.get(tier)
        if crew is None:
            crew = self.crew(tier)
            task = asyncio.create_task(self.bring_up(crew))
            self.coming.add(task)
            task.add_done_callback(self.coming.discard)
        if crew.problem and tier is not tiers.BARE:
            return self.usable(self.below(tier))
        return crew

    def below(self, tier: Tier) -> Tier:
        """The next cheaper tier."""
        return next(other for other, n in self.order.items() if n == self.order[tier] - 1)

    def crew(self, tier: Tier) -> Crew:
        self.crews[tier] = Crew(tier, self.order[tier], self.terms, self.changed)
        return self.crews[tier]

    async def bring_up(self, crew: Crew) -> None:
        await crew.start()
        crew.plan = self.plan
        self.changed()

    def changed(self) -> None:
        if self.crews[tiers.BARE].problem:
            self.failed.set()
        self.on_change()

    def cpu_seconds(self) -> float:
        return sum(crew.cpu_seconds() for crew in self.crews.values())
