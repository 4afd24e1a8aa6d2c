"""What a person may do wrong with `rocstar train RECIPE`; `--dry-run` finds all of it."""

from __future__ import annotations

from collections.abc import Sequence

from tests.clumsy.workplace import (
    BAD,
    PRETRAINED,
    RL_ONLY,
    TINY,
    Spoil,
    Start,
    folder,
    model_config,
    recipe,
    replaced,
    rows,
    start,
    text,
    without,
)
from tests.tiny_run import RECIPE, call, final, user


def train(name: str, arguments: Sequence[str], words: Sequence[str], spoil: Spoil = lambda place: None) -> Start:
    return start(name, ["train", *arguments], words, spoil)


RECIPES = [
    train("no such recipe", ["tny.toml"], ["there is no recipe tny.toml", "did you mean tiny.toml?"]),
    train("no recipe at all", ["rollout.max_turns=2"], ["give a recipe first"]),
    train(
        "UTF-16 recipe", BAD, ["bad.toml is not UTF-8", "save it as UTF-8"], text("bad.toml", RECIPE.encode("utf-16"))
    ),
    train("nothing to do", BAD, ["bad.toml has no [[stage]]"], text("bad.toml", "")),
    *(
        train(f"stage named {name!r}", BAD, [repr(name), "letters, digits, - _"], replaced('"cold"', f'"{name}"'))
        for name in ("a/b", "", "../../x", "x" * 51)
    ),
    train("a pool's recipe", ["pool.toml"], ["pool.toml", "unknown key"]),
]

VALUES = [
    train("huge rate", [*TINY, "sft.adamw_learning_rate=50"], ["sft.adamw_learning_rate = 50", "less than 1"]),
    train("half a turn", [*TINY, "rollout.max_turns=2.5"], ["rollout.max_turns = 2.5", "integer"]),
    train(
        "no attempts",
        [*TINY, "rollout.attempts_per_problem=0"],
        ["rollout.attempts_per_problem = 0", "greater than or equal to 1"],
    ),
    train("temperature 0 in training", [*TINY, "rollout.temperature=0"], ["rollout.temperature = 0", "greater than 0"]),
    train(
        "negative steps", [*TINY, "stage.stage1.steps=-1"], ["stage.stage1.steps = -1", "greater than or equal to 0"]
    ),
    train("unknown template", [*TINY, "rollout.template=papr"], ["'papr'", "did you mean 'paper'?"]),
    train("unknown verifier", [*TINY, "evaluate.verifier=boxd"], ["'boxd'", "did you mean 'boxed'?"]),
    train("unknown tool", [*TINY, "sandbox.tools=pyton"], ["'pyton'", "did you mean 'python'?"]),
    train("unknown source", [*TINY, "data.source=file"], ["'file'", "did you mean 'files'?"]),
    train("own task that is not there", [*TINY, "data.source=nowhere.tasks:Task"], ["nowhere"]),
    train("own verifier that is not there", [*TINY, "evaluate.verifier=nowhere.rewards:f"], ["nowhere"]),
    train("own tool that is not there", [*TINY, "sandbox.tools=nowhere.tools:T"], ["nowhere"]),
    train("own environment that is not there", [*TINY, "rollout.environment=nowhere.worlds:W"], ["nowhere"]),
    train("own loss that is not there", [*TINY, "learning.loss=nowhere.losses:l"], ["learning.loss", "nowhere"]),
    train("an advantage of another name", [*TINY, "learning.advantage=gae"], ["'otb', 'rloo' or package.module:name"]),
    train("a class that is no resampler", [*TINY, "resample.method=rocstar.types:Group"], ["should take (settings)"]),
    train(
        "unknown family",
        [*TINY, "data.source=arithmetic", 'data.families=["gdc"]', "sft.rows_file=none"],
        ["gdc", "gcd"],
    ),
    train("isolation of no such level", [*TINY, "sandbox.min_isolation=L9"], ["'L9'", "'L1', 'L2', 'L3' or 'L4'"]),
    train(
        "too little memory",
        [*TINY, "sandbox.memory_bytes=1000"],
        ["sandbox.memory_bytes = 1000", "greater than or equal"],
    ),
    train("run name with a slash", [*TINY, "run.name=a/b"], ["run.name = 'a/b'", "letters, digits and dashes"]),
    train("runs below a file", [*TINY, "run.folder=rows.jsonl/runs"], ["rows.jsonl/runs", "run.folder"]),
    train("--runs is a file", [*TINY, "--runs", "rows.jsonl"], ["rows.jsonl", "run.folder"]),
    train("heads that do not divide", [*TINY, "model.num_heads=3"], ["model.hidden_size 32", "model.num_heads 3"]),
    train(
        "key heads that do not divide", [*TINY, "model.num_heads=4", "model.num_kv_heads=3"], ["model.num_kv_heads 3"]
    ),
    train(
        "a cap longer than the model",
        [*TINY, "rollout.max_response_tokens=9000"],
        ["9000", "256", "model.max_positions"],
    ),
    train("cuda without a GPU", [*TINY, "model.device=cuda"], ["cuda", "model.device"]),
    train("more learners than rows", [*TINY, "cluster.learners=64"], ["64 learners", "lower cluster.learners"]),
    train("model template without a model", [*TINY, "rollout.template=model"], ["model", "model.path"]),
]

TOO_LARGE = [
    ("run.threads", 100000, "4096"),
    ("sandbox.slots", 100000, "4096"),
    ("sandbox.timeout_seconds", 1e9, "86400"),
    ("sandbox.cpu_seconds", 1e9, "86400"),
    ("sandbox.memory_bytes", 2**60, str(2**50)),
    ("model.num_layers", 100000, "1000"),
    ("model.hidden_size", 2**20, "65536"),
    ("model.max_positions", 2**40, str(2**24)),
]

LIMITS = [
    *(
        train(f"a huge {key}", [*TINY, f"{key}={value}"], [f"{key} = {value}", f"less than or equal to {most}"])
        for key, value, most in TOO_LARGE
    ),
    train(
        "a cache larger than memory",
        [*TINY, "model.device=cpu", "rollout.engine_rows=1000000000"],
        ["GB", "lower rollout.kv_tokens"],
    ),
    train(
        "a cache that holds no attempt",
        [*TINY, "rollout.kv_tokens=8"],
        ["rollout.kv_tokens 8 is less than", "longest attempt", "raise it"],
    ),
    train(
        "a cache of a pretrained model larger than memory",
        [*PRETRAINED, "model.device=cpu", "rollout.engine_rows=1000000000"],
        ["GB", "lower rollout.kv_tokens"],
        model_config(max_position_embeddings=512),
    ),
    train("an engine that is none", [*TINY, "engine.e.count=2"], ["the recipe has no engine 'e'", "there are none"]),
    train("a vocabulary without letters", [*TINY, "model.vocab_size=3"], ["model.vocab_size 3", "set it to at least"]),
    train("preload of no module", [*TINY, "sandbox.preload=nosuchmodule"], ["'nosuchmodule'", "take it out"]),
    train("preload of no name", [*TINY, "sandbox.preload=no such"], ["'no such'", "take it out"]),
    train("tool without a name", [*TINY, "rollout.tool_name="], ["rollout.tool_name", "letters, digits, - _"]),
    train("modules that are not there", [*TINY, "run.modules=/nonexist"], ["'/nonexist'", "correct the path"]),
    train("run named last", [*TINY, "run.name=last"], ["'last'", "take another"]),
    train("run named with a step", [*TINY, "run.name=a@3"], ["'a@3'", "take another"]),
    train("Ray for one learner", [*TINY, "cluster.launcher=ray"], ["cluster.learners is 1", "raise cluster.learners"]),
    train(
        "sandbox nodes without Ray",
        [*TINY, "cluster.sandbox_nodes=2"],
        ["cluster.sandbox_nodes 2", "set cluster.launcher to 'ray'"],
    ),
    train(
        "two places for programs",
        [*TINY, "cluster.launcher=ray", "cluster.sandbox_nodes=2", 'sandbox.urls=["http://a:1"]'],
        ["cluster.sandbox_nodes 2 and sandbox.urls", "leave one of them out"],
    ),
]

UNREAD = [
    train("a pool of files", [*TINY, "data.pool=5"], ["override 'data.pool=5'", "data.source is 'files'", "leave it"]),
    train(
        "families of files in a child",
        BAD,
        ["bad.toml line 3: data.families", "leave it out"],
        recipe('[data]\nfamilies = ["gcd"]'),
    ),
    train(
        "files for arithmetic",
        [*TINY, "data.source=arithmetic", "data.columns.question=q"],
        ["override 'data.columns.question=q'", "data.source is 'arithmetic'"],
    ),
    train(
        "files without a source",
        BAD,
        ["data.train_files is not read", "data.source is 'arithmetic'", "change data.source"],
        replaced('source = "files"', ""),
    ),
    train(
        "files for a stage of arithmetic",
        BAD,
        ["stage.stage1.data.max_problems is not read"],
        recipe('[[stage]]\nname = "stage1"\ndata.source = "arithmetic"\ndata.max_problems = 2'),
    ),
    train("a shape of a pretrained model", [*PRETRAINED, "model.num_layers=2"], ["model.path is 'model'", "leave it"]),
    train(
        "a shape beside a model",
        BAD,
        ["bad.toml line 4: model.rope_theta"],
        recipe('[model]\npath = "model"\nrope_theta = 10'),
    ),
    train(
        "a number to keep where all are kept",
        [*TINY, "resample.method=all", "resample.keep=3"],
        ["override 'resample.keep=3'", "resample.method is 'all'"],
    ),
    train("a floor of another method", [*TINY, "resample.method=uniform", "resample.failure_floor=0"], ["'uniform'"]),
    train("a weight that no draw looks at", [*TINY, "resample.method=all", "resample.format_weight=2"], ["'all'"]),
    train("a rate of another optimizer", [*TINY, "sft.optimizer=adamw", "sft.muon_learning_rate=0.1"], ["'adamw'"]),
    train("a threshold of no function", [*TINY, "evaluate.right_above=0.1"], ["evaluate.verifier is 'boxed'"]),
    train("a band around nothing", [*TINY, "end.truncated_band=0.1"], ["end.truncated_share is None"]),
    train(
        "attempts of the past for nothing",
        [*TINY, "stage.stage1.data.drop_solved_age=2"],
        ["data.drop_solved_attempts is None"],
    ),
    train(
        "a warm-up beyond the cold start",
        [*TINY, "stage.cold.steps=5", "sft.warmup_steps=6"],
        ["override 'sft.warmup_steps=6'", "stage cold ends after 5 updates", "raise stage.cold.steps"],
    ),
    train(
        "a warm-up beyond the stage",
        BAD,
        ["bad.toml line 6: stage.stage1.learning.warmup_steps is 50", "after"],
        recipe('[[stage]]\nname = "stage1"\nsteps = 2\n[stage.learning]\nwarmup_steps = 50'),
    ),
    train(
        "a floor that leaves no room",
        [*TINY, "resample.failure_floor=4"],
        ["resample.failure_floor 4", "resample.keep 4", "lower it"],
    ),
    train(
        "more updates than attempts",
        [*TINY, "learning.updates_per_step=1000"],
        ["learning.updates_per_step 1000", "8 attempts", "lower it"],
    ),
    train(
        "an attempt alone",
        [*TINY, "rollout.attempts_per_problem=1", "resample.method=all"],
        ["rollout.attempts_per_problem 1", "nothing to be compared with", "raise it"],
    ),
    *(
        train(f"a decay of all weights by {key}", [*TINY, f"{key}=1e5"], [f"{key} 100000", "erases", f"lower {key}"])
        for key in ("sft.weight_decay", "learning.weight_decay")
    ),
    train("a stage that is always solved", [*TINY, "end.solved_share=0"], ["end.solved_share = 0", "greater than 0"]),
    train(
        "a rhythm of no evaluation",
        [*TINY, "evaluate.problems=0", "evaluate.every_steps=2"],
        ["override 'evaluate.every_steps=2'", "evaluate.problems is 0"],
    ),
    train(
        "a second clip that stops learning",
        [*TINY, "learning.dual_clip=0.5"],
        ["learning.dual_clip 0.5", "0 for no bound"],
    ),
    train(
        "a verdict on tools without a turn for one",
        [*TINY, "evaluate.verifier=tool_output", "rollout.max_turns=1"],
        ["'tool_output'", "rollout.max_turns 1"],
    ),
    train(
        "as many copies",
        [*TINY, "evaluate.attempts=5", "evaluate.temperature=0"],
        ["evaluate: 5 attempts at temperature 0 are one attempt"],
    ),
    train(
        "draws without a choice", [*TINY, "rollout.top_k=1"], ["rollout.top_k 1", "all attempts at a problem are one"]
    ),
    train("turns for no tool", [*TINY, "sandbox.tools=[]"], ["rollout.max_turns 3", "set rollout.max_turns to 1"]),
    train(
        "replies of no tool",
        [*TINY, "rollout.max_turns=1", "rollout.feedback_max_chars=99"],
        ["override 'rollout.feedback_max_chars=99'", "rollout.max_turns is 1"],
    ),
    train(
        "a rhythm longer than any stage",
        [*TINY, "evaluate.every_steps=500"],
        ["override 'evaluate.every_steps=500'", "no RL stage has more than 4 steps"],
    ),
    train("minima of another method", [*TINY, "resample.min_positive=1"], ["resample.method is 'roc'", "leave it out"]),
    train(
        "data of rows from a file",
        BAD,
        ["bad.toml line 5: stage.cold.data.max_problems", "sft.rows_file is 'rows.jsonl'"],
        recipe('[[stage]]\nname = "cold"\n[stage.data]\nmax_problems = 2'),
    ),
]

FILES = [
    train(
        "file that is not there",
        [*TINY, "data.train_files=tran.jsonl"],
        ["tran.jsonl does not exist", "check the path"],
    ),
    train(
        "test file that is not there",
        [*TINY, "data.test_files=tst.jsonl"],
        ["tst.jsonl does not exist", "check the path"],
    ),
    train("no train files", [*TINY, "data.train_files=[]"], ["data.train_files is empty", "give at least one"]),
    train("a folder as file", TINY, ["train.jsonl", "directory"], folder("train.jsonl")),
    train("kind of file", [*TINY, "data.train_files=train.txt"], ["train.txt", ".jsonl"], text("train.txt", "a")),
    train(
        "gz that is none",
        [*TINY, "data.train_files=a.jsonl.gz"],
        ["a.jsonl.gz is not a whole gzip file", "drop the .gz"],
        text("a.jsonl.gz", '{"question": "a", "answer": "1"}\n'),
    ),
    train(
        "parquet that is none",
        [*TINY, "data.train_files=a.parquet"],
        ["a.parquet is not a parquet file"],
        text("a.parquet", "abc"),
    ),
    train(
        "UTF-16 rows",
        TINY,
        ["train.jsonl, line 1: not UTF-8", "convert"],
        text("train.jsonl", '{"question": "é"}\n'.encode("utf-16")),
    ),
    train(
        "not JSON",
        TINY,
        ["train.jsonl, line 2", "not JSON"],
        text("train.jsonl", '{"question": "a", "answer": "1"}\n{oops\n'),
    ),
    train(
        "one JSON array", TINY, ["train.jsonl, line 1", "one JSON object"], text("train.jsonl", '[{"question": "a"}]\n')
    ),
    train(
        "CSV of uneven rows",
        [*TINY, "data.train_files=a.csv"],
        ["a.csv, line 2", "quote cells"],
        text("a.csv", "question,answer\na,b,c\n"),
    ),
    train("empty file", TINY, ["train.jsonl has no rows", "at least one"], text("train.jsonl", "")),
    train(
        "wrong column",
        [*TINY, "data.columns.question=qestion"],
        ["qestion", "did you mean question?", "data.columns.question"],
    ),
    train(
        "answer missing",
        TINY,
        ['train.jsonl, line 1, field "answer"', "expected a text or a number"],
        rows("train.jsonl", {"question": "a", "answer": None}),
    ),
    train(
        "answer column missing",
        TINY,
        ['no field "answer"', "data.columns.answer"],
        rows("train.jsonl", {"question": "a"}),
    ),
    train("everything is held out", [*TINY, "data.train_files=test.jsonl"], ["stage stage1", "not held out"]),
    train("rows that are not there", [*TINY, "sft.rows_file=rws.jsonl"], ["rws.jsonl does not exist"]),
    train("a folder as rows", TINY, ["rows.jsonl", "directory"], folder("rows.jsonl")),
    train("no rows", TINY, ["rows.jsonl"], text("rows.jsonl", "")),
    train(
        "rows of unknown roles",
        TINY,
        ["rows.jsonl, line 1", "role"],
        rows("rows.jsonl", {"messages": [{"role": "human", "content": "hi"}, final(3)]}),
    ),
    train("rows without messages", TINY, ["rows.jsonl, line 1", "messages"], rows("rows.jsonl", {"text": "hi"})),
    train(
        "rows with an unanswered call",
        TINY,
        ["rows.jsonl, line 1"],
        rows("rows.jsonl", {"messages": [user(1), call("1"), final(1)]}),
    ),
    train("no demonstrations", [*TINY, "sft.rows_file=none"], ["demonstrations", "set sft.rows_file"]),
]

MODELS = [
    train(
        "model that is not there",
        [*TINY, "model.path=./nowhere"],
        ["nowhere is not a model folder", "give a Hugging Face folder"],
    ),
    train("a folder that is no model", [*TINY, "model.path=runs"], ["runs is not a model folder"]),
    train("a file as model", [*TINY, "model.path=tiny.toml"], ["tiny.toml is not a model folder"]),
    train("broken config.json", PRETRAINED, ["config.json cannot be read"], text("model/config.json", "{")),
    train(
        "no decoder",
        PRETRAINED,
        ["config.json lacks", "max_position_embeddings"],
        model_config(max_position_embeddings=None),
    ),
    *(
        train(f"a model with {word}", PRETRAINED, ["of type qwen3", word, "take one of those"], model_config(**changes))
        for word, changes in {
            "kv_lora_rank 512": {"kv_lora_rank": 512},  # DeepSeek-V3
            "values of another width": {"v_head_dim": 999},
            "indexed_attention": {"layer_types": ["indexed_attention", "full_attention"]},  # DeepSeek-V3.2
            "attn_logit_softcapping": {"attn_logit_softcapping": 50.0},  # Gemma 2
            "alibi": {"alibi": True},
        }.items()
    ),
    train(
        "a model of the shape of GPT-2",
        PRETRAINED,
        ["of type gpt2", "Qwen2.5, Qwen3 and Llama"],
        model_config(model_type="gpt2", max_position_embeddings=None, n_positions=1024),
    ),
    train("no tokenizer", PRETRAINED, ["no tokenizer.json"], without("model/tokenizer.json")),
    train("broken tokenizer", PRETRAINED, ["tokenizer.json"], text("model/tokenizer.json", "{}")),
    train(
        "another model's tokenizer",
        PRETRAINED,
        ["tokenizer in model", "do not belong together"],
        model_config(vocab_size=151936),
    ),
    train("a tokenizer larger than the model", PRETRAINED, ["do not belong together"], model_config(vocab_size=20)),
    train("no weights", PRETRAINED, ["model", "safetensors"], without("model/model.safetensors")),
    train(
        "a cap that the model cannot hold",
        [*PRETRAINED, "rollout.max_response_tokens=300"],
        ["300", "256", "set it to"],
    ),
    train(
        "a template whose stop the tokenizer lacks",
        PRETRAINED,
        ["<|im_end|>"],
        lambda place: (place / "model" / "tokenizer.json").write_text(
            (place / "model" / "tokenizer.json").read_text().replace("<|im_end|>", "<|other|>")
        ),
    ),
    train("random weights for RL", BAD, ["sft stage first", "model.path"], text("bad.toml", RL_ONLY)),
]

TRAINING = [*RECIPES, *VALUES, *LIMITS, *UNREAD, *FILES, *MODELS]
