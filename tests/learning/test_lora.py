"""Adapters: gradients are PEFT's own, merged and adapter forms are one model, and what is not adapted stays as it is.
On two ranks: test_ranks.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from rocstar.config.sections import LearningSection, SftSection
from rocstar.engines.inside_vllm.rocstar_vllm_worker import _tensors
from rocstar.engines.torch_forward import take_weights
from rocstar.errors import ConfigError
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.models import load_model
from rocstar.learning.policy import Policy, names_in
from rocstar.learning.ranks import ALONE, Ranks
from rocstar.learning.sft import SftLearner
from rocstar.parts.modelfolder import ADAPTER as FILES
from rocstar.parts.modelfolder import find_model, refuse_targets
from rocstar.run.checkpoints import opened
from rocstar.support.weights import BASE_NOTE
from tests.learning.examples import policy, policy_of, rows, sft_rows

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT's own model
SECTION = LearningSection(learning_rate=1e-2, warmup_steps=2, tokens_per_microbatch=20, kl_coefficient=0.1)


def base(folder: Path) -> Path:
    """The tiny model as a folder that others load."""
    policy().save(folder)
    return folder


def adapted(folder: Path, ranks: Ranks = ALONE, **section: Any) -> Policy:
    return policy_of(load_model(folder), ranks=ranks, seed=3, **{"lora_rank": 4, "lora_alpha": 16, **section})


def course(policy: Policy, steps: int = 1) -> list[dict[str, float]]:
    """An update of imitation, so that adapters are something, then some of RL."""
    SftLearner(policy, SftSection(adamw_learning_rate=1e-2, warmup_steps=0), steps=9).update(sft_rows(), seed=0)
    learner = GrpoLearner(policy, SECTION, temperature=0.9)
    batches = [rows((12, 5, 9, 20, 7)[seed % 4 :], seed=seed) for seed in range(steps)]
    return [dict(learner.update(batch).metrics) for batch in batches]


def logprobs(made: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = made(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return found


def test_gradients_are_those_of_peft(tmp_path: Path) -> None:
    """On rows that are packed and of different length, against PEFT's own model on each row alone."""
    policy, folder = adapted(base(tmp_path)), tmp_path
    with torch.no_grad():
        for parameter in policy.parameters:
            if parameter.requires_grad:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    mine = {name: value for name, value in policy.model.named_parameters() if value.requires_grad}
    config = LoraConfig(r=4, lora_alpha=16, target_modules=policy.model.peft_config["default"].target_modules)
    theirs = get_peft_model(load_model(folder), config)
    own = {name: value for name, value in theirs.named_parameters() if value.requires_grad}
    assert {f"base_model.model.{name}" for name in mine} == own.keys() and len(mine) == 28
    for name, value in mine.items():
        own[f"base_model.model.{name}"].data.copy_(value)
    shown = sft_rows()
    total = sum(sum(row.loss_mask[1:]) for row in shown)
    for row in shown:
        every = theirs(torch.tensor([row.token_ids])).logits[0, :-1].log_softmax(-1)
        chosen = every.gather(1, torch.tensor(row.token_ids)[1:, None]).squeeze(1)
        (-(chosen * torch.tensor(row.loss_mask[1:])).sum() / total).backward()
    learner = SftLearner(policy, SftSection(adamw_learning_rate=1e-9, max_grad_norm=1e9), steps=9)
    learner.update(shown, seed=0)
    for name, value in mine.items():
        torch.testing.assert_close(value.grad, own[f"base_model.model.{name}"].grad, atol=1e-6, rtol=0)
    assert all(value.grad is None for value in policy.parameters if not value.requires_grad)


def test_adapter_and_merged_forms_are_one_model(tmp_path: Path) -> None:
    """The learner, PEFT over the adapter's folder, the merged folder, an engine's copy, and the folder that is made of
    an adapter alone; the model's own weights stay."""
    policy, ids = adapted(base(tmp_path / "base")), list(range(3, 40))
    course(policy)
    policy.save(tmp_path / "model")
    policy.save(tmp_path / "alone", merged=False)
    assert not (tmp_path / "alone" / "model.safetensors").exists()
    kept, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "model"))
    assert kept.keys() == saved.keys()
    assert {name for name in kept if not torch.equal(kept[name], saved[name])} == {n for n in kept if "_proj" in n}
    engine = load_model(tmp_path / "base")
    take_weights(engine, policy.publish())
    policy.publish(tmp_path / "published")
    forms = {
        "peft": PeftModel.from_pretrained(load_model(tmp_path / "base"), str(tmp_path / "alone" / "adapter")),
        "merged": load_model(tmp_path / "model"),
        "engine": engine,
        "published": load_model(tmp_path / "published"),
        "made": load_model(find_model(str(tmp_path / "alone"))),
        "made of PEFT's own folder": load_model(find_model(str(tmp_path / "alone" / "adapter"))),
    }
    policy.model.set_attn_implementation("sdpa")
    expected = logprobs(policy.model, ids)
    assert (expected - logprobs(load_model(tmp_path / "base"), ids)).abs().max() > 0.1
    for form, made in forms.items():
        assert (logprobs(made, ids) - expected).abs().max() < 1e-5, form


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_server_merges_is_what_a_learner_would_have_sent(tmp_path: Path, dtype: str) -> None:
    """Not of a model that came as *.bin, which a server is not made to read."""
    policy = adapted(base(tmp_path / "base"), dtype=dtype)
    course(policy)
    policy.publish(tmp_path / "merged")
    policy.publish(tmp_path / "alone", merged=False)
    assert policy.is_mergeable
    file = tmp_path / "base" / "model.safetensors"
    save_file({"layers.0.wq.weight": torch.ones(1)}, file.with_name("consolidated.safetensors"))  # as Mistral has
    assert {file.name for file in tmp_path.glob("alone/*")} == {"config.json", *FILES}
    sent = load_file(tmp_path / "merged" / "model.safetensors")
    taken = dict(_tensors(tmp_path / "alone", getattr(torch, dtype)) or ())
    assert sent.keys() == taken.keys()
    for name, tensor in sent.items():
        torch.testing.assert_close(taken[name].to(tensor.dtype), tensor, atol=0, rtol=0)
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    assert not adapted(tmp_path / "base").is_mergeable


def test_an_adapter_that_does_not_fit_is_refused_in_words(tmp_path: Path) -> None:
    """Of another model, of none, with tensors left out (PEFT only warns), and of itself."""
    policy = adapted(base(tmp_path / "base"))
    policy.save(tmp_path / "model", merged=False)
    folder = tmp_path / "model" / "adapter"
    tensors, config = load_file(folder / "adapter_model.safetensors"), json.loads((folder / FILES[0]).read_text())

    def refused(told: str, tensors: Any = tensors, **changed: Any) -> None:
        save_file(tensors, folder / FILES[1])
        (folder / FILES[0]).write_text(json.dumps({**config, **changed}))
        with pytest.raises(ConfigError, match=told):
            find_model(str(tmp_path / "model"))

    refused("no adapter that fits the model in .*: Found missing adapter keys", dict([*tensors.items()][1:]))
    refused("no adapter that fits the model in .*: size mismatch", {name: torch.ones(3, 3) for name in tensors})
    further = {f"{name[:-7]}.x.weight": torch.ones(3, 3) for name in [*tensors][:1]}
    refused("nothing takes 1 of its tensors, such as ", {**tensors, **further})  # of which PEFT says nothing
    refused("becomes nan or inf", lora_alpha=float("nan"))
    refused("is an adapter of gone/away/model, which is needed and missing", base_model_name_or_path="gone/away/model")
    refused("names None as base_model_name_or_path", base_model_name_or_path=None)
    refused("which is no other model", base_model_name_or_path=str(folder))
    shutil.copytree(folder, other := tmp_path / "other")
    (other / FILES[0]).write_text(json.dumps({**config, "base_model_name_or_path": str(folder)}))
    refused("which is needed and missing: .* which is no other model", base_model_name_or_path=str(other))


def test_an_adapter_of_other_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever asks a checkpoint, whatever the cache has of it, and by a run that goes on from it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    policy, file = adapted(base(tmp_path / "base")), tmp_path / "base" / "model.safetensors"
    policy.save(tmp_path / "model", merged=False)
    find_model(str(tmp_path / "model"))
    opened(tmp_path, tmp_path / "base")
    save_file({name: value * 1.001 for name, value in load_file(file).items()}, file, {"format": "pt"})
    told = "is an adapter of weights that .*/base does not hold any more; put them back"
    with pytest.raises(ConfigError, match=told):
        find_model(str(tmp_path / "model"))
    with pytest.raises(ConfigError, match=told):
        opened(tmp_path, tmp_path / "base")
    (tmp_path / "model" / "adapter" / BASE_NOTE).write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=told):
        find_model(str(tmp_path / "model"))
    (tmp_path / "model" / "adapter" / BASE_NOTE).unlink()  # as others write adapters
    assert find_model(str(tmp_path / "model")) != find_model(str(tmp_path / "base"))
    settings = tmp_path / "model" / "adapter" / FILES[0]
    settings.write_text(settings.read_text().replace('alpha": 16', 'alpha": 4'))
    find_model(str(tmp_path / "model"))
    made = len(list((tmp_path / "cache" / "rocstar" / "models").iterdir()))
    assert made == 3, "made of other weights, and with other settings"


def test_only_adapters_are_saved_and_learning_goes_on(tmp_path: Path) -> None:
    whole = adapted(base(tmp_path / "base"))
    course(whole)
    learner = GrpoLearner(whole, SECTION, temperature=0.9)
    learner.update(rows())
    learner.save(tmp_path)
    weights = {name for name in names_in(tmp_path) if name.startswith("weights.")}
    assert len(weights) == 28 and all(".lora_" in name for name in weights)
    whole.save(tmp_path / "model")
    targets = json.loads((tmp_path / "model/adapter/adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets), "equal runs have equal files"
    later = GrpoLearner(adapted(tmp_path / "base"), SECTION, temperature=0.9)
    later.restore(tmp_path)
    learner.refresh_reference(), later.refresh_reference()
    assert later.update(rows()).metrics == learner.update(rows()).metrics


def test_a_model_kept_in_bf16_knows_its_own_noise(tmp_path: Path) -> None:
    """What a canary calls exact is computed in fp32 from the weights that are kept in bf16, which stay so."""
    policy = adapted(base(tmp_path), dtype="bfloat16")
    course(policy)
    kept = {parameter.dtype for parameter in policy.parameters if not parameter.requires_grad and parameter.ndim > 1}
    noises = [row.noise for row in policy.canary()]
    assert kept == {torch.bfloat16} and all(noise and 0 < noise < 0.05 for noise in noises)
    assert {p.dtype for p in policy.parameters if not p.requires_grad and p.ndim > 1} == {torch.bfloat16}


def test_targets_are_linear_layers(tmp_path: Path) -> None:
    some = adapted(base(tmp_path), lora_targets=["q_proj"])
    assert sum(parameter.requires_grad for parameter in some.parameters) == 4
    with pytest.raises(ConfigError, match=r"names 'lm_head', which is not a linear layer of a model of type qwen3"):
        adapted(tmp_path, lora_targets=["q_proj", "lm_head"])
    names = ("layers.0.mlp.up_proj.weight", "layers.1.mlp.experts.0.up_proj.weight", "layers.1.self_attn.q_proj.weight")
    save_file({name: torch.ones(2, 2) for name in names}, tmp_path / "model.safetensors")  # as GLM-4.5 has
    refuse_targets(tmp_path, ["q_proj"])
    with pytest.raises(ConfigError, match=r"'up_proj', which experts have, and these get no adapters; .* are q_proj$"):
        refuse_targets(tmp_path, ["q_proj", "up_proj"])
