"""Two processes learn what one learns; the death of one ends the other, and the run goes on with another number."""

from __future__ import annotations

import copy
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, load

from rocstar.cluster import start_ranks
from rocstar.config.places import ClusterSection
from rocstar.config.sections import LearningSection, ModelSection, SftSection
from rocstar.errors import EngineUnavailable, RunHalted
from rocstar.learning.forward import is_packed
from rocstar.learning.learner import GrpoLearner
from rocstar.learning.models import load_model
from rocstar.learning.policy import Put, _state_of, moments, save_state, trained, weights_of
from rocstar.learning.ranks import ALONE, Ranks, _ending
from rocstar.learning.sft import SftLearner
from rocstar.types import gaps
from tests.engines.test_precision import EXPERTS, lively
from tests.forks import fork_children
from tests.learning.examples import model, policy_of, rows, sft_rows
from tests.tiny_run import PYTHON, Command

SECTION = LearningSection(learning_rate=1e-3, warmup_steps=2, tokens_per_microbatch=20, kl_coefficient=0.1)
LEADER = """
import os, sys
from datetime import timedelta
from rocstar import cluster
from rocstar.learning import ranks

LIVES, learners = cluster.RankProcess.begin, int(sys.argv[3])

def begin(variables):
    if int(variables["RANK"]) + 1 < learners:
        return LIVES(variables)
    return cluster.RankProcess([sys.executable, "-c", sys.argv[1]], env={**os.environ, **variables})

ranks.START = timedelta(seconds=float(sys.argv[2]))
try:
    ranks.lead(learners, "cpu", begin)
except ranks.RunHalted as error:
    print(error)
"""
MEETS = """
import os, signal
from torch.distributed import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 3, is_master=False)
store.set("rank 2", "is here")
os.kill(os.getpid(), signal.SIGKILL)
"""

MEET_AT = """
import sys
import psutil
from rocstar.cluster import RankProcess
from rocstar.learning.ranks import lead

ranks = lead(2, "cpu", RankProcess.begin, host=sys.argv[1])
(other,) = ranks.children
print(*{socket.laddr.ip for socket in psutil.Process(other.pid).net_connections() if socket.status == "LISTEN"})
ranks.close()
"""

IS_CUT_OFF = """
import signal
from rocstar.cluster import RankProcess
from rocstar.learning import ranks

class Far(RankProcess):
    cut = False
    def ended(self, seconds):
        return "ended: its machine is gone" if self.cut else super().ended(seconds)

ranks.WATCH_SECONDS = 0.05
both = ranks.lead(2, "cpu", Far.begin)
both.children[0].send_signal(signal.SIGSTOP)
both.children[0].cut = True
try:
    with both.guarded("saving"):
        both.gather(1)
except ranks.RunHalted as error:
    print(error)
both.close()
"""


@pytest.mark.parametrize(
    ("dies", "patience", "learners", "told"),
    [
        ("raise SystemExit(3)", 300, 2, "learner rank 1 ended with exit code 3 before all ranks had met"),
        (MEETS, 300, 3, "learner rank 2 ended with SIGKILL before all ranks had met"),
        ("import time; time.sleep(1000)", 3, 2, "the 2 learner ranks did not meet"),
    ],
    ids=["at once", "while it meets", "never comes"],
)
def test_a_rank_that_dies_or_stays_away_while_ranks_meet_is_named(
    dies: str, patience: int, learners: int, told: str, tmp_path: Path
) -> None:
    """Rank 0 waited in silence for half an hour. dies: what the last rank does; those before it live."""
    ended = Command.start(tmp_path, "-c", LEADER, dies, str(patience), str(learners), act=PYTHON).wait()
    assert ended.code == 0 and ended.out.startswith(told), ended.out + ended.told


@pytest.mark.parametrize("own", [True, False], ids=["own address", "loopback"])
def test_ranks_listen_only_where_rank_0_is_reached(own: bool, tmp_path: Path) -> None:
    """On Debian that name leads to 127.0.1.1, so ranks of two machines did not meet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1" if own else "127.0.0.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        address = probe.getsockname()[0]
    ended = Command.start(tmp_path, "-c", MEET_AT, address, act=PYTHON).wait()
    assert (ended.code, ended.out) == (0, f"{address}\n"), ended.out + ended.told


def test_an_exchange_with_a_rank_whose_machine_is_lost_ends_though_its_connections_stay_open(tmp_path: Path) -> None:
    """Rank 0 waited for as long as TCP or the exchange's timeout takes, while Ray had known for minutes."""
    ended = Command.start(tmp_path, "-c", IS_CUT_OFF, act=PYTHON).wait()
    told = "learner ranks lost one another during saving (rank 1 ended: its machine is gone); resume the run"
    assert ended.code == 0 and ended.out.startswith(told), ended.out + ended.told


def learner(ranks: Ranks, seed: int = 0, **settings: Any) -> GrpoLearner:
    section = SECTION.model_copy(update=settings)
    return GrpoLearner(policy_of(model(seed), ranks=ranks), section, temperature=0.9)


def course(mine: GrpoLearner, seeds: range) -> list[dict[str, float]]:
    """Metrics of one update a seed, on rows that differ in length and number."""
    batches = [rows((12, 5, 9, 20, 7)[seed % 4 :], seed=seed) for seed in seeds]
    return [dict(mine.update(batch).metrics) for batch in batches]


def close(metrics: list[dict[str, float]], others: list[dict[str, float]]) -> bool:
    return all(mine == pytest.approx(other, abs=1e-5) for mine, other in zip(metrics, others, strict=True))


def refused(name: str) -> Put:
    """A `put` that takes no tensor of that name."""

    def put(this: str, tensor: torch.Tensor) -> None:
        if this == name:
            raise EngineUnavailable("no worker takes them")

    return put


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two, until one of the last tests ends them. While they are there torch saves and reads nothing without both."""
    with closing(start_ranks(ClusterSection(learners=2), ModelSection(), {})) as started:
        yield started


def test_two_ranks_learn_what_one_does(ranks: Ranks, tmp_path: Path) -> None:
    """With moments in bf16: the last test that these two ranks are in."""
    alone, both = learner(ALONE), learner(ranks)
    whole = course(alone, range(3))
    scored = alone.score(rows())
    assert close(course(both, range(3)), whole)
    both._policy.save(tmp_path / "model")
    for mine, other in zip(both.score(rows()), scored, strict=True):
        assert mine.old_logprobs == pytest.approx(other.old_logprobs, abs=1e-4)
    published: Any = both._policy.publish()
    for name, tensor in alone._policy.publish().tensors.items():  # type: ignore[union-attr]
        torch.testing.assert_close(published.tensors[name], tensor, atol=1e-4, rtol=0)
    sent: dict[str, torch.Tensor] = {}
    weights = both._policy.publish(tmp_path / "sent", sent=True)
    both._policy.send(lambda name, tensor: sent.update({name: tensor.clone()}), weights)
    assert sent.keys() == published.tensors.keys()
    assert all(torch.equal(sent[name], each) for name, each in published.tensors.items())
    for place in (0, len(sent) // 2, -1):
        with pytest.raises(EngineUnavailable, match="no worker takes them"):
            both._policy.send(refused(list(sent)[place]), weights)
    for mine, theirs in zip(both._policy.canary(), alone._policy.canary(), strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert len(load_file(tmp_path / "model" / "model.safetensors")) == len(published.tensors)


def test_sft_with_muon_on_sharded_matrices_follows_sft_on_one_rank(ranks: Ranks) -> None:
    section = SftSection(optimizer="muon", warmup_steps=0, adamw_learning_rate=1e-3)
    sharded, whole = (SftLearner(policy_of(model(), ranks=each), section, steps=9) for each in (ranks, ALONE))
    for step in range(3):
        assert sharded.update(sft_rows(), seed=step) == pytest.approx(whole.update(sft_rows(), seed=step), abs=1e-4)


def test_the_tokens_and_attempts_that_a_loss_leaves_out_are_those_that_one_rank_leaves_out(ranks: Ranks) -> None:
    settings = {"importance_cap": 1.0, "importance_outside": "mask", "importance_floor": 0.011, "off_policy_kl": 4.5}
    whole = course(learner(ALONE, **settings), range(3))
    assert all(0 < metrics["importance_capped"] < 1 for metrics in whole)
    assert any(0 < metrics["attempts_masked"] < 1 for metrics in whole)
    assert close(course(learner(ranks, **settings), range(3)), whole)


def test_a_rank_without_a_row_takes_part_in_all_exchanges(ranks: Ranks, tmp_path: Path) -> None:
    """They waited for it."""
    batch = rows((12,))
    alone, both = learner(ALONE), learner(ranks)
    assert close([dict(both.update(batch).metrics)], [dict(alone.update(batch).metrics)])
    for mine, expected in gradients(both, alone, tmp_path):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0)


def gradients(both: GrpoLearner, alone: GrpoLearner, folder: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Those of the only update of each, clipped, by parameter: AdamW's first moment, which ranks save together, is a
    tenth of it."""
    both.save(folder)
    for name, one in trained(alone._policy.model):
        saved = {f"moments.{name}.exp_avg": torch.zeros(one.shape)}
        with _state_of(folder) as state:
            load(saved, storage_reader=FileSystemReader(state), no_dist=True)  # what another rank need not take part in
        assert one.grad is not None
        yield 10 * saved[f"moments.{name}.exp_avg"], one.grad


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # OPT's layers return a view
@pytest.mark.parametrize(("kind", "packed"), [("Qwen3Moe", True), ("GptOss", False), ("OPT", True)])
def test_two_ranks_compute_in_bf16_as_one(ranks: Ranks, kind: str, packed: bool, tmp_path: Path) -> None:
    """They laid all rows side by side, padded, and a model that has no attention but its own ended rank 1. They rounded
    norms, position embeddings and the sums between layers too, and their canary rows told so little noise that servers
    which computed rightly were refused."""
    shapes = {**EXPERTS, "OPT": {"word_embed_proj_dim": 64, "ffn_dim": 128}}
    made, batch = lively(kind, **shapes[kind], max_position_embeddings=256), rows((40, 12, 33))

    def learner_in(dtype: str, where: Ranks) -> GrpoLearner:
        return GrpoLearner(policy_of(copy.deepcopy(made), ranks=where, dtype=dtype), LearningSection(warmup_steps=0))

    alone, both, exact = (learner_in(*each) for each in (("bfloat16", ALONE), ("bfloat16", ranks), ("float32", ALONE)))
    assert is_packed(alone._policy.model) == is_packed(both._policy.model) == packed
    one, two, fp32 = ([row.old_logprobs for row in each.score(batch)] for each in (alone, both, exact))
    assert distance(two, one) < 0.3 * distance(one, fp32)
    for mine, other in zip(both._policy.canary(), alone._policy.canary(), strict=True):
        assert mine.noise == pytest.approx(other.noise, rel=0.1)
    alone.update(batch), both.update(batch)
    for mine, expected in gradients(both, alone, tmp_path):
        assert float((mine - expected).norm()) < 0.03 * float(expected.norm())


def distance(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    return fmean(gap for one, other in zip(some, others, strict=True) for gap in gaps(one, other))


def test_two_ranks_learn_adapters_as_one_does(ranks: Ranks, tmp_path: Path) -> None:
    """In bf16 the model's own matrices are held in it, and layers are gathered in it on ranks."""
    pytest.importorskip("peft")
    from tests.learning import test_lora as lora

    for dtype, near in (("float32", 1e-6), ("bfloat16", 2e-2)):
        alone = lora.adapted(lora.base(tmp_path / dtype), dtype=dtype)
        whole = lora.course(alone)
        both = lora.adapted(tmp_path / dtype, ranks, dtype=dtype)
        for mine, other in zip(lora.course(both), whole, strict=True):
            assert mine == pytest.approx(other, abs=near)
        published: Any = both.publish()
        for name, tensor in alone.publish().tensors.items():  # type: ignore[union-attr]
            torch.testing.assert_close(
                published.tensors[name], tensor.float(), atol=10 * near, rtol=0, check_dtype=False
            )
        both.save(tmp_path / f"{dtype} model")
        assert len(both.canary()) == len(alone.canary())
        assert load_model(tmp_path / f"{dtype} model")


def test_a_dead_rank_ends_the_other_and_one_goes_on_from_their_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """The same with moments in bf16, each of which is rounded by the same chance on any number of ranks."""
    alone, coarse = (learner(where, moments_dtype="bfloat16") for where in (ALONE, ranks))
    halves = course(alone, range(2))
    for mine, other in zip(course(coarse, range(1)), halves, strict=False):
        assert mine == pytest.approx(other, abs=1e-6)
    coarse.save(tmp_path / "bf16")
    whole, both = course(learner(ALONE), range(2)), learner(ranks)
    course(both, range(1))
    both.save(tmp_path)
    other: Any = ranks.children[0]
    other.send_signal(signal.SIGSTOP)  # so that it dies inside the exchange
    threading.Timer(0.5, other.kill).start()
    with pytest.raises(RunHalted, match=r"lost one another during learner.score \(rank 1 ended with SIGKILL\)"):
        both.score(rows())
    with pytest.raises(RunHalted, match=r"learner rank 1 ended with SIGKILL; resume"):
        both.score(rows())
    ranks.close()
    later = learner(ALONE, seed=5)
    later.restore(tmp_path)
    assert later._policy.version == 1
    assert close(course(later, range(1, 2)), whole[1:])
    again = learner(ALONE, seed=5, moments_dtype="bfloat16")
    again.restore(tmp_path / "bf16")
    assert close(course(again, range(1, 2)), halves[1:])
    here, there = (moments(one._policy.model, one._optimizers) for one in (alone, again))
    same = torch.cat([(here[name] == each).flatten() for name, each in there.items() if "exp_avg" in name])
    assert {each.dtype for name, each in there.items() if "exp_avg" in name} == {torch.bfloat16}
    assert float(same.float().mean()) > 0.99, "a sum in another order tips few"


def test_weights_that_are_broken_on_another_rank_are_told_as_such(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 said that the other had ended, and to resume on as many ranks as there are."""
    ranks.close()
    fork_children(monkeypatch.setattr)
    broken = model()
    with torch.no_grad():
        broken.get_input_embeddings().weight[-1] = float("nan")  # the last rows are the last rank's
    save_state(tmp_path, dict(weights_of(broken)))
    with closing(start_ranks(ClusterSection(learners=2), ModelSection(), {})) as others:
        policy = policy_of(model(), ranks=others)
        policy.restore(tmp_path)
        with pytest.raises(RunHalted, match="the model's weights hold nan or inf"):
            policy.save(tmp_path / "model")


def test_what_ranks_are_told_they_are_told_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner of the next stage was not made on the others while weights were sent in another thread."""
    ranks, told, sends, done = Ranks(0, 2), [], threading.Event(), threading.Event()
    monkeypatch.setattr(ranks, "share", told.append)

    def send() -> None:
        with ranks.on_ranks("policy", "send", (), {}):
            sends.set()
            done.wait(30)
            told.append("sent")

    threads = [threading.Thread(target=send), threading.Thread(target=ranks.make, args=(SimpleNamespace(role="new"),))]
    threads[0].start()
    sends.wait(30)
    threads[1].start()
    threads[1].join(0.1)
    done.set()
    for thread in threads:
        thread.join()
    assert told == [("policy", "send", (), {}), "sent", ("new", SimpleNamespace, (), {})]


def test_of_several_ranks_that_ended_the_one_that_was_killed_is_named() -> None:
    class Ended:
        def __init__(self, how: str | None) -> None:
            self.how = how

        def ended(self, seconds: float) -> str | None:
            return self.how

        def end(self) -> None: ...

    assert _ending([Ended("ended with exit code 1"), Ended("ended with SIGKILL")], 1.0) == "rank 2 ended with SIGKILL"
    assert _ending([Ended(None), Ended("ended with exit code 1")], 1.0) == "rank 2 ended with exit code 1"
    assert _ending([Ended(None)], 1.0) is None
