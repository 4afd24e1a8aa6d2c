"""Memory and CPU time of the LM head for one learner row: logits of the whole row against chunks.

    python benchmarks/learner_memory.py                       # T = 4,096, V = 151,936, hidden 896: about three minutes
    python benchmarks/learner_memory.py --tokens 512          # shorter

Each form runs in a process of its own and reports how much its resident set grew above hidden states and weights, at
its peak; the LM head's own gradient is part of that. Then both gradients are compared. Prints a table and last one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rocstar.learning.head import Head, backward_tokens

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--form", choices=("naive", "chunked"), help="run one form and print its figures (internal)")
    parser.add_argument("--gradients", type=Path, help="where --form leaves them (internal)")
    arguments = parser.parse_args()
    if arguments.form:
        print(json.dumps(measured(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {form: run(arguments, form, Path(folder) / form) for form in ("chunked", "naive")}
        found["difference"] = compared(Path(folder))
    own = arguments.vocabulary * arguments.hidden * 4
    print(f"T {arguments.tokens}, V {arguments.vocabulary}, hidden {arguments.hidden}, fp32, one thread")
    print(f"the LM head's own gradient: {own / MIB:.0f} MiB\n")
    print(f"{'form':10}{'peak growth, MiB':>18}{'CPU s':>8}")
    for form in ("naive", "chunked"):
        print(f"{form:10}{found[form]['peak_bytes'] / MIB:18.0f}{found[form]['cpu_seconds']:8.1f}")
    print("\nlargest difference of gradients, relative to the largest entry: " + json.dumps(found["difference"]))
    print(json.dumps({**vars(arguments), "form": None, "gradients": None, **found}))


def run(arguments: argparse.Namespace, form: str, gradients: Path) -> dict[str, float]:
    sizes = [f"--{name}={getattr(arguments, name)}" for name in ("tokens", "vocabulary", "hidden")]
    command = [sys.executable, __file__, *sizes, "--form", form, "--gradients", str(gradients)]
    last = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    figures: dict[str, float] = json.loads(last)
    return figures


def measured(arguments: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.hidden, generator=generator)
    weight = (torch.randn(arguments.vocabulary, arguments.hidden, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(0, arguments.vocabulary, (arguments.tokens,), generator=generator)
    advantages = torch.randn(arguments.tokens, generator=generator)
    form = naive if arguments.form == "naive" else chunked
    torch.mm(hidden[:64], weight.detach()[:64].T)  # the first product sets the library up
    with Peak() as peak:
        begin = time.process_time()
        gradient = form(hidden, weight, targets, advantages)
        seconds = time.process_time() - begin - peak.cpu_seconds()
    torch.save({"hidden": gradient, "head": weight.grad}, arguments.gradients)
    return {"peak_bytes": peak.growth, "cpu_seconds": seconds}


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor | None:
    """As at d725079: all logits, entropy from the same softmax."""
    leaf = hidden.requires_grad_()
    everything = torch.log_softmax(leaf @ weight.T, -1)
    logprobs = everything.gather(-1, targets[:, None]).squeeze(-1)
    entropies = -(everything.exp() * everything).sum(-1)
    loss = (-(logprobs - logprobs.detach()).exp() * advantages).sum() / len(targets) + 0.0 * entropies.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return leaf.grad


def chunked(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor | None:
    def loss(logprobs: torch.Tensor, entropies: torch.Tensor, chunk: slice) -> torch.Tensor:
        return (-(logprobs - logprobs.detach()).exp() * advantages[chunk]).sum() / len(targets)

    return backward_tokens(Head(weight=weight, bias=None), hidden, targets, loss, entropy_gradient=False)[2]


class Peak:
    """Growth of the resident set while the context lasts, by a thread that looks every two milliseconds."""

    def __enter__(self) -> Peak:
        self._before = self._highest = resident()
        self._over = threading.Event()
        self._used = 0.0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self._highest - self._before

    def cpu_seconds(self) -> float:
        """What watching itself cost."""
        return self._used

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self._highest = max(self._highest, resident())
            self._used = time.thread_time()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def compared(folder: Path) -> dict[str, float]:
    mine, other = (torch.load(folder / form, mmap=True) for form in ("chunked", "naive"))
    return {
        name: float((mine[name] - other[name]).abs().max() / other[name].abs().max()) for name in ("hidden", "head")
    }


if __name__ == "__main__":
    main()
