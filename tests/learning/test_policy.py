"""The trained model: the same seed makes the same one, and what it saves loads again."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rocstar.config.sections import LearningSection, SftSection
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.templates import template_named
from rocstar.engines.torch_forward import take_weights
from rocstar.errors import ConfigError, EngineUnavailable
from rocstar.learning import policy as policies
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.models import load_model, random_model
from rocstar.learning.policy import Policy, by_layer, restore_moments
from rocstar.learning.ranks import Ranks
from rocstar.learning.sft import SftLearner
from rocstar.parts.modelfolder import find_model
from rocstar.record.atomic import whole_folder
from rocstar.support.weights import layout_of_folder
from tests.learning.examples import SHAPE, codec, model, policy, policy_of, rows, same_weights, sft_rows
from tests.learning.test_attention import causal_lm


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """By transformers' own attention, whatever the model learns with."""
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=ids).logits
    return found


def test_a_seed_makes_the_same_weights_whatever_else_was_drawn_and_begins_as_the_identity() -> None:
    fresh = random_model(SHAPE, 3)
    torch.rand(7)
    second, other = random_model(SHAPE, 3).state_dict(), random_model(SHAPE, 4).state_dict()
    assert all(torch.equal(each, second[name]) for name, each in fresh.state_dict().items())
    assert not torch.equal(second["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    ids = torch.tensor([[4, 9, 4]])
    hidden = fresh.model.norm(fresh.model.embed_tokens(ids))
    torch.testing.assert_close(fresh(input_ids=ids).logits, fresh.lm_head(hidden))


def test_a_saved_policy_loads_with_the_same_logits_and_names_the_architecture_that_vllm_knows(tmp_path: Path) -> None:
    mine = policy()
    mine.save(tmp_path / "model")
    loaded = Policy(load_model(tmp_path / "model"), Codec.load(tmp_path / "model"), template_named("compact"))
    ids = torch.tensor([mine.codec.encode("print(1) 2 3")])
    assert torch.equal(logits(loaded.model, ids), logits(mine.model, ids))
    assert loaded.codec.encode("print(1)") == mine.codec.encode("print(1)")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_canary_rows_say_what_a_plain_forward_gives() -> None:
    mine = policy()
    rows = mine.canary()
    assert rows == mine.canary() and len(rows) > 1
    for row in rows:
        ids = torch.tensor([row.token_ids])
        known = logits(mine.model, ids)[0, :-1, : mine.codec.vocab_size].double()
        laws = known.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)
        assert row.logprobs == pytest.approx(laws.tolist(), abs=1e-5)


def experts(seed: int = 0) -> Any:
    size = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=104, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, **size
        )
    )


def test_a_mixture_of_experts_goes_out_in_the_layout_that_it_came_in(tmp_path: Path) -> None:
    experts().save_pretrained(tmp_path / "source")
    came_as = layout_of_folder(tmp_path / "source")
    assert any("experts.3.up_proj" in name for name in came_as)
    mine = policy_of(load_model(tmp_path / "source"))
    mine.save(tmp_path / "saved")
    weights = mine.publish(tmp_path / "published")
    assert layout_of_folder(tmp_path / "saved") == layout_of_folder(tmp_path / "published") == came_as
    other = experts(1)
    tensors = take_weights(other, weights)
    assert all(
        torch.equal(a, b) for a, b in zip(other.state_dict().values(), mine.model.state_dict().values(), strict=True)
    )
    assert tensors.keys() == mine.model.state_dict().keys()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("made", [model, experts], ids=["tied", "experts"])
def test_what_is_sent_is_what_would_be_published(tmp_path: Path, made: Callable[[], Any], dtype: str) -> None:
    """Name by name, type by type, bit by bit; experts as the folder had them, tied weights once."""
    made().save_pretrained(tmp_path / "source")
    mine = policy_of(load_model(tmp_path / "source"), dtype=dtype)
    mine.publish(tmp_path / "whole")
    weights, sent = mine.publish(tmp_path / "sent", sent=True), {}
    assert {file.suffix for file in (tmp_path / "sent").iterdir()} == {".json"}
    mine.send(lambda name, tensor: sent.update({name: tensor.clone()}), weights)
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert sent.keys() == whole.keys()
    assert all(sent[name].dtype == each.dtype and torch.equal(sent[name], each) for name, each in whole.items())
    assert max(each.nbytes for each in sent.values()) <= mine.largest_tensor


def test_the_largest_tensor_is_that_of_the_layout_that_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some families' folders hold as one what the model has in parts (q, k, v); the buffer was too small for it."""
    as_published = Policy._as_published

    def fused(self: Policy, tensors: Any, model: Any) -> dict[str, torch.Tensor]:
        found = as_published(self, tensors, model)
        wide = [found.pop(name) for name in list(found) if found[name].ndim > 1]
        return {**found, **({"fused": torch.cat([each.flatten() for each in wide])[None]} if wide else {})}

    monkeypatch.setattr(Policy, "_as_published", fused)
    mine = policy()
    assert mine.largest_tensor == 4 * sum(each.numel() for each in mine.parameters if each.ndim > 1)


def test_weights_that_have_changed_since_are_not_sent(tmp_path: Path) -> None:
    mine = policy()
    weights = mine.publish(tmp_path, sent=True)
    with torch.no_grad():
        mine.parameters[-1].add_(1.0)
    with pytest.raises(EngineUnavailable, match=r"weights 0 have changed, and the next are not published yet"):
        mine.send(lambda name, tensor: pytest.fail(f"{name} was sent"), weights)


def test_layers_are_sent_one_by_one() -> None:
    of_layers = [f"model.layers.{name}" for name in ("0.a", "0.b.1", "1.a", "10.a")]
    names = ["model.embed.weight", *of_layers, "n", "h"]
    assert list(by_layer(names)) == [names[:1], names[1:3], names[3:4], names[4:5], names[5:]]


def test_a_model_that_would_be_saved_in_another_layout_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    made = model()
    made.save_pretrained(tmp_path)
    made.name_or_path = str(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.gate.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"of type qwen3 would be saved in another .*: 1 of its .*mlp.gate_proj.wei"):
        policy_of(made)


@pytest.mark.parametrize("tied", [True, False])
def test_a_gathered_head_s_gradient_goes_to_its_weights(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cluster.offload_optimizer`; the other device is played by meta tensors."""
    made = policy_of(causal_lm("Qwen2", tie_word_embeddings=tied))
    made.model.to("meta")
    made.ranks = cast(Ranks, SimpleNamespace(mesh=object()))
    monkeypatch.setattr(policies, "full", lambda tensor, device: torch.zeros(tensor.shape, device=device))
    monkeypatch.setattr(policies, "reduced", lambda whole, like: whole)
    for _ in range(2):
        with made.head(1.0) as head:
            head.weight.grad = torch.ones_like(head.weight)
    assert made.model.get_output_embeddings().weight.grad.device.type == "meta"


def test_ranks_that_keep_no_weights_copy_none_to_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copied every whole tensor, and left it. A GPU is played by meta tensors, which cannot be copied."""
    monkeypatch.setattr(policies, "full", lambda tensor, device=None: tensor.to(device or tensor.device))
    mine = policy_of(causal_lm("Qwen2"))
    mine.model.to("meta")
    mine.ranks = cast(Ranks, SimpleNamespace(mesh=object(), rank=1))
    assert mine._tensors(torch.bfloat16) == {}
    mine.ranks = cast(Ranks, SimpleNamespace(mesh=object(), rank=0))
    with pytest.raises(NotImplementedError, match="copy out of meta"):
        mine._tensors(torch.bfloat16)


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    made = model()
    with torch.no_grad():
        made.model.layers[1].mlp.up_proj.weight[3, 5] = float("-inf")
    made.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"its tensor model\.layers\.1\.mlp\.up_proj\.weight holds nan or inf"):
        load_model(tmp_path)


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is here, which nothing of rocstar needs")
def test_a_model_whose_code_needs_a_package_that_is_not_there_is_refused(tmp_path: Path) -> None:
    from transformers import Gemma3nConfig

    Gemma3nConfig().save_pretrained(tmp_path)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="can't be loaded as a causal language model: TimmWrapperModel requires the"):
        load_model(tmp_path)


FURTHER = {f"model.layers.2.{name}.weight": (4, 4) for name in ("eh_proj", "enorm", "mlp.up_proj")}
"""What DeepSeek-V3 has for the token after the next."""
UNREAD = {"mtp.fc.weight": (4, 4), "model.visual.blocks.0.attn.qkv.weight": (4, 4), "lm_head.weight": (104, 32)}
"""What else published models hold that a model of text does without; the last one is tied and stored twice."""


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (FURTHER, None),
        (UNREAD, None),
        ({"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}, None),
        (
            {"model.layers.2.mlp.up_proj.weight": (4, 4)},
            r"tensors unknown to such a model: 1, such as model\.layers\.2",
        ),
        ({"model.norm.weight": None}, r"tensors missing: 1, such as model\.norm\.weight\); correct config\.json"),
        ({"model.norm.weight": (33,)}, r"tensors of another shape: 1, such as model\.norm\.weight"),
    ],
)
def test_a_folder_holds_the_weights_of_its_model_and_what_published_ones_have_beside(
    tmp_path: Path, more: dict[str, tuple[int, ...] | None], told: str | None
) -> None:
    model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {name: torch.zeros(shape) for name, shape in more.items() if shape}
    if "lm_head.weight" in more:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    kept = {name: tensor for name, tensor in tensors.items() if more.get(name, tensor) is not None}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    if told is None:
        assert load_model(find_model(str(tmp_path)))
        return
    with pytest.raises(ConfigError, match=told):
        load_model(tmp_path)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"differs from its embedding, .* \(tie_word_embeddings\); set that to false"):
        load_model(tmp_path)


def changed(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


def test_what_transformers_refuses_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks on the standard input whether to run code of a folder; nothing here may."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    model().save_pretrained(tmp_path)
    for changes, told in (
        ({"num_attention_heads": 0}, r"model \(ZeroDivisionError\([^\n]+\)\); correct its config"),
        ({"num_attention_heads": "two"}, r"config\.json describes no model that can be made: [^\n]+'two'"),
        ({"num_attention_heads": 2, "hidden_act": "mine"}, r"model \(KeyError\('mine'\)\); correct its config\.json"),
        ({"hidden_act": "silu", "rope_parameters": {"rope_type": "mine"}}, "mine.*; correct its config"),
        ({"rope_parameters": None, "quantization_config": {"quant_method": "awq"}}, "quantised by awq .* unquantised"),
        (
            {"quantization_config": None, "model_type": "qwen9"},
            "can't be loaded as a causal language model: [^\n]+qwen9",
        ),
        ({"auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}, "needs Python code of its own"),
        ({"model_type": "t5"}, "needs Python code of its own"),  # whose config transformers has
        ({"model_type": "qwen3", "pad_token_id": 10**9}, "Padding_idx must be within"),
        ({"pad_token_id": None, "dtype": "int8"}, r"has dtype torch\.int8; set it to that of its weights"),
        ({"dtype": "load"}, "list index out of range"),  # a function of torch
    ):
        with pytest.raises(ConfigError, match=told) as caught:
            load_model(changed(tmp_path, **changes))
        assert len(str(caught.value).splitlines()) == 1
    auto_map = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    names = {"dtype": "float32", "auto_map": auto_map, "_attn_implementation": "someone/kernel"}  # both are code
    assert load_model(changed(tmp_path, **names)), "transformers has the class itself"
    with pytest.raises(ConfigError, match=r"num_hidden_layers 10+, and the files hold \d+ tensors; correct it"):
        find_model(str(changed(tmp_path, num_hidden_layers=10**12)))  # a list of so many is never made


def test_what_is_no_whole_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"^Qwen/Qwen0-0B is neither a folder nor can it be fetched: [^\n]+$"):
        load_model("Qwen/Qwen0-0B")
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        load_model(tmp_path)
    model().save_pretrained(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 9000)
    with pytest.raises(ConfigError, match=r"can't be loaded as a causal language model: [^\n]+not fully covered"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(print, 2))  # code, which is not run
    with pytest.raises(ConfigError, match=r"are a pickle .* code in it is not run here; take the model as"):
        load_model(tmp_path)
    os.truncate(tmp_path / "pytorch_model.bin", 0)
    with pytest.raises(ConfigError, match=r"\(EOFError\(.*\)\); correct its config\.json or fetch"):
        load_model(tmp_path)


def test_a_model_goes_out_in_the_dtype_it_came_in_and_loses_nothing_for_a_resumed_run(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    template = template_named("compact")
    model().to(torch.bfloat16).save_pretrained(source)
    codec().save(source, template)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5], "top_k": 7}))
    mine = Policy(load_model(source), Codec.load(source), template)
    learner = GrpoLearner(mine, LearningSection(learning_rate=1e-6, warmup_steps=0))
    learner.update(rows())
    mine.save(out)
    learner.save(tmp_path)
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    kept = json.loads((out / "generation_config.json").read_text())
    assert (kept["eos_token_id"], kept["top_k"]) == ([codec().token_id(template.stop), 3, 5], 7)
    resumed = Policy(load_model(out), Codec.load(out), template)
    assert not same_weights(resumed, mine)
    resumed.restore(tmp_path)
    assert same_weights(resumed, mine)


def test_weights_published_in_process_are_the_live_ones_and_hold_tied_tensors_once() -> None:
    mine = policy()
    mine.version = 7
    weights, tensors = mine.publish(), mine.publish().tensors
    assert weights.version == 7 and tensors is not None and "lm_head.weight" not in tensors
    for name, parameter in mine.model.named_parameters():
        assert tensors[name].data_ptr() == parameter.data_ptr() and not tensors[name].requires_grad


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match='device is "cuda" but torch finds no GPU'):
        policy(device="cuda")


@contextmanager
def small_files() -> Iterator[None]:
    """The system refuses files over 4 KiB, as a full disk would. Not a fixture: pytest writes files of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_the_disk_refuses_is_an_oserror_that_callers_know(tmp_path: Path) -> None:
    mine = policy()
    with pytest.raises(OSError) as of_weights, whole_folder(tmp_path / "model") as fresh, small_files():
        mine.save(fresh)
    assert not list(tmp_path.iterdir())
    learner = SftLearner(mine, SftSection(), steps=2)
    learner.update(sft_rows(), seed=0)
    with pytest.raises(OSError) as of_the_optimizer, small_files():
        learner.save(tmp_path)
    assert of_weights.value.errno == of_the_optimizer.value.errno == errno.EFBIG


def test_ctrl_c_while_the_optimizer_is_saved_is_a_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one, which torch catches, ended a run with a traceback of an OSError without a word."""
    kept = GrpoLearner(policy(), LearningSection())

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(policies.FileSystemWriter, "write_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept.save(tmp_path)


def test_optimizer_state_goes_back_to_where_the_weights_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused optimizer on a GPU takes no step count that lies in main memory."""
    learner = SftLearner(policy(), SftSection(), steps=2)
    learner.update(sft_rows(), seed=0)
    learner.save(tmp_path)
    elsewhere = model().to("meta")
    optimizer = torch.optim.AdamW(elsewhere.parameters(), fused=False)
    monkeypatch.setattr(policies, "load_state", lambda folder, tensors: None)  # nothing can be read into no memory
    restore_moments(tmp_path, elsewhere, [optimizer])
    kept = {(key, value.device.type) for state in optimizer.state.values() for key, value in state.items()}
    assert kept == {("step", "meta"), ("exp_avg", "meta"), ("exp_avg_sq", "meta")}
