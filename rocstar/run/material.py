"""The inputs of a run, read and checked before a run folder exists: problems, demonstrations, the pretrained model's
tokenizer and limits. Loads no torch and starts only MCP servers, for the list of their tools, so `--dry-run` finds what
would stop a run."""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from rocstar.answers.plugin import failures_on_answer
from rocstar.config.sections import BY_EPOCHS, STALE_CAP, Recipe, RlStage, RolloutStage, SftStage
from rocstar.data.sft.check import check_call, load_conversations
from rocstar.data.sft.format import Chat, Refused
from rocstar.data.sft.render import from_demonstration
from rocstar.dialogue.bpe import fixed_phrases, refuse_small_vocabulary, train_bpe
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.template import ChatMl, Template, prompt_of
from rocstar.dialogue.templates import template_named
from rocstar.engines.pages import PAGE, CacheShape, cache_bytes, kv_pages, refuse_too_many_tokens
from rocstar.errors import ConfigError
from rocstar.learning.advantages import advantage_of
from rocstar.learning.resample import resampler_of
from rocstar.parts.build import AttemptParts, vllm_python
from rocstar.parts.lengths import UNLIMITED, TokensOf, positions_needed, tokens_of_prompts, within
from rocstar.parts.memory import HostMemory, host_memory, refuse_here
from rocstar.parts.modelfolder import ModelFacts, find_model, identity_of, model_facts, refuse_targets
from rocstar.parts.placement import NOWHERE, Placement, placed_here
from rocstar.parts.shape import known_shape
from rocstar.protocols import Task, ToolSpec
from rocstar.record.folder import HELD_OUT, RunFolder, read_json
from rocstar.rollout.environment import Conversation
from rocstar.run.benchmarks import NamedBenchmark, read_benchmarks
from rocstar.run.rows import Layout, as_shown, layouts_of, rows_of_layouts, with_steps
from rocstar.run.stages import early_ends
from rocstar.run.tasks import (
    FileTask,
    asked_again,
    demonstrations_of,
    heldout_problems,
    make_task,
    not_drawn,
    require_demonstrations,
    training_problems,
)
from rocstar.sandbox.container import host_bytes
from rocstar.support.exits import need
from rocstar.support.plugins import is_reference
from rocstar.support.screen import plural
from rocstar.types import Problem, SftRow

TOKENIZER_ROWS = 3000
"""Demonstrations that a fresh tokenizer is trained on; more make no relevant difference."""
COVERED = 0.5
"""Share of a model's embedding that its tokenizer must cover; real ones cover 95% and more, the rest is padding."""
SHOWN_CHARACTERS = 8  # shown, of those that a tokenizer loses
SHORTEST = {
    "boxed": "\\boxed{0}",
    "boxed_strict": "<answer>\\boxed{0}</answer>",
    "boxed_text": "\\boxed{0}",
    "rocstar.adapters.reasoning_gym:score": "\\boxed{0}",
}
"""The shortest possible answer, by `evaluate.verifier`."""
BYTES, ACROSS_WORDS = 4, 8
"""Bytes of text in a token; ACROSS_WORDS if merges may cross spaces, on texts that repeat phrases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Everything a run reads before it opens."""

    recipe: Recipe
    """The run's, without stages of no steps; epochs are converted to steps."""
    task: Task
    """The task of the base `[data]`: held-out problems, and the tokens that a fresh tokenizer keeps whole."""
    heldout: Sequence[Problem]
    problems: Mapping[str, Sequence[Problem]]
    """Problems of each stage that makes attempts, held-out ones excluded."""
    layouts: Mapping[str, Sequence[Layout] | None]
    """Demonstrations of each SFT stage, before tokenization; None for the task's own, which may be tens of thousands
    and are made when the run opens. Empty if the run folder already has the tokens."""
    pretrained: ModelFacts | None
    """The model that the run starts from; None for random weights."""
    codec: Codec | None
    """The tokenizer that goes with it."""
    template: Template
    """The format of conversations."""
    benchmarks: Sequence[NamedBenchmark] = ()
    """Benchmarks evaluated besides the held-out problems."""
    placement: Placement = NOWHERE
    """Which process takes which GPU."""
    memory: HostMemory | None = None
    """Memory of this machine that the run needs; None on GPUs, and for a model of unknown shape."""
    positions: int | None = None
    """Tokens of the longest attempt; None with random weights, whose tokenizer does not count yet."""
    notes: Sequence[str] = ()
    """Messages for the user: the steps that epochs amount to, the problems that `data.max_prompt_tokens` excludes. With
    random weights these are excluded once the run has opened: only the fresh tokenizer can count a prompt's tokens."""

    @property
    def parts(self) -> AttemptParts:
        """The parts of attempts that the recipe defines."""
        return AttemptParts(self.recipe)

    @property
    def questions(self) -> list[Problem]:
        """Problems to learn from, then those held out."""
        return [problem for some in (*self.problems.values(), self.heldout) for problem in some]

    def conversation(self, codec: Codec) -> Conversation:
        """The conversation of attempts, with tools that run nothing."""
        return self.parts.conversation(codec, self.template, with_tools=self.recipe.has_tools)

    def tokens_of(self, codec: Codec) -> TokensOf:
        """Counts the tokens of prompts."""
        return tokens_of_prompts(self.conversation(codec), self.parts.environment)


def read_material(recipe: Recipe, *, rows: Set[str] | None = None) -> Material:
    """`rows`: SFT stages whose rows to imitate are needed; None: all, and a tokenizer. Raises ConfigError and DataError
    for any problem that shows without loading a model, ModuleNotFoundError if Ray is requested and missing."""
    recipe = recipe.model_copy(update={"stage": [stage for stage in recipe.stage if stage.steps]})
    parts = AttemptParts(recipe)
    _refuse_unusable(parts)
    pretrained, codec = None, None
    if recipe.model.path is not None:
        pretrained, codec = _pretrained(recipe.model.path, recipe.runs_torch_engines)
    if pretrained and recipe.model.lora_rank:
        need("lora")
        refuse_targets(pretrained.folder, recipe.model.lora_targets)
    task = task_of(recipe, recipe)
    heldout = heldout_problems(task)
    benchmarks = read_benchmarks(recipe)
    template = parts.template(pretrained.folder if pretrained else None)
    layouts, layout_notes = _layouts(parts, template, rows)
    stages, notes = with_steps(recipe.stage, {name: len(shown) for name, shown in layouts.items() if shown is not None})
    if any(stage.steps == BY_EPOCHS for stage in stages):
        raise ConfigError("a run that goes on does not read its rows again, so it takes no epochs; give steps")
    recipe = recipe.model_copy(update={"stage": stages})
    tasks = {stage.name: task_of(recipe, stage) for stage in recipe.rollout_stages}
    problems = {stage.name: problems_of(stage, tasks[stage.name], heldout) for stage in recipe.rollout_stages}
    leaving = ((name, left) for name, own in tasks.items() if isinstance(own, FileTask) for left in own.left_out)
    again = ((name, asked_again(asked, heldout)) for name, asked in problems.items())
    tested = ((name, not_drawn(asked, task, recipe.evaluate.problems)) for name, asked in problems.items())
    of_stages = [f"stage {name}: {note}" for name, note in (*leaving, *again, *tested) if note]
    material = Material(
        recipe=recipe,
        task=task,
        heldout=heldout,
        problems=problems,
        layouts=layouts,
        pretrained=pretrained,
        codec=codec,
        template=template,
        benchmarks=benchmarks,
        notes=[*layout_notes, *notes, *_stale(recipe.rl_stages), *early_ends(recipe.rl_stages), *of_stages],
    )
    parts.refuse_rows(material.questions)
    for one in benchmarks:
        one.source.kind.refuse_rows(one.source.problems, AttemptParts(one.recipe))
    for problem in material.questions[:1] if is_reference(recipe.evaluate.verifier) else ():
        failures = failures_on_answer(recipe.evaluate.verifier, recipe.run.modules, problem)
        material = replace(material, notes=[*material.notes, *failures])
    if recipe.model.device == "cuda":
        from rocstar.learning.models import device_of  # loads torch, only for this question

        device_of(recipe.model)
    if pretrained and codec:
        material = _measured(material, pretrained, codec)
    else:
        material = _measured_at_first(material, makes_rows=rows is None)
    idle = [] if recipe.cluster.launcher == "ray" else list(material.placement.notes())
    return replace(material, notes=[*material.notes, *idle])


def _refuse_unusable(parts: AttemptParts) -> None:
    """Raises ConfigError where the parts, this machine, the torchrun that started the run or the recipe's own settings
    do not fit, ModuleNotFoundError if Ray is missing."""
    recipe, cluster = parts.recipe, parts.recipe.cluster
    parts.check()
    for stage in recipe.rl_stages:
        resampler_of(stage.resample, recipe.run.modules)
        advantage_of(stage.learning, recipe.run.modules)
        if is_reference(stage.learning.loss):
            from rocstar.learning.methods import loss_of  # torch, which is loaded for no other stage

            loss_of(stage.learning, recipe.run.modules)
    for name in () if recipe.sandbox.urls else recipe.sandbox.preload:
        # Only the top-level package is looked up: a deeper lookup would import it.
        if not all(part.isidentifier() for part in name.split(".")) or find_spec(name.partition(".")[0]) is None:
            raise ConfigError(f"sandbox.preload names {name!r}, which is not a module here; install it or remove it")
    if idle := recipe.idle_learners(cluster.learners):
        raise ConfigError(f"{idle}; lower cluster.learners")
    started = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    if started and cluster.learners not in (1, int(started)):
        raise ConfigError(
            f"cluster.learners is {cluster.learners} but torchrun started {started} processes; make them equal"
        )
    for entry in recipe.servers:
        vllm_python(entry)
    if cluster.launcher == "ray":
        need("cluster")
    if recipe.model.path is None and not isinstance(next(iter(recipe.stage), None), SftStage):
        raise ConfigError(
            "a model of random weights needs an sft stage first, to get its tokenizer from; set model.path or add "
            "a stage of kind sft"
        )


def _measured(material: Material, facts: ModelFacts, codec: Codec) -> Material:
    """The material of a pretrained model, whose tokenizer counts: without problems that are too long, with notes about
    what does not fit, with GPUs and memory. Raises ConfigError."""
    codec.stop_ids(material.template)
    tokens_of = material.tokens_of(codec)
    material = without_long_prompts(material, tokens_of)
    positions = positions_of(material, codec, facts.positions, tokens_of)
    notes = [*material.notes, *_unasked(material), *cramped(material, codec), *unwritten(material, codec)]
    rows = {
        name: rows_of_layouts(name, layouts, codec, material.template, facts.positions)
        for name, layouts in material.layouts.items()
        if layouts is not None
    }
    notes += _long_demonstrations(next(iter(material.recipe.rollout_stages), None), rows)
    placement = placed_here(material.recipe, facts.folder, positions).refuse()
    lengths = {name: [len(row.token_ids) for row in shown] for name, shown in rows.items()}
    memory = _memory(material, placement, facts.cache, positions, facts.folder, lengths)
    return replace(material, notes=notes, placement=placement, memory=memory, positions=positions)


def _measured_at_first(material: Material, *, makes_rows: bool) -> Material:
    """The material of a model of random weights, with GPUs and memory. Its tokenizer is trained for this only if rows
    are made and it has to count. Raises ConfigError."""
    cramped(material, None)
    recipe, model = material.recipe, material.recipe.model
    own = template_named(recipe.rollout.template)
    refuse_small_vocabulary(model.vocab_size, own.markers, atoms_of(material.task, own, recipe.rollout.tool_name))
    cache = model.num_layers, model.num_kv_heads, model.hidden_size // model.num_heads
    shown = material
    sections = (recipe.data, *(stage.data for stage in recipe.rollout_stages))
    if makes_rows and any(section.max_prompt_tokens for section in sections):
        shown = without_long_prompts(material, material.tokens_of(_codec_at_first(material)))
    placement = placed_here(recipe, None, model.max_positions).refuse()
    memory = _memory(shown, placement, cache, _positions_at_first(shown) if makes_rows else 1, None, {})
    return replace(material, notes=shown.notes, placement=placement, memory=memory)


def few_problems(stage: RolloutStage, there: int) -> str | None:
    """Describes a step if there are fewer problems than it needs, or none to refill it with; None if there are
    enough."""
    rollout = stage.rollout
    if there >= rollout.problems_per_step + (rollout.refill > 0):
        return None
    return (
        f"stage {stage.name} has {plural(there, 'problem')} and rollout.problems_per_step is "
        f"{rollout.problems_per_step}, so each step takes all {there} and makes "
        f"{there * rollout.attempts_per_problem} attempts"
        f"{', and rollout.refill finds no further ones' if rollout.refill else ''}"
    )


def fingerprint(material: Material) -> dict[str, str]:
    """For the problems of each stage, the held-out ones and benchmarks: a hash of ids and answers, in order, which is
    all that older runs have, then one of the other fields that a reward may read and of a benchmark's protocol. A
    user's own task has only the first: other fields, such as the name of a folder, may change at each start."""
    recipe = material.recipe
    parts = {HELD_OUT: recipe.data, **{stage.name: stage.data for stage in recipe.rollout_stages}}
    own = {name for name, data in parts.items() if is_reference(data.source)}
    sources = {f"benchmark {benchmark.name}": benchmark.source for benchmark in material.benchmarks}
    benchmark_problems = {name: source.problems for name, source in sources.items()}
    found = {}
    for name, problems in {**material.problems, HELD_OUT: material.heldout, **benchmark_problems}.items():
        more = [[p.question, p.source, dict(p.metadata)] for p in problems]
        # Defaults are excluded, so a setting added by a later version does not change the protocol.
        protocol = sources[name].protocol.model_dump(exclude_defaults=True) if name in sources else None
        kinds = json.dumps([more, protocol], skipkeys=True, default=lambda value: type(value).__name__)
        texts = [json.dumps([[p.id, p.answer] for p in problems]), kinds][: 1 if name in own else 2]
        found[name] = "".join(hashlib.sha256(text.encode()).hexdigest() for text in texts)
    return found


def same_inputs(material: Material, run: RunFolder, anew: Set[str] = frozenset()) -> dict[str, str]:
    """Hashes of the run's inputs, for problems.json. Raises ConfigError if one differs from the hash there, which those
    of the stages `anew` may. (A branch keeps the hashes of begun stages.)"""
    found, model = fingerprint(material), material.pretrained
    identity = identity_of(model.folder) if model else {}
    if run.checkpoint_steps() and not material.recipe.model.lora_rank:
        identity.pop("weights", None)  # the checkpoint has its own
    found |= {f"{part} of model.path": mark for part, mark in identity.items()}
    noted = read_json(run.problems) if run.problems.exists() else {}
    changed = [name for name in found if name not in anew and not found[name].startswith(noted.get(name, ""))]
    if changed:
        raise ConfigError(
            f"inputs of run {run.name} have changed since it began ({', '.join(changed)}); restore its files, say "
            "where they lie unchanged, under the same names, or start a new run"
        )
    return {**noted, **found}


def task_of(recipe: Recipe, part: Recipe | RolloutStage | SftStage) -> Task:
    """The task of a `[data]` section, the base's or a stage's."""
    return make_task(
        part.data,
        tool_name=recipe.rollout.tool_name,
        seed=recipe.run.seed,
        heldout=recipe.evaluate.problems,
        folders=recipe.run.modules,
    )


def atoms_of(task: Task, template: ChatMl, tool_name: str) -> tuple[str, ...]:
    """Texts that a fresh tokenizer keeps as single tokens, besides the template's markers."""
    return (*task.atoms, *fixed_phrases(template, tool_name))


def without_long_prompts(material: Material, tokens_of: TokensOf) -> Material:
    """The material without the problems that `data.max_prompt_tokens` excludes. Raises ConfigError if none are left."""
    stages = material.recipe.rollout_stages
    parts = {f"stage {stage.name}": (stage.data, material.problems[stage.name]) for stage in stages}
    problem_sets, notes = [], list(material.notes)
    for name, (data, problems) in {**parts, HELD_OUT: (material.recipe.data, material.heldout)}.items():
        most = data.max_prompt_tokens
        fits, excluded = (problems, "") if most is None else within(problems, most, tokens_of)
        problem_sets.append(fits)
        if excluded:
            notes.append(f"{name}: data.max_prompt_tokens leaves out {excluded}")
        if excluded and not fits:
            raise ConfigError(f"{notes[-1]}, so nothing is left; raise it")
    named = dict(zip((stage.name for stage in stages), problem_sets, strict=False))
    return replace(material, problems=named, heldout=problem_sets[-1], notes=list(dict.fromkeys(notes)))


def cramped(material: Material, codec: Codec | None) -> list[str]:
    """Describes stages in which no attempt has room to call a tool and answer. Raises ConfigError for a stage without
    room to answer. Without a tokenizer an answer counts as one token."""
    recipe, template, warnings = material.recipe, material.template, []
    answer = SHORTEST.get(recipe.evaluate.verifier)
    for stage in recipe.rollout_stages if answer else ():
        most, end = stage.rollout.max_response_tokens, int(stage.rollout.truncated == "wrong")
        least = end + (len(codec.encode(str(answer))) if codec else 1)
        cap = f"stage {stage.name}: rollout.max_response_tokens is {most}"
        if most < least:
            raise ConfigError(f"{cap}, and {answer} takes {least} with its end; raise it, or no attempt can be right")
        if codec and stage.rollout.has_tools and material.parts.specs:
            spec = material.parts.specs[0]
            call = text_of(template.calls.render(spec.name, dict.fromkeys(spec.parameters.get("required", ()), "")))
            least += len(codec.encode(call + template.stop + text_of(template.reply([""]))))
            if most < least:
                warnings.append(f"{cap}, and a tool call, its reply and {answer} take at least {least}; raise it")
    return warnings


def unwritten(material: Material, codec: Codec) -> Iterator[str]:
    """Describes problems and demonstrations with characters that the tokenizer drops or maps to its unknown token."""
    shown = {f"demonstrations of stage {name}": layouts for name, layouts in material.layouts.items() if layouts}
    texts = {name: ["".join(piece.text for piece in layout) for layout in layouts] for name, layouts in shown.items()}
    texts["problems"] = [problem.question + problem.answer for problem in material.questions]
    for name, of_name in texts.items():
        if lost := {letter for letter in set().union(*of_name) if not _is_written(letter, codec)}:
            first = ", ".join(map(repr, sorted(lost)[:SHOWN_CHARACTERS]))
            more = ", ..." if len(lost) > SHOWN_CHARACTERS else ""
            hold = sum(not lost.isdisjoint(text) for text in of_name)
            yield (
                f"warning: the tokenizer has no token for {plural(len(lost), 'character')} of the {name} "
                f"({first}{more}), which {hold} of {len(of_name)} hold; the model never sees them: write them "
                "differently, or take another model"
            )


def _is_written(letter: str, codec: Codec) -> bool:
    """Whether a character survives encoding and decoding; spaces and invisible characters may change."""
    if letter not in "\n\t" and unicodedata.category(letter)[0] in "CZ":
        return True
    decoded = codec.decode(codec.encode(letter))
    return unicodedata.normalize("NFKC", letter).casefold() in unicodedata.normalize("NFKC", decoded).casefold()


def _long_demonstrations(first: RolloutStage | None, rows: Mapping[str, Sequence[SftRow]]) -> Iterator[str]:
    """Describes demonstrations longer than the limit of the first attempts: those that imitate them would be cut."""
    if first is None or first.rollout.truncated != "wrong":
        return
    most = first.rollout.max_response_tokens
    for name, shown in rows.items():
        lengths = sorted(len(row.token_ids) - row.loss_mask.index(True) for row in shown if any(row.loss_mask))
        if longer := sum(length > most for length in lengths):
            yield (
                f"stage {name}: {longer} of {plural(len(shown), 'demonstration')} take more than the {most} tokens of "
                f"stage {first.name} (rollout.max_response_tokens), half of all up to "
                f"{lengths[len(lengths) // 2]}, the longest {lengths[-1]}; an attempt as long is cut, and wrong"
            )


def _foreign_calls(stage: str, conversations: Sequence[Chat], specs: Sequence[ToolSpec]) -> list[str]:
    """Describes calls in demonstrations that the run's tools would reject; rows that list their own tools are exempt. A
    warning only, since failed calls may be shown on purpose."""
    tools, refused = {spec.name: spec for spec in specs}, []
    for row, chat in enumerate(conversations, 1):
        try:
            for name, arguments in (call for one in chat.messages for call in one.calls if chat.tools is None):
                check_call(name, arguments, tools)
        except Refused as found:
            refused.append(f"conversation {row}: {found.detail}")
    share = f"{len(refused)} of {plural(len(conversations), 'demonstration')} call what the run's tools do not take"
    return [f"stage {stage}: {share}, first {refused[0]}"] if refused else []


def _stale(stages: Sequence[RlStage]) -> Iterator[str]:
    """Describes the default correction for tokens of older weights, if the recipe does not set one."""
    for stage in stages:
        most, cap = stage.rollout.max_staleness_steps, stage.learning.importance_cap
        if most and cap == STALE_CAP:
            yield (
                f"stage {stage.name}: tokens may be {plural(most, 'step')} older than what learns from them, so their "
                f"loss is weighed by their probability now over that then, at most {cap:g} (learning.importance_cap)"
            )


def _unasked(material: Material) -> Iterator[str]:
    """Warns if RL begins with a model that was neither shown nor asked for the form of answers."""
    first, verifier = next(iter(material.recipe.stage), None), material.recipe.evaluate.verifier
    if not isinstance(first, RolloutStage) or verifier not in SHORTEST or material.recipe.rollout.agent:
        return  # an agent writes the prompts, and may judge
    if "boxed" not in (first_prompt(material) or ""):
        yield (
            f"warning: no sft stage comes before {first.name} and the prompt does not ask for \\boxed{{}}, where "
            f"evaluate.verifier {verifier!r} looks: unless the model writes it of itself, every attempt is wrong; take "
            "rollout.template 'paper' or 'model', set rollout.preamble, or begin with an sft stage"
        )


def positions_of(material: Material, codec: Codec, model_positions: int, tokens_of: TokensOf) -> int:
    """Tokens of the longest attempt of the run. Raises ConfigError when the model holds less."""
    problems = {problem.id: problem for problem in (*material.heldout, *material.questions)}
    own = 1  # SFT only: no cap applies
    if problems:
        own = positions_needed(
            problems.values(),
            tokens_of,
            response_tokens=max(rollout.max_response_tokens for rollout in material.recipe.rollouts),
            model_positions=model_positions,
            leaves_out="data.max_prompt_tokens",
        )
    needed = (_positions_on(benchmark, codec, material.template, model_positions) for benchmark in material.benchmarks)
    return max([own, *needed])


def _positions_on(benchmark: NamedBenchmark, codec: Codec, template: Template, model_positions: int) -> int:
    rollout, kind, parts = benchmark.recipe.rollout, benchmark.source.kind, AttemptParts(benchmark.recipe)
    conversation = kind.conversation(parts.conversation(codec, template, with_tools=rollout.has_tools))
    try:
        return positions_needed(
            benchmark.source.problems,
            tokens_of_prompts(conversation, kind.environment or parts.environment),
            response_tokens=rollout.max_response_tokens,
            model_positions=model_positions,
        )
    except ConfigError as error:
        raise ConfigError(f"benchmark {benchmark.name}: {error}") from None


def first_prompt(material: Material) -> str | None:
    """The first prompt the model will read, markers included: of the first training problem, else of the first to
    evaluate. None without problems, with an agent, which writes its own, and for a custom environment whose tokenizer
    does not exist yet."""
    codec, parts = material.codec, material.parts
    problem = next(iter(material.questions), None)
    rollout = material.recipe.rollout
    if problem is None or rollout.agent or (codec is None and rollout.environment is not None):
        return None
    if codec is None:
        return text_of(prompt_of(material.template, problem, parts.shown_specs))
    conversation = material.conversation(codec)
    return codec.decode(parts.environment(problem, conversation, UNLIMITED, 0).opening())


def _positions_at_first(material: Material) -> int:
    """A lower bound on the tokens of the longest attempt, in a run without a tokenizer yet. If one token per byte of
    its prompt would be too many, the tokenizer is trained to count. Raises ConfigError if the model holds less."""
    recipe = material.recipe
    rollouts = (*recipe.rollouts, *(benchmark.recipe.rollout for benchmark in material.benchmarks))
    longest = max(rollout.max_response_tokens for rollout in rollouts)
    model, kv_tokens = recipe.model.max_positions, recipe.rollout.kv_tokens
    benchmarks = (problem for benchmark in material.benchmarks for problem in benchmark.source.problems)
    problems = [*material.questions, *benchmarks]
    if not problems:
        return 1
    specs = material.parts.shown_specs
    openings = (prompt_of(material.template, problem, specs) for problem in problems)
    most = longest + max(len(text_of(segments).encode()) for segments in openings)
    if most <= min(model, kv_tokens or model) and recipe.rollout.environment is None:
        return longest
    codec = _codec_at_first(material)
    return positions_of(material, codec, model, material.tokens_of(codec))


def _codec_at_first(material: Material) -> Codec:
    """The tokenizer that a run with random weights will open with."""
    return fresh_codec(material, layouts_at_first(material, material.recipe.sft_stages[0]))


def fresh_codec(material: Material, layouts: Sequence[Layout]) -> Codec:
    """A tokenizer trained on these layouts."""
    recipe, template = material.recipe, template_named(material.recipe.rollout.template)
    return train_bpe(
        ("".join(piece.text for piece in layout) for layout in layouts[:TOKENIZER_ROWS]),
        vocab_size=recipe.model.vocab_size,
        markers=template.markers,
        word_merges=recipe.model.word_merges,
        atoms=atoms_of(material.task, template, recipe.rollout.tool_name),
    )


def layouts_at_first(material: Material, stage: SftStage) -> Sequence[Layout]:
    """The stage's demonstrations, generated now if they come from its task."""
    found = material.layouts[stage.name]
    return _of_task(material, stage) if found is None else found


def _of_task(material: Material, stage: SftStage) -> list[Layout]:
    task, feedback = task_of(material.recipe, stage), material.parts.feedback
    demonstrations = demonstrations_of(task, stage.name, stage.steps * stage.sft.batch_rows)
    shown = (from_demonstration(demonstration, feedback) for demonstration in demonstrations)
    return layouts_of(shown, material.template, material.parts.specs)


def _layouts(
    parts: AttemptParts, template: Template, names: Set[str] | None
) -> tuple[dict[str, list[Layout] | None], list[str]]:
    """Each SFT stage's demonstrations, and messages for the user about them."""
    found: dict[str, list[Layout] | None] = {}
    notes: list[str] = []
    recipe = parts.recipe
    for stage in recipe.sft_stages:
        if names is not None and stage.name not in names:
            continue
        task = task_of(recipe, stage)
        if stage.sft.rows_file is None:
            require_demonstrations(task, stage.name)
            found[stage.name] = None
        else:
            conversations = load_conversations(Path(stage.sft.rows_file), recipe.rollout.tool_name)
            shown = (as_shown(conversation, parts.feedback) for conversation in conversations)
            found[stage.name] = layouts_of(shown, template, parts.specs)
            notes += _foreign_calls(stage.name, conversations, parts.specs)
            if recipe.rollout_stages and all(chat.tools is not None for chat in conversations):
                notes.append(
                    f"stage {stage.name}: its demonstrations have `tools` of their own, so they are written as plain "
                    f"chats and not as attempts are, under rollout.template {recipe.rollout.template!r}; take that key "
                    "out of rows that show how to solve the problems"
                )
    return found, notes


def problems_of(stage: RolloutStage, task: Task, heldout: Sequence[Problem]) -> Sequence[Problem]:
    """Problems that a stage may learn from. Raises ConfigError if there are none, DataError."""
    if not (problems := training_problems(task, heldout)):
        raise ConfigError(f"stage {stage.name} has no problems to learn from that are not held out; give it more data")
    return problems


def _pretrained(path: str, torch_engine: bool) -> tuple[ModelFacts, Codec]:
    folder = find_model(path)
    facts, codec = model_facts(folder, torch_engine=torch_engine, trained=True), Codec.load(folder)
    covered = codec.covered(facts.embeddings)
    if codec.vocab_size > facts.embeddings or covered < COVERED * facts.embeddings:
        raise ConfigError(
            f"the tokenizer in {folder} has {codec.vocab_size} ids, which cover {covered} of the {facts.embeddings} "
            "rows of the model's embedding; they do not belong together, so put the model's own tokenizer there"
        )
    return facts, codec


def _memory(
    material: Material,
    placement: Placement,
    cache: CacheShape | None,
    positions: int,
    folder: Path | None,
    read: Mapping[str, Sequence[int]],
) -> HostMemory | None:
    """Memory that the run needs here. positions: of the longest attempt. read: tokens of demonstrations. Raises
    ConfigError if it exceeds the available memory. Machines of a Ray cluster may differ from this one."""
    recipe, elsewhere = material.recipe, material.recipe.cluster.launcher == "ray"
    shape = known_shape(recipe.model, folder)
    rollout = recipe.rollout
    tokens = recipe.engines_here * kv_pages(rollout.kv_tokens, rollout.engine_rows, positions) * PAGE
    if placement.gpu_bytes:
        return None
    if cache is not None:
        refuse_too_many_tokens(cache_bytes(cache, tokens, recipe.model.cpu_itemsize), host_bytes(), tokens)
    if shape is None or elsewhere:
        return None
    rows = {stage.name: _lengths(material, stage) for stage in recipe.sft_stages}
    problems = {name: len(problems) for name, problems in material.problems.items()}
    heldout = len(material.heldout)
    taken = host_memory(recipe, shape, positions=positions, problems=problems, heldout=heldout, rows={**rows, **read})
    refuse_here(taken)
    return taken


def _lengths(material: Material, stage: SftStage) -> list[int]:
    """Estimated tokens of the stage's demonstrations, by bytes of text, without a tokenizer. For a task's own
    demonstrations, those of one step stand for all, unless the task returns everything at once."""
    layouts, times, recipe = material.layouts.get(stage.name, ()), 1, material.recipe
    if layouts is None:
        layouts = _of_task(material, stage.model_copy(update={"steps": 1}))
        times = 1 if len(layouts) > stage.sft.batch_rows else stage.steps
    size = BYTES if recipe.model.word_merges else ACROSS_WORDS
    return [1 + len("".join(piece.text for piece in layout).encode()) // size for layout in layouts] * times
