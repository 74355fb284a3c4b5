"""Tests of `hsdp.examples`."""
