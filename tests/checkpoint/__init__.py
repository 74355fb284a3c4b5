"""Tests of `hsdp.checkpoint`."""
