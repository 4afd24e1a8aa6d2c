"""The typed config tree: every key of a recipe, its unit and its default. Reading files lives in `recipe.py`.

A recipe is these sections plus `[[stage]]` entries; a stage may carry any section again and overrides it key by
key for its own duration. Unknown keys are refused.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    name: str = "run"
    """Folder name below `folder`; a number is appended when it is taken."""
    folder: str = "runs"
    seed: int = 0
    """Everything random in a run follows from it and from identities."""
    threads: int = Field(default=1, ge=1)
    """torch threads."""
    checkpoint_seconds: float = Field(default=60.0, ge=0)
    """A checkpoint is written after the first step that ends so long after the last one, and at the end of a stage."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older ones are deleted; the last one of each stage stays."""
    fault_budget: float = Field(default=0.05, ge=0, le=1)
    """Share of a step's attempts that may end ENVIRONMENT_FAILED before the run halts."""
    save_rollouts: bool = True
    """Write every attempt of every step to parquet."""


class ModelSection(Section):
    path: str | None = None
    """Hugging Face model folder to start from; absent means random weights of the shape below."""
    hidden_size: int = 96
    num_layers: int = 3
    num_heads: int = 3
    num_kv_heads: int = 1
    intermediate_size: int = 256
    rope_theta: float = 1000.0
    max_positions: int = 512
    """Longest sequence, tokens."""
    vocab_size: int = 512
    """Size of the BPE trained from the cold-start rows; used only without `path`."""
    word_merges: bool = False
    """Keep merges inside words (GPT-2 regex); false lets merges cross spaces, which suits fixed phrases."""


class ColumnsSection(Section):
    question: str = "question"
    answer: str = "answer"


class DataSection(Section):
    source: Literal["arithmetic", "files", "word_problems"] = "arithmetic"
    families: list[str] = ["gcd", "powmod", "digsum", "fib"]
    """arithmetic: task families."""
    demo_mix: Literal["majority_wrong", "majority_right", "direct"] = "majority_wrong"
    """arithmetic: behaviours shown by the cold start; `direct` answers without any tool."""
    train_files: list[str] = []
    """files, word_problems: JSONL, CSV or parquet, plain or gzip."""
    test_files: list[str] = []
    columns: ColumnsSection = ColumnsSection()
    max_problems: int | None = None
    """Use only the first so many rows."""
    numbers: Literal["digits", "masked"] = "digits"
    """word_problems: whether the question shows 18 or n0."""
    redraws: int = Field(default=24, ge=0)
    """word_problems: how many times each problem's numbers are drawn again."""
    holdout: int = Field(default=0, ge=0)
    """word_problems: training questions set aside; without test_files they are the held-out problems."""
    program: Literal["inline", "bound", "unordered"] = "inline"
    """word_problems: print(18-4); n0=18;n1=4 on a line and then print(n0-n1); or print(abs(18-4))."""
    answer_share: float = Field(default=0.25, ge=0, le=1)
    """word_problems: share of demonstrations that go on to the answer turn."""
    ask_twice: bool = False
    """word_problems: put the last sentence of each question first as well; also in held-out problems."""
    oversample: int = Field(default=1, ge=1)
    """word_problems: how many times rows of two or more operators are shown for each time the others are."""
    wordings: int = Field(default=1, ge=1)
    """word_problems: different wordings made of each row; only of use with a share below."""
    rename_share: float = Field(default=0.0, ge=0, le=1)
    """word_problems: chance that a thing that is counted gets another name."""
    decoy_share: float = Field(default=0.0, ge=0, le=1)
    """word_problems: chance of a sentence that counts something nobody asks about."""
    shuffle_share: float = Field(default=0.0, ge=0, le=1)
    """word_problems: chance that the sentences before the question change places."""
    distractor_share: float = Field(default=0.0, ge=0, le=1)
    """word_problems: chance of a sentence from another question."""
    swap_share: float = Field(default=0.0, ge=0, le=1)
    """word_problems: chance, for each + and *, that its operands change places in the program."""
    drop_solved_attempts: int | None = Field(default=None, ge=1)
    """Stage 3: attempts by the current policy; problems it solves every time are left out. None: keep all."""
    pool: int = Field(default=2400, ge=1)
    """arithmetic, word_problems: number of training problems drawn once for RL."""


class SftSection(Section):
    batch_rows: int = Field(default=32, ge=1)
    optimizer: Literal["muon", "adamw"] = "muon"
    """muon: Muon on matrices, AdamW on embeddings and norms."""
    muon_learning_rate: float = 0.02
    adamw_learning_rate: float = 3e-3
    weight_decay: float = 0.0
    warmup_steps: int = 20
    decay_share: float = Field(default=0.4, ge=0, le=1)
    """Last share of the steps over which the learning rate falls linearly to zero."""
    context_loss_weight: float = Field(default=0.1, ge=0)
    """Loss weight of prompt and tool tokens; policy tokens weigh 1."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    max_grad_norm: float = 1.0
    tokens_per_microbatch: int = 4096
    rows_file: str | None = None
    """JSONL of OpenAI-style messages to learn from instead of the source's own demonstrations."""


class RolloutSection(Section):
    problems_per_step: int = Field(default=12, ge=1)
    """P."""
    attempts_per_problem: int = Field(default=32, ge=1)
    """R; the paper draws 2G = 32."""
    max_response_tokens: int = Field(default=160, ge=1)
    """Cap on everything after the prompt, tool replies included."""
    max_turns: int = Field(default=4, ge=1)
    """T: completions in one trajectory."""
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_parallel_calls: int = Field(default=4, ge=1)
    """Calls of one turn that are run; each further one is answered with a BAD_CALL that says so."""
    template: Literal["compact", "paper"] = "compact"
    tool_name: str = "python"
    feedback_max_chars: int = Field(default=256, ge=8)
    """Characters of a tool reply that the model is shown; where it is cut, a marker says so."""
    feedback_truncate: Literal["left", "right", "middle"] = "middle"
    feedback_errors: Literal["short", "full"] = "short"
    """short: the last line of a traceback; full: all of it."""
    engine_rows: int = Field(default=512, ge=1)
    """Sequences the torch engine decodes at once."""


class SandboxSection(Section):
    tool: Literal["program", "notebook"] = "program"
    """program: each call is a program of its own (paper); notebook: the calls of an attempt are cells that share their
    names and files."""
    preload: list[str] = ["numpy", "sympy"]
    """Modules imported once before forking."""
    slots: int = Field(default=2, ge=1)
    """Programs that run at once."""
    timeout_seconds: float = Field(default=5.0, gt=0)
    cpu_seconds: float = Field(default=5.0, gt=0)
    memory_bytes: int = Field(default=512 * 2**20, ge=16 * 2**20)
    output_bytes: int = Field(default=64 * 1024, ge=16, le=4 * 2**20)
    processes: int = Field(default=16, ge=1)
    min_isolation: Literal["L1", "L2", "L3", "L4"] = "L1"
    """Refuse to start below this level."""


class ResampleSection(Section):
    method: Literal["roc", "roc_release", "uniform", "all"] = "roc"
    """roc: paper; roc_release: lowest penalty first; uniform: keep G at random; all: plain GRPO."""
    keep: int = Field(default=16, ge=2)
    """G."""
    min_positive: int = Field(default=2, ge=0)
    """roc_release only."""
    min_negative: int = Field(default=2, ge=0)
    """roc_release only."""


class LearningSection(Section):
    learning_rate: float = 4e-4
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    max_grad_norm: float = 1.0
    updates_per_step: int = Field(default=2, ge=1)
    """Optimizer steps per rollout batch; 1 is fully on-policy (paper's release)."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    normalize_by_std: bool = True
    kl_coefficient: float = Field(default=0.0, ge=0)
    """KL to the policy at the start of the stage; off as in the paper."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Entropy bonus; off as in the paper."""
    tokens_per_microbatch: int = 4096
    reset_optimizer: bool = False
    """Start the stage with fresh optimizer state (paper, stage 3)."""


class EvaluateSection(Section):
    problems: int = Field(default=400, ge=0)
    """Held-out problems; 0 skips evaluation."""
    attempts: int = Field(default=1, ge=1)
    """k: attempts per problem at `temperature`."""
    temperature: float = 1.0
    greedy: bool = True
    """Also one greedy attempt per problem."""
    verifier: Literal["boxed", "boxed_strict", "tool_output"] = "boxed"
    """boxed: last balanced box anywhere; boxed_strict: inside <answer>; tool_output: the last tool result."""


class Stage(Section):
    name: str
    kind: Literal["sft", "rl"]
    steps: int = Field(ge=0)
    model: ModelSection
    data: DataSection
    sft: SftSection
    rollout: RolloutSection
    sandbox: SandboxSection
    resample: ResampleSection
    learning: LearningSection
    evaluate: EvaluateSection

    @model_validator(mode="after")
    def attempts_cover_group(self) -> Stage:
        if self.kind == "rl" and self.rollout.attempts_per_problem < self.resample.keep:
            raise ValueError(
                f"resample.keep {self.resample.keep} needs rollout.attempts_per_problem >= {self.resample.keep}, got "
                f"{self.rollout.attempts_per_problem}; raise rollout.attempts_per_problem or lower resample.keep"
            )
        return self


class Recipe(Section):
    """A resolved recipe: the sections are the base, each stage carries its own full copy."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    sft: SftSection = SftSection()
    rollout: RolloutSection = RolloutSection()
    sandbox: SandboxSection = SandboxSection()
    resample: ResampleSection = ResampleSection()
    learning: LearningSection = LearningSection()
    evaluate: EvaluateSection = EvaluateSection()
    stage: list[Stage] = []
