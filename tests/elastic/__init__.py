"""Tests of `hsdp.elastic`."""
