"""Attribution of attention scores and logits to heads, MLPs and embeddings."""
