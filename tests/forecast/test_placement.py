"""Which process takes which GPU, with GPUs that are only numbers: nothing is taken twice, everything fits or is refused
in words, and what is started is what the table says."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from rocstar import cluster
from rocstar.config.recipe import load_recipe
from rocstar.config.sections import Recipe
from rocstar.engines.process import EngineSettings, ProcessEngine
from rocstar.engines.vllm import VllmEngine
from rocstar.engines.vllm_server import VllmServer, VllmSettings, _options
from rocstar.errors import ConfigError
from rocstar.parts import placement
from rocstar.parts.build import named_engines
from rocstar.parts.memory import moments
from rocstar.parts.placement import EMBEDDED, Machines, Placement, place, placed_here
from rocstar.parts.shape import PUBLISHED, Shape, shape_of
from tests.forecast.test_plan import planner

RECIPES = Path(__file__).parent.parent.parent / "recipes"
NAMES = sorted(str(file.relative_to(RECIPES)) for file in RECIPES.rglob("*.toml") if file.parent.name != "data")
GB = 1e9
SMALL = PUBLISHED["Qwen/Qwen2.5-1.5B-Instruct"]


def machines(count: int, each: int = 8) -> Machines:
    found = [range(min(each, count - first)) for first in range(0, count, each)]
    return {f"m{number}": tuple(map(str, gpus)) for number, gpus in enumerate(found)}


def shape_for(recipe: Recipe) -> Shape:
    """Where nobody knows the model, as SmolLM2's folder that is not here, a small one."""
    return shape_of(recipe.model) if recipe.model.path is None or recipe.model.path in PUBLISHED else SMALL


def check(table: Placement) -> None:
    """No GPU is taken twice but by the embedded engine and, where they take turns, by a learner and an engine; each
    GPU's bytes are at most what it has, in the learners' turn and in the engines'."""
    for (machine, gpu), processes in table.taken().items():
        learners = [process for process in processes if process.kind == "learner"]
        others = [process for process in processes if process.kind not in ("learner", EMBEDDED)]
        one_of_each = len(learners) <= 1 and len(others) <= 1
        assert one_of_each and (table.colocate or len(learners + others) <= 1), f"GPU {gpu} of {machine}: {processes}"
        turns = [learners, [process for process in processes if process not in learners]] if table.colocate else []
        for computing in turns or [processes]:
            asleep = sum(process.asleep for process in processes if process not in computing)
            taken = sum(process.total for process in computing) + asleep
            assert table.refusals or taken <= table.usable * (1 + 1e-9)
    for process in table.processes:
        assert len(process.gpus) == process.needs == len(set(process.gpus))
    assert len({process.name for process in table.processes}) == len(table.processes)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_fits_or_is_refused_in_words(name: str) -> None:
    """As it stands, and in its own proportion on so many GPUs; 16: two machines."""
    recipe = load_recipe(RECIPES / name)
    shape = shape_for(recipe)
    for gpus, memory in product([1, 2, 4, 8, 16], [24, 80, 141]):
        for share in (False, True):
            try:
                asked = planner(recipe, gpus).shared_out() if share else recipe
                table = place(asked, shape, machines(gpus), memory * GB, positions=recipe.longest_response)
            except ConfigError as error:
                assert re.search(r"need \d+ GPUs and there are \d|(GPU is|GPUs are) too few", str(error))
            else:
                check(table)
                assert all(re.search(r"\d", told) for told in table.refusals)


@pytest.mark.parametrize(
    ("name", "gpus", "memory"),
    [("7b-8gpu.toml", 8, 80), ("release.toml", 8, 80), ("paper/stage3.toml", 64, 192), ("paper/stage3.toml", 64, 141)],
)
def test_recipes_fit_what_they_say_they_are_for(name: str, gpus: int, memory: int) -> None:
    """release.toml was refused on 8 H100 by rocstar's own plan, and both named GPUs 0 to 3 twice."""
    recipe = load_recipe(RECIPES / name)
    table = place(recipe, shape_for(recipe), machines(gpus), memory * GB, positions=recipe.longest_response)
    check(table)
    assert not table.refusals and all(table.taken().values())


def test_adapters_fit_where_all_weights_do_not() -> None:
    """1.5B on one card of 24 GB; what is told of a learner is what its adapters and its frozen weights take."""
    adapted = load_recipe(RECIPES / "1.5b-1gpu.toml")
    whole = load_recipe(RECIPES / "1.5b-1gpu.toml", ["model.lora_rank=0"])
    few, all_ = (place(one, SMALL, machines(1), 24 * GB, positions=4096) for one in (adapted, whole))
    check(few)
    assert not few.refusals and "model.lora_rank" in all_.refusals[0]
    trained, mine = SMALL.trained(adapted.model), few["learner-0"].bytes
    assert trained == 28 * 32 * (2 * 3072 + 2 * 1792 + 3 * 10496) and SMALL.trained(whole.model) == SMALL.parameters
    assert (mine["gradients"], mine["moments"]) == (4 * trained, 8 * trained)
    assert mine["weights"] == 2 * SMALL.parameters + 6 * trained  # in bf16; adapters in fp32, and their copies
    named = adapted.model.model_copy(update={"lora_targets": ["q_proj", "down_proj"]})
    assert SMALL.trained(named) == 28 * 32 * (3072 + 10496)
    cluster = adapted.cluster.model_copy(update={"learners": 2})
    both = place(adapted.model_copy(update={"cluster": cluster}), SMALL, machines(2), 24 * GB)["learner-0"]
    assert both.bytes["gathered head"] == 2 * SMALL.hidden * SMALL.vocabulary and both.bytes["gradients"] == 2 * trained


def recipe(learners: int = 1, *engines: Mapping[str, Any], **changes: Any) -> Recipe:
    base = load_recipe(RECIPES / "quickstart.toml")
    cluster = base.cluster.model_copy(update={"learners": learners, **changes})
    entries = Recipe.model_validate({"engine": list(engines)}).engine
    return base.model_copy(update={"engine": entries, "cluster": cluster})


@settings(max_examples=30)
@given(st.data())
def test_whatever_is_asked_for_fits_or_is_refused(data: st.DataObject) -> None:
    draw = data.draw
    counts, several = st.integers(1, 6), st.sampled_from([1, 2, 4])
    engines = [
        {"name": f"e{n}", "kind": "vllm", "count": draw(counts), "tensor_parallel": draw(several)}
        if draw(st.booleans())
        else {"name": f"e{n}", "kind": "torch", "count": draw(counts)}
        for n in range(draw(st.integers(0, 3)))
    ]
    turns = draw(st.sampled_from([None, True, False]))
    asked = recipe(draw(st.integers(1, 8)), *engines, offload_optimizer=draw(st.booleans()), colocate=turns)
    kv_tokens = draw(st.none() | st.integers(1000, 2_000_000))
    asked = asked.model_copy(update={"rollout": asked.rollout.model_copy(update={"kv_tokens": kv_tokens})})
    there = machines(draw(st.integers(1, 24)), draw(st.sampled_from([1, 4, 8])))
    shape = draw(st.sampled_from(list(PUBLISHED.values())))
    try:
        table = place(asked, shape, there, draw(st.sampled_from([24, 80, 141])) * GB, learns=draw(st.booleans()))
    except ConfigError as error:
        assert re.search("GPUs and there are|takes GPUs of one machine", str(error))
    else:
        check(table)
        for engine in table.engines:
            assert table.refusals or kv_tokens is None or engine.kv_tokens == kv_tokens


@pytest.mark.parametrize("memory", [24, 141])
@pytest.mark.parametrize("gpus", [1, 4, 16])
def test_learners_and_engines_take_turns_where_gpus_are_as_many_as_learners(gpus: int, memory: int) -> None:
    """Every GPU has one of each; the cache has what the learner leaves asleep. 16: two machines of eight."""
    asked = recipe(gpus, {"name": "v", "kind": "vllm", "count": gpus})
    table, forced = (
        place(one, SMALL, machines(gpus), memory * GB)
        for one in (asked, recipe(gpus, {"name": "v", "kind": "vllm", "count": gpus}, colocate=True))
    )
    assert table == forced and table.colocate and all(len(both) == 2 for both in table.taken().values())
    check(table)
    learner, engine = table["learner-0"], table["v-0"]
    assert learner.asleep == pytest.approx(0.6 * GB + SMALL.parameters * 12 / gpus), "fp32 weights and two moments"
    assert bool(table.refusals) == ((gpus, memory) == (1, 24)) and engine.asleep == 0.6 * GB
    assert table.refusals or engine.total == pytest.approx(table.usable - learner.asleep, rel=1e-3)
    assert "they take turns: asleep learner-0 keeps" in table.table()
    with pytest.raises(ConfigError, match=f"need {2 * gpus} GPUs and there are"):
        place(recipe(gpus, *asked.model_dump()["engine"], colocate=False), SMALL, machines(gpus), memory * GB)


def test_overlap_and_servers_that_run_already_take_no_turns() -> None:
    stale = load_recipe(RECIPES / "7b-8gpu.toml", ["rollout.max_staleness_steps=1", "cluster.learners=8"])
    with pytest.raises(ConfigError, match="need 12 GPUs and there are 8"):
        place(stale, shape_of(stale.model), machines(8), 80 * GB)
    told = "cluster.colocate has engines sleep while learners compute and rollout.max_staleness_steps 1 has them write"
    with pytest.raises(ConfigError, match=told):
        load_recipe(RECIPES / "7b-8gpu.toml", ["rollout.max_staleness_steps=1", "cluster.colocate=true"])
    away = ["engine.vllm.url=http://there:8000", "engine.vllm.count=1", "cluster.learners=8"]
    with pytest.raises(ConfigError, match=r"engine\.vllm\.url names one that runs already; leave one of them out"):
        load_recipe(RECIPES / "7b-8gpu.toml", [*away, "cluster.colocate=true"])
    theirs = load_recipe(RECIPES / "7b-8gpu.toml", away)
    table = place(theirs, shape_of(theirs.model), machines(8), 80 * GB)
    assert not table.colocate and len(table.learners) == 8, "the run would have sent somebody's server to sleep"


def test_a_cache_has_what_is_left_unless_less_is_asked_for() -> None:
    """Unset, it was forced to engine_rows sequences of full length: 135 GB for 7B."""
    seven = load_recipe(RECIPES / "7b-8gpu.toml")

    def cache(**rollout: Any) -> Placement:
        asked = seven.model_copy(update={"rollout": seven.rollout.model_copy(update=rollout)})
        return place(asked, shape_of(asked.model), machines(8), 80 * GB, positions=8192)

    left, less = cache()["vllm-0"], cache(kv_tokens=100_000)["vllm-0"]
    assert left.total == pytest.approx(0.92 * 80 * GB, rel=1e-4) and less.kv_tokens == 100_000
    assert left.bytes["KV cache"] < 80 * GB < 256 * 8192 * shape_of(seven.model).kv_bytes(2)
    (told,) = cache(kv_tokens=10**7).refusals
    assert re.search(r"KV cache would hold \d[\d,]+ tokens .* less than rollout.kv_tokens 10000000", told)
    assert told.endswith("take GPUs with more memory, engine.NAME.tensor_parallel or a lower rollout.kv_tokens")


def test_what_is_started_is_what_the_table_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under CUDA_VISIBLE_DEVICES=4,5,6,7 servers went to GPU 0; server n and learner n took the same GPU."""
    monkeypatch.setenv("ROCSTAR_VLLM_PYTHON", sys.executable)
    asked = recipe(1, {"name": "v", "kind": "vllm", "tensor_parallel": 2}, {"name": "t", "kind": "torch"})
    table = place(asked, SMALL, {"here": ("4", "5", "6", "7")}, 24 * GB)
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128}'
    )
    made = EngineSettings(
        folder=str(tmp_path), device="cuda", dtype="bfloat16", rows=8, positions=512, vocab_size=9, kv_tokens=None
    )
    engines = named_engines(asked.engine, made, tmp_path, VllmServer.start, table)
    with pytest.raises(ConfigError, match=r"^rollout.kv_tokens 511 is less than the 512 tokens of the longest attempt"):
        named_engines(asked.engine, with_fields(made, kv_tokens=511), tmp_path, VllmServer.start, table)
    vllm, torch = engines["v-0"], engines["t-0"]
    shared = place(recipe(2, *asked.model_dump()["engine"][:1]), SMALL, {"here": ("4", "5")}, 24 * GB)
    turns = named_engines(asked.engine[:1], made, tmp_path, VllmServer.start, shared)["v-0"]
    assert isinstance(turns, VllmEngine) and isinstance(turns._place, VllmSettings)
    assert turns._place.gpus == ("4", "5") and "--enable-sleep-mode" in _options(turns._place, 1)
    assert isinstance(vllm, VllmEngine) and isinstance(torch, ProcessEngine) and isinstance(vllm._place, VllmSettings)
    assert table.local_ranks == [0] and table["learner-0"].gpus == ("4",)
    assert vllm._place.gpus == ("5", "6") == table["v-0"].gpus
    assert torch._settings.gpus == ("7",)
    assert "--enable-sleep-mode" not in _options(vllm._place, 1)
    options = dict(option[2:].split("=", 1) for option in _options(vllm._place, 1) if "=" in option)
    assert options["tensor-parallel-size"] == "2"
    assert float(options["gpu-memory-utilization"]) == pytest.approx(table["v-0"].total / (24 * GB), abs=1e-3)
    block = 2 * 28 * 1 * 128 * 2 * 16  # one of the two key heads on each GPU
    assert abs(int(options["kv-cache-memory-bytes"]) - table["v-0"].bytes["KV cache"]) <= block


def test_ranks_take_the_gpus_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = pytest.importorskip("rocstar.learning.ranks")
    begun: list[str] = []

    class Alive:
        def ended(self, seconds: float) -> None:
            return None

    def begin(variables: Mapping[str, str]) -> Alive:
        begun.append(variables["LOCAL_RANK"])
        return Alive()

    def joined(environment: Mapping[str, str], *rest: Any, **more: Any) -> Any:
        begun.insert(0, environment["LOCAL_RANK"])
        return ranks.Ranks()

    monkeypatch.setattr(cluster.RankProcess, "begin", begin)
    monkeypatch.setattr(ranks, "join", joined)
    table = place(recipe(3, {"name": "v", "kind": "vllm"}), SMALL, {"here": ("7", "2", "5", "1")}, 80 * GB)
    cluster.start_ranks(recipe(3).cluster, recipe().model, {}, table.local_ranks)
    assert begun == ["0", "1", "2"] and [one.gpus for one in table.processes] == [("7",), ("2",), ("5",), ("1",)]


def test_more_learners_than_gpus_are_refused_with_the_numbers() -> None:
    """Rank 0 waited for them for 30 minutes without a word."""
    with pytest.raises(ConfigError, match=r"^cluster.learners 8 need 8 GPUs and there are 4 on m0; lower one of them"):
        place(recipe(8), SMALL, machines(4), 80 * GB)
    wide = recipe(1, {"name": "v", "kind": "vllm", "count": 4, "tensor_parallel": 2})
    told = r"cluster.learners 1 and engine.v.count 4 x tensor_parallel 2 need 9 GPUs and there are 8 on m0"
    with pytest.raises(ConfigError, match=told):
        place(wide, SMALL, machines(8), 80 * GB)
    with pytest.raises(ConfigError, match=r"cluster.learners 4 need 4 GPUs and there are 2 here;"):
        place(recipe(4), SMALL, {"here": ("a", "b")}, 80 * GB)


def test_two_machines_of_eight_are_counted_as_ray_counts_them() -> None:
    paper = load_recipe(RECIPES / "paper/stage3.toml", ["cluster.learners=8", "engine.vllm.count=4"])
    wide = planner(paper, 12).shared_out().model_copy(update={"cluster": paper.cluster})
    table = place(wide, shape_of(wide.model), machines(16), 141 * GB, positions=20480)
    check(table)
    assert {process.machine for process in table.learners} == {"m0"} != {process.machine for process in table.servers}
    odd = recipe(3, {"name": "v", "kind": "vllm", "count": 2, "tensor_parallel": 4}, launcher="ray")
    split = place(odd, SMALL, machines(8, each=4) | {"m2": ("0", "1", "2", "3")}, 80 * GB)
    assert [process.machine for process in split.servers] == ["m1", "m2"], "one server is on one machine"
    with pytest.raises(ConfigError, match="need 11 GPUs and there are 4 on m0 and 4 on m1"):
        split.on(machines(8, each=4))
    with pytest.raises(ConfigError, match="Ray keeps no GPU for engines of kind 'torch'"):
        place(recipe(1, {"name": "t", "kind": "torch"}, launcher="ray"), SMALL, machines(8), 80 * GB)


def test_heads_that_gpus_cannot_share_are_refused() -> None:
    table = place(recipe(1, {"name": "v", "kind": "vllm", "tensor_parallel": 5}), SMALL, machines(8), 80 * GB)
    assert table.refusals[0].startswith("engine.v.tensor_parallel 5 cannot share the model's 12 attention heads")


def test_an_engine_asleep_takes_nothing_from_a_learners_turn() -> None:
    table = place(recipe(), SMALL, machines(1), 80 * GB, positions=100)
    learner, engine = table["learner-0"], table[EMBEDDED]
    assert table.colocate and engine.bytes["weights"] == 2 * SMALL.parameters and engine.asleep == 0
    tight = learner.total / (1 - placement.LEFT_FREE) + 1e6
    assert not place(recipe(), SMALL, machines(1), tight, positions=100).refusals


@pytest.mark.parametrize("gpus", [8, 32])
def test_a_server_over_more_gpus_than_a_machine_has_is_refused_at_once(gpus: int) -> None:
    """32 GPUs in four machines were told to be too few for the 17 that are needed."""
    wide = recipe(1, {"name": "v", "kind": "vllm", "tensor_parallel": 16})
    told = r"^engine.v.tensor_parallel 16 takes GPUs of one machine, and none has more than 8; lower it$"
    with pytest.raises(ConfigError, match=told):
        place(wide, SMALL, machines(gpus), 80 * GB)
    with pytest.raises(ConfigError, match=told):
        planner(wide, gpus).shared_out()


def test_weights_that_fill_a_gpu_are_told_and_not_a_cache_of_no_tokens() -> None:
    big = PUBLISHED["Qwen/Qwen3-14B-Base"]
    (told,) = place(recipe(1, {"name": "v", "kind": "vllm"}), big, machines(2), 24 * GB, learns=False).refusals
    assert told == (
        "an engine needs 32 GB without its KV cache and a GPU here gives 22 GB; take GPUs with more memory or "
        "engine.NAME.tensor_parallel"
    )
    (told,) = place(recipe(), big, machines(1), 24 * GB, learns=False).refusals
    assert told.endswith("take GPUs with more memory or an [[engine]] of kind 'vllm' with tensor_parallel")


def test_a_learner_is_told_to_take_only_what_it_does_not_have_and_what_helps() -> None:
    sparing = ["cluster.learners=1", "cluster.offload_optimizer=true", "model.lora_rank=8"]
    asked = [
        load_recipe(RECIPES / "7b-8gpu.toml", [*settings, "learning.tokens_per_microbatch=4096"])
        for settings in ([], sparing, [*sparing, "rollout.max_response_tokens=1024"])
    ]
    tables = [place(one, shape_of(one.model), machines(8), 5 * GB, positions=8192) for one in asked]
    none, most, long = (table.refusals[0].rpartition(": take ")[2] for table in tables)
    anyway, cap = "GPUs with more memory", "a lower rollout.max_response_tokens"
    assert asked[0].model.gradient_checkpointing
    half = 'moments_dtype = "bfloat16"'
    assert none == f"more GPUs, {anyway}, {half}, cluster.offload_optimizer, model.lora_rank or {cap}"
    assert most == f"{anyway} or {cap}", "what is offloaded is not on more GPUs either"
    assert long == f"{anyway} or smaller learning.tokens_per_microbatch"


def test_gpus_that_would_wait_or_do_nothing_are_named() -> None:
    """Eight learners and no [[engine]]: seven GPUs waited while one wrote, and no word was said."""
    (told,) = place(recipe(8), SMALL, machines(8), 80 * GB).notes()
    assert "one engine on GPU 0 writes all attempts while the other 7 learners' GPUs wait" in told
    (told,) = place(recipe(2), SMALL, machines(2), 80 * GB).notes()
    assert "writes all attempts while the other learner's GPU waits; give" in told
    (told,) = place(recipe(1), SMALL, machines(3), 80 * GB).notes()
    assert told.startswith("warning: GPU 1, 2 has nothing to do")


def test_gpus_that_do_nothing_in_one_of_the_turns_are_counted() -> None:
    """Eight learners and four servers in turns: four GPUs waited for attempts, and no word was said."""
    few = {"name": "v", "kind": "vllm", "count": 4}
    (told,) = place(recipe(8, few), SMALL, machines(8), 80 * GB).notes()
    assert told == "warning: 4 of 8 GPUs do nothing while attempts are written; raise count of an [[engine]]"
    (told,) = place(recipe(3, few, colocate=True), SMALL, machines(4), 80 * GB).notes()
    assert told == "warning: 1 of 4 GPUs does nothing while learners compute; raise cluster.learners"
    assert not list(place(recipe(4, few, colocate=True), SMALL, machines(4), 80 * GB).notes())
    assert not list(place(recipe(4, few), SMALL, machines(8), 80 * GB).notes())


def test_the_gpus_that_this_process_sees_are_placed_and_the_table_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_gpus_here", lambda device: (("4", "6"), 24 * GB))
    table = placed_here(recipe(1, {"name": "v", "kind": "vllm"}), None, 512).refuse()
    assert [process.gpus for process in table.processes] == [("4",), ("6",)]
    lines = table.table().splitlines()
    assert lines[0].split()[:3] == ["process", "machine", "GPU"] and len(lines) == 4
    assert lines[1].split()[:3] == ["learner-0", "here", "4"] and lines[2].split()[:3] == ["v-0", "here", "6"]
    monkeypatch.setattr(placement, "_gpus_here", lambda device: ((), 0.0))
    on_cpus = placed_here(recipe(2, {"name": "v", "kind": "vllm"}), None, 512)
    assert not on_cpus.gpu_bytes and on_cpus["v-0"].kv_tokens is None and on_cpus.local_ranks == [0, 1]


def test_torchrun_says_how_many_learners_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(placement, "_gpus_here", lambda device: (tuple("01234567"), 80 * GB))
    table = placed_here(recipe(1, {"name": "v", "kind": "vllm", "count": 4}), None, 512)
    assert [len(table.learners), table["v-0"].gpus] == [4, ("4",)]
    alone = place(recipe(4), shape_of(recipe().model), machines(8), 80 * GB)
    assert table["learner-0"].bytes["moments"] == pytest.approx(alone["learner-0"].bytes["moments"] / 4)


def test_moments_in_bf16_take_half_and_what_muon_keeps_does_not() -> None:
    seven, shape = RECIPES / "7b-8gpu.toml", PUBLISHED["Qwen/Qwen2.5-7B-Instruct"]
    tables = [
        place(load_recipe(seven, [f"learning.moments_dtype={dtype}"]), shape, machines(8), 80 * GB)
        for dtype in ("float32", "bfloat16")
    ]
    fine, coarse = (table["learner-0"] for table in tables)
    assert fine.bytes["moments"] == 2 * coarse.bytes["moments"] == 8 * shape.parameters / 4
    assert fine.asleep - coarse.asleep == fine.total - coarse.total == shape.parameters
    quick = shape_of(load_recipe(RECIPES / "quickstart.toml").model)
    both = ["learning.moments_dtype=bfloat16", "sft.moments_dtype=bfloat16"]
    alone = ["learning.moments_dtype=bfloat16", "sft.moments_dtype=float32", "sft.optimizer=adamw"]
    for chosen, bytes_each in ((both, 4), (alone, 8), ([*alone, "sft.optimizer=muon"], 0)):
        asked = load_recipe(RECIPES / "quickstart.toml", chosen)
        found = moments(asked.stage, quick, asked.model)
        with_muon = 8 * quick.parameters - 4 * quick.matrices
        assert found == (bytes_each * quick.parameters or with_muon)


def test_a_gathered_head_and_what_is_offloaded_are_counted() -> None:
    """4.4 GB at 7B and 6.2 GB at 14B were left out."""
    seven = load_recipe(RECIPES / "7b-8gpu.toml")
    parts = place(seven, shape_of(seven.model), machines(8), 80 * GB)["learner-0"].bytes
    assert parts["gathered head"] == pytest.approx(4.36 * GB, rel=0.01)
    light = seven.model_copy(update={"cluster": seven.cluster.model_copy(update={"offload_optimizer": True})})
    spared = place(light, shape_of(seven.model), machines(8), 80 * GB)["learner-0"].bytes
    gone = sum(parts.values()) - sum(spared.values())
    assert gone == pytest.approx(16 * shape_of(seven.model).parameters / 4), "FSDP2 offloads all of it"
    assert replace(SMALL, kv_heads=1).kv_bytes(2) * 2 == SMALL.kv_bytes(2)
