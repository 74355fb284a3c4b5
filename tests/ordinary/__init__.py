"""Ordinary programs of users, each beside its twin on one device."""
