"""Benchmarks: hsdp beside `torch.distributed.fsdp.fully_shard`, in one run, as ratios. `python -m benchmarks.NAME`."""
