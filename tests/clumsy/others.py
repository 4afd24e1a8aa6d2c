"""What a person may do wrong with the other verbs."""

from __future__ import annotations

from tests.clumsy.workplace import BAD, RL_ONLY, TINY, start, text, without

OTHERS = [
    start("sft of RL alone", ["sft", *BAD], ["no [[stage]] of kind sft"], text("bad.toml", RL_ONLY)),
    start("sft with a typo", ["sft", *TINY, "sft.batch_row=2"], ["did you mean sft.batch_rows?"]),
    start(
        "resume of nothing", ["train", "--resume", "last", "--runs", "elsewhere"], ["there is no run last in elsewhere"]
    ),
    start("resume of a name that is not there", ["train", "--resume", "sond"], ["there is no run sond", "sound"]),
    start(
        "resume with other settings than it wrote",
        ["train", "--resume", "sound"],
        ["config.resolved.json", "run.sede"],
        text("runs/sound/config.resolved.json", '{"run": {"sede": 1}}'),
    ),
    start(
        "resume without its settings",
        ["train", "--resume", "sound"],
        ["config.resolved.json cannot be read"],
        without("runs/sound/config.resolved.json"),
    ),
    start("resume of a folder that is no run", ["train", "--resume", "model"], ["there is no run model"]),
    start("eval without data", ["eval", "model"], ["--data", "rocstar eval --help"]),
    start("eval of a file that is not there", ["eval", "model", "--data", "tst.jsonl"], ["tst.jsonl does not exist"]),
    start("eval of a folder", ["eval", "model", "--data", "model"], ["model is not a kind of file we read"]),
    start(
        "eval with a wrong column",
        ["eval", "model", "--data", "test.jsonl", "--answer", "gold"],
        ['no field "gold"', "--answer"],
    ),
    start("eval of nothing", ["eval", "mdel", "--data", "test.jsonl"], ["there is no run mdel", "sound"]),
    start("eval before a checkpoint", ["eval", "sound", "--data", "test.jsonl"], ["run sound has no checkpoint yet"]),
    start(
        "eval of a template",
        ["eval", "model", "--data", "test.jsonl", "--template", "papr"],
        ["--template papr", "did you mean 'paper'?"],
    ),
    start(
        "eval of a verifier",
        ["eval", "model", "--data", "test.jsonl", "--verifier", "boxd"],
        ["--verifier boxd", "did you mean 'boxed'?"],
    ),
    start(
        "eval at a negative temperature",
        ["eval", "model", "--data", "test.jsonl", "--temperature", "-1"],
        ["--temperature"],
    ),
    start(
        "eval at no temperature", ["eval", "model", "--data", "test.jsonl", "--temperature", "nan"], ["--temperature"]
    ),
    start("eval of no attempts", ["eval", "model", "--data", "test.jsonl", "--n", "0"], ["--n"]),
    start("eval of no turns", ["eval", "model", "--data", "test.jsonl", "--max-turns", "0"], ["--max-turns 0"]),
    start(
        "eval with a typo", ["eval", "model", "--data", "test.jsonl", "rollout.topp=1"], ["did you mean rollout.top_p?"]
    ),
    start(
        "eval beyond the model",
        ["eval", "model", "--data", "test.jsonl", "--template", "compact", "--max-response-tokens", "300"],
        ["300", "256", "set it to"],
    ),
    start(
        "eval without weights",
        ["eval", "model", "--data", "test.jsonl", "--max-response-tokens", "30"],
        ["model", "safetensors"],
        without("model/model.safetensors"),
    ),
    start(
        "eval where nothing can be kept",
        ["eval", "model", "--data", "test.jsonl", "--runs", "rows.jsonl"],
        ["rows.jsonl", "change --runs"],
    ),
    start("chat with nothing", ["chat", "mdel", "-p", "hi"], ["there is no run mdel"]),
    start(
        "chat without a tokenizer",
        ["chat", "model", "-p", "hi"],
        ["no tokenizer.json"],
        without("model/tokenizer.json"),
    ),
    start("show of nothing", ["runs", "show", "sond"], ["there is no run sond", "sound"]),
    start(
        "pool recipe that is not there",
        ["data", "build", "pol.toml"],
        ["there is no recipe pol.toml", "did you mean pool.toml?"],
    ),
    start(
        "pool of a file that is not there",
        ["data", "build", "pool.toml"],
        ["train.jsonl does not exist"],
        without("train.jsonl"),
    ),
    start(
        "pool with an unknown rule",
        ["data", "build", "pool.toml", "rules.skip=pictre"],
        ["'pictre'", "did you mean picture?"],
    ),
    start("pool onto a file", ["data", "build", "pool.toml", "out=rows.jsonl"], ["rows.jsonl", "out="]),
    start(
        "pool with a typo", ["data", "build", "pool.toml", "limits.max_question_char=3"], ["limits.max_question_chars"]
    ),
    start(
        "mix recipe that is not there",
        ["data", "sft", "mx.toml", "--out", "o"],
        ["there is no recipe mx.toml", "did you mean mix.toml?"],
    ),
    start(
        "mix of a file that is not there",
        ["data", "sft", "mix.toml", "--out", "o"],
        ["rows.jsonl does not exist"],
        without("rows.jsonl"),
    ),
    start(
        "mix of an unknown layout",
        ["data", "sft", "bad.toml", "--out", "o"],
        ["glaiv", "'glaive'"],
        text("bad.toml", '[[source]]\nname = "a"\nlayout = "glaiv"\nfiles = ["rows.jsonl"]\n'),
    ),
    start("mix onto a file", ["data", "sft", "mix.toml", "--out", "train.jsonl"], ["train.jsonl", "--out"]),
    start("check of a file that is not there", ["data", "check", "tran.jsonl"], ["tran.jsonl does not exist"]),
    start("check with a template", ["data", "check", "train.jsonl", "--template", "papr"], ["'papr'", "'paper'"]),
    start(
        "check with a tokenizer",
        ["data", "check", "train.jsonl", "--tokenizer", "runs"],
        ["runs has no tokenizer.json"],
    ),
    start(
        "isolation of a service",
        ["sandbox", "serve", "--min-isolation", "L9"],
        ["--min-isolation L9", "L1, L2, L3, L4"],
    ),
    start("unknown verb", ["trian", "tiny.toml"], ["no such command 'trian'", "train"]),
]
