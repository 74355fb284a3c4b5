"""Tests of `hsdp.buffers`."""
