"""Tests of `hsdp.weights`."""
