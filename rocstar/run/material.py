"""What a run works on, read and checked before a run folder exists: problems, rows to imitate, the pretrained model's
tokenizer and limits. Loads no torch and starts nothing, so `--dry-run` finds what a run would stumble over."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from rocstar.answers.plugin import check_verifier
from rocstar.config.sections import BY_EPOCHS, Recipe, RlStage, SftStage, StageDataSection
from rocstar.data.sft.check import load_conversations
from rocstar.dialogue.bpe import fixed_phrases, refuse_small_vocabulary, train_bpe
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.template import ChatMl, Template
from rocstar.dialogue.templates import template_named
from rocstar.engines.memory import CacheShape, cache_bytes, host_bytes, kv_pages, refuse_too_many_tokens
from rocstar.engines.pages import PAGE
from rocstar.errors import ConfigError
from rocstar.learning.advantages import advantage_of
from rocstar.learning.resample import resampler_of
from rocstar.parts.build import environment_of, make_conversation, rollouts_of, specs_of, template_of, vllm_python
from rocstar.parts.fits import idle_learners, refuse_here, refuse_on_gpu
from rocstar.parts.lengths import UNLIMITED, positions_needed, within
from rocstar.parts.memory import HostMemory, Load, engines_here, host_memory
from rocstar.parts.modelfolder import ModelFacts, find_model, model_facts
from rocstar.parts.shape import Shape, shape_of
from rocstar.protocols import Task
from rocstar.record.folder import HELD_OUT
from rocstar.rollout.environment import Conversation
from rocstar.run.benchmarks import NamedBenchmark, read_benchmarks
from rocstar.run.rows import Layout, layouts_of, rows_of_layouts, with_steps
from rocstar.run.tasks import heldout_problems, make_task, require_demonstrations, training_problems
from rocstar.sandbox.client import SandboxClient
from rocstar.support.exits import need
from rocstar.support.plugins import is_reference
from rocstar.types import Problem

ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of drivers; with none of them there is no cuda."""
TOKENIZER_ROWS = 3000
"""Demonstrations a fresh tokenizer is trained on; more change nothing that matters."""
COVERED = 0.5
"""Share of a model's embedding that its tokenizer must cover; real ones cover 95% and more, the rest is padding."""
BYTES, ACROSS_WORDS = 4, 8
"""Of text in a token; the latter where merges may cross spaces, on texts that repeat phrases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """The model a run starts from."""

    facts: ModelFacts
    codec: Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    recipe: Recipe
    task: Task
    """Of the base `[data]`: held-out problems, and the tokens that a fresh tokenizer keeps whole."""
    heldout: Sequence[Problem]
    problems: Mapping[str, Sequence[Problem]]
    """By RL stage; none of them is held out."""
    layouts: Mapping[str, Sequence[Layout] | None]
    """What each SFT stage imitates, before it is tokens; None for its task's own demonstrations, which may be tens of
    thousands and are made when the run opens. Empty where the run folder has the tokens already."""
    pretrained: Pretrained | None
    """None for random weights."""
    template: Template
    """How conversations are written."""
    benchmarks: Sequence[NamedBenchmark] = ()
    """That are asked beside the held-out problems."""
    memory: HostMemory | None = None
    """What the run takes of this machine's; None on GPUs, and of a model whose shape is not known."""
    notes: Sequence[str] = ()
    """What a person should know: the steps that epochs come to, the problems that `data.max_prompt_tokens` leaves out.
    These are left out of a model of random weights when the run has opened: before that, nobody but a fresh tokenizer
    knows how long prompts are."""

    def with_steps(self, recipe: Recipe) -> Recipe:
        """Another reading of the run's recipe with the steps that epochs come to."""
        return with_steps(recipe, {name: len(rows) for name, rows in self.layouts.items() if rows is not None})[0]


def read_material(recipe: Recipe, *, rows: Set[str] | None = None) -> Material:
    """`rows`: SFT stages whose rows to imitate are needed; None: all, and with them a tokenizer. Raises ConfigError and
    DataError for whatever can be known without loading a model, ModuleNotFoundError where Ray is asked for and not
    there."""
    recipe = recipe.model_copy(update={"stage": [stage for stage in recipe.stage if stage.steps]})
    specs_of(recipe)  # what is named must be there and fit
    environment_of(recipe)
    check_verifier(recipe.evaluate.verifier, recipe.run.modules)
    for stage in (stage for stage in recipe.stage if isinstance(stage, RlStage)):
        _check_learning(stage, recipe.run.modules)
    if not recipe.sandbox.urls:
        _refuse_absent_modules(recipe.sandbox.preload)
    if idle := idle_learners(recipe, recipe.cluster.learners):
        raise ConfigError(f"{idle}; lower cluster.learners")
    _refuse_lone_ray(recipe)
    _refuse_other_ranks(recipe)
    for entry in recipe.servers:
        vllm_python(entry)
    if recipe.cluster.launcher == "ray":
        need("cluster")
    pretrained = _pretrained(recipe)
    task = task_of(recipe, recipe)
    heldout = heldout_problems(task)
    benchmarks = read_benchmarks(recipe)
    template = template_of(recipe, pretrained.facts.folder if pretrained else None)
    layouts = _layouts(recipe, template, rows)
    recipe, told = with_steps(recipe, {name: len(shown) for name, shown in layouts.items() if shown is not None})
    if any(stage.steps == BY_EPOCHS for stage in recipe.stage):
        raise ConfigError("a run that goes on does not read its rows again, so it takes no epochs; give steps")
    material = Material(
        recipe=recipe,
        task=task,
        heldout=heldout,
        problems={
            stage.name: _problems(recipe, stage, heldout) for stage in recipe.stage if isinstance(stage, RlStage)
        },
        layouts=layouts,
        pretrained=pretrained,
        template=template,
        benchmarks=benchmarks,
        notes=told,
    )
    if recipe.model.device == "cuda":
        from rocstar.learning.models import device_of  # torch, which is loaded for nothing less than this question

        device_of(recipe.model)
    if pretrained:
        facts, codec = pretrained.facts, pretrained.codec
        codec.stop_ids(material.template)
        material = without_long_prompts(material, codec)
        positions = positions_of(material, codec, facts.positions)
        read = {
            name: [len(row.token_ids) for row in rows_of_layouts(name, layouts, codec, template, facts.positions)]
            for name, layouts in material.layouts.items()
            if layouts is not None
        }
        memory = _memory(material, facts.cache, positions, facts.folder, read)
    else:
        if heldout or material.problems:
            _refuse_long_caps(recipe, benchmarks)
        template = template_named(recipe.rollout.template)
        refuse_small_vocabulary(recipe.model.vocab_size, template.markers, atoms_of(recipe, task, template))
        shape = recipe.model
        cache = shape.num_layers, shape.num_kv_heads, shape.hidden_size // shape.num_heads
        shown = material
        if rows is None and any(section.max_prompt_tokens for section in _sections(recipe)):
            shown = without_long_prompts(material, _codec_at_first(material))
        memory = _memory(shown, cache, _positions_at_first(shown) if rows is None else 1, None, {})
        material = replace(material, notes=shown.notes)
    return replace(material, memory=memory)


def pool_sizes(recipe: Recipe) -> dict[str, int]:
    """Problems that each RL stage may learn from. Raises ConfigError and DataError."""
    heldout = heldout_problems(task_of(recipe, recipe))
    return {stage.name: len(_problems(recipe, stage, heldout)) for stage in recipe.stage if isinstance(stage, RlStage)}


def with_epochs(recipe: Recipe) -> Recipe:
    """With the steps that epochs come to. Raises DataError where rows cannot be read, ConfigError."""
    files = {s.name: s.sft.rows_file for s in recipe.stage if isinstance(s, SftStage) and s.epochs}
    tool = recipe.rollout.tool_name
    return with_steps(recipe, {n: len(load_conversations(Path(f), tool)) for n, f in files.items() if f})[0]


def few_problems(stage: RlStage, there: int) -> str | None:
    """What a step takes where there are fewer problems than it asks for; None where there are enough."""
    rollout = stage.rollout
    if there >= rollout.problems_per_step:
        return None
    return (
        f"stage {stage.name} has {there} problems and rollout.problems_per_step is {rollout.problems_per_step}, so "
        f"each step takes all {there} and makes {there * rollout.attempts_per_problem} attempts"
    )


def fingerprint(material: Material) -> dict[str, str]:
    """A hash of the problems of each stage, of those held out and of benchmarks: ids and answers, in order."""
    asked = {f"benchmark {benchmark.name}": benchmark.source.problems for benchmark in material.benchmarks}
    parts = {**material.problems, HELD_OUT: material.heldout, **asked}
    return {name: _sha256([[p.id, p.answer] for p in problems]) for name, problems in parts.items()}


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def task_of(recipe: Recipe, part: Recipe | RlStage | SftStage) -> Task:
    """The task that a `[data]` section asks for, the base's or a stage's."""
    return make_task(
        part.data,
        tool_name=recipe.rollout.tool_name,
        seed=recipe.run.seed,
        heldout=recipe.evaluate.problems,
        folders=recipe.run.modules,
    )


def atoms_of(recipe: Recipe, task: Task, template: ChatMl) -> tuple[str, ...]:
    """What the tokenizer of random weights keeps whole besides the template's markers."""
    return (*task.atoms, *fixed_phrases(template, recipe.rollout.tool_name))


def without_long_prompts(material: Material, codec: Codec) -> Material:
    """Without the problems that `data.max_prompt_tokens` leaves out. Raises ConfigError where it leaves nothing."""
    conversation, environment = _conversation(material, codec), environment_of(material.recipe)
    stages = [stage for stage in material.recipe.stage if isinstance(stage, RlStage)]
    parts = {f"stage {stage.name}": (stage.data, material.problems[stage.name]) for stage in stages}
    kept, notes = [], list(material.notes)
    for name, (data, problems) in {**parts, HELD_OUT: (material.recipe.data, material.heldout)}.items():
        most = data.max_prompt_tokens
        fits, told = (problems, "") if most is None else within(problems, most, conversation, environment)
        kept.append(fits)
        if told:
            notes.append(f"{name}: data.max_prompt_tokens leaves out {told}")
        if told and not fits:
            raise ConfigError(f"{notes[-1]}, so nothing is left; raise it")
    named = dict(zip((stage.name for stage in stages), kept, strict=False))
    return replace(material, problems=named, heldout=kept[-1], notes=list(dict.fromkeys(notes)))


def _sections(recipe: Recipe) -> list[StageDataSection]:
    return [recipe.data, *(stage.data for stage in recipe.stage if isinstance(stage, RlStage))]


def _conversation(material: Material, codec: Codec) -> Conversation:
    """As attempts have it; nothing runs in it."""
    several = any(rollout.max_turns > 1 for rollout in rollouts_of(material.recipe))
    nothing_runs = SandboxClient(daemons=0)
    return make_conversation(material.recipe, codec, material.template, nothing_runs, with_tools=several)


def positions_of(material: Material, codec: Codec, model_positions: int) -> int:
    """Tokens of the longest attempt of the run. Raises ConfigError when the model holds less."""
    problems = {problem.id: problem for some in (material.heldout, *material.problems.values()) for problem in some}
    own = 1  # imitation alone: no cap applies
    if problems:
        own = positions_needed(
            problems.values(),
            _conversation(material, codec),
            response_tokens=_longest_response(material.recipe),
            model_positions=model_positions,
            environment=environment_of(material.recipe),
            leaves_out="data.max_prompt_tokens",
        )
    asked = (benchmark.positions(codec, material.template, model_positions) for benchmark in material.benchmarks)
    return max([own, *asked])


def first_prompt(material: Material) -> str | None:
    """What the model will read first, markers included: the prompt of the first problem to learn from, else to be
    asked. None where there is no problem, and for an environment of one's own whose tokenizer is not there yet."""
    recipe, pretrained = material.recipe, material.pretrained
    problem = next((one for some in (*material.problems.values(), material.heldout) for one in some), None)
    if problem is None or (pretrained is None and recipe.rollout.environment is not None):
        return None
    several = any(rollout.max_turns > 1 for rollout in rollouts_of(recipe))
    if pretrained is None:
        return text_of(material.template.opening(problem.question, specs_of(recipe) if several else ()))
    nothing_runs, codec = SandboxClient(daemons=0), pretrained.codec
    conversation = make_conversation(recipe, codec, material.template, nothing_runs, with_tools=several)
    return codec.decode(environment_of(recipe)(problem, conversation, UNLIMITED, 0).opening())


def _positions_at_first(material: Material) -> int:
    """Tokens that the longest attempt takes at least, in a run whose tokenizer is not there yet. Where a token a byte
    of its prompt would be too many, the tokenizer is made and tells. Raises ConfigError where the model holds less."""
    recipe, longest = material.recipe, _longest_response(material.recipe, material.benchmarks)
    model, kv_tokens = recipe.model.max_positions, recipe.rollout.kv_tokens
    benchmarks = (problem for benchmark in material.benchmarks for problem in benchmark.source.problems)
    problems = [*material.heldout, *(problem for some in material.problems.values() for problem in some), *benchmarks]
    if not problems:
        return 1
    specs = specs_of(recipe) if any(rollout.max_turns > 1 for rollout in rollouts_of(recipe)) else ()
    asked = (material.template.opening(problem.question, specs) for problem in problems)
    most = longest + max(len(text_of(segments).encode()) for segments in asked)
    if most <= min(model, kv_tokens or model) and recipe.rollout.environment is None:
        return longest
    return positions_of(material, _codec_at_first(material), model)


def _codec_at_first(material: Material) -> Codec:
    """The tokenizer that a run of random weights will open with."""
    stage = next(stage for stage in material.recipe.stage if isinstance(stage, SftStage))
    return fresh_codec(material, layouts_at_first(material, stage))


def fresh_codec(material: Material, layouts: Sequence[Layout]) -> Codec:
    """A tokenizer trained on these."""
    recipe, template = material.recipe, template_named(material.recipe.rollout.template)
    return train_bpe(
        ("".join(piece.text for piece in layout) for layout in layouts[:TOKENIZER_ROWS]),
        vocab_size=recipe.model.vocab_size,
        markers=template.markers,
        word_merges=recipe.model.word_merges,
        atoms=atoms_of(recipe, material.task, template),
    )


def layouts_at_first(material: Material, stage: SftStage) -> Sequence[Layout]:
    """What the stage imitates, made now where its task makes it."""
    found, recipe = material.layouts[stage.name], material.recipe
    return layouts_of(recipe, stage, material.template, None, task_of(recipe, stage)) if found is None else found


def _layouts(recipe: Recipe, template: Template, names: Set[str] | None) -> dict[str, list[Layout] | None]:
    found: dict[str, list[Layout] | None] = {}
    for stage in recipe.stage:
        if not isinstance(stage, SftStage) or (names is not None and stage.name not in names):
            continue
        task = task_of(recipe, stage)
        if stage.sft.rows_file is None:
            require_demonstrations(task, stage.name)
            found[stage.name] = None
        else:
            conversations = load_conversations(Path(stage.sft.rows_file), recipe.rollout.tool_name)
            found[stage.name] = layouts_of(recipe, stage, template, conversations, task)
    return found


def _problems(recipe: Recipe, stage: RlStage, heldout: Sequence[Problem]) -> Sequence[Problem]:
    problems = training_problems(task_of(recipe, stage), heldout)
    if not problems:
        raise ConfigError(f"stage {stage.name} has no problems to learn from that are not held out; give it more data")
    return problems


def _pretrained(recipe: Recipe) -> Pretrained | None:
    if recipe.model.path is None:
        if not isinstance(next(iter(recipe.stage), None), SftStage):
            raise ConfigError(
                "a model of random weights needs an sft stage first, to get its tokenizer from; set model.path or add "
                "a stage of kind sft"
            )
        return None
    folder = find_model(recipe.model.path)
    facts, codec = model_facts(folder, torch_engine=recipe.runs_torch_engines), Codec.load(folder)
    covered = codec.covered(facts.embeddings)
    if codec.vocab_size > facts.embeddings or covered < COVERED * facts.embeddings:
        raise ConfigError(
            f"the tokenizer in {folder} has {codec.vocab_size} ids, which cover {covered} of the {facts.embeddings} "
            "rows of the model's embedding; they do not belong together, so put the model's own tokenizer there"
        )
    return Pretrained(facts=facts, codec=codec)


def _longest_response(recipe: Recipe, benchmarks: Sequence[NamedBenchmark] = ()) -> int:
    rollouts = [*rollouts_of(recipe), *(benchmark.recipe.rollout for benchmark in benchmarks)]
    return max(rollout.max_response_tokens for rollout in rollouts)


def _memory(
    material: Material,
    cache: CacheShape | None,
    positions: int,
    folder: Path | None,
    read: Mapping[str, Sequence[int]],
) -> HostMemory | None:
    """What the run takes here. positions: of the longest attempt. read: tokens of demonstrations. Raises ConfigError
    for what does not fit the memory there is. A machine of Ray's may have other memory than this one."""
    recipe, elsewhere = material.recipe, material.recipe.cluster.launcher == "ray"
    shape = _shape(recipe, folder)
    if recipe.model.device == "cuda" or (recipe.model.device == "auto" and has_accelerator()):
        if shape and not elsewhere:
            need("train")
            from rocstar.learning.models import gpu_bytes  # torch, as above

            if (memory := gpu_bytes()) is not None:
                refuse_on_gpu(recipe, shape, memory)
        return None
    rollout = recipe.rollout
    tokens = engines_here(recipe) * kv_pages(rollout.kv_tokens, rollout.engine_rows, positions) * PAGE
    if cache is not None:
        itemsize = 2 if recipe.model.dtype == "bfloat16" else 4
        refuse_too_many_tokens(cache_bytes(cache, tokens, itemsize), host_bytes(), tokens)
    if shape is None or elsewhere:
        return None
    taken = host_memory(recipe, shape, _load(material, positions, read))
    refuse_here(taken)
    return taken


def _load(material: Material, positions: int, read: Mapping[str, Sequence[int]]) -> Load:
    recipe = material.recipe
    rows = {stage.name: _lengths(material, stage) for stage in recipe.stage if isinstance(stage, SftStage)}
    problems = {name: len(problems) for name, problems in material.problems.items()}
    return Load(positions=positions, problems=problems, heldout=len(material.heldout), rows={**rows, **read})


def _lengths(material: Material, stage: SftStage) -> list[int]:
    """Tokens of the stage's demonstrations, about, where there is no tokenizer yet: by bytes of text. Of a task's own a
    step's are made, for all of them."""
    layouts, times, recipe = material.layouts.get(stage.name, ()), 1, material.recipe
    if layouts is None:
        one = stage.model_copy(update={"steps": 1})
        layouts, times = layouts_of(recipe, one, material.template, None, task_of(recipe, stage)), stage.steps
    size = BYTES if recipe.model.word_merges else ACROSS_WORDS
    return [1 + len("".join(piece.text for piece in layout).encode()) // size for layout in layouts] * times


def has_accelerator() -> bool:
    return any(Path(file).exists() for file in ACCELERATORS)


def _shape(recipe: Recipe, folder: Path | None) -> Shape | None:
    """None for a model whose size is not known beforehand; then only loading it tells."""
    model = recipe.model if folder is None else recipe.model.model_copy(update={"path": str(folder)})
    with suppress(ConfigError):
        return shape_of(model)
    return None


def _refuse_absent_modules(names: Sequence[str]) -> None:
    """Looks for the topmost package only: to look further would import it."""
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")) or find_spec(name.partition(".")[0]) is None:
            raise ConfigError(f"sandbox.preload names {name!r}, which is no module here; install it or take it out")


def _check_learning(stage: RlStage, modules: Sequence[str]) -> None:
    """Loads the user's own resampler, advantage and loss. Raises ConfigError where one does not fit."""
    resampler_of(stage.resample, modules)
    advantage_of(stage.learning, modules)
    if is_reference(stage.learning.loss):
        from rocstar.learning.loss import loss_of  # torch, as above

        loss_of(stage.learning, modules)


def _refuse_lone_ray(recipe: Recipe) -> None:
    cluster = recipe.cluster
    if cluster.launcher == "ray" and cluster.learners == 1 and not cluster.sandbox_nodes and not recipe.servers:
        raise ConfigError(
            "cluster.launcher is 'ray' and there is nothing to place: cluster.learners is 1, cluster.sandbox_nodes 0, "
            "and no [[engine]] of kind 'vllm' is to be started; raise cluster.learners or leave cluster.launcher out"
        )


def _refuse_long_caps(recipe: Recipe, benchmarks: Sequence[NamedBenchmark]) -> None:
    """For random weights, whose tokenizer is not there yet: prompts are known later, the cap is known now."""
    caps = {"rollout.max_response_tokens": _longest_response(recipe)}
    caps |= {
        f"rollout.max_response_tokens of benchmark {benchmark.name}": benchmark.recipe.rollout.max_response_tokens
        for benchmark in benchmarks
    }
    for name, longest in caps.items():
        if longest >= recipe.model.max_positions:
            raise ConfigError(
                f"{name} is {longest}, which does not fit into model.max_positions {recipe.model.max_positions} with a "
                "prompt; lower the one (of a benchmark by its `settings`) or raise the other"
            )


def _refuse_other_ranks(recipe: Recipe) -> None:
    started = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    if started and recipe.cluster.learners not in (1, int(started)):
        raise ConfigError(
            f"cluster.learners is {recipe.cluster.learners} but torchrun started {started} processes; make them equal"
        )
