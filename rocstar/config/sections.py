"""The typed config tree: every key of a recipe, its unit and its default. Sections that say where a run computes are in
`places.py`; reading files lives in `recipe.py`. docs/config.md is written from both (scripts/config_reference.py).

A recipe is these sections plus `[[stage]]` entries. A stage may carry again what can differ between stages, and only
that: which keys those are follows from its type (`SftStage`, `RlStage`), so a key that a stage accepts is a key that
the stage reads. Everything else holds for the whole run. Unknown keys are refused.

Defaults are for a pretrained model: the paper's value where it gives one (section in brackets), else the release's.
Models that start from random weights need other numbers, and their recipes say them (recipes/quickstart.toml).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from rocstar.config.places import ClusterSection, Engines, SandboxSection, TorchEngines, VllmEngines
from rocstar.config.values import (
    SETTLE,
    Count,
    Place,
    Rate,
    Seconds,
    Section,
    Share,
    Temperature,
    Word,
    built_in_or_own,
    settled,
)

MOST = 10**6
"""Of what a run makes and holds: steps, rows of one, problems. More would be made for hours before a refusal."""

BenchmarkName = Annotated[
    str, AfterValidator(lambda name, info: settled(name, info) if name.endswith(".toml") else name)
]


class RunSection(Section):
    name: str = "run"
    """Name of the run's folder below `folder`; a number is appended where that folder exists."""
    folder: str = "runs"
    """Folder in which run folders are made."""
    sweep: str | None = None
    """Name of the sweep that the run belongs to, which `rocstar sweep` sets; lists of runs show those of one together.
    """
    seed: int = 0
    """Seed of everything random in the run. Each draw also depends on what it is for (step, problem, attempt), not on
    the order of work."""
    threads: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = "auto"
    """Threads that torch computes with on the CPU, in the learner and in torch engines; results differ in their last
    digits by this number. auto: 1 for a small model, whose layers have matrices of fewer than 131,072 numbers, else
    the physical cores that each learner has here; a resumed run takes the number that it computed with last."""
    checkpoint_seconds: float = Field(default=600.0, ge=0)
    """A checkpoint is written after the first step that ends at least this long after the last checkpoint, and at the
    end of each stage."""
    checkpoint_cost: Share = 0.05
    """Between stages' ends a checkpoint also waits until writing it takes at most this share of the time since the last
    one; how long writing takes is measured on the last one."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints that are kept; the last one of each stage is kept besides."""
    fault_budget: Share = 0.05
    """Share of the attempts of a step or of an evaluation that may end as ENVIRONMENT_FAILED, in a step also of those
    that the verifier leaves UNDECIDED; above it the run halts."""
    probe_seconds: Seconds = 600.0
    """Programs and answers whose result is known are sent through sandbox and grader before the first step of an RL
    stage, and between steps once this much time has passed; the run halts when a result is wrong."""
    stall_seconds: Seconds = 300.0
    """While attempts are made: when no token is written and no attempt makes progress for this long, the run reports
    what each attempt waits for."""
    stall_learning_seconds: Seconds = 3600.0
    """The same while no attempts are made: starting, learning, saving."""
    stall_policy: Literal["warn", "halt"] = "warn"
    """What follows such a report. warn: the run keeps waiting; halt: the run ends and can be resumed from its last
    checkpoint, unless it waits for a program that may still take longer: eight times `sandbox.timeout_seconds` in all
    where others have the CPU."""
    modules: list[Place] = []
    """Folders in which your own modules (`package.module:name`) are looked for before the current folder. Left empty:
    the recipe's folder and those of the recipes it extends."""
    save_rollouts: bool = True
    """Write every attempt of every step to a parquet file."""
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = []
    """Services that metrics are sent to besides the run's folder, each by a process of its own; a tracker that fails
    does not stop the run."""


class ModelSection(Section):
    path: Place | None = None
    """Model to start from: a Hugging Face folder, or a hub id where there is a network. Unset: random weights of the
    shape below."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is a GPU, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward and backward pass. auto: bfloat16 on cuda, float32 on the CPU. Trained weights and
    optimizer state are always float32."""
    fp32_head: bool = False
    """Compute logits in float32, by float32 weights, in the learner and in its engine, whatever `dtype` is
    (MiniMax-M1, arXiv 2506.13585). For the embedded engine, and types of models that it runs by its own forward."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass: less memory, a third more work."""
    lora_rank: int = Field(default=0, ge=0, le=4096)
    """Train adapters of this rank (LoRA, by the PEFT library) and leave the model's own weights as they are, which are
    then kept in `dtype`. 0: train all weights."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """What an adapter computes is multiplied by this over lora_rank."""
    lora_targets: list[Word] = []
    """Names of the linear layers that get adapters, such as q_proj. Left empty: all inside the model's layers."""
    hidden_size: int = Field(default=96, ge=1, le=65536)
    """Width of the model. This key and the following ones hold for random weights only."""
    num_layers: int = Field(default=3, ge=1, le=1000)
    """Layers of the model."""
    num_heads: int = Field(default=3, ge=1, le=1024)
    """Attention heads; hidden_size is an even multiple of it."""
    num_kv_heads: int = Field(default=1, ge=1, le=1024)
    """Heads of keys and values; num_heads is a multiple of it."""
    intermediate_size: int = Field(default=256, ge=1, le=2**20)
    """Width inside each feed-forward layer."""
    rope_theta: float = Field(default=1000.0, ge=1)
    """Base of the rotary position embedding."""
    max_positions: int = Field(default=512, ge=1, le=2**24)
    """Longest sequence that the model can hold, tokens."""
    vocab_size: int = Field(default=512, ge=1, le=2**20)
    """Size of the BPE vocabulary, which is trained on the cold-start rows."""
    word_merges: bool = False
    """true: BPE merges stay inside words (GPT-2's regex). false: merges may cross spaces, which suits texts that repeat
    fixed phrases."""

    def complaints(self) -> Iterator[str]:
        if self.hidden_size % (2 * self.num_heads):  # positions turn pairs of numbers
            yield (
                f"model.hidden_size {self.hidden_size} must be an even multiple of model.num_heads {self.num_heads}; "
                "change one of them"
            )
        if self.num_heads % self.num_kv_heads:
            yield (
                f"model.num_heads {self.num_heads} must be a multiple of model.num_kv_heads {self.num_kv_heads}; "
                "change one of them"
            )

    @property
    def cpu_itemsize(self) -> int:
        """Bytes of a number of an engine on CPUs."""
        return 2 if self.dtype == "bfloat16" else 4


class ColumnsSection(Section):
    question: list[str] = Field(default=["question"], min_length=1)
    """Columns of the question; several are joined by a space, such as a story and the question about it."""
    answer: str = "answer"
    """Column of the reference answer; "": the rows have none, for a reward function of your own."""


class TaskSection(Section):
    """Where problems and demonstrations come from."""

    source: str = "arithmetic"
    """Where problems come from: `arithmetic` (made up), `files`, or a Task of your own as `package.module:name`."""
    options: dict[str, Any] = {}
    """Settings of a Task of your own, which checks them."""
    families: list[str] = ["gcd", "powmod", "digsum", "fib"]
    """For arithmetic: families of tasks."""
    demo_mix: Literal["majority_wrong", "majority_right", "direct"] = "majority_wrong"
    """For arithmetic: behaviour that the cold start demonstrates. `majority_wrong` and `majority_right` say what most
    demonstrations do; `direct` answers without any tool."""
    train_files: list[Place] = []
    """For files: problems to train on, as JSONL, CSV or parquet, plain or gzip, or folders of save_to_disk."""
    columns: ColumnsSection = ColumnsSection()
    """For files: names of the columns."""
    max_problems: Count | None = None
    """Use only the first rows of each file, this many; unset: all."""


class StageDataSection(TaskSection):
    """What an RL stage may change about its problems."""

    pool: Annotated[Count, Field(le=MOST)] = 2400
    """For problems that are made: number of those to train on, drawn once for RL."""
    drop_solved_attempts: Count | None = None
    """Attempts of the current policy at each problem before the stage begins; problems that it solves every time are
    left out (8 in the paper's stage 3, §4.3). Unset: no problem is left out."""
    drop_solved_problems: Count | None = None
    """Ask and learn from this many problems alone, drawn when the stage begins, where a small run has no time to ask
    all; unset: all."""
    drop_solved_age: int = Field(default=0, ge=0)
    """Attempts that this run has made already count among them if their weights are at most this many optimizer updates
    old."""
    max_prompt_tokens: Count | None = None
    """Problems whose prompt has more tokens are left out, which the run tells; the base section's value holds for held-
    out problems too. Unset: none is left out, and the longest prompt must fit into the model."""


class DataSection(StageDataSection):
    test_files: list[Place] = []
    """For files: held-out problems."""


MomentsDtype = Literal["float32", "bfloat16"]


class SftSection(Section):
    batch_rows: Annotated[Count, Field(le=MOST)] = 128  # §5.1
    """Rows (conversations) that one optimizer update learns from; all there are, if fewer. Every epoch shows each row
    once, in an order that follows from run.seed."""
    optimizer: Literal["muon", "adamw"] = "adamw"
    """muon: Muon on matrices and AdamW on embeddings and norms, for models that start from random weights. adamw: AdamW
    on all."""
    muon_learning_rate: Rate = 0.02
    """Peak learning rate of Muon."""
    adamw_learning_rate: Rate = 5e-6  # §5.1
    """Peak learning rate of AdamW."""
    moments_dtype: MomentsDtype = "float32"
    """The same as learning.moments_dtype; what Muon keeps is fp32."""
    weight_decay: float = Field(default=0.0, ge=0, le=1e6)
    """Decoupled weight decay, per update as a multiple of the learning rate."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps over which the learning rate rises linearly (the paper: 4% of all steps, §5.1)."""
    decay: Literal["cosine", "linear"] = "cosine"  # §5.1
    """Shape in which the learning rate falls to zero."""
    decay_share: Share = 1.0
    """Share of the stage's steps, the last ones, over which the learning rate falls to zero."""
    context_loss_weight: float = Field(default=0.0, ge=0)
    """Loss weight of prompt and tool tokens; tokens of the assistant have weight 1."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropout."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients of a larger norm are scaled down to this norm."""
    tokens_per_microbatch: Count = 16384
    """Most tokens in one forward and backward pass of a learner (on a CPU never more than 4,096); a longer row gets a
    pass of its own."""
    rows_file: Place | None = None
    """JSONL of OpenAI-style messages to learn from (docs/sft-data.md); unset: the source's own demonstrations."""


class StageRolloutSection(Section):
    """What an RL stage may change about its attempts."""

    problems_per_step: Count = 128
    """P: problems in one step (128 in the release; 512 in the paper, §5.1)."""
    attempts_per_problem: Count = 32  # §5.1
    """R: attempts at each problem; the paper draws 2G, twice of what `resample.keep` keeps."""
    max_response_tokens: Count = 8192  # stage 1, §5.1
    """Limit of everything after the prompt, tool replies included."""
    max_turns: Count = 10  # §5.1
    """T: completions in one trajectory."""
    temperature: Temperature = Field(default=1.0, gt=0)
    """Sampling temperature, at least 0.01."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that together have this probability; 1: from all."""
    top_k: int = Field(default=0, ge=0, le=2**20)
    """Sample from the likeliest tokens, this many; 0: from all."""
    max_parallel_calls: Count = 4
    """Tool calls of one turn that are run; each further one is answered with a BAD_CALL that says so."""
    truncated: Literal["wrong", "graded"] = "wrong"  # §4.3.1
    """How training counts an attempt that a limit of tokens or turns has cut. wrong: as wrong; graded: by the answer
    that it holds."""
    max_staleness_steps: int = Field(default=0, ge=0, le=1000)
    """Attempts of a step may begin while up to this many earlier steps are still to be learnt from, so a token is at
    most this many steps older than the weights that learn from it. 0: strictly on-policy (the paper)."""
    refill: int = Field(default=0, ge=0)
    """Most rounds in which a step makes attempts at as many further problems as have taught nothing, such as those
    whose rewards are all alike (DAPO, arXiv 2503.14476). 0: none (the paper)."""

    @property
    def has_tools(self) -> bool:
        """Whether attempts may call tools: with a single turn no reply could be read."""
        return self.max_turns > 1


TemplateName = Literal["paper", "model", "compact"]


class RolloutSection(StageRolloutSection):
    template: Annotated[TemplateName | str, built_in_or_own(TemplateName)] = "paper"
    """Chat template. paper: that of the paper's Fig. 3; model: that of `model.path`; compact: no system text and no
    list of tools; package.module:name: a function of your own that makes one."""
    template_options: dict[str, Any] = {}
    """For the template model, or your own: variables of the chat template, such as enable_thinking = false (TRL's
    chat_template_kwargs)."""
    preamble: str | None = None
    """Text before each question; unset: the template's own, which asks for the answer in a box."""
    tool_name: Word = "python"
    """Name of the Python tool that the model sees."""
    environment: str | None = None
    """An Environment of your own as `package.module:name`; unset: the conversation with tools."""
    agent: str | None = None
    """An agent of your own that makes the attempts: a program (`python my_agent.py`) or a function
    (`package.module:name`), given an address that speaks OpenAI's protocol; unset: the conversation with tools. Its
    requests are what max_turns counts."""
    agent_seconds: Seconds = 600.0
    """An agent's own time in an attempt: programs of its tool calls count, other waiting for the run does not."""
    agents_at_once: Count = 64
    """Most programs, or threads of a function that is not async, that run at once; an async function has no limit."""
    agent_walls: bool = True
    """Whether a program as an agent runs behind walls: it reaches no network but the gateway, and no file but those
    below its home, the interpreter, the system's libraries and what its command, PYTHONPATH and agent_reads name. A
    function is part of the run and has none."""
    agent_reads: list[Place] = []
    """More files and folders that it may read there."""
    feedback_max_chars: int = Field(default=4096, ge=8)
    """Characters of a tool reply that the model is shown; a marker stands where a reply is cut (the release: 256)."""
    feedback_truncate: Literal["left", "right", "middle"] = "middle"
    """Part of a tool reply that is kept when it is too long. left: its beginning; right: its end; middle: both, without
    the middle."""
    feedback_errors: Literal["short", "full"] = "full"
    """What the model sees of a Python error. short: the last line of the traceback; full: all of it."""
    engine_rows: Count = 64
    """Sequences that an engine decodes at once."""
    kv_tokens: Count | None = None
    """Size of an engine's KV cache, in tokens of attempts that decode or wait for their tools. Unset: on a GPU what is
    left of its memory, on CPUs room for engine_rows attempts of the greatest length. With less, attempts that outgrow
    the cache are fed to the engine again later."""
    engine_patience_seconds: Seconds = 120.0
    """An engine that has turns to do and makes no progress for this long is taken out, and so is one that takes longer
    to load new weights; its turns are done by other engines. If no engine makes progress for this long, the turns end
    as faults (ENVIRONMENT_FAILED)."""


ResampleMethod = Literal["roc", "roc_release", "uniform", "all"]
LossName = Literal["grpo", "cispo", "dppo_tv", "gspo", "sapo"]
AdvantageName = Literal["grpo", "rloo"]
VerifierName = Literal["boxed", "boxed_strict", "boxed_text", "tool_output"]


class ResampleSection(Section):
    method: Annotated[ResampleMethod | str, built_in_or_own(ResampleMethod)] = "roc"
    """How the attempts to learn from are chosen. roc: the paper's RoC (§2.2.3); roc_release: as the release does,
    lowest penalty first; uniform: at random; all: every attempt, plain GRPO; package.module:name: a resampler of your
    own."""
    keep: int = Field(default=16, ge=2)  # §5.1
    """G: attempts of each problem that are kept."""
    min_positive: int = Field(default=2, ge=0)
    """For roc_release: least number of right attempts that are kept, where there are as many."""
    min_negative: int = Field(default=2, ge=0)
    """For roc_release: least number of wrong attempts that are kept, where there are as many."""
    failure_floor: int = Field(default=1, ge=0)
    """For roc: least number of wrong attempts that are kept, where there are as many. 0: the paper's form, which rounds
    one wrong attempt of 32 down to none, so that its group teaches nothing (§2.2.3)."""
    format_penalty: Literal["asked", "always"] = "asked"
    """Which attempts have a format penalty: 1 without an <answer> block, else (blocks - 1) / turns, at most 1 (§2.2.3).
    asked: those whose prompt speaks of an <answer> block, as that of the template paper does; always: all."""
    format_weight: float = Field(default=1.0, ge=0)
    """Weight of the format penalty beside that of failed calls, which has 1; the paper's is 1."""
    repetition_weight: float = Field(default=0.0, ge=0)
    """Weight in the penalty of the share of an attempt's 5-grams that it repeats more than 5 times; the paper tried
    this without gain (§4.3.1)."""
    drop_truncated: bool = False
    """Leave out attempts that the token limit has cut, instead of counting them as wrong (overlong filtering); the
    paper tried this without gain (§4.3.1)."""
    drop_void_turns: bool = False
    """Leave out attempts in which a turn has neither a call that parses nor, as the last one, an answer (SimpleTIR)."""

    def complaints(self) -> Iterator[str]:
        if self.method == "roc_release" and self.min_positive + self.min_negative > self.keep:
            yield (
                f"resample.min_positive {self.min_positive} and resample.min_negative {self.min_negative} do not fit "
                f"into resample.keep {self.keep}; lower them or raise resample.keep"
            )
        if self.method == "roc" and self.failure_floor >= self.keep:
            yield (
                f"resample.failure_floor {self.failure_floor} leaves no right attempt in resample.keep {self.keep}; "
                "lower it or raise resample.keep"
            )


class LearningSection(Section):
    loss: Annotated[LossName | str, built_in_or_own(LossName)] = "grpo"  # §2.2.1
    """The policy loss of a token. grpo: GRPO's with clip_low, clip_high and dual_clip; the others are in
    docs/learning.md; package.module:name: one of your own. importance_cap, loss_mean, kl_coefficient and
    entropy_coefficient hold for each."""
    advantage: Annotated[AdvantageName | str, built_in_or_own(AdvantageName)] = "grpo"  # §2.2.1
    """The advantages of a group's kept attempts, from their rewards. grpo: reward minus mean (see normalize_by_std);
    rloo: reward minus the mean of the others; package.module:name: a function of your own."""
    optimizer: Literal["adamw"] = "adamw"  # §5.1
    """The optimizer."""
    learning_rate: Rate = 1e-6  # §5.1
    """Peak learning rate, constant after the warm-up."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of AdamW's mean of squared gradients."""
    moments_dtype: MomentsDtype = "float32"
    """Precision in which AdamW keeps its two moments (Megatron: exp_avg_dtype, exp_avg_sq_dtype). bfloat16: they take 4
    bytes a parameter instead of 8, and are rounded stochastically."""
    weight_decay: float = Field(default=0.01, ge=0, le=1e6)
    """Decoupled weight decay, per update as a multiple of the learning rate."""
    warmup_steps: int = Field(default=20, ge=0)  # §5.1
    """Optimizer updates over which the learning rate rises linearly."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients of a larger norm are scaled down to this norm."""
    updates_per_step: Count = 1
    """Optimizer updates for the attempts of one step; 1 is fully on-policy (the release)."""
    epochs: int = Field(default=1, ge=1, le=1000)
    """Times that the attempts of one step are learnt from, each time in `updates_per_step` updates; ratios are to the
    log-probabilities before the first of them (mu of the GRPO paper, arXiv 2402.03300)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)  # §2.2.1
    """The probability ratio is clipped below 1 minus this."""
    clip_high: float = Field(default=0.28, gt=0, le=1e6)  # §2.2.1
    """The probability ratio is clipped above 1 plus this."""
    dual_clip: float = Field(default=3.0, ge=0)
    """For attempts with a negative advantage: a token whose ratio is above this has no gradient either, where clip_high
    has no say (3 in the release; the paper's eq. 6 has no such bound). 0: no bound; else more than 1."""
    gate_right: float = Field(default=1.0, gt=0)
    """For sapo: how steeply the weight of a token of a right attempt falls as its ratio leaves 1."""
    gate_wrong: float = Field(default=1.05, gt=0)
    """For sapo: the same for a wrong attempt."""
    loss_mean: Literal["tokens", "questions", "attempts"] = "tokens"
    """How the loss of an update is a mean. tokens: over all its tokens, so a question with long attempts counts more
    (the release); questions: over the tokens of each question's kept attempts, and then over questions (the paper's eq.
    6); attempts: over the tokens of each attempt, and then over attempts (as GSPO is meant)."""
    importance_cap: float | None = Field(default=None, ge=0, le=1e6)
    """C of truncated importance sampling: a token's loss is multiplied by the ratio of its probability under the
    learner at the beginning of the step to that under the engine that wrote it, and by C where the ratio is larger; at
    least 1. 0: no such factor. Unset: 2 with `rollout.max_staleness_steps`, else 0."""
    importance_outside: Literal["cap", "mask"] = "cap"
    """What happens to a token whose ratio is above importance_cap. cap: it counts C times; mask: it does not count
    (masked importance sampling), nor does one below importance_floor (IcePop)."""
    importance_floor: float = Field(default=0.0, ge=0, lt=1)
    """With importance_outside = "mask": least ratio of a token that counts. 0: no such bound."""
    attempt_ratio_cap: float = Field(default=0.0, ge=0)
    """An attempt does not count where the geometric mean of its tokens' ratios, as in importance_cap, is above this; at
    least 1. 0: no such bound."""
    attempt_ratio_floor: float = Field(default=0.0, ge=0, lt=1)
    """The same where that mean is below this. 0: no such bound."""
    off_policy_kl: float = Field(default=0.0, ge=0)
    """An attempt with a negative advantage does not count where the mean over its tokens of the logarithm of their
    probability under the engine that wrote them over that under the current weights is above this, nats
    (DeepSeek-V3.2). 0: no such bound."""
    top_entropy_share: float = Field(default=1.0, gt=0, le=1)
    """Learn only from this share of each attempt's tokens, those of the highest entropy (arXiv 2506.01939; the release
    has this switch too). 1: from all."""
    normalize_by_std: bool | Literal["batch"] = True
    """For grpo: divide advantages by the standard deviation of the group's rewards. batch: by that of the rewards of
    all attempts that the step keeps (arXiv 2508.08221)."""
    kl_coefficient: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of the KL divergence from the policy at the start of the stage; 0 as in the paper."""
    entropy_coefficient: float = Field(default=0.0, ge=0, le=1e6)
    """Weight of an entropy bonus; 0 as in the paper."""
    tokens_per_microbatch: Count = 16384
    """Most tokens in one forward and backward pass of a learner (on a CPU never more than 4,096); a longer row gets a
    pass of its own."""
    reset_optimizer: bool = False
    """Start the stage with fresh optimizer state (the paper's stage 3, §4.3)."""

    @property
    def scores_first(self) -> bool:
        """Whether rows go through the model once more before they are learnt from."""
        return self.updates_of_step > 1 or self.top_entropy_share < 1

    @property
    def updates_of_step(self) -> int:
        """Optimizer updates of one step, all epochs included."""
        return self.updates_per_step * self.epochs

    @property
    def over_batch(self) -> bool:
        """Whether advantages are divided by the deviation of the rewards of all groups of a step."""
        return self.normalize_by_std == "batch"

    @property
    def takes_attempts(self) -> bool:
        """Whether each update compares the tokens of whole attempts, by a second pass through the head. A loss of the
        user's own says so of itself (`whole_attempts`)."""
        return self.masks_attempts or self.loss == "gspo"

    @property
    def masks_attempts(self) -> bool:
        """Whether attempts that lie too far off the policy do not count."""
        return bool(self.attempt_ratio_cap or self.attempt_ratio_floor or self.off_policy_kl)

    def complaints(self) -> Iterator[str]:
        if (self.importance_outside == "mask") > bool(self.importance_cap):
            yield 'learning.importance_outside "mask" masks nothing without learning.importance_cap; set that too'
        if self.importance_floor and self.importance_outside != "mask":
            yield (
                f"learning.importance_floor {self.importance_floor:g} is for learning.importance_outside "
                '"mask"; set both, or neither'
            )
        if self.importance_cap and self.importance_cap < 1:
            yield (
                f"learning.importance_cap {self.importance_cap:g} would cap tokens that nothing is wrong with, whose "
                "ratio is 1; take 1 or more, or 0 for no such factor"
            )
        if 0 < self.attempt_ratio_cap < 1:
            yield (
                f"learning.attempt_ratio_cap {self.attempt_ratio_cap:g} would leave out attempts that nothing is wrong "
                "with, whose ratio is 1; take 1 or more, or 0 for no bound"
            )
        if self.over_batch and self.advantage != "grpo":
            yield f'learning.normalize_by_std "batch" is for learning.advantage "grpo", not for "{self.advantage}"'
        if 0 < self.dual_clip <= 1:
            yield (
                f"learning.dual_clip {self.dual_clip:g} would keep wrong attempts from being learnt from at all, whose "
                "ratio begins at 1; take more than 1, or 0 for no bound"
            )


class EndSection(Section):
    """When an RL stage ends before its `steps`, judged by its own metrics: as soon as one of these rules holds. Those
    that are None never do."""

    window: Count = 20
    """Steps whose mean a rule looks at. No rule holds before this many steps; one that compares two means needs twice
    as many."""
    reward_gain: float | None = Field(default=None, ge=-1, le=1)
    """The reward is flat: the mean reward of the last window exceeds that of the window before by less than this."""
    truncated_share: Share | None = None
    """Together with reward_gain: the stage ends only if also the share of attempts that the token limit cut is near
    this in both windows (near 0.10 at the end of stage 1, §4.3)."""
    truncated_band: Share = 0.03
    """How far from truncated_share that share may be, either way."""
    solved_share: float | None = Field(default=None, gt=0, le=1)
    """The problems are too easy: in at least this share of the groups every attempt is right (0.7 at the end of stage
    2, §4.3)."""
    reward_loss: float | None = Field(default=None, gt=0, le=1)
    """The reward falls: the mean reward of the last window is at least this far below that of the stage's best
    window."""
    sampled_tokens: Count | None = None
    """The budget is used up: the stage's attempts have this many tokens of the model. Looked at after each step,
    whatever window says."""

    def complaints(self) -> Iterator[str]:
        if self.truncated_share is not None and self.reward_gain is None:
            yield "end.truncated_share is only looked at where the reward is flat; set end.reward_gain too"


class BenchmarkSection(Section):
    """A benchmark that training asks; what is absent is as its own file says (docs/evaluation.md)."""

    name: BenchmarkName
    """A benchmark that comes with rocstar, or the path of a TOML file of your own."""
    folder: Place | None = None
    """Folder that holds the rows; unset: they are read from the hub."""
    accept_rows: bool = False
    """Accept rows whose checksum differs from the one in the benchmark's file."""
    limit: Count | None = None
    """Ask only the first problems, this many; unset: all."""
    attempts: Count | None = None
    """Attempts at each problem; unset: as the benchmark's file says."""
    temperature: Temperature | None = Field(default=None, ge=0)
    """Sampling temperature, 0 or at least 0.01; unset: as the benchmark's file says."""
    settings: list[str] = []
    """Further settings of its attempts, such as "rollout.max_response_tokens=4096"."""


class EvaluateSection(Section):
    benchmark: list[BenchmarkSection] = []
    """Benchmarks that are asked before the first RL stage, after every `every_steps` and at the end, besides the held-
    out problems."""
    problems: int = Field(default=400, ge=0, le=MOST)
    """Held-out problems that are asked; 0: none."""
    every_steps: int = Field(default=0, ge=0)
    """Also evaluate each time an RL stage has made this many steps, on held-out problems under that stage's limits; 0:
    only before and after."""
    attempts: Count = 1
    """k: attempts at each problem, sampled at `temperature`."""
    temperature: Temperature = Field(default=1.0, ge=0)
    """Sampling temperature, 0 or at least 0.01."""
    greedy: bool = True
    """Also make one greedy attempt at each problem."""
    verifier: Annotated[VerifierName | str, built_in_or_own(VerifierName)] = "boxed"
    """How attempts are judged, in training too. boxed: by the last balanced box anywhere, compared as mathematics;
    boxed_strict: by the box inside <answer>; boxed_text: letter for letter; tool_output: by the last tool result; or a
    reward function of your own as `package.module:name`."""
    right_above: float = 0.5
    """For a reward function of your own: an attempt is right (in every share of right attempts, and for RoC a success)
    where its reward is above this. Learning takes the reward itself."""

    def is_due_after(self, steps: int) -> bool:
        """Whether an evaluation comes after so many steps of an RL stage."""
        return bool(self.every_steps and steps and steps % self.every_steps == 0)


BY_EPOCHS = -1
"""Steps of an SFT stage that its epochs decide."""


class StageSection(Section):
    """Common properties of stages, so that planning, memory and checks need not know the kinds. The step of each kind
    is in KINDS of `rocstar/train.py`."""

    name: Word
    """Name of the stage, unlike that of any other."""
    kind: str
    steps: int
    learner_section: ClassVar[str]
    """Section that holds the settings of its learner."""
    update_rows_from: ClassVar[str]
    """Keys that decide `update_rows`, for messages."""

    @property
    def learner(self) -> SftSection | LearningSection:
        """Settings of its learner."""
        found: SftSection | LearningSection = getattr(self, self.learner_section)
        return found

    def complaints(self) -> Iterator[str]:
        learner = self.learner
        muon = ["muon_learning_rate"] * (learner.optimizer == "muon")
        rate = max(getattr(learner, key, 0.0) for key in ("learning_rate", "adamw_learning_rate", *muon))
        if rate * learner.weight_decay >= 1:
            key = f"{self.learner_section}.weight_decay"
            yield f"{key} {learner.weight_decay:g} times a rate of {rate:g} erases all weights; lower {key}"

    @property
    def rollouts(self) -> list[StageRolloutSection]:
        """Limits under which the stage makes attempts; empty where it makes none."""
        return []

    def takes_optimizer_of(self, before: StageSection | None) -> bool:
        """Whether optimizer state goes on from the stage before."""
        return False


class SftStage(StageSection):
    kind: Literal["sft"]
    """sft: a cold start by supervised learning."""
    steps: int = Field(default=BY_EPOCHS, ge=BY_EPOCHS, le=MOST)
    """Optimizer updates. -1: as many as `epochs` take."""
    epochs: float = Field(default=0, ge=0)
    """In place of `steps`: how often the stage shows each row of `sft.rows_file` (3 in the paper, §5.1). A run records
    the steps that they come to. 0: `steps` counts."""
    data: TaskSection
    sft: SftSection
    learner_section: ClassVar[str] = "sft"
    update_rows_from: ClassVar[str] = "sft.batch_rows"
    end: ClassVar[EndSection] = EndSection()  # no rule: all its steps are made

    @property
    def update_rows(self) -> int:
        """Most rows that one optimizer update learns from."""
        return self.sft.batch_rows

    @property
    def updates(self) -> int:
        """Most optimizer updates of the whole stage."""
        return self.steps

    def complaints(self) -> Iterator[str]:
        yield from super().complaints()
        if bool(self.epochs) == (self.steps != BY_EPOCHS):
            given = f"steps {self.steps} and epochs {self.epochs:g} are given" if self.epochs else "steps is missing"
            yield f"{given}; give steps or epochs (epochs = 0 or steps = -1 sets a parent's aside)"
        if self.epochs and self.sft.rows_file is None:
            yield (
                f"epochs {self.epochs:g} need sft.rows_file, because a task makes as many demonstrations as steps "
                "take; give steps instead, or a file of rows"
            )


STALE_CAP = 2.0
"""learning.importance_cap where tokens may be stale: with one update a step the loss's own ratio is 1 for all."""


class RolloutStage(StageSection):
    """A stage that makes attempts at problems of its own, whatever it learns from them."""

    data: StageDataSection
    rollout: StageRolloutSection

    @property
    def rollouts(self) -> list[StageRolloutSection]:
        return [self.rollout]


class RlStage(RolloutStage):
    kind: Literal["rl"]
    """rl: reinforcement learning."""
    steps: int = Field(ge=0, le=MOST)
    """Most steps of the stage; a rule of `end` may end it earlier."""
    resample: ResampleSection
    learning: LearningSection
    end: EndSection
    learner_section: ClassVar[str] = "learning"

    @field_validator("learning")
    @classmethod
    def stale_tokens_are_weighed(cls, learning: LearningSection, info: ValidationInfo) -> LearningSection:
        rollout = info.data.get("rollout")  # absent where it is wrong itself
        if learning.importance_cap is None and rollout and rollout.max_staleness_steps:
            return learning.model_copy(update={"importance_cap": STALE_CAP})
        return learning

    update_rows_from: ClassVar[str] = "rollout.problems_per_step x resample.keep / learning.updates_per_step"

    def complaints(self) -> Iterator[str]:
        yield from super().complaints()
        if self.resample.method != "all" and self.rollout.attempts_per_problem < self.resample.keep:
            yield (
                f"resample.keep {self.resample.keep} needs rollout.attempts_per_problem >= {self.resample.keep}, got "
                f"{self.rollout.attempts_per_problem}; raise rollout.attempts_per_problem or lower resample.keep"
            )
        if self.resample.drop_void_turns and not self.rollout.has_tools:
            yield (
                "resample.drop_void_turns looks for turns without a call, and rollout.max_turns 1 leaves no turn for "
                "one; raise rollout.max_turns, or set it to false"
            )
        if self.rollout.attempts_per_problem == 1:
            yield "rollout.attempts_per_problem 1 leaves an attempt nothing to be compared with; raise it"
        if self.rollout.top_k == 1:
            yield (
                "rollout.top_k 1 always takes the most likely token, so all attempts at a problem are one and there is "
                "nothing to choose among; set it to 0 or more than 1"
            )
        if self.learning.updates_per_step > self.kept_attempts:
            yield (
                f"learning.updates_per_step {self.learning.updates_per_step} is more than the {self.kept_attempts} "
                "attempts that a step can keep (rollout.problems_per_step x resample.keep); lower it"
            )

    @property
    def kept_attempts(self) -> int:
        """Most that a step can learn from."""
        kept = self.resample.keep if self.resample.method != "all" else self.rollout.attempts_per_problem
        return self.rollout.problems_per_step * kept

    @property
    def update_rows(self) -> int:
        return self.kept_attempts // self.learning.updates_per_step

    @property
    def updates(self) -> int:
        return self.steps * self.learning.updates_of_step

    def takes_optimizer_of(self, before: StageSection | None) -> bool:
        return isinstance(before, RlStage) and not self.learning.reset_optimizer


Stage = Annotated[SftStage | RlStage, Field(discriminator="kind")]
STAGES: dict[str, type[Section]] = {"sft": SftStage, "rl": RlStage}
"""Kinds of stages by `kind`; what a kind does in a step is in KINDS of `rocstar/train.py`."""


class Recipe(Section):
    """A resolved recipe. The sections are the base; each stage carries its own full copy of those it may change."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    sft: SftSection = SftSection()
    rollout: RolloutSection = RolloutSection()
    sandbox: SandboxSection = SandboxSection()
    resample: ResampleSection = ResampleSection()
    learning: LearningSection = LearningSection()
    end: EndSection = EndSection()
    cluster: ClusterSection = ClusterSection()
    evaluate: EvaluateSection = EvaluateSection()
    engine: list[Engines] = []
    """What continues token ids in rollouts and evaluations; none: one torch engine inside the run's own process."""
    stage: list[Stage] = []

    def complaints(self) -> Iterator[str]:
        if (name := self.rollout.template) not in ("paper", "compact") and self.stage and self.model.path is None:
            yield f"rollout.template {name!r} is that of a pretrained model; set model.path or use 'paper'"
        if self.model.lora_rank and self.stage and self.model.path is None:
            yield (
                f"model.lora_rank {self.model.lora_rank} trains adapters of a model that stays as it is, and random "
                "weights are worth nothing as they are; set model.path, or lora_rank to 0"
            )
        if self.model.lora_rank and (muon := [s.name for s in self.stage if s.learner.optimizer == "muon"]):
            yield (
                f"sft.optimizer 'muon' of stage {muon[0]} is for whole matrices, and model.lora_rank "
                f"{self.model.lora_rank} trains factors of them; set it to 'adamw'"
            )
        age = max((stage.data.drop_solved_age for stage in self.rollout_stages), default=0)
        if age and not self.run.save_rollouts:
            yield (
                f"data.drop_solved_age {age} counts recorded attempts and run.save_rollouts is false; leave one "
                "of them out"
            )
        data = [self.data, *(stage.data for stage in self.rollout_stages)]
        asked = any(one.source == "files" and not one.columns.answer for one in data)
        if asked and ":" not in self.evaluate.verifier and not self.rollout.agent:
            yield (
                f"evaluate.verifier {self.evaluate.verifier!r} compares with a reference and data.columns.answer names "
                "no column; name it, or a reward function of your own as evaluate.verifier"
            )
        without = any(not stage.rollout.has_tools for stage in self.rollout_stages)
        if self.evaluate.verifier == "tool_output" and without:
            yield (
                "evaluate.verifier 'tool_output' looks at what a tool printed and rollout.max_turns 1 leaves no turn "
                "for one; raise rollout.max_turns or take 'boxed'"
            )
        if self.stage and (complaint := self.copies(self.evaluate.attempts, self.evaluate.temperature)):
            yield f"evaluate: {complaint}"
        turns = [stage.rollout.max_turns for stage in self.rollout_stages]
        if not (self.sandbox.tools or self.rollout.environment or self.rollout.agent) and max(turns, default=1) > 1:
            yield (
                f"rollout.max_turns {max(turns)} gives turns after calls of tools and sandbox.tools names none; set "
                "rollout.max_turns to 1, or name tools"
            )
        if self.cluster.sandbox_nodes and self.sandbox.urls:
            yield (
                f"cluster.sandbox_nodes {self.cluster.sandbox_nodes} and sandbox.urls both say where programs run; "
                "leave one of them out"
            )
        if self.rollout.agent and self.rollout.environment:
            setting = f"rollout.agent {self.rollout.agent!r}"
            yield f"{setting} and rollout.environment both make attempts; leave one of them out"
        if self.cluster.colocate and self.stale_steps:
            yield (
                "cluster.colocate has engines sleep while learners compute and rollout.max_staleness_steps "
                f"{self.stale_steps} has them write meanwhile; leave one of them out"
            )
        there = [entry.name for entry in self.engine if entry.url]
        if self.cluster.colocate and there:
            yield (
                f"cluster.colocate is for engines that the run starts and engine.{there[0]}.url names one that runs "
                "already; leave one of them out"
            )
        if self.cluster.weights == "sent" and self.stage:
            if len(self.servers) < len(self.engine) or not self.engine:
                yield (
                    "cluster.weights 'sent' is for vLLM servers that the run starts; leave it out, or have only "
                    "[[engine]] of kind 'vllm' without a url"
                )
            if self.model.lora_rank:
                yield (
                    "cluster.weights 'sent' sends whole models, and adapters are a small file; leave cluster.weights "
                    f"or model.lora_rank {self.model.lora_rank} out"
                )
        if self.model.fp32_head and self.engine:
            yield "model.fp32_head is for the embedded engine; leave it or [[engine]] out"
        cut = any(rollout.top_p < 1 or rollout.top_k > 0 for rollout in (self.rollout, *self.rollouts))
        if cut and any(isinstance(entry, VllmEngines) for entry in self.engine):
            yield "top_p must be 1 and top_k 0 for engines of kind 'vllm'; it reports no others' logprobs"

    def copies(self, attempts: int, temperature: float) -> str | None:
        """Describes an evaluation whose attempts would be identical, or None; batches of vLLM round differently."""
        if attempts == 1 or temperature > 0 or any(isinstance(entry, VllmEngines) for entry in self.engine):
            return None
        return f"{attempts} attempts at temperature 0 are one attempt {attempts} times; make one, or raise temperature"

    @property
    def sft_stages(self) -> list[SftStage]:
        return [stage for stage in self.stage if isinstance(stage, SftStage)]

    @property
    def rl_stages(self) -> list[RlStage]:
        return [stage for stage in self.stage if isinstance(stage, RlStage)]

    @property
    def rollout_stages(self) -> list[RolloutStage]:
        return [stage for stage in self.stage if isinstance(stage, RolloutStage)]

    @property
    def rollouts(self) -> list[StageRolloutSection]:
        """Limits under which attempts are made, in training and evaluation."""
        return [rollout for stage in self.stage for rollout in stage.rollouts] or [self.rollout]

    @property
    def has_tools(self) -> bool:
        """Whether any attempt may call tools."""
        return any(rollout.has_tools for rollout in self.rollouts)

    @property
    def calls_tools(self) -> bool:
        """Whether attempts outside of stages may call tools, and there are some."""
        return self.rollout.has_tools and bool(self.sandbox.tools)

    @property
    def stale_steps(self) -> int:
        """Most steps that attempts are made ahead of learning."""
        return max((stage.rollout.max_staleness_steps for stage in self.rollout_stages), default=0)

    @property
    def longest_response(self) -> int:
        """Tokens that RL allows after a prompt; 0 without RL."""
        return max((stage.rollout.max_response_tokens for stage in self.rollout_stages), default=0)

    def takes_turns(self, learners: int, gpus: int) -> bool:
        """Whether this many learners and the engines share this many GPUs in turns, by default too; not with a server
        that runs already, whose GPUs are unknown."""
        if self.cluster.colocate is not None:
            return self.cluster.colocate
        away = any(entry.url for entry in self.engine)
        all_learn = self.cluster.launcher == "processes" and gpus == learners and not away
        return bool(gpus) and not self.stale_steps and (not self.engine or all_learn)

    def idle_learners(self, learners: int) -> str | None:
        """Describes why some of so many learners would have nothing to learn from, or None."""
        for stage in self.stage:
            if learners > (rows := stage.update_rows):
                keys = stage.update_rows_from
                return f"{learners} learners are more than the {rows} rows of an update of stage {stage.name} ({keys})"
        return None

    def idle_engines(self, engines: int) -> str | None:
        """Describes why some of so many engines would have nothing to write, or None."""
        for stage in self.rollout_stages:
            attempts = stage.rollout.problems_per_step * stage.rollout.attempts_per_problem
            if engines > attempts:
                return f"{engines} engines are more than the {attempts} attempts of a step of stage {stage.name}"
        return None

    @property
    def runs_torch_engines(self) -> bool:
        return not self.engine or any(isinstance(entry, TorchEngines) for entry in self.engine)

    @property
    def servers(self) -> list[VllmEngines]:
        """vLLM servers that a run starts."""
        return [entry for entry in self.engine if isinstance(entry, VllmEngines) and entry.url is None]

    @property
    def engines_here(self) -> int:
        """Engines that compute on this machine."""
        torch = [entry for entry in self.engine if isinstance(entry, TorchEngines)]
        here = [*torch, *(self.servers if self.cluster.launcher == "processes" else ())]
        return sum(entry.count for entry in here) if self.engine else 1

    def resolved(self) -> dict[str, Any]:
        """The recipe as plain JSON values; nulls survive. Paths to what is there are absolute."""
        return self.settled().model_dump(mode="json")

    def as_evaluated(self) -> Recipe:
        """The recipe with the limits of the last RL stage as its base, under which training evaluates at its end."""
        limits = self.rollouts[-1].model_dump()
        return self.model_copy(update={"rollout": self.rollout.model_copy(update=limits)})

    def settled(self) -> Recipe:
        """The recipe with absolute paths, as a run works with it whether it is fresh or resumed."""
        return Recipe.model_validate(self.model_dump(), context=SETTLE)
