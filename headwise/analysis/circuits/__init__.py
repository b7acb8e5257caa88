"""Circuits: the set of heads, MLPs and embeddings that carries a task, judged on held-out prompts."""
