"""Examples: `train_lm`, the main job, and small one-page ones."""
