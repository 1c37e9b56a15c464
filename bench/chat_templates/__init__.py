"""Real chat templates, stand-in tokenizers for them, and a judge that compares the renderer with transformers."""
