"""Planted bugs, and the tests that each is found: what shows that the other tests test something."""
