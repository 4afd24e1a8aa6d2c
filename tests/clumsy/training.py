"""What a person may do wrong with `rocstar train RECIPE`; `--dry-run` finds all of it."""

from __future__ import annotations

from tests.clumsy.workplace import (
    RL_ONLY,
    Spoil,
    Start,
    cut,
    folder,
    given,
    in_integers,
    model_config,
    recipe,
    replaced,
    rows,
    sharded,
    spoilt,
    text,
    without,
)
from tests.tiny_run import RECIPE, call, final, user


def tiny(settings: str, words: str) -> Start:
    return given(f"train tiny.toml {settings}", words)


def bad(name: str, words: str, spoil: Spoil) -> Start:
    return spoilt(name, "train bad.toml", words, spoil)


def pretrained(name: str, words: str, spoil: Spoil) -> Start:
    return spoilt(name, "train pretrained.toml", words, spoil)


def file(name: str, words: str, spoil: Spoil) -> Start:
    return spoilt(name, "train tiny.toml", words, spoil)


def problems(path: str, name: str, words: str, content: str) -> Start:
    """The recipe's problems are in a file that holds this."""
    return spoilt(name, f"train tiny.toml data.train_files={path}", words, text(path, content))


RECIPES = [
    given("train tny.toml", "there is no recipe tny.toml ... did you mean tiny.toml?"),
    given("train rollout.max_turns=2", "give a recipe first"),
    bad("UTF-16 recipe", "bad.toml is not UTF-8 ... save it as UTF-8", text("bad.toml", RECIPE.encode("utf-16"))),
    bad("nothing to do", "bad.toml has no [[stage]]", text("bad.toml", "")),
    *(
        bad(f"stage named {name!r}", f"{name!r} ... letters, digits, - _", replaced('"cold"', f'"{name}"'))
        for name in ("a/b", "", "x" * 51)
    ),
]

VALUES = [
    tiny("sft.adamw_learning_rate=50", "sft.adamw_learning_rate = 50 ... less than 1"),
    tiny("rollout.template=papr", "'papr' ... did you mean 'paper'?"),
    tiny("evaluate.verifier=boxd", "'boxd' ... did you mean 'boxed'?"),
    tiny("sandbox.tools=pyton", "'pyton' ... did you mean 'python'?"),
    tiny("data.source=file", "'file' ... did you mean 'files'?"),
    tiny("data.source=nowhere.tasks:Task", "nowhere"),
    tiny("evaluate.verifier=nowhere.rewards:f", "nowhere"),
    tiny("sandbox.tools=nowhere.tools:T", "nowhere"),
    tiny("rollout.environment=nowhere.worlds:W", "nowhere"),
    tiny("learning.loss=nowhere.losses:l", "learning.loss ... nowhere"),
    tiny("learning.advantage=gae", "'grpo', 'rloo' or package.module:name"),
    tiny("resample.method=rocstar.types:Group", "should take (settings)"),
    tiny("data.source=arithmetic 'data.families=[\"gdc\"]' sft.rows_file=none", "gdc ... gcd"),
    tiny("sandbox.min_isolation=L9", "'L9' ... 'L1', 'L2' or 'L3'"),
    tiny("run.name=a/b", "run.name = 'a/b' ... letters, digits and dashes"),
    tiny("run.folder=rows.jsonl/runs", "rows.jsonl/runs ... run.folder"),
    tiny("--runs rows.jsonl", "rows.jsonl ... run.folder"),
    tiny("model.num_heads=3", "model.hidden_size 32 ... model.num_heads 3"),
    tiny("model.num_heads=4 model.num_kv_heads=3", "model.num_kv_heads 3"),
    tiny("rollout.max_response_tokens=9000", "9000 ... 256 ... model.max_positions"),
    tiny("model.device=cuda", "cuda ... model.device"),
    tiny("cluster.learners=64", "64 learners ... lower cluster.learners"),
    tiny("rollout.template=model", "model ... model.path"),
]

LIMITS = [
    tiny(f"model.max_positions={2**40}", f"model.max_positions = {2**40} ... less than or equal to {2**24}"),
    tiny("model.device=cpu rollout.engine_rows=1000000000", "GB ... lower rollout.kv_tokens"),
    tiny("rollout.kv_tokens=8", "rollout.kv_tokens 8 is less than ... longest attempt ... raise it"),
    spoilt(
        "a cache of a pretrained model larger than memory",
        "train pretrained.toml model.device=cpu rollout.engine_rows=1000000000",
        "GB ... lower rollout.kv_tokens",
        model_config(max_position_embeddings=512),
    ),
    tiny("engine.e.count=2", "the recipe has no engine 'e'; there are none; write a [[engine]]"),
    tiny("model.vocab_size=3", "model.vocab_size 3 ... set it to at least"),
    tiny("sandbox.preload=nosuchmodule", "'nosuchmodule' ... remove it"),
    tiny("'sandbox.preload=no such'", "'no such' ... remove it"),
    tiny("rollout.tool_name=", "rollout.tool_name ... letters, digits, - _"),
    tiny("run.modules=/nonexist", "'/nonexist' ... correct the path"),
    tiny("run.name=last", "'last' ... take another"),
    tiny("run.name=a@3", "'a@3' ... take another"),
    tiny("cluster.sandbox_nodes=2", "cluster.sandbox_nodes 2 ... set cluster.launcher to 'ray'"),
    tiny(
        "cluster.launcher=ray cluster.sandbox_nodes=2 'sandbox.urls=[\"http://a:1\"]'",
        "cluster.sandbox_nodes 2 and sandbox.urls ... leave one of them out",
    ),
]

UNREAD = [
    tiny("data.pool=5", "override 'data.pool=5' ... data.source is 'files' ... leave it"),
    tiny("'data.families=[\"gcd\"]'", "data.families ... data.source is 'files' ... leave it"),
    tiny(
        "data.source=arithmetic data.columns.question=q",
        "override 'data.columns.question=q' ... data.source is 'arithmetic'",
    ),
    bad(
        "files without a source",
        "data.train_files is not read ... data.source is 'arithmetic' ... change data.source",
        replaced('source = "files"', ""),
    ),
    bad(
        "files for a stage of arithmetic",
        "stage.stage1.data.max_problems is not read",
        recipe('[[stage]]\nname = "stage1"\ndata.source = "arithmetic"\ndata.max_problems = 2'),
    ),
    given("train pretrained.toml model.num_layers=2", "model.path is 'model' ... leave it"),
    given("train pretrained.toml model.rope_theta=10", "model.rope_theta ... model.path is 'model' ... leave it"),
    tiny("resample.method=all resample.keep=3", "override 'resample.keep=3' ... resample.method is 'all'"),
    tiny("resample.method=uniform resample.failure_floor=0", "'uniform'"),
    tiny("resample.method=all resample.format_weight=2", "'all'"),
    tiny("sft.optimizer=adamw sft.muon_learning_rate=0.1", "'adamw'"),
    tiny("evaluate.right_above=0.1", "evaluate.verifier is 'boxed'"),
    tiny("end.truncated_band=0.1", "end.truncated_share is None"),
    tiny("stage.stage1.data.drop_solved_age=2", "data.drop_solved_attempts is None"),
    tiny(
        "stage.cold.steps=5 sft.warmup_steps=6",
        "override 'sft.warmup_steps=6' ... stage cold ends after 5 updates ... raise stage.cold.steps",
    ),
    bad(
        "a warm-up beyond the stage",
        "bad.toml line 6: stage.stage1.learning.warmup_steps is 50 ... after",
        recipe('[[stage]]\nname = "stage1"\nsteps = 2\n[stage.learning]\nwarmup_steps = 50'),
    ),
    tiny("resample.failure_floor=4", "resample.failure_floor 4 ... resample.keep 4 ... lower it"),
    tiny("rollout.agent=x:y rollout.environment=x:y", "both make attempts"),
    tiny("learning.updates_per_step=1000", "learning.updates_per_step 1000 ... 8 attempts ... lower it"),
    tiny(
        "rollout.attempts_per_problem=1 resample.method=all",
        "rollout.attempts_per_problem 1 ... nothing to be compared with ... raise it",
    ),
    *(
        tiny(f"{key}=1e5", f"{key} 100000 ... erases ... lower {key}")
        for key in ("sft.weight_decay", "learning.weight_decay")
    ),
    tiny("evaluate.problems=0 evaluate.every_steps=2", "override 'evaluate.every_steps=2' ... evaluate.problems is 0"),
    tiny("learning.dual_clip=0.5", "learning.dual_clip 0.5 ... 0 for no bound"),
    tiny("evaluate.verifier=tool_output rollout.max_turns=1", "'tool_output' ... rollout.max_turns 1"),
    tiny("evaluate.attempts=5 evaluate.temperature=0", "evaluate: 5 attempts at temperature 0 are one attempt"),
    tiny("rollout.top_k=1", "rollout.top_k 1 ... all attempts at a problem are one"),
    tiny("sandbox.tools=[]", "rollout.max_turns 3 ... set rollout.max_turns to 1"),
    tiny(
        "rollout.max_turns=1 rollout.feedback_max_chars=99",
        "override 'rollout.feedback_max_chars=99' ... rollout.max_turns is 1",
    ),
    tiny("resample.min_positive=1", "resample.method is 'roc' ... leave it out"),
    bad(
        "data of rows from a file",
        "bad.toml line 5: stage.cold.data.max_problems ... sft.rows_file is 'rows.jsonl'",
        recipe('[[stage]]\nname = "cold"\n[stage.data]\nmax_problems = 2'),
    ),
]

FILES = [
    tiny("data.train_files=tran.jsonl", "tran.jsonl does not exist ... check the path"),
    tiny("data.test_files=tst.jsonl", "tst.jsonl does not exist ... check the path"),
    tiny("data.train_files=[]", "data.train_files is empty ... give at least one"),
    file("a folder as file", "train.jsonl ... directory", folder("train.jsonl")),
    problems("train.txt", "kind of file", "train.txt ... .jsonl", "a"),
    problems(
        "a.jsonl.gz",
        "gz that is none",
        "a.jsonl.gz is not a whole gzip file ... drop the .gz",
        '{"question": "a", "answer": "1"}\n',
    ),
    problems("a.parquet", "parquet that is none", "a.parquet is not a parquet file", "abc"),
    file(
        "UTF-16 rows",
        "train.jsonl, line 1: not UTF-8 ... convert",
        text("train.jsonl", '{"question": "é"}\n'.encode("utf-16")),
    ),
    file(
        "not JSON", "train.jsonl, line 2 ... not JSON", text("train.jsonl", '{"question": "a", "answer": "1"}\n{oops\n')
    ),
    file("one JSON array", "train.jsonl, line 1 ... one JSON object", text("train.jsonl", '[{"question": "a"}]\n')),
    problems("a.csv", "CSV of uneven rows", "a.csv, line 2 ... quote cells", "question,answer\na,b,c\n"),
    file("empty file", "train.jsonl has no rows ... at least one", text("train.jsonl", "")),
    tiny("data.columns.question=qestion", "qestion ... did you mean question?"),
    file(
        "answer missing",
        'train.jsonl, line 1, field "answer" ... expected a text or a number',
        rows("train.jsonl", {"question": "a", "answer": None}),
    ),
    file(
        "answer column missing", "fields question do not fit ... data.columns", rows("train.jsonl", {"question": "a"})
    ),
    tiny("data.train_files=test.jsonl", "stage stage1 ... not held out"),
    tiny("sft.rows_file=rws.jsonl", "rws.jsonl does not exist"),
    file("a folder as rows", "rows.jsonl ... directory", folder("rows.jsonl")),
    file("no rows", "rows.jsonl", text("rows.jsonl", "")),
    file(
        "rows of unknown roles",
        "rows.jsonl, line 1 ... role",
        rows("rows.jsonl", {"messages": [{"role": "human", "content": "hi"}, final(3)]}),
    ),
    file("rows without messages", "rows.jsonl, line 1 ... messages", rows("rows.jsonl", {"text": "hi"})),
    file(
        "rows with an unanswered call",
        "rows.jsonl, line 1",
        rows("rows.jsonl", {"messages": [user(1), call("1"), final(1)]}),
    ),
    tiny("sft.rows_file=none", "demonstrations ... set sft.rows_file"),
]

MODELS = [
    tiny("model.path=./nowhere", "nowhere is not a model folder ... give a Hugging Face folder"),
    tiny("model.path=tiny.toml", "tiny.toml is not a model folder"),
    pretrained("broken config.json", "config.json cannot be read", text("model/config.json", "{")),
    pretrained("no decoder", "config.json lacks max_position_embeddings;", model_config(max_position_embeddings=None)),
    *(
        pretrained(f"a model with {word}", f"of type qwen3 ... {word} ... take one of those", model_config(**changes))
        for word, changes in {
            "kv_lora_rank 512": {"kv_lora_rank": 512},  # DeepSeek-V3
            "values of another width": {"v_head_dim": 999},
            "indexed_attention": {"layer_types": ["indexed_attention", "full_attention"]},  # DeepSeek-V3.2
            "attn_logit_softcapping": {"attn_logit_softcapping": 50.0},  # Gemma 2
            "alibi": {"alibi": True},
            "mamba_d_ssm 1536": {"mamba_d_ssm": 1536},  # Falcon-H1: attention and a state in each layer
            "lsh_attn_chunk_length": {"lsh_attn_chunk_length": 64},  # Reformer
        }.items()
    ),
    pretrained(
        "a model of the shape of GPT-2",
        "of type gpt2 ... Qwen2.5, Qwen3 and Llama",
        model_config(model_type="gpt2", max_position_embeddings=None, n_positions=1024),
    ),
    pretrained("no tokenizer", "no tokenizer.json", without("model/tokenizer.json")),
    pretrained("broken tokenizer", "tokenizer.json", text("model/tokenizer.json", "{}")),
    pretrained(
        "another model's tokenizer", "tokenizer in model ... do not belong together", model_config(vocab_size=151936)
    ),
    pretrained("a tokenizer larger than the model", "do not belong together", model_config(vocab_size=20)),
    pretrained("no weights", "model ... safetensors", without("model/model.safetensors")),
    pretrained(
        "a git-LFS pointer",
        "model.safetensors is a git-LFS pointer ... `git lfs pull`",
        text("model/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"),
    ),
    pretrained("half a download", "holds 9000 bytes of ... fetch it again", cut(9000)),
    pretrained("the first bytes of a download", "holds 99 bytes of at least ... fetch it again", cut(99)),
    pretrained("an empty file of weights", "holds 0 bytes of at least 8", cut(0)),
    pretrained(
        "a web page for weights",
        "no header of safetensors",
        text("model/model.safetensors", (60).to_bytes(8, "little") + b"<html>" * 10),
    ),
    pretrained(
        "a shard that is not there",
        "model lacks 1 of the 1 files of weights ... such as model-1.safetensors; fetch the whole model",
        sharded(),
    ),
    pretrained(
        "quantised weights",
        "quantised by gptq ... take the unquantised model",
        model_config(quantization_config={"quant_method": "gptq", "bits": 4}),
    ),
    pretrained("weights that are integers", "holds integers for ... take the unquantised model", in_integers()),
    pretrained(
        "heads that no width divides",
        "config.json describes no model that can be made: ... not a multiple of the number of attention heads (5)",
        model_config(model_type="llama", num_attention_heads=5, layer_types=None),
    ),
    pretrained("an unknown family", "model type `llama9`", model_config(model_type="llama9")),
    pretrained(
        "a model with code of its own",
        "code of a model folder is not run here; take a model whose class transformers has",
        model_config(model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}),
    ),
    pretrained(
        "a model that neither learns nor runs",  # Gemma 2: another engine would not help
        "final_logit_softcapping 30.0; the learner trains decoders",
        model_config(final_logit_softcapping=30.0, attn_logit_softcapping=50.0),
    ),
    pretrained(
        "an encoder",
        "of type bert ... type_vocab_size 2 ... the learner trains decoders",
        model_config(model_type="bert", type_vocab_size=2),
    ),
    given("train pretrained.toml rollout.max_response_tokens=300", "300 ... 256 ... set it to"),
    given(
        "train pretrained.toml model.lora_rank=4 sft.optimizer=adamw sft.adamw_learning_rate=1e-2 "
        "\"model.lora_targets=['q_proj','w_proj']\"",
        "model.lora_targets names 'w_proj', which is not a linear layer of",
    ),
    pretrained(
        "a template whose stop the tokenizer lacks",
        "<|im_end|>",
        lambda place: (place / "model" / "tokenizer.json").write_text(
            (place / "model" / "tokenizer.json").read_text().replace("<|im_end|>", "<|other|>")
        ),
    ),
    bad("random weights for RL", "sft stage first ... model.path", text("bad.toml", RL_ONLY)),
]

TRAINING = [*RECIPES, *VALUES, *LIMITS, *UNREAD, *FILES, *MODELS]
