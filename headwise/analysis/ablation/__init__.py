"""Ablation: replace the output of heads and measure the effect on the loss."""
