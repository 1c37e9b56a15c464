"""Parts of the reward `code`: tests, their execution in the sandbox, comparison of outputs."""
