"""Roles of the heads of a small ViT trained on drawn shapes, compared with untrained models.

python -m bench.images                    train (about 7 minutes on one core), then measure; the folder is reused
python -m bench.images --out DIR          folder of the model, the images and the report (default .lab/images)

An image has one large shape (circle, square, triangle or cross) and one small mark (a dot or a bar) at random positions over
a gray gradient. The label is the pair of shape and mark, eight classes. Protocol, fixed before the first run: seed 0 for
training and 1 for the measured images; roles, thresholds and correction of hw.profile; a head counts if its role has evidence
on the held-out half of the images; importance is the increase of the loss on 512 held-out images by zero ablation, compared
with the other heads of the layer. Random models with seeds 10 to 15 are profiled on the same images; the expected number of
their heads with a role is 0.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SIZE, PATCH = 48, 6  # pixels: 8 by 8 patches
SHAPES, MARKS = ("circle", "square", "triangle", "cross"), ("dot", "bar")
STEPS, BATCH, HELD_OUT, PROFILED = 4000, 64, 512, 128


def draw_image(rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Draw one image, (height, width) from 0 to 1. Return it with its class."""
    y, x = np.mgrid[0:SIZE, 0:SIZE].astype(float)
    angle = rng.uniform(0, 2 * np.pi)
    image = 0.25 + 0.15 * (np.cos(angle) * (x / SIZE - 0.5) + np.sin(angle) * (y / SIZE - 0.5))
    shape, mark, r = int(rng.integers(4)), int(rng.integers(2)), rng.uniform(9, 13)
    cx, cy = rng.uniform(r, SIZE - r, 2)
    dx, dy = x - cx, y - cy
    inside = (
        np.hypot(dx, dy) < r,
        np.maximum(abs(dx), abs(dy)) < 0.85 * r,
        (dy < 0.7 * r) & (dy > -r + 1.9 * abs(dx)),
        ((abs(dx) < 0.3 * r) | (abs(dy) < 0.3 * r)) & (np.maximum(abs(dx), abs(dy)) < r),
    )[shape]
    image = np.where(inside, rng.uniform(0.6, 0.75), image)
    mx, my = rng.uniform(3, SIZE - 3, 2)
    small = np.hypot(x - mx, y - my) < 1.8 if mark == 0 else (abs(x - mx) < 3.2) & (abs(y - my) < 0.9)
    image = np.where(small, 1.0, image) + rng.normal(0, 0.03, image.shape)
    return image.clip(0, 1), 2 * shape + mark


def make_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images for the model, (N, 1, height, width) from -1 to 1, and their classes, (N,)."""
    rng = np.random.default_rng(seed)
    samples = [draw_image(rng) for _ in range(count)]
    pixels = np.rint(np.stack([image for image, _ in samples]) * 255) / 255  # 8-bit values, as in a file
    return torch.tensor(pixels[:, None], dtype=torch.float32) * 2 - 1, torch.tensor([label for _, label in samples])


def build(seed: int) -> Any:
    """Return the model: 3 layers of 4 heads, 64 patches and a class token."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, image_size=SIZE, patch_size=PATCH,
        num_channels=1, num_labels=len(SHAPES) * len(MARKS),  # pyright: ignore[reportCallIssue]  # every configuration has it
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def train(model: Any, steps: int = STEPS) -> None:
    """Train with AdamW, warmup and cosine decay on newly drawn images."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    model.train()
    for step in range(steps):
        pixels, labels = make_images(BATCH, 1_000 + step)
        loss = model(pixel_values=pixels, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 100 == 0:
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)
    model.eval()


@torch.no_grad()
def evaluate(model: Any, pixels: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the loss and the accuracy."""
    parts = [model(pixel_values=batch).logits for batch in pixels.split(128)]
    logits = torch.cat(parts)
    return float(torch.nn.functional.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).float().mean())


def save(model: Any, out: Path, pixels: Tensor) -> None:
    """Save the model and example images."""
    from headwise.io.images import ImagePreprocessor, to_png

    model.save_pretrained(out / "model")
    ImagePreprocessor((SIZE, SIZE), mean=(0.5,), std=(0.5,)).save(out / "model")
    (out / "pictures").mkdir(exist_ok=True)
    for index, image in enumerate(pixels):
        gray = np.rint((image[0].numpy() + 1) / 2 * 255).astype(np.uint8)
        (out / "pictures" / f"{index:03}.png").write_bytes(to_png(gray[..., None].repeat(3, -1)))


def main() -> None:
    """Train or load the model, and measure it."""
    import headwise as hw

    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(".lab/images"))
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    profile_pixels, _ = make_images(PROFILED, 1)
    eval_pixels, labels = make_images(HELD_OUT, 2)
    if not (out / "model" / "config.json").is_file():
        out.mkdir(parents=True, exist_ok=True)
        model, start = build(0), time.process_time()
        train(model)
        print(f"trained in {time.process_time() - start:.0f} s of CPU time")
        save(model, out, profile_pixels)
    attached = hw.load(out / "model")
    untyped: Any = attached
    full_loss, right = evaluate(untyped.model, eval_pixels, labels)
    print(f"held-out loss {full_loss:.3f}, accuracy {right:.3f} on {HELD_OUT} images")
    start = time.process_time()
    profile = hw.profile(attached, out / "pictures")
    took = time.process_time() - start
    print(f"profile: {len(profile)} heads, {PROFILED} images, {took:.1f} s of CPU time, {profile.family_size} tests")
    ablated = {}
    for head in profile.addresses:
        with attached.heads[str(head)].silenced():
            ablated[str(head)] = evaluate(untyped.model, eval_pixels, labels)
    lines = []
    for head in profile:
        others = [
            ablated[str(entry)][0] - full_loss
            for entry in profile.addresses
            if entry.layer_address == head.address.layer_address and entry != head.address
        ]
        roles = [
            f"{entry.role} {entry.evidence_level} {entry.score:.2f}/{entry.baseline:.2f} p {entry.p:.4f}"
            for entry in head.roles
        ]
        cost = ablated[str(head.address)][0] - full_loss
        lines.append(
            f"{head.address} {'; '.join(roles) or 'unclear'} | rests {','.join(head.idle_pattern) or '-'} | distance "
            f"{head.metrics['distance']:.2f} of {head.metrics['uniform distance']:.2f} | class "
            f"{head.metrics['class token']:.2f} | cost {cost:+.3f} (others {np.mean(others):+.3f}), right "
            f"{ablated[str(head.address)][1]:.3f}"
        )
    print("\n".join(lines))
    false_positives = []
    for seed in range(10, 16):
        with hw.attach(build(seed).eval()) as random:
            random_profile = hw.profile(random, profile_pixels)
            false_positives.append(sum(bool(head.roles) for head in random_profile))
    print(f"random models, number of heads with a role (of {len(profile)}): {false_positives}")
    profile.save(out / "heads.npz")
    profile.report(out / "heads.html", attached, name="shapes", sentences=sorted((out / "pictures").glob("*.png"))[:6])
    (out / "told.json").write_text(
        json.dumps({"heads": lines, "alarms": false_positives, "loss": full_loss, "right": right})
    )


if __name__ == "__main__":
    main()
