"""An agent that knows nothing but the openai client: it plays a guessing game with the model behind OPENAI_BASE_URL."""

import json
import sys

import openai

task = json.load(sys.stdin)
secret, client = int(task["answer"]), openai.OpenAI()
messages = [{"role": "user", "content": "0-9?"}]
guesses = []
for _ in range(5):
    reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=1).choices[0].message
    guesses.append(reply.content or "-")
    if guesses[-1] == str(secret):
        break
    hint = "0-9?" if not guesses[-1].isdecimal() else "more" if int(guesses[-1]) < secret else "less"
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": hint}]
print(" ".join(guesses))
