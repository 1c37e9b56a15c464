"""The source of first_run.ipynb: docs/notebooks.py writes it."""

# %% [markdown]
# # A first run
#
# A small new model learns from a reward alone to answer with digits, in a few seconds on one CPU core. With a model of
# your own, `model` is the folder of its checkpoint, or the loaded model with `tokenizer=`.

# %%
import random

import rollmill

random.seed(0)
rows = [{"prompt": f"Reply with digits: {random.choice('abcdefgh')}\n", "answer": ""} for _ in range(200)]
model = {"new": {"hidden_size": 64, "layers": 1, "heads": 2, "context": 64, "tokenizer": {"kind": "char"}}}
rows += [{"prompt": "0123456789\n", "answer": ""}]  # so that the tokenizer knows digits

# %% [markdown]
# The reward is a function of this notebook. It sees the task and the completion.

# %%
most = 8


def digits(task, completion):
    text = completion.text[:most]
    return sum(letter.isdigit() for letter in text) / most


# %%
run = rollmill.GRPO(
    model=model, dataset=rows, rewards=[digits], steps=20, batch=8, group_size=8, max_new_tokens=most, lr=3e-3
).train()

# %% [markdown]
# A run is a directory: metrics, rollouts with every token's log-prob, checkpoints, a report.

# %%
first, last = (run.metrics[index]["reward/mean"] for index in (0, -1))
print(f"mean reward {first:.2f} -> {last:.2f}; report: {run.report}")
for experience in run.experiences(step=20)[:3]:
    print(repr(experience.response), experience.reward)

# %% [markdown]
# The same run as a file, for `rollmill run` on a larger machine:

# %%
print(run.to_yaml())
