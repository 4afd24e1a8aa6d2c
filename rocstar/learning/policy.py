"""The trained model: where its weights live, how they leave, and training state on disk, which any number of ranks
writes and any other number reads (torch.distributed.checkpoint):

    learner/          .metadata and one .distcp file a rank
        weights.NAME            fp32; of what is trained
        moments.NAME.KEY        what the optimizer keeps for a parameter, in the dtype that it keeps
        counters                int64: optimizer updates, policy version

Optimizers live with the learners."""

from __future__ import annotations

import hashlib
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.api import CheckpointException

from rocstar.config.sections import ModelSection
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.template import Template
from rocstar.errors import ConfigError, EngineUnavailable, RunHalted, naming
from rocstar.learning.forward import hidden_states, is_packed, prepare
from rocstar.learning.head import Head, score_tokens
from rocstar.learning.lora import BASE, Merged, adapters, add_adapters, save_adapters, widened
from rocstar.learning.models import compute_dtype, device_of, give_back, keep_freed_memory
from rocstar.learning.pack import pack
from rocstar.learning.ranks import ALONE, Ranks, full, local, reduced, reshard, shard, together
from rocstar.support.weights import BASE_NOTE, fingerprint_of, layout_of_folder
from rocstar.types import Canary, Weights, gaps

STATE_FOLDER = "learner"
ADAPTER_FOLDER = "adapter"
CANARY_TOKENS, CANARY_COUNTED = (32, 32, 1024), 256
"""Tokens of each canary row, and how many of its last ones count at most. A rounded frequency shifts the angle at
position 1,000 by up to two radians."""
FINGERPRINT_NUMBERS = 16  # of each tensor
Put = Callable[[str, torch.Tensor], None]


class Policy:
    """A model with its codec, on one rank or sharded over several; trained weights are always fp32. With
    `model.lora_rank` these are adapters, and the model's own weights stay in the dtype of the forward pass.

    With several ranks every rank makes one; those above 0 pass None for model and codec and are sent both."""

    role = "policy"

    def __init__(
        self,
        model: Any,
        codec: Codec,
        template: Template,
        section: ModelSection | None = None,
        *,
        ranks: Ranks = ALONE,
        seed: int = 0,
        known: int | None = None,
    ) -> None:
        """seed: of adapters. known: the softmax is over ids below it, by default the codec's size. Raises ConfigError
        for a model that can't be trained packed."""
        section = section or ModelSection()
        keep_freed_memory()
        ranks.make(self, section=section)
        self.ranks, self.codec, self.version = ranks, codec, 0
        self.device = device_of(section, ranks.local_rank)
        self.dtype = compute_dtype(section, self.device)
        self.recomputes, self._adapts = section.gradient_checkpointing, section.lora_rank > 0
        self._fp32_head = section.fp32_head
        adapt = partial(add_adapters, section=section, dtype=self.dtype, seed=seed) if self._adapts else None
        self.learnt = 0.0, 0.0
        """Tokens of the work under way that learners are done with, and all of them. One that is only scored counts as
        a third."""
        self._template = template
        self.largest_tensor = 0  # bytes, as it is sent; set on rank 0
        if model is not None:
            model.config.architectures = [type(model).__name__]  # vLLM needs it; sharding renames the type
            model.to(self.device if ranks.mesh is None and not adapt else "cpu")
            prepare(model, self.device)
            self._came_as = layout_of_folder(Path(model.name_or_path)) if model.name_or_path else {}
            there = {name: value.to("meta") for name, value in model.state_dict().items() if name not in tied(model)}
            published = self._as_published(there, model)
            self.largest_tensor = max(each.numel() * self._sent_type(each).itemsize for each in published.values())
            if adapt:
                self._base = fingerprint_of(Path(model.name_or_path)) if model.name_or_path else None
                adapt(model)
                model.to(self.device if ranks.mesh is None else "cpu")
        changes = [partial(prepare, device=self.device), *([adapt] if adapt else [])]
        with ranks.guarded("sharding the model"):
            self._known: int = ranks.share(known or (codec and codec.vocab_size))
            self.model: Any = model if ranks.mesh is None else shard(model, ranks, self.device, self.dtype, changes)
        if self.recomputes:
            enable = getattr(self.model, "activation_checkpointing_enable", None)  # its older name warns where both are
            (enable or self.model.gradient_checkpointing_enable)({"use_reentrant": False})

    @property
    def is_mergeable(self) -> bool:
        """Whether the model's source folder stores every layer that has adapters, in *.safetensors."""
        adapted = (name for name, _ in self.model.named_parameters() if BASE in name)
        return all(name.replace(BASE, ".") in self._came_as for name in adapted)

    def without_dropout(self) -> None:
        """Turn dropout off, so an update computes the log-probabilities that `score` does. Layers under gradient
        checkpointing stay in training mode, since transformers checks that flag."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        for module in self.model.eval().modules():
            if self.recomputes and isinstance(module, GradientCheckpointingLayer):
                module.training = True
                shares = [name for name, value in vars(module).items() if "drop" in name and isinstance(value, float)]
                vars(module).update(dict.fromkeys(shares, 0.0))

    @classmethod
    def on_rank(cls, ranks: Ranks, members: Mapping[str, Any], section: ModelSection) -> Policy:
        """The same policy on a rank above 0."""
        nothing: Any = None
        return cls(nothing, nothing, nothing, section, ranks=ranks)

    @property
    def computes(self) -> dict[str, str]:
        """The kind of device its passes run on, and their dtype."""
        return {"device": self.device.type, "dtype": str(self.dtype).removeprefix("torch.")}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    # -- used by learners -------------------------------------------------------------------------------------------

    def on_device(self) -> AbstractContextManager[Any]:
        """Within this context its GPU is the thread's current one."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        """Within this context forward passes run in the compute dtype."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)

    @contextmanager
    def head(self, temperature: float) -> Iterator[Head]:
        """The LM head, unsharded; on exit every rank, even one without tokens, returns its gradients to the shards."""
        embeddings = self.model.get_output_embeddings()
        parts = weight, bias = embeddings.weight, embeddings.bias
        if self.ranks.mesh is not None:
            learns = weight.requires_grad and torch.is_grad_enabled()
            weight, bias = (one if one is None else full(one, self.device).requires_grad_(learns) for one in parts)
        used = weight.float() if self._fp32_head else weight
        yield Head(weight=used, bias=bias, temperature=temperature, known=self._known, exact=self._fp32_head)
        for parameter, whole in zip(parts, (weight, bias), strict=True):
            if whole is not None and whole is not parameter and whole.requires_grad:
                gradient = torch.zeros_like(whole) if whole.grad is None else whole.grad
                share = reduced(gradient, parameter).to(parameter.device)  # offloaded weights are on another device
                parameter.grad = share if parameter.grad is None else parameter.grad + share

    # -- saving and publishing --------------------------------------------------------------------------------------

    @together
    def save(self, folder: Path, *, merged: bool = True) -> None:
        """Fill `folder` as a Hugging Face model that transformers and vLLM load unchanged, weights in the dtype the
        model came in. Adapters go into a folder beside it, in PEFT's format; merged: also the whole model.
        `runs.atomic.whole_folder` makes it durable and atomic. Raises OSError, and RunHalted for weights that are not
        finite."""
        own = folder / ADAPTER_FOLDER if self._adapts else None
        if own and merged:
            give_back()  # the memory of passes, beside which the merged model would lie
        self._write(folder, self.model.config.dtype or torch.float32, whole=merged or not self._adapts, adapter=own)
        if not self.ranks.rank:
            self.codec.save(folder, self._template)
            if own and self._base:
                (own / BASE_NOTE).write_text(self._base)

    @together
    def publish(self, folder: Path | None = None, *, merged: bool = True, sent: bool = False) -> Weights:
        """The current weights for engines. Without a folder they are for an engine in this process: the live tensors if
        nothing is sharded, so the engine must copy them before the next update. With a folder they are written there as
        a Hugging Face model in the dtype of the forward pass, norms and biases in fp32; without `merged`, only
        adapters, in PEFT's format; `sent`: only config.json, for `send`. Raises OSError, and RunHalted for weights that
        are not finite.

        Publishing ends the learning of a step, so gradients are dropped and the memory of passes is returned."""
        for parameter in self.parameters:
            parameter.grad = None
        give_back()
        if folder is None:
            return Weights(version=self.version, tensors=self._tensors(None), fingerprint=self.fingerprint())
        alone = self._adapts and not merged
        self._write(folder, self.dtype, torch.float32, whole=not (alone or sent), adapter=folder if alone else None)
        canary = self.canary()
        give_back()
        return Weights(version=self.version, folder=str(folder), canary=canary, fingerprint=self.fingerprint())

    def send(self, put: Put, weights: Weights) -> None:
        """Pass each tensor of the published weights to `put`, under the name and in the dtype that `publish` gives it,
        layer by layer, so that no rank ever holds the whole model. Waits for an update in progress. Raises
        EngineUnavailable if the policy has changed since, and what `put` raises."""
        self._put = put
        try:
            sent = self._send(weights.fingerprint)
        finally:
            del self._put
        if not sent:
            raise EngineUnavailable(f"weights {weights.version} have changed, and the next are not published yet")

    @together
    @torch.no_grad()
    def _send(self, fingerprint: str) -> bool:
        """Whether the weights match the fingerprint; rank 0 sends them, the others help to gather."""
        if not self.ranks.share(self.fingerprint() == fingerprint):
            return False
        state, left_out = self.model.state_dict(), tied(self.model)
        for layer in by_layer(name for name in state if name not in left_out):
            whole = {name: full(state[name]) for name in layer}
            failed = self._put_layer(whole) if not self.ranks.rank else None
            if self.ranks.share(failed is not None):  # no rank gathers the next layer while rank 0 sends this one
                if failed:
                    raise failed
                break
        return True

    def _put_layer(self, whole: Mapping[str, torch.Tensor]) -> Exception | None:
        """Returns an error instead of raising it, so the other ranks learn of it first."""
        tensors = {name: each.to(self._sent_type(each)) for name, each in whole.items()}
        try:
            for name, tensor in self._as_published(tensors, self.model).items():
                self._put(name, tensor)
        except Exception as error:
            return error
        return None

    def _sent_type(self, tensor: torch.Tensor) -> torch.dtype:
        return self.dtype if tensor.ndim > 1 else torch.float32

    def fingerprint(self) -> str:
        """A hash of the first numbers of each trained tensor, exact to the bit; an update changes nearly all."""
        firsts = [local(parameter).flatten()[:FINGERPRINT_NUMBERS] for _, parameter in trained(self.model)]
        return hashlib.sha256(torch.cat(firsts).cpu().numpy().tobytes()).hexdigest()

    def _write(
        self,
        folder: Path,
        dtype: torch.dtype,
        vectors: torch.dtype | None = None,
        *,
        whole: bool,
        adapter: Path | None,
    ) -> None:
        """Write the config, the adapter in its own folder or the same one, and the whole model; dtypes as for
        `_tensors`. Collective."""
        self.require_finite()
        own = adapters(self.model) if adapter else {}
        tensors = self._tensors(dtype, vectors) if whole else {}
        if self.ranks.rank:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.model.config.save_pretrained(folder)
        if adapter:
            save_adapters(self.model, own, adapter)
        if whole:
            file, written = folder / "model.safetensors", self._as_published(tensors, self.model)
            with naming(file):
                save_file({name: value.contiguous() for name, value in written.items()}, file, {"format": "pt"})

    @together
    @torch.no_grad()
    def canary(self) -> tuple[Canary, ...]:
        """Rows of fixed tokens, the same in every run, with the log-probability of each under the current weights, to
        detect engines that hold other weights unnoticed.

        Source: ours. They detect weights that did not arrive, arrived in part, or are computed from an older copy
        (vLLM's tied LM head on CPUs), and wrong rotary angles. Not detected: a difference as small as rounding, such as
        one step's at a low learning rate."""
        chance, config = random.Random(0), self.model.config.get_text_config()
        most = min(getattr(config, "max_position_embeddings", None) or CANARY_TOKENS[-1], CANARY_TOKENS[-1])
        rows = [[chance.randrange(self._known) for _ in range(min(count, most))] for count in CANARY_TOKENS]
        found = self._canary_logprobs(rows, self.autocast())
        noises: list[float | None] = [None] * len(rows)
        if self.dtype != torch.float32:
            with widened(self.model):
                exact = self._canary_logprobs(rows, nullcontext())
            noises = [fmean(gaps(*both)) for both in zip(found, exact, strict=True)]
        reshard(self.model)
        return tuple(
            Canary(token_ids=tuple(row), logprobs=tuple(numbers), noise=noise)
            for row, numbers, noise in zip(rows, found, noises, strict=True)
        )

    def _canary_logprobs(self, rows: list[list[int]], precision: AbstractContextManager[Any]) -> list[list[float]]:
        counted = [[place >= max(1, len(row) - CANARY_COUNTED) for place in range(len(row))] for row in rows]
        with self.head(1.0) as head, precision:
            head = replace(head, weight=head.weight.float())
            whole, beside = len(rows) * max(map(len, rows)), not is_packed(self.model)
            (micro,) = pack(rows, counted, whole, self.device, share=False, side_by_side=beside)
            hidden = hidden_states(self.model.eval(), micro)[micro.places_K]
            logprobs = score_tokens(head, hidden.float(), micro.targets_K)[0].tolist()
        return [
            [own for own, (of, _) in zip(logprobs, micro.tokens_K, strict=True) if of == i] for i in range(len(rows))
        ]

    @together
    def restore(self, folder: Path) -> None:
        """Take the fp32 weights that a learner's `save` left in `folder`, on any number of ranks. Raises OSError."""
        load_state(folder, weights_of(self.model))

    @together
    def distance(self, folder: Path) -> float:
        """The largest difference between a trained weight and the one that a learner's `save` left in `folder`; 0 if
        all are identical. Raises OSError."""
        own = weights_of(self.model)
        saved = {name: value.clone() for name, value in own.items()}
        load_state(folder, saved)
        gaps_here = (float((full(saved[name]) - full(value)).abs().max()) for name, value in own.items())
        return max(gaps_here, default=0.0)

    def require_finite(self) -> None:
        """Raises RunHalted, on all ranks: weights that hold nan or inf are never written. Collective."""
        if not all(self.ranks.gather(all(bool(local(each).isfinite().all()) for each in self.parameters))):
            raise RunHalted("the model's weights hold nan or inf, so nothing is saved; resume from the last checkpoint")

    def _tensors(self, dtype: torch.dtype | None, vectors: torch.dtype | None = None) -> Mapping[str, torch.Tensor]:
        """Unsharded tensors by name, tied ones once; empty on ranks above 0. vectors: another dtype for those of one
        dimension."""
        tensors, left_out = {}, tied(self.model)
        state = Merged(self.model, left_out) if self._adapts else self.model.state_dict()
        if self._adapts and dtype is None and not self.ranks.mesh:
            return state  # merged while the engine copies them, so that no second model is held
        for name, value in state.items():
            if name not in left_out:
                whole = full(value.detach())
                if not self.ranks.rank:
                    whole = whole.cpu() if self._adapts or self.ranks.mesh else whole  # a GPU may have no room for all
                    tensors[name] = whole if dtype is None else whole.to(dtype if whole.ndim > 1 else vectors or dtype)
        return tensors

    def _as_published(self, tensors: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
        """Tensors under the names of the model's source folder, which vLLM knows: transformers fuses experts of a
        layer as one tensor. Raises ConfigError for names or shapes that the folder does not have."""
        from transformers.core_model_loading import revert_weight_conversion

        found: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
        shapes = {name.removeprefix(f"{model.base_model_prefix}."): tuple(each.shape) for name, each in found.items()}
        came_as = {name.removeprefix(f"{model.base_model_prefix}."): shape for name, shape in self._came_as.items()}
        other = sorted(name for name, shape in shapes.items() if came_as.get(name) != shape)
        if came_as and other:
            raise ConfigError(
                f"a model of type {model.config.model_type} would be saved in another layout than {model.name_or_path} "
                f"has: {len(other)} of its {len(shapes)} tensors, such as {other[0]}, are not there or of another shape"
            )
        return found


def by_layer(names: Iterable[str]) -> Iterator[list[str]]:
    """Names in their order, grouped by layer: those equal up to and including their first number."""
    for _, layer in groupby(names, key=lambda name: re.findall(r"^\D*\d+", name)):
        yield list(layer)


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that learn, by name."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Trained weights, under the names that they are saved by."""
    return {f"weights.{name}": parameter.detach() for name, parameter in trained(model)}


def tied(model: Any) -> set[str]:
    """Names of tensors tied to others."""
    return set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()


def save_state(folder: Path, tensors: dict[str, Any]) -> None:
    """Collective. Raises OSError."""
    with _state_of(folder) as target:
        save(tensors, storage_writer=FileSystemWriter(target), no_dist=not dist.is_initialized())


def load_state(folder: Path, tensors: dict[str, Any]) -> None:
    """Collective; fills `tensors` in place. Raises OSError."""
    with _state_of(folder) as target:
        load(tensors, storage_reader=FileSystemReader(target), no_dist=not dist.is_initialized())


def names_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every saved tensor. Raises OSError."""
    found = FileSystemReader(folder / STATE_FOLDER).read_metadata().state_dict_metadata
    return {name: tuple(entry.size) for name, entry in found.items() if hasattr(entry, "size")}


def moments(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """Optimizer state, by parameter name."""
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"moments.{names[parameter]}.{key}": value
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def restore_moments(folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Restore the optimizer state that `moments` saved. Collective. Raises OSError."""
    owners = {id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    parameters = {f"moments.{name}": parameter for name, parameter in model.named_parameters()}
    saved: dict[str, torch.Tensor] = {}
    for entry, shape in names_in(folder).items():
        name, _, key = entry.rpartition(".")
        if (parameter := parameters.get(name)) is not None:
            owner, alike = owners[id(parameter)], shape == tuple(parameter.shape)
            dtype = getattr(owner, "moments_dtype", parameter.dtype)  # what is read is converted to it
            like = torch.zeros_like(parameter, dtype=dtype) if alike else torch.zeros(shape, device=parameter.device)
            owner.state[parameter][key] = saved[entry] = like
    load_state(folder, saved)


@contextmanager
def _state_of(folder: Path) -> Iterator[Path]:
    """The state's path. Within this context an error caused by an OSError or Ctrl-C is raised as that, and torch's
    warning about a single process is silenced."""
    target = folder / STATE_FOLDER
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield target
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        cause: BaseException | None = first
        while cause and not isinstance(cause, (OSError, KeyboardInterrupt)):
            cause = cause.__cause__ or cause.__context__
        raise cause or OSError(f"{target}: {first}") from error
