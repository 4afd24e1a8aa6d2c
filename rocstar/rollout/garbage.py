"""What is wrong with a completion that an engine returned. Pure: an engine whose answers cannot be what it sampled is
taken out by the fleet, before anything is learnt from them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rocstar.types import Completion, Finish, Sampling

ROUNDING = 1e-3  # nats above 0 that a logprob of a sure token may come out at in bfloat16


def complaint(
    completion: Completion, sampling: Sampling, *, vocab_size: int | None, versions: tuple[int, int]
) -> str | None:
    """The first thing that cannot be, in words; None where all can. `versions`: the oldest and the newest policy
    version that may have written a token. vocab_size: ids lie below it; None where nobody knows."""
    return next(_complaints(completion, sampling, vocab_size, versions), None)


def _complaints(
    completion: Completion, sampling: Sampling, vocab_size: int | None, versions: tuple[int, int]
) -> Iterator[str]:
    ids, logprobs = completion.token_ids, completion.logprobs
    if len(ids) != len(logprobs):
        yield f"{len(ids)} tokens with {len(logprobs)} logprobs"
    if len(ids) > sampling.max_new_tokens:
        yield f"{len(ids)} tokens where {sampling.max_new_tokens} were allowed"
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        yield f"token ids from {min(ids)} to {max(ids)}, of {vocab_size} there are"
    wrong = next((value for value in logprobs if not math.isfinite(value) or value > ROUNDING), None)
    if wrong is not None:
        yield f"a logprob of {wrong}"
    if completion.finish is Finish.STOP and (not ids or ids[-1] not in sampling.stop_token_ids):
        yield "an end at a stop token that is none"
    wrote = [span.version for span in completion.version_spans]
    if sum(span.tokens for span in completion.version_spans) != len(ids):
        yield f"{len(ids)} tokens, of which {sum(span.tokens for span in completion.version_spans)} have a version"
    if wrote != sorted(wrote) or any(not versions[0] <= version <= versions[1] for version in wrote):
        asked = " to ".join(map(str, dict.fromkeys(versions)))
        yield f"tokens of policy version {', '.join(map(str, wrote))} where {asked} was asked"
