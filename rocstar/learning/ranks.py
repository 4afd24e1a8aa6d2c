"""The processes that learn together. Rank 0 drives, and its code is the same for one rank and for many:

    rank 0          policy.save(folder)   ->  sends "policy.save" to the others, then does its own part
    ranks above 0   serve()               ->  run the calls they receive until rank 0 ends

A method that every rank runs is marked `@together`. torchrun starts the ranks, or rank 0 does (`lead`), as its children
(`cluster/__init__.py`) or Ray's actors (`cluster/actors.py`).

Weights are sharded over the ranks layer by layer (FSDP2: `shard`).

When a rank dies, its connections close; every other rank then fails in its next exchange and exits, rank 0 with
RunHalted. A lost machine closes nothing, so rank 0 also asks the launcher of its ranks (`watch`).
Not protected: ranks trust one another and the network between them (objects travel pickled)."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import functools
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rocstar.errors import RunHalted, first_line
from rocstar.support.child import leave_signals_to_parent

IDLE = timedelta(days=30)  # a rank waits for rank 0 as long as rollouts take; the connection tells of its death
EXCHANGE = timedelta(minutes=30)  # for one exchange of tensors
START = timedelta(minutes=5)
SIOCGIFADDR = 0x8915  # Linux's request for the address of an interface
WATCH_SECONDS = 5.0  # between two checks for a rank that has ended though its connections stay open
MEETING_SECONDS = 0.2  # between two checks for ranks that have not joined
RESUME = "resume the run from its last checkpoint, on as many ranks as there are"


class RankMember(Protocol):
    """An object that every rank has one of; `role` is its name."""

    role: str
    ranks: Ranks


class StartedRank(Protocol):
    """A rank above 0, as seen by rank 0, which started it."""

    def ended(self, seconds: float) -> str | None:
        """How it ended, as in "ended with SIGKILL", after waiting at most so long; None while it lives."""

    def end(self) -> None:
        """Kill it and wait. Harmless when it is gone."""


S = TypeVar("S", bound=RankMember)
P = ParamSpec("P")
R = TypeVar("R")


class Ranks:
    """This process among those that learn together."""

    def __init__(self, rank: int = 0, size: int = 1, mesh: DeviceMesh | None = None, *, offload: bool = False) -> None:
        self.rank, self.size, self.mesh, self.offload = rank, size, mesh, offload
        self.local_rank = rank
        self.children: Sequence[StartedRank] = ()
        self._control = dist.new_group(backend="gloo", timeout=IDLE) if mesh is not None else None
        self._depth = 0
        self._closed, self._watcher = threading.Event(), threading.Thread()
        self._turn = threading.RLock()  # weights may be sent from another thread than that of updates

    # -- exchanges --------------------------------------------------------------------------------------------------

    def sum(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Numbers summed over ranks; collective."""
        total = torch.stack([value.detach().double().cpu() for value in values.values()])
        if self.size > 1:
            dist.all_reduce(total, group=self._control)
        return dict(zip(values, total.tolist(), strict=True))

    def share(self, value: Any) -> Any:
        """Rank 0's value on every rank; collective."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank; collective."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    # -- rank 0 sends calls, the others run them ----------------------------------------------------------------------

    def make(self, member: RankMember, **settings: Any) -> None:
        """First line of a member's constructor: other ranks create theirs by `on_rank`, with the same `settings`."""
        with self._turn, self.guarded(f"making the {member.role}"):
            if self._tells:
                self.share((member.role, type(member), (), settings))

    @contextlib.contextmanager
    def on_ranks(self, role: str, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Iterator[None]:
        with self._turn, self.guarded(f"{role}.{method}"):
            tells = self._tells
            self._depth += 1
            try:
                if tells:
                    self.check()
                    self.share((role, method, arguments, named))
                yield
            finally:
                self._depth -= 1

    def check(self) -> None:
        """Raises RunHalted when a child has ended. For rank 0 while it is not learning; an exchange detects it by
        itself."""
        if how := _ending(self.children, 0):
            raise RunHalted(f"learner {how}; {RESUME}")

    def watch(self, connections: Set[str]) -> None:
        """Rank 0: break the exchange under way, which takes these connections, once a child has ended. Those to a
        machine without power or network stay open, so that exchange would wait for as long as its timeout."""

        def look() -> None:
            while not self._closed.wait(WATCH_SECONDS):
                if _ending(self.children, 0):
                    return _break(connections)

        self._watcher = threading.Thread(target=look, daemon=True)
        self._watcher.start()

    @property
    def busy(self) -> bool:
        """Whether an exchange is in progress whose end would leave other ranks, or a sharded model, inconsistent."""
        return self.mesh is not None and self._depth > 0

    @property
    def _tells(self) -> bool:
        return self.size > 1 and self.rank == 0 and self._depth == 0

    @contextlib.contextmanager
    def guarded(self, doing: str) -> Iterator[None]:
        """Turn torch's error for a lost rank into one sentence."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not _broken_exchange(error):
                raise
            how = _ending(self.children, 2) or first_line(error)
            raise RunHalted(f"learner ranks lost one another during {doing} ({how}); {RESUME}") from error

    # -- ranks above 0 ------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Runs the calls that rank 0 sends, waits for nothing else, ends with rank 0's request. Raises if rank 0 is
        gone."""
        members: dict[str, Any] = {}
        while True:
            role, what, arguments, named = self.share(None)
            if role == "stop":
                return
            if isinstance(what, type):
                members[role] = what.on_rank(self, members, **named)  # type: ignore[attr-defined]
            else:
                getattr(members[role], what)(*arguments, **named)

    def abandon(self) -> None:
        """Kill the ranks that this one started, from any thread: an exchange with them fails. torchrun ends those that
        it started."""
        for child in self.children:
            child.end()

    def close(self) -> None:
        """End the other ranks. Harmless when they are gone."""
        if self.size > 1 and self.rank == 0 and not self.children:
            with contextlib.suppress(RuntimeError):
                self.share(("stop", None, (), {}))
        self._closed.set()
        if self._watcher.ident:  # it asks Ray, which may end after us
            self._watcher.join()
        self.abandon()  # every call of rank 0 is done, so there is nothing to wait for
        if self.mesh is not None and dist.is_initialized():
            dist.destroy_process_group()


ALONE = Ranks()


def together(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that all ranks run with the same arguments whenever rank 0 calls it."""

    @functools.wraps(method)
    def on_all(self: S, *arguments: P.args, **named: P.kwargs) -> R:
        with self.ranks.on_ranks(self.role, method.__name__, arguments, named):
            return method(self, *arguments, **named)

    return on_all  # type: ignore[return-value]


def serve_rank(environment: Mapping[str, str]) -> None:
    """Life of a rank above 0, from torchrun's variables: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK."""
    leave_signals_to_parent()
    torch.set_num_threads(int(environment.get("ROCSTAR_THREADS", "1")))
    ranks = join(environment)
    with ranks.guarded("waiting for rank 0"):
        ranks.serve()
    ranks.close()


def lead(
    size: int,
    device: str,
    begin: Callable[[Mapping[str, str]], StartedRank],
    *,
    offload: bool = False,
    host: str = "127.0.0.1",
    gpus: Sequence[int] = (),
) -> Ranks:
    """This process as rank 0. `begin` starts each of the others, given its torchrun variables (see `serve_rank`).

    device, offload: as for `join`. host: where they find this process. gpus: of each rank, as for `start`. Raises
    RunHalted if one ends or does not join before all have met."""
    gpus = gpus or range(size)
    store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=START)
    shared = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(store.port),
        "ROCSTAR_THREADS": str(torch.get_num_threads()),
    }
    children: list[StartedRank] = []
    try:
        for rank in range(1, size):
            children.append(begin({**shared, "RANK": str(rank), "LOCAL_RANK": str(gpus[rank])}))
        own = {**shared, "RANK": "0", "LOCAL_RANK": str(gpus[0])}
        return join(own, device, offload=offload, store=store, children=children)
    except BaseException as error:
        for child in children:
            child.end()
        if isinstance(error, RuntimeError) and _broken_exchange(error):
            raise RunHalted(
                f"the {size} learner ranks did not meet: {first_line(error)}; see what they printed"
            ) from error
        raise


def _ending(children: Sequence[StartedRank], seconds: float) -> str | None:
    """How one of them has ended, as in "rank 1 ended with SIGKILL", after waiting at most so long for each; None while
    all live. One ended by a signal comes first: the ranks that lose it end by themselves."""
    found: list[str] = []
    for rank, child in enumerate(children, start=1):
        if how := child.ended(0.0 if found else seconds):
            found.append(f"rank {rank} {how}")
    return min(found, key=lambda ending: "exit code" in ending, default=None)


def _await(children: Sequence[StartedRank], shared: Store) -> None:
    """Wait until each has reported itself in the store. Raises RunHalted if one ends or does not join."""
    deadline = time.monotonic() + START.total_seconds()
    while children and not shared.check([str(rank) for rank in range(1, len(children) + 1)]):
        if how := _ending(children, MEETING_SECONDS / len(children)):
            raise RunHalted(f"learner {how} before all ranks had met; what it printed says why")
        if time.monotonic() > deadline:
            raise RunHalted(f"the {len(children) + 1} learner ranks did not meet within {START}; see what they printed")


def join(
    environment: Mapping[str, str],
    device: str = "",
    *,
    offload: bool = False,
    store: TCPStore | None = None,
    children: Sequence[StartedRank] = (),
) -> Ranks:
    """This process as torchrun's variables say. Rank 0 alone gives the kind of device that all learn on, and whether
    optimizer state is kept in main memory, and writes both to the store. store: rank 0's, where it exists already."""
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    local_rank = int(environment.get("LOCAL_RANK", rank))
    if store is None:
        master = rank == 0 and "TORCHELASTIC_RUN_ID" not in environment
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = TCPStore(host, port, size, is_master=master, timeout=START)
    shared = PrefixStore("rocstar", store)
    if device:
        shared.set("device", f"{device} {int(offload)}")
    kind, offloaded = shared.get("device").decode().split()
    backend = "gloo"
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
        torch.cuda.init()  # type: ignore[no-untyped-call]  # else the mesh guesses a device from the rank
        backend = "cpu:gloo,cuda:nccl"
    shared.set(str(rank), "is here")
    _await(children, shared)  # torch would wait long for a rank that has ended
    chosen = None if "GLOO_SOCKET_IFNAME" in os.environ else interface_towards(store.host)
    if chosen:  # else gloo listens where this machine's name leads: on Debian to 127.0.1.1, which no other can reach
        os.environ["GLOO_SOCKET_IFNAME"] = chosen
    before = _connections().keys()
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=EXCHANGE)
        ranks = Ranks(rank, size, init_device_mesh(kind, (size,)), offload=offloaded == "1")
    finally:
        if chosen:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
    ranks.local_rank, ranks.children = local_rank, children
    if children:
        ranks.watch(_connections().keys() - before)
    return ranks


def _connections() -> dict[str, int]:
    """Descriptors of this process's sockets, by the kernel's name of each, which no later one has."""
    found: dict[str, int] = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found[os.readlink(f"/proc/self/fd/{descriptor}")] = int(descriptor)
    return {name: descriptor for name, descriptor in found.items() if name.startswith("socket:")}


def _break(connections: Set[str]) -> None:
    for name, descriptor in _connections().items():
        if name in connections:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # raises for one that listens, which gloo does not survive without
                connection.shutdown(socket.SHUT_RDWR)


def interface_towards(host: str) -> str | None:
    """Name of the network interface by which this machine reaches `host`, that of loopback where `host` is this machine
    under a loopback address. None where the system does not tell, as for a host that has IPv6 alone."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # of a datagram socket: sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                if fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == own:
                    return name
    return None


def _broken_exchange(error: RuntimeError) -> bool:
    """gloo raises a plain RuntimeError that names its own source file."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


# -- weights over all ranks (FSDP2): each holds a share of every weight; gradients are summed, not averaged ------------


def shard(
    model: Any, ranks: Ranks, device: torch.device, dtype: torch.dtype, changes: Sequence[Callable[[Any], None]]
) -> Any:
    """A model over all ranks with the weights of rank 0's `model`; other ranks pass None and never hold the whole
    model. changes: those already made to `model`, in their order.

    Layers are gathered one by one, in the dtype of the pass. Embeddings stay gathered between forward and backward, and
    so, in fp32, do norms and position embeddings. The LM head is excluded: `Policy.head` gathers it once for all chunks
    of an update."""
    from transformers import AutoModelForCausalLM

    given = None if ranks.rank else (model.config, model.generation_config, model.config._attn_implementation)
    config, generation, attention = ranks.share(given)
    own = copy.deepcopy(config)
    own._attn_implementation = None  # what the model's class prefers, as when a folder is loaded
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(own, dtype=torch.float32, trust_remote_code=False)
    for change in changes:
        change(empty)
    empty.set_attn_implementation(attention)  # rank 0 has chosen it by the weights, which are not here
    empty.config.dtype, empty.generation_config = config.dtype, generation
    if model is not None:  # what tells the names of its folder
        empty._weight_conversions = getattr(model, "_weight_conversions", None)
    settings: dict[str, Any] = {
        "mesh": ranks.mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy() if ranks.offload and device.type == "cuda" else OffloadPolicy(),
    }
    leaves = [(module, list(module.parameters())) for module in empty.modules() if not list(module.children())]
    tokens = empty.get_input_embeddings()
    positions = [module for module, _ in leaves if isinstance(module, torch.nn.Embedding) and module is not tokens]
    norms = [module for module, own in leaves if own and all(each.ndim == 1 for each in own)]
    if positions or norms:
        exact = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard([*positions, *norms], **{**settings, "mp_policy": exact}, reshard_after_forward=False)
    layers = set(empty._no_split_modules or ())
    for module in empty.modules():
        if type(module).__name__ in layers:
            fully_shard(module, **settings)
    fully_shard(empty.base_model, **settings)
    head = empty.get_output_embeddings()
    if config.tie_word_embeddings:
        head.weight = empty.get_input_embeddings().weight
    else:
        fully_shard(head, **settings)
    for module in empty.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
            module.set_gradient_divide_factor(1.0)
    empty.to_empty(device="cpu" if ranks.offload else device)
    if config.tie_word_embeddings:
        head.weight = empty.get_input_embeddings().weight
    weights = {} if ranks.rank else model.state_dict()
    buffers = ranks.share(None if ranks.rank else {name: value.cpu() for name, value in model.named_buffers()})
    for name, buffer in empty.named_buffers():  # rotary frequencies are in no state dict
        buffer.copy_(buffers[name])
    set_model_state_dict(
        empty, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    )
    return empty


def reshard(model: Any) -> None:
    """Free gathered weights: after a forward pass without a backward one, FSDP2 keeps those of its root."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def full(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """The whole of a sharded tensor, detached; other tensors unchanged. Collective."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    whole: torch.Tensor = tensor.full_tensor().detach()
    return whole if device is None else whole.to(device)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, other tensors unchanged; detached."""
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def first_index(tensor: torch.Tensor) -> int:
    """Index in the whole tensor, flattened, of the first number of this rank's part."""
    if not isinstance(tensor, DTensor):
        return 0
    _, (row, *_) = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return row * math.prod(tensor.shape[1:])


def reduced(whole: torch.Tensor, like: Any) -> Any:
    """This rank's shard of the sum over ranks of `whole`; collective."""
    summed = DTensor.from_local(whole, like.device_mesh, [Partial()], run_check=False)
    return summed.redistribute(placements=like.placements)
