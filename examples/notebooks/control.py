"""The source of control.ipynb: docs/notebooks.py writes it."""

# %% [markdown]
# # Steering a run
#
# Two rewards, a callback that changes their weights while the run trains, and the same run again from the record of
# what the callback did. Then the result is evaluated and served.

# %%
import rollmill

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
model = {"new": {"hidden_size": 64, "layers": 1, "heads": 2, "context": 64, "tokenizer": {"kind": "char"}}}


def is_number(task, completion):
    return float(completion.text.strip().isdigit())


def brief(task, completion):
    return 1.0 - len(completion.text) / 6


# %% [markdown]
# Brevity counts until most completions are numbers; then only they count. A change holds from the next step on.


# %%
class NumbersFirst(rollmill.Callback):
    def on_step(self, run, metrics):
        if run.step == 6:
            run.set_reward_weight("brief", 0.0)
            run.set_learning_rate(1e-3)


settings = {"model": model, "dataset": rows, "rewards": [is_number, brief], "steps": 12, "batch": 8, "lr": 3e-3}
first = rollmill.GRPO(**settings, max_new_tokens=6, callbacks=[NumbersFirst()]).train()
print(first.changes)

# %% [markdown]
# `changes` of the recorded run make another one equal, without the callback:

# %%
second = rollmill.GRPO(**settings, max_new_tokens=6, changes=first.changes).train()
assert [row["loss"] for row in second.metrics] == [row["loss"] for row in first.metrics]

# %% [markdown]
# Evaluating, and grading texts that are there already:

# %%
print(rollmill.evaluate(second, dataset=rows[:20], rewards=[is_number], samples=2, max_new_tokens=6))
print([result.reward for result in rollmill.grade([{"response": "12"}, {"response": "twelve"}], [is_number])])
