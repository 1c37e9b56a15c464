"""Rules on the text of a completion: form, language, length, repetition, citations, tool calls."""
