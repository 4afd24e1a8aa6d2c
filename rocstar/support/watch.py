"""Reports what a run waits for when it stalls, so that it never hangs silently.

Workers note what they wait for (`Watch.note`). A thread checks, also while the event loop is blocked. Every note and
every token that an engine writes is progress. Without progress for long enough the thread reports the stacks of all
tasks and threads, and stops the run if so configured. A C function that never releases the interpreter's lock, such as
an endless regular expression, blocks this thread too; then Python's faulthandler writes the stacks of all threads to
stderr.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocstar.errors import RunHalted
from rocstar.support.exits import FAILED
from rocstar.types import EngineLoad

if TYPE_CHECKING:
    from rocstar.config.sections import RunSection

RUN = "run"
"""The name under which a run notes its phases; every other name is an attempt or a group of attempts."""
LOOK_SECONDS = 1.0
UNWIND_SECONDS = 30.0  # for resources to be released, once the run was asked to stop
LIMITS = 8  # wall limits that a program may take: MAX_ATTEMPTS times its own and MOST_WAITS of waiting for a CPU
NAMED = 3  # shown of those that wait for the same, and of tasks with the same stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A period without progress."""

    seconds: float
    """Seconds without progress."""
    phase: str | None
    """What the run was doing."""
    waiting: Mapping[str, Sequence[tuple[str, float]]]
    """What is waited for -> the waiters and their seconds, the longest first."""
    load: EngineLoad | None
    """Load of the engine; None without an engine."""

    @property
    def counts(self) -> dict[str, int]:
        """What is waited for -> how many wait."""
        return {what: len(waiters) for what, waiters in self.waiting.items()}

    @property
    def headline(self) -> str:
        phase = f" in {self.phase}" if self.phase else ""
        waiting = ", ".join(f"{count} wait for {what}" for what, count in self.counts.items())
        return f"nothing has moved for {self.seconds:.0f} s{phase}" + (f": {waiting}" if waiting else "")

    def report(self) -> str:
        """The headline, a line for each thing that is waited for, and one about the engine."""
        lines = [self.headline]
        lines += [_line(what, waiters) for what, waiters in self.waiting.items()]
        if load := self.load:
            lines.append(
                f"  engine: {load.running} requests decode and {load.waiting} wait, {load.used_tokens} of "
                f"{load.capacity_tokens} tokens of cache in use, {load.produced_tokens} tokens written, policy version "
                f"{load.policy_version}"
            )
        return "\n".join(lines)


def _line(what: str, waiters: Sequence[tuple[str, float]]) -> str:
    named = ", ".join(who for who, _ in waiters[:NAMED])
    more = f" and {len(waiters) - NAMED} more" if len(waiters) > NAMED else ""
    return f"  {len(waiters)} wait for {what}, the longest for {waiters[0][1]:.0f} s: {named}{more}"


class Watch:
    """Records who waits for what, and since when. May be used from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, timeout_seconds: float = 0.0) -> None:
        """timeout_seconds: of one program."""
        self._clock, self.timeout_seconds = clock, timeout_seconds
        self._stages: dict[str, tuple[str, float]] = {}
        self._notes = 0
        self._seen: Hashable = None
        self._still = 0.0
        self.load: Callable[[], EngineLoad] | None = None
        """Asks the engine for its load, once there is one; the tokens it feeds and writes are moves."""
        self._far: Callable[[float], str] | None = None
        self._written = 0
        """Tokens that the engine had written when the phase under way began."""

    def note(self, who: str, what: str | None) -> None:
        """`who` now waits for `what`; None: it waits no more and has ended."""
        self._notes += 1
        if what is None:
            self._stages.pop(who, None)
        else:
            self._stages[who] = (what, self._clock())
        if who == RUN:
            self._written = self._produced()

    def patience(self, run: RunSection) -> float:
        """The allowed seconds without progress: those for attempts while one waits, else the others."""
        return run.stall_seconds if self._stages.keys() - {RUN} else run.stall_learning_seconds

    def doing(self) -> str:
        """Describes the run's phase and what its attempts wait for; empty between phases."""
        phase = self._stages.get(RUN)
        if phase is None:
            return ""
        waiting = Counter(what for who, (what, _) in dict(self._stages).items() if who != RUN)
        rest = ", ".join(f"{count} {'waits' if count == 1 else 'wait'} for {what}" for what, count in waiting.items())
        seconds = self._clock() - phase[1]
        written = self._produced() - self._written
        pace = f"{written / seconds:.0f} tokens/s" if written > 0 and seconds > 0 else ""
        far = self._far(seconds) if self._far else pace
        return f"{phase[0]} for {seconds:.0f} s" + (": " if far or rest else "") + "; ".join(filter(None, (far, rest)))

    @contextmanager
    def telling(self, far: Callable[[float], str]) -> Iterator[None]:
        """Within this context the description of the run includes its progress: the checking thread calls `far` with
        the seconds of the current phase."""
        self._far = far
        try:
            yield
        finally:
            self._far = None

    def look(self, passed: float) -> float:
        """Seconds without progress, `passed` seconds after the last look. Looks are added up, not times: an hour during
        which the process was stopped does not count."""
        load = self.asked()
        state = (self._notes, load and (load.produced_tokens, load.recomputed_tokens, load.policy_version))
        self._still = self._still + passed if state == self._seen else 0.0
        self._seen = state
        return self._still

    def stall(self) -> Stall:
        """The current stall."""
        now, stages = self._clock(), dict(self._stages)
        phase = stages.pop(RUN, None)
        waiting: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
        for who, (what, since) in sorted(stages.items(), key=lambda item: item[1][1]):
            waiting[what].append((who, now - since))
        return Stall(seconds=self._still, phase=phase and phase[0], waiting=waiting, load=self.asked())

    def _produced(self) -> int:
        load = self.asked()
        return load.produced_tokens if load else 0

    def asked(self) -> EngineLoad | None:
        """The engine's load; None while there is no engine."""
        try:
            return self.load() if self.load else None
        except Exception:  # this must survive, and report, a broken engine
            return None


class Watching:
    """Checks for stalls within its context. Must be entered by a task.

    Thread `watch`: consumes notes and loads, produces reports, waits for nothing but time; the end of the context ends
    it. Under `run.stall_policy` warn a stall is reported again whenever it has lasted twice as long. Under halt the
    task is cancelled, unless a program may still run, and the context raises RunHalted. If it has not ended after
    UNWIND_SECONDS, `break_off` must make the main thread's blocking call fail; after as long again the process is
    killed, and the run can be resumed."""

    def __init__(
        self,
        watch: Watch,
        run: RunSection,
        tell: Callable[[Stall, str], None],
        *,
        remedy: str = "run it again",
        break_off: Callable[[], None] = lambda: None,
    ) -> None:
        """run: for how long nothing may move, and what follows. tell: called by the thread with each stall and the
        stacks. remedy: how to go on afterwards."""
        self._watch, self._run, self._tell = watch, run, tell
        self._remedy, self._break_off = remedy, break_off
        self._over = threading.Event()
        self._halted: str | None = None
        """Why the run was asked to stop; None if it was not."""
        self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)

    def __enter__(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._thread.start()

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._halted is not None and isinstance(error, asyncio.CancelledError):
            raise RunHalted(self._halted) from None

    def _look_on(self) -> None:
        reported, seconds = 0.0, min(LOOK_SECONDS, self._run.stall_seconds / 4)
        while not self._over.wait(seconds):
            if sys.__stderr__ is not None:  # a real file: all stacks are printed unless the next look comes in time
                patience = self._watch.patience(self._run) + LOOK_SECONDS
                faulthandler.dump_traceback_later(patience, repeat=True, file=sys.__stderr__)
            still = self._watch.look(seconds)
            if still == 0.0:
                reported = 0.0
            elif still >= max(self._watch.patience(self._run), 2 * reported):
                reported = still
                self._explain(self._watch.stall())
        faulthandler.cancel_dump_traceback_later()

    def _explain(self, stall: Stall) -> None:
        try:
            self._tell(stall, all_stacks(self._loop))
        except Exception as error:  # a full disk, say: the report itself must come through
            print(f"warning: {stall.report()}\n  (its record failed: {error!r})", file=sys.stderr, flush=True)
        is_run = "a tool" in stall.waiting and stall.seconds <= LIMITS * self._watch.timeout_seconds
        if self._run.stall_policy == "halt" and not is_run:
            self._halt(f"the run was halted because {stall.headline}; {self._remedy}")

    def _halt(self, sentence: str) -> None:
        self._halted = sentence
        if self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        if self._over.wait(UNWIND_SECONDS):
            return
        self._break_off()
        if not self._over.wait(UNWIND_SECONDS):
            print(f"rocstar: {sentence}", file=sys.stderr, flush=True)
            os._exit(FAILED)


# -- stacks of tasks and threads ---------------------------------------------------------------------------------------


def all_stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Tasks of `loop`, then threads; outermost call first. May be called from any thread, also while the loop is
    blocked: what moves meanwhile may be shown half way."""
    return f"{_tasks(loop)}\n\n{_threads()}\n"


def awaited(task: asyncio.Task[Any]) -> tuple[str, ...]:
    """The coroutines that a task is inside of, outermost first: `Task.get_stack` shows only the first of them."""
    places: list[str] = []
    at: Any = task.get_coro()
    while at is not None:
        frame = _of(at, "frame")
        if frame is not None:
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
        at = _of(at, "await") or getattr(at, "gi_yieldfrom", None)
    return tuple(places)


def _of(awaitable: Any, what: str) -> Any:
    """The frame of a coroutine or generator, or what it awaits."""
    return next((found for kind in ("cr", "gi", "ag") if (found := getattr(awaitable, f"{kind}_{what}", None))), None)


def _tasks(loop: asyncio.AbstractEventLoop) -> str:
    """Where tasks stand; tasks in the same place are shown once."""
    standing: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for task in asyncio.all_tasks(loop):
        standing[awaited(task)].append(task.get_name())
    texts = []
    for places, names in sorted(standing.items(), key=lambda item: -len(item[1])):
        more = ", ..." if len(names) > NAMED else ""
        head = f"{len(names)} tasks ({', '.join(sorted(names)[:NAMED])}{more})"
        texts.append("\n".join([head, *(f"  {place}" for place in places)]))
    return "\n\n".join(texts)


def _threads() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n\n".join(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
    )
