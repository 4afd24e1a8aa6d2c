"""The typed config tree: every key of a recipe, its unit and its default. Reading files lives in `recipe.py`.

A recipe is these sections plus `[[stage]]` entries. A stage may carry again what can differ between stages, and only
that: which keys those are follows from its type (`SftStage`, `RlStage`), so a key that a stage accepts is a key that
the stage reads. Everything else holds for the whole run. Unknown keys are refused.

Defaults are for a pretrained model: the paper's value where it gives one (section in brackets), else the release's.
Models that start from random weights need other numbers, and their recipes say them (recipes/quickstart.toml).
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]
"""A learning rate."""
Seconds = Annotated[float, Field(gt=0, le=86400)]
"""A limit on something that is waited for, a day at most."""


def _word(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]{0,49}", name):
        raise ValueError(
            f"{name!r} cannot be a name; use at most 50 letters, digits, - _ and . and begin with a letter or digit"
        )
    return name


Word = Annotated[str, AfterValidator(_word)]
"""A name that becomes a part of file names, or that a model writes."""


def _sandbox_url(url: str) -> str:
    if not re.fullmatch(r"http://[^\s/?#@]+/?|unix:/\S+", url):
        raise ValueError(f"{url!r} is no address of a sandbox; write http://host:port")
    return url


SandboxUrl = Annotated[str, AfterValidator(_sandbox_url)]


SETTLE = "settle"


def _settled(path: str, info: ValidationInfo) -> str:
    return os.path.abspath(path) if info.context == SETTLE and os.path.exists(path) else path


Place = Annotated[str, AfterValidator(_settled)]
"""A file or folder, relative to the folder that a run is started in, and absolute where validation has SETTLE for its
context. What is not there stays as it is: a hub id, or a mistake that is told later."""


def _settled_file(name: str, info: ValidationInfo) -> str:
    return _settled(name, info) if name.endswith(".toml") else name


BenchmarkName = Annotated[str, AfterValidator(_settled_file)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RunSection(Section):
    name: str = "run"
    """Folder name below `folder`; a number is appended when it is taken."""
    folder: str = "runs"
    seed: int = 0
    """Everything random in a run follows from it and from identities."""
    threads: int = Field(default=1, ge=1, le=4096)
    """torch threads."""
    checkpoint_seconds: float = Field(default=600.0, ge=0)
    """A checkpoint is written after the first step that ends so long after the last one, and at the end of a stage."""
    checkpoint_cost: Share = 0.05
    """And only when writing takes at most this share of the time since the last one, judged by how long that took."""
    keep_checkpoints: Count = 2
    """Older ones are deleted; the last one of each stage stays."""
    fault_budget: Share = 0.05
    """Share of a step's or an evaluation's attempts that may end ENVIRONMENT_FAILED before the run halts."""
    probe_seconds: Seconds = 600.0
    """Before the first step of an RL stage, and between steps when so long has passed, programs and answers whose
    result is known go through sandbox and grader; the run halts when one is wrong."""
    stall_seconds: Seconds = 300.0
    """While attempts are made: no token is written and no attempt goes on for so long, and the run says what each waits
    for."""
    stall_learning_seconds: Seconds = 3600.0
    """The same while none are made: starting, learning, saving."""
    stall_policy: Literal["warn", "halt"] = "warn"
    """What follows. warn: the run waits on; halt: it ends, to be resumed from its last checkpoint."""
    modules: list[Place] = []
    """Folders in which modules of your own (`package.module:name`) are found before the current one; left empty, the
    recipe's own folder and those of the recipes it extends."""
    save_rollouts: bool = True
    """Write every attempt of every step to parquet."""
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = []
    """Where metrics go beside the run's folder, each sent by a process of its own; any of them may fail."""


class ModelSection(Section):
    path: Place | None = None
    """Model to start from: a Hugging Face folder, or a hub id where the network allows. None: random weights of the
    shape below."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Numbers of the forward and backward pass; weights that are trained and optimizer state are always float32. auto:
    bfloat16 on cuda, float32 on the CPU."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass: less memory, a third more work."""
    hidden_size: int = Field(default=96, ge=1, le=65536)
    """This and the following: random weights only."""
    num_layers: int = Field(default=3, ge=1, le=1000)
    num_heads: int = Field(default=3, ge=1, le=1024)
    num_kv_heads: int = Field(default=1, ge=1, le=1024)
    intermediate_size: int = Field(default=256, ge=1, le=2**20)
    rope_theta: float = Field(default=1000.0, gt=0)
    max_positions: int = Field(default=512, ge=1, le=2**24)
    """Longest sequence that the model can hold, tokens."""
    vocab_size: int = Field(default=512, ge=1, le=2**20)
    """Size of the BPE trained from the cold-start rows."""
    word_merges: bool = False
    """Keep merges inside words (GPT-2 regex); false lets merges cross spaces, which suits fixed phrases."""

    @model_validator(mode="after")
    def heads_divide(self) -> ModelSection:
        if self.hidden_size % (2 * self.num_heads):  # positions turn pairs of numbers
            raise ValueError(
                f"model.hidden_size {self.hidden_size} must be an even multiple of model.num_heads {self.num_heads}; "
                "change one of them"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads {self.num_heads} must be a multiple of model.num_kv_heads {self.num_kv_heads}; "
                "change one of them"
            )
        return self


class ColumnsSection(Section):
    question: list[str] = Field(default=["question"], min_length=1)
    """Several are joined by a space, such as a story and the question about it."""
    answer: str = "answer"


class TaskSection(Section):
    """Where problems and demonstrations come from."""

    source: str = "arithmetic"
    """arithmetic, files, or a Task of your own as `package.module:name`."""
    options: dict[str, Any] = {}
    """Settings of a Task of your own, which checks them."""
    families: list[str] = ["gcd", "powmod", "digsum", "fib"]
    """arithmetic: task families."""
    demo_mix: Literal["majority_wrong", "majority_right", "direct"] = "majority_wrong"
    """arithmetic: behaviours shown by the cold start; `direct` answers without any tool."""
    train_files: list[Place] = []
    """files: JSONL, CSV or parquet, plain or gzip."""
    columns: ColumnsSection = ColumnsSection()
    max_problems: Count | None = None
    """Use only the first so many rows of a file."""


class StageDataSection(TaskSection):
    """What an RL stage may change about its problems."""

    pool: Count = 2400
    """arithmetic: number of training problems drawn once for RL."""
    drop_solved_attempts: Count | None = None
    """Attempts by the current policy; problems it solves every time are left out (8 in stage 3, §4.3). None: all
    stay."""
    drop_solved_age: int = Field(default=0, ge=0)
    """Attempts of this run's steps count among them, where their weights are at most so many updates older."""


class DataSection(StageDataSection):
    test_files: list[Place] = []
    """Held-out problems of `source = "files"`."""


class SftSection(Section):
    batch_rows: Count = 128  # §5.1
    optimizer: Literal["muon", "adamw"] = "adamw"
    """muon: Muon on matrices, AdamW on embeddings and norms; for models from random weights."""
    muon_learning_rate: Rate = 0.02
    adamw_learning_rate: Rate = 5e-6  # §5.1
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=20, ge=0)
    """Steps over which the learning rate rises linearly (the paper: 4% of all steps, §5.1)."""
    decay: Literal["cosine", "linear"] = "cosine"  # §5.1
    decay_share: Share = 1.0
    """Last share of the steps over which the learning rate falls to zero."""
    context_loss_weight: float = Field(default=0.0, ge=0)
    """Loss weight of prompt and tool tokens; policy tokens weigh 1."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    tokens_per_microbatch: Count = 16384
    """At most so many tokens in a forward and backward pass of one learner (on a CPU at most 4,096); a longer row gets
    a pass of its own."""
    rows_file: Place | None = None
    """JSONL of OpenAI-style messages to learn from instead of the source's own demonstrations."""


class StageRolloutSection(Section):
    """What an RL stage may change about its attempts."""

    problems_per_step: Count = 128
    """P (release; the paper has 512, §5.1)."""
    attempts_per_problem: Count = 32  # §5.1
    """R; the paper draws 2G."""
    max_response_tokens: Count = 8192  # stage 1, §5.1
    """Cap on everything after the prompt, tool replies included."""
    max_turns: Count = 10  # §5.1
    """T: completions in one trajectory."""
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0: all."""
    max_parallel_calls: Count = 4
    """Calls of one turn that are run; each further one is answered with a BAD_CALL that says so."""
    truncated: Literal["wrong", "graded"] = "wrong"  # §4.3.1
    """What an attempt that was cut (by tokens or turns) is in training: wrong, or graded by the answer it holds."""
    max_staleness_steps: int = Field(default=0, ge=0, le=1000)
    """Attempts of a step may begin while so many steps before it are still to be learnt from, so a token is at most so
    many steps older than the weights that learn from it. 0: strictly on-policy (the paper)."""


class RolloutSection(StageRolloutSection):
    template: Literal["paper", "model", "compact"] = "paper"
    """paper: its Fig. 3; model: the chat template of `model.path`; compact: no system text, no list of tools."""
    preamble: str | None = None
    """Stands before each question; None: the template's own, which asks for the answer in a box."""
    tool_name: Word = "python"
    """Name of the Python tool, as the model sees it."""
    environment: str | None = None
    """An Environment of your own as `package.module:name`; None: the conversation with tools."""
    feedback_max_chars: int = Field(default=4096, ge=8)
    """Characters of a tool reply that the model is shown; where it is cut, a marker says so (the release: 256)."""
    feedback_truncate: Literal["left", "right", "middle"] = "middle"
    feedback_errors: Literal["short", "full"] = "full"
    """short: the last line of a traceback; full: all of it."""
    engine_rows: Count = 64
    """Sequences an engine decodes at once."""
    kv_tokens: Count | None = None
    """Tokens whose keys and values an engine keeps in memory, of attempts that decode or wait for their tools;
    None: as many as engine_rows attempts of the greatest length take. With less, attempts that outgrow it are fed
    again later."""
    engine_patience_seconds: Seconds = 120.0
    """An engine that has turns to do and shows no progress for so long is taken out, as is one that takes longer for
    new weights; the turns it had are done elsewhere. With no engine for so long, they end as faults of ours."""


class SandboxSection(Section):
    tools: list[str] = ["python"]
    """python: each call is a program of its own (§2.1); notebook: the calls of an attempt are cells that share their
    names and files; or a Tool of your own as `package.module:name`."""
    urls: list[SandboxUrl] = []
    """Services (`rocstar sandbox serve`) that run the programs, as http://host:port; left empty, a sandbox of this
    process. They settle `slots` and `preload` themselves. Their token: the environment's ROCSTAR_SANDBOX_TOKEN."""
    preload: list[str] = ["numpy", "sympy"]
    """Modules imported once before forking."""
    slots: int = Field(default=2, ge=1, le=4096)
    """Programs that run at once."""
    timeout_seconds: Seconds = 5.0
    cpu_seconds: Seconds = 5.0
    memory_bytes: int = Field(default=512 * 2**20, ge=16 * 2**20, le=2**50)
    output_bytes: int = Field(default=64 * 1024, ge=16, le=4 * 2**20)
    processes: Count = 16
    min_isolation: Literal["L1", "L2", "L3", "L4"] = "L1"
    """Refuse to start below this level."""


class ResampleSection(Section):
    method: Literal["roc", "roc_release", "uniform", "all"] = "roc"
    """roc: paper (§2.2.3); roc_release: lowest penalty first; uniform: keep G at random; all: plain GRPO."""
    keep: int = Field(default=16, ge=2)  # §5.1
    """G."""
    min_positive: int = Field(default=2, ge=0)
    """roc_release only."""
    min_negative: int = Field(default=2, ge=0)
    """roc_release only."""
    repetition_weight: float = Field(default=0.0, ge=0)
    """Weight, in the penalty, of the share of 5-grams that stand in an attempt more than 5 times; the paper tried it
    and left it out (§4.3.1)."""
    drop_truncated: bool = False
    """Leave out attempts cut by the token limit instead of counting them wrong (overlong filtering); the paper tried it
    and left it out (§4.3.1)."""

    @model_validator(mode="after")
    def minima_fit(self) -> ResampleSection:
        if self.method == "roc_release" and self.min_positive + self.min_negative > self.keep:
            raise ValueError(
                f"resample.min_positive {self.min_positive} and resample.min_negative {self.min_negative} do not fit "
                f"into resample.keep {self.keep}; lower them or raise resample.keep"
            )
        return self


class LearningSection(Section):
    optimizer: Literal["adamw"] = "adamw"  # §5.1
    learning_rate: Rate = 1e-6  # §5.1
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    warmup_steps: int = Field(default=20, ge=0)  # §5.1
    """Optimizer updates over which the learning rate rises linearly."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    updates_per_step: Count = 1
    """Optimizer updates per rollout batch; 1 is fully on-policy (release)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)  # §2.2.1
    clip_high: float = Field(default=0.28, gt=0)  # §2.2.1
    importance_cap: float | None = Field(default=None, ge=1)
    """C of truncated importance sampling: a token's loss is weighed by how much likelier the learner is to write it, at
    the step's beginning, than the engine was that did, at most so much. None: all weigh 1."""
    top_entropy_share: float = Field(default=1.0, gt=0, le=1)
    """Share of each attempt's tokens, those of the highest entropy, that is learnt from (arXiv 2506.01939; the release
    has this switch too)."""
    normalize_by_std: bool = True
    kl_coefficient: float = Field(default=0.0, ge=0)
    """KL to the policy at the start of the stage; off as in the paper."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Entropy bonus; off as in the paper."""
    tokens_per_microbatch: Count = 16384
    """At most so many tokens in a forward and backward pass of one learner (on a CPU at most 4,096); a longer row gets
    a pass of its own."""
    reset_optimizer: bool = False
    """Start the stage with fresh optimizer state (stage 3, §4.3)."""


class EndSection(Section):
    """When an RL stage ends before its `steps`, judged by its own metrics: as soon as one of these rules holds. Those
    that are None never do."""

    window: Count = 20
    """Steps whose mean a rule looks at. No rule holds before so many, none that compares two means before twice so
    many."""
    reward_gain: float | None = Field(default=None, ge=-1, le=1)
    """Flat: the mean reward of the last window is less than this above that of the window before ..."""
    truncated_share: Share | None = None
    """... and, where this is set, the share of attempts cut by the token limit stands near it in both windows (near
    0.10 at the end of stage 1, §4.3)."""
    truncated_band: Share = 0.03
    """How near, either way."""
    solved_share: Share | None = None
    """Saturated: in at least this share of the groups every attempt is right (0.7 at the end of stage 2, §4.3)."""
    reward_loss: float | None = Field(default=None, gt=0, le=1)
    """Declined: the mean reward of the last window is at least so far below that of the best window of the stage."""

    @model_validator(mode="after")
    def truncation_qualifies_flatness(self) -> EndSection:
        if self.truncated_share is not None and self.reward_gain is None:
            raise ValueError("end.truncated_share is only looked at where the reward is flat; set end.reward_gain too")
        return self


class ClusterSection(Section):
    learners: Count = 1
    """Processes that share the weights and the work of learning (FSDP2); on GPUs one each. Under torchrun 1 means as
    many as it started, and any other number must be that one."""
    launcher: Literal["processes", "ray"] = "processes"
    """processes: learners and the vLLM servers that are started are children of the run's process, on its machine;
    under torchrun the learners are there already. ray: Ray places them, on as many machines as it has."""
    sandbox_nodes: int = Field(default=0, ge=0, le=4096)
    """Services of `sandbox.slots` programs each that Ray places and the run ends; 0: the sandbox that `[sandbox]`
    says."""
    offload_optimizer: bool = False
    """Keep optimizer state in main memory instead of on the GPU."""

    @model_validator(mode="after")
    def ray_places_sandboxes(self) -> ClusterSection:
        if self.sandbox_nodes and self.launcher != "ray":
            raise ValueError(
                f"cluster.sandbox_nodes {self.sandbox_nodes} are placed by Ray; set cluster.launcher to 'ray' or leave "
                "cluster.sandbox_nodes out"
            )
        return self


class TorchEngines(Section):
    """Engines in processes of their own on this machine: one that dies costs no attempt while another is left."""

    name: Word
    kind: Literal["torch"]
    count: int = Field(default=1, ge=1, le=1024)
    """Processes; each holds the model, `rollout.engine_rows` sequences and one torch thread."""

    @property
    def names(self) -> list[str]:
        """Of each of them, as events and messages call it."""
        return [f"{self.name}-{number}" for number in range(self.count)]


class VllmEngines(Section):
    """vLLM servers: `count` of them started as `cluster.launcher` says, or one that runs at `url` already."""

    name: Word
    kind: Literal["vllm"]
    count: int = Field(default=1, ge=1, le=1024)
    """Servers to start; each decodes `rollout.engine_rows` sequences at once and has room for that many whole ones."""
    url: str | None = None
    """Of a server that was started as docs/vllm.md says, and can read the folders that weights go through."""
    python: Place | None = None
    """Interpreter of the environment that has vLLM; none: the one that ROCSTAR_VLLM_PYTHON names."""
    threads: Count = 1
    """That compute in each server, on CPUs."""

    @property
    def names(self) -> list[str]:
        """Of each of them, as events and messages call it."""
        return [f"{self.name}-{number}" for number in range(self.count)]

    @model_validator(mode="after")
    def one_url_is_one_server(self) -> VllmEngines:
        if self.url is not None and (self.count > 1 or self.python is not None or self.threads > 1):
            raise ValueError("url names one server that runs already; leave count, python and threads out")
        return self


Engines = Annotated[TorchEngines | VllmEngines, Field(discriminator="kind")]

VERIFIERS = ("boxed", "boxed_strict", "tool_output")
"""Those that come with rocstar."""


class BenchmarkSection(Section):
    """A benchmark that training asks; what is absent is as its own file says (docs/evaluation.md)."""

    name: BenchmarkName
    """One that comes with rocstar, or the path of a TOML file of your own."""
    folder: Place | None = None
    """Holds the rows; none: they are read from the hub."""
    accept_rows: bool = False
    """Take rows with another checksum than the benchmark's file says."""
    limit: Count | None = None
    """Only the first so many problems."""
    attempts: Count | None = None
    """Samples per problem."""
    temperature: float | None = Field(default=None, ge=0)
    settings: list[str] = []
    """Further ones for its attempts, such as "rollout.max_response_tokens=4096"."""


class EvaluateSection(Section):
    benchmark: list[BenchmarkSection] = []
    """Asked before the first RL stage, after every `every_steps` and at the end, besides the held-out problems."""
    problems: int = Field(default=400, ge=0)
    """Held-out problems; 0: none are asked."""
    every_steps: int = Field(default=0, ge=0)
    """Also evaluate after every so many steps of an RL stage, held-out problems under that stage's limits; 0: only
    before and after."""
    attempts: Count = 1
    """k: attempts per problem at `temperature`."""
    temperature: float = Field(default=1.0, ge=0)
    greedy: bool = True
    """Also one greedy attempt per problem."""
    verifier: str = "boxed"
    """Judges attempts, in training too. boxed: last balanced box anywhere; boxed_strict: inside <answer>; tool_output:
    the last tool result; or a reward function of your own as `package.module:name`."""

    @field_validator("verifier")
    @classmethod
    def verifier_is_known(cls, name: str) -> str:
        if name not in VERIFIERS and ":" not in name:
            close = get_close_matches(name, VERIFIERS, n=1, cutoff=0.0)[0]
            raise ValueError(f"there is no verifier {name!r}; did you mean {close!r}? Your own is package.module:name")
        return name


class SftStage(Section):
    name: Word
    kind: Literal["sft"]
    steps: int = Field(ge=0)
    data: TaskSection
    sft: SftSection


class RlStage(Section):
    name: Word
    kind: Literal["rl"]
    steps: int = Field(ge=0)
    """At most; `end` may end it earlier."""
    data: StageDataSection
    rollout: StageRolloutSection
    resample: ResampleSection
    learning: LearningSection
    end: EndSection

    @model_validator(mode="after")
    def attempts_cover_group(self) -> RlStage:
        if self.rollout.attempts_per_problem < self.resample.keep:
            raise ValueError(
                f"resample.keep {self.resample.keep} needs rollout.attempts_per_problem >= {self.resample.keep}, got "
                f"{self.rollout.attempts_per_problem}; raise rollout.attempts_per_problem or lower resample.keep"
            )
        return self


Stage = Annotated[SftStage | RlStage, Field(discriminator="kind")]
STAGES: dict[str, type[Section]] = {"sft": SftStage, "rl": RlStage}
"""By `kind`."""


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

    @model_validator(mode="after")
    def template_has_a_model(self) -> Recipe:
        if self.rollout.template == "model" and self.stage and self.model.path is None:
            raise ValueError("rollout.template 'model' is that of a pretrained model; set model.path or use 'paper'")
        return self

    @model_validator(mode="after")
    def a_tool_that_takes_its_time_is_no_stall(self) -> Recipe:
        run, sandbox = self.run, self.sandbox
        if run.stall_policy == "halt" and run.stall_seconds <= sandbox.timeout_seconds:
            raise ValueError(
                f"run.stall_seconds {run.stall_seconds:g} would halt the run for a program that may take "
                f"sandbox.timeout_seconds {sandbox.timeout_seconds:g}; raise run.stall_seconds"
            )
        return self

    @model_validator(mode="after")
    def one_place_for_programs(self) -> Recipe:
        if self.cluster.sandbox_nodes and self.sandbox.urls:
            raise ValueError(
                f"cluster.sandbox_nodes {self.cluster.sandbox_nodes} and sandbox.urls both say where programs run; "
                "leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def vllm_draws_from_all(self) -> Recipe:
        rollouts = [self.rollout, *(stage.rollout for stage in self.stage if isinstance(stage, RlStage))]
        cut = any(rollout.top_p < 1 or rollout.top_k > 0 for rollout in rollouts)
        if cut and any(isinstance(entry, VllmEngines) for entry in self.engine):
            raise ValueError("top_p must be 1 and top_k 0 for engines of kind 'vllm'; it reports no others' logprobs")
        return self

    @property
    def servers(self) -> list[VllmEngines]:
        """vLLM servers that a run starts."""
        return [entry for entry in self.engine if isinstance(entry, VllmEngines) and entry.url is None]

    def resolved(self) -> dict[str, Any]:
        """As plain JSON values; nulls survive. Paths to what is there are absolute."""
        return self.settled().model_dump(mode="json")

    def settled(self) -> Recipe:
        """The same with absolute paths, as a run works with it whether it is fresh or resumed."""
        return Recipe.model_validate(self.model_dump(), context=SETTLE)
