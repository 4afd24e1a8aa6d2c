"""The number of torch's threads: what `run.threads = "auto"` means on this machine, reported and kept with a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rocstar.config.sections import Recipe
from rocstar.errors import ConfigError
from rocstar.learning.models import device_of, seconds_of_product, use_threads
from rocstar.parts.shape import shape_of
from rocstar.record.atomic import write_json
from rocstar.record.folder import RunFolder
from rocstar.record.identity import hardware
from rocstar.sandbox.container import cpu_shares

SMALL = 2**17  # numbers of a layer's matrix; a product with fewer takes microseconds, which waking threads takes too
PAYS = 1.2  # times as fast, at twice the threads
ROWS = 128  # tokens of the product that is timed: a step of decoding; a pass of the learner has more


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    count: int
    cores: int
    """Physical ones that one learner may keep busy here."""
    milliseconds: dict[int, float] = field(default_factory=dict)
    """Time of a product of the model's size by number of threads; empty if nothing was timed."""

    def summary(self) -> str:
        took = ", ".join(f"{value:.2f} ms with {count}" for count, value in self.milliseconds.items())
        threads = f"{self.count} thread{'s' * (self.count > 1)} on {self.cores} cores"
        return f"computing with {threads}: a product of this model's size takes {took} (run.threads=NUMBER decides)"


def on_stderr(sentence: str) -> None:
    print(sentence, file=sys.stderr)


def begin_threads(recipe: Recipe, model: Path | None, tell: Callable[[str], None] = on_stderr) -> Threads:
    """Set torch's threads to `run.threads`, and report the timing for `auto`. model: the folder of the weights, None
    for the recipe's own shape."""
    given = recipe.run.threads
    found = _chosen(recipe, model) if given == "auto" else Threads(count=given, cores=cores())
    if found.milliseconds:
        tell(found.summary())
    use_threads(found.count)
    return found


def begin_threads_of_run(recipe: Recipe, model: Path | None, folder: RunFolder, tell: Callable[[str], None]) -> None:
    """The same for a run, which stores the number in run.json and keeps using it if the recipe says `auto`. Reports
    changes that affect its figures. Raises DataError, OSError."""
    stored, cpu = folder.identity.get("threads"), hardware()["cpu"]
    if stored and recipe.run.threads == "auto":
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"threads": stored["count"]})})
    found = begin_threads(recipe, model, tell)
    if not stored or stored["count"] != found.count:
        write_json(folder.path / "run.json", {**folder.identity, "threads": {**asdict(found), "cpu": cpu}})
    if not stored:
        return
    if stored["count"] != found.count:
        tell(
            f"from here on the run computes with run.threads = {found.count}, before with {stored['count']}: sums are "
            "rounded in another order, so its figures are not those of a run that was never interrupted"
        )
    elif (stored["cores"], stored["cpu"]) != (found.cores, cpu):
        tell(
            f"the run computed on {stored['cores']} cores ({stored['cpu']}) and goes on with its {found.count} threads "
            f"on {found.cores} ({cpu}): another kind of CPU may round sums otherwise, and then its figures are not "
            "those of a run that stayed there; run.threads=NUMBER after --resume takes another number of threads"
        )


def _chosen(recipe: Recipe, model: Path | None) -> Threads:
    widths = (0, 0)
    with suppress(ConfigError):  # a model of unknown shape is not timed, nor one on a GPU
        if device_of(recipe.model).type == "cpu":
            shape = shape_of(recipe.model if model is None else recipe.model.model_copy(update={"path": str(model)}))
            widths = shape.hidden, shape.intermediate
    return paying(cores() // learners_here(recipe), widths, lambda count: seconds_of_product(*widths, ROWS, count))


def paying(cores: int, widths: tuple[int, int], seconds: Callable[[int], float]) -> Threads:
    """The number that pays: doubled up to `cores` while a product of matrices of these widths, which takes `seconds` of
    a number of threads, becomes faster by `PAYS`."""
    cores, count = max(1, cores), 1
    if cores == 1 or widths[0] * widths[1] < SMALL:
        return Threads(count=1, cores=cores)
    took = {1: seconds(1)}
    while count < cores:
        more = min(2 * count, cores)
        took[more] = seconds(more)
        if took[count] < PAYS * took[more]:
            break
        count = more
    return Threads(count=count, cores=cores, milliseconds={n: round(1000 * value, 3) for n, value in took.items()})


def learners_here(recipe: Recipe) -> int:
    """Processes on this machine that learn together."""
    if started := os.environ.get("LOCAL_WORLD_SIZE"):  # by torchrun
        return int(started)
    return recipe.cluster.learners if recipe.cluster.launcher == "processes" else 1


def cores() -> int:
    """Physical cores that this process may keep busy: of those that it may run on, as many as its control group's share
    comes to."""
    allowed = os.sched_getaffinity(0)
    known = Path("/sys/devices/system/cpu")
    physical = {_read(known / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed}
    return max(1, min([len(physical), *map(int, cpu_shares())]))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
