"""rocstar's extension of each vLLM worker process: loads new weights from a folder or straight from the learners, and
limits the vocabulary to the tokenizer's.

vLLM loads it with `--worker-extension-cls rocstar_vllm_worker.RocstarWorker`; its methods are called through POST
/collective_rpc. They return errors instead of raising, because an exception in a worker breaks the client's connection.
Not here: pausing and caches, which vLLM's own endpoints do."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.utils._python_dispatch import TorchDispatchMode

Named = Iterator[tuple[str, torch.Tensor]]


class RocstarWorker:
    """Mixed into vLLM's own worker class; our names begin with rocstar_ so that they hide none of vLLM's."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: torch.device
    rank: int
    rocstar_known: int | None = None
    rocstar_receiver: Any = None
    """Receives sent weights (`rocstar_vllm_receive.Receiver`); importable only inside vLLM."""

    def rocstar_open(self, known: int, name: str = "") -> dict[str, Any]:
        """From now on ids from `known` on are not sampled and get no probability. Returns the facts that a client
        needs; if `name` is another server's, only this server's own name."""
        own = os.environ.get("ROCSTAR_SERVER_NAME", "")
        if name not in ("", own):
            return {"name": own}
        from rocstar_vllm_receive import Receiver, memory_of  # type: ignore[import-not-found]

        if self.rocstar_known is None:
            self._rocstar_mask()
        self.rocstar_receiver = self.rocstar_receiver or Receiver(self.device)
        self.rocstar_known = known
        config, scheduler = self.model_config, self.vllm_config.scheduler_config
        return {
            "name": own,
            "vocab_size": config.get_vocab_size(),
            "max_tokens": config.max_model_len,
            "logprobs_mode": config.logprobs_mode,
            "dtype": str(config.dtype).removeprefix("torch."),
            "rows": scheduler.max_num_seqs,
            "scheduling": scheduler.policy,
            "device": self.device.type,
            "memory": memory_of(self.device),
        }

    def rocstar_load(self, folder: str) -> dict[str, str]:
        """Load the weights of a Hugging Face folder, or of a PEFT adapter folder and its base model. Returns
        {"refused": why} if nothing was changed, and {"failed": why} if some weights may have been."""
        try:
            tensors = _tensors(Path(folder), self.model_config.dtype)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            return {"refused": f"its files could not be read: {error}"}
        if tensors is None:
            return {"refused": "it holds no *.safetensors file that this machine can read"}
        return self._rocstar_take(tensors)

    def rocstar_receive(self, plan: dict[str, Any]) -> dict[str, str]:
        """Load the weights that a learner sends; it continues once this call has begun on all workers. Returns as
        `rocstar_load`."""
        try:
            sent = self.rocstar_receiver.tensors(plan, self.rank)
            first = next(sent)
        except (RuntimeError, OSError, StopIteration) as error:
            return {"refused": f"they were not sent: {error}"}
        return self._rocstar_take(chain([first], sent))

    def _rocstar_take(self, tensors: Named) -> dict[str, str]:
        try:
            self._rocstar_forget()
            with _Copies(self.model_runner.get_model()):
                self.model_runner.reload_weights(weights_iterator=tensors)
            self._rocstar_pack_again()
        except Exception as error:  # reported to the client, which takes this engine out of service
            return {"failed": repr(error)}
        return {}

    def rocstar_release(self) -> dict[str, str]:
        """On CPUs, where vLLM's own sleep frees nothing: return the memory of keys and values to the system; it is zero
        when it is used again."""
        libc = ctypes.CDLL(None)
        for cache in self.model_runner.kv_caches:
            begin, size = cache.untyped_storage().data_ptr(), cache.untyped_storage().nbytes()
            first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            length = (begin + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(max(0, length)), mmap.MADV_DONTNEED)
        return {}

    def _rocstar_forget(self) -> None:
        """Forget what a layer got in an exchange that broke off, since vLLM would count it as of this one; and, on
        CPUs, kernels of experts, since vLLM computes these from packed weights too and packs those of a layer without a
        kernel only."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self.model_runner.get_model().modules():
            method: Any = getattr(layer, "quant_method", None)
            begun = get_layerwise_info(layer)
            begun.load_numel = 0
            begun.loaded_weights.clear()
            if self.device.type == "cpu" and hasattr(method, "moe_kernel"):
                method.moe_kernel = None

    def _rocstar_pack_again(self) -> None:
        """Repack a tied LM head. On CPUs vLLM computes linear layers from a packed copy of their weights, and its
        reload repacks only layers with weights of their own, so a tied head would keep its old copy."""
        if self.device.type != "cpu":
            return
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for layer in self.model_runner.get_model().modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    def _rocstar_mask(self) -> None:
        """Mask the model's logits, which vLLM computes outside its compiled or captured graphs."""
        model = self.model_runner.get_model()
        compute = model.compute_logits

        def masked(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits: torch.Tensor | None = compute(*args, **kwargs)
            if logits is not None:  # None on ranks that do not sample
                logits[..., self.rocstar_known :] = -torch.inf
            return logits

        model.compute_logits = masked


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives vLLM's reload what a model copies into parameters without their loaders, as GPT-OSS does with experts and
    sinks. Until all of a layer is there its parameters are on the meta device, where such a copy would be lost."""

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        super().__init__()  # type: ignore[no-untyped-call]
        self._reload = layerwise
        self._awaited = {
            tensor.untyped_storage()._cdata: (layer, name)
            for layer in model.modules()
            for name, tensor in layerwise.get_layerwise_info(layer).restore_metadata[0].items()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_meta:
            layer, name = self._awaited.get(args[0].untyped_storage()._cdata, (None, ""))
            if layer and self._is_past_loader(layer, name):
                getattr(layer, name).weight_loader = _copied
                load = self._reload.make_online_process_loader(layer, name)
                load(getattr(layer, name), args[1], args[0].size(), args[0].stride(), args[0].storage_offset())
                return args[0]
        return func(*args, **(kwargs or {}))

    def _is_past_loader(self, layer: torch.nn.Module, name: str) -> bool:
        """A loader notes what it is given before it copies."""
        noted = self._reload.get_layerwise_info(layer).loaded_weights
        return not noted or noted[-1][0] != name or "offset" in noted[-1][1].arguments


def _copied(param: torch.Tensor, loaded_weight: torch.Tensor, size: Any, stride: Any, offset: int) -> None:
    param.data.as_strided(size, stride, offset).copy_(loaded_weight)


def _tensors(folder: Path, dtype: torch.dtype) -> Named | None:
    """None if there are none. Raises OSError, ValueError, KeyError, SafetensorError."""
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        return _adapted(folder, json.loads(adapter.read_text()), dtype)
    files = _files(folder)
    return _stored(files) if files else None


def _files(folder: Path, name: str = "*.safetensors") -> list[Any]:
    return [safe_open(path, "pt") for path in sorted(folder.glob(name))]


def _stored(files: list[Any]) -> Named:
    return ((name, file.get_tensor(name)) for file in files for name in file.keys())  # noqa: SIM118


def _adapted(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> Named:
    """The adapter's base model, with W + alpha / rank * B A in fp32 for each adapted layer; each W first rounded to
    `dtype`, as in the learner."""
    base = Path(config["base_model_name_or_path"])  # may hold its weights in other layouts too
    factors, stored = dict(_stored(_files(folder))), _files(base, "model*.safetensors")
    scale = config["lora_alpha"] / config["r"]
    ends = ".lora_A.weight", ".lora_B.weight"
    layers = {key.removeprefix("base_model.model.").removesuffix(ends[0]) for key in factors if key.endswith(ends[0])}
    if lost := layers - {name.removesuffix(".weight") for file in stored for name in file.keys()}:  # noqa: SIM118
        raise KeyError(f"{min(lost)} has an adapter and is not in {base}")

    def merged(name: str, weight: torch.Tensor) -> torch.Tensor:
        layer = name.removesuffix(".weight")
        if layer not in layers:
            return weight
        down, up = (factors[f"base_model.model.{layer}{end}"] for end in ends)
        both: torch.Tensor = weight.to(dtype).float() + (up @ down) * scale
        return both

    return ((name, merged(name, weight)) for name, weight in _stored(stored))
