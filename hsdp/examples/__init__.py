"""Programs that train with hsdp, from one page up to the main job, `train_lm`."""
