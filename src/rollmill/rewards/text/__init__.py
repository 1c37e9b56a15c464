"""Text rewards share this: words, code blocks, JSON and its schemas."""
