"""The caller's side: prompts in, text out, from any thread."""
