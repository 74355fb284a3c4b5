"""Tests of `hsdp.tracing`."""
