"""Tests of `hsdp.api`."""
