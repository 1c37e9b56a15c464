"""Wrong run files, through the real command line: each says where, what and what to do, and exits with 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollmill.cli import main

GOOD = """\
model: {new: {hidden_size: 32}}
taskset: {path: tasks.jsonl}
rewards: [{name: math}]
"""
SFT = "algorithm: {name: sft}\n"
EVALUATION = "evaluation: {taskset: {path: tasks.jsonl}}\n"
NO_REWARDS = GOOD.replace("rewards: [{name: math}]\n", "")
LIVE_REQUESTS = "model: {path: .}\nworkflow: live_requests\nmax_staleness: 2\nalgorithm: {name: reinforce}\n"
STAGES = "stages:\n  - {name: a, algorithm: {name: sft}}\n  - {name: b, steps: 3}\n"

CASES = {
    "refills that nobody needs": (GOOD + "rollout: {refills: 3}", "run.yaml:4: rollout.refills: not honoured without"),
    "reuse of sft": (
        NO_REWARDS + SFT + "rollout: {reuse: {}}",
        "run.yaml:4: rollout.reuse: not honoured: algorithm `sft`",
    ),
    "reuse of another workflow": (
        NO_REWARDS + "workflow: environment\nenvironment: gymnasium\nrollout: {reuse: {}}",
        "run.yaml:5: rollout.reuse: not honoured by workflow `environment`; it is by `single_turn`",
    ),
    "guesses of sft": (NO_REWARDS + SFT + "rollout: {ngram_draft: {}}", "rollout.ngram_draft: not honoured"),
    "repetition that never ends anything": (
        GOOD + "rollout: {max_new_tokens: 60, repetition: {tokens: 64}}",
        "run.yaml:4: rollout.repetition.tokens: completions end after rollout.max_new_tokens (60)",
    ),
    "tries of what cannot fail": (
        GOOD + "rollout: {attempts: 2}",
        "rollout.attempts: not honoured by workflow `single_turn`",
    ),
    "segments without a budget": (
        GOOD + "rollout: {partial: {learn: newest}}",
        "run.yaml:4: rollout.partial: not honoured without rollout.token_budget",
    ),
    "a budget and no staleness": (
        GOOD + "rollout: {token_budget: 9}",
        "run.yaml:4: rollout.token_budget: a completion that goes on in the next step is a version old then",
    ),
    "a budget and turns": (
        GOOD.replace("rewards: [{name: math}]", "environment: gymnasium")
        + "rollout: {token_budget: 9}\nmax_staleness: 1\nworkflow: environment",
        "rollout.token_budget: workflow `environment` cannot be put away in the middle; use rollout.oversample",
    ),
    "a budget and over-sampling": (
        GOOD + "rollout: {token_budget: 9, oversample: 0.5}\nmax_staleness: 1",
        "run.yaml:4: rollout.oversample: with token_budget unfinished completions go on in the next step",
    ),
    "a budget of an application": (
        LIVE_REQUESTS + "rollout: {token_budget: 9}",
        "rollout.token_budget: not honoured by workflow `live_requests`, whose rollouts an application makes",
    ),
    "over-sampling of an application": (
        LIVE_REQUESTS + "rollout: {oversample: 0.5}",
        "rollout.oversample: not honoured by workflow `live_requests`",
    ),
    "over-sampling and greedy baselines": (
        GOOD + "rollout: {oversample: 0.5}\nalgorithm: {name: remax}",
        "run.yaml:4: rollout.oversample: advantage `remax` needs a greedy completion of every task",
    ),
    "a budget of nothing that is rolled out": (
        GOOD.replace("rewards: [{name: math}]", "algorithm: {name: sft}") + "rollout: {token_budget: 9}",
        "run.yaml:4: rollout.token_budget: not honoured: algorithm `sft`",
    ),
    "two databases": (
        GOOD + "stages:\n  - {name: a, buffer: {url: 'postgresql://x/y'}}\n  - {name: b, max_staleness: 1}\n",
        "run.yaml:6: stages.1.buffer.url: a run has one database, and an earlier stage has another one",
    ),
    "what is made out of reach": (
        GOOD + "stages:\n  - {name: a, buffer: {store: memory}, pipeline: [{name: demonstrations}]}\n"
        "  - {name: b, max_staleness: 1}\n",
        "run.yaml:5: stages.0.buffer.store: what `demonstrations` makes would stay out of reach of later stages",
    ),
    # unknown keys
    "typo at the top": (GOOD + "seeed: 1", "run.yaml:4: seeed: unknown key; did you mean `seed`?"),
    "typo in a section": (GOOD + "rollout:\n  bach: 1", "run.yaml:5: rollout.bach: unknown key; did you mean `batch`?"),
    "key of another reward": (
        GOOD.replace("math}", "math, pattern: x}"),
        "run.yaml:3: rewards.0.pattern: `pattern` is honoured by reward `format`, not by `math`; remove it",
    ),
    "key of another algorithm": (
        GOOD + "algorithm: {name: grpo, mu: 0.5}",
        "run.yaml:4: algorithm.mu: `mu` is honoured by algorithm `mix`, not by `grpo`; remove it",
    ),
    "name of TRL that another algorithm has, too": (
        GOOD + "algorithm: {name: grpo, beta: 0.04}",
        "not by `grpo`; the `beta` of TRL and verl is `algorithm.kl.coefficient` here",
    ),
    "name of TRL outside its section": (
        GOOD + "beta: 0.04",
        "; the `beta` of TRL and verl is `algorithm.kl.coefficient` here",
    ),
    "name of TRL in an algorithm without such a key": (
        GOOD.replace("rewards: [{name: math}]", "algorithm: {name: sft, beta: 0.04}"),
        "not by `sft`; remove it",
    ),
    "name of verl": (
        GOOD + "algorithm: {name: grpo, kl_loss_coef: 0.04}",
        "unknown key; rollmill calls this `algorithm.kl.coefficient`",
    ),
    "key of another section": (
        GOOD + "temperature: 1",
        "run.yaml:4: temperature: unknown key; it is honoured as `rollout.temperature`, "
        "`rewards.N.temperature (reward judge, pairwise, ranking)`, `models.NAME.temperature`, "
        "`algorithm.temperature (algorithm distill, jsd, self_distill)`, `evaluation.sampling.temperature` and "
        "`domains.NAME.rollout.temperature`",
    ),
    "key of another tool": (
        GOOD + "trainer: {learning_rate: 1}",
        "trainer.learning_rate: unknown key; rollmill calls this `trainer.lr`",
    ),
    "key like nothing": (
        GOOD + "monitor: {zzz: 1}",
        "unknown key; valid here: trackers, tensorboard, show_completions, rollouts_every, token_details, "
        "timeline_every, report, stuck_after, stop_when_stuck",
    ),
    "run-wide key in a stage": (
        GOOD + "stages: [{name: a, seed: 1}]",
        "run.yaml:4: stages.0.seed: `seed` belongs to the whole run, not to a stage; move it to the top level",
    ),
    "nested typo": (
        GOOD.replace("hidden_size: 32", "hidden_sise: 32"),
        "run.yaml:1: model.new.hidden_sise: unknown key; did you mean `hidden_size`?",
    ),
    # wrong values
    "unknown algorithm": (
        GOOD + "algorithm: {name: grppo}",
        "run.yaml:4: algorithm.name: `grppo` is not known; did you mean `grpo`? valid: grpo, dr_grpo",
    ),
    "unknown reward": (
        GOOD.replace("math}", "mathh}"),
        "run.yaml:3: rewards.0.name: `mathh` is not known; did you mean `math`?",
    ),
    "algorithm without name": (GOOD + "algorithm: {kl: 0.1}", "algorithm.name: is required; it says which component"),
    "unknown algorithm as text": (
        GOOD + "algorithm: grpu",
        "algorithm.name: `grpu` is not known; did you mean `grpo`?",
    ),
    "trainer as text": (GOOD + "trainer: adam", "trainer: expected a section (`key: value` lines), found `adam`"),
    "text for a number": (GOOD + "steps: many", "run.yaml:4: steps: expected a whole number, found `many`"),
    "fraction for a whole number": (GOOD + "steps: 1.5", "steps: expected a whole number, found `1.5`"),
    "text for a rate": (GOOD + "trainer: {lr: fast}", "trainer.lr: expected a number, found `fast`"),
    "not a number": (GOOD + "trainer: {lr: .nan}", "trainer.lr: expected a finite number"),
    "zero batch": (GOOD + "rollout: {batch: 0}", "rollout.batch: expected at least 1, found `0`"),
    "negative rate": (GOOD + "trainer: {lr: -1e-4}", "trainer.lr: expected more than 0, found `-0.0001`"),
    "probability above 1": (GOOD + "rollout: {top_p: 1.5}", "rollout.top_p: expected at most 1, found `1.5`"),
    "unknown choice": (
        GOOD + "trainer: {schedule: lineer}",
        "expected one of `constant`, `linear`, `cosine`, found `lineer`; did you mean `linear`?",
    ),
    "number or word": (GOOD + "threads: some", "threads: expected a whole number or `auto`, found `some`"),
    "text for a list": (GOOD + "rollout: {stop: x}", "rollout.stop: expected a list, found `x`"),
    "list for a section": (
        GOOD + "trainer: [1]",
        "trainer: expected a section (`key: value` lines), found a list of 1",
    ),
    "empty section": (GOOD + "trainer:", "found nothing (remove the key to get its default)"),
    "not a truth value": (GOOD + "rollout: {batch: 4}\nmonitor: {report: perhaps}", "expected true or false, found"),
    "short pair": (GOOD + "trainer: {betas: [0.9]}", "trainer.betas.1: is required; the list is too short"),
    "long pair": (GOOD + "trainer: {betas: [0.9, 0.9, 0.9]}", "trainer.betas: expected at most 2 entries"),
    "betas out of range": (GOOD + "trainer: {betas: [0.9, 1.0]}", "trainer.betas: both must be at least 0 and below 1"),
    "no taskset": ("model: {new: {}}\nrewards: [{name: math}]", "run.yaml: taskset: is required; add it"),
    "no pattern": (GOOD.replace("math", "format"), "rewards.0: give exactly one of pattern, tags, sections"),
    "two sources": (
        GOOD.replace("tasks.jsonl", "tasks.jsonl, function: 'm:f'"),
        "run.yaml:2: taskset: give exactly one of path, generator, function, harbor and mix (found path and function)",
    ),
    "no rule to stop": (GOOD + EVALUATION + "early_stop: {}", "run.yaml:5: early_stop: give at_least or patience"),
    # YAML
    "syntax": (GOOD + "a: b: c", "run.yaml:4: not valid YAML at column 5: mapping values are not allowed here"),
    "unclosed": (GOOD + "rollout: {batch: 1", "run.yaml:4: not valid YAML"),
    "tab": (GOOD + "rollout:\n\tbatch: 1", "run.yaml:5: not valid YAML at column 1: found character '\\t'"),
    "duplicate": (GOOD + "steps: 1\nsteps: 2", "run.yaml:5: steps: is given twice (first on line 4); keep one"),
    "empty file": ("", "run.yaml: is empty; `rollmill init FILE` writes a first run file"),
    "a list": ("- 1", "run.yaml: does not hold `key: value` lines"),
    "two documents": (GOOD + "---\na: 1", "not valid YAML at column 1: but found another document"),
    "a tag": (GOOD + "name: !!python/name:os.system x", "run.yaml:4: name: the YAML tag"),
    "anchor within itself": (GOOD + "rollout: &a\n  stop: *a", "rollout.stop: the anchor contains itself"),
    "missing variable": (
        GOOD + "name: ${env:ROLLMILL_NOT_SET}",
        "run.yaml:4: name: environment variable ROLLMILL_NOT_SET is not set; export ROLLMILL_NOT_SET=...",
    ),
    # sizes and names
    "number of 5,000 digits": (GOOD + "steps: " + "9" * 5000, "run.yaml:4: steps: the number 999"),
    "hexadecimal number of 5,000 digits": (GOOD + "steps: 0x" + "f" * 5000, "(5002 characters) is too large"),
    "number beyond floats": (GOOD + "trainer: {lr: 1e999}", "run.yaml:4: trainer.lr: the number 1e999 is too large"),
    "NaN": (GOOD + "trainer: {lr: .nan}", "run.yaml:4: trainer.lr: expected a finite number, found `nan`"),
    "infinity where anything goes": (
        GOOD.replace("path: tasks.jsonl", "function: 'a:b', options: {size: .inf}"),
        "run.yaml:2: taskset.options.size: expected a finite number, found `inf`",
    ),
    "20,000 brackets": (GOOD + "a: " + "[" * 20_000, "run.yaml:4: not valid YAML at column 54: more than 50 levels"),
    "mappings without end": (GOOD + "a: " + "{a: " * 20_000, "run.yaml:4: not valid YAML at column 201: more than 50"),
    "anchors that multiply": (
        GOOD + "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 20)),
        "more than 30000 values, with what anchors (`&`, `*`) repeat; write less",
    ),
    "merge keys that multiply": (
        GOOD
        + "a0: &a0 {x: 1}\n"
        + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 20)),
        "more than 30000 values",
    ),
    "more than a mebibyte": (GOOD + "# " + "x" * 2**20, "run.yaml: is longer than 1 MiB"),
    "half a character": (GOOD + 'name: "\\ud800"', "run.yaml:4: name: the text is not valid Unicode"),
    "name that leaves runs": (GOOD + "name: ../../x", "run.yaml:4: name: expected a name without `/`"),
    "name with a slash": (GOOD + "name: a/b", "run.yaml:4: name: expected a name without `/`"),
    "name with a backslash": (GOOD + "name: a\\b", "run.yaml:4: name: expected a name without `/`"),
    "name of the folder above": (GOOD + "name: ..", "run.yaml:4: name: expected a name, found '..'"),
    "name of nothing": (GOOD + "name: ''", "run.yaml:4: name: expected a name, found ''"),
    "name of spaces": (GOOD + "name: '  '", "run.yaml:4: name: expected a name, found '  '"),
    "name that steers the terminal": (GOOD + 'name: "\\e[31m"', "run.yaml:4: name: expected a name without control"),
    "name written backwards": (GOOD + 'name: "\\u202ea"', "run.yaml:4: name: expected a name without control"),
    "name with space around it": (GOOD + "name: ' a'", "run.yaml:4: name: expected a name without control"),
    "name too long for a folder": (
        GOOD + "name: " + "é" * 60,
        "run.yaml:4: name: expected a name of at most 100 bytes",
    ),
    "stage that leaves runs": (
        GOOD + "stages: [{name: a/b, steps: 1}]",
        "run.yaml:4: stages.0.name: expected a name without `/`",
    ),
    "held-out set of the folder above": (
        GOOD + "evaluation: {sets: {..: {taskset: {path: t.jsonl}}}}",
        "run.yaml:4: evaluation.sets...: expected letters, digits",
    ),
    "entry of a mix of the folder above": (
        GOOD.replace("path: tasks.jsonl", "mix: [{name: .., path: t.jsonl}]"),
        "run.yaml:2: taskset.mix.0.name: expected letters, digits",
    ),
    "model with a slash": (GOOD + "models: {a/b: {policy: initial}}", "run.yaml:4: models.a/b: expected letters"),
    "model of a trillion columns": (
        GOOD.replace("32", "1000000000000"),
        "new.hidden_size: expected at most 65536",
    ),
    "batch of a trillion": (GOOD + "rollout: {batch: 1000000000000}", "rollout.batch: expected at most"),
    "token id below zero": (GOOD + "rollout: {stop_token_ids: [-1]}", "rollout.stop_token_ids.0: expected at least 0"),
    "brackets without end in a pattern": (
        GOOD.replace("math", "format, pattern: '" + "(" * 3000 + ")" * 3000 + "'"),
        "run.yaml:3: rewards.0.pattern: not a regular expression",
    ),
    "endpoint that is no URL": (
        GOOD + 'models: {m: {endpoint: "http://a\\0b", model: m}}',
        "run.yaml:4: models.m.endpoint: expected a URL without spaces",
    ),
    "key that is a list": (GOOD + "? [a, b]\n: 2", "run.yaml:4: a key must be text"),
    "malformed variable": (GOOD + "name: ${env:}", "run.yaml:4: name: malformed `${env:`"),
    # keys that nothing honours
    "rollouts of sft": (
        NO_REWARDS + SFT + "rollout: {group_size: 4}",
        "run.yaml:4: rollout.group_size: not honoured: algorithm `sft` learns from worked solutions",
    ),
    "batch of sft": (NO_REWARDS + SFT + "rollout: {batch: 4}", "demonstrations per step are `algorithm.batch`"),
    "staleness of sft": (NO_REWARDS + SFT + "max_staleness: 1", "run.yaml:4: max_staleness: not honoured"),
    "sampling of sft": (NO_REWARDS + SFT + "rollout: {top_k: 4}", "rollout.top_k: not honoured"),
    "rewards of sft": (GOOD + SFT, "run.yaml:3: rewards: not honoured: algorithm `sft`"),
    "sampling of greedy evaluation": (
        GOOD + SFT + "rollout: {top_k: 4}\n" + EVALUATION.replace("{taskset", "{samples: 0, taskset"),
        "evaluation is greedy only (samples: 0); remove it",
    ),
    "every stage is sft": (
        NO_REWARDS
        + "rollout: {batch: 4}\nstages: [{name: a, algorithm: {name: sft}}, {name: b, algorithm: {name: sft}}]",
        "run.yaml:3: rollout.batch: not honoured",
    ),
    "floor of a constant rate": (
        GOOD + "trainer: {min_lr_ratio: 0.1}",
        "trainer.min_lr_ratio: not honoured by schedule `constant`; it is by `linear` and `cosine`",
    ),
    "early stop without evaluation": (
        GOOD + "early_stop: {patience: 1}",
        "early_stop: not honoured without `evaluation`",
    ),
    "best without evaluation": (GOOD + "checkpoint: {keep_best: true}", "keep_best: not honoured without `evaluation`"),
    "vocabulary of characters": (
        GOOD.replace("32", "32, tokenizer: {kind: char, vocab_size: 300}"),
        "model.new.tokenizer.vocab_size: not honoured by kind `char`",
    ),
    "remote code of a new model": (
        GOOD.replace("{new", "{trust_remote_code: true, new"),
        "model.trust_remote_code: not honoured by a new model",
    ),
    "smoothing of ipo": (
        GOOD.replace("rewards: [{name: math}]", "") + "\nalgorithm: {name: dpo, loss: ipo, label_smoothing: 0.1}",
        "algorithm.label_smoothing: not honoured by loss `ipo`",
    ),
    "mixture of a KL": (
        NO_REWARDS + "algorithm: {name: distill, teacher: ., beta: 0.3}",
        "run.yaml:3: algorithm.beta: not honoured by divergence `reverse_kl`; it is by `jsd` and `sampled_jsd`",
    ),
    "ends of a sampled divergence": (
        NO_REWARDS + "algorithm: {name: jsd, teacher: ., divergence: sampled_jsd, beta: 1}",
        "run.yaml:3: algorithm.beta: `sampled_jsd` needs a beta above 0 and below 1; change it, or use forward_kl (0)",
    ),
    "teacher of jsd": (NO_REWARDS + "algorithm: {name: jsd}", "algorithm.teacher: which teacher? Give the folder"),
    "another divergence of jsd": (
        NO_REWARDS + "algorithm: {name: jsd, divergence: reverse_kl}",
        "algorithm.divergence",
    ),
    "rate without an average": (
        NO_REWARDS + "algorithm: {name: self_distill, weights: current, rate: 0.1}",
        "run.yaml:3: algorithm.rate: not honoured with weights `current`; it is with `ema`",
    ),
    "success without rewards": (
        NO_REWARDS + "algorithm: {name: self_distill, context: success}",
        "run.yaml:3: algorithm.context: context `success` needs rewards, which say what succeeded; add them, or use",
    ),
    "success of a single completion": (
        GOOD + "algorithm: {name: self_distill, context: success}\nrollout: {group_size: 1}",
        "run.yaml:5: rollout.group_size: context `success` is another completion of the group, and 1 leaves none",
    ),
    "threshold of a solution": (
        GOOD + "algorithm: {name: self_distill, success_at_least: 0.5}",
        "run.yaml:4: algorithm.success_at_least: not honoured with context `solution`; it is with `success`",
    ),
    "template without a context": (
        NO_REWARDS + 'algorithm: {name: self_distill, template: "{prompt}"}',
        "run.yaml:3: algorithm.template: expected {prompt} and {context} in the text",
    ),
    "template with another name": (
        NO_REWARDS + 'algorithm: {name: self_distill, template: "{prompt} {context} {answer}"}',
        "run.yaml:3: algorithm.template: expected {prompt} and {context} in the text, and no other name in braces",
    ),
    "template with half a brace": (
        NO_REWARDS + 'algorithm: {name: self_distill, template: "{prompt} {context} }"}',
        "run.yaml:3: algorithm.template: Single '}' encountered in format string; write {{ and }} for braces",
    ),
    "self-distillation of several calls": (
        GOOD + "workflow: {name: few_shot}\nalgorithm: {name: self_distill}",
        "run.yaml:4: workflow: algorithm `self_distill` needs workflow `single_turn`: the teacher reads the task's",
    ),
    "one labelled completion": (
        NO_REWARDS + "algorithm: {name: kto, batch: 1}",
        "run.yaml:3: algorithm.batch: kto compares each completion with those of other prompts, and 1 has no other",
    ),
    "rollouts of kto": (
        NO_REWARDS + "algorithm: {name: kto}\nrollout: {group_size: 4}",
        "run.yaml:4: rollout.group_size: not honoured: algorithm `kto` learns from labelled completions and rolls",
    ),
    "deviation that divides nothing": (
        GOOD + "algorithm: {name: grpo, advantage: {scale: none, ddof: 0}}",
        "algorithm.advantage.ddof: not honoured with scale `none`; it is with `group` and `batch`",
    ),
    "key that every stage replaces": (
        GOOD + "steps: 5\nstages: [{name: a, steps: 1}, {name: b, steps: 2}]",
        "run.yaml:4: steps: every stage sets its own, so this is never used; remove it or change stages.0.steps",
    ),
    # contradictions
    "drafts elsewhere": (
        GOOD + "rollout: {reuse: {}}\nplacement: {name: ray, explorers: 2}",
        "placement: stage train has rollout.reuse, which needs explorers in the trainer's process (drafts belong to",
    ),
    "a folder that nothing is written to": (
        GOOD + "placement: {name: ray, weights_folder: /tmp}",
        "placement.weights_folder: not honoured with weights `memory`; it is with `folder`",
    ),
    "a folder beside a broadcast": (
        GOOD + "placement: {name: ray, weights: broadcast, weights_folder: /tmp}",
        "placement.weights_folder: not honoured with weights `broadcast`; it is with `folder`",
    ),
    "NCCL without a broadcast": (
        GOOD + "placement: {name: ray, nccl: true, gpus: 1, trainer_gpus: 1}",
        "placement.nccl: not honoured with weights `memory`; it is with `broadcast`",
    ),
    "NCCL without GPUs": (
        GOOD + "placement: {name: ray, nccl: true, weights: broadcast, gpus: 1}",
        "placement.nccl: needs a GPU for each explorer and the trainer; set placement.gpus and placement.trainer_gpus",
    ),
    "drafts chosen by length": (
        GOOD + "rollout: {reuse: {}, oversample: 0.5}",
        "run.yaml:4: rollout.reuse: with oversample the slowest groups are stopped",
    ),
    "no model": (GOOD.split("\n", 1)[1], "model: which model? Give model.path (a checkpoint folder) or model.new"),
    "no recipe": (GOOD.replace("{new: {hidden_size: 32}}", "{path: new}"), "run.yaml:1: model: which model?"),
    "no rewards": (NO_REWARDS, "rewards: algorithm `grpo` needs at least one reward; for example"),
    "evaluation without rewards": (NO_REWARDS + SFT + EVALUATION, "rewards: evaluation needs at least one reward"),
    "weightless rewards": (GOOD.replace("math", "math, weight: 0"), "run.yaml:3: rewards: every weight is 0"),
    "split of a file": (GOOD.replace("l}", "l, split: test}"), "taskset.split: only a folder written by `datasets`"),
    "generator with preset": (
        GOOD.replace("path: tasks.jsonl", "preset: gsm8k, generator: {name: chain_sum}"),
        "taskset.preset: a generator makes rows in its own layout",
    ),
    "evaluating nothing": (
        GOOD + EVALUATION.replace("{taskset", "{samples: 0, greedy: false, taskset"),
        "run.yaml:4: evaluation.samples: 0 samples and greedy: false evaluate nothing",
    ),
    "stop on unsampled": (
        GOOD + EVALUATION.replace("{taskset", "{samples: 0, taskset") + "early_stop: {at_least: 0.9}",
        "early_stop.metric: eval/sampled needs evaluation.samples of at least 1 (it is 0)",
    ),
    "stop on greedy": (
        GOOD
        + EVALUATION.replace("{taskset", "{greedy: false, taskset")
        + "early_stop: {metric: eval/greedy, patience: 1}",
        "early_stop.metric: eval/greedy needs evaluation.greedy: true",
    ),
    "stop at 95": (GOOD + EVALUATION + "early_stop: {at_least: 95}", "accuracy lies between 0 and 1; give for example"),
    "greedy training": (
        GOOD + "rollout: {temperature: 0}",
        "rollout.temperature: training needs differing completions",
    ),
    "group of one": (GOOD + "rollout: {group_size: 1}", "give at least 2, or use algorithm `reinforce`"),
    "batch of one": (
        GOOD + "algorithm: {name: reinforce}\nrollout: {group_size: 1, batch: 1}",
        "run.yaml:5: rollout.batch: one completion per step equals its own baseline",
    ),
    "overlong episodes": (
        NO_REWARDS + "workflow: environment\nenvironment: gymnasium\nalgorithm: {name: dapo, overlong_buffer: 8}",
        "algorithm.overlong_buffer: max_new_tokens limits a completion, and a rollout of workflow `environment`",
    ),
    "overlong": (GOOD + "algorithm: {name: dapo, overlong_buffer: 256}", "must be below rollout.max_new_tokens (256)"),
    "reasoning_gym without generator": (
        GOOD.replace("math", "reasoning_gym"),
        "rewards.0.name: `reasoning_gym` scores only tasks of a generator, and taskset has none",
    ),
    "too many updates": (
        GOOD + "trainer: {updates_per_batch: 17}",
        "17 updates cannot share 16 groups; lower it, or raise rollout.batch (16)",
    ),
    "too long a warm-up": (GOOD + "steps: 5\ntrainer: {warmup_steps: 6}", "6 is longer than the stage (5 steps)"),
    "bad pattern": (GOOD.replace("math}", "format, pattern: '('}"), "rewards.0.pattern: not a regular expression"),
    "bad function": (GOOD.replace("math}", "python, function: 'a b:c'}"), "expected FILE.py:NAME, package.module:NAME"),
    "function without name": (GOOD.replace("path: tasks.jsonl", "function: tasks"), "`tasks` names no function; write"),
    "heads and keys": (GOOD.replace("32", "32, kv_heads: 3"), "heads (4) must be a multiple of kv_heads (3)"),
    "width and heads": (GOOD.replace("32", "33"), "model.new.hidden_size: 33 is not a multiple of heads (4)"),
    "odd heads": (GOOD.replace("32", "36"), "rotary positions need an even number of dimensions per head"),
    "no room for a prompt": (
        GOOD.replace("32", "32, context: 256"),
        "model.new.context: 256 leaves no room for a prompt beside rollout.max_new_tokens (256)",
    ),
    "stage without name": (
        GOOD + "stages: [{steps: 1}]",
        "run.yaml:4: stages.0.name: is required: every stage has a name",
    ),
    "stages of one name": (
        GOOD + "stages:\n  - {name: a}\n  - {name: a}",
        "run.yaml:6: stages.1.name: `a` is already the name of the stage at run.yaml:5; rename one of them",
    ),
    "stages as text": (GOOD + "stages: a", "run.yaml:4: stages: expected a list of sections, each with a `name`"),
    "wrong value in a stage": (GOOD + STAGES.replace("3", "x"), "run.yaml:6: stages.1.steps: expected a whole number"),
    # includes
    "missing include": (GOOD + "include: [base.yaml]", "run.yaml:4: include: base.yaml does not exist"),
    "include of itself": (GOOD + "include: run.yaml", "files include each other: run.yaml -> run.yaml"),
    "include of a number": (GOOD + "include: [3]", "run.yaml:4: include: expected a path or a list of paths"),
}

OVERRIDES = {
    "no value": ("steps", "--set steps: expected section.key=value, for example trainer.lr=1e-4"),
    "empty key": ("a..b=1", "--set a..b=1: expected section.key=value"),
    "typo": ("trainer.lrr=1", "--set trainer.lrr=1: trainer.lrr: unknown key; did you mean `lr`?"),
    "wrong value": ("steps=x", "--set steps=x: steps: expected a whole number, found `x`"),
    "entry too far": (
        "rewards.1.weight=1",
        "rewards.1: `rewards` has entries 0 to 0 (0: math); use one of these numbers",
    ),
    "entry by name": ("rewards.math.weight=1", "rewards.math: `rewards` has entries 0 to 0"),
    "entry of nothing": ("stages.0.steps=1", "stages: is not a list in the run file, so it has no entries"),
    "below a value": ("model.new.hidden_size.x=1", "is `32` in the run file (run.yaml:1), not a section"),
    "bad YAML": ("rewards=[{name: math]", "--set rewards=[{name: math]: not valid YAML"),
    "another algorithm's key": (
        "algorithm={name: rloo, mu: 1}",
        "honoured by algorithm `mix`, not by `rloo`",
    ),
    "another part's key": (
        "algorithm={name: grpo, loss: {name: gspo, dual_clip: 3}}",
        "algorithm.loss.dual_clip: `dual_clip` is honoured by loss `ppo_clip`, not by `gspo`",
    ),
    "subsets of the whole group": (
        "algorithm={name: pass_at_k, advantage: {k: 8}}",
        "algorithm.advantage.k: pass@8 over subsets of a group needs at least 9 completions, not 8; lower k, or raise",
    ),
    "nothing to reject": (
        "algorithm={name: raft, advantage: {accept: all}}",
        "accept `all` rejects nothing without a `threshold`; give one: 0 accepts positive rewards",
    ),
    "a ratio that counts twice": (
        "algorithm={name: vespo, corrections: [tis]}",
        "algorithm.corrections: `vespo` is to the rollout policy already, and `tis` would count twice; remove it",
    ),
    "unknown mask": (
        "algorithm={name: grpo, masks: [high_entrophy]}",
        "`high_entrophy` is not known; did you mean `high_entropy`?",
    ),
    "unknown part": (
        "algorithm={name: grpo, loss: gsop}",
        "algorithm.loss.name: `gsop` is not known; did you mean `gspo`?",
    ),
    "another house's name": ("algorithm={name: grpo, epsilon: 1}", "rollmill calls this `algorithm.loss.clip_low`"),
    "a critic nobody asks": ("algorithm={name: grpo, critic: {lr: 1}}", "advantage `grpo` needs no critic; `gae`"),
    "a penalty that is off": ("algorithm={name: grpo, kl: {estimator: k1}}", "not honoured with coefficient 0"),
    "a correction of nothing": (
        "algorithm={name: topr, corrections: [tis]}",
        "`tis` would correct nothing; set",
    ),
    "a correction twice": ("algorithm={name: dppo, corrections: [tis]}", "`tis` would count twice; remove it"),
    "old log-probs nobody asks": ("algorithm={name: gpg, proximal: recompute}", "`policy_gradient` looks at no old"),
    "a greedy baseline shaped": (
        "algorithm={name: remax, overlong_buffer: 8}",
        "not honoured by `remax`, whose",
    ),
    "a horizon without a target": ("algorithm={name: grpo, kl: {coefficient: 1, horizon: 5}}", "without kl.target"),
}


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROLLMILL_NOT_SET", raising=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message with which `rollmill check` refuses."""
    assert main(["check", *arguments]) == 2
    message = capsys.readouterr().err
    for jargon in ("Traceback", "pydantic", "extra_forbidden", "Input should", "literal["):
        assert jargon not in message
    return message


@pytest.mark.parametrize(("text", "expected"), CASES.values(), ids=CASES.keys())
def test_wrong_run_file(text: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(text, encoding="utf-8")
    message = refused(capsys, "--no-data", "run.yaml")
    assert expected in message
    assert message.startswith("run.yaml"), "every problem names its file"
    assert len(message.strip().splitlines()) == 1, "one mistake, one problem"


@pytest.mark.parametrize(("assignment", "expected"), OVERRIDES.values(), ids=OVERRIDES.keys())
def test_wrong_override(assignment: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD, encoding="utf-8")
    message = refused(capsys, "--no-data", "run.yaml", "--set", assignment)
    assert expected in message
    assert message.startswith(f"--set {assignment}"), "every problem names the option"


def test_good_base_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    for text in (GOOD, NO_REWARDS + SFT, GOOD + SFT + EVALUATION, GOOD + STAGES):
        Path("run.yaml").write_text(text, encoding="utf-8")
        assert main(["check", "--no-data", "run.yaml"]) == 0, capsys.readouterr().err


def test_all_problems_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD + "seeed: 1\nsteps: x\nrollout: {batch: 0, top_p: 2}\n", encoding="utf-8")
    lines = refused(capsys, "--no-data", "run.yaml").strip().splitlines()
    assert {line.split(": ")[1] for line in lines} == {"seeed", "steps", "rollout.batch", "rollout.top_p"}


def test_problem_in_included_file_names_that_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("base.yaml").write_text("\ntrainer: {lr: fast}\n", encoding="utf-8")
    Path("run.yaml").write_text(GOOD + "include: base.yaml", encoding="utf-8")
    assert refused(capsys, "--no-data", "run.yaml").startswith("base.yaml:2: trainer.lr: expected a number")


def test_includes_in_a_circle(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text("include: b.yaml", encoding="utf-8")
    Path("b.yaml").write_text("include: a.yaml", encoding="utf-8")
    expected = "b.yaml:1: include: files include each other: a.yaml -> b.yaml -> a.yaml"
    assert refused(capsys, "--no-data", "a.yaml").startswith(expected)


def test_missing_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "nowhere.yaml").startswith("nowhere.yaml: no such file; `rollmill init nowhere.yaml`")


def test_folder_as_run_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder").mkdir()
    assert refused(capsys, "folder").startswith("folder: cannot be read")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (GOOD.encode("utf-16"), "run.yaml:1: cannot be read as UTF-8 text (byte 1); it looks like UTF-16"),
        (GOOD.encode() + b"# \xe9", "run.yaml:4: cannot be read as UTF-8 text (byte 88); save it as UTF-8"),
        (b"\x7fELF\0\0\xff", "run.yaml:1: cannot be read as UTF-8 text (byte 7); it looks like a binary file"),
        (GOOD.encode() + b"name: \0", "run.yaml: not valid YAML: special characters are not allowed"),
    ],
)
def test_other_encodings(content: bytes, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_bytes(content)
    assert refused(capsys, "--no-data", "run.yaml").startswith(expected)


def test_a_byte_order_mark_and_line_ends_of_windows_are_fine(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert main(["check", "--no-data", "run.yaml"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", ["a b", "é", "实验 1", "a.b-c_d", "~"])
def test_names_in_any_script(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD + f"name: '{name}'", encoding="utf-8")
    assert main(["check", "--no-data", "run.yaml"]) == 0, capsys.readouterr().err
    assert f"runs/{name}/" in capsys.readouterr().out


@pytest.mark.parametrize("including", [False, True])
@pytest.mark.parametrize("name", ["/dev/zero", "/dev/urandom", "pipe"])
def test_what_may_never_end_is_not_read(name: str, including: bool, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    Path("run.yaml").write_text(GOOD + f"include: {name}", encoding="utf-8")
    message = refused(capsys, "--no-data", "run.yaml" if including else name)
    assert "is a device or a pipe, which may have no end" in message
    assert message.startswith("run.yaml:4: include: " if including else name)


def test_a_loop_of_links(capsys: pytest.CaptureFixture[str]) -> None:
    os.symlink("run.yaml", "run.yaml")
    assert refused(capsys, "run.yaml").startswith("run.yaml: cannot be read: Too many levels of symbolic links")


@pytest.mark.parametrize("times", [1, 2])
def test_includes_without_end(times: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A chain of 60 files, and one in which each file is included twice: 2**60 files."""
    for number in range(60):
        following = ", ".join([f"{number + 1}.yaml"] * times)
        Path(f"{number}.yaml").write_text(f"include: [{following}]" if number < 59 else "seed: 1", encoding="utf-8")
    assert "include: more than 50 files in one run; include fewer" in refused(capsys, "--no-data", "0.yaml")


def test_variables_that_multiply(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ROLLMILL_LONG", "x" * 100_000)
    Path("run.yaml").write_text(GOOD + "name: " + "${env:ROLLMILL_LONG}" * 1000, encoding="utf-8")
    assert "run.yaml:4: name: the file's environment variables have more than 1 MiB" in refused(capsys, "run.yaml")


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("a=" + "[" * 20_000, "not valid YAML at column 52: more than 50 levels inside each other"),
        (".".join("a" * 5000) + "=1", "5000 keys inside each other"),
        ("steps=" + "9" * 5000, "steps: the number 999"),
        ("rewards." + "9" * 5000 + ".weight=1", "`rewards` has entries 0 to 0"),
    ],
    ids=["deep", "deep key", "digits", "index"],
)
def test_overrides_without_end(assignment: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(GOOD, encoding="utf-8")
    message = refused(capsys, "--no-data", "run.yaml", "--set", assignment)
    assert expected in message
    assert len(message) < 1500, "a long option is not repeated in full"


@pytest.mark.parametrize("kind", ["folder", "pipe", "binary"])
def test_plugins_that_are_no_code(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = Path("plug.py")
    if kind == "folder":
        plugin.mkdir()
    elif kind == "pipe":
        os.mkfifo(plugin)
    else:
        plugin.write_bytes(b"\0\xff")
    Path("run.yaml").write_text(GOOD + "plugins: [plug.py]", encoding="utf-8")
    assert "plug.py: " in refused(capsys, "--no-data", "run.yaml")


def test_run_file_that_is_not_text(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_bytes(b"\xff\xfe\x00")
    assert refused(capsys, "run.yaml").startswith("run.yaml:1: cannot be read as UTF-8 text")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, "run.yaml:2: taskset.path: tasks.jsonl does not exist (looked in "),
        (
            GOOD.replace("new: {hidden_size: 32}", "path: some/checkpoint"),
            "run.yaml:1: model.path: some/checkpoint does not",
        ),
        (GOOD + "plugins: [mine.py]", "run.yaml:4: plugins.0: mine.py does not exist"),
        (
            GOOD.replace("math", "python, function: 'mine.py:f'"),
            "run.yaml:3: rewards.0.function: mine.py does not exist",
        ),
        (GOOD + EVALUATION, "run.yaml:4: evaluation.taskset.path: tasks.jsonl does not exist"),
        (GOOD.replace("tasks.jsonl", "x" * 5000), "(5000 characters) does not exist"),
        (GOOD.replace("tasks.jsonl", "~no-such-user/x"), "run.yaml:2: taskset.path: ~no-such-user/x does not exist"),
        (GOOD.replace("tasks.jsonl", '"a\\0b"'), "run.yaml:2: taskset.path: a\0b does not exist"),
    ],
)
def test_missing_files(text: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(text, encoding="utf-8")
    assert expected in refused(capsys, "run.yaml")


def test_model_path_is_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model.safetensors").touch()
    Path("run.yaml").write_text(GOOD.replace("new: {hidden_size: 32}", "path: model.safetensors"), encoding="utf-8")
    assert "model.safetensors is a file; give the checkpoint's folder" in refused(capsys, "--no-data", "run.yaml")
