"""Tests of `hsdp.planning`."""
