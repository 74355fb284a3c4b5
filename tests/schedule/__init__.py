"""Tests of `hsdp.schedule`."""
