"""Tests of `hsdp.comm`."""
