"""What a recipe would take on given GPUs."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest

from rocstar.cli.main import run
from rocstar.config.recipe import load_recipe
from rocstar.config.sections import ModelSection, Recipe
from rocstar.errors import ConfigError
from rocstar.forecast import plan as forecast
from rocstar.forecast.plan import GPUS, Assumptions, GpuPlan, Planner, gpu_named
from rocstar.forecast.workload import synthetic_workload, with_mean
from rocstar.parts.memory import host_memory, refuse_here
from rocstar.parts.placement import Placement, place
from rocstar.parts.shape import PUBLISHED, shape_of
from tests.commands import json_of

RECIPES = Path(__file__).parent.parent.parent / "recipes"
SMALL = ("rollout.problems_per_step=8", "rollout.attempts_per_problem=4", "resample.keep=4")


def planner(recipe: Recipe, gpus: int, gpu: str = "h100") -> Planner:
    return Planner(recipe=recipe, gpu=gpu_named(gpu), gpus=gpus)


def plan(name: str, gpu: str, gpus: int, *settings: str, **assumed: float) -> GpuPlan:
    return planner(load_recipe(RECIPES / name, settings), gpus, gpu).plan(replace(Assumptions(), **assumed))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-14B-Base", 14.8),
        ("Qwen/Qwen2.5-32B-Instruct", 32.8),
        ("Qwen/Qwen2.5-7B-Instruct", 7.6),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.54),
    ],
)
def test_published_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert PUBLISHED[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_shape_is_counted_as_transformers_counts_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=160, vocab_size=300, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    matrices = sum(weight.numel() for weight in model.parameters() if weight.dim() > 1)
    shape = shape_of(ModelSection(path=str(tmp_path)))
    assert shape.parameters == matrices
    assert shape.kv_bytes(2) == 2 * 2 * 2 * 32 * 2
    from safetensors.torch import save_file  # where weights are there, they say how many

    stored = {"model.layers.0.conv.weight": torch.ones(5, 7), "visual.blocks.0.weight": torch.ones(9)}
    save_file(stored, tmp_path / "model.safetensors")
    assert shape_of(ModelSection(path=str(tmp_path))).parameters == 35


def test_a_model_that_nobody_knows_or_whose_layers_have_widths_of_their_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'some/model' is no folder here and none of Qwen/Qwen3-14B-Base"):
        shape_of(ModelSection(path="some/model"))
    config = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": [48, 96]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 96}))  # Gemma 3n
    with pytest.raises(ConfigError, match="MLPs of a width for each layer"):
        shape_of(ModelSection(path=str(tmp_path)))


def test_gpus_are_shared_out_as_the_recipe_does_it() -> None:
    paper, alone = load_recipe(RECIPES / "paper/stage3.toml"), load_recipe(RECIPES / "quickstart.toml")
    made = [planner(paper, gpus).shared_out() for gpus in (64, 8, 2)]
    assert [(one.engine[0].count, one.cluster.learners) for one in made] == [(32, 32), (4, 4), (1, 1)]
    assert planner(alone, 8).shared_out().cluster.learners == 8
    with pytest.raises(ConfigError, match=r"^1 GPU is too few: at least 2 are needed for a learner"):
        planner(paper, 1).shared_out()
    wide = load_recipe(RECIPES / "paper/stage3.toml", ["engine.vllm.tensor_parallel=8"])
    with pytest.raises(ConfigError, match=r"^8 GPUs are too few: at least 9 .* or set cluster.colocate$"):
        planner(wide, 8).shared_out()
    with pytest.raises(ConfigError, match=r"take more, or leave \[\[engine\]\] out$"):
        planner(wide, 7).shared_out()


@pytest.mark.parametrize("settings", [("cluster.learners=8", "engine.vllm.count=8"), ("cluster.learners=8",), ()])
@pytest.mark.parametrize("more", [(), ("rollout.max_staleness_steps=1",), ("cluster.launcher=ray",)])
@pytest.mark.parametrize("gpus", [4, 8])
def test_a_plan_takes_turns_where_training_does(settings: tuple[str, ...], more: tuple[str, ...], gpus: int) -> None:
    """The documented recipe of eight learners and eight servers was planned as four and four without turns."""
    recipe = load_recipe(RECIPES / "7b-8gpu.toml", [*settings, *more])
    planned = planner(recipe, gpus, "h200").placement()
    turns = not more and gpus == recipe.cluster.learners
    assert planned.colocate == turns
    assert len(planned.learners) + len(planned.engines) == gpus * (1 + turns)
    if not more and (turns or recipe.cluster.learners + recipe.engine[0].count == gpus):
        machines = {f"m{n}": tuple(map(str, range(n, min(n + 8, gpus)))) for n in range(0, gpus, 8)}
        trained = place(recipe, shape_of(recipe.model), machines, 141e9, positions=recipe.longest_response)
        assert trained.colocate == turns and len(trained.learners) == len(planned.learners)


def test_the_papers_run_fits_its_gpus_and_takes_days_not_hours_or_months() -> None:
    made = plan("paper/stage3.toml", "mi300x", 64)
    assert not made.refusals
    assert 0.6 * 7 < made.hours / 24 < 1.4 * 7  # the paper: about a week
    assert made.stages[1].calls == pytest.approx(45_000, rel=0.05)


def test_disk_is_of_the_whole_run() -> None:
    small = partial(plan, "7b-8gpu.toml", "h100", 8, *SMALL)
    short, long = small("run.checkpoint_seconds=1e9"), small("run.checkpoint_seconds=0", "run.keep_checkpoints=3")
    checkpoint = (long.disk_bytes - short.disk_bytes) / 3
    rollouts = sum(stage.recorded_bytes * stage.steps for stage in short.stages)
    assert rollouts == pytest.approx(15.6 * sum(one.tokens * one.steps for one in short.stages if one.calls))
    assert short.disk_bytes == pytest.approx(len(short.stages) * checkpoint + rollouts) and checkpoint > 7e10


def test_what_matters_most_to_a_plan_is_how_long_answers_are() -> None:
    recipe = load_recipe(RECIPES / "7b-8gpu.toml", SMALL)
    made = planner(recipe, 8).weighed(Assumptions())
    assert max(made.matters.values()) == made.matters["length_share"] > 1


def test_what_does_not_fit_is_told_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(RECIPES / "paper/stage1.toml"), "--gpus", "2", "--gpu", "4090"]) == 4
    told = capsys.readouterr().out
    assert "does not fit: a learner needs" in told and "cluster.offload_optimizer" in told
    assert "does not fit: an engine needs 32 GB without its KV cache" in told
    assert run(["plan", str(RECIPES / "paper/stage1.toml"), "--gpu", "b2000"]) == 2


@pytest.mark.parametrize("table", [[], ["--placement"]])
def test_a_cache_that_holds_no_longest_attempt_does_not_fit(
    table: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Attempts that were longer were left out of the step, and hours printed for the others."""
    assert run(["plan", str(RECIPES / "7b-8gpu.toml"), *SMALL, "rollout.kv_tokens=5000", *table]) == 4
    told = capsys.readouterr().out
    assert "does not fit: rollout.kv_tokens 5000 is less than the 8193 tokens of the longest attempt" in told
    assert "hours" not in told


def test_a_gpu_is_named_or_described() -> None:
    assert gpu_named("4090") == replace(gpu_named("24:165:1010"), name="4090")
    for wrong in ("5060", "24:165", "24:165:nan", "24:0:1010", "24:165:inf", "1e300:1:1"):
        with pytest.raises(ConfigError, match="for instance 48:362:864"):
            gpu_named(wrong)


def test_of_a_machine_without_gpus_it_is_said_what_tells_more(capsys: pytest.CaptureFixture[str]) -> None:
    for without in (["--gpu", "cpu"], ["--gpus", "0"]):
        assert run(["plan", str(RECIPES / "7b-8gpu.toml"), *without]) == 2
        assert "a machine without GPUs rocstar train RECIPE --dry-run tells" in capsys.readouterr().err


def test_the_guide_names_every_gpu() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    assert [name for name in GPUS if not re.search(rf"\b{name}\b", guide)] == []


def test_a_small_cache_leaves_no_attempt_out_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache for the cap and hardly a prompt: attempts that would not fit were dropped."""
    simulated: list[int] = []
    real = forecast.simulate
    monkeypatch.setattr(forecast, "simulate", lambda work, *rest: simulated.append(len(work)) or real(work, *rest))
    plan("7b-8gpu.toml", "h100", 8, *SMALL, "rollout.kv_tokens=8200", length_share=0.9)
    assert set(simulated) == {16}, "two of four engines, so half of 8 x 4 attempts"


def test_a_plan_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    """It has the assumptions that published steps choose; the verb planned with another share of learning."""
    found = json_of(capsys, "plan", str(RECIPES / "7b-8gpu.toml"), *SMALL)
    assert found["engines"] == 4 and found["hours"] > 0 and found["assumptions"] == asdict(Assumptions())
    assert [process["gpus"] for process in found["placement"]["processes"]] == [[str(gpu)] for gpu in range(8)]
    assert run(["plan", str(RECIPES / "7b-8gpu.toml"), "--gpu", "h100", "--placement"]) == 0
    assert "\nvllm-3     machine 0  7             15.2" in capsys.readouterr().out
    assert run(["plan", str(RECIPES / "quickstart.toml"), "--gpus", "1", *SMALL]) == 0
    told = capsys.readouterr()
    assert "344.06K parameters" in told.out and "to train as planned: " not in told.err
    solved = "stage3: data.drop_solved_attempts 8, made at every problem before it, are not counted"
    assert {solved, "evaluations are not counted"} <= set(told.err.splitlines())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["cluster.colocate=true"], "cluster.learners=8 engine.vllm.count=8"),
        (["cluster.colocate=true", "cluster.learners=8"], "engine.vllm.count=8"),
        (["--gpus", "16"], "cluster.learners=8 engine.vllm.count=8"),
        (
            ["engine.vllm.count=1", "engine.vllm.url=http://there:80"],
            "cluster.learners=6 engine.vllm.count=2 engine.vllm.url=none",
        ),
        (["cluster.learners=12"], "cluster.learners=6 engine.vllm.count=2"),
        ([], None),
    ],
)
def test_a_plan_says_which_settings_train_as_planned(
    settings: list[str], said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """It named learners alone, nothing where engines alone differed, and nothing with --placement."""
    for table in ([], ["--placement"]) if "16" in settings else (["--placement"],):
        assert run(["plan", str(RECIPES / "7b-8gpu.toml"), *SMALL, "--gpu", "h100", *settings, *table]) == 0
        told = capsys.readouterr().err
        assert (f"to train as planned: {said}\n" in told) if said else "to train as planned" not in told
    keys = [setting for setting in settings if "=" in setting]
    trained = load_recipe(RECIPES / "7b-8gpu.toml", [*SMALL, *keys, *(said or "").split()])
    assert planner(trained, 16 if "16" in settings else 8).differences() is None


def test_more_gpus_longer_answers_and_overlap_do_what_they_should() -> None:
    whole = plan("7b-8gpu.toml", "h100", 8, *SMALL)
    assert plan("7b-8gpu.toml", "h100", 16, *SMALL).hours < whole.hours
    longer = plan("7b-8gpu.toml", "h100", 8, *SMALL, length_share=0.8)
    assert longer.hours > 1.3 * whole.hours  # the longest end at the cap in both
    assert longer.stages[0].tokens == pytest.approx(2 * whole.stages[0].tokens, rel=0.02)
    few = plan("7b-8gpu.toml", "h100", 8, *SMALL, "rollout.engine_rows=1")
    assert few.stages[0].rollout_seconds > 2 * whole.stages[0].rollout_seconds
    reference = plan("7b-8gpu.toml", "h100", 8, *SMALL, "learning.kl_coefficient=0.1").stages[0]
    assert reference.learning_seconds == pytest.approx(5 / 4 * whole.stages[0].learning_seconds)
    scored = plan("7b-8gpu.toml", "h100", 8, *SMALL, "learning.top_entropy_share=0.2").stages[0]
    assert scored.learning_seconds == pytest.approx(reference.learning_seconds)
    twice = plan("7b-8gpu.toml", "h100", 8, *SMALL, "learning.loss=gspo").stages[0]  # 8% of a forward pass, once more
    assert 1.01 < twice.learning_seconds / whole.stages[0].learning_seconds < 1.02
    assert plan("7b-8gpu.toml", "h100", 8, *SMALL, "rollout.max_staleness_steps=1").hours < whole.hours
    assert plan("7b-8gpu.toml", "h200", 8, *SMALL).kv_tokens > whole.kv_tokens
    apart, turns = (plan("7b-8gpu.toml", "h100", 8, *settings) for settings in ((), ("cluster.colocate=true",)))
    assert (turns.learners, turns.engines) == (8, 8) and 1.7 * turns.hours < apart.hours


def test_training_is_refused_on_gpus_that_cannot_hold_it_and_not_on_those_that_can() -> None:
    recipe, machines = load_recipe(RECIPES / "7b-8gpu.toml"), {"m": tuple(map(str, range(8)))}

    def placed(gpu: str) -> Placement:
        shape, memory = shape_of(recipe.model), gpu_named(gpu).memory_bytes
        return place(recipe, shape, machines, memory, positions=recipe.longest_response)

    placed("h200").refuse()
    with pytest.raises(ConfigError, match=r"a learner needs \d+ GB and a GPU here gives 22 GB; the largest part is"):
        placed("4090").refuse()


def test_each_engine_of_this_machine_takes_memory_for_a_model_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(RECIPES / "quickstart.toml", ["rollout.kv_tokens=1024"])
    two = recipe.model_copy(update={"engine": load_recipe(RECIPES / "7b-8gpu.toml").engine[:1]})
    shape = shape_of(ModelSection(hidden_size=1024, num_layers=10, num_heads=8, intermediate_size=4096))
    alone, more = (host_memory(one, shape, positions=256, problems={}, heldout=100, rows={}) for one in (recipe, two))
    assert more.bytes - alone.bytes > 4 * shape.parameters
    own = more.others["engines"] / two.engines_here - alone.always["the engine's weights"]
    assert own == pytest.approx(0.4e9 + alone.writing["keys and values"], rel=0.1)  # of two engines: 0.38 and 0.39
    adapted = recipe.model_copy(update={"model": ModelSection(lora_rank=1)})
    merged = host_memory(adapted, shape, positions=1, problems={"stage1": 300_000}, heldout=1, rows={})
    assert merged.always["problems"] > 1.5e8  # such a run takes 0.15 GB more than one of 30,000
    assert merged.run - sum(merged.always.values()) == 4 * shape.parameters  # an update of few tokens takes less
    monkeypatch.setattr("rocstar.parts.memory.host_bytes", lambda: int(alone.bytes + 1e8))
    refuse_here(alone)
    with pytest.raises(ConfigError, match=r"on CPUs the run takes up to \d+\.\d GB .* \d+\.\d GB of memory are"):
        refuse_here(more)


@pytest.mark.parametrize(
    ("name", "gpus", "said"),
    [
        ("quickstart.toml", 100_000_000, "100000000 learners are more than the"),
        ("paper/stage1.toml", 100_000, "engines are more than the"),
    ],
)
def test_gpus_that_would_have_nothing_to_do_are_refused(name: str, gpus: int, said: str) -> None:
    made = plan(name, "h200", gpus)
    assert any(said in refusal for refusal in made.refusals) and not made.stages


def test_epochs_are_planned_where_their_rows_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["plan", str(RECIPES / "paper/sft.toml"), "--gpus", "64", "--gpu", "mi300x", "--json"]
    run(command)
    told = capsys.readouterr()
    assert json.loads(told.out)["stages"][0]["steps"] == 0
    assert "the steps of epochs are not planned: " in told.err and "sft/rows.jsonl" in told.err
    Path("sft").mkdir()
    row = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
    Path("sft/rows.jsonl").write_text((json.dumps(row) + "\n") * 1000)
    run([*command, "stage.sft.sft.warmup_steps=1"])
    assert json.loads(capsys.readouterr().out)["stages"][0]["steps"] == 24  # 3 x 1,000 / 128


@pytest.mark.parametrize("share", [0.05, 0.8, 0.97])
def test_no_response_exceeds_its_cap_whatever_the_mean(share: float) -> None:
    work = synthetic_workload("even", problems=50, attempts=8, limit=1000, seed=0)
    found = with_mean(work, 1000 * share, prompt_tokens=90)
    assert fmean(attempt.response_tokens for attempt in found) == pytest.approx(1000 * share, rel=0.02)
    assert all(attempt.response_tokens <= 1000 + len(attempt.turns) for attempt in found)
    assert fmean(attempt.prompt_tokens for attempt in found) == pytest.approx(90, rel=0.02)
