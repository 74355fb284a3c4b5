"""Tests of `hsdp.params`."""
