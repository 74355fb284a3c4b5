"""Tests of `hsdp.unit`."""
