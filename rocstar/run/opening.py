"""Opens a run at its start or at its newest checkpoint: model, learner ranks, grader, engines.

A model that starts from random weights gets a tokenizer trained on the demonstrations of its first stage; it is saved
beside every checkpoint, because training it again after a change of the generator would silently produce other ids."""

from __future__ import annotations

import copy
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rocstar.answers.grade import Grader
from rocstar.cluster import Machines
from rocstar.dialogue.codec import Codec
from rocstar.engines.process import EngineSettings, ProcessEngine
from rocstar.engines.torch_channel import Channel
from rocstar.engines.torch_engine import TorchEngine
from rocstar.engines.torch_forward import lowered
from rocstar.engines.torch_gpus import cpu_multiplies_bf16
from rocstar.engines.vllm import VllmEngine
from rocstar.learning.models import compute_dtype, device_of, load_model, random_model, threads_in_use
from rocstar.learning.policy import Policy
from rocstar.parts.build import OwnedEngine, named_engines, opened_fleet
from rocstar.parts.placement import EMBEDDED
from rocstar.record.atomic import write_atomic, write_json
from rocstar.record.folder import RunFolder
from rocstar.record.identity import git_state, hardware, versions
from rocstar.record.tracker import RunTracker
from rocstar.rollout.fleet import Tell
from rocstar.run.calls import FinishedCalls
from rocstar.run.checkpoints import Checkpoints, Progress, latest, opened
from rocstar.run.continued import is_reopened, made_again, note_surroundings, settings_hash
from rocstar.run.material import (
    Material,
    cramped,
    fresh_codec,
    layouts_at_first,
    positions_of,
    same_inputs,
    unwritten,
    without_long_prompts,
)
from rocstar.run.probe import prober
from rocstar.run.published import MEMORY, PublishedWeights
from rocstar.run.rows import rows_of_layouts, write_sft_rows
from rocstar.run.run import Meter, Run
from rocstar.run.stopper import Stopper
from rocstar.sandbox.call import Isolation
from rocstar.sandbox.client import SandboxClient
from rocstar.support.plugins import code_of
from rocstar.support.screen import Screen, changed_setting, plural
from rocstar.support.watch import RUN, Stall, Watch, Watching
from rocstar.tools.python import PythonTool
from rocstar.types import seed_for


@asynccontextmanager
async def opened_run(
    material: Material, folder: RunFolder, screen: Screen, machines: Machines, *, resume: bool, stopper: Stopper
) -> AsyncIterator[Run]:
    """A run at its start or at its newest checkpoint; its parts are closed with the context."""
    async with AsyncExitStack() as closing:
        write_json(folder.problems, same_inputs(material, folder))
        watch = Watch(timeout_seconds=material.recipe.sandbox.timeout_seconds)
        closing.enter_context(screen.never_silent(watch.doing))
        meter = Meter(machines.sandbox, partial(watch.note, RUN))
        checkpoints = _starting_point(material, folder, screen, resume=resume)
        if checkpoints.newest is None:
            imitates = ["demonstrations"] * bool(material.recipe.sft_stages)
            parts = [*imitates, *["tokenizer"] * (material.pretrained is None), "model"]
            screen.stage("cold start" if imitates else "start", ", ".join(parts))
        with meter.phase("cold start"):
            model, codec = opening(material, folder, checkpoints.newest)
        positions = material.positions
        if positions is None:
            tokens_of = material.tokens_of(codec)
            material = without_long_prompts(material, tokens_of)
            positions = positions_of(material, codec, int(model.config.max_position_embeddings), tokens_of)
            lacking = [*cramped(material, codec), *unwritten(material, codec)]
            material = replace(material, notes=[*material.notes, *lacking], positions=positions)
        for note in material.notes:
            screen.note(note)
        recipe = material.recipe
        ranks = machines.start_ranks()
        closing.callback(ranks.close)
        stopper.break_off = ranks.abandon
        embedded = None if recipe.engine else _embedded(material, model, codec.vocab_size, positions, ranks.local_rank)
        seed = seed_for(recipe.run.seed, "adapters")
        policy = Policy(model, codec, material.template, recipe.model, ranks=ranks, seed=seed)
        if checkpoints.newest is not None:
            policy.restore(checkpoints.newest)
            policy.version = checkpoints.progress.policy_version
        _tell_surroundings(material, policy, folder, screen, checkpoints.progress.step)
        grader = Grader()
        closing.push_async_callback(grader.close)
        tracker = closing.enter_context(RunTracker(folder, decode=policy.codec.decode))
        closing.enter_context(_told_of(machines.sandbox, tracker, screen))
        start = "resumed" if resume else "begun"
        tracker.event(start, step=checkpoints.progress.step, pid=os.getpid(), learners=ranks.size)
        report, remedy = partial(_tell_stall, folder, screen, tracker), f"rocstar train --resume {folder.argument}"
        # before the engines, so that their start and end are watched
        closing.enter_context(
            Watching(watch, recipe.run, report, remedy=f"continue with: {remedy}", break_off=ranks.abandon)
        )
        published: PublishedWeights | None = None
        engines: Mapping[str, OwnedEngine] = {EMBEDDED: embedded} if embedded else {}
        if embedded is None and not (material.heldout or material.questions or material.benchmarks):
            screen.note("SFT stages need no engine, so no [[engine]] is started")
        elif embedded is None:
            disk = folder.path.resolve() / "weights"  # in memory only if all engines can read it
            near = machines.engines_share_memory
            merges = near and len(recipe.servers) == len(recipe.engine)  # a server that we start reads the model here
            sent = recipe.cluster.weights == "sent"
            published = PublishedWeights(
                disk,
                MEMORY if near else None,
                merged=not (merges and policy.is_mergeable),
                channel=Channel(policy.device, machines.host, largest=policy.largest_tensor) if sent else None,
                break_off=ranks.abandon,
            )
            closing.callback(published.close)
            engines = _processes(material, policy, published, positions, folder, machines)
        fleet = await closing.enter_async_context(
            opened_fleet(
                engines,
                vocab_size=policy.codec.vocab_size,
                patience_seconds=recipe.rollout.engine_patience_seconds,
                tell=_teller(tracker, screen),
            )
        )
        watch.load = fleet.load
        calls = FinishedCalls(folder, checkpoints.progress.step) if recipe.rollout.agent else None
        python = PythonTool(machines.sandbox, material.parts.program_limits)
        yield Run(
            material=material,
            policy=policy,
            engine=fleet,
            published=published,
            sandbox=machines.sandbox,
            grader=grader,
            probe_when_due=prober(python, grader, recipe.run.probe_seconds),
            checkpoints=checkpoints,
            calls=calls,
            folder=folder,
            tracker=tracker,
            screen=screen,
            meter=meter,
            watch=watch,
            stopper=stopper,
        )


@contextmanager
def _told_of(sandbox: SandboxClient, tracker: RunTracker, screen: Screen) -> Iterator[None]:
    """Report how well the sandbox isolates, and for as long as the context lasts which daemon is lost, or back after it
    could not be reached: one that is lost is started again at once."""
    if sandbox.nodes:
        info = sandbox.info()
        tracker.event("sandbox", isolation=info.isolation, failed_probes=list(info.failed_probes))
        if info.isolation < Isolation.L3:
            screen.note(
                f"programs of the model run at isolation {info.isolation}; docs/sandbox.md lists what they can reach"
            )

    kinds = set[str]()

    def tell(kind: str, sentence: str) -> None:
        kinds.add(kind)
        if kind != "restarted" or "unreachable" in kinds:
            tracker.event(f"sandbox_{kind}", reason=sentence)
            screen.note(sentence)

    before, sandbox.on_event = sandbox.on_event, tell
    try:
        yield
    finally:
        sandbox.on_event = before


def _tell_surroundings(material: Material, policy: Policy, folder: RunFolder, screen: Screen, step: int) -> None:
    """Record what else figures depend on, and report what of it changed since the run last computed."""
    recipe = material.recipe
    now = {
        "threads": {"count": threads_in_use(), "cpu": hardware()["cpu"]},
        "versions": versions(),
        "git": git_state(),
        "code": code_of(recipe.resolved(), recipe.run.modules),
        "computes": {**policy.computes, "learners": policy.ranks.size, "fault_budget": recipe.run.fault_budget},
        "settings": settings_hash(folder),
    }
    if changed := note_surroundings(folder, now, step):
        screen.note(
            f"{', '.join(changed)}: changed since the run last computed, so its figures after step {step} are "
            "not those of an unchanged run; to get those stop it, restore that and resume it again"
        )
    if slow := slow_dtype(policy.computes):
        screen.note(slow)


def slow_dtype(computes: Mapping[str, str]) -> str:
    """A warning if this CPU multiplies numbers of that dtype by a slow way; empty if not."""
    if computes != {"device": "cpu", "dtype": "bfloat16"} or cpu_multiplies_bf16():
        return ""
    return (
        'warning: this CPU has no products in bf16, so model.dtype = "bfloat16" makes learning and writing several '
        'times as slow; set model.dtype to "float32"'
    )


def _starting_point(material: Material, folder: RunFolder, screen: Screen, *, resume: bool) -> Checkpoints:
    """Progress and newest checkpoint. When resuming, the folder's records after that step are removed."""
    progress, checkpoint = (latest(folder) if resume else None) or (Progress(), None)
    if resume:
        screen.note(f"going on after step {progress.step}{made_again(folder, progress.step)}")
        folder.rewind(progress.step)
        for change in folder.changes:
            # Other changes are reported once it is known whether they were reverted.
            if change["step"] == progress.step and change["setting"].startswith("stage."):
                screen.note(changed_setting(change))
    if progress.stage_complete:
        stage = material.recipe.stage[progress.stage]
        if is_reopened(folder, stage.name, progress.step):
            progress.stage_complete = progress.stage_step >= stage.steps
    return Checkpoints(folder, material.recipe.run, progress, checkpoint)


# -- the model and the rows to imitate ---------------------------------------------------------------------------------


def opening(material: Material, folder: RunFolder, checkpoint: Path | None = None) -> tuple[Any, Codec]:
    """The model of the checkpoint, or of a fresh run, fp32 and on the CPU, and its tokenizer; writes the rows of each
    SFT stage that has none yet. Raises ConfigError, DataError."""
    recipe, pretrained = material.recipe, material.pretrained
    stages = (stage for stage in recipe.sft_stages if stage.name in material.layouts)
    layouts = {stage.name: layouts_at_first(material, stage) for stage in stages}
    if checkpoint is not None:
        model, codec = opened(checkpoint, pretrained.folder if pretrained and recipe.model.lora_rank else None)
    elif pretrained is not None and material.codec is not None:
        model, codec = load_model(pretrained.folder), material.codec
    else:
        codec = fresh_codec(material, next(iter(layouts.values()), ()))
        shape = recipe.model.model_copy(update={"vocab_size": codec.vocab_size})
        model = random_model(shape, seed_for(recipe.run.seed, "weights"))
    positions = int(model.config.max_position_embeddings)
    for name, shown in layouts.items():
        rows = rows_of_layouts(name, shown, codec, material.template, positions)
        write_sft_rows(folder.sft_rows(name), rows)
    return model, codec


# -- engines -----------------------------------------------------------------------------------------------------------


def _embedded(material: Material, loaded: Any, vocab_size: int, positions: int, local_rank: int) -> TorchEngine:
    """An engine over a copy of the model: the learner's own is sharded and changes during updates."""
    section, rollout = material.recipe.model, material.recipe.rollout
    device = device_of(section, local_rank)
    dtype = compute_dtype(section, device)
    model = lowered(copy.deepcopy(loaded), dtype, fp32_head=section.fp32_head).to(device)
    rows, tokens = rollout.engine_rows, material.placement[EMBEDDED].kv_tokens or rollout.kv_tokens
    return TorchEngine(model, rows=rows, positions=positions, kv_tokens=tokens, vocab_size=vocab_size)


def _processes(
    material: Material,
    policy: Policy,
    published: PublishedWeights,
    positions: int,
    folder: RunFolder,
    machines: Machines,
) -> dict[str, ProcessEngine | VllmEngine]:
    """Engines over weights that they read from a folder."""
    weights, recipe = published.publish(policy), material.recipe
    assert weights.folder is not None
    settings = EngineSettings(
        folder=weights.folder,
        version=weights.version,
        device=policy.computes["device"],
        dtype=policy.computes["dtype"],
        rows=recipe.rollout.engine_rows,
        positions=positions,
        kv_tokens=recipe.rollout.kv_tokens,
        vocab_size=policy.codec.vocab_size,
        threads=threads_in_use(),
    )
    logs = folder.path.resolve() / "logs"
    return named_engines(recipe.engine, settings, logs, machines.start_server, material.placement)


# -- reports -----------------------------------------------------------------------------------------------------------


def _tell_stall(folder: RunFolder, screen: Screen, tracker: RunTracker, stall: Stall, stacks: str) -> None:
    """Report a stall on the screen, in events.jsonl, and with the stacks in a file. Called by the watching thread."""
    file = folder.next_log("stall")
    write_atomic(file, f"{stall.report()}\n\n{stacks}".encode())
    tracker.event("stall", seconds=round(stall.seconds), phase=stall.phase, waiting=stall.counts, log=file.name)
    screen.note(f"{stall.report()}\n  where everything stands: {file}")


def _teller(tracker: RunTracker, screen: Screen) -> Tell:
    """Writes events of engines to the run folder, and important ones to the screen."""

    def tell(event: str, **details: Any) -> None:
        tracker.event(event, **details)
        if event == "engine_lost":
            turns = plural(details["turns"], "turn")
            screen.note(f"engine {details['engine']} was taken out with {turns}: {details['reason']}")
        elif event == "engine_back":
            screen.note(f"engine {details['engine']} is back after {details['seconds']:.0f} s")
        elif event == "engine_still_out" and details["tries"] % 5 == 1:  # the journal has every one
            screen.note(f"engine {details['engine']} is still out: {details['reason']}")

    return tell
