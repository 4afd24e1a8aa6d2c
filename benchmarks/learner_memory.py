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
import sys
import tempfile
from pathlib import Path

import torch
from frame import Table, of_child, parser, peak_bytes, report, spent
from torch import Tensor

from rocstar.learning.head import Head, backward_tokens

MIB = 2**20


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--vocabulary", type=int, default=151_936)
    options.add_argument("--hidden", type=int, default=896)
    options.add_argument("--form", choices=("naive", "chunked"), help="run one form and print its figures (internal)")
    options.add_argument("--gradients", type=Path, help="where --form leaves them (internal)")
    arguments = options.parse_args()
    if arguments.form:
        print(json.dumps(measured(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {
            form: of_child(*sys.argv[1:], "--form", form, "--gradients", f"{folder}/{form}")
            for form in ("chunked", "naive")
        }
        found["difference"] = compared(Path(folder))
    own = arguments.vocabulary * arguments.hidden * 4
    print(f"T {arguments.tokens}, V {arguments.vocabulary}, hidden {arguments.hidden}, fp32, one thread")
    print(f"the LM head's own gradient: {own / MIB:.0f} MiB")
    table = Table("form", "peak growth, MiB", "CPU s")
    for form in ("naive", "chunked"):
        table.row(form, found[form]["peak_bytes"] // MIB, found[form]["cpu_seconds"])
    print("largest difference of gradients, relative to the largest entry: " + json.dumps(found["difference"]))
    report(tokens=arguments.tokens, vocabulary=arguments.vocabulary, hidden=arguments.hidden, **found)


def measured(arguments: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(arguments.tokens, arguments.hidden, generator=generator)
    weight = (torch.randn(arguments.vocabulary, arguments.hidden, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(0, arguments.vocabulary, (arguments.tokens,), generator=generator)
    advantages = torch.randn(arguments.tokens, generator=generator)
    form = naive if arguments.form == "naive" else chunked
    torch.mm(hidden[:64], weight.detach()[:64].T)  # the first product sets the library up
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak_bytes()
    with spent() as seconds:
        gradient = form(hidden, weight, targets, advantages)
    peak = peak_bytes() - before
    torch.save({"hidden": gradient, "head": weight.grad}, arguments.gradients)
    return {"peak_bytes": peak, "cpu_seconds": seconds.cpu}


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor | None:
    """All logits, entropy from the same softmax."""
    leaf = hidden.requires_grad_()
    everything = torch.log_softmax(leaf @ weight.T, -1)
    logprobs = everything.gather(-1, targets[:, None]).squeeze(-1)
    entropies = -(everything.exp() * everything).sum(-1)
    loss = (-(logprobs - logprobs.detach()).exp() * advantages).sum() / len(targets) + 0.0 * entropies.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return leaf.grad


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Tensor | None:
    def loss(logprobs: Tensor, entropies: Tensor, chunk: slice) -> Tensor:
        return (-(logprobs - logprobs.detach()).exp() * advantages[chunk]).sum() / len(targets)

    return backward_tokens(Head(weight=weight, bias=None), hidden, targets, loss)[1]


def compared(folder: Path) -> dict[str, float]:
    mine, other = (torch.load(folder / form, mmap=True) for form in ("chunked", "naive"))
    return {
        name: float((mine[name] - other[name]).abs().max() / other[name].abs().max()) for name in ("hidden", "head")
    }


if __name__ == "__main__":
    main()
