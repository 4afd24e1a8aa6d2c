"""What a person may do wrong with the other verbs."""

from __future__ import annotations

from tests.clumsy.workplace import RL_ONLY, cut, given, spoilt, text, without

OTHERS = [
    spoilt("sft of RL alone", "sft bad.toml", "no [[stage]] of kind sft", text("bad.toml", RL_ONLY)),
    given("sft tiny.toml sft.batch_row=2", "did you mean sft.batch_rows?"),
    given("train --resume last --runs elsewhere", "there is no run last in elsewhere"),
    given("train --resume sond", "there is no run sond ... sound"),
    spoilt(
        "resume with other settings than it wrote",
        "train --resume sound",
        "config.resolved.json ... run.sede",
        text("runs/sound/config.resolved.json", '{"run": {"sede": 1}}'),
    ),
    spoilt(
        "resume without its settings",
        "train --resume sound",
        "config.resolved.json cannot be read",
        without("runs/sound/config.resolved.json"),
    ),
    given("train --resume model", "there is no run model"),
    given("eval model", "--data ... rocstar eval --help"),
    given("eval model --data tst.jsonl", "tst.jsonl does not exist"),
    given("eval model --data model", "model is not a kind of file we read"),
    given("eval model --data test.jsonl --answer gold", 'no field "gold" among question, answer'),
    given("eval mdel --data test.jsonl", "there is no run mdel ... sound"),
    given("eval sound --data test.jsonl", "run sound has no checkpoint yet"),
    given("eval model --data test.jsonl --template papr", "--template papr ... did you mean 'paper'?"),
    given("eval model --data test.jsonl --verifier boxd", "--verifier boxd ... did you mean 'boxed'?"),
    given("eval model --data test.jsonl --temperature -1", "--temperature"),
    given("eval model --data test.jsonl --temperature nan", "--temperature"),
    given("eval model --data test.jsonl --n 0", "--n"),
    given("eval model --data test.jsonl --max-turns 0", "--max-turns 0"),
    given("eval model --data test.jsonl rollout.topp=1", "did you mean rollout.top_p?"),
    given("eval model --data test.jsonl --template compact --max-response-tokens 300", "300 ... 256 ... set it to"),
    spoilt(
        "eval without weights",
        "eval model --data test.jsonl --max-response-tokens 30",
        "model ... safetensors",
        without("model/model.safetensors"),
    ),
    *(
        spoilt(f"{command.split()[0]} with half a download", command, "holds 9000 bytes of ... fetch it", cut(9000))
        for command in ("eval model --data test.jsonl", "chat model -p hi", "serve model")
    ),
    given("eval model --data test.jsonl --runs rows.jsonl", "rows.jsonl ... change --runs"),
    given("chat mdel -p hi", "there is no run mdel"),
    spoilt("chat without a tokenizer", "chat model -p hi", "no tokenizer.json", without("model/tokenizer.json")),
    given("runs show sond", "there is no run sond ... sound"),
    given("data build pol.toml", "there is no recipe pol.toml ... did you mean pool.toml?"),
    spoilt(
        "pool of a file that is not there", "data build pool.toml", "train.jsonl does not exist", without("train.jsonl")
    ),
    given("data build pool.toml rules.skip=pictre", "'pictre' ... did you mean picture?"),
    given("data build pool.toml out=rows.jsonl", "rows.jsonl ... out="),
    given("data build pool.toml limits.max_question_char=3", "limits.max_question_chars"),
    given("data sft mx.toml --out o", "there is no recipe mx.toml ... did you mean mix.toml?"),
    spoilt(
        "mix of a file that is not there",
        "data sft mix.toml --out o",
        "rows.jsonl does not exist",
        without("rows.jsonl"),
    ),
    spoilt(
        "mix of an unknown layout",
        "data sft bad.toml --out o",
        "glaiv ... 'glaive'",
        text("bad.toml", '[[source]]\nname = "a"\nlayout = "glaiv"\nfiles = ["rows.jsonl"]\n'),
    ),
    given("data sft mix.toml --out train.jsonl", "train.jsonl ... --out"),
    given("data check tran.jsonl", "tran.jsonl does not exist"),
    given("data check train.jsonl --template papr", "'papr' ... 'paper'"),
    given("data check train.jsonl --tokenizer runs", "runs has no tokenizer.json"),
]
