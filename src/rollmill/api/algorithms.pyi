"""Written by docs/python_api.py from the models of the run file; a test compares it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from rollmill.api.training_run import TrainingRun
from rollmill.config.section import Section
from rollmill.orchestrator.run_control import Callback

SectionLike = str | Mapping[str, Any] | Section
ModelLike = str | Path | Mapping[str, Any] | Section | Any
DatasetLike = (
    str | Path | Mapping[str, Any] | Section | Iterable[Mapping[str, Any]] | Callable[..., Iterable[Mapping[str, Any]]]
)
RewardLike = SectionLike | Callable[..., Any]

def algorithm_classes() -> dict[str, type[TrainingRun]]: ...

class RunSettings(TypedDict, total=False):
    """Settings of every run."""

    temperature: float
    """0 is greedy. Training rejects 0, because all completions of a group would be equal."""
    top_p: float
    """Keep the smallest set of most probable tokens with at least this total probability; 1 keeps all."""
    top_k: int
    """Keep only the K most probable tokens; 0 keeps all."""
    min_p: float
    """Drop tokens less probable than min_p times the most probable one."""
    max_new_tokens: int
    """Maximum completion length in tokens; the model's context may end it sooner."""
    stop: Sequence[str]
    """Stop strings. The text ends before the stop string; the tokens include it."""
    stop_token_ids: Sequence[int]
    """Token ids that end a completion, in addition to the checkpoint's EOS ids."""
    repetition: SectionLike | None
    """End completions that repeat themselves; `{}` uses the defaults."""
    ngram_draft: SectionLike | None
    """Draft tokens from repeated n-grams and verify several in one forward pass; `{}` uses the defaults. The sampling
    distribution is unchanged; only repetitive text (copied code, tables) becomes faster."""
    batch: int
    """Tasks per training step."""
    group_size: int
    """Completions per task (the group)."""
    max_sequences: int
    """Maximum number of completions decoded at the same time; others wait in a queue."""
    prefill_tokens: int
    """Maximum prompt tokens per engine step; longer prompts are processed in chunks."""
    reuse: SectionLike | None
    """Speculative reuse of earlier completions; `{}` uses the defaults. Only for tasks that are rolled out repeatedly
    with workflow `single_turn`. The sampling distribution is exactly that of the new weights."""
    deadline_s: float
    """Timeout for one batch of completions and their rewards. An evaluation with more completions than a batch has
    proportionally longer."""
    refills: int
    """Maximum number of batches' worth of groups that one step may lose to the pipeline or the workflow before the run
    ends with an error. Each lost group is replaced by another task."""
    attempts: int
    """Maximum number of attempts per rollout, each with different random numbers. An attempt fails when its environment
    crashes, the workflow raises, or it times out."""
    time_limit_s: float | None
    """Timeout of one rollout attempt, including all turns and waiting for the engine."""
    failures: Literal["stop", "reject"]
    """When the last attempt of a rollout has failed: end the run with an error (`stop`), or train on the rest of its
    group (`reject`)."""
    oversample: float
    """Start this fraction more groups than a step needs. When enough groups are complete, the others are cancelled and
    their tasks are restarted first."""
    token_budget: int | None
    """Tokens to generate per step (partial rollouts). When they are used up and the step's groups are complete,
    unfinished completions are suspended and resume in the next step with the new weights. Needs max_staleness of at
    least 1."""
    partial: SectionLike
    """Loss on completions that a token budget has split into segments of different weight versions."""
    chat_template_kwargs: Mapping[str, Any]
    """Variables of the chat template for all chats of the stage, such as `enable_thinking: false`; those of a taskset,
    and of a row's column `chat_template_kwargs`, win. `serve` uses them, too."""
    lr: float
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"]
    """Shape of the learning rate after warm-up, over the stage's steps."""
    warmup_steps: int
    """Steps over which the learning rate rises linearly to lr."""
    min_lr_ratio: float
    """Final learning rate of linear and cosine schedules, as a fraction of lr."""
    optimizer: Literal["adamw", "adamw_8bit"]
    """`adamw_8bit` keeps both moments of AdamW in 8 bits a weight, in blocks with a scale of their own
    (arXiv:2110.02861) and rounded stochastically: 2 bytes a weight instead of 8, or of 4 with `param_dtype: bf16`."""
    betas: Sequence[float]
    """AdamW's decay rates of the first and the second moment."""
    eps: float
    """AdamW's epsilon in the denominator."""
    weight_decay: float
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float
    """Maximum gradient norm, for clipping."""
    updates_per_batch: int
    """Mini-batches per pass over the batch, each of whole groups, with one optimizer step each."""
    epochs_per_batch: int
    """Passes over each batch."""
    micro_batch_tokens: int | Literal["auto"]
    """Tokens per forward and backward pass; the gradient does not depend on it. `auto`: 8192, and on a GPU less if a
    step does not fit otherwise."""
    metrics_share: float
    """Share of the completions without an advantage (those of groups with equal rewards) that pass through the model.
    Nothing is learned from them: they only count in metrics such as entropy and kl, which are then estimated from a
    random sample, and have token details. Less is faster, the more so the more groups are uniform."""
    logprob_chunk: int | None
    """Maximum rows of [rows, vocabulary] logits in memory at a time. Default: as many as fit in 256 MiB, at most 1024.
    """
    gradient_checkpointing: bool | Literal["auto"]
    """Recompute activations in the backward pass: less memory, more time. `auto`: on a GPU, if a step does not fit
    otherwise."""
    freeze: Sequence[Literal["vision", "projector"]]
    """Parts of a vision-language model that are not trained: its vision tower, and the projector from the tower to the
    embeddings."""
    precision: Literal["auto", "fp32", "bf16"]
    """Compute dtype over fp32 master weights. `auto` measures which is faster on this machine for the matrix products
    of a step of the last stage: all linear layers, with the rows of its rollouts and of its passes. It measures once:
    later runs read the times from the cache folder, and so compute the same."""
    param_dtype: Literal["auto", "fp32", "bf16"]
    """Type of the weights, their gradients and AdamW's moments. `bf16` takes half the memory, and computes in bf16: for
    models that do not fit otherwise. Updates are rounded stochastically, since nearly all of them would be lost by
    rounding to nearest (arXiv:2010.06192). Adapters (model.lora) stay in fp32, over a model in bf16. `auto`: fp32, and
    on a GPU bf16 if a step does not fit otherwise."""
    ranks: int
    """Number of trainer processes, each with `threads` threads or a GPU of its own. The first one is the run's own
    process, which also rolls out; on Ray it is the trainer's, and the others may be on other hosts."""
    sharding: Literal["none", "fsdp", "tensor", "context", "expert"]
    """`none`: every rank holds the whole model and optimizer. `fsdp`: each rank holds a shard of weights, gradients and
    optimizer states. `tensor`: each rank holds a shard of each layer's matrices and processes every row. `context`:
    every rank holds the whole model and processes its share of the tokens of every row, for long contexts; ranks
    exchange tokens for heads around attention (arXiv:2309.14509). `expert`, for mixtures of experts: each rank holds
    its share of the experts, to which tokens travel (arXiv:2006.16668). With shards, an engine in the first rank's
    process has a copy in its own type."""
    router_replay: bool | Literal["auto"]
    """Mixture-of-experts models: route each token in training through the experts chosen in its rollout (R3,
    arXiv:2510.11370), so that near ties between experts do not change log-probs. `auto`: if the model has routers and
    engine `native` rolls out; `true`: required, otherwise the run is refused."""
    rank_deadline_s: float
    """Timeout of a rank that waits for another one within a step."""
    name: str
    """Name of the run (of the stage, inside `stages`)."""
    steps: int
    """Training steps of this stage."""
    max_staleness: int
    """Maximum number of weight versions a rollout may lag behind the trained weights. 0: synchronous; 1: one-step off-
    policy."""
    sync_interval: int
    """Publish the trainer's weights to engines in other processes after every N-th step (and before evaluations), so
    rollouts use weights that are up to N - 1 steps old. Needs max_staleness of at least N - 1, which bounds the
    staleness of every token as before."""
    taskset: DatasetLike
    """Tasks to roll out or imitate. Required unless a stage learns from `offline_data.sources` alone, or has `domains`.
    """
    workflow: SectionLike
    """Rollout procedure of a task: a name or a section."""
    environment: SectionLike | None
    """Environment that the workflow acts in, if any: a name or a section."""
    tools: Sequence[SectionLike]
    """Tools that the policy may call in a workflow with tools: names or sections."""
    roles: Mapping[str, SectionLike]
    """Roles that the policy plays in the workflow, by name. If there are any, the workflow may use no others."""
    rollout: SectionLike
    """Rollouts for training."""
    engine: SectionLike
    """Inference engine that generates completions: a name or a section."""
    reward_settings: SectionLike
    """Settings of the reward manager, shared by all rewards."""
    models: Mapping[str, SectionLike]
    """Models besides the policy, such as an opponent or a judge. A workflow receives each one as the parameter of its
    name."""
    pipeline: Sequence[SectionLike]
    """Operators that verify, drop, change or create experiences before the trainer sees them, in order."""
    buffer: SectionLike
    """Storage of verified experiences until the trainer reads them, and replay."""
    offline_data: SectionLike
    """Demonstrations and preferences for algorithms that learn from them."""
    trainer: SectionLike
    """Optimizer, batch splitting and distribution."""
    offload: SectionLike | None
    """Offloading of models and optimizer states in phases that do not need them: `none`, `auto` (only what does not
    fit), or a section."""
    evaluation: SectionLike | None
    """Accuracy on held-out tasks: one set (`taskset` and the keys beside it), several (`sets`), or both."""
    early_stop: SectionLike | None
    """Stops a stage when an evaluation metric is good enough or no longer improves."""
    domains: Mapping[str, Mapping[str, Any]]
    """Kinds of tasks that are learned together, by name, instead of one `taskset`. Each may have its own rewards,
    workflow, sampling and algorithm; the other sections of the stage are its defaults."""
    mixing: SectionLike
    """Shares of the domains."""
    seed: int
    """Seed of a new model's weights, the order of tasks and all sampling."""
    device: Literal["auto", "cpu", "cuda"]
    """Device of the model; auto uses a GPU if torch finds one."""
    threads: int | Literal["auto"]
    """CPU threads of this process; auto measures, once on each machine. Two threads are often slower than one for small
    models."""
    placement: SectionLike
    """Assignment of components to processes: a name or a section."""
    mode: Literal["both", "explore", "train", "bench", "serve"]
    """Mode of `rollmill run`. `both`: roll out and train; `placement` selects the processes. `train`: train on the
    rollouts of explorers that join as separate processes, or on what the buffer holds. `explore`: join such a run, or
    fill a buffer without a trainer (`await_trainer: false`). `bench`: evaluate the model. `serve`: serve it."""
    await_trainer: bool
    """With mode `explore`: join a trainer, and wait for one. False: no trainer takes part; roll out the groups of all
    steps at the weights of the model, and leave them in the buffer, for a trainer that starts there later."""
    trainer_away_s: float
    """With mode `explore`: longest time without a sign of life from the trainer, for example while it starts or
    resumes."""
    explorer_silent_s: float
    """With mode `train` and with placement `ray`: an explorer that gives no answer and writes no heartbeat for so long
    is lost, and others roll out its groups. One that writes heartbeats, but does not answer, is lost after 60 seconds
    (`placement.health_s`)."""
    plugins: Sequence[str | Path]
    """Python files to import before the run file is checked. Components that they register (`@rollmill.reward`,
    `@rollmill.loss`, `@rollmill.advantage`, `@rollmill.algorithm`, `@rollmill.operator`, `@rollmill.task_operator`,
    `@rollmill.sampler`, `@rollmill.workflow`, `@rollmill.environment`, `@rollmill.tool`) are available by name."""
    changes: Sequence[SectionLike]
    """Changes of the learning rate and of rewards' weights, and stops, after given steps: a plan, or the
    `changes.jsonl` of a run whose callbacks made them."""
    checkpoint: SectionLike
    """Frequency and retention of checkpoints."""
    supervise: SectionLike
    """The process that trains is a child of `rollmill run` and `rollmill resume`. When it is killed, stalls, runs out
    of memory, or loses a server, it is started again from its newest checkpoint. Wrong settings, errors of users' code
    and losses that are not finite end the run."""
    monitor: SectionLike
    """Terminal output, logged files and the report."""
    stages: Sequence[Mapping[str, Any]]
    """Stages to run one after the other; each starts from the previous stage's weights, with a fresh optimizer."""

class PolicyGradientSettings(RunSettings, total=False):
    """Settings of policy-gradient algorithms."""

    advantage: SectionLike
    """Advantage estimator: a name or a section."""
    loss: SectionLike
    """Per-token loss: a name or a section."""
    kl: float | SectionLike
    """KL penalty: its coefficient or a section."""
    entropy: float
    """Weight of the entropy bonus."""
    entropy_control: SectionLike | None
    """Adapt the weight of the entropy bonus to a target entropy. Default: constant weight."""
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum-mean", "constant"]
    """Reduction of per-token terms to the loss, with one denominator for the whole optimizer step."""
    corrections: Sequence[SectionLike]
    """Importance weights for tokens that were not sampled by the old policy; several are multiplied."""
    masks: Sequence[SectionLike]
    """Masks that exclude tokens from the policy loss, computed over the whole optimizer step by one more forward pass.
    """
    proximal: Literal["auto", "rollout", "recompute", "interpolate"]
    """Log-probs of the old policy: recorded by the rollout, recomputed before the first update, or interpolated between
    rollout and policy. `auto` recomputes them if there are corrections."""
    overlong_buffer: int
    """Soft overlong penalty: completions longer than max_new_tokens - overlong_buffer lose up to 1 reward, linearly. 0
    turns it off."""
    drop_uniform_groups: bool
    """Exclude groups whose rewards are all equal from the denominator."""
    reset_optimizer: bool
    """Reset the optimizer's moments at the start of every training step."""
    critic: SectionLike
    """The value model. Only for advantage `gae`."""

class GRPO(TrainingRun):
    """Group-relative policy optimisation: rewards normalised within the group, mean over completions of token means."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class DrGRPO(TrainingRun):
    """Dr. GRPO: r - mean, no length normalisation, constant denominator."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class DAPO(TrainingRun):
    """DAPO: asymmetric clipping, token mean, uniform groups left out, optional overlong penalty."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class LitePPO(TrainingRun):
    """Lite PPO: mean of the group, standard deviation of the batch, token mean."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class PassAtKTraining(TrainingRun):
    """Pass@k training: advantages of the best of k completions."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class GDPO(TrainingRun):
    """GDPO: reward components normalised separately within the group."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class Reinforce(TrainingRun):
    """REINFORCE with the batch mean as baseline; the ratio is clipped as in PPO."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class ReinforcePlusPlus(TrainingRun):
    """REINFORCE++: the KL penalty inside the reward, advantages normalised over the batch."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class ReinforcePlusPlusBaseline(TrainingRun):
    """REINFORCE++-baseline: r - mean within the group, normalised over the batch."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class RLOO(TrainingRun):
    """RLOO: r_i minus the mean of the other rewards of its group, summed over tokens."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class ReMax(TrainingRun):
    """ReMax: r minus the reward of the greedy completion of the same prompt."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class OPO(TrainingRun):
    """OPO: r minus the length-weighted mean of the group, -A log pi."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class GPG(TrainingRun):
    """GPG: -A log pi, no ratio, no reference, uniform groups left out."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class PPO(TrainingRun):
    """PPO: advantages from a critic (GAE), clipped surrogate, clipped value loss."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class OTB(TrainingRun):
    """OTB: r minus a baseline per token, weighted by the size of the gradient so far."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class StepwiseGRPO(TrainingRun):
    """Step-wise GRPO: an episode's advantage on each of its steps."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class GiGPO(TrainingRun):
    """GiGPO: the episode's advantage plus the step's relative to steps taken in the same state."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class SFTSettings(RunSettings, total=False):
    """Settings of SFT."""

    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum-mean", "constant"]
    """Aggregation of per-token terms."""

class SFT(TrainingRun):
    """Supervised fine-tuning on the tasks' worked solutions."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[SFTSettings],
    ) -> None: ...

class SFTImportanceSettings(RunSettings, total=False):
    """Settings of SFTImportance."""

    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum-mean", "constant"]
    """Aggregation of per-token terms."""

class SFTImportance(TrainingRun):
    """Supervised fine-tuning with each token weighted by the policy's probability of it."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[SFTImportanceSettings],
    ) -> None: ...

class SFTPhiSettings(RunSettings, total=False):
    """Settings of SFTPhi."""

    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum-mean", "constant"]
    """Aggregation of per-token terms."""
    cutoff: float
    """Tokens with a greater probability have no gradient. 1: all have one."""

class SFTPhi(TrainingRun):
    """Supervised fine-tuning with each token weighted by p (1 - p)."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[SFTPhiSettings],
    ) -> None: ...

class MIXSettings(PolicyGradientSettings, total=False):
    """Settings of MIX."""

    expert_ratio: float
    """Demonstrations per completion: ceil(expert_ratio x rollout.batch x rollout.group_size) join each step."""
    mu: float
    """Weight of the SFT term."""

class MIX(TrainingRun):
    """Trinity-RFT's MIX: (1 - mu) L_grpo(rollouts) + mu L_sft(demonstrations), each with its own denominator."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[MIXSettings],
    ) -> None: ...

class CHORDSettings(PolicyGradientSettings, total=False):
    """Settings of CHORD."""

    expert_ratio: float
    """Demonstrations per completion: ceil(expert_ratio x rollout.batch x rollout.group_size) join each step."""
    warmup: int
    """Steps over which the share of imitation rises to `peak`."""
    decay: int
    """Steps over which it falls from `peak` to `valley`."""
    peak: float
    """The maximum share."""
    valley: float
    """The final share."""
    token_weights: bool
    """Weight tokens of demonstrations by p (1 - p)."""

class CHORD(TrainingRun):
    """CHORD: GRPO and imitation, the share of imitation rising and falling over the steps."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[CHORDSettings],
    ) -> None: ...

class DistillSettings(RunSettings, total=False):
    """Settings of Distill."""

    divergence: Literal["reverse_kl", "forward_kl", "jsd", "sampled", "sampled_jsd"]
    """Divergence minimised at every position."""
    beta: float
    """Weight of the teacher in the mixture. 0 is the forward KL, 1 the reverse KL. Only with `jsd` and `sampled_jsd`.
    """
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum-mean", "constant"]
    """Aggregation of per-token terms; each has one denominator for the whole optimizer step."""
    teacher: str | Path | None
    """Checkpoint folder of the teacher; required."""

class Distill(TrainingRun):
    """On-policy distillation from a teacher with the same vocabulary. Rewards are reported but not used."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[DistillSettings],
    ) -> None: ...

class JSDSettings(RunSettings, total=False):
    """Settings of JSD."""

    divergence: Literal["jsd", "sampled_jsd"]
    """Over the whole vocabulary, or for the sampled token only."""
    beta: float
    """Weight of the teacher in the mixture. 0 is the forward KL, 1 the reverse KL. Only with `jsd` and `sampled_jsd`.
    """
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum-mean", "constant"]
    """Aggregation of per-token terms; each has one denominator for the whole optimizer step."""
    teacher: str | Path | None
    """Checkpoint folder of the teacher; required."""

class JSD(TrainingRun):
    """On-policy distillation from a teacher by the generalised Jensen-Shannon divergence."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[JSDSettings],
    ) -> None: ...

class SelfDistillSettings(RunSettings, total=False):
    """Settings of SelfDistill."""

    divergence: Literal["reverse_kl", "forward_kl", "jsd", "sampled", "sampled_jsd"]
    """Divergence minimised at every position."""
    beta: float
    """Weight of the teacher in the mixture. 0 is the forward KL, 1 the reverse KL. Only with `jsd` and `sampled_jsd`.
    """
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum-mean", "constant"]
    """Aggregation of per-token terms; each has one denominator for the whole optimizer step."""
    context: Literal["solution", "answer", "success"]
    """Context of the teacher besides the prompt: the task's worked solution or answer, or another successful completion
    of the group, without its reasoning."""
    template: str
    """The teacher's prompt: `{prompt}` is the task's (of a chat its last message), `{context}` the additional context.
    """
    weights: Literal["ema", "initial", "current"]
    """The teacher's weights: an exponential average of the policy's, those of the start of the stage, or the policy's
    current ones, which needs no second model."""
    rate: float
    """Weight of the policy in the average after each training step. Only with weights `ema`."""
    success_at_least: float
    """Minimum reward of a success. Only with context `success`."""

class SelfDistill(TrainingRun):
    """On-policy self-distillation from the policy with privileged context: a solution, an answer or a success."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[SelfDistillSettings],
    ) -> None: ...

class ClipCov(TrainingRun):
    """Clip-Cov: masks a few tokens with a high covariance of log-prob and advantage."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class KLCov(TrainingRun):
    """KL-Cov: a penalty on the tokens with the largest covariance of log-prob and advantage."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class ClipB(TrainingRun):
    """Clip_B: masks penalised tokens whose update would lower the entropy most."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class ClipV(TrainingRun):
    """Clip_V: as Clip_B, relative to the mean over the vocabulary."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class HighEntropy(TrainingRun):
    """The 80/20 rule: DAPO's loss on the tokens with the highest entropy only."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class SkyworkOR1(TrainingRun):
    """Skywork-OR1: token mean and adaptive entropy control."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class GSPO(TrainingRun):
    """GSPO: completions' geometric-mean ratios, clipped."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class GMPO(TrainingRun):
    """GMPO: geometric mean of individually clipped token ratios."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class CISPO(TrainingRun):
    """CISPO: clipped importance weights on A log pi."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class SAPO(TrainingRun):
    """SAPO: a sigmoid gate on the ratio."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class VESPO(TrainingRun):
    """VESPO: -phi(W) A log pi, W the completion's ratio to the sampling policy."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class TOPR(TrainingRun):
    """TOPR: full weight for good completions, the truncated ratio for bad ones."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class AsymRE(TrainingRun):
    """AsymRE: a baseline below the mean weights successes more than failures."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class OPMD(TrainingRun):
    """OPMD: r - mean within the group, -A log pi / (1 + tau)."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class Kimi(TrainingRun):
    """Kimi k1.5: squared distance between advantage and log-ratio, the optimizer reset every step."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class SPPO(TrainingRun):
    """SPPO: completions' log-ratios fitted to A / beta. (Trinity-RFT's `sppo` is the loss `softmax_ppo`.)"""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class RAFT(TrainingRun):
    """RAFT: imitates the best completion of each group."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class DPOSettings(RunSettings, total=False):
    """Settings of DPO."""

    loss: Literal["sigmoid", "ipo"]
    """DPO's own loss, or IPO's (arXiv:2310.12036)."""
    beta: float
    """Strength of the pull to the reference. With `normalise` use greater values: 2 to 10."""
    label_smoothing: float
    """Assumed probability that a preference is flipped. Only with loss `sigmoid`."""
    normalise: bool
    """Take means over tokens instead of sums (length-normalised DPO, arXiv:2411.15124)."""
    sft: float
    """Weight of an additional SFT term on the chosen completion."""

class DPO(TrainingRun):
    """Direct preference optimisation on pairs of a chosen and a rejected completion."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[DPOSettings],
    ) -> None: ...

class ORPOSettings(RunSettings, total=False):
    """Settings of ORPO."""

    weight: float
    """Weight of the odds-ratio term (lambda of the paper, beta in TRL)."""

class ORPO(TrainingRun):
    """Odds-ratio preference optimisation on pairs of a chosen and a rejected completion."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[ORPOSettings],
    ) -> None: ...

class KTOSettings(RunSettings, total=False):
    """Settings of KTO."""

    beta: float
    """Strength of the pull to the reference."""
    desirable_weight: float
    """Weight of desirable completions. If the classes are unbalanced, weight times count should be 1 to 1.33 times that
    of the undesirable ones."""
    undesirable_weight: float
    """Weight of undesirable completions."""

class KTO(TrainingRun):
    """Kahneman-Tversky optimisation on completions with a label: desirable or undesirable."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[KTOSettings],
    ) -> None: ...

class RewardModelSettings(RunSettings, total=False):
    """Settings of RewardModel."""

    margin: float
    """Margin by which the chosen score should exceed the rejected one (arXiv:2307.09288)."""
    centre_coefficient: float
    """Weight of the squared sum of a pair's scores, which keeps scores around 0 (arXiv:2312.09244)."""

class RewardModel(TrainingRun):
    """Train a copy of the policy's network to score the chosen completion of a pair above the rejected one. The policy
    is not changed. Each checkpoint holds the reward model in the folder `reward_model`."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[RewardModelSettings],
    ) -> None: ...

class REC(TrainingRun):
    """The REC family: group-relative REINFORCE, only on tokens within bounds."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class DPPO(TrainingRun):
    """DPPO-TV: tokens whose probability moved too far are dropped."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...

class M2PO(TrainingRun):
    """M2PO: masks the tokens with the greatest log-ratios, without clipping."""

    def __init__(
        self,
        model: ModelLike = None,
        dataset: DatasetLike | None = None,
        rewards: RewardLike | Sequence[RewardLike] | None = None,
        *,
        tokenizer: Any = None,
        eval_dataset: DatasetLike | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        out: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
        **settings: Unpack[PolicyGradientSettings],
    ) -> None: ...
